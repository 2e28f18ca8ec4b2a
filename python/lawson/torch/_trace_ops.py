"""ATen's ops: one rule for each, by its name, whatever the overload.

A rule gets the walk, the call (with the result's shape and dtype as PyTorch knows them), and the
op's arguments: tensors as operands, everything else as it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lawson._graph.pointwise import (
    compare,
    converted,
    erfc,
    exp2,
    integer_power,
    is_finite,
    logical,
    pointwise,
    select,
    truncated,
    xor,
)
from lawson._graph.values import Const, Operand, Value, const, is_float
from lawson.torch._trace import Call, Walk

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
_COMPUTES = ("f16", "bf16", "f32", "f64")


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys((f"aten::{n}" for n in names), function))
        return function

    return register


def operand(walk: Walk, x: Any, dtype: str) -> Operand:
    """A tensor or a number in ``dtype``."""
    if isinstance(x, (Value, Const)):
        return converted(walk, x, dtype)
    return const(x, dtype)


def spread(x: Operand, shape: tuple[int, ...]) -> Operand:
    """As large as PyTorch says."""
    return x if x.shape == shape else dataclasses.replace(x, shape=shape)


def _computed(walk: Walk, call: Call) -> str:
    dtype = walk.dtype(call.dtype)
    if is_float(dtype) and dtype not in _COMPUTES:
        walk.refuse(f"arithmetic of {dtype}", "convert to float32 first")
    return dtype


def apply(walk: Walk, call: Call, op: str, *operands: Any, **attributes: Any) -> Operand:
    """An op whose operands and result have the dtype of the call's result."""
    dtype = _computed(walk, call)
    return pointwise(walk, op, [operand(walk, x, dtype) for x in operands], **attributes)


# ---- arithmetic --------------------------------------------------------------------------------

_UNARY = {
    "neg": "neg", "exp": "exp", "log": "log", "log1p": "log1p", "expm1": "expm1", "sqrt": "sqrt",
    "rsqrt": "rsqrt", "reciprocal": "reciprocal", "sin": "sin", "cos": "cos", "tan": "tan",
    "tanh": "tanh", "erf": "erf", "sigmoid": "sigmoid", "relu": "relu", "silu": "silu",
    "relu6": "relu6", "abs": "abs",
}  # fmt: skip
_ROUNDING = {"ceil": "ceil", "floor": "floor", "round": "round", "sign": "sign"}
_BINARY = {"minimum": "min", "maximum": "max", "fmod": "mod"}


def _unary(op: str) -> Rule:
    def translate(walk: Walk, call: Call, x: Any) -> Operand:
        return apply(walk, call, op, x)

    return translate


def _rounding(op: str) -> Rule:
    def translate(walk: Walk, call: Call, x: Any, *, decimals: int = 0) -> Operand:
        if decimals:
            walk.refuse(f"{decimals} decimals", "the rounding of a scaled tensor")
        if not is_float(x.dtype) and op != "sign":
            return converted(walk, x, walk.dtype(call.dtype))
        found = apply(walk, call, op, x)
        if op == "sign" and is_float(x.dtype):  # PyTorch's of NaN is 0
            return select(walk, compare(walk, "compare_eq", x, x), found, const(0, found.dtype))
        return found

    return translate


def _binary(op: str) -> Rule:
    def translate(walk: Walk, call: Call, a: Any, b: Any) -> Operand:
        return apply(walk, call, op, a, b)

    return translate


for _name, _op in _UNARY.items():
    RULES[f"aten::{_name}"] = _unary(_op)
for _name, _op in _ROUNDING.items():
    RULES[f"aten::{_name}"] = _rounding(_op)
for _name, _op in _BINARY.items():
    RULES[f"aten::{_name}"] = _binary(_op)


def _scaled(walk: Walk, x: Any, factor: Any, dtype: str) -> Operand:
    x = operand(walk, x, dtype)
    return x if factor == 1 else pointwise(walk, "mul", [x, const(factor, dtype)])


