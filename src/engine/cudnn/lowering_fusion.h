// Graphs of pointwise ops, matmuls, reductions and norms in the frontend's terms: everything in
// rank 3, views absorbed in strides, conversions as identity operations. Included by lowering.cpp
// alone.
#pragma once

#include <cmath>

#include "engine/cudnn/lowering_norm.h"

namespace lawson::cudnn {

class FusionLowering : public NormLowering {
 public:
  FusionLowering(const ir::Graph& graph, FrontendGraph& target, Supplies& supplies,
                 const Device& device, std::int64_t row_batches)
      : NormLowering{graph, target, supplies, row_batches}, device_{device} {}

  Status run() {
    target_.set_io_data_type(Type::FLOAT)
        .set_intermediate_data_type(Type::FLOAT)
        .set_compute_data_type(Type::FLOAT);
    if (graph_.strict) LAWSON_CHECK(check_strict());
    LAWSON_CHECK(check_norm_is_alone());
    const std::vector<bool> first = needed_by_products();
    for (const bool turn : {true, false}) {
      for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
        if (first[i] == turn && !absorbed_nodes_[i]) LAWSON_CHECK(lower(graph_.nodes[i]));
      }
    }
    return {};
  }

 private:
  using NormLowering::lower_op;
  using PointwiseLowering::lower_op;

  // Products and what they are made from: lowered first, for indices take their shape from one.
  std::vector<bool> needed_by_products() const {
    std::vector<bool> nodes(graph_.nodes.size(), false);
    std::vector<bool> tensors(graph_.tensors.size(), false);
    for (std::size_t i = graph_.nodes.size(); i-- > 0;) {
      const ir::Node& node = graph_.nodes[i];
      nodes[i] = std::holds_alternative<ir::Matmul>(node.op) ||
                 std::holds_alternative<ir::ScaledMatmul>(node.op) ||
                 std::any_of(node.outputs.begin(), node.outputs.end(),
                             [&](ir::TensorId id) { return id != ir::kNone && tensors[at(id)]; });
      for (const ir::TensorId id : node.inputs) {
        if (nodes[i] && id != ir::kNone) tensors[at(id)] = true;
      }
    }
    return nodes;
  }

  Status lower(const ir::Node& node) {
    return std::visit([&](const auto& op) { return lower_op(node, op); }, node.op);
  }

  // ---- Products --------------------------------------------------------------------------------

  Status lower_op(const ir::Node& node, const ir::Matmul&) {
    LAWSON_TRY(const TensorPtr a, matmul_operand(node, node.inputs[0]));
    LAWSON_TRY(const TensorPtr b, matmul_operand(node, node.inputs[1]));
    const DType dtype = tensor_of(node.inputs[0]).dtype;
    const Type compute = is_integer(dtype) ? Type::INT32
                         : dtype == DType::f64 || tensor_of(node.inputs[1]).dtype == DType::f64
                             ? Type::DOUBLE
                             : Type::FLOAT;
    return multiply(node, a, b, compute);
  }

  Status multiply(const ir::Node& node, const TensorPtr& a, const TensorPtr& b, Type compute) {
    const Dims3 dims = folded_shape(node.outputs[0]);
    for (const TensorPtr& factor : {a, b}) {
      const std::int64_t batch = factor->get_dim()[0];
      if (batch != 1 && batch != dims[0]) {
        return refuse(
            "rank", node,
            fmt::format("an operand has {} of {} batches: it broadcasts over only some of "
                        "the batch dims, which cuDNN sees as one",
                        batch, dims[0]));
      }
    }
    if (a->get_dim()[0] == 1 && b->get_dim()[0] == 1 && dims[0] != 1) {
      return refuse("matmul_operand", node,
                    fmt::format("both operands repeat along the batch, so all {} products are the "
                                "same; cuDNN computes one: multiply once, and repeat the result",
                                dims[0]));
    }
    const TensorPtr product = target_.matmul(a, b,
                                             fe::graph::Matmul_attributes()
                                                 .set_name(tensor_of(node.outputs[0]).name)
                                                 .set_compute_data_type(compute));
    LAWSON_CHECK(finish(node, product));
    products_.emplace_back(value(node.outputs[0]).dims, product);
    return {};
  }

