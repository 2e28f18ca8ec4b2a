// The tensors of a fusion in cuDNN's hands: inputs as memory seen through views, results of
// operations, outputs with the memory that they end in. Included by lowering.cpp alone.
#pragma once

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>

#include "engine/cudnn/facts.h"
#include "engine/cudnn/lowering_types.h"

namespace lawson::cudnn {

// The tensors from which a node makes one operand: the operand itself and what is before it.
inline std::vector<bool> made_from(const ir::Graph& graph, ir::TensorId operand) {
  std::vector<bool> found(graph.tensors.size(), false);
  found[static_cast<std::size_t>(operand)] = true;
  for (std::size_t i = graph.nodes.size(); i-- > 0;) {
    const ir::Node& node = graph.nodes[i];
    const bool makes = std::any_of(node.outputs.begin(), node.outputs.end(), [&](ir::TensorId id) {
      return id != ir::kNone && found[static_cast<std::size_t>(id)];
    });
    for (const ir::TensorId id : node.inputs) {
      if (makes && id != ir::kNone) found[static_cast<std::size_t>(id)] = true;
    }
  }
  return found;
}

// The one matmul of a graph without batches and reductions, whose operands have nothing in common;
// nullptr: another graph.
inline const ir::Node* splittable_product(const ir::Graph& graph) {
  const ir::Node* product = nullptr;
  for (const ir::Node& node : graph.nodes) {
    if (!std::holds_alternative<ir::Matmul>(node.op)) continue;
    if (product != nullptr) return nullptr;
    product = &node;
  }
  if (product == nullptr || has_reduction(graph) ||
      fold_shape(graph.tensor(product->outputs[0]).shape)[0] != 1) {
    return nullptr;
  }
  const std::vector<bool> left = made_from(graph, product->inputs[0]);
  const std::vector<bool> right = made_from(graph, product->inputs[1]);
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (left[i] && right[i]) return nullptr;
  }
  return product;
}

// In how many batches the rows of a product may be split, 1 first: the products of leading dims of
// what is read or written.
inline std::vector<std::int64_t> row_splits(const ir::Graph& graph) {
  std::vector<std::int64_t> splits{1};
  const ir::Node* product = splittable_product(graph);
  if (product == nullptr) return splits;
  const std::int64_t rows = fold_shape(graph.tensor(product->outputs[0]).shape)[1];
  for (ir::TensorId id = 0; id < graph.input_count + graph.output_count; ++id) {
    const Dims& shape = graph.tensor(id).shape;
    std::int64_t leading = 1;
    for (std::size_t i = 0; i + 2 < shape.size(); ++i) {
      leading *= shape[i];
      if (leading <= 1 || leading >= rows || rows % leading != 0) continue;
      if (std::find(splits.begin(), splits.end(), leading) == splits.end()) {
        splits.push_back(leading);
      }
    }
  }
  return splits;
}

class FusionValues {
 public:
  const std::vector<std::string>& rewrites() const { return rewrites_; }

 protected:
  // `row_batches`: the rows of the product are that many batches of fewer (row_splits).
  FusionValues(const ir::Graph& graph, FrontendGraph& target, Supplies& supplies,
               std::int64_t row_batches)
      : graph_{graph},
        target_{target},
        supplies_{supplies},
        has_product_{has_matmul(graph)},
        channels_last_{!has_product_ && has_reduction(graph)},
        row_batches_{row_batches},
        values_(graph.tensors.size()),
        is_right_(graph.tensors.size(), false) {
    if (row_batches_ > 1) {
      const ir::Node& product = *splittable_product(graph_);
      rows_ = fold_shape(tensor_of(product.outputs[0]).shape)[1];
      is_right_ = made_from(graph_, product.inputs[1]);
      rewritten("rows_as_batches");
    }
    for (ir::TensorId id = 0; id < graph_.input_count; ++id) {
      const ir::Tensor& tensor = graph_.tensor(id);
      value(id).kind = Value::Kind::memory;
      value(id).source = id;
      value(id).layout = {tensor.shape, tensor.strides, 0};
      value(id).right = is_right_[at(id)];
    }
    find_exact_tensors();
    absorb_views_into_outputs();
  }