@rule("add", "sub")
def _add(walk: Walk, call: Call, a: Any, b: Any, *, alpha: Any = 1) -> Operand:
    op = "sub" if ".sub" in str(call.node.target) else "add"
    if call.dtype is torch.bool:
        return logical(walk, "or", operand(walk, a, "bool"), operand(walk, b, "bool"))
    return apply(walk, call, op, a, _scaled(walk, b, alpha, _computed(walk, call)))


@rule("rsub")
def _rsub(walk: Walk, call: Call, a: Any, b: Any, alpha: Any = 1) -> Operand:
    return apply(walk, call, "sub", b, _scaled(walk, a, alpha, _computed(walk, call)))


@rule("mul")
def _mul(walk: Walk, call: Call, a: Any, b: Any) -> Operand:
    if call.dtype is torch.bool:
        return logical(walk, "and", operand(walk, a, "bool"), operand(walk, b, "bool"))
    return apply(walk, call, "mul", a, b)


@rule("square")
def _square(walk: Walk, call: Call, x: Any) -> Operand:
    return apply(walk, call, "mul", x, x)


@rule("div")
def _div(walk: Walk, call: Call, a: Any, b: Any, *, rounding_mode: str | None = None) -> Operand:
    dtype = _computed(walk, call)
    a, b = (operand(walk, x, dtype) for x in (a, b))
    if not is_float(dtype):  # trunc, or floor
        whole = pointwise(walk, "div", [a, b])
        if rounding_mode == "trunc":
            return whole
        rest = pointwise(walk, "sub", [a, pointwise(walk, "mul", [whole, b])])
        below = _opposite(walk, rest, b)
        return pointwise(walk, "sub", [whole, converted(walk, below, dtype)])
    found = pointwise(walk, "div", [a, b])
    if rounding_mode == "floor":
        return _floor_divided(walk, a, b, found)
    return truncated(walk, found) if rounding_mode == "trunc" else found


def _floor_divided(walk: Walk, a: Operand, b: Operand, quotient: Operand) -> Operand:
    """By the remainder, as PyTorch and Python: 1 // 0.1 is 9, and the quotient is rounded to 10."""
    if isinstance(b, Const) and not b.shape and abs(math.frexp(float(b.number))[0]) == 0.5:
        return pointwise(walk, "floor", [quotient])  # by a power of 2, which is exact
    dtype = quotient.dtype
    zero, one = const(0, dtype), const(1, dtype)
    rest = pointwise(walk, "mod", [a, b])
    whole = pointwise(walk, "div", [pointwise(walk, "sub", [a, rest]), b])
    less = pointwise(walk, "sub", [whole, one])
    whole = select(walk, _opposite(walk, rest, b), less, whole)
    down = pointwise(walk, "floor", [whole])
    off = pointwise(walk, "sub", [whole, down])
    up = pointwise(walk, "add", [down, one])
    near = select(walk, compare(walk, "compare_gt", off, const(0.5, dtype)), up, down)
    signed_zero = pointwise(walk, "mul", [quotient, zero])
    found = select(walk, compare(walk, "compare_eq", whole, zero), signed_zero, near)
    return select(walk, compare(walk, "compare_eq", b, zero), quotient, found)


def _opposite(walk: Walk, rest: Operand, divisor: Operand) -> Operand:
    """Whether a remainder that is not 0 has another sign than the divisor."""
    zero = const(0, rest.dtype)
    signs = [compare(walk, "compare_lt", x, zero) for x in (rest, divisor)]
    return logical(
        walk, "and", compare(walk, "compare_ne", rest, zero), xor(walk, signs[0], signs[1])
    )


@rule("remainder")
def _remainder(walk: Walk, call: Call, a: Any, b: Any) -> Operand:
    dtype = _computed(walk, call)
    a, b = (operand(walk, x, dtype) for x in (a, b))
    rest = pointwise(walk, "mod", [a, b])
    return select(walk, _opposite(walk, rest, b), pointwise(walk, "add", [rest, b]), rest)


