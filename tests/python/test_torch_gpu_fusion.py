"""Fusions of PyTorch's on a GPU: numbers against float64, plans, gradients, CUDA graphs, streams. Needs one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lawson
from lawson import _core
from lawson.torch import fusion, inspect

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU that PyTorch sees (torch.cuda.is_available())"
)

BF16, F16, F32, I8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
Case = tuple[Callable[..., Tensor], tuple[tuple[torch.dtype, tuple[int, ...]], ...]]
CASES: dict[str, Case] = {
    "product": (lambda a, b: a @ b, ((BF16, (256, 512)), (BF16, (512, 384)))),
    "gelu layer": (lambda x, w, b: F.gelu(x @ w + b),
                   ((BF16, (4, 128, 256)), (BF16, (256, 512)), (BF16, (512,)))),
    "gelu_tanh layer of f16": (lambda x, w, b: F.gelu(x @ w + b, approximate="tanh"),
                               ((F16, (256, 256)), (F16, (256, 512)), (F16, (512,)))),
    "linear": (F.linear, ((BF16, (200, 256)), (BF16, (384, 256)), (BF16, (384,)))),
    "swiglu": (lambda x, v, w: F.silu(x @ v) * (x @ w),
               ((BF16, (256, 256)), (BF16, (256, 512)), (BF16, (256, 512)))),
    "int8 weights": (lambda x, w, s: x @ (w.to(x.dtype) * s),
                     ((BF16, (256, 512)), (I8, (512, 384)), (BF16, (384,)))),
    "dequantised": (lambda x, y, z: (x.bfloat16() @ y).float() + z,
                    ((I8, (4, 256, 256)), (BF16, (4, 256, 256)), (F32, (4, 256, 256)))),
    "layer norm": (lambda x, g, b: F.layer_norm(x, (512,), g, b),
                   ((BF16, (64, 512)), (BF16, (512,)), (BF16, (512,)))),
    "rms norm": (lambda x, g: F.rms_norm(x, (512,), g, 1e-5), ((BF16, (64, 512)), (BF16, (512,)))),
    "pointwise": (lambda x, y: torch.tanh(x) * y + 0.5 * torch.sigmoid(y),
                  ((F32, (128, 384)), (F32, (128, 384)))),
}  # fmt: skip
# Products and sums are in f32, results rounded to their dtype; intermediates are never narrower.
# Functions of f32 are approximated.
ROUNDING = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-18, I8: 0.0}


@pytest.fixture(autouse=True)
def _allow_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def drawn(case: Case, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    found = []
    for dtype, shape in case[1]:
        if dtype == I8:
            found.append(torch.randint(-8, 8, shape, dtype=I8, device="cuda", generator=generator))
        else:
            x = torch.randn(shape, device="cuda", generator=generator)
            found.append((x * 0.25).to(dtype))
    return found


def wide(tensors: list[Tensor]) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


def reference(function: Callable[..., Tensor], args: list[Tensor]) -> Tensor:
    """In float64: conversions inside of the function go to float64, too."""

    class Wide(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in (Tensor.bfloat16, Tensor.float):
                return args[0].double()
            return func(*args, **(kwargs or {}))

    with Wide():
        return function(*wide(args))


def near(got: Tensor, want: Tensor, terms: int = 1, through: torch.dtype | None = None) -> None:
    """``through``: what values are rounded to on the way, where that is narrower."""
    assert torch.isfinite(got.float()).all()
    scale = max(1.0, float(want.abs().max()))
    worst = float((got.double() - want).abs().max())
    rounding = max(ROUNDING[got.dtype], ROUNDING[through or got.dtype])
    assert worst <= rounding * scale * (2 + terms), worst


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_plans(name: str) -> None:
    case = CASES[name]
    args = drawn(case)
    fused = fusion(case[0])
    told = inspect(fused)(*args)
    assert (told.engine, len(told.kernels), told.platform) == ("cudnn", 1, "cuda")
    _core.reset_stats()
    got, plain = fused(*args), case[0](*args)
    torch.cuda.synchronize()
    assert json.loads(_core.stats())["totals"]["execute"] == 1
    assert json.loads(_core.stats())["totals"]["build_plans"] == 0  # inspect's plan
    assert (got.dtype, got.shape, got.stride()) == (plain.dtype, plain.shape, plain.stride())
    near(got, reference(case[0], args), through=BF16 if name == "dequantised" else None)
    site, _ = fused.site(args, {})
    (prepared,) = site.direct.prepared()
    assert prepared.plan_id == told.plan_id


@pytest.mark.parametrize("name", [n for n in CASES if n != "dequantised"])
def test_gradients(name: str) -> None:
    case = CASES[name]
    args = [a.requires_grad_() if a.is_floating_point() else a for a in drawn(case)]
    given = [a.double().detach().requires_grad_() if a.is_floating_point() else a for a in args]
    fused = fusion(case[0])
    torch.sin(fused(*args).float()).sum().backward()
    torch.sin(reference(case[0], given)).sum().backward()
    for a, b in zip(args, given, strict=True):
        if a.is_floating_point():
            assert a.grad is not None and b.grad is not None and a.grad.dtype == a.dtype
            # cotangents and intermediate results are rounded to 16 bits, too
            narrow = None if name == "pointwise" else case[1][0][0]
            near(a.grad, b.grad, terms=64 if narrow is None else 14, through=narrow)


@pytest.mark.parametrize("name", CASES)
def test_captured_graphs_equal_eager_calls(name: str) -> None:
    case = CASES[name]
    args = drawn(case)
    fused = fusion(case[0])
    fused(*args)  # the plan is built outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fused(*args)
    for seed in (1, 2):
        for a, b in zip(args, drawn(case, seed), strict=True):
            a.copy_(b)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, fused(*args))


def test_a_training_step_is_captured() -> None:
    layer = nn.Linear(256, 512, device="cuda", dtype=BF16)
    fused = fusion(lambda x: F.gelu(layer(x)))
    x = torch.randn(128, 256, device="cuda", dtype=BF16)

    def step() -> Tensor:
        layer.zero_grad(set_to_none=True)
        loss: Tensor = fused(x).float().square().sum()
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    eager = step().detach().clone()  # a graph that lives would tie the gradients to this stream
    assert layer.weight.grad is not None
    gradient = layer.weight.grad.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(loss, eager) and torch.equal(layer.weight.grad, gradient)


def test_streams() -> None:
    case = CASES["gelu layer"]
    args, fused = drawn(case), fusion(case[0])
    want = fused(*args)
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            results.append(fused(*args))
    torch.cuda.synchronize()
    assert all(torch.equal(r, want) for r in results)


def test_compiled_by_inductor() -> None:
    case = CASES["gelu layer"]
    args, fused = drawn(case), fusion(case[0])
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w, b: fused(torch.sin(x), w, b) * 2, fullgraph=True)
    near(compiled(*args), reference(lambda x, w, b: case[0](torch.sin(x), w, b) * 2, args), terms=4)


def test_refusals_are_cudnns() -> None:
    x = torch.randn(64, 64, device="cuda", dtype=BF16)
    with pytest.raises(lawson.UnsupportedError, match="takes reductions only at the exit"):
        fusion(lambda x: torch.softmax(x @ x, -1))(x)
    torch.set_float32_matmul_precision("highest")
    with pytest.raises(lawson.UnsupportedError, match="TF32"):
        fusion(lambda x: x @ x)(x.float())
    row = torch.randn(64, device="cuda")
    with pytest.raises(lawson.UnsupportedError, match="repeats an operand with at most one dim"):
        fusion(lambda x, y: x * y)(x.float(), row)


def test_cpu_engines_are_not_for_a_gpu() -> None:
    x = torch.randn(64, 64, device="cuda", dtype=BF16)
    with pytest.raises(lawson.UnsupportedError, match="of which none runs there"):
        fusion(lambda x: x * 2, engines=["cpu"])(x)


def test_memory_is_pytorchs_and_comes_back() -> None:
    case = CASES["gelu layer"]
    args, fused = drawn(case), fusion(case[0])
    fused(*args)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        fused(*args)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
