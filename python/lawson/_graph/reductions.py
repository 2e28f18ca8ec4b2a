"""Reductions, over what a product computed in another shape too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from lawson._graph.pointwise import converted
from lawson._graph.values import Const, Operand
from lawson._graph.walk import Walk


def reduced(walk: Walk, op: str, x: Operand, axes: Iterable[int]) -> Operand:
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


def any_or_all(walk: Walk, op: str, x: Operand, axes: Iterable[int]) -> Operand:
    """``op``: "reduce_max" of a bool operand is any, "reduce_min" is all."""
    return converted(walk, reduced(walk, op, converted(walk, x, "f32"), axes), "bool")