  struct Value {
    enum class Kind { none, memory, computed, constant, iota };
    Kind kind = Kind::none;
    ir::TensorId source = ir::kNone;  // memory: the input that is looked at
    Layout layout;                    // memory: how
    bool right = false;               // memory: of a product's right operand, whose rows are K
    TensorPtr tensor;                 // computed
    Dims3 dims{1, 1, 1};              // computed: the tensor's dims; unit dims may still broadcast
    Type type = Type::FLOAT;          // computed
    double constant = 0;
    std::int64_t axis = 0;  // iota
  };

  // Where an intermediate is stored when the views that follow it are absorbed: an output.
  struct Sink {
    ir::TensorId output = ir::kNone;
    Layout layout;  // of the output's memory, in the intermediate's shape
  };

  static std::size_t at(ir::TensorId id) { return static_cast<std::size_t>(id); }
  Value& value(ir::TensorId id) { return values_[at(id)]; }
  const ir::Tensor& tensor_of(ir::TensorId id) const { return graph_.tensor(id); }

  Error refuse(std::string code, const ir::Node& node, std::string_view why) const {
    return unsupported(std::move(code), fmt::format("{}: {}", label_of(graph_, node), why),
                       result_of(graph_, node));
  }

  void rewritten(std::string name) {
    if (std::find(rewrites_.begin(), rewrites_.end(), name) != rewrites_.end()) return;
    rewrites_.push_back(std::move(name));
  }

  std::int64_t own_uid() { return kFirstOwnUid + own_uids_++; }

  // ---- Rank 3 ----------------------------------------------------------------------------------

  // [M, X] as [batches, M / batches, X] where rows are split; other shapes as they are.
  Dims split_rows(const Dims& shape) const {
    const std::size_t rank = shape.size();
    if (row_batches_ == 1 || rank < 2 || shape[rank - 2] != rows_ ||
        element_count(shape) != rows_ * shape[rank - 1]) {
      return shape;
    }
    return {row_batches_, rows_ / row_batches_, shape[rank - 1]};
  }

  Dims3 folded_shape(ir::TensorId id) const {
    const Dims& shape = tensor_of(id).shape;
    return fold_shape(is_right_[at(id)] ? shape : split_rows(shape));
  }

  std::optional<Folded> folded_layout(const Layout& layout, bool right) const {
    if (right || row_batches_ == 1) return fold_layout(layout);
    const auto split = reshape_layout(layout, split_rows(layout.shape));
    return split ? fold_layout(*split) : std::nullopt;
  }

  // A layout of the shape, or of the shape with its rows split.
  std::optional<Layout> reshaped(const Layout& layout, const Dims& shape, bool right) const {
    const auto whole = reshape_layout(layout, shape);
    if (whole || right || row_batches_ == 1) return whole;
    return reshape_layout(layout, split_rows(shape));
  }

  // ---- cuDNN's dims ----------------------------------------------------------------------------

  // Without a matmul cuDNN reduces only what lies channels last, in rank 4: [b, m, n] is then batch
  // b, channels n, height m, width 1.
  Dims native_dims(const Dims3& dims) const {
    if (!channels_last_) return dims_of(dims);
    return {dims[0], dims[2], dims[1], 1};
  }
  Dims native_strides(const Dims3& strides) const {
    if (!channels_last_) return dims_of(strides);
    return {strides[0], strides[2], strides[1], strides[1]};
  }

  // ---- What may be carried wider than written --------------------------------------------------

