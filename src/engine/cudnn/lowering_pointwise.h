// Pointwise operations of a fusion: one of cuDNN's modes, or several that together are exactly what
// ops.h says. Included by lowering.cpp alone.
#pragma once

#include "engine/cudnn/lowering_values.h"

namespace lawson::cudnn {

class PointwiseLowering : public FusionValues {
 protected:
  using FusionValues::FusionValues;

  // Operations of one shape and one arithmetic.
  struct Emit {
    PointwiseLowering& lowering;
    Dims3 dims;
    Type compute;

    TensorPtr operator()(Mode mode, const std::vector<TensorPtr>& operands,
                         Pointwise attributes = {}) const {
      return lowering.virtual_pointwise(mode, operands, dims, compute, compute,
                                        std::move(attributes));
    }
    TensorPtr number(double value) const { return lowering.scalar(value, compute); }
    // predicate ? yes : no
    TensorPtr select(const TensorPtr& predicate, const TensorPtr& yes, const TensorPtr& no) const {
      return (*this)(Mode::BINARY_SELECT, {yes, no, predicate});
    }
    TensorPtr compare(Mode mode, const TensorPtr& a, const TensorPtr& b) const {
      return lowering.virtual_pointwise(mode, {a, b}, dims, Type::BOOLEAN, compute);
    }
  };

  Emit emitting(const ir::Node& node) {
    return {*this, folded_shape(node.outputs[0]), compute_type(node)};
  }
  Result<TensorPtr> operand_of(const ir::Node& node, std::size_t slot, const Emit& emit) {
    return operand(node, node.inputs[slot], emit.compute, emit.dims);
  }

  Status finish_pointwise(const ir::Node& node, Mode mode, const std::vector<std::size_t>& slots,
                          Pointwise attributes = {}) {
    const Emit emit = emitting(node);
    std::vector<TensorPtr> operands;
    for (const std::size_t slot : slots) {
      LAWSON_TRY(TensorPtr tensor, operand_of(node, slot, emit));
      operands.push_back(std::move(tensor));
    }
    return finish(node, emit(mode, operands, std::move(attributes)));
  }

  // ---- Conversions -----------------------------------------------------------------------------

  Status lower_op(const ir::Node& node, const ir::Convert&) {
    const ir::TensorId from = node.inputs[0];
    const ir::TensorId to = node.outputs[0];
    const Value& known = value(from);
    if (converts_on_reading(from, to)) return alias(node);
    const Emit emit = emitting(node);
    if (tensor_of(to).dtype == DType::boolean) {
      if (tensor_of(from).dtype == DType::boolean) return alias(node);
      LAWSON_TRY(const TensorPtr x, operand_of(node, 0, emit));
      return store_boolean(node, emit.compare(Mode::CMP_NEQ, x, emit.number(0)), emit.dims);
    }
    if (known.kind == Value::Kind::constant || known.kind == Value::Kind::iota) {
      if (sink_of(to) == nullptr) return alias(node);
    }
    if (known.kind == Value::Kind::computed && sink_of(to) == nullptr &&
        known.type == carried_type(to)) {
      return alias(node);
    }
    if (tensor_of(from).dtype == DType::boolean) {
      const Emit number{*this, emit.dims,
                        is_integer(tensor_of(to).dtype) ? truth_type() : Type::FLOAT};
      LAWSON_TRY(const TensorPtr bits, operand_of(node, 0, number));
      return finish(node, number.select(bits, number.number(1), number.number(0)));
    }
    return finish_pointwise(node, Mode::IDENTITY, {0});
  }

  // ---- Functions of one operand ----------------------------------------------------------------

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
        missing = "log(1 + x) loses the accuracy near 0; write it so if that is enough";
        break;
      case UnaryKind::expm1:
        missing = "exp(x) - 1 loses the accuracy near 0; write it so if that is enough";
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
        return lower_round(node);
      case UnaryKind::sign:
        return lower_sign(node);
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
    return finish_pointwise(node, mode, {0}, std::move(attributes));
  }

  // Half to even: floor(x), or one more where x is above the middle, or in it and floor(x) is odd.
  // x - floor(x) is rounded only for x in (-1/2, 0), whose floor is odd.
  Status lower_round(const ir::Node& node) {
    const Emit emit = emitting(node);
    LAWSON_TRY(const TensorPtr x, operand_of(node, 0, emit));
    const TensorPtr down = emit(Mode::FLOOR, {x});
    const TensorPtr up = emit(Mode::ADD, {down, emit.number(1)});
    const TensorPtr rest = emit(Mode::SUB, {x, down});
    const TensorPtr half = emit(Mode::MUL, {down, emit.number(0.5)});
    const TensorPtr odd = emit.compare(Mode::CMP_NEQ, emit(Mode::FLOOR, {half}), half);
    const TensorPtr above = emit.compare(Mode::CMP_GT, rest, emit.number(0.5));
    const TensorPtr middle = emit.compare(Mode::CMP_EQ, rest, emit.number(0.5));
    return finish(node,
                  emit.select(middle, emit.select(odd, up, down), emit.select(above, up, down)));
  }

