"""300 random fusions against XLA: through jit, vmap and grad, in float64 and float32.

The reference is the same function without `fusion`, in float64. Each op adds an error of a few units
of the last place of its dtype, relative to the largest value that it reads or makes, and a sum of n
terms n of them; derivatives of the functions here are at most 2. So after `depth` ops behind a
product over `inner`, an element may be off by  eps * (inner + 4) * 2**depth  times the largest value
of the whole computation: results, gradients, and what lies between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lawson.jax import fusion

COUNT, GROUPS = 300, 20
UNARY: dict[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh, "sin": jnp.sin, "logistic": jax.nn.sigmoid, "gelu": jax.nn.gelu,
    "relu": jax.nn.relu, "silu": jax.nn.silu, "abs": jnp.abs, "neg": jnp.negative,
    "softplus": jax.nn.softplus, "elu": jax.nn.elu, "erf gelu": lambda x: jax.nn.gelu(x, False),
    "square of tanh": lambda x: jnp.tanh(x) ** 2, "rsqrt": lambda x: jax.lax.rsqrt(x * x + 1),
    "cos": jnp.cos, "clip": lambda x: jnp.clip(x, -1, 0.5), "scale": lambda x: 0.5 * x + 0.25,
    "expm1": lambda x: jnp.expm1(-jnp.abs(x)), "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "custom": lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x),
}  # fmt: skip
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add, "sub": jnp.subtract, "mul tanh": lambda a, b: a * jnp.tanh(b),
    "max": jnp.maximum, "min": jnp.minimum, "where": lambda a, b: jnp.where(b > 0, a, b),
    "div": lambda a, b: a / (1 + b * b),
}  # fmt: skip
EXITS: dict[str, Callable[[Any], Any]] = {
    "none": lambda x: x, "sum": lambda x: x.sum(-1), "max": lambda x: x.max(0),
    "mean": lambda x: x.mean(), "transpose": lambda x: jnp.swapaxes(x, -1, -2),
    "reshape": lambda x: x.reshape(-1, x.shape[-1]), "slice": lambda x: x[..., 1:],
    "two": lambda x: jnp.concatenate([x, x * x], -1), "softmax": jax.nn.softmax,
}  # fmt: skip


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

    def __call__(self, *args: Any) -> Any:
        given = iter(args)
        x = next(given)
        for name in self.pre:
            x = UNARY[name](x)
        if self.product != "none":
            x = jnp.einsum(self.product, x, next(given))
        for name, _ in self.post:
            x = UNARY[name](x) if name in UNARY else BINARY[name](x, next(given))
        return EXITS[self.leave](x)


PRODUCTS = {
    "mk,kn->mn": lambda m, k, n, b: ((m, k), (k, n), (m, n)),
    "km,kn->mn": lambda m, k, n, b: ((k, m), (k, n), (m, n)),
    "mk,nk->mn": lambda m, k, n, b: ((m, k), (n, k), (m, n)),
    "bmk,bkn->bmn": lambda m, k, n, b: ((b, m, k), (b, k, n), (b, m, n)),
    "bmk,kn->bmn": lambda m, k, n, b: ((b, m, k), (k, n), (b, m, n)),
    "mbk,nbk->bmn": lambda m, k, n, b: ((m, b, k), (n, b, k), (b, m, n)),
    "none": lambda m, k, n, b: ((b, m, n), None, (b, m, n)),
}  # fmt: skip


def random_case(seed: int) -> Case:
    rng = np.random.default_rng([2026, seed])
    pick = lambda options: str(rng.choice(sorted(options)))
    product = pick(PRODUCTS)
    m, k, n, b = (int(v) for v in rng.integers(2, 8, 4))
    left, right, out = PRODUCTS[product](m, k, n, b)
    shapes = [left] + ([right] if right else [])
    post = []
    for _ in range(int(rng.integers(1, 5))):
        if rng.random() < 0.5:
            post.append((pick(UNARY), ""))
            continue
        kind = pick(["full", "row", "column", "scalar"])
        shape = {"full": out, "row": out[-1:], "column": (*out[-2:-1], 1), "scalar": ()}[kind]
        post.append((pick(BINARY), kind))
        shapes.append(shape)
    pre = tuple(pick(UNARY) for _ in range(int(rng.integers(0, 3))))
    return Case(product, pre, tuple(post), pick(EXITS), tuple(shapes))


def everything(function: Callable[..., Any], args: list[Any], batch: list[Any]) -> Any:
    """The function, over a batch of its first argument, and its gradient by all arguments."""
    loss = lambda *a: (jnp.sin(function(*a)) * 0.5).sum()
    axes = (0, *(None,) * (len(args) - 1))
    return (
        function(*args),
        jax.vmap(function, axes)(*batch),
        jax.grad(loss, tuple(range(len(args))))(*args),
    )


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_fusions(group: int) -> None:
    with jax.enable_x64(True):
        dtype = jnp.float64 if group % 2 == 0 else jnp.float32
        cases = [random_case(seed) for seed in range(group, COUNT, GROUPS)]
        rng = np.random.default_rng([1, group])
        args = [[rng.standard_normal(s) for s in case.shapes] for case in cases]
        if dtype == jnp.float32:  # numbers that both dtypes have
            args = [[a.astype(np.float32).astype(np.float64) for a in given] for given in args]
        batches = [[np.stack([given[0], given[0] * 0.5]), *given[1:]] for given in args]

        def all_of(wrapped: Callable[[Case], Any], to: Any) -> Callable[[], Any]:
            cast = lambda values: [jnp.asarray(v, to) for v in values]
            return lambda: [
                everything(wrapped(case), cast(given), cast(batch))
                for case, given, batch in zip(cases, args, batches, strict=True)
            ]

        marked = [fusion(case, engines=["cpu"]) for case in cases]
        by_case = dict(zip(map(id, cases), marked, strict=True))
        lowered = jax.jit(all_of(lambda case: by_case[id(case)], dtype)).lower()
        assert lowered.as_text().count("@lawson_plan") >= 3 * len(cases)
        got = lowered.compile()()
        want = jax.jit(all_of(lambda case: case, jnp.float64))()
        eps = float(jnp.finfo(dtype).eps)
        for case, a, b in zip(cases, got, want, strict=True):
            largest = max(1.0, *(float(jnp.abs(x).max()) for x in jax.tree.leaves(b)))
            bound = eps * (max(max(s, default=1) for s in case.shapes) * 8 + 4) * 2**case.depth
            assert jax.tree.structure(a) == jax.tree.structure(b)
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
                assert x.dtype == dtype and x.shape == y.shape
                np.testing.assert_allclose(x, y, rtol=0, atol=bound * largest, err_msg=str(case))


def test_the_generator_covers_what_it_says() -> None:
    cases = [random_case(seed) for seed in range(COUNT)]
    assert len(set(cases)) >= COUNT - 5
    assert {c.product for c in cases} == PRODUCTS.keys()
    assert {c.leave for c in cases} == EXITS.keys()
    used = {name for c in cases for name in (*c.pre, *(p for p, _ in c.post))}
    assert used == UNARY.keys() | BINARY.keys()
