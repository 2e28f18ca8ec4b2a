#include "cases/expected.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cases/judge.h"
#include "front/attention.h"
#include "ir/attention.h"

namespace lawson::cases {
namespace {

const ir::Tensor* find(const ir::Graph& graph, const std::string& name, ir::TensorId& id) {
  for (id = 0; id < graph.input_count + graph.output_count; ++id) {
    if (graph.tensor(id).name == name) return &graph.tensor(id);
  }
  return nullptr;
}

// Inputs of a backward that its forward computes.
bool of_forward(const std::string& name) {
  return name == "o" || name == "stats";
}

// The two graphs may round the same sequences up to different buckets: what they have in common is
// a leading box.
Dims common(const Dims& a, const Dims& b) {
  Dims box;
  for (std::size_t i = 0; i < a.size(); ++i) box.push_back(std::min(a[i], b[i]));
  return box;
}

template <typename Visit>
void for_each_in(const Dims& box, Visit visit) {
  if (element_count(box).value_or(0) == 0) return;
  Dims index(box.size(), 0);
  do {
    visit(index);
  } while (next_index(index, box));
}

// In the logical order of `shape`; 0 where the tensor has less.
std::vector<double> elements(const ir::Tensor& tensor, const plan::Buffer& buffer,
                             const Dims& shape) {
  std::vector<double> values(static_cast<std::size_t>(element_count(shape).value_or(0)), 0.0);
  const Dims strides = contiguous_strides(shape);
  for_each_in(common(tensor.shape, shape), [&](const Dims& at) {
    values[static_cast<std::size_t>(offset_of(at, strides))] =
        load_element(buffer.data(), tensor.dtype, offset_of(at, tensor.strides));
  });
  return values;
}

void copy_box(const ir::Tensor& from, const plan::Buffer& source, const ir::Tensor& to,
              plan::Buffer& target) {
  for_each_in(common(from.shape, to.shape), [&](const Dims& at) {
    store_element(target.data(), to.dtype, offset_of(at, to.strides),
                  load_element(source.data(), from.dtype, offset_of(at, from.strides)));
  });
}

// An output of shape `from` as one of shape `to`, in which there is as much.
OracleOutput in_shape(OracleOutput output, const Dims& from, ir::TensorId id, const Dims& to) {
  output.id = id;
  if (from == to) return output;
  OracleOutput result;
  result.id = id;
  result.there = common(output.there.empty() ? from : output.there, to);
  const auto count = static_cast<std::size_t>(element_count(to).value_or(0));
  result.values.assign(count, 0.0);
  result.bounds.assign(count, std::numeric_limits<double>::infinity());
  const Dims old_strides = contiguous_strides(from);
  const Dims new_strides = contiguous_strides(to);
  for_each_in(result.there, [&](const Dims& at) {
    const auto old_at = static_cast<std::size_t>(offset_of(at, old_strides));
    const auto new_at = static_cast<std::size_t>(offset_of(at, new_strides));
    result.values[new_at] = output.values[old_at];
    result.bounds[new_at] = output.bounds[old_at];
  });
  return result;
}

}  // namespace

Result<Expected> expected_of(Engine& engine, Engine& reference, const Case& item,
                             const ir::Graph& graph) {
  Expected result;
  LAWSON_TRY(result.inputs, plan::make_inputs(graph, item.seed, reference, item.style));
  const auto bindings = plan::bindings_of(result.inputs, {});
  LAWSON_TRY(result.outputs, reference.oracle(graph, bindings, engine.arithmetic(graph)));
  return result;
}

Result<Expected> expected_with_mask(Engine& engine, Engine& reference, const Case& item,
                                    const ir::Graph& graph, std::vector<double> mask) {
  LAWSON_TRY(auto spec, front::attention_from_json(item.spec, item.name));
  spec.dropout_mask_input = true;
  spec.return_dropout_mask = false;
  LAWSON_TRY(ir::Graph with_mask, front::attention_graph(spec, spec.pass));
  Expected result;
  LAWSON_TRY(result.inputs, plan::make_inputs(graph, item.seed, reference, item.style));
  // Everything but the mask, and what the forward computes from it, is the case's own.
  for (ir::TensorId id = 0; id < with_mask.input_count; ++id) {
    ir::Tensor& tensor = with_mask.tensors[static_cast<std::size_t>(id)];
    if (tensor.name == "dropout_mask") {
      for (double& keep : mask) keep = keep == 1 ? 1 : 0;
      mask.resize(static_cast<std::size_t>(element_count(tensor.shape).value_or(0)), 0.0);
      tensor.values = mask;
    } else if (!of_forward(tensor.name)) {
      ir::TensorId own = 0;
      if (find(graph, tensor.name, own) == nullptr) continue;
      tensor.values =
          elements(graph.tensor(own), result.inputs[static_cast<std::size_t>(own)], tensor.shape);
    }
  }
  LAWSON_TRY(Expected masked, expected_of(engine, reference, item, with_mask));
  for (plan::Buffer& buffer : result.inputs) {
    const ir::Tensor& tensor = graph.tensor(buffer.id());
    ir::TensorId from = 0;
    if (!of_forward(tensor.name) || find(with_mask, tensor.name, from) == nullptr) continue;
    copy_box(with_mask.tensor(from), masked.inputs[static_cast<std::size_t>(from)], tensor, buffer);
  }
  for (OracleOutput& output : masked.outputs) {
    const ir::Tensor& from = with_mask.tensor(output.id);
    ir::TensorId own = 0;
    if (find(graph, from.name, own) == nullptr) {
      return error(ErrorKind::internal, "the graph has no output '{}'", from.name);
    }
    result.outputs.push_back(in_shape(std::move(output), from.shape, own, graph.tensor(own).shape));
  }
  return result;
}

std::string wrong_rate(const std::vector<double>& mask, double probability, double& kept) {
  double ones = 0;
  double count = 0;
  for (const double keep : mask) {
    if (keep > 1) continue;
    ones += keep;
    ++count;
  }
  if (count == 0) return "";
  kept = ones / count;
  const double deviation = std::sqrt(probability * (1 - probability) / count);
  if (std::fabs(kept - (1 - probability)) <= 6 * deviation + 1 / count) return "";
  return fmt::format("dropout keeps {:.4f} of {} weights, expected {:.4f}", kept, count,
                     1 - probability);
}

}  // namespace lawson::cases
