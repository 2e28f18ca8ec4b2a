"""From ATen's ops to Lawson's: each one, its numbers, strides and gradients against PyTorch's, and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import lawson
from lawson.torch import fusion, inspect

torch.manual_seed(6)
D = torch.float64
X = torch.randn(4, 6, dtype=D)
Y = torch.randn(4, 6, dtype=D)
POSITIVE = X.abs() + 0.5
INTEGERS = torch.randint(-9, 9, (4, 6), dtype=torch.int32)
NONZERO = torch.where(INTEGERS == 0, 1, INTEGERS)
BYTES = INTEGERS.to(torch.int8)
TRUTH = X > 0
HALVES = torch.tensor([[-2.5, -1.5, -0.5], [0.5, 1.5, 2.5]], dtype=D)

# ---- every op ----------------------------------------------------------------------------------

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "arithmetic": (
        lambda x, y: (
            x + y,
            x - y,
            x * y,
            x / y,
            2 - x,
            x + 2 * y,
            torch.add(x, y, alpha=3),
            torch.sub(x, y, alpha=2),
            1 / x,
            -x,
        ),
        (X, Y),
    ),
    "two operands": (
        lambda x, y: (
            torch.maximum(x, y),
            torch.minimum(x, y),
            torch.fmod(x, y),
            torch.remainder(x, y),
            x % 2,
            torch.div(x, y, rounding_mode="trunc"),
            torch.div(x, y, rounding_mode="floor"),
        ),
        (X, Y),
    ),
    "floor division": (lambda x, y: (x // y, y // 0.3), (X, Y)),
    "powers": (
        lambda x, y: (x**y, x**2, x**3, x**-2, x**0.5, x**0, 2**y, x**1.5, torch.pow(x, 7)),
        (POSITIVE, Y),
    ),
    "one operand": (
        lambda x: (
            x.abs(),
            x.exp(),
            x.expm1(),
            torch.exp2(x),
            x.sin(),
            x.cos(),
            x.tan(),
            x.tanh(),
            x.erf(),
            x.erfc(),
            x.sigmoid(),
            x.sign(),
            x.sgn(),
            x.square(),
            x.relu(),
            x.trunc(),
            x.frac(),
        ),
        (X,),
    ),
    "positive operand": (
        lambda x: (x.log(), x.log1p(), x.log2(), x.log10(), x.sqrt(), x.rsqrt(), x.reciprocal()),
        (POSITIVE,),
    ),
    "rounding": (lambda x: (x.round(), x.ceil(), x.floor()), (HALVES,)),
    "comparisons": (
        lambda x, y: (
            x == y,
            x != y,
            x < y,
            x <= y,
            x > y,
            x >= 0,
            (x > 0) & (y > 0),
            (x > 0) | (y > 0),
            ~(x > 0) ^ (y > 0),
            (x > 0) == (y > 0),
            torch.logical_not(x),
        ),
        (X, Y),
    ),
    "selection": (
        lambda x, y: (
            torch.where(x > 0, x, y),
            torch.where(x > 0, x, 0.0),
            torch.where(x > 0, -math.inf, y),
            x.masked_fill(y > 0, float("nan")),
            x.masked_fill(y > 0, -1e9),
        ),
        (X, Y),
    ),
    "kinds of numbers": (
        lambda x: (
            torch.isnan(x / x),
            torch.isinf(1 / x),
            torch.isfinite(1 / x),
            torch.nan_to_num(1 / x),
        ),
        (torch.where(X > 0, X, 0.0),),
    ),
    "bounds": (
        lambda x, y: (
            x.clamp(-0.5, 0.5),
            x.clamp(min=0.0),
            x.clamp(max=0.2),
            torch.clamp(x, y, y + 1),
            x.clamp_min(0.1),
            F.hardtanh(x),
            F.relu6(x * 5),
        ),
        (X, Y),
    ),
    "activations": (
        lambda x: (
            F.gelu(x),
            F.gelu(x, approximate="tanh"),
            F.silu(x),
            F.softplus(x),
            F.softplus(x, 2.0, 3.0),
            F.elu(x),
            F.elu(x, 0.5),
            F.selu(x),
            F.celu(x),
            F.leaky_relu(x),
            F.leaky_relu(x, 0.2),
            F.mish(x),
            F.hardswish(x),
            F.hardsigmoid(x),
            F.logsigmoid(x),
            F.softsign(x),
            F.tanhshrink(x),
            F.softshrink(x),
            F.hardshrink(x),
            F.threshold(x, 0.1, 2.0),
            F.glu(x),
        ),
        (X,),
    ),
    "int32": (
        lambda a, b: (
            a + b * 2 - 1,
            a // b,
            a % b,
            torch.fmod(a, b),
            -a,
            a.abs(),
            a.sign(),
            a / b,
            a * 1.5,
            a.sum(),
            a.sum(0),
            a.max(),
            a.float(),
            torch.div(a, b, rounding_mode="trunc"),
        ),
        (INTEGERS, NONZERO),
    ),
    "int64": (lambda a: (a + 1, a * 2, a.sum(), a.float().mean()), (INTEGERS.long(),)),
    "conversions": (
        lambda x: (
            (x * 3).int(),
            (x * 3).round().to(torch.int8),
            x > 0,
            (x > 0).float() * 2,
            x.float(),
            x.half(),
            x.bfloat16().float(),
            x.bool(),
            (x * 3).long(),
        ),
        (X,),
    ),
    "int8": (lambda x: (x.float() + x.int(), x.double() * 2, x.clamp(-3, 3)), (BYTES,)),
    "clipped integers": (lambda x: x.clamp(-3, 3).to(torch.int8), (INTEGERS,)),
    "bools": (
        lambda t: (t.sum(), t.any(), t.all(), t.any(0), t.all(1), t.float().mean(), t.sum(0)),
        (TRUTH,),
    ),
    "views": (
        lambda x, y: (
            x.T + y.T,
            x.reshape(3, 8) + 1,
            x[None].expand(3, 4, 6) * 2,
            x[1:, ::2] * 2,
            x[:, 3] + 1,
            x[..., None] * y[:, None, :1],
            (x + 1).reshape(2, 2, 6).sum(1),
            x.unflatten(1, (2, 3)) * 1.5,
            x.flatten() * 2,
            (x * 2).t(),
            x.view(2, 2, 6).permute(2, 0, 1) * 2,
            x.narrow(1, 1, 3) * 2,
            torch.movedim(x, 0, 1) * 3,
        ),
        (X, Y),
    ),
    "parts": (
        lambda x, y: (
            torch.cat([x, y * 2, x], 1),
            torch.stack([x, y], 1),
            [p * 2 for p in x.split(2, 1)],
            [p + 1 for p in x.chunk(2)],
            [p * 2 for p in x.unbind(0)],
            x.repeat(2, 3),
            x.tile(2),
            x.roll(1),
            x.roll(2, 1),
            F.pad(x, (1, 2), value=7.0),
            F.pad(x, (1, -1, 0, 2)),
        ),
        (X, Y),
    ),
    "constants": (
        lambda x: (
            x * torch.arange(6),
            torch.full((2, 3), 4.0) * 1,
            x + torch.ones(6),
            torch.zeros_like(x) + x,
            torch.tril(x),
            torch.triu(x, 1),
            x @ torch.eye(6, dtype=x.dtype),
            x * torch.tensor(2.0),
            x + torch.arange(2, 8, dtype=x.dtype),
            torch.linspace(0, 1, 6) * x,
        ),
        (X,),
    ),
    "reductions": (
        lambda x: (
            x.sum(),
            x.sum(0),
            x.sum(1, keepdim=True),
            x.mean(),
            x.mean(0),
            x.amax(1),
            x.amin(),
            x.max(),
            x.min(),
            x.max(1).values,
            x.min(0, keepdim=True)[0],
            x.prod(1),
            x.prod(),
            x.var(1),
            x.var(),
            x.std(0),
            x.var(0, unbiased=False),
            x.norm(),
            torch.linalg.vector_norm(x, dim=1),
            x.norm(1, 0),
            x.abs().max(),
            torch.var_mean(x, 1),
            torch.std_mean(x),
        ),
        (X,),
    ),
    "softmax": (
        lambda x: (x.softmax(-1), F.log_softmax(x, 0), x.logsumexp(1), torch.logaddexp(x, x * 2)),
        (X,),
    ),
    "layer norm": (
        lambda x, g, b: (
            F.layer_norm(x, (6,)),
            F.layer_norm(x, (6,), g, b),
            F.layer_norm(x, (4, 6)),
            F.layer_norm(x, (6,), g),
        ),
        (X, Y[0], Y[1]),
    ),
    "rms norm": (lambda x, g: (F.rms_norm(x, (6,)), F.rms_norm(x, (6,), g, 1e-5)), (X, Y[0])),
    "norms and losses": (
        lambda x: (
            F.normalize(x),
            F.cosine_similarity(x, x * 2),
            F.mse_loss(x, x * 2),
            F.l1_loss(x, x * 2),
            F.smooth_l1_loss(x, x * 2),
            F.huber_loss(x, x * 3),
        ),
        (X,),
    ),
    "products": (
        lambda a, b: (
            a @ b.T,
            a.T @ b,
            torch.mm(a, b.T),
            a @ b[0],
            a[0] @ b.T,
            a[0] @ b[0],
            torch.outer(a[0], b[:, 0]),
            F.linear(a, b),
            F.linear(a, b, b[:, 0]),
            torch.addmm(a[:, :4], a, b.T, beta=0.5, alpha=2.0),
            torch.tensordot(a, b, 2),
        ),
        (X, Y),
    ),
    "batched products": (
        lambda a, b: (
            a @ b,
            torch.bmm(a, b),
            torch.baddbmm(a @ b, a, b),
            torch.einsum("bij, bjk->bik", a, b),
            torch.einsum("bij, cjk->bcik", a, b),
            torch.einsum("bij, bjk->i", a, b),
            a @ b[0],
            a[0] @ b,
        ),
        (torch.randn(3, 4, 5, dtype=D), torch.randn(3, 5, 2, dtype=D)),
    ),
    "two batch dims": (
        lambda a, b: (
            a @ b,
            torch.einsum("bhqd, bhdk->bhqk", a, b),
            a.transpose(2, 3).transpose(2, 3) @ b,
        ),
        (torch.randn(2, 3, 3, 5, dtype=D), torch.randn(2, 3, 5, 3, dtype=D)),
    ),
    "slices with gradients": (
        lambda x, y: (
            (x * y)[:, ::2].sin() * 2,
            (x + y)[1:3].sum(0),
            x.detach()[:, 1] * y[:, 1:4:2].sum(),
            torch.slice_scatter(x, y[:, :2], 1, 1, 3),
            torch.slice_scatter(x, y[:, :3], 1, 0, 6, 2),
            torch.select_scatter(x, y[0], 0, 2),
        ),
        (X, Y),
    ),
    "in place": (
        lambda x: ((x * 2).add_(1).mul_(x), (x + 0).clamp_(0), F.relu(x * 2, inplace=True)),
        (X,),
    ),
    "bf16": (
        lambda x: (
            x @ x.T + 1,
            x.sum(1),
            x.mean(),
            F.gelu(x),
            x.softmax(-1),
            x * 2.5,
            x.float() @ x.float().T,
        ),
        (X.bfloat16(),),
    ),
    "combinations": (
        lambda x, y: (
            torch.addcmul(x, x, y, value=2.0),
            torch.addcdiv(x, x, y.abs() + 1),
            torch.lerp(x, y, 0.3),
            torch.lerp(x, y, x),
        ),
        (X, Y),
    ),
    "a tensor without dims": (
        lambda x, s: (x * s, s * 2, x + s),
        (X.float(), torch.tensor(3.0, dtype=D)),
    ),
    "nothing computed": (lambda x: (x, x * 1, x.T), (X,)),
}
# Units of the last place that results may be off by: of f64, through sums of 24 products.
BOUNDS = {torch.float64: 1e-11, torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def leaves(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def compare(got: Any, want: Any, *, strides: bool = True) -> None:
    """Numbers, shapes, dtypes and strides."""
    got, want = leaves(got), leaves(want)
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), i
        assert a.stride() == b.stride() or not strides, i
        bound = BOUNDS.get(a.dtype, 0.0)
        torch.testing.assert_close(a, b, rtol=bound, atol=bound, equal_nan=True, msg=f"result {i}")


@pytest.mark.parametrize("name", CASES)
def test_op(name: str) -> None:
    function, args = CASES[name]
    fused = fusion(function, engines=["cpu"])
    told = inspect(fused)(*args)
    assert told.kernels == () or (told.engine, len(told.kernels)) == ("cpu", 1)
    compare(fused(*args), function(*args))
    transposed = [x.t().contiguous().t() if x.dim() == 2 else x for x in args]
    assert any(a.stride() != b.stride() for a, b in zip(args, transposed, strict=True)) or all(
        x.dim() != 2 for x in args
    )
    # PyTorch's own fake tensors have other strides than its kernels there
    compare(
        fused(*transposed), function(*transposed), strides=name not in ("powers", "activations")
    )


NO_GRADIENT = {  # no float operand, nothing differentiable, or not a number on purpose
    "comparisons", "kinds of numbers", "int32", "int64", "int8", "clipped integers", "bools",
    "selection", "bf16", "floor division",
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in CASES if n not in NO_GRADIENT])
def test_gradient_of_op(name: str) -> None:
    function, args = CASES[name]

    def gradients(run: Callable[..., Any]) -> list[Tensor | None]:
        given = [x.clone().requires_grad_() for x in args]
        found = [x for x in leaves(run(*given)) if x.dtype.is_floating_point and x.requires_grad]
        loss = sum((torch.sin(x.double()) * 0.5).sum() for x in found)
        return list(torch.autograd.grad(loss, given, allow_unused=True))  # type: ignore[arg-type]

    got = gradients(fusion(function, engines=["cpu"]))
    want = gradients(function)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            scale = max(1.0, float(b.abs().max()))
            # f16 and bf16 round PyTorch's cotangents; a tensor without dims follows the other's f32;
            # PyTorch's derivative of hardsigmoid has 1/6 in f32
            rounded = {"conversions": 4e-3, "a tensor without dims": 3e-5, "activations": 1e-8}
            bound = rounded.get(name, 1e-10)
            torch.testing.assert_close(a, b, rtol=0, atol=bound * scale)


# ---- what graphs are written -------------------------------------------------------------------


def document_of(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        inspect(fusion(function, engines=["cpu"]))(*args).graph.json()
    )
    return document


def ops_of(function: Callable[..., Any], *args: Any) -> list[str]:
    return [op["op"] for op in document_of(function, *args)["ops"]]


W = torch.randn(6, 5, dtype=D)


@pytest.mark.parametrize(
    ("function", "ops"),
    [
        (lambda x: F.gelu(x @ W), ["matmul", "gelu"]),
        (lambda x: F.gelu(x @ W, approximate="tanh"), ["matmul", "gelu_tanh"]),
        (lambda x: F.silu(x @ W), ["matmul", "silu"]),
        (lambda x: x * torch.sigmoid(x), ["sigmoid", "silu"]),
        (lambda x: F.softplus(x.float()), ["convert", "softplus"]),
        (lambda x: F.layer_norm(x, (6,), x[0], x[1]), None),
        (lambda x: F.linear(x, W.t()), ["transpose", "transpose", "matmul"]),
        (lambda x: torch.einsum("mk,kn->mn", x, W), ["matmul"]),
        (lambda x: x[None] @ W, ["matmul", "reshape"]),
    ],
)
def test_ops_are_recognised(function: Callable[..., Any], ops: list[str] | None) -> None:
    found = ops_of(function, X)
    if ops is None:
        assert "layer_norm" in found and "rsqrt" not in found
    else:
        assert [op for op in found if op in ops] == [op for op in ops if op in found]
        assert ops[-1] in found or "reshape" in ops
        assert not {"erf", "tanh", "exp", "log1p"} & set(found)


def test_views_are_at_the_inputs() -> None:
    a, b = torch.randn(2, 7, 3, 4, dtype=D), torch.randn(2, 5, 3, 4, dtype=D)
    scores = lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b) * 0.5
    document = document_of(scores, a, b)
    kinds = [op["op"] for op in document["ops"]]
    assert kinds.index("matmul") > max(i for i, k in enumerate(kinds) if k == "transpose")
    compare(fusion(scores, engines=["cpu"])(a, b), scores(a, b))


def test_ops_carry_the_lines_of_code() -> None:
    line = test_ops_carry_the_lines_of_code.__code__.co_firstlineno

    def layer(x: Tensor) -> Tensor:
        y = x @ W
        return torch.tanh(y)

    document = document_of(layer, X)
    found = {op["op"]: op["source"] for op in document["ops"]}
    here = Path(__file__).name
    assert found["matmul"] == f"{here}:{line + 4}" and found["tanh"] == f"{here}:{line + 5}"


def test_integer_products_are_exact() -> None:
    a = torch.randint(-128, 127, (32, 64), dtype=torch.int8)
    b = torch.randint(-128, 127, (64, 16), dtype=torch.int8)
    fused = fusion(lambda a, b: torch._int_mm(a, b).float() * 0.5, engines=["cpu"])
    assert torch.equal(fused(a, b), (a.double() @ b.double()).float() * 0.5)


@pytest.mark.parametrize("rowwise", [False, True])
def test_scaled_products_of_fp8(rowwise: bool) -> None:
    a = torch.randn(16, 32).to(torch.float8_e4m3fn)
    b = torch.randn(16, 32).to(torch.float8_e4m3fn).t()
    scale_a = torch.rand(16, 1) if rowwise else torch.tensor(0.5)
    scale_b = torch.rand(1, 16) if rowwise else torch.tensor(2.5)
    fused = fusion(
        lambda a, b, s, t: torch._scaled_mm(a, b, s, t, out_dtype=torch.bfloat16), engines=["cpu"]
    )
    want = (a.double() @ b.double()) * scale_a.double() * scale_b.double()
    got = fused(a, b, scale_a, scale_b)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)


# ---- refusals ----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "sort": (lambda x: (x * 2).sort().values, (X,), "the sort outside of the fusion"),
    "topk": (lambda x: x.topk(2).values, (X,), "torch.topk outside"),
    "gather": (lambda x, i: x.gather(0, i), (X, INTEGERS.long() % 4), "a slice with constant"),
    "index": (lambda x, i: x[i], (X, INTEGERS[0].long() % 4), "a slice with constant bounds"),
    "cumsum": (lambda x: x.cumsum(0), (X,), "a triangular matrix"),
    "embedding": (lambda i, w: F.embedding(i, w), (INTEGERS.long() % 4, X), "one-hot"),
    "argmax": (lambda x: x.argmax(1), (X,), "amax and a comparison"),
    "atan2": (lambda x, y: torch.atan2(x, y), (X, Y), "outside of the fusion"),
    "flip": (lambda x: x.flip(0), (X,), "the flip outside"),
    "_local_scalar_dense": (lambda x: x * x.sum().item(), (X,), "depends on values"),
    "nonzero": (lambda x: x[x > 0], (X,), "depends on values"),
    "copy_": (lambda x: x.mul_(2), (X,), "return the new value"),
    "native_dropout": (lambda x: F.dropout(x.float(), 0.5), (X,), "outside of the fusion"),
    "convolution": (lambda x: F.conv1d(x[None], x[None]), (X,), "convolutions stay outside"),
    "max": (lambda x: x.max(0), (X,), "amax, and a comparison with it"),
    "add": (lambda x: x + x, (BYTES,), "convert the operands to int32"),
    "mm": (lambda x: x @ x.T, (INTEGERS.long(),), "torch._int_mm"),
    "bf16": (lambda x: x.bfloat16() @ x.T, (X,), "convert one of them"),
    "complex": (lambda x: torch.complex(x, x), (X,), "its real and imaginary parts"),
    "argument 'x'": (lambda x: x, (INTEGERS.to(torch.int16),), "int32"),
    "view": (lambda x: x.view(torch.int64), (X,), "the view outside of the fusion"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_op_the_line_and_what_is_supported(name: str) -> None:
    function, args, nearest = REFUSED[name]
    with pytest.raises(lawson.UnsupportedError) as caught:
        fusion(function, engines=["cpu"])(*args)
    text = str(caught.value)
    assert name in text.splitlines()[0] or name == "native_dropout", text
    assert nearest in text, text
    if not name.startswith("argument"):
        line = function.__code__.co_firstlineno
        assert re.search(rf"at {re.escape(Path(__file__).name)}:{line}\b", text), text


def test_errors_of_the_function_are_its_own() -> None:
    with pytest.raises(RuntimeError, match="reduction dim"):
        fusion(lambda x: x @ x, engines=["cpu"])(X)

    def wrong(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fusion(wrong, engines=["cpu"])(X)


def test_full_precision_is_noted() -> None:
    def matmuls(precision: str) -> str | None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            fused = fusion(lambda x: x.float() @ x.float().T, engines=["cpu"])
            site, tensors = fused.site((X,), {})
            found: str | None = site.traced(tensors).program.trace.full_f32
            return found
        finally:
            torch.set_float32_matmul_precision(before)

    assert matmuls("high") is None
    assert "aten.mm" in str(matmuls("highest"))


@pytest.fixture(autouse=True)
def _no_leftover_modes() -> Iterator[None]:
    yield
    assert torch._C._len_torch_dispatch_stack() == 0
