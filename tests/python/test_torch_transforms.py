"""What PyTorch does with a fusion: autograd, functorch, torch.compile, export, checkpoint, autocast."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import lawson
from lawson import _core
from lawson.torch import fusion, inspect

cpu = functools.partial(fusion, engines=["cpu"])
torch.manual_seed(8)
D = torch.float64


def f64(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=D, requires_grad=True)


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x @ w + b)


def close(got: Any, want: Any, bound: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def executed(run: Callable[[], Any]) -> int:
    """How many plans ran."""
    _core.reset_stats()
    run()
    found: int = json.loads(_core.stats())["totals"]["execute"]
    return found


# ---- autograd ----------------------------------------------------------------------------------

DIFFERENTIABLE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "layer": (layer, (f64(3, 4), f64(4, 5), f64(5))),
    "batched": (lambda a, b: torch.tanh(a @ b), (f64(2, 3, 4), f64(2, 4, 5))),
    "swiglu": (lambda x, w, v: F.silu(x @ w) * (x @ v), (f64(3, 4), f64(4, 5), f64(4, 5))),
    "softmax": (lambda x: torch.softmax(x, -1), (f64(3, 4),)),
    "log_softmax": (lambda x: F.log_softmax(x, 0), (f64(3, 4),)),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), (f64(3, 4),)),
    "reductions": (lambda x: (x.sum(0), x.mean(), x.var(1), x.amax(1)), (f64(3, 4),)),
    "rms by hand": (
        lambda x, g: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * g,
        (f64(3, 4), f64(4)),
    ),
    "views": (lambda x: (x.t() * 2, x[:, 1:].sin(), torch.cat([x, x * x])), (f64(3, 4),)),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_of_first_and_second_order(name: str) -> None:
    function, args = DIFFERENTIABLE[name]
    fused = cpu(function)
    assert gradcheck(fused, args)
    assert gradgradcheck(fused, args)


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_gradients_of_norms(norm: Callable[..., Tensor]) -> None:
    x, g = f64(3, 4), f64(4)
    fused = cpu(lambda x, g: norm(x, (4,), g))
    assert gradcheck(fused, (x, g))
    (dx,) = torch.autograd.grad(fused(x, g).sin().sum(), x, create_graph=True)
    if norm is F.layer_norm:  # the op's backward has no derivative, and says so
        with pytest.raises(lawson.UnsupportedError, match="layer_norm_backward"):
            dx.sum().backward()
    else:
        dx.sum().backward()


def test_gradient_is_lawsons() -> None:
    args = DIFFERENTIABLE["layer"][1]
    fused = cpu(layer)
    loss = lambda: fused(*args).sum().backward()
    found = inspect(loss)()
    assert [i.name for i in found] == ["layer", "layer.backward"]
    assert {e for i in found for e in (k.plan.engine for k in i.kernels)} == {"cpu"}
    assert executed(loss) == sum(len(i.kernels) for i in found)


def test_only_what_is_asked_for_is_computed() -> None:
    x, w, b = (t.detach() for t in DIFFERENTIABLE["layer"][1])
    fused = cpu(layer)
    b.requires_grad_()
    found = inspect(lambda: fused(x, w, b).sum().backward())()
    assert list(found[1].kernels[0].document["outputs"]) == ["d_b"]
    n = torch.arange(12.0).reshape(3, 4).int()
    fused2 = cpu(lambda x, n: (x * n, n + 1))
    got = fused2(x.requires_grad_(), n)
    assert got[0].requires_grad and not got[1].requires_grad
    got[0].sum().backward()
    close(x.grad, n.to(D))


class Straight(torch.autograd.Function):
    """Rounds, and lets gradients through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def without(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.sin(x)
    return x * y


OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda x: x.detach() * torch.sin(x),
    "custom function": lambda x: Straight.apply(x * 3) * x,  # type: ignore[no-untyped-call]
    "no_grad": without,
    "hardtanh": lambda x: F.hardtanh(x * 2) * x,
    "inference of a part": lambda x: torch.where(x > 0, x.detach(), x) * 2,
}