@rule("pow")
def _pow(walk: Walk, call: Call, base: Any, exponent: Any) -> Operand:
    dtype = _computed(walk, call)
    if isinstance(exponent, (int, float)) and not isinstance(exponent, bool):
        if float(exponent).is_integer() and abs(exponent) <= 64:
            x = operand(walk, base, dtype)
            whole = integer_power(walk, x, int(exponent))
            return spread(whole, call.shape)
        if exponent == 0.5:
            return apply(walk, call, "sqrt", base)
        if exponent == -0.5:
            return apply(walk, call, "rsqrt", base)
    if not is_float(dtype):
        walk.refuse("an integer base", "convert it to a float first")
    return apply(walk, call, "pow", base, exponent)


@rule("exp2")
def _exp2(walk: Walk, call: Call, x: Any) -> Operand:
    return exp2(walk, operand(walk, x, _computed(walk, call)))


@rule("log2", "log10")
def _log_of(walk: Walk, call: Call, x: Any) -> Operand:
    base = 2.0 if "log2" in str(call.node.target) else 10.0
    return apply(walk, call, "mul", apply(walk, call, "log", x), 1 / math.log(base))


@rule("erfc", "special_erfc")
def _erfc(walk: Walk, call: Call, x: Any) -> Operand:
    return erfc(walk, operand(walk, x, _computed(walk, call)))


@rule("trunc", "fix")
def _trunc(walk: Walk, call: Call, x: Any) -> Operand:
    return truncated(walk, x) if is_float(x.dtype) else x


@rule("clamp", "clamp_min", "clamp_max", "hardtanh")
def _clamp(walk: Walk, call: Call, x: Any, *ends: Any, **named: Any) -> Operand:
    name = str(call.node.target).split(".")[1]
    low, high = _ends(name, ends, named)
    dtype = _computed(walk, call)
    if name == "hardtanh":
        walk.rounds_gradient("hardtanh")  # PyTorch has 0 at both ends
    numbers = [e for e in (low, high) if isinstance(e, (int, float))]
    in_order = len(numbers) == 2 and numbers[0] <= numbers[1] and is_float(dtype)
    if in_order and math.isfinite(numbers[0]) and math.isfinite(numbers[1]):
        return apply(walk, call, "clamp", x, min=float(numbers[0]), max=float(numbers[1]))
    if any(isinstance(e, (Value, Const)) for e in (low, high)) or len(numbers) == 1:
        walk.rounds_gradient("clamp")  # PyTorch has 1 at the ends
    if low is not None:
        x = apply(walk, call, "max", x, low)
    if high is not None:
        x = apply(walk, call, "min", x, high)
    return converted(walk, x, dtype)


def _ends(name: str, ends: Sequence[Any], named: dict[str, Any]) -> tuple[Any, Any]:
    if name == "hardtanh":
        low, high = (*ends, -1.0, 1.0)[:2] if len(ends) != 1 else (ends[0], 1.0)
        return named.get("min_val", low), named.get("max_val", high)
    if name == "clamp_min":
        return (*ends, *named.values())[0], None
    if name == "clamp_max":
        return None, (*ends, *named.values())[0]
    low, high = (*ends, None, None)[:2]
    return named.get("min", low), named.get("max", high)


# ---- activations -------------------------------------------------------------------------------


@rule("gelu")
def _gelu(walk: Walk, call: Call, x: Any, *, approximate: str = "none") -> Operand:
    return apply(walk, call, "gelu_tanh" if approximate == "tanh" else "gelu", x)


@rule("gelu_backward")
def _gelu_backward(
    walk: Walk, call: Call, dy: Any, x: Any, *, approximate: str = "none"
) -> Operand:
    return apply(walk, call, "gelu_tanh_grad" if approximate == "tanh" else "gelu_grad", dy, x)


@rule("silu_backward")
def _silu_backward(walk: Walk, call: Call, dy: Any, x: Any) -> Operand:
    return apply(walk, call, "silu_grad", dy, x)


@rule("leaky_relu")
def _leaky_relu(walk: Walk, call: Call, x: Any, negative_slope: float = 0.01) -> Operand:
    return apply(walk, call, "leaky_relu", x, slope=float(negative_slope))


