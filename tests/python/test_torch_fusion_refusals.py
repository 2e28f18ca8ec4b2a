"""What a marked function, its arguments or its settings may not be: one typed error that says which."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lawson
import lawson.torch as lt
from lawson.torch import Fusion, fusion, inspect
from new_process import in_new_process

cpu = functools.partial(fusion, engines=["cpu"])
torch.manual_seed(3)
X, W, B = torch.randn(4, 8), torch.randn(8, 4), torch.randn(4)


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def refused(kind: type[lawson.Error], function: Callable[..., Any], *args: Any) -> str:
    """What a call of the function as fusion says."""
    with pytest.raises(kind) as caught:
        cpu(function)(*args)
    return str(caught.value)


# ---- operands that do not fit ------------------------------------------------------------------

UNFIT: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[str, ...]]] = {
    "matmul": (lambda a, b: a @ b, (X, X), ("f32[4, 8], f32[4, 8]", "reduction dim")),
    "add": (lambda a, b: a + b, (X, B[:3]), ("f32[4, 8], f32[3]", "broadcast")),
    "cat": (lambda a, b: torch.cat([a, b]), (X, W), ("f32[4, 8], f32[8, 4]",)),
    "linear": (lambda a: F.linear(a, a.t()), (X,), ("f32[4, 8], f32[8, 4]",)),
    "view": (lambda a: a.view(3, 3), (X,), ("f32[4, 8]", "[3, 3]")),
    "sum": (lambda a: a.sum(5), (X,), ("f32[4, 8]", "got 5")),
    "__getitem__": (lambda a: a[:, 9], (X,), ("f32[4, 8]", "index 9 is out of bounds")),
    "mean": (lambda a: a.mean(), (X.long(),), ("i64[4, 8]",)),
    "mul": (lambda a: a * (1 << 70), (X,), ("f32[4, 8]",)),
}


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_operands_that_do_not_fit(
    name: str, needs_grad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    function, args, words = UNFIT[name]
    given = [a.clone().requires_grad_(needs_grad and a.is_floating_point()) for a in args]
    with pytest.raises(Exception) as plain:
        function(*given)
    caplog.set_level(logging.ERROR)
    text = refused(lawson.InvalidArgumentError, function, *given)
    first, operands = text.split("\n  operands: ")
    line = f"test_torch_fusion_refusals.py:{function.__code__.co_firstlineno}"
    assert re.match(rf"fusion 'lambda': torch[.\w]*\.{name} at {re.escape(line)}: ", first), text
    assert words[0] == operands and all(w in text for w in words), text
    assert not caplog.records
    if not isinstance(plain.value, OverflowError):  # code that expects PyTorch's error gets it
        with pytest.raises(type(plain.value)):
            cpu(function)(*given)


def test_the_error_of_a_call_is_one_and_has_the_users_frames() -> None:
    def helper(x: Tensor) -> Tensor:
        return x @ x

    with pytest.raises(lawson.InvalidArgumentError) as caught:
        cpu(lambda x: helper(x) * 2)(X)
    error = caught.value
    assert error.__cause__ is None and error.__suppress_context__
    assert [e.name for e in caught.traceback][-2:] == ["<lambda>", "helper"]


def test_nothing_is_logged_for_fusions_alone() -> None:
    code = """
import sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from lawson.torch import fusion
x = torch.ones(4, 8)
try:
    fusion(lambda x: x @ x, engines=["cpu"])(x)
except ValueError:
    print("", file=sys.stderr, end="")
with FakeTensorMode() as mode:
    y = mode.from_tensor(x)
    try:
        y @ y
    except RuntimeError:
        print("logged", file=sys.stderr)
