// layer_norm and rms_norm, forward and backward: cuDNN's norm engines take one alone, on rows that
// lie packed. Included by lowering.cpp alone.
#pragma once

#include "engine/cudnn/lowering_pointwise.h"
#include "ir/norm.h"

namespace lawson::cudnn {

class NormLowering : public PointwiseLowering {
 protected:
  using PointwiseLowering::PointwiseLowering;

  // Every other node is a view that has been absorbed, or is refused: it belongs in another graph.
  Status check_norm_is_alone() const {
    const auto norm =
        std::find_if(graph_.nodes.begin(), graph_.nodes.end(),
                     [](const ir::Node& node) { return norm_axes(node.op) != nullptr; });
    if (norm == graph_.nodes.end()) return {};
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      const ir::Node& node = graph_.nodes[i];
      if (&node == &*norm || absorbed_nodes_[i] || is_view(node.op)) continue;
      return refuse("norm_with_other_ops", node,
                    fmt::format("cuDNN 9.19's norm engines take no other operation, before or "
                                "behind: split the graph at {}",
                                label_of(graph_, *norm)));
    }
    return {};
  }

  Status lower_op(const ir::Node& node, const ir::Norm& op) {
    using ir::Norm;
    const ir::TensorId mean_id = node.outputs[Norm::mean];
    const ir::TensorId inv_id = node.outputs[Norm::inv_std];
    const bool training = mean_id != ir::kNone || inv_id != ir::kNone;
    LAWSON_TRY(const Rows rows, rows_of(node, op.axes, Norm::x));
    LAWSON_TRY(const TensorPtr x, in_rows(node, rows, Norm::x));
    LAWSON_TRY(TensorPtr scale, parameter(node, rows, Norm::scale));
    TensorPtr bias;
    if (node.inputs[Norm::bias] != ir::kNone) {
      LAWSON_TRY(bias, parameter(node, rows, Norm::bias));
    }
    TensorPtr eps = std::make_shared<fe::graph::Tensor_attributes>(static_cast<float>(op.eps));
    eps->set_dim({1, 1, 1, 1}).set_stride({1, 1, 1, 1});
    const auto phase = training ? fe::NormFwdPhase_t::TRAINING : fe::NormFwdPhase_t::INFERENCE;
    TensorPtr y;
    TensorPtr mean;
    TensorPtr inv_std;
    if (op.kind == ir::NormKind::layer) {
      auto attributes = fe::graph::Layernorm_attributes();
      attributes.set_name(ir::op_name(node.op)).set_forward_phase(phase).set_epsilon(eps);
      const auto results = target_.layernorm(x, scale, bias, std::move(attributes));
      y = results[0];
      mean = results[1];
      inv_std = results[2];
    } else {
      auto attributes = fe::graph::Rmsnorm_attributes();
      attributes.set_name(ir::op_name(node.op)).set_forward_phase(phase).set_epsilon(eps);
      if (bias) attributes.set_bias(bias);
      const auto results = target_.rmsnorm(x, scale, std::move(attributes));
      y = results[0];
      inv_std = results[1];
    }
    LAWSON_CHECK(store(node, rows, node.outputs[Norm::y], y, Extent::whole, DType::f32));
    if (!training) return {};
    if (mean) LAWSON_CHECK(store(node, rows, mean_id, mean, Extent::rows, DType::f32));
    return store(node, rows, inv_id, inv_std, Extent::rows, DType::f32);
  }

