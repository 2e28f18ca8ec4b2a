// Graphs of pointwise ops, matmuls and reductions in the frontend's terms: everything in rank 3,
// views absorbed in strides, conversions as identity operations. Included by lowering.cpp alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>
#include <variant>

#include "engine/cudnn/lowering_types.h"

namespace lawson::cudnn {

class FusionLowering {
 public:
  FusionLowering(const ir::Graph& graph, FrontendGraph& target, Supplies& supplies)
      : graph_{graph}, target_{target}, supplies_{supplies}, values_(graph.tensors.size()) {}

  Status run() {
    target_.set_io_data_type(Type::FLOAT)
        .set_intermediate_data_type(Type::FLOAT)
        .set_compute_data_type(Type::FLOAT);
    for (ir::TensorId id = 0; id < graph_.input_count; ++id) {
      const ir::Tensor& tensor = graph_.tensor(id);
      value(id).kind = Value::Kind::memory;
      value(id).source = id;
      value(id).layout = {tensor.shape, tensor.strides, 0};
    }
    find_exact_tensors();
    absorb_views_into_outputs();
    if (graph_.strict) LAWSON_CHECK(check_strict());
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      if (!absorbed_nodes_[i]) LAWSON_CHECK(lower(graph_.nodes[i]));
    }
    return {};
  }

 private:
  struct Value {
    enum class Kind { none, memory, computed, constant, iota };
    Kind kind = Kind::none;
    ir::TensorId source = ir::kNone;  // memory: the input that is looked at
    Layout layout;                    // memory: how
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
    return unsupported(
        std::move(code),
        fmt::format("op '{}' ({}): {}", ir::op_name(node.op), tensor_of(node.outputs[0]).name, why),
        tensor_of(node.outputs[0]).name);
  }

  // ---- What may be carried wider than written -------------------------------------------------