"""
    done = in_new_process(f"import contextlib, io, sys\nsys.stderr = sys.stdout\n{code}")
    assert done.count("failed while attempting to run meta") == 1 and done.endswith("logged\n")


def test_errors_of_the_function_itself_are_left() -> None:
    def checked(x: Tensor) -> Tensor:
        if x.shape[0] != 3:
            raise ValueError("mine")
        return x

    def wrapped(x: Tensor) -> Tensor:
        try:
            return x @ x
        except RuntimeError as error:
            raise KeyError("of it") from error

    def caught(x: Tensor) -> Tensor:
        try:
            return x @ x
        except RuntimeError:
            return x * 3

    for function, kind in ((checked, ValueError), (wrapped, KeyError)):
        with pytest.raises(kind) as found:
            cpu(function)(X)
        assert not isinstance(found.value, lawson.Error)
    close(cpu(caught)(X), X * 3)
    with pytest.raises(AssertionError, match="three"):
        cpu(lambda x: torch._assert(x.shape[0] == 3, "three"))(X)


def test_layers_that_check_their_arguments() -> None:
    text = refused(lawson.InvalidArgumentError, nn.RNN(8, 4), torch.randn(2, 2, 2, 8))
    assert "fusion 'RNN': torch.nn.modules.rnn.RNN.forward: " in text and "got 4D" in text


def test_tensors_on_two_devices_inside() -> None:
    text = refused(lawson.UnsupportedError, lambda x: x * torch.ones(8, device="meta"), X)
    assert "torch.Tensor.mul at" in text and "its tensors are on cpu, meta" in text


# ---- values ------------------------------------------------------------------------------------


def positive(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x * 2
    return x


BRANCH, NUMBER = "cannot branch on them", "cannot make Python numbers"
SHAPE = "the shape of its result depends on values"
READS: dict[str, tuple[Callable[..., Any], str]] = {
    "Tensor.__bool__": (positive, BRANCH),
    "Tensor.__bool__ ": (lambda x: max(x[0, 0], x[0, 1]), BRANCH),
    "Tensor.__bool__  ": (lambda x: x > 0 and x < 1, BRANCH),
    "torch.allclose": (lambda x: x if torch.allclose(x, x) else -x, BRANCH),
    "Tensor.item": (lambda x: x * x.sum().item(), NUMBER),
    "Tensor.item ": (lambda x: x * x.tolist()[0][0], NUMBER),
    "Tensor.__float__": (lambda x: x * float(x[0, 0]), NUMBER),
    "Tensor.__int__": (lambda x: x * int(x[0, 0]), NUMBER),
    "Tensor.__index__": (lambda x: x[: x[0].argmax()], "depends on values"),
    "Tensor.numpy": (lambda x: x * x.numpy()[0], NUMBER),
    "Tensor.__format__": (lambda x: print(f"{x.sum():.3f}"), NUMBER),
    "torch.tensor": (lambda x: torch.tensor([x[0, 0], x[0, 1]]), "torch.stack"),
    "Tensor.nonzero": (lambda x: x.nonzero(), SHAPE),
    "Tensor.__getitem__": (lambda x: x[x > 0], SHAPE),
    "torch.functional.unique": (lambda x: torch.unique(x), SHAPE),
    "torch.where": (lambda x: torch.where(x > 0), SHAPE),
}


@pytest.mark.parametrize("name", READS)
def test_what_depends_on_values(name: str) -> None:
    function, words = READS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error" if "__" in name else "default")
        text = refused(lawson.UnsupportedError, function, X)
    first, nearest = text.splitlines()
    line = function.__code__.co_firstlineno + (function is positive)
    assert f"fusion '{'positive' if function is positive else 'lambda'}': torch" in first, text
    assert name.strip() in first or name == "Tensor.__index__", text
    assert f" at test_torch_fusion_refusals.py:{line}: " in first and words in text, text
    assert nearest.startswith("  nearest supported form: ")


def test_values_that_the_function_did_without() -> None:
    def quietly(x: Tensor) -> Tensor:
        try:
            return x if x.sum() > 0 else -x
        except Exception:
            return x * 3  # which no call without a fusion gets to

    assert BRANCH in refused(lawson.UnsupportedError, quietly, X)


def test_values_of_tensors_that_are_closed_over() -> None:
    scale, one = torch.tensor(2.0), nn.Parameter(torch.tensor(1.0))

    def quietly(x: Tensor) -> Tensor:
        try:
            return x * scale.item()
        except lawson.UnsupportedError:
            return x

    for function in (
        lambda x: x * scale.item(),
        lambda x: x * float(one),
        lambda x: x if scale else -x,
        lambda x: x * torch.tensor(scale.tolist()),
        quietly,
    ):
        text = refused(lawson.UnsupportedError, function, X)
        assert "it reads a tensor that the function closes over" in text
        assert "the tensor itself in the place of the number" in text
    close(cpu(lambda x: x * scale * one)(X), X * 2)
    close(cpu(lambda x: x * torch.tensor(3.0).item())(X), X * 3)  # which is always 3


def test_an_op_without_fake_tensors() -> None:
    with torch.library._scoped_library("lawson_refusals", "DEF") as library:
        library.define("own(Tensor x) -> Tensor")
        library.impl("own", lambda x: x.clone(), "CPU")
        text = refused(lawson.UnsupportedError, lambda x: torch.ops.lawson_refusals.own(x), X)
    assert "lawson_refusals.own" in text and "register_fake" in text


def test_control_flow_of_pytorchs() -> None:
    def both(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x, (x,))

    text = refused(lawson.UnsupportedError, both, X)
    assert "cond at test_torch_fusion_refusals.py" in text and "torch.where over both" in text
    text = refused(lawson.UnsupportedError, lambda x: torch._higher_order_ops.map(torch.sin, x), X)
    assert "control flow is no part of a fusion" in text and "map around the fusion" in text


def test_calls_that_a_trace_cannot_have() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    for function, words in (
        (lambda x: torch.add(x, 1, out=torch.empty_like(x)), "out= writes into a tensor"),
        (lambda x: __import__("copy").deepcopy(x), "Tensor.clone()"),
        (lambda x: x.pin_memory(), "it is no computation"),
        (lambda x: compiled(x), "torch.compile around the fusion"),
    ):
        text = refused(lawson.UnsupportedError, function, X)
        assert words in text and "copy.py" not in text
    assert "torch.compile around the fusion" in refused(lawson.UnsupportedError, compiled, X)
    with pytest.raises(lawson.UnsupportedError, match="symbolic_trace"):
        torch.fx.symbolic_trace(lambda x: cpu(torch.sin)(x))


# ---- attention ---------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [None, "cpu"])
@pytest.mark.parametrize("which", ["attention", "scaled_dot_product_attention"])
def test_attention_is_no_part_of_a_fusion(
    engine: str | None, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAWSON_ENGINE", raising=False)
    call, q = getattr(lt, which), torch.randn(1, 2, 8, 8)
    keywords = {} if which != "attention" or engine is None else {"engine": engine}
    text = refused(lawson.UnsupportedError, lambda q: call(q, q, q, **keywords) * 2, q)
    assert "attention is a kernel of its own, and no part of a fusion" in text
    assert "nearest supported form: lawson.torch.attention beside the fusion" in text
    assert " at test_torch_fusion_refusals.py:" in text


# ---- export with sizes that stay open ----------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    @cpu
    def tanh(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.tanh(x.reshape(-1, 8) * 2)


DIM = torch.export.Dim


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dim", ["batch", "DYNAMIC", "AUTO", "none"])
def test_export_with_dynamic_shapes(dim: str, strict: bool) -> None:
    model, x = Model(), torch.randn(3, 2, 8)
    kept: Any = DIM("batch") if dim == "batch" else getattr(DIM, dim, None)
    export = functools.partial(
        torch.export.export, model, (x,), dynamic_shapes={"x": {0: kept}}, strict=strict
    )
    if dim in ("AUTO", "none"):  # the sizes become constants
        close(export().module()(x), model(x))
        return
    name = "dim 'batch'" if dim == "batch" else "size()[0]"
    with pytest.raises(lawson.UnsupportedError) as caught:
        export()
    text = str(caught.value)
    assert "fusion 'Model.tanh'" in text and "dim 0 depends on " in text and name in text, text
    assert "an export for each size" in text


class Sized(Model):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:  # type: ignore[override]
        size = n.item()
        torch._check(size >= 1)
        torch._check(size <= 4)
        return self.tanh(x[:size])


def test_export_with_sizes_that_are_values() -> None:
    with pytest.raises(lawson.UnsupportedError, match="dim 0 depends on u0, a value") as caught:
        torch.export.export(Sized(), (X, torch.tensor(2)))
    assert "fusion 'Model.tanh': argument 'x'" in str(caught.value)


# ---- settings, and what is marked --------------------------------------------------------------


def test_settings_that_there_are_none_of() -> None:
    for call in (fusion, functools.partial(fusion, positive)):
        with pytest.raises(TypeError, match=r"setting 'engine'; did you mean 'engines='\?"):
            call(engine="cpu")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"setting 'dtype'; its settings: policy, tuning, engines"):
        fusion(dtype=torch.float16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"'cpu' is not callable; settings are keywords"):
        fusion("cpu")  # type: ignore[arg-type]


def test_what_cannot_be_marked() -> None:
    for kind in (staticmethod, classmethod):
        with pytest.raises(TypeError, match=f"@{kind.__name__} goes above @fusion"):
            cpu(kind(positive))
    with pytest.raises(TypeError, match="Model is a class; mark its forward method"):
        cpu(Model)
    assert isinstance(cpu(Model()), Fusion)

    class Holder:
        @staticmethod
        @cpu
        def twice(x: Tensor) -> Tensor:
            return x * 2

    close(Holder.twice(X), X * 2)
    close(Holder().twice(X), X * 2)


def test_every_refusal_names_the_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAWSON_ENGINE", raising=False)

    def named(x: Tensor) -> Tensor:
        return x @ x.t()

    many = torch.randn(300, 300)
    for settings in (
        {},
        {"engines": ["cudnn"]},
        {"engines": ["cpu", "reference"]},
        {"engines": ["cpu"], "target": "h200"},
        {"engines": ["cpu"], "workspace_limit": 0},
    ):
        with pytest.raises(lawson.Error, match="fusion 'named'"):
            fusion(named, **settings)(many)  # type: ignore[arg-type]
        with pytest.raises(lawson.Error, match="fusion 'named'"):
            inspect(fusion(named, **settings))(many)  # type: ignore[arg-type]


# ---- arguments and results ---------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    a: Any
    b: Any


@dataclasses.dataclass
class Known:
    a: Any
    b: Any


torch.export.register_dataclass(Known)


def test_results_that_are_no_tensors_are_named() -> None:
    for function, words in (
        (lambda x: (x * 2, None), r"result \[1\] is None"),
        (lambda x: {"y": x, "n": 3}, r"result \['n'\] is 3 \(int\)"),
        (lambda x: None, "it is None"),
        (lambda x: Pair(x, x), r"it is Pair.*register_dataclass"),
    ):
        text = refused(lawson.UnsupportedError, function, X)
        assert re.search(words, text.replace("\n", " ")), text
    got = cpu(lambda pair: Known(pair.a * 2, pair.b + 1))(Known(X, X))
    assert type(got) is Known
    close([got.a, got.b], [X * 2, X + 1])


def test_arguments_that_are_no_settings_are_named() -> None:
    for value in ({1, 2}, Pair(X, X), bytearray(2)):
        kind = type(value).__name__
        text = refused(lawson.InvalidArgumentError, lambda x, s: x, X, value)
        assert f"argument s is {kind}, which is not hashable" in text
    lazily = torch.randn(3, dtype=torch.complex64).conj().imag
    assert "argument 'x' is a lazily negated" in refused(
        lawson.UnsupportedError, lambda x: x * 2, lazily
    )


def test_lazy_modules_are_called_before() -> None:
    lazy = nn.LazyLinear(4)
    text = re.escape("fusion 'LazyLinear': 'weight' has no shape yet")
    with pytest.raises(lawson.InvalidArgumentError, match=text):
        cpu(lazy)(X)
    want = lazy(X)
    close(cpu(lazy)(X), want)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_tensors_without_memory_are_named(needs_grad: bool) -> None:
    fused = cpu(lambda x, y: x * 2 + y)
    close(fused(X, X), X * 3)
    freed = X.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(lawson.InvalidArgumentError, match="'lambda': argument 'y' has elements"):
        fused(X.clone().requires_grad_(needs_grad), freed)


def test_the_nearest_op_is_near() -> None:
    for function, op, nearest in (
        (lambda x: torch.einsum("ii->i", x), "aten.diagonal", "torch.eye"),
        (lambda x: x.acos(), "aten.acos", "the angle outside"),  # which is no cosine
        (lambda x: torch.hypot(x, x), "aten.hypot", "torch.sqrt(x * x + y * y)"),
        (lambda x: F.cross_entropy(x, torch.arange(4)), "aten.gather", "torch.where(index =="),
        (
            lambda x: x + torch.randn(4, generator=torch.Generator()),
            "torch.randn",
            "as an argument",
        ),
        (lambda x: torch.cdist(x, x), "aten._cdist_forward", "split in two fusions"),
    ):
        text = refused(lawson.UnsupportedError, function, X[:, :4])
        assert op in text and nearest in text, text
    index = torch.tensor([3, 0, 7, 1])  # what is told instead of a gather
    got = cpu(lambda x, i: torch.where(i[:, None] == torch.arange(8), x, 0).sum(-1))(X, index)
    close(got, X.gather(1, index[:, None])[:, 0])
