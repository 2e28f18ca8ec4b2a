#include "engine/cudnn/reasons.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <map>
#include <optional>
#include <regex>
#include <string_view>

#include "base/lazy.h"
#include "engine/cudnn/defects_fusion.h"
#include "engine/cudnn/facts.h"
#include "engine/cudnn/loader.h"

namespace lawson::cudnn {
namespace {

constexpr std::string_view kStatus = "CUDNN_STATUS_";
constexpr std::size_t kMaxReasons = 8;
constexpr std::string_view kTooManyOps = "exceeds MAX_OPGRAPH_OPS";
constexpr int kMostOps = 250;               // of cuDNN 9.19, measured with pointwise ops
constexpr int kFirstRuntimeCompiled = 800;  // no run-time-compiled engine takes anything older

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

std::string_view status_at(std::string_view text, std::size_t begin) {
  std::size_t end = begin;
  while (end < text.size() &&
         (std::isupper(static_cast<unsigned char>(text[end])) != 0 ||
          std::isdigit(static_cast<unsigned char>(text[end])) != 0 || text[end] == '_')) {
    ++end;
  }
  return text.substr(begin, end - begin);
}

// The statuses that a message reports, without the prefix. Expressions quoted in a reason mention
// statuses too ("(CUDNN_STATUS_NOT_INITIALIZED == status)"), so only reporting positions count.
std::vector<std::string> reported_statuses(std::string_view text) {
  std::vector<std::string> found;
  for (const std::string_view lead : {"Warning: ", "Error: ", "code: ", "cudnn_status: "}) {
    const std::string wanted = std::string{lead}.append(kStatus);
    for (std::size_t at = text.find(wanted); at != std::string_view::npos;
         at = text.find(wanted, at + wanted.size())) {
      found.emplace_back(status_at(text, at + wanted.size()));
    }
  }
  return found;
}

bool is_environment(std::string_view status) {
  constexpr std::array<std::string_view, 8> kEnvironment{
      "NOT_SUPPORTED_INCOMPATIBLE_CUDA_DRIVER",      // 3005
      "NOT_SUPPORTED_INCOMPATIBLE_CUDART",           // 3006
      "NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING",  // 3008
      "NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE",        // 3009
      "SUBLIBRARY_VERSION_MISMATCH",                 // 1002
      "SUBLIBRARY_LOADING_FAILED",                   // 1008
      "LICENSE_ERROR",                               // 1005
      "SERIALIZATION_VERSION_MISMATCH"};             // 1003
  return std::find(kEnvironment.begin(), kEnvironment.end(), status) != kEnvironment.end();
}

bool is_unsupported(std::string_view status) {
  return status.starts_with("NOT_SUPPORTED") && !is_environment(status);
}

bool is_out_of_memory(std::string_view status) {
  return status == "ALLOC_FAILED" || has(status, "ALLOCATION_FAILED");
}

bool any(const std::vector<std::string>& statuses, bool (*predicate)(std::string_view)) {
  return std::any_of(statuses.begin(), statuses.end(),
                     [&](const std::string& status) { return predicate(status); });
}

// The engine asks cuBLASLt, which answers only on a device.
bool needs_device(const EngineRefusal& refusal) {
  return has(refusal.text, "create_cublas_handle") || has(refusal.text, "returned by cublasLt");
}

// Requests that the frontend refuses under a code that means a wrong call.
bool refuses_by_version(std::string_view text) {
  return has(text, "not supported") || has(text, "requires cuDNN") || has(text, "only supported");
}

std::optional<std::int64_t> number_after(std::string_view text, std::string_view lead) {
  const auto at = text.find(lead);
  if (at == std::string_view::npos) return std::nullopt;
  std::size_t begin = at + lead.size();
  while (begin < text.size() && text[begin] == ' ') ++begin;
  std::int64_t value = 0;
  const char* first = text.data() + begin;
  const auto parsed = std::from_chars(first, text.data() + text.size(), value);
  if (parsed.ec != std::errc{}) return std::nullopt;
  return value;
}

std::string lower(std::string_view text) {
  std::string result{text};
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

// The first line, without what says nothing: "No valid engine configs for ____" and the condition
// in the source that a reason was raised at.
std::string first_line(std::string_view text) {
  text = text.substr(0, text.find('\n'));
  if (text.starts_with("No valid engine configs for")) return "";
  return std::string{text};
}

std::string without_condition(const std::string& text) {
  const auto at = text.find(" at: ");
  return at == std::string::npos || at == 0 ? text : text.substr(0, at);
}

std::string bound_text(std::int64_t bound) {
  return bound < 0 ? "unbounded" : fmt::format("{}", bound);
}

std::string capability_of(const Device& device) {
  return fmt::format("{} has compute capability {}", device.name,
                     compute_capability_text(device.compute_capability));
}

// Sentences for what the frontend checks of attention before it asks cuDNN.
class AttentionWording {
 public:
  AttentionWording(const AttentionFacts& facts, const Device& device, int cudnn_version)
      : facts_{facts}, device_{device}, cudnn_version_{cudnn_version} {}

  std::optional<Reason> of(const std::string& text) const {
    if (has(text, "requires SM80")) {
      return Reason{"compute_capability",
                    fmt::format("{}; cuDNN's attention needs 8.0 or newer", capability_of(device_)),
                    "target"};
    }
    if (has(text, "hidden_dim") || has(text, "head_dim")) return head_dim(text);
    if (has(text, "s_q = s_kv = 1")) {
      return Reason{"sequence_length",
                    "seqlen_q = 1 and seqlen_kv = 1: the backward pass needs one of them above 1",
                    "seqlen_q"};
    }
    const bool wide = facts_.dtype == DType::f64 || (facts_.backward && facts_.dtype == DType::f32);
    if (has(text, "No suitable implementation") ||
        (wide && has(text, "Finalizing the engine config failed"))) {
      return Reason{"data_type",
                    fmt::format("dtype = {}: cuDNN's attention takes f16, bf16, FP8 and, in the "
                                "forward pass, f32",
                                to_string(facts_.dtype)),
                    "dtype"};
    }
    if (has(text, "cannot be boolean")) {
      return Reason{"mask_dtype",
                    "the mask or bias has dtype bool; cuDNN takes an additive mask of a float type "
                    "only (0 keeps, -inf drops)",
                    "attn_mask"};
    }
    if (has(text, "max_s_q > max_s_kv")) {
      return Reason{"mask",
                    fmt::format("seqlen_q = {} is above seqlen_kv = {}: a bottom-right causal mask "
                                "without a padding mask needs seqlen_q <= seqlen_kv",
                                facts_.s_q, facts_.s_kv),
                    "mask"};
    }
    if (has(text, "Sliding window attention is only supported")) {
      return Reason{"window",
                    fmt::format("seqlen_q = {} is above seqlen_kv = {}: a window (left bound {}) "
                                "without a padding mask needs seqlen_q <= seqlen_kv",
                                facts_.s_q, facts_.s_kv, facts_.rule->left),
                    "window"};
    }
    if (has(text, "Bottom right causal mask is only supported with is_bias=False")) {
      const bool alibi = facts_.rule->alibi;
      return Reason{"mask",
                    fmt::format("a bottom-right causal mask with {}: cuDNN takes bottom-right "
                                "alignment only without bias, ALiBi and dropout",
                                alibi ? "ALiBi" : "a bias"),
                    alibi ? "bias" : "mask"};
    }
    if (has(text, "alibi mask is used")) {
      return Reason{"alibi",
                    fmt::format("ALiBi with right bound {}: cuDNN's ALiBi needs a causal mask "
                                "(right bound 0)",
                                bound_text(facts_.rule->right)),
                    "mask"};
    }
    if (has(text, "not supported with sink_token")) {
      return Reason{"softmax",
                    fmt::format("seqlen_q = 1 with softmax = {}: cuDNN's decoding kernels take no "
                                "sink; seqlen_q of 2 or more does",
                                ir::to_string(facts_.rule->softmax)),
                    "softmax"};
    }
    if (has(text, "Attention score mod enabled")) {
      return Reason{"softcap",
                    fmt::format("softcap = {} together with ALiBi: cuDNN takes a modified score "
                                "without ALiBi only",
                                facts_.rule->softcap),
                    "softcap"};
    }
    if (has(text, "stride for the last dimension")) {
      return Reason{"strides",
                    "the head dim of " + text.substr(text.rfind(' ') + 1) +
                        " is not contiguous; its stride must be 1",
                    "strides"};
    }
    if (has(text, "-byte alignment")) {
      return Reason{"strides", "cuDNN's attention kernels load 16 bytes at a time: " + text,
                    "strides"};
    }
    if (has(text, "group-query attention")) {
      return Reason{
          "kv_heads",
          fmt::format("heads = {} is no multiple of kv_heads = {}", facts_.heads, facts_.kv_heads),
          "kv_heads"};
    }
    if (has(text, "Deterministic algorithm is not supported")) {
      return Reason{"deterministic",
                    fmt::format("deterministic = true: {} ({})", text, capability_of(device_)),
                    "deterministic"};
    }
    if (has(text, "packed BHSD")) {
      return Reason{
          "strides",
          fmt::format("stats is not contiguous as [batch, heads, seqlen_q]; cuDNN {} reads "
                      "it so in the backward pass (9.26 takes any strides)",
                      version_text(cudnn_version_)),
          "strides"};
    }
    if (has(text, "cuDNN version") || has(text, "cudnn version") || has(text, "on cuDNN") ||
        has(text, "backend version") || has(text, "requires cuDNN")) {
      return Reason{"cudnn_version",
                    fmt::format("cuDNN {}: {}", version_text(cudnn_version_), text),
                    "cudnn_version"};
    }
    return std::nullopt;
  }

 private:
  Reason head_dim(const std::string& text) const {
    const auto limit = number_after(text, "less than or equal to");
    const auto offends = [&](std::int64_t value) {
      return value % 8 != 0 || (limit && value > *limit);
    };
    const bool qk = offends(facts_.d_qk);
    const std::int64_t value = qk ? facts_.d_qk : facts_.d_v;
    const std::string field = qk ? "head_dim_qk" : "head_dim_v";
    const std::string both =
        fmt::format("head_dim_qk = {}, head_dim_v = {}", facts_.d_qk, facts_.d_v);
    if (!offends(value)) {  // a rule about the pair
      return {"head_dim", fmt::format("{}: {}", both, text), field};
    }
    const std::string pass = facts_.backward ? "backward" : "forward";
    if (value % 8 != 0) {
      return {"head_dim",
              fmt::format("{} = {}: cuDNN's attention needs a multiple of 8", field, value), field};
    }
    const std::string exception =
        has(text, "d_qk != d_v") ? " (192 with head_dim_v = 128 is the exception)" : "";
    return {"head_dim",
            fmt::format("{} = {}: cuDNN {}'s {} pass takes at most {} on compute capability {}{}",
                        field, value, version_text(cudnn_version_), pass, *limit,
                        compute_capability_text(device_.compute_capability), exception),
            field};
  }

  const AttentionFacts& facts_;
  const Device& device_;
  int cudnn_version_;
};

// The smallest compute capability (900) that an architecture refusal asks for; 0: not found.
int lowest_capability(const EngineRefusal& refusal) {
  static Lazy<const std::regex> bounds;
  const std::regex& bound =
      bounds.get([] { return std::regex{R"((\d{3,4}) <= this->getDeviceProp\(\)->deviceVer)"}; });
  std::smatch match;
  if (!std::regex_search(refusal.text, match, bound)) return 0;
  return std::stoi(match[1]);
}

// " (out is bf16)" for every output that is or follows a reduction.
std::string reduced_dtypes(const ir::Graph& graph) {
  std::string found;
  std::vector<ir::TensorId> reduced;
  for (const ir::Node& node : graph.nodes) {
    const bool follows = !node.inputs.empty() &&
                         std::find(reduced.begin(), reduced.end(), node.inputs[0]) != reduced.end();
    if (!std::holds_alternative<ir::Reduce>(node.op) && !follows) continue;
    const ir::TensorId id = first_result(node);
    reduced.push_back(id);
    const ir::Tensor& result = graph.tensor(id);
    if (!graph.is_output(id) || result.dtype == DType::f32) continue;
    found += fmt::format("{}{} is {}", found.empty() ? " (" : ", ", result.name,
                         to_string(result.dtype));
  }
  return found.empty() ? found : found + ")";
}

template <typename Predicate>
const ir::Node* find_node(const ir::Graph& graph, const Predicate& predicate) {
  const auto found = std::find_if(graph.nodes.begin(), graph.nodes.end(), predicate);
  return found == graph.nodes.end() ? nullptr : &*found;
}

const ir::Node* find_reduction(const ir::Graph& graph) {
  return find_node(
      graph, [](const ir::Node& node) { return std::holds_alternative<ir::Reduce>(node.op); });
}

const ir::Node* find_product(const ir::Graph& graph) {
  return find_node(graph, [](const ir::Node& node) {
    return std::holds_alternative<ir::Matmul>(node.op) ||
           std::holds_alternative<ir::ScaledMatmul>(node.op);
  });
}

// What an engine says of one operation, in words.
struct Told {
  const ir::Node* node;
  std::string sentence;
};

std::optional<Told> tell(std::string_view message, const ir::Graph& graph) {
  const auto about = [](const ir::Node* node, std::string sentence) -> std::optional<Told> {
    if (node == nullptr) return std::nullopt;
    return Told{node, std::move(sentence)};
  };
  if (has(message, "is_input_compute_type_match")) {
    return about(find_product(graph),
                 "the types of the matmul's operands and its accumulation do not go together");
  }
  if (has(message, "yType == CUDNN_DATA_FLOAT")) {
    return about(find_reduction(graph),
                 "the result of a reduction must have dtype f32" + reduced_dtypes(graph));
  }
  if (has(message, "mathPrec != CUDNN_DATA_FLOAT")) {
    const ir::Node* node = find_node(graph, [&](const ir::Node& each) {
      const DType dtype = graph.tensor(first_result(each)).dtype;
      return dtype == DType::f64 || is_integer(dtype);
    });
    if (node == nullptr) return std::nullopt;
    return about(node, fmt::format("it computes in {}, and without a matmul cuDNN computes in f32 "
                                   "alone",
                                   to_string(graph.tensor(first_result(*node)).dtype)));
  }
  if (has(message, "isColumnReduction")) {
    return about(find_reduction(graph),
                 "without a matmul cuDNN reduces everything, the last axis, or all axes but the "
                 "last");
  }
  if (has(message, "Unsupported reduction op")) {
    return about(find_node(graph,
                           [](const ir::Node& node) {
                             const auto* reduce = std::get_if<ir::Reduce>(&node.op);
                             return reduce != nullptr && reduce->kind == ir::ReduceKind::prod;
                           }),
                 "without a matmul cuDNN has sums, maxima and minima only");
  }
  if (has(message, "!is_NHWC")) {
    return about(find_reduction(graph),
                 "without a matmul cuDNN reduces tensors whose last dim is contiguous");
  }
  if (has(message, "getDimA()[1] == 1")) {
    return about(find_reduction(graph),
                 "a tensor's last dim is 1; without a matmul cuDNN reduces what has a last dim "
                 "above 1");
  }
  return std::nullopt;
}

// Reasons of a graph of pointwise ops and matmuls, or of attention, from what each engine said.
std::vector<Reason> reasons_of_engines(const std::vector<EngineRefusal>& refusals,
                                       const std::string& subject, const ir::Graph& graph,
                                       const Device& device) {
  std::vector<Reason> reasons;
  int needed = 0;  // the lowest capability among engines that miss it
  bool all_too_new = true;
  std::map<std::pair<std::string, std::string>, std::vector<int>> by_text;
  std::vector<std::pair<std::string, std::string>> order;
  const auto facts = attention_facts(graph);
  for (const EngineRefusal& refusal : refusals) {
    // cuBLASLt's engine takes no attention; what it says of one differs from call to call.
    if (facts && refusal.engine == 0) continue;
    if (refusal.status == "NOT_SUPPORTED_ARCH_MISMATCH") {
      const int lowest = lowest_capability(refusal);
      if (lowest > device.compute_capability && (needed == 0 || lowest < needed)) needed = lowest;
      continue;
    }
    if (needs_device(refusal)) continue;
    if (refusal.engine != 0) all_too_new = false;
    const auto text = std::pair{refusal.status, without_condition(refusal.text)};
    if (by_text[text].empty()) order.push_back(text);
    by_text[text].push_back(refusal.engine);
  }
  const bool too_old = device.compute_capability < kFirstRuntimeCompiled;
  if (needed != 0 && (all_too_new || too_old)) {
    reasons.push_back({"compute_capability",
                       fmt::format("{}: {}; cuDNN's engines for such a graph need {} or newer",
                                   subject, capability_of(device), compute_capability_text(needed)),
                       "target"});
  }
  if (facts && facts->backward && facts->rule->softcap > 0 &&
      facts->node->outputs[ir::AttentionBackward::dbias] != ir::kNone) {
    reasons.push_back(
        {"softcap",
         fmt::format("softcap = {} together with bias_grad = true: cuDNN's backward pass "
                     "with a modified score has no gradient of the bias",
                     facts->rule->softcap),
         "bias_grad"});
  }
  // cuBLASLt's engine takes plain products only; what it misses says least about a fusion.
  std::stable_partition(order.begin(), order.end(),
                        [&](const auto& text) { return by_text[text] != std::vector{0}; });
  for (const auto& text : order) {
    const auto& [status, message] = text;
    std::string engines;
    for (const int engine : by_text[text]) {
      const std::string one = fmt::format("{}{}", engines.empty() ? "" : ", ", engine);
      if (!has(engines, one)) engines += one;
    }
    std::string_view kind{status};
    if (kind.starts_with("NOT_SUPPORTED")) kind.remove_prefix(13);
    if (kind.starts_with('_')) kind.remove_prefix(1);
    std::string field;
    std::string about = subject;
    std::string sentence = message.empty() ? "no text" : message;
    if (const auto told = tell(message, graph)) {
      sentence = told->sentence;
      field = result_of(graph, *told->node);
      if (told->node != find_product(graph)) about = label_of(graph, *told->node);
    } else if (kind == "DATA_TYPE") {
      field = "dtype";
      if (facts) sentence = fmt::format("dtype = {}: {}", to_string(facts->dtype), message);
    } else if (kind == "LAYOUT") {
      field = "strides";
    } else if (facts && facts->rule->softcap > 0 && kind == "GRAPH_PATTERN") {
      field = "softcap";
      sentence = fmt::format("softcap = {}: {}", facts->rule->softcap, message);
    }
    reasons.push_back({kind.empty() ? "not_supported" : lower(kind),
                       fmt::format("{}: cuDNN's engine{} {} refuse{}: {}", about,
                                   by_text[text].size() > 1 ? "s" : "", engines,
                                   by_text[text].size() > 1 ? "" : "s", sentence),
                       field});
  }
  if (needed != 0 && !all_too_new && !too_old) {
    reasons.push_back({"compute_capability",
                       fmt::format("{}; further engines need {} or newer", capability_of(device),
                                   compute_capability_text(needed)),
                       "target"});
  }
  return reasons;
}

// "x has strides [128, 2]: ..." for a matrix of which neither rows nor columns are contiguous.
std::string scattered_operand(const ir::Graph& graph) {
  for (const ir::Node& node : graph.nodes) {
    if (!std::holds_alternative<ir::Matmul>(node.op)) continue;
    for (const ir::TensorId id : node.inputs) {
      const ir::Tensor& tensor = graph.tensor(id);
      const std::size_t rank = tensor.shape.size();
      const auto lies_apart = [&](std::size_t axis) {
        return tensor.shape[axis] > 1 && tensor.strides[axis] != 1;
      };
      if (graph.is_input(id) && lies_apart(rank - 1) && lies_apart(rank - 2)) {
        return fmt::format("{} has strides {}: neither its rows nor its columns are contiguous",
                           tensor.name, to_string(tensor.strides));
      }
    }
  }
  return "";
}

Reason build_reason(const StageError& failure, const std::string& subject, const ir::Graph& graph,
                    const Device& device) {
  const std::string capability = compute_capability_text(device.compute_capability);
  if (!has(failure.text, "COMPILATION_FAILED")) {
    return {"plan_not_built",
            fmt::format("{}: cuDNN accepts the graph, but its plan cannot be built for compute "
                        "capability {}: {}",
                        subject, capability,
                        failure.text.empty() ? "no text" : first_line(failure.text)),
            ""};
  }
  const ir::Node* chained = chained_product(graph);
  std::string cause = scattered_operand(graph);
  if (chained != nullptr) {
    cause = "it is a matmul of another matmul's result: make them two graphs";
  }
  const ir::Node* told = chained != nullptr ? chained
                         : cause.empty()    ? nullptr
                                            : find_product(graph);
  return {"kernel_does_not_compile",
          fmt::format("{}: cuDNN accepts the graph, but the kernel that it writes for compute "
                      "capability {} does not compile{}{}{}",
                      chained != nullptr ? label_of(graph, *chained) : subject, capability,
                      cause.empty() ? "" : " (", cause, cause.empty() ? "" : ")"),
          told == nullptr ? "" : result_of(graph, *told)};
}

std::optional<Reason> workspace_reason(const std::string& text) {
  const auto required = number_after(text, "Skipping plan since workspace violation. Requires");
  if (!required) return std::nullopt;
  return Reason{
      "workspace",
      fmt::format("every plan needs more workspace than allowed; the last one asked for {} "
                  "bytes",
                  *required),
      "workspace_limit"};
}

}  // namespace

std::vector<EngineRefusal> parse_refusals(const std::string& text) {
  static Lazy<const std::regex> engine_lines;
  const std::regex& engine_line =
      engine_lines.get([] { return std::regex{R"re("engineId":(-?\d+))re"}; });
  static Lazy<const std::regex> knobs;
  const std::regex& knob =
      knobs.get([] { return std::regex{R"re("CUDNN_KNOB_TYPE_([A-Z_0-9]+)":(-?\d+))re"}; });
  std::vector<EngineRefusal> refusals;
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    std::smatch match;
    if (std::regex_search(line, match, engine_line)) {
      EngineRefusal refusal;
      refusal.engine = std::stoi(match[1]);
      for (std::sregex_iterator it{line.begin(), line.end(), knob}, last; it != last; ++it) {
        if ((*it)[2] == "-1") continue;  // not chosen
        refusal.knobs += (refusal.knobs.empty() ? "" : " ") + (*it)[1].str() + "=" + (*it)[2].str();
      }
      refusals.push_back(std::move(refusal));
      continue;
    }
    const std::size_t warning = line.find(kStatus);
    // The first line of a block is the innermost, most telling one.
    if (warning == std::string::npos || refusals.empty() || !refusals.back().status.empty())
      continue;
    refusals.back().status = status_at(line, warning + kStatus.size());
    constexpr std::string_view kReason = "Reason: ";
    const std::size_t reason = line.find(kReason);
    if (reason != std::string::npos) refusals.back().text = line.substr(reason + kReason.size());
  }
  return refusals;
}

Fault classify(const StageError& failure, bool deviceless) {
  const std::vector<std::string> statuses = reported_statuses(failure.text);
  if (any(statuses, is_environment) || has(failure.text, "RUNTIME_PREREQUISITE_MISSING") ||
      has(failure.text, "Unable to dlopen") || has(failure.text, "Unable to load any")) {
    return Fault::environment;
  }
  if (any(statuses, is_out_of_memory) || failure.code == "BAD_ALLOC") return Fault::out_of_memory;
  if (has(failure.text, kTooManyOps)) return Fault::unsupported;  // reported as BAD_PARAM
  if (std::find(statuses.begin(), statuses.end(), "INTERNAL_ERROR_COMPILATION_FAILED") !=
      statuses.end()) {
    return failure.stage == "build_plan" ? Fault::compile_failed : Fault::broken;
  }
  if (any(statuses, [](std::string_view status) {
        return status.starts_with("INTERNAL_ERROR") || status.starts_with("EXECUTION_FAILED") ||
               status == "NOT_INITIALIZED";
      })) {
    return Fault::broken;
  }
  // What the frontend throws when neither of its attention nodes takes the types.
  if (has(failure.text, "No suitable implementation")) return Fault::unsupported;
  if (failure.code == "HEURISTIC_QUERY_FAILED" && deviceless) {
    const auto refusals = parse_refusals(failure.text);
    if (std::any_of(refusals.begin(), refusals.end(), needs_device)) return Fault::undecided;
  }
  if (failure.code == "GRAPH_NOT_SUPPORTED" || failure.code == "HEURISTIC_QUERY_FAILED" ||
      any(statuses, is_unsupported)) {
    return Fault::unsupported;
  }
  if (any(statuses, [](std::string_view status) {
        return status.starts_with("BAD_PARAM") || status == "INVALID_VALUE";
      })) {
    return Fault::caller;
  }
  if (failure.code == "GRAPH_EXECUTION_PLAN_CREATION_FAILED") return Fault::unsupported;
  if (failure.code == "ATTRIBUTE_NOT_SET" || failure.code == "SHAPE_DEDUCTION_FAILED" ||
      failure.code == "INVALID_VALUE" || failure.code == "INVALID_VARIANT_PACK") {
    return refuses_by_version(failure.text) ? Fault::unsupported : Fault::caller;
  }
  return Fault::broken;
}

std::vector<Reason> explain(const StageError& failure, const ir::Graph& graph, const Device& device,
                            int cudnn_version) {
  if (const auto workspace = workspace_reason(failure.text)) return {*workspace};
  const std::string subject = subject_of(graph);
  std::vector<Reason> reasons;
  if (const auto facts = attention_facts(graph)) {
    const AttentionWording wording{*facts, device, cudnn_version};
    if (device.compute_capability < kFirstRuntimeCompiled) {
      reasons.push_back(*wording.of("requires SM80"));
    }
    if (const auto reason = wording.of(first_line(failure.text))) {
      if (reasons.empty() || reason->code != reasons.front().code) reasons.push_back(*reason);
      return reasons;
    }
    if (!reasons.empty()) return reasons;
  }
  if (has(failure.text, kTooManyOps)) {
    return {{"graph_size",
             fmt::format(
                 "{}: {} ops, some of them several of cuDNN's; it takes at most {} operations in "
                 "one graph (measured with 9.19)",
                 subject, graph.nodes.size(), kMostOps),
             "ops"}};
  }
  if (failure.stage == "build_plan") return {build_reason(failure, subject, graph, device)};
  for (Reason& reason : reasons_of_engines(parse_refusals(failure.text), subject, graph, device)) {
    reasons.push_back(std::move(reason));
  }
  const auto says = [&reasons](std::string_view code) {
    return std::any_of(reasons.begin(), reasons.end(),
                       [code](const Reason& reason) { return reason.code == code; });
  };
  if (device.compute_capability < kFirstRuntimeCompiled && says("compute_capability")) {
    // The engines that are left take other graphs; what they miss in this one helps nobody.
    std::erase_if(reasons, [](const Reason& reason) { return reason.code == "graph_pattern"; });
  }
  if (has(failure.text, "reduction_descriptor")) {
    for (const ir::Node& node : graph.nodes) {
      if (!std::holds_alternative<ir::Reduce>(node.op)) continue;
      const ir::Tensor& x = graph.tensor(node.inputs[0]);
      reasons.push_back(
          {"reduction",
           fmt::format("{}: cuDNN {} has no such reduction of {}{}", label_of(graph, node),
                       version_text(cudnn_version), to_string(x.dtype), to_string(x.shape)),
           result_of(graph, node)});
    }
  }
  if (reasons.empty()) {
    const std::string text = first_line(failure.text);
    reasons.push_back(
        {failure.code == "GRAPH_NOT_SUPPORTED" ? "graph_not_supported" : "no_engine",
         fmt::format("{}: cuDNN {} has no engine for it on {} (compute capability {}){}", subject,
                     version_text(cudnn_version), device.name,
                     compute_capability_text(device.compute_capability),
                     text.empty() ? "; it gave no reason" : ": " + text),
         ""});
  }
  if (reasons.size() > kMaxReasons) reasons.resize(kMaxReasons);
  return reasons;
}

std::vector<Reason> explain_undecided(const StageError& failure, const ir::Graph& graph,
                                      const Device& device) {
  std::vector<EngineRefusal> rest;
  std::vector<Reason> reasons;
  for (EngineRefusal& refusal : parse_refusals(failure.text)) {
    if (!needs_device(refusal)) {
      rest.push_back(std::move(refusal));
    } else if (reasons.empty()) {
      reasons.push_back(
          {"needs_live_device",
           fmt::format("{}: cuDNN's engine {} (cuBLASLt) is the only one left, and it "
                       "can answer only on a live {}",
                       subject_of(graph), refusal.engine, device.title),
           "target"});
    }
  }
  for (Reason& reason : reasons_of_engines(rest, subject_of(graph), graph, device)) {
    if (reasons.size() < kMaxReasons) reasons.push_back(std::move(reason));
  }
  return reasons;
}

Error to_error(const StageError& failure, Fault fault, const Device& device) {
  const std::string text = failure.text.empty() ? "no text" : failure.text.substr(0, 1500);
  const std::string where = fmt::format("cuDNN, {} for {}", failure.stage, device.name);
  switch (fault) {
    case Fault::environment: {
      const std::string missing =
          has(text, "libcuda") ? "the driver library libcuda.so.1 is missing or lacks a function"
          : has(text, "nvrtc") ? "NVRTC is missing or cannot be loaded"
                               : "a library that cuDNN needs is missing or mismatches";
      return error(ErrorKind::unavailable, "{}: {} (`lawson info` shows what was found): {}", where,
                   missing, text);
    }
    case Fault::compile_failed:
      return error(ErrorKind::unavailable,
                   "{}: NVRTC compiles nothing for this target, not even a plain matmul; its parts "
                   "(libnvrtc-builtins) may be missing or mismatch: {}",
                   where, text);
    case Fault::caller:
      return error(ErrorKind::invalid_argument, "{}: {}", where, text);
    case Fault::out_of_memory:
      return error(ErrorKind::out_of_memory, "{}: {}", where, text);
    default:
      return error(failure.code == "CUDA_API_FAILED" ? ErrorKind::cuda : ErrorKind::cudnn,
                   "{} failed ({}): {}", where, failure.code, text);
  }
}

std::string subject_of(const ir::Graph& graph) {
  if (const auto facts = attention_facts(graph)) {
    return fmt::format("attention {} {}, heads {}/{}, head dims {}/{}, seqlens {}/{}",
                       facts->backward ? "backward" : "forward", to_string(facts->dtype),
                       facts->heads, facts->kv_heads, facts->d_qk, facts->d_v, facts->s_q,
                       facts->s_kv);
  }
  const ir::Node* node = find_product(graph);
  if (node != nullptr) {
    const ir::Tensor& a = graph.tensor(node->inputs[0]);
    const ir::Tensor& b = graph.tensor(node->inputs[1]);
    return fmt::format("{}, {}{} x {}{}", label_of(graph, *node), to_string(a.dtype),
                       to_string(a.shape), to_string(b.dtype), to_string(b.shape));
  }
  if (graph.nodes.size() == 1) return label_of(graph, graph.nodes.front());
  return graph.name.empty() ? "the graph" : fmt::format("graph '{}'", graph.name);
}

}  // namespace lawson::cudnn
