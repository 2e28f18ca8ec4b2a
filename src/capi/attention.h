// The attention handles. A config is a spec document of which only some fields are set; one origin
// for key, probe and execution: document -> front::AttentionSpec -> graph.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "capi/context.h"
#include "capi/handles.h"
#include "capi/judge.h"
#include "engine/engine.h"
#include "front/attention.h"
#include "front/spec.h"
#include "lawson/lawson.h"

namespace lawson::capi {

// What a config stands for, and what it was told last.
class ConfigQuestion {
 public:
  static Result<std::shared_ptr<const ConfigQuestion>> make(const Json& document);
  Result<std::unique_ptr<lawson_verdict>> ask(const plan::KnownDevice& device, const Asked& asked,
                                              plan::Planner& planner) const;

 private:
  using Answers = std::vector<plan::Planner::VerdictPtr>;  // of the parts
  // A verdict over several parts is made of theirs: it is made once for the same ones.
  struct Joint {
    Answers parts;
    std::shared_ptr<const SpecVerdict> verdict;
  };
  std::shared_ptr<const Joint> last() const;
  bool was_told(const Joint& joint, const plan::KnownDevice& device, const Asked& asked,
                plan::Planner& planner) const;

  front::Spec spec_;
  std::deque<plan::KnownGraph> graphs_;  // of the spec's parts
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const Joint> last_;
};

}  // namespace lawson::capi

struct lawson_attention_config {
  lawson::Json document;
  lawson::capi::Memo<lawson::capi::ConfigQuestion> memo{};

  void set(const lawson::Json& other) {
    document = other;
    memo.reset();
  }
};

namespace lawson::capi {

// Values at the ABI: what an attribute's bytes are.
enum class ValueKind { word, flag, integer, number, text, integers, numbers, handle, tensor };
std::string_view kind_text(ValueKind kind);
std::size_t size_of(ValueKind kind);  // 0: variable

// One attribute of a config.
struct ConfigAttribute {
  std::int32_t id;
  std::string_view name;  // the enumerator, in lower case
  std::string_view path;  // JSON pointer into the document
  ValueKind kind;
  const std::vector<std::string>* words = nullptr;  // of a word, by value; "": the field is not set
  std::int64_t unset = 0;                           // value of a field that is not set
  std::int64_t low = 0;                             // of integers
  std::int64_t high = kMaxDim;
  std::size_t count = 0;  // of integers; 0: any
};
const std::vector<ConfigAttribute>& config_attributes();  // by rising id

// Every layout by its number; [0] is empty.
const std::vector<std::string>& layout_words();

Json empty_attention_document();
Status set_config_attribute(Json& document, std::int32_t id, const void* value, std::size_t size);
Status get_config_attribute(const Json& document, std::int32_t id, void* value,
                            std::size_t capacity, std::size_t* size_written);
Result<Json> attention_document_from_text(std::string_view text, const std::string& source);

// The spec of a config, checked; errors name the field.
Result<front::AttentionSpec> attention_spec(const Json& document);
Result<ir::Graph> attention_graph(const Json& document, front::Pass pass);
// "bf16" -> LAWSON_DTYPE_BF16, and back.
std::int32_t dtype_number(DType dtype);
std::optional<DType> dtype_of(std::int32_t number);  // nullopt: unset or unknown

// The verdict of a config, through a planner.
Result<SpecVerdict> select(const Json& document, const Device& device, const Asked& asked,
                           plan::Planner& planner);

// One tensor attribute of params, and its name in graphs.
struct TensorAttribute {
  std::int32_t id;
  std::string_view name;
  unsigned passes;  // 1: forward, 2: backward
};
inline constexpr std::size_t kTensorCount = 49;
const std::array<TensorAttribute, kTensorCount>& tensor_attributes();
inline constexpr std::size_t kNoTensor = kTensorCount;
std::size_t tensor_index(std::int32_t id);  // kNoTensor: not a tensor
std::size_t tensor_index(std::string_view name);

struct Resolved;

struct AttentionParams {
  explicit AttentionParams(front::Pass which) : pass{which} {}

  const front::Pass pass;  // forward or backward
  std::optional<Json> config;
  Device device = cpu_device();
  std::shared_ptr<const plan::KnownDevice> known_device;  // null: nobody named one
  std::string engine;
  Options options;
  double scale = std::numeric_limits<double>::quiet_NaN();
  std::int64_t sequences = -1;
  std::array<lawson_tensor, kTensorCount> tensors{};  // struct_size 0: not set

  const lawson_tensor* tensor(std::string_view name) const;  // nullptr: not set
  // The same with a description.
  const lawson_tensor* described(std::string_view name) const;

  // What these params run, once a call has found it; reset by what may change it.
  mutable std::mutex mutex;
  mutable std::shared_ptr<const Resolved> resolved;
};

void set_device(AttentionParams& params, const lawson_device& device);
Status set_param(AttentionParams& params, std::int32_t id, const void* value, std::size_t size);
Status get_param(const AttentionParams& params, std::int32_t id, void* value, std::size_t capacity,
                 std::size_t* size_written);
Status set_pointers(AttentionParams& params, const lawson_attention_pointer* pointers,
                    std::size_t count);

// A config document from the tensors; what they do not say is the params' config's.
Result<Json> derive(const AttentionParams& params);

// The plan that the params run: from the process's cache, else built and loaded. Tensors are
// compared with the config first.
Result<std::shared_ptr<Loaded>> plan_of(const AttentionParams& params, plan::Planner& planner,
                                        void* stream);
Status run(const AttentionParams& params, plan::Planner& planner, void* workspace,
           std::size_t workspace_size, void* stream);

// Copies `size` bytes out as get_attribute does.
Status give_value(std::string_view name, const void* source, std::size_t size, void* value,
                  std::size_t capacity, std::size_t* size_written);
// Checks a fixed size, and that there is a value.
Status check_value(std::string_view name, ValueKind kind, const void* value, std::size_t size);

}  // namespace lawson::capi

struct lawson_attention_fwd_params {
  lawson::capi::AttentionParams params{lawson::front::Pass::forward};
};
struct lawson_attention_bwd_params {
  lawson::capi::AttentionParams params{lawson::front::Pass::backward};
};
