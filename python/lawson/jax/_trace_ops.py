"""Pointwise ops, views and reductions: one rule for each of JAX's primitives, by its name.

A rule gets the walk, the equation and its operands, and returns the result (or a list of them).
JAX has already promoted dtypes and broadcast shapes; what its semantics have and the ops do not
(integers that wrap around, truncation towards zero) is written with other ops, or refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from lawson._graph.pointwise import (
    away_from_zero,
    compare,
    converted,
    erfc,
    exp2,
    integer_power,
    is_finite,
    logical,
    pointwise,
    select,
    xor,
)
from lawson._graph.reductions import any_or_all, reduced
from lawson._graph.values import Const, Operand, const, is_float
from lawson._graph.views import iota, padded, parts, tiled

if TYPE_CHECKING:
    from lawson.jax._trace import Walk

Rule = Callable[["Walk", Any, list[Operand]], "Operand | list[Operand]"]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


# ---- pointwise ---------------------------------------------------------------------------------

_SAME_NAME = (
    "add sub mul div max min neg exp log log1p expm1 sqrt rsqrt sin cos tan tanh ceil floor sign"
)
_RENAMED = {"rem": "mod", "logistic": "sigmoid", "add_any": "add"}


def _direct(op: str) -> Rule:
    def apply(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
        if any(x.dtype == "bool" for x in operands):
            walk.refuse("bool operands", "convert them to a number first, or use logical operators")
        return pointwise(walk, op, operands)

    return apply


for _name in _SAME_NAME.split():
    RULES[_name] = _direct(_name)
for _name, _op in _RENAMED.items():
    RULES[_name] = _direct(_op)


@rule("abs")
def _abs(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    walk.rounds_gradient("abs")  # JAX has 1 at 0
    return pointwise(walk, "abs", operands)


@rule("erf")
def _erf(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    return pointwise(walk, "erf", operands)


@rule("erfc")
def _erfc(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    return erfc(walk, operands[0])


@rule("exp2")
def _exp2(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    return exp2(walk, operands[0])


@rule("square")
def _square(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    return pointwise(walk, "mul", [operands[0], operands[0]])


@rule("integer_pow")
def _integer_pow(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    return integer_power(walk, operands[0], int(eqn.params["y"]))


@rule("pow")
def _pow(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    base, exponent = operands
    if not is_float(base.dtype):
        walk.refuse("an integer base", "convert it to a float first")
    return pointwise(walk, "pow", [base, converted(walk, exponent, base.dtype)])


@rule("round")
def _round(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    if int(eqn.params["rounding_method"]) == 1:  # to nearest even
        return pointwise(walk, "round", operands)
    return away_from_zero(walk, operands[0])


@rule("is_finite")
def _is_finite(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    return is_finite(walk, operands[0])


@rule("eq", "ne", "lt", "le", "gt", "ge")
def _compare(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    a, b = operands
    name = eqn.primitive.name
    if a.dtype == "bool":
        if name not in ("eq", "ne"):
            walk.refuse("an order of bool operands", "convert them to int32 first")
        different = xor(walk, a, b)
        return different if name == "ne" else logical(walk, "not", different)
    return compare(walk, f"compare_{name}", a, b)


@rule("and", "or", "not", "xor")
def _logical(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    if operands[0].dtype != "bool":
        walk.refuse(f"bits of {operands[0].dtype}", "logical operators on bool tensors")
    if eqn.primitive.name == "xor":
        return xor(walk, *operands)
    return logical(walk, eqn.primitive.name, *operands)


@rule("select_n")
def _select_n(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    which, *cases = operands
    if which.dtype == "bool":
        return select(walk, which, cases[-1], cases[0]) if len(cases) == 2 else cases[0]
    result = cases[-1]
    for i in range(len(cases) - 2, -1, -1):
        here = compare(walk, "compare_eq", which, const(i, which.dtype))
        result = select(walk, here, cases[i], result)
    return result


@rule("clamp")
def _clamp(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    low, x, high = operands
    walk.rounds_gradient("clamp")  # JAX has 0 at both ends
    if isinstance(low, Const) and isinstance(high, Const) and is_float(x.dtype):
        ends = (low.number, high.number)
        if np.isfinite(ends).all() and ends[0] <= ends[1]:
            return pointwise(walk, "clamp", [x], min=ends[0], max=ends[1])
    return pointwise(walk, "min", [pointwise(walk, "max", [x, low]), high])


# ---- dtypes ------------------------------------------------------------------------------------


@rule("convert_element_type")
def _convert(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    return converted(walk, operands[0], walk.dtype(eqn.params["new_dtype"]))


@rule("reduce_precision")
def _reduce_precision(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    bits = (eqn.params["exponent_bits"], eqn.params["mantissa_bits"])
    through = {(8, 7): "bf16", (5, 10): "f16", (8, 23): "f32", (11, 52): "f64"}.get(bits)
    x = operands[0]
    if through is None:
        walk.refuse(f"{bits[0]} bits of exponent and {bits[1]} of mantissa", "those of f16 or bf16")
    return converted(walk, converted(walk, x, str(through)), x.dtype)


@rule("dce_sink")
def _nothing(walk: Walk, eqn: Any, operands: list[Operand]) -> list[Operand]:
    return []


@rule("empty", "empty2")
def _empty(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    aval = eqn.outvars[0].aval
    return const(0, walk.dtype(aval.dtype), tuple(aval.shape))  # any value is right


@rule("copy", "copy_p", "name", "optimization_barrier", "pvary", "reduced_vary_cast_p",
      "pbroadcast", "tie")  # fmt: skip
def _same(walk: Walk, eqn: Any, operands: list[Operand]) -> list[Operand]:
    return operands


@rule("stop_gradient")
def _stop_gradient(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    walk.rounds_gradient("stop_gradient")
    return operands[0]


# ---- views -------------------------------------------------------------------------------------


@rule("broadcast_in_dim")
def _broadcast_in_dim(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    dims = eqn.params["broadcast_dimensions"]
    return walk.emit.broadcast_in_dim(operands[0], walk.shape(eqn), dims)


@rule("reshape", "squeeze", "expand_dims")
def _reshape(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        operands = [walk.emit.transpose(operands[0], eqn.params["dimensions"])]
    return walk.emit.reshape(operands[0], walk.shape(eqn))


@rule("transpose")
def _transpose(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    return walk.emit.transpose(operands[0], eqn.params["permutation"])


@rule("slice")
def _slice(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    stride = eqn.params["strides"] or (1,) * len(start)
    return walk.emit.slice(operands[0], tuple(start), tuple(limit), tuple(stride))


@rule("dynamic_slice")
def _dynamic_slice(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    x, *at = operands
    sizes = eqn.params["slice_sizes"]
    known = [int(i.number) for i in at if isinstance(i, Const)]
    if len(known) < len(at):
        walk.refuse("a start that is not known while tracing", "a slice with constant bounds")
    starts = [min(max(i, 0), n - k) for i, n, k in zip(known, x.shape, sizes)]
    limits = tuple(s + k for s, k in zip(starts, sizes))
    return walk.emit.slice(x, tuple(starts), limits, (1,) * len(starts))


@rule("concatenate")
def _concatenate(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    return walk.emit.concat(operands, eqn.params["dimension"])


@rule("stack")
def _stack(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    axis = eqn.params.get("axis", 0)
    shape = list(walk.shape(eqn))
    shape[axis] = 1
    parts = [walk.emit.reshape(x, tuple(shape)) for x in operands]
    return walk.emit.concat(parts, axis)


@rule("split")
def _split(walk: Walk, eqn: Any, operands: list[Operand]) -> list[Operand]:
    return parts(walk, operands[0], eqn.params["axis"], eqn.params["sizes"])


@rule("unstack")
def _unstack(walk: Walk, eqn: Any, operands: list[Operand]) -> list[Operand]:
    x, axis = operands[0], eqn.params.get("axis", 0)
    cut = parts(walk, x, axis, (1,) * x.shape[axis])
    return [walk.emit.reshape(p, tuple(v.aval.shape)) for p, v in zip(cut, eqn.outvars)]


@rule("tile")
def _tile(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    return tiled(walk, operands[0], eqn.params["reps"])


@rule("pad")
def _pad(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    x, filling = operands
    if not isinstance(filling, Const):
        walk.refuse("a padding value that is not a constant", "jnp.where over a padded tensor")
    return padded(walk, x, filling, eqn.params["padding_config"])


@rule("iota")
def _iota(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    dtype = walk.dtype(eqn.params["dtype"])
    return iota(walk, walk.shape(eqn), eqn.params["dimension"], dtype)


# ---- reductions --------------------------------------------------------------------------------


@rule("reduce_sum", "reduce_max", "reduce_min", "reduce_prod")
def _reduce(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    return reduced(walk, eqn.primitive.name, operands[0], eqn.params["axes"])


@rule("reduce_or", "reduce_and")
def _reduce_logical(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    op = "reduce_max" if eqn.primitive.name == "reduce_or" else "reduce_min"
    return any_or_all(walk, op, operands[0], eqn.params["axes"])