  // A matmul reads its operand in exactly the type that was written.
  Result<TensorPtr> matmul_operand(const ir::Node& node, ir::TensorId id) {
    const Dims3 dims = folded_shape(id);
    const Value& known = value(id);
    Dims3 real = known.dims;
    TensorPtr tensor = known.tensor;
    if (known.kind == Value::Kind::memory) {
      LAWSON_TRY(tensor, memory_tensor(node, known, real));
    } else if (known.kind != Value::Kind::computed) {
      return refuse("matmul_operand", node,
                    fmt::format("{} is a constant or an index, not a tensor", tensor_of(id).name));
    }
    if (real[1] != dims[1] || real[2] != dims[2]) {
      return refuse("matmul_operand", node,
                    fmt::format("{} repeats along a row or column; cuDNN broadcasts only the batch",
                                tensor_of(id).name));
    }
    if (known.kind == Value::Kind::computed && known.type != type_of(tensor_of(id).dtype)) {
      tensor = virtual_pointwise(Mode::IDENTITY, {tensor}, real, type_of(tensor_of(id).dtype));
    }
    return tensor;
  }

  // Block-scaled operands are dequantised on the way into the tensor cores of compute capability
  // 10.0 and newer.
  Status lower_op(const ir::Node& node, const ir::ScaledMatmul& op) {
    using Scaled = ir::ScaledMatmul;
    if (device_.compute_capability < 1000) {
      return refuse("compute_capability", node,
                    fmt::format("{} has compute capability {}; block-scaled products need 10.0 or "
                                "newer",
                                device_.name, compute_capability_text(device_.compute_capability)));
    }
    LAWSON_CHECK(check_block_scales(node, op));
    LAWSON_TRY(const TensorPtr a, scaled_operand(node, op, Scaled::a, Scaled::a_scale));
    LAWSON_TRY(const TensorPtr b, scaled_operand(node, op, Scaled::b, Scaled::b_scale));
    return multiply(node, a, b, Type::FLOAT);
  }

  Status check_block_scales(const ir::Node& node, const ir::ScaledMatmul& op) const {
    using Scaled = ir::ScaledMatmul;
    const auto dtype = [&](Scaled::In slot) { return tensor_of(node.inputs[slot]).dtype; };
    const bool four = dtype(Scaled::a) == DType::f4e2m1 && dtype(Scaled::b) == DType::f4e2m1;
    const bool eight = dtype(Scaled::a) != DType::f4e2m1 && dtype(Scaled::b) != DType::f4e2m1;
    const auto scaled_by = [&](DType scale, std::int64_t block) {
      return dtype(Scaled::a_scale) == scale && dtype(Scaled::b_scale) == scale &&
             op.block == block;
    };
    const bool known = (eight && scaled_by(DType::f8e8m0, 32)) ||
                       (four && (scaled_by(DType::f8e4m3, 16) || scaled_by(DType::f8e8m0, 32)));
    if (!known) {
      return refuse(
          "block_scale", node,
          fmt::format("{} x {} with {} and {} scales per {}; cuDNN takes MXFP8 (FP8 with f8e8m0 "
                      "per 32), NVFP4 (f4e2m1 with f8e4m3 per 16) and MXFP4 (f4e2m1 with f8e8m0 "
                      "per 32)",
                      to_string(dtype(Scaled::a)), to_string(dtype(Scaled::b)),
                      to_string(dtype(Scaled::a_scale)), to_string(dtype(Scaled::b_scale)),
                      op.block));
    }
    if (!op.swizzled) {
      return refuse("block_scale", node,
                    "swizzled = false; the tensor cores read scales in blocks of 128 rows by 4 "
                    "(swizzled = true), and what cuDNN makes of another order has not been "
                    "measured");
    }
    return {};
  }

