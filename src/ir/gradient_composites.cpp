// Gradients of norms and of attention, through their own backward ops.
#include <algorithm>
#include <array>

#include "ir/gradient_tape.h"
#include "ir/op_text.h"

namespace lawson::ir {

Status differentiate(Tape& tape, const Node& node, const Norm& norm) {
  const bool layer = norm.kind == NormKind::layer;
  const Term x{&tape, tape.value(node.inputs[Norm::x])};
  const Term mean{&tape, tape.result(node, Norm::mean)};
  const Term inv_std{&tape, tape.result(node, Norm::inv_std)};
  const TensorId dy = tape.cotangent(node.outputs[Norm::y]);
  if (dy != kNone) {
    std::vector<TensorId> in(NormBackward::kInputs, kNone);
    in[NormBackward::dy] = tape.convert(dy, tape.old(node.outputs[Norm::y]).dtype);
    in[NormBackward::x] = x.id;
    in[NormBackward::scale] = tape.value(node.inputs[Norm::scale]);
    if (layer) in[NormBackward::mean] = mean.id;
    in[NormBackward::inv_std] = inv_std.id;
    const std::array<TensorId, NormBackward::kOutputs> operands{
        node.inputs[Norm::x], node.inputs[Norm::scale], node.inputs[Norm::bias]};
    std::vector<bool> wanted;
    for (const TensorId id : operands) wanted.push_back(tape.wanted(id));
    const auto parts = tape.emit_all(NormBackward{norm.kind, norm.axes}, in, wanted);
    for (std::size_t i = 0; i < parts.size(); ++i) tape.add(operands[i], parts[i]);
  }
  // mean and inv_std as results of their own.
  double count = 1;
  for (const std::int64_t axis : norm.axes) {
    count *=
        static_cast<double>(tape.old(node.inputs[Norm::x]).shape[static_cast<std::size_t>(axis)]);
  }
  const Term dmean{&tape, tape.cotangent(node.outputs[Norm::mean])};
  if (dmean.id != kNone) {
    const Term part = 1 / count * dmean;
    tape.add(node.inputs[Norm::x], tape.broadcast(part.id, tape.shape(x.id)));
  }
  const Term dinv{&tape, tape.cotangent(node.outputs[Norm::inv_std])};
  if (dinv.id != kNone) {
    const Term slope = -1 / count * (dinv * inv_std * inv_std * inv_std);
    tape.add(node.inputs[Norm::x], (slope * (layer ? x - mean : x)).id);
  }
  return tape.status();
}

Status differentiate(Tape& tape, const Node& node, const Attention& attention) {
  using Back = AttentionBackward;
  const auto refuse = [&](std::string_view what) -> Status {
    return unsupported("gradient",
                       fmt::format("{} has no gradient of {}", op_text(tape.forward(), node), what),
                       op_name(node.op));
  };
  for (const auto slot : {Attention::stats, Attention::max_logit}) {
    if (tape.cotangent(node.outputs[slot]) != kNone) {
      return refuse(result_names(node.op)[slot]);
    }
  }
  if (node.inputs[Attention::page_table_k] != kNone) return refuse("a paged cache");
  const std::array<TensorId, Back::kOutputs> operands{
      node.inputs[Attention::q], node.inputs[Attention::k], node.inputs[Attention::v],
      node.inputs[Attention::bias], node.inputs[Attention::sink]};
  for (std::size_t slot = 0; slot < node.inputs.size(); ++slot) {
    const TensorId id = node.inputs[slot];
    const bool has_gradient = std::find(operands.begin(), operands.end(), id) != operands.end();
    if (tape.wanted(id) && !has_gradient) return refuse(slot_names(node.op)[slot]);
  }
  std::vector<TensorId> in;
  for (const TensorId id : node.inputs) in.push_back(tape.value(id));
  in.resize(Back::kInputs, kNone);
  in[Back::o] = tape.result(node, Attention::o);
  in[Back::dout] =
      tape.convert(tape.cotangent(node.outputs[Attention::o]), tape.dtype_of(in[Back::o]));
  in[Back::stats] = tape.result(node, Attention::stats);
  // dq, dk and dv come together.
  const std::vector<bool> wanted{true, true, true, tape.wanted(operands[Back::dbias]),
                                 tape.wanted(operands[Back::dsink])};
  const auto parts = tape.emit_all(Back{attention.rule}, in, wanted);
  for (std::size_t i = 0; i < parts.size(); ++i) tape.add(operands[i], parts[i]);
  return tape.status();
}

}  // namespace lawson::ir
