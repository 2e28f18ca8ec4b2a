#include "input.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "terminal.h"

namespace lawson::cli {
namespace {

constexpr std::size_t kMaxDocumentBytes = std::size_t{8} << 20;

struct Descriptor {
  int value;
  ~Descriptor() {
    if (value > STDERR_FILENO) close(value);
  }
};

std::string error_text() {
  return std::strerror(errno);
}

std::string read_all(const std::string& source, int descriptor) {
  std::string text;
  std::string block(std::size_t{1} << 16, '\0');
  while (true) {
    const ssize_t got = read(descriptor, block.data(), block.size());
    if (got == 0) return text;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw bad_input(fmt::format("{}: cannot be read ({})", source, error_text()));
    text.append(block, 0, static_cast<std::size_t>(got));
    if (text.size() > kMaxDocumentBytes) {
      throw bad_input(fmt::format("{}: larger than {} bytes, the most that is read", source,
                                  kMaxDocumentBytes));
    }
  }
}

// Stops at the first sign: a top-level field "lawson".
class SpecDetector : public nlohmann::json_sax<Json> {
 public:
  bool found() const { return found_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return ++depth_ < kMaxDepth; }
  bool end_object() override { return --depth_ >= 0; }
  bool start_array(std::size_t) override { return ++depth_ < kMaxDepth; }
  bool end_array() override { return --depth_ >= 0; }
  bool key(string_t& name) override {
    found_ = found_ || (depth_ == 1 && name == "lawson");
    return !found_;
  }
  bool parse_error(std::size_t, const std::string&, const Json::exception&) override {
    return false;
  }

 private:
  static constexpr int kMaxDepth = 256;
  int depth_ = 0;
  bool found_ = false;
};

}  // namespace

Document read_document(const std::string& path) {
  if (path == "-") return {"<stdin>", read_all("<stdin>", STDIN_FILENO)};
  std::string source = path;
  struct stat status {};
  if (stat(source.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) {
    source += source.ends_with('/') ? "config.json" : "/config.json";
    if (stat(source.c_str(), &status) != 0) {
      throw bad_input(fmt::format("{}: is a directory without a config.json", path));
    }
  }
  const Descriptor file{open(source.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.value < 0) {
    throw bad_input(fmt::format("{}: cannot be opened ({})", source, error_text()));
  }
  std::string text = read_all(source, file.value);
  if (text.find_first_not_of(" \t\r\n") == std::string::npos) {
    throw bad_input(fmt::format("{}: is empty; expected a JSON document", source));
  }
  return {std::move(source), std::move(text)};
}

Spec read_spec(const Document& document) {
  try {
    return read_spec(document.text, document.source);
  } catch (const Failure& failure) {
    const bool is_model =
        !is_spec(document) && document.text.find("\"model_type\"") != std::string::npos;
    if (!is_model) throw;
    throw Failure(failure.kind(), failure.exit_code(),
                  fmt::format("{}; this looks like a model's config.json, which `lawson check` and "
                              "`lawson compile` take",
                              failure.what()));
  }
}

Bundle open_bundle(const std::string& path) {
  lawson_bundle* bundle = nullptr;
  const lawson_status status = lawson_bundle_open(path.c_str(), &bundle);
  if (status == LAWSON_IO) throw bad_input(lawson_last_error_message());
  check(status);
  return Bundle{bundle};
}

bool is_spec(const Document& document) {
  SpecDetector detector;
  (void)Json::sax_parse(document.text, &detector, Json::input_format_t::json, false);
  return detector.found();
}

Json model_workloads(const Document& document, const ModelOptions& options) {
  lawson_model_options c_options{};
  c_options.struct_size = sizeof(c_options);
  c_options.batch = options.batch;
  c_options.seqlen = options.seqlen;
  c_options.context = options.context;
  c_options.passes = options.passes.empty() ? nullptr : options.passes.c_str();
  c_options.dtype = options.dtype.empty() ? nullptr : options.dtype.c_str();
  return json_of(lawson_model_workloads, document.text.data(), document.text.size(),
                 document.source.c_str(), &c_options);
}

Json workloads_of(const Document& document, const ModelOptions& options) {
  if (!is_spec(document)) {
    Json model = model_workloads(document, options);
    for (const Json& warning : model.value("warnings", Json::array())) {
      const auto text = warning.get<std::string>();
      // The library's warnings may already name the file.
      print_warning(text.starts_with(document.source) ? text : document.source + ": " + text);
    }
    return model;
  }
  const Spec spec = read_spec(document);
  const std::string name = lawson_spec_name(spec.get());
  return {{"model", document.source},
          {"workloads", Json::array({{{"name", name},
                                      {"group", "spec"},
                                      {"layers", 1},
                                      {"note", ""},
                                      {"spec", json_of(lawson_spec_json, spec.get())}}})}};
}

std::vector<std::string> split_list(const std::vector<std::string>& values) {
  std::vector<std::string> out;
  for (const std::string& value : values) {
    std::size_t start = 0;
    while (start <= value.size()) {
      const std::size_t end = std::min(value.find(',', start), value.size());
      std::string item = value.substr(start, end - start);
      if (!item.empty() && std::find(out.begin(), out.end(), item) == out.end()) {
        out.push_back(std::move(item));
      }
      start = end + 1;
    }
  }
  return out;
}

}  // namespace lawson::cli
