"""`with lawson.torch.patch()`: whose attention runs, under which name, where and how long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as imported_before
from torch.utils.checkpoint import checkpoint

import lawson
from lawson.torch import _attention_call, _attention_run, _sdpa, patch
from torch_attention_calls import Call, check

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The engines of the passes that ran, in order."""
    monkeypatch.setenv("LAWSON_ENGINE", "cpu")
    torch.manual_seed(0)
    ran: list[str] = []

    class Watched:
        def __init__(self, describe: Any) -> None:
            self.call = lawson._torch.Call(describe)
            self.runner = describe.__self__

        def __call__(self, *tensors: Any) -> Any:
            found = self.call(*tensors)
            ran.append(f"{self.runner.which} {self.call.prepared()[0].engine}")
            return found

    class Torch:
        Call = Watched
        Prepared = lawson._torch.Prepared

    def forget() -> None:
        monkeypatch.setattr(_sdpa, "_quick", lawson._torch.quick(_sdpa._form_of))
        _sdpa.form_for.cache_clear()
        _attention_run.runner_of.cache_clear()
        _attention_call.pair_for.cache_clear()
        _attention_call.runner_for.cache_clear()

    monkeypatch.setattr(_attention_run, "_torch", Torch)
    forget()
    yield ran
    forget()


def test_every_name_of_the_function_is_routed(runs: list[str]) -> None:
    q = torch.randn(2, 4, 9, 16)
    expected = imported_before(q, q, q)
    assert runs == []
    with patch():
        for call in (
            imported_before,
            F.scaled_dot_product_attention,
            torch.nn.functional.scaled_dot_product_attention,
            torch._C._nn.scaled_dot_product_attention,
        ):
            torch.testing.assert_close(call(q, q, q), expected, **CLOSE)
    assert runs == ["forward cpu"] * 4
    imported_before(q, q, q)
    assert len(runs) == 4


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_torchs_own_modules_are_routed(train: bool, masked: bool, runs: list[str]) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).train(train)
    x = torch.randn(2, 5, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(5) if masked else None
    with torch.set_grad_enabled(train):
        expected = layer(x, src_mask=mask)
        with patch():
            found = layer(x, src_mask=mask)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert runs == ["forward cpu"]
    attention = nn.MultiheadAttention(32, 4, batch_first=True).train(train)
    with patch():
        attention(x, x, x, need_weights=False)
    assert len(runs) == 2


def test_padding_of_a_whole_sequence_gives_numbers(runs: list[str]) -> None:
    """A row without any key, which multi-head attention makes of a padded sequence."""
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 5, 32, requires_grad=True)
    padding = torch.tensor([[False] * 5, [True] * 5])
    with patch():
        y, _ = attention(x, x, x, key_padding_mask=padding, need_weights=False)
    y.sum().backward()
    assert y.isfinite().all() and x.grad is not None and x.grad.isfinite().all()
    assert runs == ["forward cpu", "backward cpu"]


def test_nested_contexts_and_options(runs: list[str]) -> None:
    q = torch.randn(2, 4, 9, 16)
    with patch(engine="reference"):
        F.scaled_dot_product_attention(q, q, q)
        with patch(engine="cpu"):
            F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q, q, q)
    assert runs == ["forward reference", "forward cpu", "forward reference"]


def test_options_are_checked_before_anything_runs() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"engin": "cpu"}, "engin: 'cpu' is not allowed; expected keywords of .*, engine, "),
        ({"engine": "flash"}, "engine: 'flash' is not allowed"),
        ({"deterministic": 1}, "deterministic: 1 is not allowed"),
        ({"query": torch.zeros(1)}, "query: an array .* is not allowed"),
        ({"enable_gqa": "yes"}, "enable_gqa: 'yes' is not allowed"),
        ({"sink": 3}, "sink: 3 is not allowed"),
    ]
    for options, message in bad:
        with pytest.raises(lawson.InvalidArgumentError, match=message):
            patch(**options)


def test_another_thread_goes_on_with_torchs(runs: list[str]) -> None:
    q = torch.randn(2, 4, 9, 16)
    inside, outside = threading.Event(), threading.Event()

    def other() -> None:
        assert inside.wait(30)
        F.scaled_dot_product_attention(q, q, q)
        outside.set()

    thread = threading.Thread(target=other)
    thread.start()
    with patch():
        inside.set()
        assert outside.wait(30)
        assert runs == []
        F.scaled_dot_product_attention(q, q, q)
    thread.join()
    assert runs == ["forward cpu"]