  // Narrow float intermediates that only pointwise ops read are kept in f32, as fusing compilers
  // do; operands of a matmul, outputs and other types are exactly what was written.
  void find_exact_tensors() {
    exact_.assign(graph_.tensors.size(), false);
    pointwise_only_.assign(graph_.tensors.size(), true);
    for (const ir::Node& node : graph_.nodes) {
      for (const ir::TensorId id : node.inputs) {
        if (id != ir::kNone && !is_pointwise(node.op)) pointwise_only_[at(id)] = false;
      }
    }
    for (ir::TensorId id = 0; id < static_cast<ir::TensorId>(graph_.tensors.size()); ++id) {
      const DType dtype = tensor_of(id).dtype;
      exact_[at(id)] = graph_.is_input(id) || graph_.is_output(id) ||
                       (dtype != DType::f16 && dtype != DType::bf16);
    }
    for (const ir::Node& node : graph_.nodes) {
      if (!std::holds_alternative<ir::Matmul>(node.op)) continue;
      for (const ir::TensorId id : node.inputs) exact_[at(id)] = true;
    }
  }

  static bool is_pointwise(const ir::Op& op) {
    return std::holds_alternative<ir::Unary>(op) || std::holds_alternative<ir::UnaryGrad>(op) ||
           std::holds_alternative<ir::Binary>(op) || std::holds_alternative<ir::Compare>(op) ||
           std::holds_alternative<ir::Select>(op) || std::holds_alternative<ir::Clamp>(op);
  }

  static bool is_view(const ir::Op& op) {
    return std::holds_alternative<ir::Broadcast>(op) || std::holds_alternative<ir::Reshape>(op) ||
           std::holds_alternative<ir::Transpose>(op) || std::holds_alternative<ir::Slice>(op);
  }

  // Pointwise operations compute in f32 whatever they read: a conversion of narrower floats to it
  // is nothing to do, and without it more engines know the graph (cuBLASLt's epilogues, say).
  bool converts_on_reading(ir::TensorId from, ir::TensorId to) const {
    const DType dtype = tensor_of(from).dtype;
    return graph_.is_input(from) && tensor_of(to).dtype == DType::f32 && !graph_.is_output(to) &&
           pointwise_only_[at(to)] && (dtype == DType::f16 || dtype == DType::bf16);
  }

  // The one rounding of an f32 result on its way to memory can be that of the operation before.
  bool rounds_on_writing(const ir::Op& producer, ir::TensorId from, ir::TensorId to) const {
    const DType dtype = tensor_of(to).dtype;
    return (is_pointwise(producer) || std::holds_alternative<ir::Matmul>(producer) ||
            std::holds_alternative<ir::ScaledMatmul>(producer)) &&
           tensor_of(from).dtype == DType::f32 && (dtype == DType::f16 || dtype == DType::bf16);
  }

  Type carried_type(ir::TensorId id) const {
    return exact_[at(id)] ? type_of(tensor_of(id).dtype) : Type::FLOAT;
  }

  Status check_strict() const {
    for (std::size_t i = 0; i < graph_.tensors.size(); ++i) {
      if (exact_[i]) continue;
      return refuse("strict", *producers_[i],
                    fmt::format("strict = true: its result has dtype {}, and cuDNN carries it in "
                                "f32 to the next operation",
                                to_string(graph_.tensors[i].dtype)));
    }
    return {};
  }

  // ---- Views of results ------------------------------------------------------------------------

  void absorb_views_into_outputs() {
    absorbed_nodes_.assign(graph_.nodes.size(), false);
    readers_.assign(graph_.tensors.size(), 0);
    producers_.assign(graph_.tensors.size(), nullptr);
    for (const ir::Node& node : graph_.nodes) {
      for (const ir::TensorId id : node.outputs) {
        if (id != ir::kNone) producers_[at(id)] = &node;
      }
      for (const ir::TensorId id : node.inputs) {
        if (id != ir::kNone) ++readers_[at(id)];
      }
    }
    for (std::size_t i = graph_.nodes.size(); i-- > 0;) {
      const ir::Node& node = graph_.nodes[i];
      if (const auto* concat = std::get_if<ir::Concat>(&node.op)) {
        absorbed_nodes_[i] = absorb_concat(node, *concat);
      } else if (is_view(node.op) || std::holds_alternative<ir::Convert>(node.op)) {
        absorbed_nodes_[i] = absorb_view(node);
      }
    }
  }

