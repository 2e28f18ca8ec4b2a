#include "engine/cudnn/loader.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <new>
#include <optional>
#include <string_view>

#include "base/lazy.h"
#include "base/process.h"

namespace fs = std::filesystem;

namespace lawson::cudnn {
namespace {

// A child that is forked while another thread is inside glibc's dlopen cannot use dlopen any more
// (it crashes in the loader's cache): a fork waits until nobody is in ours.
std::recursive_mutex& opening() {
  static Lazy<std::recursive_mutex> mutex;
  return mutex.get();
}
// The child's thread is another one to the mutex than the one that locked it: it gets a new mutex.
[[maybe_unused]] const bool kForks =
    at_fork({[] { opening().lock(); }, [] { opening().unlock(); },
             [] { ::new (static_cast<void*>(&opening())) std::recursive_mutex; }});

void* open_file(const char* file, int flags) {
  const std::lock_guard lock{opening()};
  return ::dlopen(file, flags);
}

constexpr auto kOwnMachine =
#if defined(__aarch64__)
    EM_AARCH64;
#else
    EM_X86_64;
#endif

// What the dynamic loader does not survive (it waits for a FIFO's writer, and a file that was cut
// short ends the process when a page behind its end is touched), or tells in other words.
Status check_file(const std::string& path) {
  const auto bad = [&](const std::string& why) {
    return error(ErrorKind::unavailable, "{} {}", path, why);
  };
  std::error_code code;
  if (!fs::is_regular_file(path, code)) return bad("is not a regular file");
  const std::uintmax_t size = fs::file_size(path, code);
  std::ifstream file{path, std::ios::binary};
  Elf64_Ehdr header{};
  const bool is_elf = file.read(reinterpret_cast<char*>(&header), sizeof(header)) &&
                      std::string_view{reinterpret_cast<const char*>(header.e_ident), SELFMAG} ==
                          std::string_view{ELFMAG, SELFMAG} &&
                      header.e_ident[EI_CLASS] == ELFCLASS64 &&
                      header.e_phentsize == sizeof(Elf64_Phdr);
  if (!is_elf) return bad("is not a library for this machine");
  if (header.e_machine != kOwnMachine) {
    return bad(fmt::format("is a library for another machine (ELF machine {})", header.e_machine));
  }
  std::vector<Elf64_Phdr> segments(header.e_phnum);
  file.seekg(static_cast<std::streamoff>(header.e_phoff));
  if (!file.read(reinterpret_cast<char*>(segments.data()),
                 static_cast<std::streamsize>(segments.size() * sizeof(Elf64_Phdr)))) {
    return bad("is truncated");
  }
  for (const Elf64_Phdr& segment : segments) {
    if (segment.p_type != PT_LOAD) continue;
    if (segment.p_filesz > size || segment.p_offset > size - segment.p_filesz) {
      return bad(fmt::format("is truncated: it has {} bytes of at least {}", size,
                             segment.p_offset + segment.p_filesz));
    }
  }
  return {};
}

struct Place {
  std::string folder;
  std::string rule;
};

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string{} : std::string{value};
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const auto end = text.find(separator);
    if (end != 0) parts.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  return parts;
}

// Sub-folders of `parent` whose name starts with `prefix`, newest name first.
std::vector<fs::path> children(const fs::path& parent, std::string_view prefix) {
  std::vector<fs::path> found;
  std::error_code code;
  for (fs::directory_iterator it{parent, code}, end; !code && it != end; it.increment(code)) {
    if (it->path().filename().string().starts_with(prefix)) found.push_back(it->path());
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

void add_sites(const fs::path& prefix, const std::string& rule, std::vector<Place>& sites) {
  for (const fs::path& lib : {prefix / "lib", prefix / "local" / "lib"}) {
    for (const fs::path& python : children(lib, "python3")) {
      for (const char* name : {"site-packages", "dist-packages"}) {
        std::error_code code;
        if (fs::is_directory(python / name / "nvidia", code)) {
          sites.push_back({(python / name).string(), rule});
        }
      }
    }
  }
}

// Folders with Python packages: the active virtual environment's and the python3 on PATH's.
std::vector<Place> python_sites() {
  std::vector<Place> sites;
  const std::string active = environment("VIRTUAL_ENV");
  if (!active.empty()) add_sites(active, "$VIRTUAL_ENV", sites);
  for (const std::string& folder : split(environment("PATH"), ':')) {
    std::error_code code;
    const fs::path python = fs::path{folder} / "python3";
    if (!fs::exists(python, code)) continue;
    fs::path prefix = fs::path{folder}.parent_path();
    if (fs::path{folder}.filename() == "shims") {  // pyenv: the version in use is in a file
      std::ifstream file{prefix / "version"};
      std::string version;
      if (std::getline(file, version)) prefix = prefix / "versions" / version;
    }
    add_sites(prefix, "python3 on PATH", sites);
    break;
  }
  return sites;
}

// Where a library may be; `packages` are the folders below a site-packages that hold it.
std::vector<Place> places(const std::vector<std::string>& packages) {
  std::vector<Place> found;
  for (const Place& site : python_sites()) {
    for (const std::string& package : packages) {
      found.push_back({site.folder + "/nvidia/" + package + "/lib", site.rule});
    }
  }
  for (const std::string& hint : split(LAWSON_CUDNN_HINTS, ':')) {
    found.push_back({hint, "found when Lawson was built"});
  }
  std::vector<fs::path> toolkits;
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const std::string toolkit = environment(variable); !toolkit.empty()) {
      toolkits.emplace_back(toolkit);
    }
  }
  for (fs::path& toolkit : children("/usr/local", "cuda")) toolkits.push_back(std::move(toolkit));
  for (const fs::path& toolkit : toolkits) {
    for (const char* lib : {"lib64", "lib"}) {
      found.push_back({(toolkit / lib).string(), "CUDA toolkit"});
    }
  }
  return found;
}

// Paths of the loaded libraries whose file name starts with `stem`.
std::vector<std::string> loaded_paths(std::string_view stem) {
  struct Search {
    std::string_view stem;
    std::vector<std::string> paths;
  } search{stem, {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        auto& wanted = *static_cast<Search*>(data);
        const std::string_view path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        const auto slash = path.rfind('/');
        const auto name = slash == std::string_view::npos ? path : path.substr(slash + 1);
        if (name.starts_with(wanted.stem)) wanted.paths.emplace_back(path);
        return 0;
      },
      &search);
  return search.paths;
}

std::string canonical(const std::string& path) {
  std::error_code code;
  const fs::path real = fs::canonical(path, code);
  return code ? path : real.string();
}

std::string loader_message() {
  const char* message = dlerror();
  return message == nullptr ? "unknown reason" : message;
}

std::string path_of(void* handle, const std::string& fallback) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr && map->l_name != nullptr &&
      *map->l_name != '\0') {
    return map->l_name;
  }
  return fallback;
}

