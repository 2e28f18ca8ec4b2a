// Bundles: bytes as a reader meets them, and, because no mutation gets past a checksum, an index
// and contents that lie under checksums that are right.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <span>
#include <utility>

#include "base/compress.h"
#include "base/hash.h"
#include "base/json.h"
#include "fuzz.h"
#include "plan/bundle.h"

namespace lawson::plan {
namespace {

using fuzz::require;

constexpr std::size_t kRecordBytes = 8;  // of an input, for each plan

void append(std::string& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>((value >> (8 * i)) & 0xFF);
}

// Takes what is there, then zeros.
class Input {
 public:
  explicit Input(std::string_view text) : text_{text} {}
  std::uint64_t byte() {
    const std::string_view one = take(1);
    return one.empty() ? 0 : static_cast<unsigned char>(one[0]);
  }
  std::uint64_t small() { return static_cast<std::uint64_t>(static_cast<std::int8_t>(byte())); }
  std::string_view take(std::size_t size) {
    const std::string_view taken = text_.substr(0, size);
    text_.remove_prefix(taken.size());
    return taken;
  }

 private:
  std::string_view text_;
};

std::string sealed_plan(std::string_view cbor) {
  std::string text = "LAWSONP1";
  append(text, cbor.size(), 8);
  text += cbor;
  return text + hash_hex(text);
}

// A zstd frame (RFC 8878) of one raw block: packing would take most of the time.
std::string frame_of(std::string_view content) {
  std::string frame = "\x28\xB5\x2F\xFD\xA0";  // its size comes in 4 bytes, and no window
  append(frame, content.size(), 4);
  append(frame, content.size() << 3 | 1, 3);  // the last block
  frame += content;
  return frame;
}

// The layout as bundle.h says it, written a second time. An input of this kind: how many plans,
// the origins and their size, what each record says more than is true, and each plan's content.
std::string sealed(std::string_view given) {
  Input input{given};
  const std::size_t count = input.byte() % 4;
  const std::string_view origins = input.take(input.byte());
  std::vector<std::string_view> records;
  for (std::size_t i = 0; i < count; ++i) records.push_back(input.take(kRecordBytes));
  std::vector<std::pair<std::string, std::size_t>> frames;  // and the size of what is in it
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t kind = input.byte() % 3;
    const std::uint64_t size = input.byte() | input.byte() << 8;
    const std::string_view content = input.take(static_cast<std::size_t>(size));
    const std::string plain = kind == 2 ? sealed_plan(content) : std::string{content};
    frames.emplace_back(kind == 0 ? plain : frame_of(plain), plain.size());
  }
  const std::uint64_t begin = 64 + 128 * count + origins.size();
  std::uint64_t offset = begin;
  std::string index;
  for (std::size_t i = 0; i < count; ++i) {
    Input record{records[i]};
    const auto& [frame, size] = frames[i];
    index += hash_hex("key").replace(0, 1, 1, static_cast<char>('0' + record.byte() % 32));
    index += hash_hex("plan id").replace(0, 1, 1, static_cast<char>('0' + record.byte() % 32));
    index += hash_hex(frame);
    append(index, offset + record.small(), 8);
    append(index, frame.size() + record.small(), 8);
    append(index, size + record.small(), 8);
    append(index, record.byte(), 4);
    append(index, record.byte(), 4);
    offset += frame.size();
  }
  index += origins;
  std::string file = "LAWSONB2";
  append(file, offset, 8);
  append(file, count, 8);
  append(file, origins.size(), 8);
  file += hash_hex(file + index) + index;
  for (const auto& [frame, size] : frames) file += frame;
  return file;
}

std::string path_of(std::string_view bytes) {
  static const int file = ::memfd_create("bundle", 0);
  require(::ftruncate(file, 0) == 0 &&
              ::pwrite(file, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()),
          "the file can be written");
  return "/proc/self/fd/" + std::to_string(file);
}

// What can be read is consistent, and what cannot is the input's fault.
void look_at(std::string_view bytes) {
  const auto bundle = Bundle::open(path_of(bytes));
  if (!bundle.ok()) {
    require(bundle.error().kind == ErrorKind::invalid_argument, "a bad bundle is bad input");
    return;
  }
  for (std::size_t i = 0; i < bundle->size(); ++i) {
    const BundleEntry entry = bundle->entry(i);
    const auto found = bundle->find(entry.key);
    require(found && *found <= i && bundle->entry(*found).key == entry.key, "keys are found");
    require(i == 0 || bundle->entry(i - 1).key <= entry.key, "keys are in order");
    const auto plan = bundle->plan(i);
    if (!plan.ok()) {
      require(plan.error().kind == ErrorKind::invalid_argument, "a bad plan is bad input");
      continue;
    }
    require(plan->key == entry.key && plan->plan_id == entry.plan_id &&
                plan->engine == entry.origin->engine,
            "a plan is what the index says");
    require(plan_from_bytes(plan_to_bytes(*plan)).ok(), "a plan can be written and read again");
  }
  require(!bundle->plan(bundle->size()).ok(), "there are no more plans");
}

std::vector<std::string> seeds() {
  Plan plan;
  plan.key = hash_hex("key").replace(0, 1, "0");
  plan.plan_id = hash_hex("plan id").replace(0, 1, "0");
  plan.engine = "cudnn";
  plan.engine_version = "9.19.0";
  plan.target = "h200";
  plan.device_fingerprint = hash_hex("h200");
  plan.plan_name = "eng9_k1=2";
  plan.graph_json = R"({"lawson": 1})";
  plan.bytes.resize(64);
  Plan second = plan;
  second.key[0] = '1';
  second.plan_id[0] = '1';

  std::string origins;
  Json::to_cbor(
      Json::array({{plan.target, plan.engine, plan.engine_version, plan.device_fingerprint}}),
      origins);
  const auto cbor_of = [](const Plan& of) {
    const std::vector<std::byte> bytes = plan_to_bytes(of);
    const std::string text{reinterpret_cast<const char*>(bytes.data()), bytes.size()};
    return text.substr(16, text.size() - 16 - 32);
  };
  const auto input_of = [&](std::uint64_t kind, const std::vector<std::string>& contents) {
    std::string input;
    append(input, contents.size(), 1);
    append(input, origins.size(), 1);
    input += origins;
    for (std::size_t i = 0; i < contents.size(); ++i) {
      append(input, i, 1);
      append(input, i, 1);
      append(input, 0, static_cast<int>(kRecordBytes) - 2);
    }
    for (const std::string& content : contents) {
      append(input, kind, 1);
      append(input, content.size(), 2);
      input += content;
    }
    return input;
  };
  const std::vector<std::string> inputs{
      input_of(0, {}), input_of(2, {cbor_of(plan)}), input_of(2, {cbor_of(plan), cbor_of(second)}),
      input_of(1, {"no plan"}), input_of(0, {compress(sealed_plan(cbor_of(plan))).value()})};
  std::vector<std::string> all = inputs;
  for (const std::string& input : inputs) all.push_back(sealed(input));
  require(Bundle::open(path_of(sealed(inputs[2])))->plan(1).ok(), "the seed is a bundle");
  return all;
}

}  // namespace
}  // namespace lawson::plan

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  lawson::fuzz::write_seeds_if_asked(*argc, *argv, lawson::plan::seeds());
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input{reinterpret_cast<const char*>(data), size};
  lawson::plan::look_at(input);
  lawson::plan::look_at(lawson::plan::sealed(input));
  return 0;
}
