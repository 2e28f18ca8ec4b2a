"""Random fusions, of no framework: which ops on which shapes; a framework's functions are `Ops`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Ops:
    """A framework's functions, by the names that cases have."""

    unary: Mapping[str, Callable[[Any], Any]]
    binary: Mapping[str, Callable[[Any, Any], Any]]
    exits: Mapping[str, Callable[[Any], Any]]
    einsum: Callable[[str, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of arrays: pre-ops, a product (or none), post-ops with further operands."""

    product: str
    pre: tuple[str, ...]
    post: tuple[tuple[str, str], ...]  # op, and the shape of its other operand
    leave: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def depth(self) -> int:
        return len(self.pre) + len(self.post) + 2

    def bound(self, eps: float, largest: float) -> float:
        """How far an element may be off, of values that are at most ``largest``.

        Each op adds an error of a few units of the last place of its dtype, relative to the largest
        value that it reads or makes, and a sum of n terms n of them; derivatives of the functions
        are at most 2.
        """
        terms = max(max(s, default=1) for s in self.shapes) * 8 + 4
        return eps * terms * float(2**self.depth) * max(1.0, largest)

    def run(self, ops: Ops, *args: Any) -> Any:
        given = iter(args)
        x = next(given)
        for name in self.pre:
            x = ops.unary[name](x)
        if self.product != "none":
            x = ops.einsum(self.product, x, next(given))
        for name, _ in self.post:
            x = ops.unary[name](x) if name in ops.unary else ops.binary[name](x, next(given))
        return ops.exits[self.leave](x)


_Shapes = tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...]]
PRODUCTS: dict[str, Callable[[int, int, int, int], _Shapes]] = {
    "mk,kn->mn": lambda m, k, n, b: ((m, k), (k, n), (m, n)),
    "km,kn->mn": lambda m, k, n, b: ((k, m), (k, n), (m, n)),
    "mk,nk->mn": lambda m, k, n, b: ((m, k), (n, k), (m, n)),
    "bmk,bkn->bmn": lambda m, k, n, b: ((b, m, k), (b, k, n), (b, m, n)),
    "bmk,kn->bmn": lambda m, k, n, b: ((b, m, k), (k, n), (b, m, n)),
    "mbk,nbk->bmn": lambda m, k, n, b: ((m, b, k), (n, b, k), (b, m, n)),
    "none": lambda m, k, n, b: ((b, m, n), None, (b, m, n)),
}


def random_case(seed: int, ops: Ops) -> Case:
    rng = np.random.default_rng([2026, seed])

    def pick(options: Iterable[str]) -> str:
        return str(rng.choice(sorted(options)))

    product = pick(PRODUCTS)
    m, k, n, b = (int(v) for v in rng.integers(2, 8, 4))
    left, right, out = PRODUCTS[product](m, k, n, b)
    shapes = [left] + ([right] if right else [])
    post = []
    for _ in range(int(rng.integers(1, 5))):
        if rng.random() < 0.5:
            post.append((pick(ops.unary), ""))
            continue
        kind = pick(["full", "row", "column", "scalar"])
        shape = {"full": out, "row": out[-1:], "column": (*out[-2:-1], 1), "scalar": ()}[kind]
        post.append((pick(ops.binary), kind))
        shapes.append(shape)
    pre = tuple(pick(ops.unary) for _ in range(int(rng.integers(0, 3))))
    return Case(product, pre, tuple(post), pick(ops.exits), tuple(shapes))


def covers(cases: list[Case], ops: Ops) -> bool:
    """Whether the cases differ, and have every product, op and exit."""
    used = {name for c in cases for name in (*c.pre, *(p for p, _ in c.post))}
    return (
        len(set(cases)) >= len(cases) - 5
        and {c.product for c in cases} == PRODUCTS.keys()
        and {c.leave for c in cases} == ops.exits.keys()
        and used == ops.unary.keys() | ops.binary.keys()
    )
