"""`lawson.torch.fusion` at its edges: reductions of nothing, gradients that stop, graphs that break."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lawson
from lawson.torch import fusion

cpu = functools.partial(fusion, engines=["cpu"])
torch.manual_seed(4)
X, W = torch.randn(4, 8), torch.randn(8, 4)


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


EMPTY: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(0), "mean of all": lambda x: x.mean() * 2,
    "mean of rows": lambda x: x.mean(1), "any": lambda x: (x > 0).any(0),
    "all": lambda x: (x > 0).all(0), "sum": lambda x: x.sum(0), "prod": lambda x: x.prod(0),
    "softmax": lambda x: x.softmax(0), "log_softmax": lambda x: x.log_softmax(1),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_reductions_of_nothing(name: str) -> None:
    x = torch.randn(0, 3)
    got, want = cpu(EMPTY[name])(x), EMPTY[name](x)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    close(got, want)


WEIGHT = nn.Parameter(torch.randn(8))


@torch.no_grad()
def doubled(x: Tensor) -> Tensor:
    return x * 2


def halves(x: Tensor) -> Any:
    y = torch.tanh(x)
    return y, y.detach()


STOPPED: dict[str, Callable[[Tensor], Any]] = {
    "no_grad": doubled, "detach": lambda x: x.detach() * 2, "data": lambda x: x.data * 2,
    "twice": halves, "turned": lambda x: halves(x)[::-1], "argument": lambda x: x.detach(),
    "both": lambda x: (x * 2, x.detach()), "weight": lambda x: (x * 2, x.detach() * WEIGHT),
    "in place": lambda x: ((x * 1).mul_(2), x.sin().detach().mul_(2)), "int": lambda x: x.int(),
}  # fmt: skip


@pytest.mark.parametrize("name", STOPPED)
@pytest.mark.parametrize("how", ["eager", "compile"])
def test_gradients_stop_where_pytorchs_do(name: str, how: str) -> None:
    function = STOPPED[name]
    fused: Any = cpu(function)
    if how == "compile":
        if name in ("argument", "both", "twice", "turned"):
            pytest.skip("Dynamo refuses results that are views of arguments, or of each other")
        torch._dynamo.reset()
        marked = fused
        fused = torch.compile(lambda x: marked(x), backend="aot_eager", fullgraph=True)
    for needed in (True, False, True):
        x = X.clone().requires_grad_(needed)
        results = [torch.utils._pytree.tree_leaves(f(x)) for f in (fused, function)]
        close(*results)
        assert [r.requires_grad for r in results[0]] == [r.requires_grad for r in results[1]]
        if any(r.requires_grad for r in results[0]):
            wrt = [t for t in (x, WEIGHT) if t.requires_grad]
            got, want = (
                torch.autograd.grad(math.prod(r).sum(), wrt, allow_unused=True) for r in results
            )
            for a, b in zip(got, want, strict=True):  # None and zeros are alike
                if a is not None or b is not None:
                    close(*(torch.zeros(()).expand(()) if t is None else t.sum(0) for t in (a, b)))


def test_gradients_stop_in_functorchs_transformations() -> None:
    for name in ("twice", "turned", "both", "in place"):
        function, fused = STOPPED[name], cpu(STOPPED[name])
        for transform in (torch.func.grad, lambda f: torch.vmap(torch.func.grad(f))):
            got, want = (
                transform(lambda x, f=f: math.prod(f(x)).sum())(X) for f in (fused, function)
            )
            close(got, want)


def hooked(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda g: g * 5)
    return y * 3


def partly_written(x: Tensor) -> Tensor:
    y = x.clone()
    with torch.no_grad():
        y[0] = 0
    return y * x


def rounded(x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


def scaled(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax()
    return x / scale


def penalty(x: Tensor) -> Tensor:
    (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return g * g


def with_constant(x: Tensor) -> Tensor:
    return (x * torch.tensor([0.0] + [1.0] * 7)).exp().sum(-1) + x.detach().sum()


OWN = [hooked, partly_written, rounded, scaled, penalty, with_constant]


@pytest.mark.parametrize("function", OWN)
@pytest.mark.parametrize("how", ["eager", "compile"])
def test_gradients_that_the_ops_do_not_say(function: Callable[[Tensor], Tensor], how: str) -> None:
    fused: Any = cpu(function)
    if how == "compile":
        if function is hooked:
            pytest.skip("Dynamo takes no hooks within a fusion")
        torch._dynamo.reset()
        marked = fused
        fused = torch.compile(lambda x: marked(x), backend="aot_eager")
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    got, want = fused(x), function(y)
    close(got, want)
    close(*(torch.autograd.grad(r.sin().sum(), t) for r, t in ((got, x), (want, y))))


@pytest.mark.parametrize("stops", [False, True])
def test_hooks_of_parameters_are_called_once(stops: bool) -> None:
    layer, called = nn.Linear(8, 4), []
    layer.weight.register_hook(lambda g: [called.append(type(g)), g * 2][1])

    def function(x: Tensor) -> Tensor:
        y = torch.tanh(layer(x))
        return y * x.detach().sum() if stops else y

    grads = []
    for call in (cpu(function), function):
        layer.zero_grad()
        call(X).sum().backward()
        assert layer.weight.grad is not None
        grads.append(layer.weight.grad.clone())
    close(*grads)
    assert called == [Tensor, Tensor]


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_backward_hook"])
def test_hooks_of_modules_inside(kind: str) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh())
    getattr(model[1], kind)(lambda module, given, of: (given[0] * 5,))
    grads = []
    for call in (cpu(lambda x: model(x)), model):
        model.zero_grad()
        call(X).sum().backward()
        grads.append(model[0].weight.grad.clone())
    close(*grads)


def test_what_is_no_computation_is_itself() -> None:
    fixed = torch.ones(3)
    got = cpu(lambda x: (x, fixed, x * 2))(X)
    assert got[0] is X and got[1] is fixed


def test_a_fusion_where_dynamo_breaks_the_graph() -> None:
    scale = nn.Parameter(torch.randn(4))
    printed: list[str] = []

    @cpu
    def noisy(x: Tensor, *, factor: float) -> Tensor:
        printed.append(repr(len(printed)))
        torch._dynamo.graph_break()
        return torch.tanh(x @ W) * scale * factor

    branches = cpu(lambda x: x * 2 if x.sum() > 0 else x)

    @torch.compile(backend="aot_eager")
    def model(x: Tensor) -> Tensor:
        return noisy(x + 1, factor=3.0) * 2

    want = torch.tanh((X + 1) @ W) * scale * 6
    close(model(X), want)
    (got,) = torch.autograd.grad(model(X).sin().sum(), scale)
    close(got, torch.autograd.grad(want.sin().sum(), scale)[0])
    with pytest.raises(lawson.UnsupportedError, match="cannot branch on them"):
        torch.compile(lambda x: branches(x) * 2, backend="aot_eager")(X)
