"""Which dims of a graph can be sharded, and the graph of one shard.

Every dim of every tensor is a product of *factors*; ops say which factors are the same. A factor
along which each element is computed from its own elements alone can be split over devices, and the
part of one device is the same graph with smaller dims: no communication, and the same numbers.
A factor that is summed over on the way to a result can be split too, where nothing but views and
factors comes behind the sum: the results of the devices are added (the gradient of a weight by a
batch). Factors that are summed over otherwise, sliced, concatenated or counted along (iota) are whole
on every device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lawson._graph.shapes import operands_of, results_of, types_of
from lawson._graph.values import POINTWISE

Factor = int
Dim = tuple[Factor, ...]


@dataclasses.dataclass(frozen=True)
class Factors:
    """Of each tensor, by name.

    ``partial``: outputs that are to be added up over the devices that a factor is split over.
    """

    dims: Mapping[str, tuple[Dim, ...]]
    sizes: Mapping[Factor, int]
    whole: frozenset[Factor]
    partial: Mapping[str, frozenset[Factor]]

    def of(self, tensor: str) -> list[Factor | None]:
        """One factor per dim; None: of size 1, or it cannot be split."""
        return [d[0] if len(d) == 1 and d[0] not in self.whole else None for d in self.dims[tensor]]


_LINEAR = {"convert", "reshape", "transpose", "neg"}


class _Solver:
    def __init__(self) -> None:
        self.parent: list[int] = []
        self.size: list[int] = []
        self.whole: set[int] = set()
        self.dims: dict[str, tuple[Dim, ...]] = {}

    def new(self, size: int) -> Dim:
        if size == 1:
            return ()
        self.parent.append(len(self.parent))
        self.size.append(size)
        if size == 0:
            self.whole.add(self.parent[-1])
        return (self.parent[-1],)

    def find(self, factor: int) -> int:
        while self.parent[factor] != factor:
            factor = self.parent[factor]
        return factor

    def block(self, *dims: Dim) -> None:
        self.whole.update(f for d in dims for f in d)

    def same(self, a: Dim, b: Dim) -> Dim:
        """Both are one dim; () broadcasts."""
        if not a or not b:
            return a or b
        if [self.size[f] for f in a] != [self.size[f] for f in b]:
            self.block(a, b)
            return a
        for f, g in zip(a, b):
            self.parent[self.find(f)] = self.find(g)
        return a

    def pointwise(
        self, shape: Sequence[int], operands: Sequence[tuple[Dim, ...]]
    ) -> tuple[Dim, ...]:
        dims: list[Dim] = [()] * len(shape)
        for operand in operands:
            first = len(shape) - len(operand)
            for i, dim in enumerate(operand):
                dims[first + i] = self.same(dims[first + i], dim)
        return tuple(dims)

    def reshape(
        self, x: tuple[Dim, ...], old: Sequence[int], new: Sequence[int]
    ) -> tuple[Dim, ...]:
        """Merged dims keep their factors; what is split otherwise than it was merged is whole."""
        factors = [f for d in x for f in d]
        out: list[Dim] = []
        at = 0
        for size in new:
            taken: list[int] = []
            while math.prod(self.size[f] for f in taken) < size and at < len(factors):
                taken.append(factors[at])
                at += 1
            if math.prod(self.size[f] for f in taken) != size or 0 in old:
                self.block(*x)
                fresh = [self.new(n) for n in new]
                self.block(*fresh)
                return tuple(fresh)
            out.append(tuple(taken))
        return tuple(out)


def factors_of(document: dict[str, Any]) -> Factors:
    """Of a graph document."""
    solver = _Solver()
    types = types_of(document)
    sums = _Sums(document)
    partial: dict[str, set[int]] = {}
    for item in document["inputs"]:
        solver.dims[item["name"]] = tuple(solver.new(n) for n in item["shape"])
    for op in document["ops"]:
        names, kind = operands_of(op), op["op"]
        x = [solver.dims[n] for n in names]
        shapes = [types[n].shape for n in names]
        (out,) = results_of(op)
        shape = types[out].shape
        if kind in POINTWISE or kind.endswith("_grad"):
            result = solver.pointwise(shape, x)
        elif kind == "matmul":
            summed = solver.same(x[0][-1], x[1][-2])
            _add_up(solver, partial, sums.outputs_of(out), summed, x[1][-2])
            batch = solver.pointwise(shape[:-2], [x[0][:-2], x[1][:-2]])
            result = (*batch, x[0][-2], x[1][-1])
        elif kind == "transpose":
            result = tuple(x[0][i] for i in op["perm"])
        elif kind == "reshape":
            result = solver.reshape(x[0], shapes[0], shape)
        elif kind == "broadcast":
            padded = ((),) * (len(shape) - len(x[0])) + x[0]
            result = tuple(d or solver.new(n) for d, n in zip(padded, shape))
        elif kind == "slice":
            result = tuple(
                _sliced(solver, op, i, d, n) for i, (d, n) in enumerate(zip(x[0], shapes[0]))
            )
        elif kind.startswith("reduce_"):
            ends_at = sums.outputs_of(out) if kind == "reduce_sum" else None
            _add_up(solver, partial, ends_at, *(x[0][a] for a in op["axes"]))
            kept = op.get("keepdims", False)
            result = tuple(
                () if i in op["axes"] else d
                for i, d in enumerate(x[0])
                if kept or i not in op["axes"]
            )
        elif kind == "concat":
            axis = op["axis"]
            solver.block(*(d[axis] for d in x))
            joined = solver.new(shape[axis])
            solver.block(joined)
            rest = solver.pointwise(shape, [(*d[:axis], (), *d[axis + 1 :]) for d in x])
            result = (*rest[:axis], joined, *rest[axis + 1 :])
        elif kind == "iota":
            result = tuple(solver.new(n) for n in shape)
            solver.block(result[op["axis"]])
        elif kind == "constant":
            result = ()
        else:  # block-scaled products: whole
            solver.block(*(d for dims in x for d in dims))
            result = tuple(solver.new(n) for n in shape)
            solver.block(*result)
        solver.dims[out] = result
    ends = [item["name"] for item in document["inputs"]] + list(document["outputs"])
    for name in ends:  # a merged dim could be split along its first factor only
        solver.block(*(d for d in solver.dims[name] if len(d) > 1))
    find = solver.find
    # A factor on two dims of a tensor (x @ x.T): a shard has one part of each.
    for tensor in solver.dims.values():
        on_dims = [factor for dim in tensor for factor in {find(f) for f in dim}]
        solver.whole.update(f for f in on_dims if on_dims.count(f) > 1)
    whole = frozenset(find(f) for f in solver.whole)
    dims = {n: tuple(tuple(find(f) for f in d) for d in t) for n, t in solver.dims.items()}
    sizes = {f: solver.size[f] for f in map(find, range(len(solver.size)))}
    parts = {n: frozenset(find(f) for f in fs) - whole for n, fs in partial.items()}
    return Factors(dims, sizes, whole, parts)


def _add_up(
    solver: _Solver, partial: dict[str, set[int]], outputs: set[str] | None, *dims: Dim
) -> None:
    """The dims are summed over; ``outputs``: where the sums end, None where they do not."""
    if outputs is None:
        solver.block(*dims)
    for output in outputs or ():
        partial.setdefault(output, set()).update(f for d in dims for f in d)


class _Sums:
    """Which outputs a sum is, up to views, dtypes and constant factors."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._outputs = set(document["outputs"])
        self._readers: dict[str, list[dict[str, Any]]] = {}
        self._constants = {op["out"] for op in document["ops"] if op["op"] == "constant"}
        for op in document["ops"]:
            for name in operands_of(op):
                self._readers.setdefault(name, []).append(op)

    def outputs_of(self, name: str) -> set[str] | None:
        """None where something else becomes of it, too."""
        found = {name} & self._outputs
        for op in self._readers.get(name, []):
            first, *others = operands_of(op)
            if op["op"] == "mul" and first in self._constants:
                first, others = others[0], [first]
            scaled = op["op"] in ("mul", "div") and self._constants.issuperset(others)
            if first != name or not (scaled or op["op"] in _LINEAR):
                return None
            more = self.outputs_of(results_of(op)[0])
            if more is None:
                return None
            found |= more
        return found


