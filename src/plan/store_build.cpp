#include "plan/store_build.h"

#include <elf.h>
#include <fmt/format.h>
#include <link.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/lazy.h"

namespace lawson::plan {
namespace {

constexpr std::size_t kShownBytes = 8;  // of the 20 that an identity usually has

struct Search {
  std::uintptr_t inside = 0;  // an address within the object that is looked for
  std::string id;
};

// Notes are name size, content size, type, then name and content, each filled up to 4 bytes.
std::string id_among_notes(std::string_view notes) {
  const auto filled = [](std::size_t size) { return (size + 3) / 4 * 4; };
  while (notes.size() >= sizeof(ElfW(Nhdr))) {
    ElfW(Nhdr) head{};
    std::memcpy(&head, notes.data(), sizeof(head));
    const std::size_t content_at = sizeof(head) + filled(head.n_namesz);
    const std::size_t end = content_at + filled(head.n_descsz);
    if (end > notes.size()) return {};
    if (head.n_type == NT_GNU_BUILD_ID &&
        notes.substr(sizeof(head), 4) == std::string_view{"GNU\0", 4}) {
      std::string id;
      for (const char c :
           notes.substr(content_at, std::min<std::size_t>(head.n_descsz, kShownBytes))) {
        id += fmt::format("{:02x}", static_cast<unsigned char>(c));
      }
      return id;
    }
    notes.remove_prefix(end);
  }
  return {};
}

int look_at_object(dl_phdr_info* object, std::size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  bool is_it = false;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = object->dlpi_phdr[i];
    const std::uintptr_t begin = object->dlpi_addr + part.p_vaddr;
    is_it = is_it || (part.p_type == PT_LOAD && search.inside >= begin &&
                      search.inside - begin < part.p_memsz);
  }
  if (!is_it) return 0;
  for (int i = 0; i < object->dlpi_phnum && search.id.empty(); ++i) {
    const ElfW(Phdr)& part = object->dlpi_phdr[i];
    if (part.p_type != PT_NOTE) continue;
    const auto* notes = reinterpret_cast<const char*>(object->dlpi_addr + part.p_vaddr);
    search.id = id_among_notes({notes, part.p_memsz});
  }
  return 1;
}

std::string find_build() {
  Search search{std::bit_cast<std::uintptr_t>(&library_build), {}};
  dl_iterate_phdr(&look_at_object, &search);
  const std::string version = LAWSON_VERSION_TEXT;
  return search.id.empty() ? version : version + '+' + search.id;
}

}  // namespace

const std::string& library_build() {
  static Lazy<const std::string> build;
  return build.get(find_build);
}

}  // namespace lawson::plan