std::string& chosen_cudnn() {
  static Lazy<std::string> path;
  return path.get();
}

struct Wanted {
  std::string title;                  // "cuDNN"
  std::string variable;               // "LAWSON_CUDNN"; "" where there is no override
  std::string file;                   // "libcudnn.so.9"
  std::string loaded_stem;            // "libcudnn.so"
  std::vector<std::string> packages;  // below site-packages/nvidia
  std::string package_hint;           // what to install
  std::vector<Place> first;           // places before all others
  std::string chosen = {};            // the caller's own choice, before every other rule
};

// The file that an override names: the file itself, or the one in that folder.
Result<std::string> overridden_file(const Wanted& wanted, const std::string& value) {
  std::error_code code;
  if (fs::is_directory(value, code)) {
    for (const char* below : {"", "lib", "lib64"}) {
      const fs::path file = fs::path{value} / below / wanted.file;
      if (fs::exists(file, code)) return file.string();
    }
    return error(ErrorKind::unavailable, "{}={}: that folder has no {}", wanted.variable, value,
                 wanted.file);
  }
  if (!fs::exists(value, code)) {
    return error(ErrorKind::unavailable, "{}={}: no such file or folder", wanted.variable, value);
  }
  return value;
}

Result<Library> open_override(const Wanted& wanted, const std::string& value) {
  LAWSON_TRY(const std::string file, overridden_file(wanted, value));
  for (const std::string& loaded : loaded_paths(wanted.loaded_stem)) {
    if (canonical(loaded) != canonical(file)) {
      return error(
          ErrorKind::unavailable,
          "{}={} asks for {}, but this process has already loaded {}: two {} builds in one "
          "process do not work; unset {} or start the process with that library",
          wanted.variable, value, file, loaded, wanted.title, wanted.variable);
    }
  }
  if (const Status usable = check_file(file); !usable.ok()) {
    return error(ErrorKind::unavailable, "{}={}: cannot load it: {}", wanted.variable, value,
                 usable.error().message);
  }
  void* handle = open_file(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return error(ErrorKind::unavailable, "{}={}: cannot load it: {}", wanted.variable, value,
                 loader_message());
  }
  return Library{path_of(handle, file), "", wanted.variable, handle};
}