@pytest.mark.parametrize("name", OWN)
def test_gradient_is_pytorchs_where_the_function_says_so(name: str) -> None:
    x, y = f64(3, 4), f64(3, 4)
    with torch.no_grad():
        y.copy_(x)
    fused = cpu(OWN[name])
    got, want = fused(x), OWN[name](y)
    close(got, want)
    got.sin().sum().backward()
    want.sin().sum().backward()
    close(x.grad, y.grad)


def test_bf16_gradients_have_the_arguments_dtypes() -> None:
    x = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(16, 4, requires_grad=True)
    got = torch.autograd.grad(cpu(lambda x, w: x @ w.bfloat16())(x, w).float().sin().sum(), (x, w))
    want = torch.autograd.grad((x.double() @ w.bfloat16().double()).sin().sum(), (x, w))
    assert [g.dtype for g in got] == [torch.bfloat16, torch.float32]
    for a, b, terms in zip(got, want, (4, 8), strict=True):
        # cotangents and products are rounded to bf16 (2^-9 each)
        scale = float(b.abs().max()) * terms
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=scale * 2**-7)


def test_forward_mode_is_refused() -> None:
    x, w, b = (t.detach() for t in DIFFERENTIABLE["layer"][1])
    with pytest.raises(lawson.UnsupportedError, match="forward-mode"):
        torch.func.jvp(lambda b: cpu(layer)(x, w, b), (b,), (b,))


# ---- functorch ---------------------------------------------------------------------------------

AXES = [(0, None, None), (1, None, None), (None, 0, None), (0, 0, 0), (None, None, 0), (2, 1, 0)]


@pytest.mark.parametrize("axes", AXES)
def test_vmap_is_one_kernel(axes: tuple[int | None, ...]) -> None:
    plain = [t.detach() for t in DIFFERENTIABLE["layer"][1]]
    args = [t if a is None else torch.stack([t, t * 2, t + 1], a) for t, a in zip(plain, axes)]
    fused = cpu(layer)
    mapped = torch.vmap(fused, axes)
    close(mapped(*args), torch.vmap(layer, axes)(*args))
    assert executed(lambda: mapped(*args)) == 1


def test_nested_vmap() -> None:
    x, w = torch.randn(2, 3, 4, dtype=D), torch.randn(2, 5, 4, dtype=D)
    function = lambda x, w: torch.tanh(x * w).sum()
    both = lambda f: torch.vmap(torch.vmap(torch.vmap(f, (0, None)), (None, 0)))(x, w)
    close(both(cpu(function)), both(function))


def test_batches_of_gradients_and_gradients_of_batches() -> None:
    x, w, b = (t.detach() for t in DIFFERENTIABLE["layer"][1])
    fused = cpu(layer)
    for marked, plain in ((fused, layer),):
        each = lambda f: torch.vmap(
            torch.func.grad(lambda x, w: f(x, w, b).sin().sum(), 1), (0, None)
        )
        close(each(marked)(x, w), each(plain)(x, w))
        every = lambda f: torch.func.grad(lambda w: torch.vmap(lambda x: f(x, w, b))(x).sin().sum())
        close(every(marked)(w), every(plain)(w))
        all_mapped = lambda f: torch.vmap(torch.func.grad(lambda x: f(x, w, b).sin().sum()))
        close(all_mapped(marked)(x), all_mapped(plain)(x))


def test_jacobians() -> None:
    x, w, b = (t.detach() for t in DIFFERENTIABLE["layer"][1])
    jacobian = lambda f: torch.func.jacrev(lambda b: f(x, w, b))(b)
    close(jacobian(cpu(layer)), jacobian(layer))
    second = lambda f: torch.func.jacrev(torch.func.grad(lambda b: f(x, w, b).sin().sum()))(b)
    close(second(cpu(layer)), second(layer))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, dtype=D)
        self.down = nn.Linear(8, 4, dtype=D)

    @cpu
    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mlp(torch.sin(x)) + x
        return found

    def plain(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.gelu(self.up(torch.sin(x)))) + x
        return found


def test_functional_call_and_ensembles() -> None:
    model, x = Model(), torch.randn(3, 4, dtype=D)
    values = {k: v.detach() * 2 for k, v in model.named_parameters()}

    def loss(run: str) -> Callable[..., Tensor]:
        def of(values: dict[str, Tensor], x: Tensor) -> Tensor:
            with torch.nn.utils.stateless._reparametrize_module(model, values):
                found: Tensor = getattr(model, run)(x).sin().sum()
                return found

        return of

    got, want = (torch.func.grad(loss(run))(values, x) for run in ("forward", "plain"))
    close(got, want)
    stacked = {k: torch.stack([v, v * 0.5]) for k, v in values.items()}
    got, want = (torch.vmap(loss(run), (0, None))(stacked, x) for run in ("forward", "plain"))
    close(got, want)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


