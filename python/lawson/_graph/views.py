"""Views that are more than one op: parts, padding, tiling, indices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lawson._graph.values import Operand, Shape, is_float
from lawson._graph.walk import Walk


def parts(walk: Walk, x: Operand, axis: int, sizes: Sequence[int]) -> list[Operand]:
    """One behind the other along ``axis``."""
    found: list[Operand] = []
    at = 0
    for size in sizes:
        start = tuple(at if i == axis else 0 for i in range(len(x.shape)))
        limit = tuple(at + size if i == axis else n for i, n in enumerate(x.shape))
        found.append(walk.emit.slice(x, start, limit, (1,) * len(start)))
        at += size
    return found


def tiled(walk: Walk, x: Operand, times: Sequence[int]) -> Operand:
    """So often along each axis."""
    for axis, count in enumerate(times):
        x = walk.emit.concat([x] * count, axis) if count != 1 else x
    return x


def padded(
    walk: Walk, x: Operand, filling: Operand, config: Sequence[tuple[int, int, int]]
) -> Operand:
    """Of each axis: how many fillings before, behind (negative: cut off) and between elements."""
    for axis, (low, high, interior) in enumerate(config):
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


def iota(walk: Walk, shape: Shape, axis: int, dtype: str) -> Operand:
    """The index along ``axis``."""
    stored = tuple(n if i == axis else 1 for i, n in enumerate(shape))
    out = walk.emit.emit("iota", (), dtype, stored, shape, axis=axis, to=list(stored))
    if is_float(dtype):
        return dataclasses.replace(out, integral=True)
    return dataclasses.replace(out, bounds=(0, max(shape[axis] - 1, 0)))