Result<Library> open_library(const Wanted& wanted) {
  if (!wanted.chosen.empty()) return open_override(wanted, wanted.chosen);
  if (!wanted.variable.empty()) {
    if (const std::string value = environment(wanted.variable.c_str()); !value.empty()) {
      return open_override(wanted, value);
    }
  }
  for (const std::string& loaded : loaded_paths(wanted.loaded_stem)) {
    if (void* handle = open_file(loaded.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) {
      return Library{loaded, "", "already loaded in this process", handle};
    }
  }
  std::string searched;
  std::vector<Place> all = wanted.first;
  for (Place& place : places(wanted.packages)) all.push_back(std::move(place));
  for (const Place& place : all) {
    const std::string file = place.folder + "/" + wanted.file;
    std::error_code code;
    if (!fs::exists(file, code)) {
      searched += (searched.empty() ? "" : ", ") + place.folder;
      continue;
    }
    const Status usable = check_file(file);
    void* handle = usable.ok() ? open_file(file.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (handle != nullptr) return Library{path_of(handle, file), "", place.rule, handle};
    searched += fmt::format("{}{} (cannot load it: {})", searched.empty() ? "" : ", ", file,
                            usable.ok() ? loader_message() : usable.error().message);
  }
  if (void* handle = open_file(wanted.file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    return Library{path_of(handle, wanted.file), "", "system", handle};
  }
  return error(
      ErrorKind::unavailable,
      "{} ({}) was not found. Searched: {}, the system's library folders. {}{}", wanted.title,
      wanted.file, searched.empty() ? "nothing" : searched, wanted.package_hint,
      wanted.variable.empty() ? "" : ", or set " + wanted.variable + " to the file or folder");
}

Result<void*> symbol(const Library& library, const char* name) {
  void* address = dlsym(library.handle, name);
  if (address == nullptr) {
    return error(ErrorKind::unavailable, "{} is not what it seems: it has no {}", library.path,
                 name);
  }
  return address;
}

int cuda_major(const Library& cudnn) {
  using GetCudart = std::size_t (*)();
  const auto get = reinterpret_cast<GetCudart>(dlsym(cudnn.handle, "cudnnGetCudartVersion"));
  const int version = get == nullptr ? 0 : static_cast<int>(get());
  return version >= 1000 ? version / 1000 : 13;
}

// Folders where NVIDIA's packages put CUDA's libraries, seen from cuDNN's own folder.
std::vector<Place> beside(const Library& cudnn, int major) {
  const fs::path folder = fs::path{cudnn.path}.parent_path();
  const fs::path packages = folder.parent_path().parent_path();
  std::vector<Place> found{{folder.string(), "beside cuDNN"}};
  for (const std::string& name : {fmt::format("cu{}", major), std::string{"cuda_nvrtc"},
                                  std::string{"cuda_runtime"}, std::string{"cublas"}}) {
    found.push_back({(packages / name / "lib").string(), "beside cuDNN"});
  }
  return found;
}

Wanted wanted_cudnn() {
  const std::string& chosen = chosen_cudnn();
  return {"cuDNN",
          chosen.empty() ? "LAWSON_CUDNN" : "--cudnn",
          "libcudnn.so.9",
          "libcudnn.so",
          {"cudnn"},
          "Install cuDNN 9 (pip install nvidia-cudnn-cu13)",
          {},
          chosen};
}

Wanted wanted_nvrtc(const Library& cudnn, int major) {
  return {"NVRTC",
          "LAWSON_NVRTC",
          fmt::format("libnvrtc.so.{}", major),
          "libnvrtc.so",
          {fmt::format("cu{}", major), "cuda_nvrtc"},
          fmt::format("cuDNN compiles its kernels with it. Install NVRTC {0} (pip install "
                      "{1})",
                      major, major >= 13 ? "nvidia-cuda-nvrtc" : "nvidia-cuda-nvrtc-cu12"),
          beside(cudnn, major)};
}

Wanted wanted_cudart(const Library& cudnn, int major) {
  return {"the CUDA runtime",
          "",
          fmt::format("libcudart.so.{}", major),
          "libcudart.so",
          {fmt::format("cu{}", major), "cuda_runtime"},
          fmt::format("Install CUDA's runtime {} (pip install nvidia-cuda-runtime)", major),
          beside(cudnn, major)};
}

Result<std::vector<int>> supported_archs(const Library& nvrtc) {
  using Get = int (*)(int*);
  LAWSON_TRY(void* const count_address, symbol(nvrtc, "nvrtcGetNumSupportedArchs"));
  LAWSON_TRY(void* const archs_address, symbol(nvrtc, "nvrtcGetSupportedArchs"));
  const auto count_of = reinterpret_cast<Get>(count_address);
  const auto archs_of = reinterpret_cast<Get>(archs_address);
  int count = 0;
  std::vector<int> archs;
  if (count_of(&count) == 0 && count > 0) {
    archs.resize(static_cast<std::size_t>(count));
    if (archs_of(archs.data()) != 0) archs.clear();
  }
  if (archs.empty()) {
    return error(ErrorKind::unavailable, "{} does not say which architectures it compiles for",
                 nvrtc.path);
  }
  std::sort(archs.begin(), archs.end());
  return archs;
}

Result<Libraries> open_all() {
  Libraries found;
  LAWSON_TRY(found.cudnn, open_library(wanted_cudnn()));
  LAWSON_TRY(void* const version_address, symbol(found.cudnn, "cudnnGetVersion"));
  found.cudnn_version = static_cast<int>(reinterpret_cast<std::size_t (*)()>(version_address)());
  found.cudnn.version = version_text(found.cudnn_version);
  if (found.cudnn_version < 90800) {
    return error(ErrorKind::unavailable,
                 "{} is cuDNN {}: Lawson needs 9.8 or later, which can judge for a GPU that is not "
                 "present",
                 found.cudnn.path, found.cudnn.version);
  }
  const int major = cuda_major(found.cudnn);
  LAWSON_TRY(found.nvrtc, open_library(wanted_nvrtc(found.cudnn, major)));
  LAWSON_TRY(void* const nvrtc_version, symbol(found.nvrtc, "nvrtcVersion"));
  int nvrtc_major = 0;
  int nvrtc_minor = 0;
  reinterpret_cast<int (*)(int*, int*)>(nvrtc_version)(&nvrtc_major, &nvrtc_minor);
  found.nvrtc.version = fmt::format("{}.{}", nvrtc_major, nvrtc_minor);
  if (nvrtc_major != major) {
    return error(ErrorKind::unavailable,
                 "{} is NVRTC {}, but {} was built for CUDA {}: their major versions must be equal",
                 found.nvrtc.path, found.nvrtc.version, found.cudnn.path, major);
  }
  // NVRTC opens its built-ins by bare name and has no run path, so that where it is not in the
  // system's library folders (Python packages) only an already loaded copy is found.
  const std::string builtins = fmt::format("libnvrtc-builtins.so.{}", found.nvrtc.version);
  open_file((fs::path{found.nvrtc.path}.parent_path() / builtins).c_str(), RTLD_NOW | RTLD_LOCAL);
  LAWSON_TRY(found.nvrtc_archs, supported_archs(found.nvrtc));
  return found;
}

std::mutex& state_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::optional<Libraries>& state() {
  static Lazy<std::optional<Libraries>> libraries;
  return libraries.get();
}

bool deviceless = false;      // guarded by state_mutex()
std::string nodriver_folder;  // where the stand-ins are; guarded by state_mutex()

Wanted wanted_cublaslt(const Library& cudnn, int major) {
  return {"cuBLASLt",
          "",
          fmt::format("libcublasLt.so.{}", major),
          "libcublasLt.so",
          {fmt::format("cu{}", major), "cublas"},
          fmt::format("cuDNN's engine for plain matrix products needs it. Install cuBLAS {} (pip "
                      "install {})",
                      major, major >= 13 ? "nvidia-cublas" : "nvidia-cublas-cu12"),
          beside(cudnn, major)};
}

// cuDNN asks for cuBLASLt by name, so that having it loaded is enough.
Status load_cublaslt() {
  LAWSON_TRY(const Libraries* found, libraries());
  const int major = cuda_major(found->cudnn);
  std::string folder;
  {
    const std::lock_guard lock{state_mutex()};
    if (deviceless && major == 13) folder = nodriver_folder;
  }
  if (!folder.empty()) {
    const std::string file = folder + "/liblawson-nocublaslt.so";
    if (open_file(file.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr) return {};
  }
  LAWSON_CHECK(open_library(wanted_cublaslt(found->cudnn, major)));
  return {};
}

}  // namespace

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

Result<const Libraries*> libraries() {
  const std::lock_guard lock{state_mutex()};
  if (!state()) {
    LAWSON_TRY(Libraries opened, open_all());
    state() = std::move(opened);
  }
  LAWSON_CHECK(check_one_cudnn());
  return &*state();
}

Status check_one_cudnn() {
  std::string first;
  for (const std::string& path : loaded_paths("libcudnn")) {
    if (first.empty()) {
      first = path;
      continue;
    }
    const auto folder = [](const std::string& file) {
      return fs::path{canonical(file)}.parent_path();
    };
    if (folder(path) != folder(first)) {
      return error(
          ErrorKind::unavailable,
          "two cuDNN builds are loaded in this process, {} and {}: their parts do not work "
          "together; keep one of them (LD_LIBRARY_PATH, LAWSON_CUDNN and the installed "
          "packages decide which is found)",
          first, path);
    }
  }
  return {};
}

void choose_cudnn(const std::string& path) {
  const std::lock_guard lock{state_mutex()};
  chosen_cudnn() = path;
}

Status enter_deviceless(const std::string& nodriver_path) {
  const std::lock_guard lock{state_mutex()};
  if (deviceless) return {};
  for (const std::string& loaded : loaded_paths("libcuda.so")) {
    return error(ErrorKind::unavailable,
                 "this process has the driver library {} loaded: a process judges either for its "
                 "own GPU or for targets",
                 loaded);
  }
  if (open_file(nodriver_path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    return error(ErrorKind::unavailable, "cannot load Lawson's no-driver library: {}",
                 loader_message());
  }
  deviceless = true;
  nodriver_folder = fs::path{nodriver_path}.parent_path().string();
  return {};
}

Status need_cublaslt() {
  static std::mutex mutex;
  static bool loaded = false;
  const std::lock_guard lock{mutex};
  if (!loaded) {
    LAWSON_CHECK(load_cublaslt());
    loaded = true;
  }
  return {};
}

bool is_deviceless() {
  const std::lock_guard lock{state_mutex()};
  return deviceless;
}

Result<void*> driver() {
  if (void* handle = open_file("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) return handle;
  return error(ErrorKind::unavailable,
               "no NVIDIA driver on this machine: {}. Running on a GPU needs the driver "
               "(libcuda.so.1); judging and compiling for a target do not",
               loader_message());
}

void* open_for_frontend(const char* name, int flags) {
  const std::string_view wanted{name};
  if (!wanted.starts_with("libcudart.so")) return open_file(name, flags);
  const auto opened = libraries();
  if (!opened.ok()) return nullptr;
  const int major = cuda_major((*opened)->cudnn);
  if (wanted != fmt::format("libcudart.so.{}", major)) return nullptr;
  const auto cudart = open_library(wanted_cudart((*opened)->cudnn, major));
  return cudart.ok() ? cudart->handle : nullptr;
}

Json library_report() {
  const auto opened = libraries();
  if (!opened.ok()) return Json{{"error", opened.error().message}};
  const Libraries& found = **opened;
  const auto describe = [](const Library& library) {
    return Json{{"path", library.path}, {"version", library.version}, {"found", library.found}};
  };
  Json report{{"cudnn", describe(found.cudnn)}, {"nvrtc", describe(found.nvrtc)}};
  report["nvrtc"]["architectures"] = found.nvrtc_archs;
  return report;
}

}  // namespace lawson::cudnn
