"""Pointwise ops as frontends write them: constants are folded, integers checked, idioms recognised.

What frameworks' semantics have and the ops do not (integers that wrap around, truncation towards
zero) is written with other ops, or refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from lawson._graph.idioms import recognised
from lawson._graph.values import Const, Operand, Value, const, integer_bounds, is_float
from lawson._graph.walk import Walk

_FOLDS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "pow": np.power, "mod": np.fmod, "neg": np.negative, "abs": np.abs, "exp": np.exp,
    "log": np.log, "log1p": np.log1p, "expm1": np.expm1, "sqrt": np.sqrt, "tanh": np.tanh,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "ceil": np.ceil, "floor": np.floor,
    "round": np.rint, "sign": np.sign, "reciprocal": lambda x: x.dtype.type(1) / x,
    "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x),
    "sigmoid": lambda x: x.dtype.type(1) / (x.dtype.type(1) + np.exp(-x)),
    "compare_eq": np.equal, "compare_ne": np.not_equal, "compare_lt": np.less,
    "compare_le": np.less_equal, "compare_gt": np.greater, "compare_ge": np.greater_equal,
    "and": np.logical_and, "or": np.logical_or, "not": np.logical_not,
}  # fmt: skip
# Results hold integers whatever the operand is, or where all operands do.
_TO_INTEGRAL = {"ceil", "floor", "round", "sign"}
_KEEPS_INTEGRAL = {"max", "min", "neg", "abs", "select", "relu", "relu6", "clamp"}


def _fold(op: str, operands: list[Operand], dtype: str) -> Const | None:
    if op == "div":
        whole = not is_float(dtype)
        function: Any = (lambda a, b: np.trunc(np.divide(a, b))) if whole else np.divide
        if whole and operands[1].value == 0:  # type: ignore[union-attr]
            return None
    else:
        function = _FOLDS.get(op)
    if function is None:
        return None
    with np.errstate(all="ignore"):
        value = function(*(x.value for x in operands))  # type: ignore[union-attr]
    return const(value, dtype, np.broadcast_shapes(*(x.shape for x in operands)))


def _bounds(op: str, operands: list[Operand], dtype: str) -> tuple[int, int] | None:
    """What is known of an integer result; None where it may leave its dtype."""
    ranges = [x.range() for x in operands]
    if op in ("add", "sub", "mul"):
        (a, b), (c, d) = ranges
        ends = {
            "add": [a + c, b + d],
            "sub": [a - d, b - c],
            "mul": [a * c, a * d, b * c, b * d],
        }[op]
    elif op in ("max", "min"):
        choose = max if op == "max" else min
        ends = [choose(r[i] for r in ranges) for i in (0, 1)]
    elif op == "neg":
        ends = [-ranges[0][1], -ranges[0][0]]
    elif op == "abs":
        low, high = ranges[0]
        ends = [0 if low <= 0 <= high else min(abs(low), abs(high)), max(abs(low), abs(high))]
    elif op == "sign":
        ends = [-1, 1]
    elif op == "div":
        ends = list(integer_bounds(dtype))
    elif op == "mod":
        reach = max(abs(ranges[1][0]), abs(ranges[1][1]))
        ends = [-reach if ranges[0][0] < 0 else 0, reach]
    else:
        return None
    low, high = integer_bounds(dtype)
    return (min(ends), max(ends)) if min(ends) >= low and max(ends) <= high else None


def pointwise(walk: Walk, op: str, operands: list[Operand], **attributes: Any) -> Operand:
    """An op whose result has the dtype of its operands."""
    dtype = operands[-1].dtype
    if all(isinstance(x, Const) for x in operands) and not attributes:
        folded = _fold(op, operands, dtype)
        if folded is not None:
            return folded
    first, last = operands[0], operands[-1]
    if op in ("mul", "div") and isinstance(last, Const) and last.number == 1:
        return dataclasses.replace(first, shape=np.broadcast_shapes(first.shape, last.shape))
    if op == "mul" and isinstance(first, Const) and first.number == 1:
        return dataclasses.replace(last, shape=np.broadcast_shapes(first.shape, last.shape))
    if op == "sub" and isinstance(last, Const) and last.number == 0:
        return dataclasses.replace(first, shape=np.broadcast_shapes(first.shape, last.shape))
    bounds = None
    if not is_float(dtype):
        bounds = _bounds(op, operands, dtype)
        if bounds is None and dtype not in ("i32", "i64"):
            walk.refuse(
                f"{dtype} arithmetic wraps around in {walk.framework}, and saturates here",
                "convert the operands to int32 first",
            )
    out = walk.emit.pointwise(op, operands, dtype, **attributes)
    integral = op in _TO_INTEGRAL or (op in _KEEPS_INTEGRAL and all(map(is_integral, operands)))
    out = dataclasses.replace(out, integral=integral and is_float(dtype), bounds=bounds)
    return recognised(walk.emit, out)


def is_integral(x: Operand) -> bool:
    if isinstance(x, Value):
        return x.integral or not is_float(x.dtype)
    return bool(np.isfinite(x.number) and x.number == np.rint(x.number))


def integer_power(walk: Walk, x: Operand, y: int) -> Operand:
    """x ** y by products."""
    if y == 0:
        return const(1, x.dtype, x.shape)
    result: Operand | None = None
    factor, left = x, abs(y)
    if left == 3:  # as the fast path of compilers, and as gelu is recognised by
        result = pointwise(walk, "mul", [pointwise(walk, "mul", [x, x]), x])
        left = 0
    while left:
        if left & 1:
            result = factor if result is None else pointwise(walk, "mul", [result, factor])
        left >>= 1
        if left:
            factor = pointwise(walk, "mul", [factor, factor])
    assert result is not None
    return pointwise(walk, "reciprocal", [result]) if y < 0 else result


def erfc(walk: Walk, x: Operand) -> Operand:
    """1 - erf(x): of absolute precision, not of relative."""
    return pointwise(walk, "sub", [const(1, x.dtype), pointwise(walk, "erf", [x])])


def exp2(walk: Walk, x: Operand) -> Operand:
    return pointwise(walk, "exp", [pointwise(walk, "mul", [x, const(np.log(2.0), x.dtype)])])


def away_from_zero(walk: Walk, x: Operand) -> Operand:
    """Rounded to the nearest, halves away from zero."""
    # halves are exact, and x + 0.5 is not where x has more bits than a half
    whole = truncated(walk, x)
    rest = pointwise(walk, "abs", [pointwise(walk, "sub", [x, whole])])
    up = compare(walk, "compare_ge", rest, const(0.5, x.dtype))
    away = pointwise(walk, "add", [whole, pointwise(walk, "sign", [x])])
    return select(walk, up, away, whole)


def is_finite(walk: Walk, x: Operand) -> Operand:
    zero = walk.emit.pointwise("sub", [x] * 2, x.dtype)
    return compare(walk, "compare_eq", zero, const(0, zero.dtype))


def compare(walk: Walk, op: str, a: Operand, b: Operand) -> Operand:
    if isinstance(a, Const) and isinstance(b, Const):
        folded = _fold(op, [a, b], "bool")
        assert folded is not None
        return folded
    return walk.emit.pointwise(op, [a, b], "bool")


def logical(walk: Walk, op: str, *operands: Operand) -> Operand:
    if all(isinstance(x, Const) for x in operands):
        folded = _fold(op, list(operands), "bool")
        assert folded is not None
        return folded
    for known, other in (operands, operands[::-1]) if len(operands) == 2 else ():
        if isinstance(known, Const):  # the other one, or this one, whatever the other one is
            shape = np.broadcast_shapes(known.shape, other.shape)
            kept = other if bool(known.value) == (op == "and") else known
            return dataclasses.replace(kept, shape=shape)
    return walk.emit.pointwise(op, operands, "bool")


def xor(walk: Walk, a: Operand, b: Operand) -> Operand:
    only_a = logical(walk, "and", a, logical(walk, "not", b))
    only_b = logical(walk, "and", logical(walk, "not", a), b)
    return logical(walk, "or", only_a, only_b)


def select(walk: Walk, predicate: Operand, yes: Operand, no: Operand) -> Operand:
    shape = np.broadcast_shapes(predicate.shape, yes.shape, no.shape)
    if isinstance(predicate, Const):
        return dataclasses.replace(yes if predicate.value else no, shape=shape)
    if yes.dtype == "bool":
        kept = logical(walk, "and", predicate, yes)
        return logical(walk, "or", kept, logical(walk, "and", logical(walk, "not", predicate), no))
    out = walk.emit.pointwise("select", [predicate, yes, no], yes.dtype)
    if is_float(out.dtype):
        out = dataclasses.replace(out, integral=is_integral(yes) and is_integral(no))
    else:
        ranges = [yes.range(), no.range()]
        bounds = (min(r[0] for r in ranges), max(r[1] for r in ranges))
        out = dataclasses.replace(out, bounds=bounds)
    return recognised(walk.emit, dataclasses.replace(out, shape=shape))


# ---- dtypes ------------------------------------------------------------------------------------


def truncated(walk: Walk, x: Operand) -> Operand:
    """Towards zero, as frameworks convert to integers; the op `convert` rounds to the nearest."""
    if is_integral(x):
        return x
    negative = compare(walk, "compare_lt", x, const(0, x.dtype))
    return select(walk, negative, pointwise(walk, "ceil", [x]), pointwise(walk, "floor", [x]))


def converted(walk: Walk, x: Operand, dtype: str) -> Operand:
    """``x`` as ``dtype``, with the frameworks' meaning of it."""
    if x.dtype == dtype:
        return x
    if isinstance(x, Const) and (np.isfinite(x.number) or is_float(dtype)):
        return const(x.value, dtype, x.shape)
    if dtype == "bool":
        return compare(walk, "compare_ne", x, const(0, x.dtype))
    if is_float(dtype):
        out = walk.emit.pointwise("convert", [x], dtype)
        # an integer may be rounded, and stays an integer
        return dataclasses.replace(out, integral=is_integral(x))
    if is_float(x.dtype):
        whole = truncated(walk, x)
        return walk.emit.pointwise("convert", [whole], dtype)
    low, high = x.range()
    if low < integer_bounds(dtype)[0] or high > integer_bounds(dtype)[1]:
        walk.refuse(
            f"{x.dtype} to {dtype} wraps around in {walk.framework}, and saturates here",
            f"bring the values into the range of {dtype} first, with {walk.clip}",
        )
    return dataclasses.replace(walk.emit.pointwise("convert", [x], dtype), bounds=(low, high))