  Result<TensorPtr> scaled_operand(const ir::Node& node, const ir::ScaledMatmul& op,
                                   std::size_t slot, std::size_t scale_slot) {
    const bool right = slot == ir::ScaledMatmul::b;
    for (const std::size_t each : {slot, scale_slot}) {
      if (value(node.inputs[each]).kind == Value::Kind::memory) continue;
      return refuse("matmul_operand", node,
                    fmt::format("{} is computed inside the fusion; cuDNN reads block-scaled "
                                "operands and their scales from memory",
                                tensor_of(node.inputs[each]).name));
    }
    const Value& known = value(node.inputs[slot]);
    Dims3 dims{};
    LAWSON_TRY(const TensorPtr values, memory_tensor(node, known, dims));
    LAWSON_CHECK(check_scaled_layout(node, known, values->get_stride(), right));
    LAWSON_TRY(const TensorPtr scales, scales_tensor(node, node.inputs[scale_slot], right));
    const auto block = static_cast<std::int32_t>(op.block);
    const TensorPtr result = target_.block_scale_dequantize(
        values, scales,
        fe::graph::Block_scale_dequantize_attributes()
            .set_block_size(right ? std::vector<std::int32_t>{block, 1}
                                  : std::vector<std::int32_t>{1, block})
            .set_is_negative_scale(false)
            .set_compute_data_type(Type::FLOAT)
            .set_name(fmt::format("dequantize{}", right ? 1 : 0)));
    result->set_dim(values->get_dim()).set_stride(values->get_stride()).set_data_type(Type::FLOAT);
    return result;
  }

  // Rows of 16 bytes at a time; 4-bit values with K contiguous.
  Status check_scaled_layout(const ir::Node& node, const Value& known, const Dims& strides,
                             bool right) const {
    const ir::Tensor& tensor = tensor_of(known.source);
    const int width = bit_width(tensor.dtype);
    const std::size_t along_k = right ? 1 : 2;
    if (width < 8 && strides[along_k] != 1) {
      return refuse(
          "strides", node,
          fmt::format("{} (strides {}) is {}; its elements along K have to lie side by "
                      "side",
                      tensor.name, to_string(known.layout.strides), to_string(tensor.dtype)));
    }
    const std::size_t contiguous = strides[along_k] == 1 ? along_k : 3 - along_k;
    for (const std::size_t axis : {std::size_t{0}, 3 - contiguous}) {
      if (strides[contiguous] == 1 && strides[axis] * width % 128 == 0) continue;
      return refuse(
          "strides", node,
          fmt::format("{} {} has strides {}; cuDNN reads block-scaled operands 16 bytes "
                      "at a time, and each of its rows has to begin at a multiple of "
                      "them",
                      tensor.name, to_string(known.layout.shape), to_string(known.layout.strides)));
    }
    return {};
  }

  // The order of the scales in memory is the tensor cores'; strides only say that they are packed.
  Result<TensorPtr> scales_tensor(const ir::Node& node, ir::TensorId id, bool right) {
    Value known = value(id);
    const std::size_t rank = known.layout.shape.size();
    Dims order(rank);
    for (std::size_t i = 0; i < rank; ++i) order[i] = static_cast<std::int64_t>(i);
    const bool rows = is_packed(known.layout, order);
    std::swap(order[rank - 2], order[rank - 1]);
    if (!rows && !is_packed(known.layout, order)) {
      return refuse(
          "strides", node,
          fmt::format("scales {} {} have strides {}; they have to lie packed", tensor_of(id).name,
                      to_string(known.layout.shape), to_string(known.layout.strides)));
    }
    known.layout.strides = contiguous_strides(known.layout.shape);
    if (right) {
      known.layout.strides[rank - 2] = 1;
      known.layout.strides[rank - 1] = known.layout.shape[rank - 2];
    }
    Dims3 dims{};
    return memory_tensor(node, known, dims, /*swizzled=*/true);
  }

  // ---- Reductions ------------------------------------------------------------------------------

  Status lower_op(const ir::Node& node, const ir::Reduce& op) {
    const ir::TensorId from = node.inputs[0];
    const ir::Tensor& x = tensor_of(from);
    const ir::Tensor& y = tensor_of(node.outputs[0]);
    // The result with its reduced axes kept as 1, and the output's memory seen that way.
    Dims kept = x.shape;
    for (const std::int64_t axis : op.axes) kept[static_cast<std::size_t>(axis)] = 1;
    LAWSON_CHECK(check_reduced_axes(node, op, x.shape));
    const Sink* sink = sink_of(node.outputs[0]);
    if (sink == nullptr || readers_[at(node.outputs[0])] != 0) {
      return refuse(
          "reduction", node,
          "its result is used by another operation; cuDNN takes reductions only at the exit");
    }
    const std::optional<Layout> layout = reshape_layout(sink->layout, kept);
    if (!layout) return refuse("reduction", node, "the output's strides do not allow it");
    LAWSON_TRY(const fe::ReductionMode_t mode, reduction_mode(node, op.kind));
    const Type compute = compute_type(node);
    const Dims3 whole = fold_shape(x.shape);
    LAWSON_TRY(TensorPtr tensor, operand(node, from, compute, whole));
    if (op.kind == ir::ReduceKind::norm1) {
      tensor = virtual_pointwise(Mode::ABS, {tensor}, whole, compute, compute);
    } else if (op.kind == ir::ReduceKind::mean) {
      LAWSON_TRY(tensor, divided(node, op, tensor, whole, compute));
    }
    const TensorPtr result = target_.reduction(
        tensor,
        fe::graph::Reduction_attributes().set_name(y.name).set_mode(mode).set_compute_data_type(
            compute));
    LAWSON_CHECK(finish(node, result, layout));
    value(node.outputs[0]).dims = fold_shape(kept);
    return {};
  }

