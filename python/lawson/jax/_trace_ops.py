"""Pointwise ops, views and reductions: one rule for each of JAX's primitives, by its name.

A rule gets the walk, the equation and its operands, and returns the result (or a list of them).
JAX has already promoted dtypes and broadcast shapes; what its semantics have and the ops do not
(integers that wrap around, truncation towards zero) is written with other ops, or refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from lawson._graph.idioms import recognised
from lawson._graph.values import (
    Const,
    Operand,
    Value,
    const,
    integer_bounds,
    is_float,
)

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
                f"{dtype} arithmetic wraps around in JAX, and saturates here",
                "convert the operands to int32 first",
            )
    out = walk.emit.pointwise(op, operands, dtype, **attributes)
    integral = op in _TO_INTEGRAL or (op in _KEEPS_INTEGRAL and all(map(_integral, operands)))
    out = dataclasses.replace(out, integral=integral and is_float(dtype), bounds=bounds)
    return recognised(walk.emit, out)


def _integral(x: Operand) -> bool:
    if isinstance(x, Value):
        return x.integral or not is_float(x.dtype)
    return bool(np.isfinite(x.number) and x.number == np.rint(x.number))


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
    erf = pointwise(walk, "erf", operands)
    return pointwise(walk, "sub", [const(1, erf.dtype), erf])


@rule("exp2")
def _exp2(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    x = operands[0]
    return pointwise(walk, "exp", [pointwise(walk, "mul", [x, const(np.log(2.0), x.dtype)])])


@rule("square")
def _square(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    return pointwise(walk, "mul", [operands[0], operands[0]])


@rule("integer_pow")
def _integer_pow(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    x, y = operands[0], int(eqn.params["y"])
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


@rule("pow")
def _pow(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    base, exponent = operands
    if not is_float(base.dtype):
        walk.refuse("an integer base", "convert it to a float first")
    return pointwise(walk, "pow", [base, converted(walk, exponent, base.dtype)])


@rule("round")
def _round(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    x = operands[0]
    if int(eqn.params["rounding_method"]) == 1:  # to nearest even
        return pointwise(walk, "round", [x])
    # away from zero: halves are exact, and x + 0.5 is not where x has more bits than a half
    whole = truncated(walk, x)
    rest = pointwise(walk, "abs", [pointwise(walk, "sub", [x, whole])])
    up = compare(walk, "compare_ge", rest, const(0.5, x.dtype))
    away = pointwise(walk, "add", [whole, pointwise(walk, "sign", [x])])
    return select(walk, up, away, whole)


@rule("is_finite")
def _is_finite(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    zero = walk.emit.pointwise("sub", [operands[0]] * 2, operands[0].dtype)
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


@rule("eq", "ne", "lt", "le", "gt", "ge")
def _compare(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    a, b = operands
    name = eqn.primitive.name
    if a.dtype == "bool":
        if name not in ("eq", "ne"):
            walk.refuse("an order of bool operands", "convert them to int32 first")
        different = _xor(walk, a, b)
        return different if name == "ne" else logical(walk, "not", different)
    return compare(walk, f"compare_{name}", a, b)


def _xor(walk: Walk, a: Operand, b: Operand) -> Operand:
    only_a = logical(walk, "and", a, logical(walk, "not", b))
    only_b = logical(walk, "and", logical(walk, "not", a), b)
    return logical(walk, "or", only_a, only_b)


@rule("and", "or", "not", "xor")
def _logical(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    if operands[0].dtype != "bool":
        walk.refuse(f"bits of {operands[0].dtype}", "logical operators on bool tensors")
    if eqn.primitive.name == "xor":
        return _xor(walk, *operands)
    return logical(walk, eqn.primitive.name, *operands)


def select(walk: Walk, predicate: Operand, yes: Operand, no: Operand) -> Operand:
    shape = np.broadcast_shapes(predicate.shape, yes.shape, no.shape)
    if isinstance(predicate, Const):
        return dataclasses.replace(yes if predicate.value else no, shape=shape)
    if yes.dtype == "bool":
        kept = logical(walk, "and", predicate, yes)
        return logical(walk, "or", kept, logical(walk, "and", logical(walk, "not", predicate), no))
    out = walk.emit.pointwise("select", [predicate, yes, no], yes.dtype)
    if is_float(out.dtype):
        out = dataclasses.replace(out, integral=_integral(yes) and _integral(no))
    else:
        ranges = [yes.range(), no.range()]
        bounds = (min(r[0] for r in ranges), max(r[1] for r in ranges))
        out = dataclasses.replace(out, bounds=bounds)
    return recognised(walk.emit, dataclasses.replace(out, shape=shape))


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


def truncated(walk: Walk, x: Operand) -> Operand:
    """Towards zero, as JAX converts to integers; the op `convert` rounds to the nearest."""
    if _integral(x):
        return x
    negative = compare(walk, "compare_lt", x, const(0, x.dtype))
    return select(walk, negative, pointwise(walk, "ceil", [x]), pointwise(walk, "floor", [x]))


def converted(walk: Walk, x: Operand, dtype: str) -> Operand:
    """``x`` as ``dtype``, with JAX's meaning of it."""
    if x.dtype == dtype:
        return x
    if isinstance(x, Const) and (np.isfinite(x.number) or is_float(dtype)):
        return const(x.value, dtype, x.shape)
    if dtype == "bool":
        return compare(walk, "compare_ne", x, const(0, x.dtype))
    if is_float(dtype):
        out = walk.emit.pointwise("convert", [x], dtype)
        # an integer may be rounded, and stays an integer
        return dataclasses.replace(out, integral=_integral(x))
    if is_float(x.dtype):
        whole = truncated(walk, x)
        return walk.emit.pointwise("convert", [whole], dtype)
    low, high = x.range()
    if low < integer_bounds(dtype)[0] or high > integer_bounds(dtype)[1]:
        walk.refuse(
            f"{x.dtype} to {dtype} wraps around in JAX, and saturates here",
            f"bring the values into the range of {dtype} first, with jnp.clip",
        )
    return dataclasses.replace(walk.emit.pointwise("convert", [x], dtype), bounds=(low, high))


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
    return _parts(walk, operands[0], eqn.params["axis"], eqn.params["sizes"])