  // A result that is only stored: it can be where, and how, the node that reads it would store it.
  bool ends_in(ir::TensorId from) const {
    return !graph_.is_input(from) && !graph_.is_output(from) && readers_[at(from)] == 1;
  }

  bool absorb_view(const ir::Node& node) {
    const ir::TensorId from = node.inputs[0];
    const ir::TensorId to = node.outputs[0];
    const Sink* sink = sink_of(to);
    if (!ends_in(from) || sink == nullptr || readers_[at(to)] != 0) return false;
    std::optional<Layout> layout;
    // A reduction rounds once, to the type it is stored in: cuDNN takes nothing behind it.
    if (std::holds_alternative<ir::Convert>(node.op)) {
      const ir::Op& producer = producers_[at(from)]->op;
      const bool reduced = std::holds_alternative<ir::Reduce>(producer) &&
                           is_float(tensor_of(from).dtype) && is_float(tensor_of(to).dtype);
      if (reduced || rounds_on_writing(producer, from, to)) layout = sink->layout;
    }
    if (!layout && tensor_of(from).dtype != tensor_of(to).dtype) return false;
    if (const auto* transpose = std::get_if<ir::Transpose>(&node.op)) {
      Dims inverse(transpose->perm.size());
      for (std::size_t axis = 0; axis < inverse.size(); ++axis) {
        inverse[static_cast<std::size_t>(transpose->perm[axis])] = static_cast<std::int64_t>(axis);
      }
      layout = transpose_layout(sink->layout, inverse);
    } else if (std::holds_alternative<ir::Reshape>(node.op)) {
      layout = reshaped(sink->layout, tensor_of(from).shape, is_right_[at(from)]);
    }
    if (!layout || !folded_layout(*layout, is_right_[at(from)])) return false;
    sinks_[from] = {sink->output, std::move(*layout)};
    exact_[at(from)] = true;
    return true;
  }

  // Each operand is stored in its part of the output.
  bool absorb_concat(const ir::Node& node, const ir::Concat& concat) {
    const Sink* sink = sink_of(node.outputs[0]);
    if (sink == nullptr || readers_[at(node.outputs[0])] != 0) return false;
    const auto axis = static_cast<std::size_t>(concat.axis);
    const DType dtype = tensor_of(node.outputs[0]).dtype;
    std::vector<std::pair<ir::TensorId, Sink>> parts;
    Dims start(sink->layout.shape.size(), 0);
    for (const ir::TensorId from : node.inputs) {
      Dims limit = start;
      for (std::size_t i = 0; i < limit.size(); ++i) limit[i] += tensor_of(from).shape[i];
      Layout part = slice_layout(sink->layout, start, limit, Dims(start.size(), 1));
      if (!ends_in(from) || !fold_layout(part) || part.offset * bit_width(dtype) % 8 != 0) {
        return false;
      }
      parts.emplace_back(from, Sink{sink->output, std::move(part)});
      start[axis] += tensor_of(from).shape[axis];
    }
    for (auto& [from, part] : parts) {
      sinks_[from] = std::move(part);
      exact_[at(from)] = true;
    }
    rewritten("concat_as_parts");
    return true;
  }

  const Sink* sink_of(ir::TensorId id) {
    if (const auto found = sinks_.find(id); found != sinks_.end()) return &found->second;
    if (!graph_.is_output(id)) return nullptr;
    return &sinks_.emplace(id, Sink{id, {tensor_of(id).shape, tensor_of(id).strides, 0}})
                .first->second;
  }