  Status lower_sign(const ir::Node& node) {
    const Emit emit = emitting(node);
    LAWSON_TRY(const TensorPtr x, operand_of(node, 0, emit));
    const TensorPtr negative = emit.compare(Mode::CMP_LT, x, emit.number(0));
    const TensorPtr positive = emit.compare(Mode::CMP_GT, x, emit.number(0));
    return finish(node,
                  emit.select(positive, emit.number(1), emit.select(negative, emit.number(-1), x)));
  }

  // cuDNN's own derivative where the function is smooth. What it makes of a kink is documented
  // nowhere: there the slope is selected.
  Status lower_op(const ir::Node& node, const ir::UnaryGrad& op) {
    using ir::UnaryKind;
    switch (op.kind) {
      case UnaryKind::tanh:
        return finish_pointwise(node, Mode::TANH_BWD, {0, 1});
      case UnaryKind::sigmoid:
        return finish_pointwise(node, Mode::SIGMOID_BWD, {0, 1});
      case UnaryKind::silu:
        return finish_pointwise(node, Mode::SWISH_BWD, {0, 1});
      case UnaryKind::gelu:
        return finish_pointwise(node, Mode::GELU_BWD, {0, 1});
      case UnaryKind::gelu_tanh:
        return finish_pointwise(node, Mode::GELU_APPROX_TANH_BWD, {0, 1});
      default:
        break;
    }
    const Emit emit = emitting(node);
    LAWSON_TRY(const TensorPtr dy, operand_of(node, 0, emit));
    LAWSON_TRY(const TensorPtr x, operand_of(node, 1, emit));
    const auto slope = [&]() -> TensorPtr {
      if (op.kind == UnaryKind::softplus) return emit(Mode::SIGMOID_FWD, {x});
      const TensorPtr positive = emit.compare(Mode::CMP_GT, x, emit.number(0));
      TensorPtr above = emit.number(1);
      TensorPtr below = emit.number(op.kind == UnaryKind::leaky_relu ? op.parameter : 0);
      if (op.kind == UnaryKind::relu6) {
        const TensorPtr inside = emit.compare(Mode::CMP_LT, x, emit.number(6));
        above = emit.select(inside, above, emit.number(0));
      } else if (op.kind == UnaryKind::elu) {
        below = emit(Mode::MUL, {emit(Mode::EXP, {x}), emit.number(op.parameter)});
      }
      return emit.select(positive, above, below);
    };
    return finish(node, emit(Mode::MUL, {dy, slope()}));
  }

  // ---- Functions of several operands -----------------------------------------------------------

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
        return lower_mod(node);
    }
    return finish_pointwise(node, mode, {0, 1});
  }

  // The remainder of magnitudes is the same whatever sign cuDNN's MOD takes; ours is that of a.
  Status lower_mod(const ir::Node& node) {
    const Emit emit = emitting(node);
    LAWSON_TRY(const TensorPtr a, operand_of(node, 0, emit));
    LAWSON_TRY(const TensorPtr b, operand_of(node, 1, emit));
    const TensorPtr rest = emit(Mode::MOD, {emit(Mode::ABS, {a}), emit(Mode::ABS, {b})});
    const TensorPtr negative = emit.compare(Mode::CMP_LT, a, emit.number(0));
    return finish(node, emit.select(negative, emit(Mode::NEG, {rest}), rest));
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

  Status finish_boolean(const ir::Node& node, Mode mode, Type compute) {
    const Dims3 dims = folded_shape(node.outputs[0]);
    std::vector<TensorPtr> operands;
    for (const ir::TensorId id : node.inputs) {
      LAWSON_TRY(TensorPtr tensor, operand(node, id, compute, dims));
      operands.push_back(std::move(tensor));
    }
    return store_boolean(node, virtual_pointwise(mode, operands, dims, Type::BOOLEAN, compute),
                         dims);
  }

  Status lower_op(const ir::Node& node, const ir::Select&) {
    const auto is_bool = [&](ir::TensorId id) { return tensor_of(id).dtype == DType::boolean; };
    if (is_bool(node.inputs[1]) != is_bool(node.inputs[2])) {
      return refuse("data_type", node, "one of its operands is bool and the other a number");
    }
    if (!is_bool(node.inputs[1])) return finish_pointwise(node, Mode::BINARY_SELECT, {1, 2, 0});
    const Emit emit{*this, folded_shape(node.outputs[0]), Type::BOOLEAN};
    LAWSON_TRY(const TensorPtr predicate, operand_of(node, 0, emit));
    LAWSON_TRY(const TensorPtr yes, operand_of(node, 1, emit));
    LAWSON_TRY(const TensorPtr no, operand_of(node, 2, emit));
    const TensorPtr kept = emit(Mode::LOGICAL_AND, {predicate, yes});
    const TensorPtr other = emit(Mode::LOGICAL_AND, {emit(Mode::LOGICAL_NOT, {predicate}), no});
    return store_boolean(node, emit(Mode::LOGICAL_OR, {kept, other}), emit.dims);
  }

  Status lower_op(const ir::Node& node, const ir::Clamp& op) {
    const Emit emit = emitting(node);
    LAWSON_TRY(const TensorPtr x, operand_of(node, 0, emit));
    const TensorPtr above = emit(Mode::MAX, {x, emit.number(op.min)});
    return finish(node, emit(Mode::MIN, {above, emit.number(op.max)}));
  }
};

}  // namespace lawson::cudnn