def test_an_exception_leaves_nothing_behind(runs: list[str]) -> None:
    q = torch.randn(2, 4, 9, 16)
    with pytest.raises(lawson.InvalidArgumentError), patch():
        F.scaled_dot_product_attention(q, q, q, dropout_p=2.0)
    F.scaled_dot_product_attention(q, q, q)
    assert runs == []


def test_what_is_refused_raises() -> None:
    """Nothing goes back to torch's own."""
    q = torch.randn(2, 4, 9, 16)
    with patch(engine="cudnn"), pytest.raises(lawson.UnsupportedError):
        F.scaled_dot_product_attention(q, q, q)


def test_compiled_code_follows_the_context(runs: list[str]) -> None:
    torch._dynamo.reset()
    q = torch.randn(2, 4, 9, 16)
    call = torch.compile(
        lambda q: F.scaled_dot_product_attention(q, q, q), fullgraph=True, backend="aot_eager"
    )
    call(q)
    assert runs == []
    for _ in range(2):
        with patch():
            call(q)
        call(q)
    assert runs == ["forward cpu"] * 2
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 32)
    with patch():
        compiled(x, x, x, need_weights=False)[0].sum().backward()
    assert runs[2:] == ["forward cpu", "backward cpu"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_inside_is_recomputed_inside(reentrant: bool, runs: list[str]) -> None:
    q = torch.randn(2, 4, 9, 16, requires_grad=True)
    with patch():
        y = checkpoint(F.scaled_dot_product_attention, q, q, q, use_reentrant=reentrant)
        y.sum().backward()
    assert runs == ["forward cpu", "forward cpu", "backward cpu"]


# Sizes and scores for which a fused backward of torch 2.11 makes NaN on an H200.
@pytest.mark.parametrize("length", [128, 192, 320])
@pytest.mark.parametrize(
    ("kind", "shift"), [("float", 0), ("float", -200), ("bool", 200), ("none", 200)]
)
def test_large_and_small_scores_stay_finite_and_right(
    length: int, kind: str, shift: int, runs: list[str]
) -> None:
    q, k, v, do = (torch.randn(1, 2, length, 64, dtype=torch.bfloat16) for _ in range(4))
    mask = None
    if kind == "float":
        mask = torch.full((1, 2, length, length), float(shift), dtype=torch.bfloat16)
    else:
        q, k = q.abs() + shift / 8, -k.abs() - 1
        if kind == "bool":
            mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    for x in (q, k, v):
        x.requires_grad_()

    def patched(*args: Any, **kwargs: Any) -> Any:
        with patch():
            return F.scaled_dot_product_attention(*args, **kwargs)

    check(Call(q, k, v, mask, False, None, False, do, kind), patched)
    assert runs == ["forward cpu", "backward cpu"]


@pytest.mark.parametrize("rows", [5, 9])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_torchs_causal_biases(make: Any, rows: int, runs: list[str]) -> None:
    """They are tensors in name only: their memory says nothing."""
    q = torch.randn(2, 3, rows, 16, requires_grad=True)
    k, v = (torch.randn(2, 3, 9, 16, requires_grad=True) for _ in "kv")
    bias = make(rows, 9)
    mask = bias._materialize()
    wanted = imported_before(q, k, v, mask)
    expected = torch.autograd.grad(wanted.sum(), (q, k, v))
    with patch():
        found = F.scaled_dot_product_attention(q, k, v, bias)
        gradients = torch.autograd.grad(found.sum(), (q, k, v))
        with pytest.raises(lawson.InvalidArgumentError, match="is_causal"):
            F.scaled_dot_product_attention(q, k, v, bias, is_causal=True)
        with pytest.raises(lawson.InvalidArgumentError, match=f"4 x 9; expected {rows} x 9"):
            F.scaled_dot_product_attention(q, k, v, make(4, 9))
    assert runs == ["forward cpu", "backward cpu"]
    torch.testing.assert_close(found, wanted, **CLOSE)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    with pytest.raises(lawson.InvalidArgumentError, match="bias: a CausalBias"):
        lawson.torch.attention(q, k, v, layout="bhsd", bias=bias)


class Doubled(torch.Tensor):
    """Says itself what torch's functions do with it: with twice its numbers."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [
            torch.Tensor.__mul__(x.as_subclass(torch.Tensor), 2) if isinstance(x, cls) else x
            for x in args
        ]
        return func(*plain, **(kwargs or {}))


def test_tensors_that_say_themselves_what_functions_do(runs: list[str]) -> None:
    q = torch.randn(1, 2, 5, 16)
    with torch._C.DisableTorchFunctionSubclass():
        doubled = q.as_subclass(Doubled)
    expected = imported_before(q * 2, q, q)
    with patch():
        torch.testing.assert_close(F.scaled_dot_product_attention(doubled, q, q), expected, **CLOSE)
    assert runs == ["forward cpu"]
    with pytest.raises(lawson.InvalidArgumentError, match="query: a Doubled, which says itself"):
        lawson.torch.scaled_dot_product_attention(doubled, q, q, engine="cpu")


def test_inspect_of_a_causal_bias_is_of_the_mask_it_is() -> None:
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    for bias, mask in (
        (causal_upper_left(4, 6), "causal"),
        (causal_lower_right(4, 6), "causal_bottom_right"),
    ):
        call = lambda q, k, bias: lawson.torch.scaled_dot_product_attention(q, k, k, bias)
        (told,) = lawson.torch.inspect(call)(q, k, bias)
        assert f'"mask": "{mask}"' in told.spec and "attn_mask" not in told.spec
    strided = torch.nested.nested_tensor([torch.randn(2, n, 8) for n in (3, 4)])
    with pytest.raises(lawson.UnsupportedError, match="inspect: a nested tensor of layout"):
        lawson.torch.inspect(call)(strided, strided, None)


@pytest.mark.parametrize("masked", [False, True])
def test_no_depth_is_a_score_of_zero(masked: bool) -> None:
    q, k = (torch.zeros(2, 3, 5, 0, requires_grad=True) for _ in "qk")
    v = torch.randn(2, 3, 5, 8, requires_grad=True)
    mask = torch.ones(5, 5).tril() > 0 if masked else None
    expected = F.scaled_dot_product_attention(torch.zeros(2, 3, 5, 4), torch.zeros(5, 4), v, mask)
    expected_gradient = torch.autograd.grad(expected.sum(), v)
    with patch():
        o = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(o, expected, **CLOSE)
    o.sum().backward()
    torch.testing.assert_close(v.grad, *expected_gradient, **CLOSE)
    assert q.grad is not None and q.grad.shape == q.shape
    with patch(), pytest.raises(lawson.InvalidArgumentError, match="attn_mask: shape"):
        F.scaled_dot_product_attention(q, k, v, torch.zeros(7, 7))


def test_options_hold_where_the_call_says_nothing(runs: list[str]) -> None:
    q = torch.randn(2, 2, 5, 8)
    causal = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    plain = F.scaled_dot_product_attention(q, q, q)
    with patch(is_causal=True, dropout_p=0.0):
        torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), causal, **CLOSE)
        for said in (
            F.scaled_dot_product_attention(q, q, q, None, 0.0, False),
            F.scaled_dot_product_attention(q, q, q, is_causal=False),
        ):
            torch.testing.assert_close(said, plain, **CLOSE)
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True).train()
    x = torch.randn(2, 5, 16)
    expected, _ = layer(x, x, x, need_weights=False)
    with patch(dropout_p=0.0):
        got, _ = layer(x, x, x, need_weights=False)
    torch.testing.assert_close(got, expected, **CLOSE)
    assert len(runs) == 4


def test_a_rate_of_dropout_that_drops_nothing_is_none() -> None:
    q = torch.randn(2, 4, 16, 8)
    state = torch.get_rng_state()
    with patch(engine="cpu"):
        o = F.scaled_dot_product_attention(q, q, q, dropout_p=1e-11)
        (inspected,) = lawson.torch.inspect(
            lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=1e-11)
        )(q)
        assert torch.equal(o, F.scaled_dot_product_attention(q, q, q))
    assert torch.equal(torch.get_rng_state(), state)
    assert '"dropout": 0.0' in inspected.spec