# ---- torch.compile, export ---------------------------------------------------------------------


def graphs_of(run: Callable[..., Any], *args: Any, **settings: Any) -> tuple[Any, list[Any]]:
    """The results, and the graphs that torch.compile hands to its backend."""
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[Any] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(run, fullgraph=True, backend=backend, **settings)
    return compiled(*args), graphs


def calls_in(graph: torch.fx.GraphModule) -> int:
    return sum(n.target is torch.ops.lawson.fusion.default for n in graph.graph.nodes)


def test_compile_has_no_break_and_the_very_plans() -> None:
    model, x = Model(), f64(3, 4)
    told = inspect(model.mlp)(torch.sin(x))
    want = model.plain(x).sin().sum()
    loss, graphs = graphs_of(lambda x: model(x).sin().sum(), x)
    assert [calls_in(g) for g in graphs] == [1]
    loss.backward()
    close(loss, want)
    wanted = torch.autograd.grad(want, [x, *model.parameters()])
    close([x.grad, *(p.grad for p in model.parameters())], list(wanted))
    assert [calls_in(g) > 0 for g in graphs] == [True, True]  # forward, backward
    assert told.engine == "cpu"


def test_compile_with_closures_pytrees_and_settings() -> None:
    scale = f64(4)

    @cpu
    def f(tree: dict[str, Tensor], *, by: float) -> dict[str, Any]:
        y = tree["a"] * scale * by + tree["b"]
        return {"y": y, "more": (y.sum(), torch.tanh(y))}

    a, b = f64(3, 4), f64(3, 4)
    run = lambda a, b: f({"a": a.sin(), "b": b}, by=2.0)
    got, graphs = graphs_of(run, a, b)
    assert [calls_in(g) for g in graphs] == [1]
    y = a.sin() * scale * 2 + b
    close(got, {"y": y, "more": (y.sum(), torch.tanh(y))})
    got["y"].sum().backward()
    close(scale.grad, (a.sin() * 2).sum(0))


def test_compile_with_changing_shapes() -> None:
    fused = cpu(layer)
    _, w, b = (t.detach() for t in DIFFERENTIABLE["layer"][1])
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: fused(torch.sin(x), w, b) * 2, fullgraph=True, backend="aot_eager", dynamic=True
    )
    for rows in (3, 5, 7, 5):
        x = torch.randn(rows, 4, dtype=D)
        close(compiled(x), layer(torch.sin(x), w, b) * 2)


def test_inductor() -> None:
    fused = cpu(lambda x: torch.tanh(x) * 2)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fused(x), fullgraph=True)
    x = torch.randn(3, 4)
    close(compiled(x), torch.tanh(x) * 2, 1e-6)
    assert executed(lambda: compiled(x)) == 1


def test_refusals_under_compile_name_the_line() -> None:
    torch._dynamo.reset()

    @cpu
    def ranked(x: Tensor) -> Tensor:
        y = x * 2
        return y.sort().values

    with pytest.raises(Exception, match=r"sort at test_torch_transforms.py:\d+") as caught:
        torch.compile(lambda x: ranked(x), fullgraph=True, backend="aot_eager")(f64(4))
    assert "the sort outside of the fusion" in str(caught.value)


@pytest.mark.parametrize("strict", [False, True])
def test_export_carries_the_program(strict: bool) -> None:
    model, x = Model(), torch.randn(3, 4, dtype=D)
    exported = torch.export.export(model, (x,), strict=strict)
    assert calls_in(exported.graph_module) == 1
    close(exported.module()(x), model.plain(x))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    again = torch.export.load(file)
    close(again.module()(x), model.plain(x))


def test_opcheck() -> None:
    model = Model()
    x = f64(3, 4)
    site, tensors = cpu(layer).site(DIFFERENTIABLE["layer"][1], {})
    core = site.traced(tensors).program.core
    opcheck(torch.ops.lawson.fusion.default, (list(tensors), core.text))
    assert model(x).requires_grad


