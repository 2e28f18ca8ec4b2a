#include "plan/question.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "engine/subject.h"
#include "ir/attention.h"
#include "ir/simplify.h"

namespace lawson::plan {
namespace {

// Attention alone, which is asked for at every call, has nothing to be simplified.
bool is_attention_alone(const ir::Graph& graph) {
  return std::all_of(graph.nodes.begin(), graph.nodes.end(), [](const ir::Node& node) {
    return ir::attention_rule(node.op) != nullptr ||
           std::holds_alternative<ir::CacheAppend>(node.op);
  });
}

// No name has a NUL in it: two lists of names never make one text.
Digest words_of(const ir::Graph& graph) {
  std::string text = graph.name;
  text += '\0';
  for (const ir::Tensor& tensor : graph.tensors) {
    text += tensor.name;
    text += '\0';
  }
  for (const ir::Node& node : graph.nodes) {
    text += node.source;
    text += '\0';
  }
  return digest(text);
}

// Plain values one after the other, with nothing between them.
class Fields {
 public:
  template <typename T>
  void add(const T& value) {
    static_assert(std::has_unique_object_representations_v<T>);
    std::memcpy(bytes_.data() + size_, &value, sizeof(value));
    size_ += sizeof(value);
  }
  void add(const Digest& value) {
    add(value.high);
    add(value.low);
  }
  Digest digest() const { return lawson::digest({bytes_.data(), size_}); }

 private:
  std::array<char, 128> bytes_{};
  std::size_t size_ = 0;
};

Fields fields(const KnownGraph& graph, const KnownDevice& device, std::string_view engine,
              const Options& options) {
  Fields all;
  all.add(graph.meaning());
  all.add(device.fingerprint());
  all.add(digest(engine));
  all.add(options.workspace_limit);
  all.add(static_cast<std::int32_t>(options.deterministic));
  all.add(static_cast<std::int32_t>(options.tuning));
  all.add(static_cast<std::int32_t>(options.dynamic_shapes));
  return all;
}

}  // namespace

KnownGraph::KnownGraph(const ir::Graph& given) : given_{given}, words_{words_of(given)} {
  if (!is_attention_alone(given)) simplified_ = ir::simplify(given);
  pass_ = pass_of(graph());
  meaning_ = digest(ir::canonical_text(graph()));
}

KnownDevice::KnownDevice(Device given)
    : device_{std::move(given)}, fingerprint_{digest(lawson::fingerprint(device_))} {}

QuestionId plan_question(const KnownGraph& graph, const KnownDevice& device,
                         std::string_view engine, const Options& options) {
  return {fields(graph, device, engine, options).digest(), device.device().ordinal};
}

QuestionId verdict_question(const KnownGraph& graph, const KnownDevice& device,
                            std::string_view engine, const Options& options) {
  Fields all = fields(graph, device, engine, options);
  all.add(graph.words());
  all.add(digest(device.device().name));
  all.add(static_cast<std::int32_t>(options.strength));
  return {all.digest(), device.device().ordinal};
}

ir::Graph without_values(ir::Graph graph) {
  for (ir::Tensor& tensor : graph.tensors) tensor.values.clear();
  return graph;
}

}  // namespace lawson::plan