  Status lower_op(const ir::Node& node, const ir::NormBackward& op) {
    using Backward = ir::NormBackward;
    LAWSON_TRY(const Rows rows, rows_of(node, op.axes, Backward::x));
    LAWSON_TRY(const TensorPtr dy, in_rows(node, rows, Backward::dy));
    LAWSON_TRY(const TensorPtr x, in_rows(node, rows, Backward::x));
    LAWSON_TRY(const TensorPtr scale, parameter(node, rows, Backward::scale));
    LAWSON_TRY(const TensorPtr inv_std, statistics(node, rows, Backward::inv_std));
    const ir::TensorId dx_id = node.outputs[Backward::dx];
    const DType x_type = tensor_of(node.inputs[Backward::x]).dtype;
    const DType scale_type = tensor_of(node.inputs[Backward::scale]).dtype;
    if (dx_id != ir::kNone && tensor_of(dx_id).dtype != x_type) {
      return refuse("data_type", node,
                    fmt::format("dx is {} and x {}; cuDNN's norm engines give dx in the type of x",
                                to_string(tensor_of(dx_id).dtype), to_string(x_type)));
    }
    const bool dbias_wanted = node.outputs[Backward::dbias] != ir::kNone;
    std::array<TensorPtr, 3> results;
    if (op.kind == ir::NormKind::layer) {
      LAWSON_TRY(const TensorPtr mean, statistics(node, rows, Backward::mean));
      auto attributes = fe::graph::Layernorm_backward_attributes();
      attributes.set_name(ir::op_name(node.op)).set_saved_mean_and_inv_variance(mean, inv_std);
      results = target_.layernorm_backward(dy, x, scale, std::move(attributes));
    } else {
      auto attributes = fe::graph::Rmsnorm_backward_attributes();
      attributes.set_name(ir::op_name(node.op)).has_dbias(dbias_wanted);
      results = target_.rmsnorm_backward(dy, x, scale, inv_std, std::move(attributes));
    }
    LAWSON_CHECK(store(node, rows, dx_id, results[0], Extent::whole, x_type));
    LAWSON_CHECK(
        store(node, rows, node.outputs[Backward::dscale], results[1], Extent::columns, scale_type));
    if (op.kind == ir::NormKind::rms && !dbias_wanted) return {};
    return store(node, rows, node.outputs[Backward::dbias], results[2], Extent::columns,
                 scale_type);
  }

 private:
  // x as a matrix: the axes that are not normalised and those that are, each in the order in which
  // they lie in memory.
  struct Rows {
    Dims shape;  // of x
    Dims axes;   // that are normalised
    Dims outer;
    Dims inner;
    std::int64_t rows = 1;
    std::int64_t columns = 1;

    Dims order() const {
      Dims all = outer;
      all.insert(all.end(), inner.begin(), inner.end());
      return all;
    }
  };
  enum class Extent { whole, rows, columns };

  static const Dims* norm_axes(const ir::Op& op) {
    if (const auto* norm = std::get_if<ir::Norm>(&op)) return &norm->axes;
    if (const auto* backward = std::get_if<ir::NormBackward>(&op)) return &backward->axes;
    return nullptr;
  }

  Error computed_operand(const ir::Node& node, ir::TensorId id) const {
    return refuse("norm_with_other_ops", node,
                  fmt::format("{} is computed inside the graph; cuDNN's norm engines read memory: "
                              "split the graph at {}",
                              tensor_of(id).name, tensor_of(id).name));
  }

  Result<Rows> rows_of(const ir::Node& node, const Dims& axes, std::size_t slot) {
    const ir::TensorId id = node.inputs[slot];
    if (value(id).kind != Value::Kind::memory) return computed_operand(node, id);
    const Layout& layout = value(id).layout;
    Rows rows;
    rows.shape = layout.shape;
    rows.axes = axes;
    for (std::size_t i = 0; i < layout.shape.size(); ++i) {
      const auto axis = static_cast<std::int64_t>(i);
      const bool inner = std::find(axes.begin(), axes.end(), axis) != axes.end();
      (inner ? rows.inner : rows.outer).push_back(axis);
      (inner ? rows.columns : rows.rows) *= layout.shape[i];
    }
    for (Dims* order : {&rows.outer, &rows.inner}) {
      std::stable_sort(order->begin(), order->end(), [&](std::int64_t a, std::int64_t b) {
        return layout.strides[static_cast<std::size_t>(a)] >
               layout.strides[static_cast<std::size_t>(b)];
      });
    }
    return rows;
  }

  static Dims extents(const Rows& rows, Extent extent) {
    return {extent == Extent::columns ? 1 : rows.rows, extent == Extent::rows ? 1 : rows.columns, 1,
            1};
  }
  static Dims strides(const Rows& rows, Extent extent) {
    return {extent == Extent::rows ? 1 : rows.columns, 1, 1, 1};
  }

  Error not_packed(const ir::Node& node, std::string_view name, const Layout& layout) const {
    return refuse("strides", node,
                  fmt::format("{} {} has strides {}; cuDNN's norm engines read rows of what is "
                              "normalised, packed one behind the other, in every tensor alike",
                              name, to_string(layout.shape), to_string(layout.strides)));
  }

  Status check_dtype(const ir::Node& node, const ir::Tensor& tensor, bool statistics) const {
    const bool ok = tensor.dtype == DType::f32 ||
                    (!statistics && (tensor.dtype == DType::f16 || tensor.dtype == DType::bf16));
    if (ok) return {};
    return refuse("data_type", node,
                  fmt::format("{} has dtype {}; cuDNN's norm engines take {}", tensor.name,
                              to_string(tensor.dtype),
                              statistics ? "statistics in f32" : "f32, f16 and bf16"));
  }