@rule("unstack")
def _unstack(walk: Walk, eqn: Any, operands: list[Operand]) -> list[Operand]:
    x, axis = operands[0], eqn.params.get("axis", 0)
    parts = _parts(walk, x, axis, (1,) * x.shape[axis])
    return [walk.emit.reshape(p, tuple(v.aval.shape)) for p, v in zip(parts, eqn.outvars)]


def _parts(walk: Walk, x: Operand, axis: int, sizes: Any) -> list[Operand]:
    parts, at = [], 0
    for size in sizes:
        start = tuple(at if i == axis else 0 for i in range(len(x.shape)))
        limit = tuple(at + size if i == axis else n for i, n in enumerate(x.shape))
        parts.append(walk.emit.slice(x, start, limit, (1,) * len(start)))
        at += size
    return parts


@rule("tile")
def _tile(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    x = operands[0]
    for axis, times in enumerate(eqn.params["reps"]):
        x = walk.emit.concat([x] * times, axis) if times != 1 else x
    return x


@rule("pad")
def _pad(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    x, filling = operands
    if not isinstance(filling, Const):
        walk.refuse("a padding value that is not a constant", "jnp.where over a padded tensor")
    for axis, (low, high, interior) in enumerate(eqn.params["padding_config"]):
        if interior and x.shape[axis] > 1:
            x = _spread(walk, x, filling, axis, interior)
        bounds = [
            slice(max(-low, 0), n - max(-high, 0)) if i == axis else slice(0, n)
            for i, n in enumerate(x.shape)
        ]
        if low < 0 or high < 0:
            x = walk.emit.slice(
                x, tuple(b.start for b in bounds), tuple(b.stop for b in bounds), (1,) * len(bounds)
            )
        parts = []
        for size in (low, None, high):
            if size is None:
                parts.append(x)
            elif size > 0:
                shape = tuple(size if i == axis else n for i, n in enumerate(x.shape))
                parts.append(dataclasses.replace(filling, shape=shape))
        x = walk.emit.concat(parts, axis)
    return x


def _spread(walk: Walk, x: Operand, filling: Operand, axis: int, interior: int) -> Operand:
    """Puts ``interior`` fillings behind each element along ``axis`` but the last."""
    shape = x.shape
    room = (*shape[: axis + 1], 1, *shape[axis + 1 :])
    gap = (*shape[: axis + 1], interior, *shape[axis + 1 :])
    wide = walk.emit.concat(
        [walk.emit.reshape(x, room), dataclasses.replace(filling, shape=gap)], axis + 1
    )
    long = (*shape[:axis], shape[axis] * (interior + 1), *shape[axis + 1 :])
    limit = tuple(n - interior if i == axis else n for i, n in enumerate(long))
    return walk.emit.slice(walk.emit.reshape(wide, long), (0,) * len(long), limit, (1,) * len(long))


@rule("iota")
def _iota(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    axis, shape = eqn.params["dimension"], walk.shape(eqn)
    dtype = walk.dtype(eqn.params["dtype"])
    stored = tuple(n if i == axis else 1 for i, n in enumerate(shape))
    out = walk.emit.emit("iota", (), dtype, stored, shape, axis=axis, to=list(stored))
    if is_float(dtype):
        return dataclasses.replace(out, integral=True)
    return dataclasses.replace(out, bounds=(0, max(shape[axis] - 1, 0)))


# ---- reductions --------------------------------------------------------------------------------


@rule("reduce_sum", "reduce_max", "reduce_min", "reduce_prod")
def _reduce(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    return reduced(walk, eqn.primitive.name, operands[0], eqn.params["axes"])


def reduced(walk: Walk, op: str, x: Operand, axes: Any) -> Operand:
    axes = sorted(int(a) for a in axes)
    if not axes:
        return x
    shape = tuple(n for i, n in enumerate(x.shape) if i not in axes)
    extremum = op in ("reduce_max", "reduce_min")
    if isinstance(x, Const) and extremum and 0 not in x.shape:
        return dataclasses.replace(x, shape=shape)
    if isinstance(x, Const):
        x = walk.emit.whole(x)
    if x.dtype in ("i8", "u8", "i4", "bool") and not extremum:
        walk.refuse(f"a sum of {x.dtype} wraps around", "convert to int32 first")
    base = walk.emit.unfolded(x)
    merged = None if base is None else _merged_axes(base.stored, x.shape, axes)
    if base is not None and merged:
        whole = reduced(walk, op, dataclasses.replace(base, bounds=x.bounds), merged)
        return walk.emit.reshape(whole, shape)
    x = walk.emit.aligned(x) if x.stored else walk.emit.whole(x)
    if any(x.stored[a] != x.shape[a] for a in axes):
        x = walk.emit.whole(x)
    stored = tuple(n for i, n in enumerate(x.stored) if i not in axes)
    out = walk.emit.emit(op, (x,), x.dtype, stored, shape, axes=axes)
    return dataclasses.replace(
        out, integral=extremum and x.integral, bounds=x.bounds if extremum else None
    )


def _merged_axes(base: tuple[int, ...], shape: tuple[int, ...], axes: list[int]) -> list[int]:
    """The axes of ``base`` that are ``axes`` of what it was reshaped to; empty: no such axes."""
    found, left, at = [], set(axes), 0
    for i, size in enumerate(base):
        group: list[int] = []
        count = 1
        while at < len(shape) and (count < size or shape[at] == 1):
            count *= shape[at]
            group.append(at)
            at += 1
        if count != size or 0 in shape:
            return []
        inside = {a for a in group if shape[a] != 1}
        if inside and inside <= left:
            found.append(i)
        elif inside & left:
            return []
    return found


@rule("reduce_or", "reduce_and")
def _reduce_logical(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    op = "reduce_max" if eqn.primitive.name == "reduce_or" else "reduce_min"
    numbers = converted(walk, operands[0], "f32")
    return converted(walk, reduced(walk, op, numbers, eqn.params["axes"]), "bool")