  // ---- Memory ----------------------------------------------------------------------------------

  // The uid of a view of a tensor of the caller's: his own for the first that begins where the
  // tensor does.
  std::int64_t uid_of(ir::TensorId id, std::int64_t byte_offset) {
    if (byte_offset == 0 && !used_[id]) {
      used_[id] = true;
      return ir::Graph::uid(id);
    }
    const std::int64_t uid = own_uid();
    supplies_.derived.push_back({uid, ir::Graph::uid(id), byte_offset});
    return uid;
  }

  // What a part of a tensor that begins so many bytes behind it can promise.
  Result<std::int64_t> alignment_at(const ir::Node& node, const ir::Tensor& tensor,
                                    std::int64_t byte_offset) const {
    std::int64_t alignment = tensor.alignment;
    while (alignment > 1 && byte_offset % alignment != 0) alignment /= 2;
    const std::int64_t element = bit_width(tensor.dtype) / 8;
    if (alignment >= element) return alignment;
    return refuse("alignment", node,
                  fmt::format("{} has an alignment of {} bytes; cuDNN needs at least that of an "
                              "element, {}",
                              tensor.name, alignment, element));
  }

  // The frontend tensor for a view of an input. Block scales have an order of their own.
  Result<TensorPtr> memory_tensor(const ir::Node& node, const Value& view, Dims3& dims,
                                  bool swizzled = false) {
    const ir::Tensor& source = tensor_of(view.source);
    const auto folded = folded_layout(view.layout, view.right);
    if (!folded) {
      return refuse(
          "rank", node,
          fmt::format("the leading dims of {} {} (strides {}) cannot be one batch dim; "
                      "cuDNN's fusions have rank 3",
                      source.name, to_string(view.layout.shape), to_string(view.layout.strides)));
    }
    dims = folded->dims;
    const auto key =
        std::tuple{view.source, folded->dims, folded->strides, view.layout.offset, swizzled};
    if (const auto found = memory_tensors_.find(key); found != memory_tensors_.end()) {
      return found->second;
    }
    const std::int64_t bits = view.layout.offset * bit_width(source.dtype);
    if (bits % 8 != 0) {
      return refuse("slice", node, fmt::format("{} starts inside a byte", source.name));
    }
    LAWSON_TRY(const std::int64_t alignment, alignment_at(node, source, bits / 8));
    fe::graph::Tensor_attributes attributes;
    attributes.set_uid(uid_of(view.source, bits / 8))
        .set_name(source.name)
        .set_dim(native_dims(folded->dims))
        .set_stride(native_strides(folded->strides))
        .set_data_type(source.dtype == DType::boolean ? byte_type() : type_of(source.dtype))
        .set_alignment(alignment)
        .set_is_pass_by_value(source.by_value);
    if (swizzled) attributes.set_reordering_type(fe::TensorReordering_t::F8_128x4);
    TensorPtr tensor = target_.tensor(attributes);
    if (source.dtype == DType::boolean) {
      // Without a matmul, cuDNN's kernels that compare bytes as they come do not compile.
      if (!has_product_) tensor = virtual_pointwise(Mode::IDENTITY, {tensor}, dims);
      tensor = virtual_pointwise(Mode::CMP_NEQ, {tensor, scalar(0, truth_type())}, dims,
                                 Type::BOOLEAN, truth_type());
    }
    memory_tensors_.emplace(key, tensor);
    return tensor;
  }

  // cuDNN's own booleans in memory are packed bits; ours are bytes.
  Type byte_type() const { return has_product_ ? Type::UINT8 : Type::INT8; }
  // What turns booleans into numbers and back computes in: without a matmul, f32 is all there is.
  Type truth_type() const { return has_product_ ? Type::INT32 : Type::FLOAT; }

