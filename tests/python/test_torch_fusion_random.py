"""300 random fusions against PyTorch: calls, vmap and gradients, in float64 and float32.

The reference is the same function without `fusion`, in float64; the bound is `Case.bound`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_cases import Case, Ops, covers, random_case
from lawson.torch import fusion, inspect

COUNT, GROUPS = 300, 20


class Rounded(torch.autograd.Function):
    """Rounds, and lets gradients through: a rule that is not the op's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


OPS = Ops(
    {
        "tanh": torch.tanh, "sin": torch.sin, "sigmoid": torch.sigmoid,
        "gelu": lambda x: F.gelu(x, approximate="tanh"), "erf gelu": F.gelu, "relu": F.relu,
        "silu": F.silu, "abs": torch.abs, "neg": torch.neg, "softplus": F.softplus, "elu": F.elu,
        "square of tanh": lambda x: torch.tanh(x) ** 2, "rsqrt": lambda x: torch.rsqrt(x * x + 1),
        "cos": torch.cos, "clamp": lambda x: torch.clamp(x, -1, 0.5), "mish": F.mish,
        "scale": lambda x: 0.5 * x + 0.25, "expm1": lambda x: torch.expm1(-torch.abs(x)),
        "log1p": lambda x: torch.log1p(torch.abs(x)), "leaky": lambda x: F.leaky_relu(x, 0.2),
        "custom": lambda x: Rounded.apply(x),  # type: ignore[no-untyped-call]
        "in place": lambda x: (x * 2).add_(1).mul_(0.5),
    },
    {
        "add": torch.add, "sub": torch.sub, "mul tanh": lambda a, b: a * torch.tanh(b),
        "max": torch.maximum, "min": torch.minimum, "where": lambda a, b: torch.where(b > 0, a, b),
        "div": lambda a, b: a / (1 + b * b), "scaled add": lambda a, b: torch.add(a, b, alpha=0.5),
    },
    {
        "none": lambda x: x, "sum": lambda x: x.sum(-1), "max": lambda x: x.amax(0),
        "mean": lambda x: x.mean(), "transpose": lambda x: x.transpose(-1, -2),
        "reshape": lambda x: x.reshape(-1, x.shape[-1]), "slice": lambda x: x[..., 1:],
        "two": lambda x: torch.cat([x, x * x], -1), "softmax": lambda x: torch.softmax(x, -1),
    },
    torch.einsum,
)  # fmt: skip


def everything(function: Callable[..., Tensor], args: list[Tensor], batch: list[Tensor]) -> Any:
    """The function, over a batch of its first argument, and its gradient by all arguments."""
    axes = (0, *(None,) * (len(args) - 1))
    with torch.no_grad():
        results = [function(*args), torch.vmap(function, axes)(*batch)]
    given = [x.clone().requires_grad_() for x in args]
    loss = (torch.sin(function(*given)) * 0.5).sum()
    found = torch.autograd.grad(loss, given, allow_unused=True)
    return [*results, *(torch.zeros_like(x) if g is None else g for x, g in zip(given, found))]


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_fusions(group: int) -> None:
    dtype = torch.float64 if group % 2 == 0 else torch.float32
    rng = np.random.default_rng([1, group])
    for seed in range(group, COUNT, GROUPS):
        case = random_case(seed, OPS)
        arrays = [np.asarray(rng.standard_normal(s)) for s in case.shapes]
        args = [torch.from_numpy(a).to(dtype) for a in arrays]  # numbers that both dtypes have
        batch = [torch.stack([args[0], args[0] * 0.5]), *args[1:]]

        def function(*given: Tensor, case: Case = case) -> Any:
            return case.run(OPS, *given)

        marked = fusion(function, engines=["cpu"])
        assert inspect(marked)(*args).engine == "cpu"
        got = everything(marked, args, batch)
        want = everything(function, [a.double() for a in args], [b.double() for b in batch])
        plain = function(*args)
        assert (got[0].dtype, got[0].stride()) == (plain.dtype, plain.stride()), case
        largest = max(float(x.abs().max()) for x in want)
        bound = case.bound(torch.finfo(dtype).eps, largest)
        for x, y in zip(got, want, strict=True):
            assert x.dtype == dtype and x.shape == y.shape, case
            np.testing.assert_allclose(
                x.detach().double(), y.detach(), rtol=0, atol=bound, err_msg=str(case)
            )


def test_the_generator_covers_what_it_says() -> None:
    assert covers([random_case(seed, OPS) for seed in range(COUNT)], OPS)
