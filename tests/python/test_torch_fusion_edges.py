"""`lawson.torch.fusion` at its edges: reductions of nothing, gradients that stop, graphs that break."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


@pytest.mark.parametrize("how", ["eager", "compile", "export"])
def test_results_that_are_expanded(how: str) -> None:
    def function(x: Tensor) -> Any:
        mean = x.mean(-1, keepdim=True)
        return mean.expand(4, 8), (x * 2)[:1].expand(4, 8).t(), torch.ones(1).expand(3), mean

    fused: Any = cpu(function)
    if how == "compile":
        torch._dynamo.reset()
        fused = torch.compile(lambda x: cpu_mean(x), backend="aot_eager")
    elif how == "export":
        fused = torch.export.export(Means(), (X,)).module()
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    got, want = fused(x), (of_mean if how != "eager" else function)(y)
    close(got, want)
    loss = [sum(r.sin().sum() for r in rs if r.requires_grad) for rs in (got, want)]
    close(*(torch.autograd.grad(a, b) for a, b in zip(loss, (x, y), strict=True)))  # type: ignore[arg-type]
    if how == "eager":
        got[0].mul_(2)  # each element is one
        assert cpu(lambda x: x)(X[:1].expand(4, 8)).stride() == (0, 1)


def of_mean(x: Tensor) -> Any:
    mean = x.mean(-1, keepdim=True)
    return mean.expand(4, 8), (x * 2)[:1].expand(4, 8).t()


cpu_mean = cpu(of_mean)


class Means(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return cpu_mean(x)


WEIGHT = nn.Parameter(torch.randn(8))
WIDE = torch.randn(8, 4)


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


def with_clone(x: Tensor) -> Any:
    y = x * 3
    return y, y.clone(), y.view_as(y)


MEMORIES: dict[str, Callable[[Tensor], Any]] = {
    "clone": lambda x: x.clone(), "both": lambda x: (x.clone(), x, x * 2), "result": with_clone,
    "equal": lambda x: (x * 2, x * 2), "argument": lambda x: (x.clone(), x.clone()),
    "turned": lambda x: x.t().clone(memory_format=torch.contiguous_format),
    "in order": lambda x: x.clone(memory_format=torch.contiguous_format),
    "converted": lambda x: x.to(torch.float32, copy=True), "padded": lambda x: x.roll(0, 0),
    "closed over": lambda x: (WEIGHT.clone(), x * 2), "same": lambda x: [x * 2] * 2,
}  # fmt: skip


@pytest.mark.parametrize("name", MEMORIES)
def test_results_share_memory_where_pytorchs_do(name: str) -> None:
    function, leaves = MEMORIES[name], torch.utils._pytree.tree_leaves
    for needed in (False, True):
        for x in (X.clone(), torch.randn(8, 4).t()):
            x.requires_grad_(needed)
            got, want = leaves(cpu(function)(x)), leaves(function(x))
            close(got, want)
            assert [r.stride() for r in got] == [r.stride() for r in want]
            assert [r.requires_grad for r in got] == [r.requires_grad for r in want]
            places = [
                [[a.data_ptr() == b.data_ptr() for a in (*rs, x, WEIGHT)] for b in (*rs, x, WEIGHT)]
                for rs in (got, want)
            ]
            assert places[0] == places[1]
            if needed:
                close(*(torch.autograd.grad(sum(r.sin().sum() for r in rs), x) if name != "closed over"
                        else () for rs in (got, want)))  # fmt: skip
    close(torch.vmap(cpu(function))(X), torch.vmap(function)(X))
    if name not in ("both", "result", "same"):  # Dynamo takes no results that are one tensor
        torch._dynamo.reset()
        marked = cpu(function)
        compiled = torch.compile(lambda x: marked(x), backend="aot_eager", fullgraph=True)
        close(leaves(compiled(X)), leaves(function(X)))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0]


class Tripled(Reversed):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 3 * gradients[0]


def many_ways(x: Tensor) -> Any:
    y = x * 2
    back, three = (r.apply for r in (Reversed, Tripled))
    return x, back(x), three(x), y, back(y), three(y), back(y), y, WEIGHT, three(WEIGHT)


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "ends": lambda x: (x.clamp(-1, 1), F.hardtanh(x)), "many": many_ways,
    "reversed": lambda x: (Reversed.apply(x),), "tripled": lambda x: (Tripled.apply(x), x),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_equal_results_have_gradients_of_their_own(name: str) -> None:
    x = torch.tensor([-1.0, 1.0, 0.5] * 2 + [2.0, -2.0]).requires_grad_()
    got, want = cpu(WAYS[name])(x), WAYS[name](x)
    close(list(got), list(want))
    for i in range(len(want)):
        assert got[i].requires_grad
        close(*(
            torch.autograd.grad(r[i].sum(), (x, WEIGHT), retain_graph=True, materialize_grads=True,
                                allow_unused=True)
            for r in (got, want)
        ))  # fmt: skip
    close(*(torch.autograd.grad(sum((i + 1) * r.sum() for i, r in enumerate(rs)), x)
            for rs in (got, want)))  # fmt: skip


FAR = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 20.0, -20.0, 89.0, 100.0, -100.0, 1e4, -1e4]
BRANCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "selu": F.selu, "celu": F.celu, "celu of 0.5": lambda x: F.celu(x, 0.5), "elu": F.elu,
    "elu of 3": lambda x: F.elu(x, 3.0), "sinc": torch.sinc, "special.sinc": torch.special.sinc,
    "softplus": lambda x: F.softplus(x, 2.0, 10.0),
}  # fmt: skip


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_gradients_beyond_a_branch(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor(FAR, dtype=dtype).requires_grad_()
    got, want = cpu(BRANCHES[name])(x), BRANCHES[name](x)
    wide = dtype is not torch.float16
    (rtol, atol) = (1e-5, 1e-6) if wide else (1e-2, 1e-2)
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
    grads = [torch.autograd.grad(r.sum(), x)[0] for r in (got, want)]
    torch.testing.assert_close(*grads, rtol=rtol, atol=atol)


def test_sinc_of_integers() -> None:
    x = torch.arange(-3, 4)
    close(cpu(torch.sinc)(x), torch.sinc(x))


def test_a_constant_of_an_argument_has_a_gradient() -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        return x**0, y * WEIGHT, (x**0) * torch.ones(()), (WEIGHT * y).pow(0), torch.ones(2)

    for needs in ((True, True), (True, False), (False, True), (False, False)):
        given = [X.clone().requires_grad_(n) for n in needs]
        got, want = cpu(function)(*given), function(*given)
        close(list(got), list(want))
        assert [r.requires_grad for r in got] == [r.requires_grad for r in want]
        for i in range(4):
            wrt = [t for t in (*given, WEIGHT) if t.requires_grad]
            if want[i].requires_grad:
                close(*(
                    [None if g is None else g.sum() for g in torch.autograd.grad(
                        r[i].sum(), wrt, retain_graph=True, allow_unused=True)]
                    for r in (got, want)
                ))  # fmt: skip
        with torch.no_grad():
            assert not any(r.requires_grad for r in cpu(function)(*given))
    close(torch.func.grad(lambda x: cpu(lambda x: x**0)(x).sum())(X), torch.zeros_like(X))
    assert not cpu(lambda x: x.detach() ** 0)(X.clone().requires_grad_()).requires_grad
    torch._dynamo.reset()
    marked = cpu(lambda x: (x**0, x * 2))
    compiled = torch.compile(lambda x: marked(x), backend="aot_eager", fullgraph=True)
    close(compiled(X.clone().requires_grad_())[0], torch.ones_like(X))


def test_erfc_and_exp2_are_of_absolute_precision() -> None:
    x = torch.linspace(-6, 6, 99)
    close(cpu(lambda x: torch.erfc(x))(x), torch.erfc(x))
    close(cpu(lambda x: torch.exp2(x))(x), torch.exp2(x))
    close(cpu(lambda x: torch.exp2(x))(x.int()), torch.exp2(x.int()))


@pytest.fixture
def precision() -> Iterator[None]:
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


def test_f32_products_however_they_are_allowed(precision: None) -> None:
    """After the newer setting, PyTorch's older getter raises."""
    plain = cpu(lambda x: x * 2)
    product = fusion(lambda x: x @ WIDE, engines=["cpu"])

    def noted() -> Any:
        site, tensors = product.site((X,), {})
        return site.traced(tensors).program.trace.full_f32

    assert noted() is not None
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    close(plain(X), X * 2)
    assert noted() is None
    close(product(X), X @ WIDE)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    close(plain(X), X * 2)
    assert noted() is not None
    torch.backends.cuda.matmul.fp32_precision = "none"
    for older, is_noted in (("high", False), ("highest", True), ("medium", False)):
        torch.set_float32_matmul_precision(older)
        assert (noted() is not None) is is_noted
    torch.backends.cuda.matmul.fp32_precision = "ieee"  # the later one holds
    assert noted() is not None


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