  TensorPtr scalar(double number, Type type) const {
    TensorPtr tensor;
    if (type == Type::INT32) {
      const double limit = std::numeric_limits<std::int32_t>::max();
      tensor = std::make_shared<fe::graph::Tensor_attributes>(
          static_cast<std::int32_t>(std::clamp(number, -limit - 1, limit)));
    } else if (type == Type::DOUBLE) {
      tensor = std::make_shared<fe::graph::Tensor_attributes>(number);
    } else {
      tensor = std::make_shared<fe::graph::Tensor_attributes>(static_cast<float>(number));
    }
    tensor->set_dim(native_dims({1, 1, 1})).set_stride(native_strides({1, 1, 1}));
    return tensor;
  }

  // ---- Operands --------------------------------------------------------------------------------

  // An operand of a pointwise op whose result has the folded shape `wanted`.
  Result<TensorPtr> operand(const ir::Node& node, ir::TensorId id, Type compute,
                            const Dims3& wanted) {
    const Value& known = value(id);
    switch (known.kind) {
      case Value::Kind::memory: {
        Dims3 dims{};
        LAWSON_TRY(TensorPtr tensor, memory_tensor(node, known, dims));
        LAWSON_CHECK(check_broadcast(node, id, dims, wanted));
        LAWSON_CHECK(check_vector(node, known));
        return tensor;
      }
      case Value::Kind::computed:
        LAWSON_CHECK(check_broadcast(node, id, known.dims, wanted));
        return known.tensor;
      case Value::Kind::constant:
        return scalar(known.constant, compute == Type::BOOLEAN ? truth_type() : compute);
      case Value::Kind::iota:
        return iota(node, id, wanted);
      case Value::Kind::none:
        break;
    }
    return refuse("operand", node, "an operand has no value");
  }

  // Measured on an H200 with cuDNN 9.19.0: a vector is read as if its elements lay side by side,
  // whatever its stride.
  Status check_vector(const ir::Node& node, const Value& view) const {
    const auto folded = folded_layout(view.layout, view.right);
    if (!folded || !has_product_) return {};
    const auto& [dims, strides] = *folded;
    const bool spaced_rows = dims[1] > 1 && dims[2] == 1 && strides[1] != 1;
    const bool spaced_columns = dims[1] == 1 && dims[2] > 1 && strides[2] != 1;
    if (!spaced_rows && !spaced_columns) return {};
    const ir::Tensor& source = tensor_of(view.source);
    return refuse(
        "strides", node,
        fmt::format("{} {} is read as a vector whose elements are {} apart; cuDNN 9.19 "
                    "accepts that and reads neighbours: give it a stride of 1",
                    source.name, to_string(source.shape), spaced_rows ? strides[1] : strides[2]));
  }

  Status check_broadcast(const ir::Node& node, ir::TensorId id, const Dims3& dims,
                         const Dims3& wanted) const {
    for (std::size_t i = 0; i < 3; ++i) {
      if (dims[i] != 1 && dims[i] != wanted[i]) {
        return refuse(
            "rank", node,
            fmt::format("{} {} broadcasts over only some of the leading dims of the result, which "
                        "cuDNN sees as one batch dim",
                        tensor_of(id).name, to_string(tensor_of(id).shape)));
      }
    }
    return {};
  }

  // cuDNN's index generator takes its shape from a tensor: the other operand, or a product.
  Result<TensorPtr> iota(const ir::Node& node, ir::TensorId id, const Dims3& wanted) {
    const ir::Node& made = *producers_[at(id)];
    const auto axis = fold_axis(tensor_of(id).shape, value(id).axis);
    if (!axis || row_batches_ > 1) {
      return refuse("iota", made, "its axis is one of several leading dims above 1");
    }
    for (const ir::TensorId other : node.inputs) {
      if (other == id || other == ir::kNone) continue;
      const Value& shape = value(other);
      TensorPtr tensor;
      Dims3 dims{};
      if (shape.kind == Value::Kind::computed) {
        tensor = shape.tensor;
        dims = shape.dims;
      } else if (shape.kind == Value::Kind::memory) {
        LAWSON_TRY(tensor, memory_tensor(node, shape, dims));
      }
      if (tensor != nullptr && dims == wanted) return index_like(tensor, *axis, wanted);
    }
    for (const auto& [dims, tensor] : products_) {
      if (dims == wanted) return index_like(tensor, *axis, wanted);
    }
    return refuse("iota", made,
                  "cuDNN makes indices only beside a tensor of their full shape: another operand, "
                  "or the result of a matmul");
  }

