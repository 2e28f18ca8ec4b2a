// lawson.h for this tool: handles that destroy themselves, failures that say how to exit.
#pragma once

#include <lawson/lawson.h>

#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace lawson::cli {

using Json = nlohmann::json;

// DESIGN: exit codes.
inline constexpr int kExitOk = 0;
inline constexpr int kExitNo = 1;
inline constexpr int kExitInput = 2;
inline constexpr int kExitEnvironment = 3;

// Ends the verb. `kind` is a stable word: "usage", "invalid_argument", "unavailable", "io", ...
class Failure : public std::exception {
 public:
  Failure(std::string kind, int exit_code, std::string message);
  const char* what() const noexcept override { return message_.c_str(); }
  const std::string& kind() const { return kind_; }
  int exit_code() const { return exit_code_; }
  Json json() const;  // {"kind", "message"}

 private:
  std::string kind_;
  int exit_code_;
  std::string message_;
};

Failure bad_input(std::string message);  // kind invalid_argument, exit 2
Failure bad_usage(std::string message);  // kind usage, exit 2

// Throws the last error of this thread unless OK.
void check(lawson_status status);
Failure last_failure(lawson_status status);

template <auto Destroy>
struct Destroyer {
  template <typename T>
  void operator()(T* handle) const {
    Destroy(handle);
  }
};
template <typename T, auto Destroy>
using Handle = std::unique_ptr<T, Destroyer<Destroy>>;

using Text = Handle<lawson_text, lawson_text_destroy>;
using Device = Handle<lawson_device, lawson_device_destroy>;
using Spec = Handle<lawson_spec, lawson_spec_destroy>;
using Graph = Handle<lawson_graph, lawson_graph_destroy>;
using Verdict = Handle<lawson_verdict, lawson_verdict_destroy>;
using Plan = Handle<lawson_plan, lawson_plan_destroy>;
using Bundle = Handle<lawson_bundle, lawson_bundle_destroy>;
using Data = Handle<lawson_data, lawson_data_destroy>;

// Calls a function that hands out one handle through its last argument.
template <typename H, typename F, typename... Args>
H make(F function, Args... args) {
  typename H::pointer raw = nullptr;
  check(function(args..., &raw));
  return H{raw};
}

// The same for functions that hand out a JSON document, or plain text.
template <typename F, typename... Args>
std::string text_of(F function, Args... args) {
  const Text text = make<Text>(function, args...);
  return {lawson_text_data(text.get()), lawson_text_size(text.get())};
}
template <typename F, typename... Args>
Json json_of(F function, Args... args) {
  return Json::parse(text_of(function, args...));
}

struct ProbeOptions {
  std::string engine;  // empty: the device's own
  lawson_strength strength = LAWSON_JUDGED;
  std::string tuning = "off";  // or "quick", "exhaustive"
  double deadline_ms = 0;      // for building and tuning; 0: none
  bool retune = false;         // times the stored candidates again
  bool dynamic_shapes = false;
  lawson_options c() const;
};

Device find_device(const std::string& name);
Spec read_spec(std::string_view text, const std::string& source);
Json probe(const Spec& spec, const Device& device, const ProbeOptions& options);
std::vector<lawson_tensor_info> tensors_of(const Graph& graph);

}  // namespace lawson::cli