  Status check_reduced_axes(const ir::Node& node, const ir::Reduce& op, const Dims& shape) const {
    const auto rank = static_cast<std::int64_t>(shape.size());
    std::int64_t reduced = 0;
    for (const std::int64_t axis : op.axes) reduced += axis < rank - 2 ? 1 : 0;
    for (const std::int64_t axis : op.axes) {
      if (axis < rank - 2 && reduced != rank - 2 && !fold_axis(shape, axis)) {
        return refuse("rank", node,
                      fmt::format("it reduces some of the leading dims of {}, which cuDNN sees as "
                                  "one batch dim",
                                  to_string(shape)));
      }
    }
    return {};
  }

  Result<fe::ReductionMode_t> reduction_mode(const ir::Node& node, ir::ReduceKind kind) const {
    using ir::ReduceKind;
    switch (kind) {
      case ReduceKind::sum:
      case ReduceKind::mean:   // of what is divided before
      case ReduceKind::norm1:  // of magnitudes
        return fe::ReductionMode_t::ADD;
      case ReduceKind::max:
        return fe::ReductionMode_t::MAX;
      case ReduceKind::min:
        return fe::ReductionMode_t::MIN;
      case ReduceKind::prod:
        return fe::ReductionMode_t::MUL;
      case ReduceKind::amax:
        return fe::ReductionMode_t::AMAX;
      case ReduceKind::norm2:
        break;
    }
    return refuse("op_not_in_cudnn", node,
                  "cuDNN's fusions have no such reduction, and take nothing (a square root) behind "
                  "one");
  }

  // cuDNN has no mean and takes nothing behind a reduction: each element is divided before. One
  // more rounding each, within what a mean's own division may add; none for powers of two.
  Result<TensorPtr> divided(const ir::Node& node, const ir::Reduce& op, const TensorPtr& x,
                            const Dims3& dims, Type compute) {
    std::int64_t count = 1;
    for (const std::int64_t axis : op.axes) {
      count *= tensor_of(node.inputs[0]).shape[static_cast<std::size_t>(axis)];
    }
    if (compute == Type::INT32) {
      return refuse("data_type", node, "the mean of integers; convert them to a float type first");
    }
    if (graph_.strict && (count & (count - 1)) != 0) {
      return refuse("strict", node,
                    fmt::format("strict = true: cuDNN has no mean, and a sum of elements divided "
                                "by {} before rounds each of them; powers of two do not",
                                count));
    }
    if (count == 1) return x;
    rewritten("mean_as_sum");
    return virtual_pointwise(Mode::MUL, {x, scalar(1.0 / static_cast<double>(count), compute)},
                             dims, compute, compute);
  }

  // ---- Views and values without operands -------------------------------------------------------

  Status lower_op(const ir::Node& node, const ir::Iota& op) {
    if (sink_of(node.outputs[0]) != nullptr) {
      return refuse("iota", node, "cuDNN makes indices only beside another operand");
    }
    if (!has_product_) {
      return refuse("iota", node,
                    "cuDNN 9.19 makes indices only in a fusion with a matmul; give them as an "
                    "input");
    }
    Value& result = value(node.outputs[0]);
    result.kind = Value::Kind::iota;
    result.axis = op.axis;
    return {};
  }