def _sliced(solver: _Solver, op: dict[str, Any], i: int, dim: Dim, size: int) -> Dim:
    start, limit = op["start"][i], op["limit"][i]
    stride = op.get("stride", [1] * len(op["start"]))[i]
    if (start, limit, stride) == (0, size, 1):
        return dim
    solver.block(dim)
    new = solver.new(-(-(limit - start) // stride))
    solver.block(new)
    return new


def shard(
    document: dict[str, Any], factors: Factors, split: Mapping[Factor, int]
) -> dict[str, Any]:
    """The document of one shard: factor f is split over ``split[f]`` devices."""
    types = types_of(document)

    def local(name: str) -> list[int]:
        return [
            n // math.prod(split.get(f, 1) for f in d)
            for n, d in zip(types[name].shape, factors.dims[name])
        ]

    ops = []
    for op in document["ops"]:
        shape = local(results_of(op)[0])
        if op["op"] in ("reshape", "broadcast", "iota"):
            op = {**op, "shape": shape}
        elif op["op"] == "slice":
            sizes = types[operands_of(op)[0]].shape
            strides = op.get("stride", [1] * len(shape))
            every = [
                (a, end, k) == (0, size, 1)
                for a, end, k, size in zip(op["start"], op["limit"], strides, sizes)
            ]
            limit = [n if e else end for n, e, end in zip(shape, every, op["limit"])]
            op = {**op, "limit": limit}
        ops.append(op)
    inputs = [{**item, "shape": local(item["name"])} for item in document["inputs"]]
    return {**document, "inputs": inputs, "ops": ops}