def test_an_exported_program_without_its_function() -> None:
    """Text alone: derivatives that are the graph's, and a refusal of those that are not."""
    from lawson.torch._fusion_op import apply
    from lawson.torch._fusion_text import read

    args = DIFFERENTIABLE["layer"][1]
    site, tensors = cpu(layer).site(args, {})
    loaded = read(site.traced(tensors).program.core.text)
    found = torch.autograd.grad(apply(loaded, tensors)[0].sin().sum(), args)
    close(list(found), list(torch.autograd.grad(layer(*args).sin().sum(), args)))
    x = f64(3)
    site, tensors = cpu(OWN["detach"]).site((x,), {})
    loaded = read(site.traced(tensors).program.core.text)
    with pytest.raises(lawson.UnsupportedError, match="detach at test_torch_transforms.py"):
        apply(loaded, tensors)[0].sum().backward()


# ---- checkpoint, autocast, modes ---------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    args = [x.detach().requires_grad_() for x in DIFFERENTIABLE["layer"][1]]
    fused = cpu(layer)
    got = checkpoint(lambda *a: fused(*a).sin().sum(), *args, use_reentrant=use_reentrant)
    want = layer(*args).sin().sum()
    close(got, want)
    got.backward()
    close([a.grad for a in args], list(torch.autograd.grad(want, args)))


def test_autocast_is_part_of_the_trace() -> None:
    x, w = torch.randn(8, 16), torch.randn(16, 4, requires_grad=True)
    function = lambda x, w: (x @ w) * 2
    fused = cpu(function)
    assert fused(x, w).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = fused(x, w), function(x, w)
        (gradient,) = torch.autograd.grad(fused(x, w).float().sum(), w)
    assert got.dtype == want.dtype == torch.bfloat16
    close(got, want, 2**-7)
    assert gradient.dtype == torch.float32
    assert fused(x, w).dtype == torch.float32
    kinds = [
        [t.dtype for t in inspect(fused)(x, w).graph.tensors() if not t.is_input] for _ in range(2)
    ]
    assert kinds == [["f32"], ["f32"]]


def test_autocast_under_compile_vmap_and_export() -> None:
    x, w = torch.randn(8, 16), torch.randn(16, 4)
    fused = cpu(lambda x, w: (x @ w) * 2)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fused(x, w), fullgraph=True, backend="aot_eager")

    class Marked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = fused(x, w)
            return found

    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = (x @ w) * 2
        mapped = torch.vmap(fused, (0, None))(x[None], w)[0]
        for got in (compiled(x), mapped, torch.export.export(Marked(), (x,)).module()(x)):
            assert got.dtype == torch.bfloat16
            close(got, want, 2**-7)
        # PyTorch's own gradient, made in another thread than the trace
        y = torch.randn(8, 16, requires_grad=True)
        cpu(lambda x, w: (x.detach() * x) @ w)(y, w).float().sum().backward()
        assert y.grad is not None and y.grad.dtype == torch.float32
    assert compiled(x).dtype == torch.float32


def test_inference_mode_and_dispatch_modes() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    x, w, b = (t.detach() for t in DIFFERENTIABLE["layer"][1])
    fused = cpu(layer)
    with torch.inference_mode():
        close(fused(x, w, b), layer(x, w, b))
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        close(cpu(layer)(x, w, b), layer(x, w, b))
    assert "lawson.fusion.default" in seen


def test_deterministic_algorithms() -> None:
    x = torch.randn(3, 4)
    fused = cpu(lambda x: x * 2)
    plain = inspect(fused)(x)
    torch.use_deterministic_algorithms(True)
    try:
        told = inspect(fused)(x)
        close(fused(x), x * 2)
    finally:
        torch.use_deterministic_algorithms(False)
    wanted = inspect(cpu(lambda x: x * 2, deterministic=True))(x)
    assert told.key == wanted.key != plain.key == inspect(fused)(x).key


def test_default_dtype() -> None:
    x = torch.randn(3, 4, dtype=D)
    fused = cpu(lambda x: x * torch.ones(4) + torch.arange(4.0))
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert fused(x.float()).dtype == dtype
    finally:
        torch.set_default_dtype(before)