  // Narrow float intermediates that only pointwise ops read are kept in f32, as fusing compilers
  // do; operands of a matmul, outputs and other types are exactly what was written.
  void find_exact_tensors() {
    exact_.assign(graph_.tensors.size(), false);
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

  Type carried_type(ir::TensorId id) const {
    return exact_[at(id)] ? type_of(tensor_of(id).dtype) : Type::FLOAT;
  }

  Status check_strict() const {
    for (std::size_t i = 0; i < graph_.tensors.size(); ++i) {
      if (exact_[i]) continue;
      const ir::Tensor& tensor = graph_.tensors[i];
      return unsupported("strict",
                         fmt::format("strict = true: the intermediate {} has dtype {}, and cuDNN "
                                     "carries it in f32 between operations",
                                     tensor.name, to_string(tensor.dtype)),
                         "strict");
    }
    return {};
  }

  // ---- Views of results ------------------------------------------------------------------------

  void absorb_views_into_outputs() {
    absorbed_nodes_.assign(graph_.nodes.size(), false);
    std::vector<int> readers(graph_.tensors.size(), 0);
    std::vector<bool> is_reduced(graph_.tensors.size(), false);
    for (const ir::Node& node : graph_.nodes) {
      is_reduced[at(node.outputs[0])] = std::holds_alternative<ir::Reduce>(node.op);
      for (const ir::TensorId id : node.inputs) {
        if (id != ir::kNone) ++readers[at(id)];
      }
    }
    for (std::size_t i = graph_.nodes.size(); i-- > 0;) {
      const ir::Node& node = graph_.nodes[i];
      const ir::TensorId from = node.inputs.empty() ? ir::kNone : node.inputs[0];
      const ir::TensorId to = node.outputs[0];
      if (from == ir::kNone || graph_.is_input(from) || graph_.is_output(from) ||
          readers[at(from)] != 1) {
        continue;
      }
      const Sink* sink = sink_of(to);
      if (sink == nullptr || readers[at(to)] != 0) continue;
      std::optional<Layout> layout;
      // A reduction rounds once, to the type it is stored in: cuDNN takes nothing behind it.
      if (std::holds_alternative<ir::Convert>(node.op) && is_reduced[at(from)] &&
          is_float(tensor_of(from).dtype) && is_float(tensor_of(to).dtype)) {
        layout = sink->layout;
      }
      if (!layout && tensor_of(from).dtype != tensor_of(to).dtype) continue;
      if (const auto* transpose = std::get_if<ir::Transpose>(&node.op)) {
        Dims inverse(transpose->perm.size());
        for (std::size_t axis = 0; axis < inverse.size(); ++axis) {
          inverse[static_cast<std::size_t>(transpose->perm[axis])] =
              static_cast<std::int64_t>(axis);
        }
        layout = transpose_layout(sink->layout, inverse);
      } else if (std::holds_alternative<ir::Reshape>(node.op)) {
        layout = reshape_layout(sink->layout, tensor_of(from).shape);
      }
      if (!layout || !fold_layout(*layout)) continue;
      sinks_[from] = {sink->output, std::move(*layout)};
      exact_[at(from)] = true;
      absorbed_nodes_[i] = true;
    }
  }

  const Sink* sink_of(ir::TensorId id) {
    if (const auto found = sinks_.find(id); found != sinks_.end()) return &found->second;
    if (!graph_.is_output(id)) return nullptr;
    return &sinks_.emplace(id, Sink{id, {tensor_of(id).shape, tensor_of(id).strides, 0}})
                .first->second;
  }

  // ---- Operands --------------------------------------------------------------------------------

  // The frontend tensor for a view of an input; the first whole use has the caller's uid.
  Result<TensorPtr> memory_tensor(const ir::Node& node, const Value& view, Dims3& dims) {
    const ir::Tensor& source = tensor_of(view.source);
    const auto folded = fold_layout(view.layout);
    if (!folded) {
      return refuse(
          "rank", node,
          fmt::format("the leading dims of {} {} (strides {}) cannot be one batch dim; "
                      "cuDNN's matmul fusions have rank 3",
                      source.name, to_string(view.layout.shape), to_string(view.layout.strides)));
    }
    dims = folded->dims;
    const auto key = std::tuple{view.source, folded->dims, folded->strides, view.layout.offset};
    if (const auto found = memory_tensors_.find(key); found != memory_tensors_.end()) {
      return found->second;
    }
    const std::int64_t bytes = view.layout.offset * bit_width(source.dtype) / 8;
    if (bit_width(source.dtype) < 8 && view.layout.offset % 2 != 0) {
      return refuse("slice", node, fmt::format("{} starts inside a byte", source.name));
    }
    std::int64_t uid = ir::Graph::uid(view.source);
    if (bytes != 0 || used_inputs_[view.source]) {
      uid = kFirstOwnUid + static_cast<std::int64_t>(supplies_.derived.size());
      supplies_.derived.push_back({uid, ir::Graph::uid(view.source), bytes});
    } else {
      used_inputs_[view.source] = true;
    }
    std::int64_t alignment = source.alignment;
    while (alignment > 1 && bytes % alignment != 0) alignment /= 2;
    // cuDNN's own booleans are packed bits; ours are bytes.
    const Type type = source.dtype == DType::boolean ? Type::UINT8 : type_of(source.dtype);
    TensorPtr tensor = target_.tensor(fe::graph::Tensor_attributes()
                                          .set_uid(uid)
                                          .set_name(source.name)
                                          .set_dim(dims_of(folded->dims))
                                          .set_stride(dims_of(folded->strides))
                                          .set_data_type(type)
                                          .set_alignment(alignment)
                                          .set_is_pass_by_value(source.by_value));
    if (source.dtype == DType::boolean) {
      tensor = virtual_pointwise(Mode::CMP_NEQ, {tensor, scalar(0, Type::INT32)}, folded->dims,
                                 Type::BOOLEAN, Type::INT32);
    }
    memory_tensors_.emplace(key, tensor);
    return tensor;
  }

  TensorPtr scalar(double number, Type type) {
    TensorPtr tensor;
    if (type == Type::INT32) {
      tensor = std::make_shared<fe::graph::Tensor_attributes>(static_cast<std::int32_t>(number));
    } else if (type == Type::DOUBLE) {
      tensor = std::make_shared<fe::graph::Tensor_attributes>(number);
    } else {
      tensor = std::make_shared<fe::graph::Tensor_attributes>(static_cast<float>(number));
    }
    tensor->set_dim({1, 1, 1}).set_stride({1, 1, 1});
    return tensor;
  }

  // An operand of a pointwise op whose result has the folded shape `wanted`.
  Result<TensorPtr> operand(const ir::Node& node, ir::TensorId id, Type compute,
                            const Dims3& wanted) {
    const Value& known = value(id);
    switch (known.kind) {
      case Value::Kind::memory: {
        Dims3 dims{};
        LAWSON_TRY(TensorPtr tensor, memory_tensor(node, known, dims));
        LAWSON_CHECK(check_broadcast(node, id, dims, wanted));
        return tensor;
      }
      case Value::Kind::computed:
        LAWSON_CHECK(check_broadcast(node, id, known.dims, wanted));
        return known.tensor;
      case Value::Kind::constant:
        return scalar(known.constant, compute == Type::BOOLEAN ? Type::INT32 : compute);
      case Value::Kind::iota:
        return iota(node, id, wanted);
      case Value::Kind::none:
        break;
    }
    return refuse("operand", node, "an operand has no value");
  }

  Status check_broadcast(const ir::Node& node, ir::TensorId id, const Dims3& dims,
                         const Dims3& wanted) const {
    for (std::size_t i = 0; i < 3; ++i) {
      if (dims[i] != 1 && dims[i] != wanted[i]) {
        return refuse(
            "rank", node,
            fmt::format("{} {} broadcasts over only some of the leading dims of {}, which "
                        "cuDNN sees as one batch dim",
                        tensor_of(id).name, to_string(tensor_of(id).shape),
                        to_string(tensor_of(node.outputs[0]).shape)));
      }
    }
    return {};
  }

  // cuDNN's index generator takes its shape from a tensor: the other operand.
  Result<TensorPtr> iota(const ir::Node& node, ir::TensorId id, const Dims3& wanted) {
    const auto axis = fold_axis(tensor_of(id).shape, value(id).axis);
    if (!axis) {
      return refuse("iota", node, "its axis is one of several leading dims above 1");
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
      if (tensor == nullptr || dims != wanted) continue;
      const TensorPtr index = target_.pointwise(tensor, Pointwise()
                                                            .set_name("iota")
                                                            .set_mode(Mode::GEN_INDEX)
                                                            .set_axis(*axis)
                                                            .set_compute_data_type(Type::INT32));
      index->set_dim(dims_of(wanted))
          .set_stride(dims_of(packed_strides(wanted)))
          .set_data_type(Type::INT32);
      return index;
    }
    return refuse("iota", node,
                  "cuDNN makes indices only beside another operand of the result's full shape");
  }

  // ---- Results ---------------------------------------------------------------------------------

  TensorPtr virtual_pointwise(Mode mode, const std::vector<TensorPtr>& operands, const Dims3& dims,
                              Type type, Type compute, Pointwise attributes = {}) {
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
    result->set_dim(dims_of(dims)).set_stride(dims_of(packed_strides(dims))).set_data_type(type);
    return result;
  }

  // Gives the result of a node its shape and, for an output, its memory.
  Status finish(const ir::Node& node, const TensorPtr& tensor,
                const std::optional<Layout>& output_layout = std::nullopt) {
    const ir::TensorId id = node.outputs[0];
    Value& result = value(id);
    result.kind = Value::Kind::computed;
    result.tensor = tensor;
    result.dims = fold_shape(tensor_of(id).shape);
    result.type = carried_type(id);
    const Sink* sink = sink_of(id);
    if (sink == nullptr) {
      tensor->set_dim(dims_of(result.dims))
          .set_stride(dims_of(packed_strides(result.dims)))
          .set_data_type(result.type);
      return {};
    }
    const ir::Tensor& output = tensor_of(sink->output);
    const auto folded = fold_layout(output_layout ? *output_layout : sink->layout);
    if (!folded) {
      return refuse("rank", node,
                    fmt::format("the leading dims of output {} {} (strides {}) cannot be one batch "
                                "dim; cuDNN's matmul fusions have rank 3",
                                output.name, to_string(output.shape), to_string(output.strides)));
    }
    result.dims = folded->dims;
    result.type = type_of(output.dtype);
    tensor->set_output(true)
        .set_uid(ir::Graph::uid(sink->output))
        .set_name(output.name)
        .set_dim(dims_of(folded->dims))
        .set_stride(dims_of(folded->strides))
        .set_data_type(result.type)
        .set_alignment(output.alignment);
    return {};
  }

  Status finish_pointwise(const ir::Node& node, Mode mode, const std::vector<ir::TensorId>& inputs,
                          Pointwise attributes = {}) {
    const Dims3 dims = fold_shape(tensor_of(node.outputs[0]).shape);
    const Type compute = compute_type(node);
    std::vector<TensorPtr> operands;
    for (const ir::TensorId id : inputs) {
      LAWSON_TRY(TensorPtr tensor, operand(node, id, compute, dims));
      operands.push_back(std::move(tensor));
    }
    return finish(
        node, virtual_pointwise(mode, operands, dims, Type::FLOAT, compute, std::move(attributes)));
  }

  // f64 when anything is, i32 among integers, else f32.
  Type compute_type(const ir::Node& node) const {
    bool integers = true;
    const auto look = [&](ir::TensorId id) {
      if (id == ir::kNone || tensor_of(id).dtype == DType::boolean) return false;
      integers = integers && is_integer(tensor_of(id).dtype);
      return tensor_of(id).dtype == DType::f64;
    };
    bool wide = false;
    for (const ir::TensorId id : node.inputs) wide = look(id) || wide;
    for (const ir::TensorId id : node.outputs) wide = look(id) || wide;
    return wide ? Type::DOUBLE : integers ? Type::INT32 : Type::FLOAT;
  }

  // A boolean result: bits inside the kernel, bytes in memory.
  Status finish_boolean(const ir::Node& node, Mode mode, Type compute) {
    const Dims3 dims = fold_shape(tensor_of(node.outputs[0]).shape);
    std::vector<TensorPtr> operands;
    for (const ir::TensorId id : node.inputs) {
      LAWSON_TRY(TensorPtr tensor, operand(node, id, compute, dims));
      operands.push_back(std::move(tensor));
    }
    const TensorPtr bits = virtual_pointwise(mode, operands, dims, Type::BOOLEAN, compute);
    return store_boolean(node, bits, dims);
  }

  Status store_boolean(const ir::Node& node, const TensorPtr& bits, const Dims3& dims) {
    const ir::TensorId id = node.outputs[0];
    if (sink_of(id) != nullptr) {
      const TensorPtr bytes = virtual_pointwise(
          Mode::BINARY_SELECT, {scalar(1, Type::INT32), scalar(0, Type::INT32), bits}, dims,
          Type::UINT8, Type::INT32);
      LAWSON_CHECK(finish(node, bytes));
      bytes->set_data_type(Type::UINT8);
    }
    Value& result = value(id);
    result.kind = Value::Kind::computed;
    result.tensor = bits;
    result.dims = dims;
    result.type = Type::BOOLEAN;
    return {};
  }

  // ---- Nodes -----------------------------------------------------------------------------------

  Status lower(const ir::Node& node) {
    return std::visit([&](const auto& op) { return lower_op(node, op); }, node.op);
  }

  Status lower_op(const ir::Node& node, const ir::Matmul&) {
    LAWSON_TRY(const TensorPtr a, matmul_operand(node, node.inputs[0]));
    LAWSON_TRY(const TensorPtr b, matmul_operand(node, node.inputs[1]));
    const Dims3 dims = fold_shape(tensor_of(node.outputs[0]).shape);
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
    const DType dtype = tensor_of(node.inputs[0]).dtype;
    const Type compute = is_integer(dtype) ? Type::INT32
                         : dtype == DType::f64 || tensor_of(node.inputs[1]).dtype == DType::f64
                             ? Type::DOUBLE
                             : Type::FLOAT;
    const TensorPtr product = target_.matmul(a, b,
                                             fe::graph::Matmul_attributes()
                                                 .set_name(tensor_of(node.outputs[0]).name)
                                                 .set_compute_data_type(compute));
    return finish(node, product);
  }

  // A matmul reads its operand in exactly the type that was written.
  Result<TensorPtr> matmul_operand(const ir::Node& node, ir::TensorId id) {
    const Dims3 dims = fold_shape(tensor_of(id).shape);
    const Value& known = value(id);
    Dims3 real = known.dims;
    TensorPtr tensor = known.tensor;
    if (known.kind == Value::Kind::memory) {
      LAWSON_TRY(tensor, memory_tensor(node, known, real));
    } else if (known.kind != Value::Kind::computed) {
      return refuse("matmul_operand", node, "an operand is a constant or an index, not a tensor");
    }
    if (real[1] != dims[1] || real[2] != dims[2]) {
      return refuse("matmul_operand", node,
                    fmt::format("{} repeats along a row or column; cuDNN broadcasts only the batch",
                                tensor_of(id).name));
    }
    if (known.kind == Value::Kind::computed && known.type != type_of(tensor_of(id).dtype)) {
      tensor = virtual_pointwise(Mode::IDENTITY, {tensor}, real, type_of(tensor_of(id).dtype),
                                 Type::FLOAT);
    }
    return tensor;
  }

  Status lower_op(const ir::Node& node, const ir::Convert&) {
    const ir::TensorId from = node.inputs[0];
    const ir::TensorId to = node.outputs[0];
    const Value& known = value(from);
    if (tensor_of(to).dtype == DType::boolean) {
      if (tensor_of(from).dtype == DType::boolean) return alias(node);
      const Type compute = compute_type(node);
      const Dims3 dims = fold_shape(tensor_of(to).shape);
      LAWSON_TRY(const TensorPtr tensor, operand(node, from, compute, dims));
      return store_boolean(node,
                           virtual_pointwise(Mode::CMP_NEQ, {tensor, scalar(0, compute)}, dims,
                                             Type::BOOLEAN, compute),
                           dims);
    }
    if (known.kind == Value::Kind::constant || known.kind == Value::Kind::iota) {
      if (sink_of(to) == nullptr) return alias(node);
    }
    if (known.kind == Value::Kind::computed && sink_of(to) == nullptr &&
        known.type == carried_type(to)) {
      return alias(node);
    }
    if (tensor_of(from).dtype == DType::boolean) {
      const Type compute = is_integer(tensor_of(to).dtype) ? Type::INT32 : Type::FLOAT;
      const Dims3 dims = fold_shape(tensor_of(to).shape);
      LAWSON_TRY(const TensorPtr bits, operand(node, from, compute, dims));
      return finish(node, virtual_pointwise(Mode::BINARY_SELECT,
                                            {scalar(1, compute), scalar(0, compute), bits}, dims,
                                            Type::FLOAT, compute));
    }
    return finish_pointwise(node, Mode::IDENTITY, {from});
  }

  // The same value under another name; an output of it is a copy.
  Status alias(const ir::Node& node) {
    const ir::TensorId from = node.inputs[0];
    const ir::TensorId to = node.outputs[0];
    if (sink_of(to) == nullptr) {
      value(to) = value(from);
      return {};
    }
    if (tensor_of(to).dtype == DType::boolean) {
      const Dims3 dims = fold_shape(tensor_of(to).shape);
      LAWSON_TRY(const TensorPtr bits, operand(node, from, Type::INT32, dims));
      return store_boolean(node, bits, dims);
    }
    return finish_pointwise(node, Mode::IDENTITY, {from});
  }

  Status lower_op(const ir::Node& node, const ir::Unary& op) {
    using ir::UnaryKind;
    Pointwise attributes;
    Mode mode = Mode::NOT_SET;
    std::string_view missing;
    switch (op.kind) {
      case UnaryKind::neg:
        mode = Mode::NEG;
        break;
      case UnaryKind::abs:
        mode = Mode::ABS;
        break;
      case UnaryKind::exp:
        mode = Mode::EXP;
        break;
      case UnaryKind::log:
        mode = Mode::LOG;
        break;
      case UnaryKind::log1p:
        missing = "log(1 + x) would lose accuracy near 0";
        break;
      case UnaryKind::expm1:
        missing = "exp(x) - 1 would lose accuracy near 0";
        break;
      case UnaryKind::sqrt:
        mode = Mode::SQRT;
        break;
      case UnaryKind::rsqrt:
        mode = Mode::RSQRT;
        break;
      case UnaryKind::reciprocal:
        mode = Mode::RECIPROCAL;
        break;
      case UnaryKind::sin:
        mode = Mode::SIN;
        break;
      case UnaryKind::cos:
        mode = Mode::COS;
        break;
      case UnaryKind::tan:
        mode = Mode::TAN;
        break;
      case UnaryKind::tanh:
        mode = Mode::TANH_FWD;
        break;
      case UnaryKind::erf:
        mode = Mode::ERF;
        break;
      case UnaryKind::ceil:
        mode = Mode::CEIL;
        break;
      case UnaryKind::floor:
        mode = Mode::FLOOR;
        break;
      case UnaryKind::round:
        missing = "floor and ceil are the nearest it has";
        break;
      case UnaryKind::sign:
        missing = "two comparisons and selects say the same";
        break;
      case UnaryKind::sigmoid:
        mode = Mode::SIGMOID_FWD;
        break;
      case UnaryKind::relu:
        mode = Mode::RELU_FWD;
        break;
      case UnaryKind::leaky_relu:
        mode = Mode::RELU_FWD;
        attributes.set_relu_lower_clip_slope(static_cast<float>(op.parameter));
        break;
      case UnaryKind::relu6:
        mode = Mode::RELU_FWD;
        attributes.set_relu_upper_clip(6.0F);
        break;
      case UnaryKind::elu:
        mode = Mode::ELU_FWD;
        attributes.set_elu_alpha(static_cast<float>(op.parameter));
        break;
      case UnaryKind::softplus:
        mode = Mode::SOFTPLUS_FWD;
        break;
      case UnaryKind::silu:
        mode = Mode::SWISH_FWD;
        attributes.set_swish_beta(1.0F);
        break;
      case UnaryKind::gelu:
        mode = Mode::GELU_FWD;
        break;
      case UnaryKind::gelu_tanh:
        mode = Mode::GELU_APPROX_TANH_FWD;
        break;
    }
    if (mode == Mode::NOT_SET) {
      return refuse("op_not_in_cudnn", node,
                    fmt::format("cuDNN has no such pointwise operation; {}", missing));
    }
    return finish_pointwise(node, mode, {node.inputs[0]}, std::move(attributes));
  }

  Status lower_op(const ir::Node& node, const ir::Binary& op) {
    using ir::BinaryKind;
    Mode mode = Mode::NOT_SET;
    switch (op.kind) {
      case BinaryKind::add:
        mode = Mode::ADD;
        break;
      case BinaryKind::sub:
        mode = Mode::SUB;
        break;
      case BinaryKind::mul:
        mode = Mode::MUL;
        break;
      case BinaryKind::div:
        mode = Mode::DIV;
        break;
      case BinaryKind::pow:
        mode = Mode::POW;
        break;
      case BinaryKind::min:
        mode = Mode::MIN;
        break;
      case BinaryKind::max:
        mode = Mode::MAX;
        break;
      case BinaryKind::mod:
        return refuse("op_not_lowered", node,
                      "mod has the sign of the dividend, and whether cuDNN's remainder has it was "
                      "not measured");
    }
    return finish_pointwise(node, mode, {node.inputs[0], node.inputs[1]});
  }

  Status lower_op(const ir::Node& node, const ir::CacheAppend&) {
    return refuse("op_not_lowered", node,
                  "cuDNN appends to a cache only before the attention that reads it");
  }

  Status lower_op(const ir::Node& node, const ir::Compare& op) {
    using ir::CompareKind;
    Mode mode = Mode::CMP_EQ;
    switch (op.kind) {
      case CompareKind::eq:
        mode = Mode::CMP_EQ;
        break;
      case CompareKind::ne:
        mode = Mode::CMP_NEQ;
        break;
      case CompareKind::lt:
        mode = Mode::CMP_LT;
        break;
      case CompareKind::le:
        mode = Mode::CMP_LE;
        break;
      case CompareKind::gt:
        mode = Mode::CMP_GT;
        break;
      case CompareKind::ge:
        mode = Mode::CMP_GE;
        break;
    }
    return finish_boolean(node, mode, compute_type(node));
  }

  Status lower_op(const ir::Node& node, const ir::Logical& op) {
    const Mode mode = op.kind == ir::LogicalKind::and_  ? Mode::LOGICAL_AND
                      : op.kind == ir::LogicalKind::or_ ? Mode::LOGICAL_OR
                                                        : Mode::LOGICAL_NOT;
    return finish_boolean(node, mode, Type::BOOLEAN);
  }

  Status lower_op(const ir::Node& node, const ir::Select&) {
    return finish_pointwise(node, Mode::BINARY_SELECT,
                            {node.inputs[1], node.inputs[2], node.inputs[0]});
  }

  Status lower_op(const ir::Node& node, const ir::Clamp& op) {
    const Dims3 dims = fold_shape(tensor_of(node.outputs[0]).shape);
    const Type compute = compute_type(node);
    LAWSON_TRY(const TensorPtr x, operand(node, node.inputs[0], compute, dims));
    const TensorPtr above =
        virtual_pointwise(Mode::MAX, {x, scalar(op.min, compute)}, dims,
                          compute == Type::INT32 ? Type::INT32 : compute, compute);
    return finish(node, virtual_pointwise(Mode::MIN, {above, scalar(op.max, compute)}, dims,
                                          Type::FLOAT, compute));
  }

  Status lower_op(const ir::Node& node, const ir::Iota& op) {
    if (sink_of(node.outputs[0]) != nullptr) {
      return refuse("iota", node, "cuDNN makes indices only beside another operand");
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
    return view(node, [&](const Layout& layout) { return reshape_layout(layout, op.shape); });
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
      const Dims3 dims = fold_shape(tensor_of(to).shape);
      Dims3 real{};
      LAWSON_TRY(const TensorPtr tensor, memory_tensor(node, result, real));
      if (real != dims) {
        return refuse("view", node, "an output that only repeats an input has nothing to fuse");
      }
      return finish(node,
                    virtual_pointwise(Mode::IDENTITY, {tensor}, dims, Type::FLOAT, Type::FLOAT));
    }
    // Of a computed value: only what changes nothing in rank 3, or a broadcast that the reader
    // does.
    const bool same = known.kind == Value::Kind::computed &&
                      known.dims == fold_shape(tensor_of(from).shape) &&
                      fold_shape(tensor_of(from).shape) == fold_shape(tensor_of(to).shape) &&
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

  Status lower_op(const ir::Node& node, const ir::Reduce& op) {
    using ir::ReduceKind;
    const ir::TensorId from = node.inputs[0];
    const ir::Tensor& x = tensor_of(from);
    const ir::Tensor& y = tensor_of(node.outputs[0]);
    // The result with its reduced axes kept as 1, and the output's memory seen that way.
    Dims kept = x.shape;
    for (const std::int64_t axis : op.axes) kept[static_cast<std::size_t>(axis)] = 1;
    for (const std::int64_t axis : op.axes) {
      const auto rank = static_cast<std::int64_t>(x.shape.size());
      if (rank - 1 - axis >= 2 && !fold_axis(x.shape, axis)) {
        std::int64_t reduced_lead = 0;
        for (const std::int64_t other : op.axes) reduced_lead += other < rank - 2 ? 1 : 0;
        if (reduced_lead != rank - 2) {
          return refuse(
              "rank", node,
              fmt::format("it reduces some of the leading dims of {}, which cuDNN sees as "
                          "one batch dim",
                          to_string(x.shape)));
        }
      }
    }
    const Sink* sink = sink_of(node.outputs[0]);
    if (sink == nullptr && !op.keepdims && fold_shape(kept) != fold_shape(y.shape)) {
      return refuse(
          "reduction", node,
          "its result is used by another operation; cuDNN takes reductions only at the exit");
    }
    std::optional<Layout> layout;
    if (sink != nullptr) {
      layout = reshape_layout(sink->layout, kept);
      if (!layout) return refuse("reduction", node, "the output's strides do not allow it");
    }
    fe::ReductionMode_t mode = fe::ReductionMode_t::ADD;
    bool absolute = false;
    switch (op.kind) {
      case ReduceKind::sum:
        mode = fe::ReductionMode_t::ADD;
        break;
      case ReduceKind::max:
        mode = fe::ReductionMode_t::MAX;
        break;
      case ReduceKind::min:
        mode = fe::ReductionMode_t::MIN;
        break;
      case ReduceKind::mean:
        mode = fe::ReductionMode_t::AVG;
        break;
      case ReduceKind::prod:
        mode = fe::ReductionMode_t::MUL;
        break;
      case ReduceKind::amax:
        mode = fe::ReductionMode_t::AMAX;
        break;
      case ReduceKind::norm1:
        absolute = true;
        break;
      case ReduceKind::norm2:
        return refuse("op_not_in_cudnn", node,
                      "cuDNN's fusions have no such reduction, and take nothing (a square root) "
                      "behind one");
    }
    const Type compute = compute_type(node);
    const Dims3 whole = fold_shape(x.shape);
    LAWSON_TRY(TensorPtr tensor, operand(node, from, compute, whole));
    if (absolute) tensor = virtual_pointwise(Mode::ABS, {tensor}, whole, compute, compute);
    const TensorPtr result = target_.reduction(
        tensor,
        fe::graph::Reduction_attributes().set_name(y.name).set_mode(mode).set_compute_data_type(
            compute));
    LAWSON_CHECK(finish(node, result, layout));
    const Dims3 dims = fold_shape(kept);
    value(node.outputs[0]).dims = dims;
    result->set_dim(dims_of(dims));
    if (sink == nullptr) result->set_stride(dims_of(packed_strides(dims)));
    return {};
  }

  Status lower_op(const ir::Node& node, const ir::ScaledMatmul&) { return not_there(node); }
  Status lower_op(const ir::Node& node, const ir::UnaryGrad&) { return not_there(node); }
  Status lower_op(const ir::Node& node, const ir::Concat&) { return not_there(node); }
  Status lower_op(const ir::Node& node, const ir::Norm&) { return not_there(node); }
  Status lower_op(const ir::Node& node, const ir::NormBackward&) { return not_there(node); }
  Status not_there(const ir::Node& node) { return refuse("op", node, "not lowered to cuDNN"); }

  Status lower_op(const ir::Node& node, const ir::Attention&) {
    return refuse("attention_with_other_ops", node, "cuDNN takes attention alone in a graph");
  }
  Status lower_op(const ir::Node& node, const ir::AttentionBackward&) {
    return refuse("attention_with_other_ops", node, "cuDNN takes attention alone in a graph");
  }

  const ir::Graph& graph_;
  FrontendGraph& target_;
  Supplies& supplies_;
  std::vector<Value> values_;
  std::vector<bool> exact_;
  std::vector<bool> absorbed_nodes_;
  std::map<ir::TensorId, Sink> sinks_;
  std::map<ir::TensorId, bool> used_inputs_;
  std::map<std::tuple<ir::TensorId, Dims3, Dims3, std::int64_t>, TensorPtr> memory_tensors_;
  int op_count_ = 0;
};

}  // namespace lawson::cudnn
