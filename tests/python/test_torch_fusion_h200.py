"""What fuses on an H200 that is not here: functions of PyTorch's, and their gradients, as cuDNN's plans.

The tensors are fake ones on "cuda"; cuDNN has to be there, no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import lawson
from lawson._inspection import Inspection
from lawson.torch import fusion, inspect
from lawson.torch._fusion_run import inspected_program

BF16, F16, F32, I8, F8 = (
    torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn
)  # fmt: skip
Shape = tuple[torch.dtype, tuple[int, ...]]


def of(dtype: torch.dtype, *shape: int) -> Shape:
    return dtype, shape


A, B, ROW = of(BF16, 64, 128), of(BF16, 128, 256), of(BF16, 256)
Cases = dict[str, tuple[Callable[..., Any], tuple[Shape, ...]]]
FUSES: Cases = {
    "f32": (lambda a, b: a @ b, (of(F32, 64, 128), of(F32, 128, 256))),
    "vector and tensor": (lambda v, t: v @ t, (of(BF16, 128), B)),
    "tensor and vector": (lambda t, v: t @ v, (A, of(BF16, 128))),
    "int8 and bf16": (lambda a, b: a.bfloat16() @ b, (of(I8, 64, 128), B)),
    "int8 with a scale of columns": (lambda a, b, s: a @ (b.bfloat16() * s),
                                     (A, of(I8, 128, 256), ROW)),
    "output subtraction": (lambda a, b, c: a @ b - c, (A, B, of(BF16, 64, 256))),
    "turned left operand": (lambda a, b: a.T @ b, (of(BF16, 128, 64), B)),
    "linear": (F.linear, (A, of(BF16, 256, 128), ROW)),
    "right operand computed": (lambda a, b, c: a @ (b * c), (A, B, B)),
    "f16 negate": (lambda a, b: -a @ b, (of(F16, 64, 128), of(F16, 128, 256))),
    "integers": (torch._int_mm, (of(I8, 64, 128), of(I8, 128, 256))),
    "column added": (lambda a, b, c: a @ b + c[:, None], (A, B, of(BF16, 64))),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), (ROW, A, B)),
    "clamp": (lambda a, b: torch.clamp(a @ b, -1, 1), (A, B)),
    "fp8": (lambda a, b, s, t: torch._scaled_mm(a, b.t(), s, t, out_dtype=BF16),
            (of(F8, 64, 128), of(F8, 256, 128), of(F32), of(F32))),
    "fp8 with scales of rows": (
        lambda a, b, s, t: torch._scaled_mm(a, b.t(), s, t, out_dtype=BF16),
        (of(F8, 64, 128), of(F8, 256, 128), of(F32, 64, 1), of(F32, 1, 256))),
    "slice of rows": (lambda a, b: a[:32] @ b, (A, B)),
    "heads": (lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b),
              (of(BF16, 2, 4, 64, 32), of(BF16, 2, 4, 64, 32))),
    "where": (lambda a, b, c: torch.where(c > 0, a @ b, 0), (A, B, of(BF16, 64, 256))),
    "odd dims": (lambda a, b: F.relu(a @ b), (of(BF16, 63, 127), of(BF16, 127, 255))),
    "int8 result": (lambda a, b: torch.round((a @ b).float()).to(I8), (A, B)),
    "row sums": (lambda a, b: (a @ b).float().sum(1), (A, B)),
    "two results": (lambda a, b, c: (a @ b + c, F.gelu(a @ b + c)), (A, B, ROW)),
    "swiglu": (lambda x, v, w: F.silu(x @ v) * (x @ w), (A, B, B)),
    "batch of rows": (lambda x, w, b: F.gelu(x @ w + b), (of(BF16, 2, 64, 128), B, ROW)),
    "master weights": (lambda x, w, b: (x @ w.to(x.dtype) + b).to(x.dtype),
                       (A, of(F32, 128, 256), of(F32, 256))),
    "layer norm": (lambda x, g, b: F.layer_norm(x, (128,), g, b), (A, of(F32, 128), of(F32, 128))),
    "rms norm": (lambda x, g: F.rms_norm(x, (128,), g), (A, of(BF16, 128))),
    **{f"{name} of the product": (lambda a, b, f=f: f(a @ b), (A, B)) for name, f in {
        "exp": torch.exp, "sqrt": torch.sqrt, "tanh": torch.tanh, "abs": torch.abs,
        "sigmoid": torch.sigmoid, "softplus": F.softplus, "leaky_relu": F.leaky_relu,
        "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "elu": F.elu,
    }.items()},
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[..., Any], tuple[Shape, ...], str]] = {
    "a product of a product": (lambda a, b, c: (a @ b) @ c, (A, B, of(BF16, 256, 64)), "matmul"),
    "an op behind a reduction": (lambda a, b: torch.softmax(a @ b, -1), (A, B), "reduc"),
}  # fmt: skip
# How many kernels the gradients by all operands are.
GRADIENTS: dict[str, tuple[Callable[..., Any], tuple[Shape, ...], int]] = {
    "product": (lambda a, b: a @ b, (A, B), 2),
    "gelu layer": (lambda x, w, b: F.gelu(x @ w + b), (A, B, ROW), 3),
    "swiglu": (lambda x, v, w: F.silu(x @ v) * (x @ w), (A, B, B), 4),
    "layer norm": (FUSES["layer norm"][0], FUSES["layer norm"][1], 2),
    "rms norm": (FUSES["rms norm"][0], FUSES["rms norm"][1], 2),
    "int8 and bf16": (FUSES["int8 and bf16"][0], FUSES["int8 and bf16"][1], 1),
    "pointwise": (lambda x: torch.tanh(x) * torch.sin(x), (A,), 1),
}


@pytest.fixture(autouse=True)
def _allow_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def fakes(shapes: tuple[Shape, ...]) -> list[Tensor]:
    with FakeTensorMode():
        return [torch.empty(shape, dtype=dtype, device="cuda") for dtype, shape in shapes]


def told(function: Callable[..., Any], shapes: tuple[Shape, ...]) -> Inspection:
    try:
        found: Inspection = inspect(fusion(function, target="h200"))(*fakes(shapes))
    except lawson.UnavailableError as error:
        pytest.skip(f"no cuDNN: {error}")
    return found


@pytest.mark.parametrize("name", FUSES)
def test_fuses(name: str) -> None:
    found = told(*FUSES[name])
    assert len(found.kernels) == 1
    assert (found.engine, found.plan.target) == ("cudnn", "h200")


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_with_a_reason(name: str) -> None:
    function, shapes, word = REFUSED[name]
    with pytest.raises(lawson.UnsupportedError, match=word):
        told(function, shapes)


def test_full_precision_is_refused() -> None:
    torch.set_float32_matmul_precision("highest")
    with pytest.raises(lawson.UnsupportedError, match=r"set_float32_matmul_precision\('high'\)"):
        told(*FUSES["f32"])


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_fuses(name: str) -> None:
    function, shapes, count = GRADIENTS[name]
    told(function, shapes)
    site, tensors = fusion(function, target="h200").site(fakes(shapes), {})
    core = site.traced(tensors).program.core
    assert core is not None
    wrt = tuple(i for i, s in enumerate(core.specs) if s.dtype.is_floating_point)
    found = inspected_program(core.gradient(wrt, (0,)), None)
    assert {k.plan.engine for k in found.kernels} == {"cudnn"}
    assert len(found.kernels) == count