  TensorPtr index_like(const TensorPtr& tensor, int axis, const Dims3& dims) {
    const TensorPtr index = target_.pointwise(tensor, Pointwise()
                                                          .set_name("iota")
                                                          .set_mode(Mode::GEN_INDEX)
                                                          .set_axis(axis)
                                                          .set_compute_data_type(Type::INT32));
    index->set_dim(native_dims(dims))
        .set_stride(native_strides(packed_strides(dims)))
        .set_data_type(Type::INT32);
    return index;
  }

  // ---- Results ---------------------------------------------------------------------------------

  TensorPtr virtual_pointwise(Mode mode, const std::vector<TensorPtr>& operands, const Dims3& dims,
                              Type type = Type::FLOAT, Type compute = Type::FLOAT,
                              Pointwise attributes = {}) {
    attributes.set_mode(mode).set_compute_data_type(compute).set_name(
        fmt::format("op{}", ++op_count_));
    TensorPtr result;
    if (operands.size() == 1) {
      result = target_.pointwise(operands[0], attributes);
    } else if (operands.size() == 2) {
      result = target_.pointwise(operands[0], operands[1], attributes);
    } else {
      result = target_.pointwise(operands[0], operands[1], operands[2], attributes);
    }
    result->set_dim(native_dims(dims))
        .set_stride(native_strides(packed_strides(dims)))
        .set_data_type(type);
    return result;
  }

  // Gives the result of a node its shape and, for an output, its memory.
  Status finish(const ir::Node& node, const TensorPtr& tensor,
                const std::optional<Layout>& output_layout = std::nullopt) {
    const ir::TensorId id = node.outputs[0];
    Value& result = value(id);
    result.kind = Value::Kind::computed;
    result.tensor = tensor;
    result.dims = folded_shape(id);
    result.type = carried_type(id);
    const Sink* sink = sink_of(id);
    if (sink == nullptr) {
      tensor->set_dim(native_dims(result.dims))
          .set_stride(native_strides(packed_strides(result.dims)))
          .set_data_type(result.type);
      return {};
    }
    const ir::Tensor& output = tensor_of(sink->output);
    const Layout& layout = output_layout ? *output_layout : sink->layout;
    const auto folded = folded_layout(layout, is_right_[at(id)]);
    if (!folded) {
      return refuse("rank", node,
                    fmt::format("the leading dims of output {} {} (strides {}) cannot be one batch "
                                "dim; cuDNN's fusions have rank 3",
                                output.name, to_string(output.shape), to_string(output.strides)));
    }
    const std::int64_t bytes = layout.offset * bit_width(output.dtype) / 8;
    LAWSON_TRY(const std::int64_t alignment, alignment_at(node, output, bytes));
    result.dims = folded->dims;
    result.type = type_of(output.dtype);
    tensor->set_output(true)
        .set_uid(uid_of(sink->output, bytes))
        .set_name(output.name)
        .set_dim(native_dims(folded->dims))
        .set_stride(native_strides(folded->strides))
        .set_data_type(result.type)
        .set_alignment(alignment);
    return {};
  }