  Result<TensorPtr> packed_input(const ir::Node& node, const Rows& rows, std::size_t slot,
                                 const Layout& layout, const Dims& order, Extent extent) {
    const ir::TensorId source = value(node.inputs[slot]).source;
    const ir::Tensor& tensor = tensor_of(source);
    LAWSON_CHECK(check_dtype(node, tensor, extent == Extent::rows));
    if (!is_packed(layout, order)) return not_packed(node, tensor.name, layout);
    const std::int64_t bytes = layout.offset * bit_width(tensor.dtype) / 8;
    LAWSON_TRY(const std::int64_t alignment, alignment_at(node, tensor, bytes));
    return target_.tensor(fe::graph::Tensor_attributes()
                              .set_uid(uid_of(source, bytes))
                              .set_name(tensor.name)
                              .set_dim(extents(rows, extent))
                              .set_stride(strides(rows, extent))
                              .set_data_type(type_of(tensor.dtype))
                              .set_alignment(alignment));
  }

  Result<TensorPtr> in_rows(const ir::Node& node, const Rows& rows, std::size_t slot) {
    const Value& known = value(node.inputs[slot]);
    if (known.kind != Value::Kind::memory) return computed_operand(node, node.inputs[slot]);
    return packed_input(node, rows, slot, known.layout, rows.order(), Extent::whole);
  }

  // Scale and bias may lack leading 1s.
  Result<TensorPtr> parameter(const ir::Node& node, const Rows& rows, std::size_t slot) {
    const ir::TensorId id = node.inputs[slot];
    if (value(id).kind != Value::Kind::memory) return computed_operand(node, id);
    const auto layout =
        reshape_layout(value(id).layout, ir::norm_scale_shape(rows.shape, rows.axes));
    if (!layout) return not_packed(node, tensor_of(id).name, value(id).layout);
    return packed_input(node, rows, slot, *layout, rows.inner, Extent::columns);
  }

  Result<TensorPtr> statistics(const ir::Node& node, const Rows& rows, std::size_t slot) {
    const Value& known = value(node.inputs[slot]);
    if (known.kind != Value::Kind::memory) return computed_operand(node, node.inputs[slot]);
    return packed_input(node, rows, slot, known.layout, rows.outer, Extent::rows);
  }

  // A result in its output, or in scratch memory where cuDNN insists on one that nobody wants.
  Status store(const ir::Node& node, const Rows& rows, ir::TensorId id, const TensorPtr& tensor,
               Extent extent, DType dtype) {
    tensor->set_output(true).set_dim(extents(rows, extent)).set_stride(strides(rows, extent));
    if (id == ir::kNone) {
      const Dims dims = extents(rows, extent);
      const std::int64_t uid = own_uid();
      supplies_.own.push_back(
          {uid, static_cast<std::int64_t>(byte_size(dtype, dims[0] * dims[1])), false, false});
      tensor->set_uid(uid).set_name("scratch").set_data_type(type_of(dtype));
      rewritten("unwanted_results_as_scratch");
      return {};
    }
    const Sink* sink = sink_of(id);
    if (sink == nullptr) {
      return refuse("norm_with_other_ops", node,
                    fmt::format("{} is used by another operation; cuDNN's norm engines write "
                                "memory: split the graph at {}",
                                tensor_of(id).name, tensor_of(id).name));
    }
    const ir::Tensor& output = tensor_of(sink->output);
    LAWSON_CHECK(check_dtype(node, output, extent == Extent::rows));
    std::optional<Layout> layout = sink->layout;
    if (extent == Extent::columns) {
      layout = reshape_layout(sink->layout, ir::norm_scale_shape(rows.shape, rows.axes));
    }
    const Dims order = extent == Extent::rows      ? rows.outer
                       : extent == Extent::columns ? rows.inner
                                                   : rows.order();
    if (!layout || !is_packed(*layout, order)) return not_packed(node, output.name, sink->layout);
    const std::int64_t bytes = layout->offset * bit_width(output.dtype) / 8;
    LAWSON_TRY(const std::int64_t alignment, alignment_at(node, output, bytes));
    tensor->set_uid(uid_of(sink->output, bytes))
        .set_name(output.name)
        .set_data_type(type_of(output.dtype))
        .set_alignment(alignment);
    return {};
  }
};

}  // namespace lawson::cudnn
