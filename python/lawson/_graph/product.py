"""Products over any dims as ``matmul``.

Operands become ``[batch.., M, K]`` and ``[batch.., K, N]`` by views that are moved to the inputs;
several dims of one kind become one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lawson._graph.values import Operand, Value
from lawson._graph.walk import Walk

Dims = Sequence[int]


def product(
    walk: Walk,
    a: Operand,
    b: Operand,
    contract: tuple[Dims, Dims],
    batch: tuple[Dims, Dims],
    out: str,
) -> Operand:
    """``[batch.., rows.., columns..]``: summed over ``contract``, one product for each ``batch``."""
    contract_a, contract_b = contract
    batch_a, batch_b = batch
    free_a = [i for i in range(len(a.shape)) if i not in (*contract_a, *batch_a)]
    free_b = [i for i in range(len(b.shape)) if i not in (*contract_b, *batch_b)]
    rows, columns = [a.shape[i] for i in free_a], [b.shape[i] for i in free_b]
    sizes, depth = [a.shape[i] for i in batch_a], math.prod(a.shape[i] for i in contract_a)
    left = _operand(walk, a, [*batch_a, *free_a, *contract_a], sizes, [math.prod(rows), depth])
    right = _operand(walk, b, [*batch_b, *contract_b, *free_b], sizes, [depth, math.prod(columns)])
    shape = (*sizes, math.prod(rows), math.prod(columns))
    stored = (
        tuple(
            max(p, q) if 0 not in (p, q) else 0 for p, q in zip(left.stored[:-2], right.stored[:-2])
        )
        + shape[-2:]
    )
    found = walk.emit.emit("matmul", (left, right), out, stored, shape)
    return walk.emit.reshape(found, (*sizes, *rows, *columns))


def _operand(walk: Walk, x: Operand, perm: list[int], batch: list[int], matrix: list[int]) -> Value:
    """``[batch.., matrix]``, with all of the matrix stored; batch dims may be broadcast."""
    if not isinstance(x, Value) or not x.stored:
        x = walk.emit.whole(x)
    y = walk.emit.transpose(x, perm)
    assert isinstance(y, Value)
    y = walk.emit.aligned(y)
    count = len(batch)
    if y.stored[count:] != y.shape[count:]:
        y = walk.emit.whole(y)
    # the batch dims stay as they are stored; what is behind them becomes a matrix
    part = dataclasses.replace(y, shape=y.stored)
    part_shape = (*y.stored[:count], *matrix)
    reshaped = walk.emit.reshape(part, part_shape)
    assert isinstance(reshaped, Value)
    reshaped = walk.emit.aligned(reshaped) if reshaped.stored else walk.emit.whole(reshaped)
    return dataclasses.replace(reshaped, shape=(*batch, *matrix))