  Status lower_op(const ir::Node& node, const ir::Constant& op) {
    if (sink_of(node.outputs[0]) != nullptr) {
      return refuse("constant", node, "an output that is only a constant has nothing to fuse");
    }
    Value& result = value(node.outputs[0]);
    result.kind = Value::Kind::constant;
    result.constant = op.value;
    return {};
  }

  Status lower_op(const ir::Node& node, const ir::Broadcast& op) {
    return view(node, [&](const Layout& layout) { return broadcast_layout(layout, op.shape); });
  }
  Status lower_op(const ir::Node& node, const ir::Reshape& op) {
    return view(node, [&](const Layout& layout) {
      return reshaped(layout, op.shape, is_right_[at(node.outputs[0])]);
    });
  }
  Status lower_op(const ir::Node& node, const ir::Transpose& op) {
    return view(node, [&](const Layout& layout) {
      return std::optional{transpose_layout(layout, op.perm)};
    });
  }
  Status lower_op(const ir::Node& node, const ir::Slice& op) {
    return view(node, [&](const Layout& layout) {
      return std::optional{slice_layout(layout, op.start, op.limit, op.stride)};
    });
  }

  template <typename Change>
  Status view(const ir::Node& node, const Change& change) {
    const ir::TensorId from = node.inputs[0];
    const ir::TensorId to = node.outputs[0];
    const Value known = value(from);
    if (known.kind == Value::Kind::constant) return alias(node);
    if (known.kind == Value::Kind::iota && sink_of(to) == nullptr &&
        std::holds_alternative<ir::Broadcast>(node.op)) {
      value(to) = known;
      value(to).axis += static_cast<std::int64_t>(tensor_of(to).shape.size()) -
                        static_cast<std::int64_t>(tensor_of(from).shape.size());
      return {};
    }
    if (known.kind == Value::Kind::memory) {
      const auto layout = change(known.layout);
      if (!layout) {
        return refuse(
            "view", node,
            fmt::format("{} {} with strides {} would have to be copied; cuDNN absorbs only "
                        "views that strides express",
                        tensor_of(known.source).name, to_string(known.layout.shape),
                        to_string(known.layout.strides)));
      }
      Value& result = value(to);
      result = known;
      result.layout = *layout;
      if (sink_of(to) == nullptr) return {};
      const Dims3 dims = folded_shape(to);
      Dims3 real{};
      LAWSON_TRY(const TensorPtr tensor, memory_tensor(node, result, real));
      if (real != dims) {
        return refuse("view", node, "an output that only repeats an input has nothing to fuse");
      }
      if (tensor_of(to).dtype == DType::boolean) return store_boolean(node, tensor, dims);
      return finish(
          node, virtual_pointwise(Mode::IDENTITY, {tensor}, dims, Type::FLOAT, compute_type(node)));
    }
    // Of a computed value: only what changes nothing in rank 3, or a broadcast that the reader
    // does.
    const bool same = known.kind == Value::Kind::computed && known.dims == folded_shape(from) &&
                      folded_shape(from) == folded_shape(to) &&
                      !std::holds_alternative<ir::Transpose>(node.op) &&
                      !std::holds_alternative<ir::Slice>(node.op);
    const bool repeats = std::holds_alternative<ir::Broadcast>(node.op) &&
                         known.kind == Value::Kind::computed && sink_of(to) == nullptr;
    if (same || repeats) return alias(node);
    return refuse("view_of_intermediate", node,
                  fmt::format("{} is computed inside the fusion; cuDNN rearranges only inputs, and "
                              "results on their way to an output",
                              tensor_of(from).name));
  }

  Status lower_op(const ir::Node& node, const ir::Concat&) {
    return refuse("concat", node,
                  "no engine of cuDNN 9.19 takes its concatenation; only results that are computed "
                  "here, go nowhere else and end in an output are stored side by side");
  }

  Status lower_op(const ir::Node& node, const ir::Attention&) {
    return refuse("attention_with_other_ops", node, "cuDNN takes attention alone in a graph");
  }
  Status lower_op(const ir::Node& node, const ir::AttentionBackward&) {
    return refuse("attention_with_other_ops", node, "cuDNN takes attention alone in a graph");
  }
  Status lower_op(const ir::Node& node, const ir::CacheAppend&) {
    return refuse("op_not_lowered", node,
                  "cuDNN appends to a cache only before the attention that reads it");
  }

  const Device& device_;
};

}  // namespace lawson::cudnn