  // The same value under another name; an output of it is a copy.
  Status alias(const ir::Node& node) {
    const ir::TensorId from = node.inputs[0];
    const ir::TensorId to = node.outputs[0];
    if (sink_of(to) == nullptr) {
      value(to) = value(from);
      return {};
    }
    if (value(from).kind == Value::Kind::constant) {
      return refuse("constant", node, "an output that is only a constant has nothing to fuse");
    }
    const Dims3 dims = folded_shape(to);
    if (tensor_of(to).dtype == DType::boolean) {
      LAWSON_TRY(const TensorPtr bits, operand(node, from, Type::BOOLEAN, dims));
      return store_boolean(node, bits, dims);
    }
    const Type compute = compute_type(node);
    LAWSON_TRY(const TensorPtr x, operand(node, from, compute, dims));
    return finish(node, virtual_pointwise(Mode::IDENTITY, {x}, dims, Type::FLOAT, compute));
  }

  // f64 when anything is, i32 among integers, else f32. Without a matmul cuDNN computes in f32
  // alone, which holds sums and products of 8-bit integers.
  Type compute_type(const ir::Node& node) const {
    bool integers = true;
    bool bytes = !has_product_ && !divides(node.op);
    bool wide = false;
    const auto look = [&](ir::TensorId id) {
      if (id == ir::kNone || tensor_of(id).dtype == DType::boolean) return;
      integers = integers && is_integer(tensor_of(id).dtype);
      wide = wide || tensor_of(id).dtype == DType::f64;
    };
    for (const ir::TensorId id : node.inputs) {
      look(id);
      bytes = bytes && id != ir::kNone && bit_width(tensor_of(id).dtype) <= 8;
    }
    for (const ir::TensorId id : node.outputs) look(id);
    if (wide) return Type::DOUBLE;
    return integers && !bytes ? Type::INT32 : Type::FLOAT;
  }

  static bool divides(const ir::Op& op) {
    const auto* binary = std::get_if<ir::Binary>(&op);
    return binary != nullptr &&
           (binary->kind == ir::BinaryKind::div || binary->kind == ir::BinaryKind::mod ||
            binary->kind == ir::BinaryKind::pow);
  }

  // A boolean result: bits inside the kernel, bytes in memory.
  Status store_boolean(const ir::Node& node, const TensorPtr& bits, const Dims3& dims) {
    const ir::TensorId id = node.outputs[0];
    if (sink_of(id) != nullptr) {
      const Type type = truth_type();
      const TensorPtr bytes = virtual_pointwise(
          Mode::BINARY_SELECT, {scalar(1, type), scalar(0, type), bits}, dims, byte_type(), type);
      LAWSON_CHECK(finish(node, bytes));
      bytes->set_data_type(byte_type());
    }
    Value& result = value(id);
    result.kind = Value::Kind::computed;
    result.tensor = bits;
    result.dims = dims;
    result.type = Type::BOOLEAN;
    return {};
  }

  const ir::Graph& graph_;
  FrontendGraph& target_;
  Supplies& supplies_;
  bool has_product_;
  bool channels_last_;
  std::int64_t row_batches_;
  std::int64_t rows_ = 0;  // of the product, when they are split
  std::vector<Value> values_;
  std::vector<bool> is_right_;  // a product's right operand is made from it; when rows are split
  std::vector<bool> exact_;
  std::vector<bool> pointwise_only_;  // read by pointwise operations alone
  std::vector<int> readers_;
  std::vector<const ir::Node*> producers_;
  std::vector<bool> absorbed_nodes_;
  std::map<ir::TensorId, Sink> sinks_;
  std::map<ir::TensorId, bool> used_;
  std::map<std::tuple<ir::TensorId, Dims3, Dims3, std::int64_t, bool>, TensorPtr> memory_tensors_;
  std::vector<std::pair<Dims3, TensorPtr>> products_;  // results of matmuls
  std::vector<std::string> rewrites_;
  std::int64_t own_uids_ = 0;
  int op_count_ = 0;
};

}  // namespace lawson::cudnn