@rule("elu")
def _elu(
    walk: Walk, call: Call, x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> Operand:
    if scale == 1 and input_scale == 1:
        return apply(walk, call, "elu", x, alpha=float(alpha))
    positive = compare(
        walk, "compare_gt", operand(walk, x, walk.dtype(call.dtype)), _zero(walk, call)
    )
    # at most 0: beyond, where it is not taken, its derivative may be infinite
    inside = apply(walk, call, "mul", select(walk, positive, _zero(walk, call), x), input_scale)
    negative = apply(walk, call, "mul", apply(walk, call, "expm1", inside), alpha * scale)
    return select(walk, positive, apply(walk, call, "mul", x, scale), negative)


@rule("celu")
def _celu(walk: Walk, call: Call, x: Any, alpha: float = 1.0) -> Operand:
    return _elu(walk, call, x, alpha, 1, 1 / alpha)  # type: ignore[no-any-return]


def _zero(walk: Walk, call: Call) -> Const:
    return const(0, walk.dtype(call.dtype))


@rule("sinc", "special_sinc")
def _sinc(walk: Walk, call: Call, x: Any) -> Operand:
    one, angle = const(1, _computed(walk, call)), apply(walk, call, "mul", x, math.pi)
    middle = compare(walk, "compare_eq", angle, _zero(walk, call))
    angle = select(walk, middle, one, angle)  # no division by 0, whose derivative is none
    found = apply(walk, call, "div", apply(walk, call, "sin", angle), angle)
    return select(walk, middle, one, found)


@rule("softplus")
def _softplus(walk: Walk, call: Call, x: Any, beta: float = 1, threshold: float = 20) -> Operand:
    dtype = _computed(walk, call)
    # Beyond the threshold it is x; from 20 on log(1 + exp(x)) is x in f32 and narrower, and in f64
    # the derivative is not.
    if beta == 1 and threshold >= 20 and dtype != "f64":
        return apply(walk, call, "softplus", x)
    inside = apply(walk, call, "mul", x, beta)
    soft = apply(walk, call, "softplus", inside)
    linear = compare(walk, "compare_gt", inside, const(threshold, dtype))
    return select(walk, linear, operand(walk, x, dtype), apply(walk, call, "div", soft, beta))


@rule("threshold")
def _threshold(walk: Walk, call: Call, x: Any, threshold: float, value: float) -> Operand:
    dtype = _computed(walk, call)
    x = operand(walk, x, dtype)
    above = compare(walk, "compare_gt", x, const(threshold, dtype))
    return select(walk, above, x, const(value, dtype))


@rule("hardshrink_backward", "softshrink_backward")
def _shrink_backward(walk: Walk, call: Call, dy: Any, x: Any, lambd: float) -> Operand:
    dtype = _computed(walk, call)
    size = pointwise(walk, "abs", [operand(walk, x, dtype)])
    inside = compare(walk, "compare_le", size, const(lambd, dtype))
    return spread(select(walk, inside, const(0, dtype), operand(walk, dy, dtype)), call.shape)


# ---- comparisons, selection --------------------------------------------------------------------


@rule("eq", "ne", "lt", "le", "gt", "ge")
def _compare(walk: Walk, call: Call, a: Any, b: Any) -> Operand:
    name = str(call.node.target).split(".")[1]
    dtype = walk.dtype(call.promoted())
    a, b = (operand(walk, x, dtype) for x in (a, b))
    if dtype == "bool":
        if name not in ("eq", "ne"):
            walk.refuse("an order of bool operands", "convert them to int32 first")
        different = xor(walk, a, b)
        return different if name == "ne" else logical(walk, "not", different)
    if is_float(dtype) and dtype not in _COMPUTES:
        walk.refuse(f"a comparison of {dtype}", "convert to float32 first")
    return spread(compare(walk, f"compare_{name}", a, b), call.shape)


@rule("logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_and", "bitwise_or",
      "bitwise_xor", "bitwise_not", "__and__", "__or__", "__xor__")  # fmt: skip
def _logical(walk: Walk, call: Call, *operands: Any) -> Operand:
    name = str(call.node.target).split(".")[1].strip("_")
    kind = name.rpartition("_")[2]
    if not name.startswith("logical") and call.dtype is not torch.bool:
        walk.refuse("bits of integers", "logical operators on bool tensors")
    given = [operand(walk, x, "bool") for x in operands]
    return xor(walk, *given) if kind == "xor" else logical(walk, kind, *given)


@rule("where")
def _where(walk: Walk, call: Call, predicate: Any, yes: Any, no: Any) -> Operand:
    dtype = walk.dtype(call.dtype)
    given = [operand(walk, x, dtype) for x in (yes, no)]
    return spread(select(walk, operand(walk, predicate, "bool"), *given), call.shape)


@rule("masked_fill")
def _masked_fill(walk: Walk, call: Call, x: Any, mask: Any, value: Any) -> Operand:
    return _where(walk, call, mask, value, x)  # type: ignore[no-any-return]


@rule("isnan")
def _isnan(walk: Walk, call: Call, x: Any) -> Operand:
    if not is_float(x.dtype):
        return const(False, "bool", x.shape)
    return compare(walk, "compare_ne", x, x)


@rule("isinf")
def _isinf(walk: Walk, call: Call, x: Any) -> Operand:
    if not is_float(x.dtype):
        return const(False, "bool", x.shape)
    whole = logical(walk, "not", is_finite(walk, x))
    return logical(walk, "and", whole, compare(walk, "compare_eq", x, x))


# ---- dtypes, copies, constants -----------------------------------------------------------------


@rule("_to_copy", "to", "type_as")
def _to_copy(walk: Walk, call: Call, x: Any, **settings: Any) -> Operand:
    source = call.node.args[0]  # a number where vmap makes one a tensor
    if isinstance(source, torch.fx.Node):
        if settings.get("device") not in (None, source.meta["val"].device):
            walk.refuse("a copy to another device", "the copy outside of the fusion")
    return operand(walk, x, walk.dtype(call.dtype))


@rule("clone", "contiguous", "alias", "lift_fresh_copy", "lift_fresh", "detach", "view_as",
      "positive", "resolve_conj", "resolve_neg")  # fmt: skip
def _same(walk: Walk, call: Call, x: Any, *_: Any, **__: Any) -> Operand:
    found: Operand = x
    return found


@rule("copy")
def _copy(walk: Walk, call: Call, x: Any, source: Any, non_blocking: bool = False) -> Operand:
    """``source`` as what ``x`` is: of functional graphs."""
    return spread(operand(walk, source, walk.dtype(call.dtype)), call.shape)


@rule("full", "full_like", "new_full")
def _full(walk: Walk, call: Call, *args: Any, **settings: Any) -> Operand:
    value = settings.get("fill_value", args[-1])
    return spread(operand(walk, value, walk.dtype(call.dtype)), call.shape)


@rule("fill")
def _fill(walk: Walk, call: Call, x: Any, value: Any) -> Operand:
    return spread(operand(walk, value, walk.dtype(call.dtype)), call.shape)


@rule("scalar_tensor")
def _scalar_tensor(walk: Walk, call: Call, value: Any, **_: Any) -> Operand:
    return operand(walk, value, walk.dtype(call.dtype))


@rule("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty", "empty_strided",
      "new_empty_strided", "empty_permuted")  # fmt: skip
def _zeros(walk: Walk, call: Call, *_: Any, **__: Any) -> Operand:
    return const(0, walk.dtype(call.dtype), call.shape)  # of an empty one any value is right


@rule("ones", "ones_like", "new_ones")
def _ones(walk: Walk, call: Call, *_: Any, **__: Any) -> Operand:
    return const(1, walk.dtype(call.dtype), call.shape)


@rule("isfinite")
def _isfinite(walk: Walk, call: Call, x: Any) -> Operand:
    return is_finite(walk, x) if is_float(x.dtype) else const(True, "bool", x.shape)


@rule("signbit")
def _signbit(walk: Walk, call: Call, x: Any) -> Operand:
    walk.refuse("the sign of zeros", "a comparison with 0")
