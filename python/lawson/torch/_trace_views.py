"""Views, reductions, normalisations and indices of ATen; see ``_trace_ops``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lawson._graph.pointwise import compare, converted, pointwise, select
from lawson._graph.reductions import any_or_all, reduced
from lawson._graph.values import Const, Operand, Value, const
from lawson._graph.views import iota, padded, parts, tiled
from lawson.torch._trace import Call, Walk
from lawson.torch._trace_ops import rule

# ---- views -------------------------------------------------------------------------------------


@rule("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "_reshape_alias", "view_copy",
      "flatten", "unflatten", "unsqueeze_copy", "squeeze_copy")  # fmt: skip
def _reshape(walk: Walk, call: Call, x: Any, *_: Any) -> Operand:
    if walk.dtype(call.dtype) != x.dtype:
        walk.refuse("the bits of a tensor as another dtype", "the view outside of the fusion")
    return walk.emit.reshape(x, call.shape)


@rule("expand", "expand_copy")
def _expand(walk: Walk, call: Call, x: Any, *_: Any, **__: Any) -> Operand:
    first = len(call.shape) - len(x.shape)
    return walk.emit.broadcast_in_dim(x, call.shape, range(first, len(call.shape)))


@rule("permute", "permute_copy")
def _permute(walk: Walk, call: Call, x: Any, dims: Sequence[int]) -> Operand:
    return walk.emit.transpose(x, [d % len(x.shape) for d in dims])


@rule("t", "transpose", "transpose_copy", "t_copy")
def _transpose(walk: Walk, call: Call, x: Any, *dims: int) -> Operand:
    rank = len(x.shape)
    perm = list(range(rank))
    if rank >= 2 or dims:
        a, b = (d % rank for d in (dims or (0, 1)))
        perm[a], perm[b] = perm[b], perm[a]
    return walk.emit.transpose(x, perm)


@rule("slice", "slice_copy")
def _slice(
    walk: Walk, call: Call, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Operand:
    axis = dim % len(x.shape)
    begin, stop, stride = slice(start, end, step).indices(x.shape[axis])
    starts = tuple(begin if i == axis else 0 for i in range(len(x.shape)))
    limits = tuple(max(stop, begin) if i == axis else n for i, n in enumerate(x.shape))
    strides = tuple(stride if i == axis else 1 for i in range(len(x.shape)))
    return walk.emit.slice(x, starts, limits, strides)


@rule("select", "select_copy")
def _select(walk: Walk, call: Call, x: Any, dim: int, index: int) -> Operand:
    axis = dim % len(x.shape)
    at = index % x.shape[axis]
    part = _slice(walk, call, x, axis, at, at + 1)
    return walk.emit.reshape(part, call.shape)


@rule("split", "split_with_sizes", "split_copy", "split_with_sizes_copy")
def _split(walk: Walk, call: Call, x: Any, sizes: Any, dim: int = 0) -> list[Operand]:
    axis = dim % len(x.shape)
    return parts(walk, x, axis, [int(v.shape[axis]) for v in call.value])


@rule("unbind", "unbind_copy")
def _unbind(walk: Walk, call: Call, x: Any, dim: int = 0) -> list[Operand]:
    axis = dim % len(x.shape)
    cut = parts(walk, x, axis, (1,) * x.shape[axis])
    shape = tuple(n for i, n in enumerate(x.shape) if i != axis)
    return [walk.emit.reshape(p, shape) for p in cut]


@rule("cat")
def _cat(walk: Walk, call: Call, tensors: Sequence[Any], dim: int = 0) -> Operand:
    dtype, axis = walk.dtype(call.dtype), dim % len(call.shape)
    given = [converted(walk, x, dtype) for x in tensors if len(x.shape) == len(call.shape)]
    return walk.emit.concat(given, axis)


@rule("stack")
def _stack(walk: Walk, call: Call, tensors: Sequence[Any], dim: int = 0) -> Operand:
    axis, dtype = dim % len(call.shape), walk.dtype(call.dtype)
    shape = tuple(1 if i == axis else n for i, n in enumerate(call.shape))
    given = [walk.emit.reshape(converted(walk, x, dtype), shape) for x in tensors]
    return walk.emit.concat(given, axis)


@rule("repeat", "tile")
def _repeat(walk: Walk, call: Call, x: Any, times: Sequence[int]) -> Operand:
    if 0 in times:
        return const(0, x.dtype, call.shape)
    x = walk.emit.reshape(x, (1,) * (len(call.shape) - len(x.shape)) + x.shape)
    return tiled(walk, x, (1,) * (len(call.shape) - len(times)) + tuple(times))


@rule("roll")
def _roll(walk: Walk, call: Call, x: Any, shifts: Any, dims: Any = ()) -> Operand:
    if not dims:
        flat = walk.emit.reshape(x, (math.prod(x.shape),))
        return walk.emit.reshape(_roll(walk, call, flat, shifts, (0,)), call.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        axis = dim % len(x.shape)
        size = x.shape[axis]
        if size and shift % size:
            last = shift % size
            a, b = parts(walk, x, axis, (size - last, last))
            x = walk.emit.concat([b, a], axis)
    found: Operand = x
    return found


@rule("constant_pad_nd")
def _pad(walk: Walk, call: Call, x: Any, pad: Sequence[int], value: Any = 0) -> Operand:
    pairs = [(pad[i], pad[i + 1], 0) for i in range(0, len(pad), 2)]
    config = [(0, 0, 0)] * (len(x.shape) - len(pairs)) + pairs[::-1]
    return padded(walk, x, const(value, x.dtype), config)


@rule("slice_scatter")
def _slice_scatter(
    walk: Walk, call: Call, x: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None,
    step: int = 1,
) -> Operand:  # fmt: skip
    """``source`` in a slice of ``x``, as PyTorch differentiates slices."""
    axis, size = dim % len(x.shape), x.shape[dim % len(x.shape)]
    begin, stop, stride = slice(start, end, step).indices(size)
    count = source.shape[axis]
    source = converted(walk, source, x.dtype)
    if not count or stop <= begin:
        return x  # type: ignore[no-any-return]
    last = begin + (count - 1) * stride
    config = [
        (begin, size - 1 - last, stride - 1) if i == axis else (0, 0, 0)
        for i in range(len(x.shape))
    ]
    placed = padded(walk, source, const(0, x.dtype), config)
    if isinstance(x, Const) and x.number == 0:
        return placed
    if stride == 1:
        before, _, behind = parts(walk, x, axis, (begin, count, size - 1 - last))
        kept = [p for p in (before, source, behind) if p.shape[axis]]
        return walk.emit.concat(kept, axis)
    inside = padded(walk, const(1, "f32", source.shape), const(0, "f32"), config)
    return select(walk, compare(walk, "compare_gt", inside, const(0, "f32")), placed, x)


@rule("select_scatter")
def _select_scatter(walk: Walk, call: Call, x: Any, source: Any, dim: int, index: int) -> Operand:
    axis = dim % len(x.shape)
    at = index % x.shape[axis]
    shape = tuple(1 if i == axis else n for i, n in enumerate(x.shape))
    return _slice_scatter(walk, call, x, walk.emit.reshape(source, shape), axis, at, at + 1)  # type: ignore[no-any-return]


@rule("arange")
def _arange(walk: Walk, call: Call, start: Any, end: Any, step: Any = 1, **_: Any) -> Operand:
    dtype = walk.dtype(call.dtype)
    x: Operand = iota(walk, call.shape, 0, dtype)
    for op, value, nothing in (("mul", step, 1), ("add", start, 0)):
        if value != nothing:
            x = pointwise(walk, op, [x, const(value, dtype)])
    return x


# ---- reductions --------------------------------------------------------------------------------


def _axes(x: Operand, dims: Any) -> list[int]:
    """None or empty: all."""
    rank = max(len(x.shape), 1)
    if dims is None or dims == []:
        return list(range(len(x.shape)))
    given = [dims] if isinstance(dims, int) else dims
    return [d % rank for d in given] if x.shape else []


def _reduced(walk: Walk, call: Any, op: str, x: Operand, dims: Any) -> Operand:
    """In the shape that the call has: dims that are kept are 1."""
    shape = call if isinstance(call, tuple) else call.shape
    axes = _axes(x, dims)
    if op == "reduce_mean" and _are_empty(x, axes):
        return const(math.nan, x.dtype, shape)
    return walk.emit.reshape(reduced(walk, op, x, axes), shape)


def _are_empty(x: Operand, axes: Sequence[int]) -> bool:
    return any(x.shape[a] == 0 for a in axes)


@rule("sum", "mean", "prod")
def _sum(
    walk: Walk, call: Call, x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Operand:
    name = str(call.node.target).split(".")[1]
    x = converted(walk, x, walk.dtype(call.dtype))
    return _reduced(walk, call, f"reduce_{name}", x, dims)


@rule("amax", "amin")
def _extremum(walk: Walk, call: Call, x: Any, dims: Any = None, keepdim: bool = False) -> Operand:
    op = "reduce_max" if "amax" in str(call.node.target) else "reduce_min"
    if x.dtype == "bool":
        return walk.emit.reshape(any_or_all(walk, op, x, _axes(x, dims)), call.shape)
    return _reduced(walk, call, op, x, dims)


@rule("max", "min")
def _largest(walk: Walk, call: Call, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    op = "reduce_max" if "max" in str(call.node.target) else "reduce_min"
    if dim is None:
        return _reduced(walk, call, op, x, None)
    if call.uses(1):
        walk.refuse("the indices", "amax, and a comparison with it")
    shape = tuple(int(n) for n in call.value[0].shape)
    return [_reduced(walk, shape, op, x, dim)]


@rule("any", "all")
def _any(walk: Walk, call: Call, x: Any, dims: Any = None, keepdim: bool = False) -> Operand:
    op = "reduce_max" if ".any" in str(call.node.target) else "reduce_min"
    if _are_empty(x, _axes(x, dims)):
        return const(op == "reduce_min", walk.dtype(call.dtype), call.shape)
    found = any_or_all(walk, op, converted(walk, x, "bool"), _axes(x, dims))
    return converted(walk, walk.emit.reshape(found, call.shape), walk.dtype(call.dtype))


def _kept(x: Operand, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(1 if i in axes else n for i, n in enumerate(x.shape))


@rule("var")
def _var(
    walk: Walk,
    call: Call,
    x: Any,
    dims: Any = None,
    *,
    correction: Any = None,
    keepdim: bool = False,
) -> Operand:
    axes = _axes(x, dims)
    wide = converted(walk, x, "f64" if x.dtype == "f64" else "f32")
    mean = _reduced(walk, _kept(x, axes), "reduce_mean", wide, axes)
    off = pointwise(walk, "sub", [wide, mean])
    total = _reduced(walk, call, "reduce_sum", pointwise(walk, "mul", [off, off]), axes)
    count = math.prod(x.shape[a] for a in axes) - (1 if correction is None else correction)
    if count <= 0:
        walk.refuse(f"{count} degrees of freedom", "a smaller correction")
    return converted(
        walk, pointwise(walk, "mul", [total, const(1 / count, wide.dtype)]), walk.dtype(call.dtype)
    )


@rule("var_mean")
def _var_mean(walk: Walk, call: Call, x: Any, dims: Any = None, **settings: Any) -> list[Operand]:
    mean = _reduced(walk, tuple(call.value[1].shape), "reduce_mean", x, dims)
    one = Call(call.node, call.value[0])
    return [_var(walk, one, x, dims, **settings), mean]


@rule("logsumexp")
def _logsumexp(walk: Walk, call: Call, x: Any, dims: Any, keepdim: bool = False) -> Operand:
    dtype = walk.dtype(call.dtype)
    x, axes = converted(walk, x, dtype), _axes(x, dims)
    largest = _finite_max(walk, x, axes)
    powers = pointwise(walk, "exp", [pointwise(walk, "sub", [x, largest])])
    total = _reduced(walk, call, "reduce_sum", powers, axes)
    log = pointwise(walk, "log", [total])
    return pointwise(walk, "add", [log, walk.emit.reshape(largest, call.shape)])


def _finite_max(walk: Walk, x: Operand, axes: Sequence[int]) -> Operand:
    """0 in place of infinities, which minus themselves are nothing."""
    largest = _reduced(walk, _kept(x, axes), "reduce_max", x, axes)
    zero = const(0, x.dtype)
    away = compare(walk, "compare_eq", pointwise(walk, "sub", [largest, largest]), zero)
    walk.rounds_gradient("logsumexp")  # PyTorch's does not go through the maximum
    return select(walk, away, largest, zero)


@rule("_softmax", "_log_softmax")
def _softmax(walk: Walk, call: Call, x: Any, dim: int, half_to_float: bool) -> Operand:
    if 0 in x.shape:
        return const(0, walk.dtype(call.dtype), x.shape)
    dtype = walk.dtype(call.dtype)
    wide = converted(walk, x, "f64" if dtype == "f64" else "f32")
    axes = _axes(x, dim)
    largest = _reduced(walk, _kept(x, axes), "reduce_max", wide, axes)
    off = pointwise(walk, "sub", [wide, largest])
    powers = pointwise(walk, "exp", [off])
    total = _reduced(walk, _kept(x, axes), "reduce_sum", powers, axes)
    if "_log" in str(call.node.target):
        found = pointwise(walk, "sub", [off, pointwise(walk, "log", [total])])
    else:
        found = pointwise(walk, "div", [powers, total])
    return converted(walk, found, dtype)


@rule("linalg_vector_norm")
def _vector_norm(
    walk: Walk, call: Call, x: Any, order: Any = 2, dims: Any = None, keepdim: bool = False,
    *, dtype: Any = None,
) -> Operand:  # fmt: skip
    x = converted(walk, x, walk.dtype(call.dtype))
    op = {1: "reduce_norm1", 2: "reduce_norm2", math.inf: "reduce_amax"}.get(order)
    if op is None:
        walk.refuse(f"a norm of order {order}", "order 1, 2 or inf")
    return _reduced(walk, call, op, x, dims)


# ---- normalisations ----------------------------------------------------------------------------


@rule("native_layer_norm", "_fused_rms_norm")
def _norm(walk: Walk, call: Call, x: Any, shape: Sequence[int], scale: Any, *rest: Any) -> Any:
    is_layer = "layer" in str(call.node.target)
    bias, eps = rest if is_layer else (None, rest[0])
    if eps is None:
        eps = torch.finfo(call.value[0].dtype).eps
    if call.uses(1) or call.uses(2):
        walk.refuse("the statistics of a norm", "mean and rsqrt of the variance")
    count = len(x.shape) - len(shape)
    axes = list(range(count, len(x.shape)))
    if 0 in x.shape:
        return [const(0, x.dtype, x.shape)]
    wide = "f64" if x.dtype == "f64" else "f32"
    given: list[Operand] = [walk.emit.whole(x)]
    given.append(_weights(walk, const(1, wide, tuple(shape)) if scale is None else scale, count))
    if bias is not None:
        given.append(_weights(walk, bias, count))
    name = "layer_norm" if is_layer else "rms_norm"
    found = walk.emit.emit(name, given, x.dtype, x.shape, x.shape, axes=axes, eps=float(eps))
    return [found]


def _weights(walk: Walk, x: Operand, count: int) -> Value:
    """With 1 for the dims that are not normalised."""
    whole = walk.emit.whole(x)
    padded_shape = (1,) * count + whole.shape
    found = walk.emit.reshape(whole, padded_shape)
    assert isinstance(found, Value)
    return found
