"""300 random fusions against XLA: through jit, vmap and grad, in float64 and float32.

The reference is the same function without `fusion`, in float64; the bound is `Case.bound`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusion_cases import Case, Ops, covers, random_case
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


OPS = Ops(UNARY, BINARY, EXITS, jnp.einsum)


@dataclasses.dataclass(frozen=True)
class Marked:
    """A case as a function, which is named in messages."""

    case: Case

    def __call__(self, *args: Any) -> Any:
        return self.case.run(OPS, *args)


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
        cases = [Marked(random_case(seed, OPS)) for seed in range(group, COUNT, GROUPS)]
        rng = np.random.default_rng([1, group])
        args = [[rng.standard_normal(s) for s in made.case.shapes] for made in cases]
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
            largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(b))
            bound = case.case.bound(eps, largest)
            assert jax.tree.structure(a) == jax.tree.structure(b)
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
                assert x.dtype == dtype and x.shape == y.shape
                np.testing.assert_allclose(x, y, rtol=0, atol=bound, err_msg=str(case))


def test_the_generator_covers_what_it_says() -> None:
    assert covers([random_case(seed, OPS) for seed in range(COUNT)], OPS)
