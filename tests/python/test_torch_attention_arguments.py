"""Arguments of attention that are unusual: what runs all the same, and what is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lawson
from lawson.torch import _attention_run, _sdpa, attention, scaled_dot_product_attention

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAWSON_ENGINE", "cpu")
    torch.manual_seed(0)


def refused(message: str) -> Any:
    return pytest.raises(lawson.InvalidArgumentError, match=message)


# ---- tensors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn", "complex64", "bool"])
def test_dtypes_of_the_query_are_named(dtype: str) -> None:
    x = torch.zeros(1, 2, 4, 8).to(getattr(torch, dtype))
    with refused(f"query: dtype {dtype} is not allowed; expected one of float16, bfloat16"):
        scaled_dot_product_attention(x, x, x)
    setup = '{"names": ["q", "k", "v"]}'
    with refused(f"q: dtype {dtype} is not allowed"):
        torch.ops.lawson.attention_forward(x, x, x, setup)


def test_meta_tensors_are_described() -> None:
    q = torch.empty(2, 4, 5, 8, device="meta", requires_grad=True)
    k = torch.empty(2, 2, 7, 8, device="meta", dtype=torch.float32)
    o, lse = scaled_dot_product_attention(q, k, k, enable_gqa=True, return_lse=True)
    assert o.is_meta and o.shape == q.shape and lse.shape == (2, 4, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert scaled_dot_product_attention(q, q, q).dtype == torch.float32
    o.sum().backward()
    assert q.grad is not None and q.grad.is_meta


def test_tensors_without_memory_of_their_own_are_named() -> None:
    q = torch.randn(1, 2, 4, 8)
    calls: list[tuple[Any, str]] = [
        (lambda x: scaled_dot_product_attention(q, q, q, x(4, 4)), "attn_mask"),
        (lambda x: scaled_dot_product_attention(q, q, q, sink=x(2)), "sink"),
        (lambda x: scaled_dot_product_attention(q, x(1, 2, 4, 8), q), "key"),
        (lambda x: attention(q, q, x(1, 2, 4, 8)), "v"),
        (lambda x: attention(q, q, q, seqlens_kv=x(1).int()), "seqlens_kv"),
        (lambda x: attention(q, q, q, bias=x(4, 2)), "bias"),
    ]
    for call, name in calls:
        with refused(f"^{name}: on meta, and q.* is on cpu; expected one device"):
            call(lambda *shape: torch.zeros(*shape, device="meta"))
        with refused(f"^{name}: a tensor of layout torch.sparse_coo is not allowed"):
            call(lambda *shape: torch.zeros(*shape).to_sparse())


class Named(torch.Tensor):
    """A subclass that overrides nothing."""


def test_a_subclass_that_overrides_nothing_is_a_tensor() -> None:
    given = [torch.randn(1, 2, 4, 8) for _ in "qkv"]
    named = [x.as_subclass(Named).requires_grad_() for x in given]
    plain = [x.clone().requires_grad_() for x in given]
    for call in (scaled_dot_product_attention, attention):
        o, expected = call(*named), call(*plain)
        assert type(o) is Named and torch.equal(o.as_subclass(torch.Tensor), expected)
        found = torch.autograd.grad(o.square().sum(), named)
        wanted = torch.autograd.grad(expected.square().sum(), plain)
        for x, y in zip(found, wanted, strict=True):
            assert torch.equal(x.as_subclass(torch.Tensor), y)


def test_a_mask_that_is_learnt_is_named_as_it_was_given() -> None:
    q = torch.randn(1, 2, 4, 8)
    mask = torch.randn(5, 4).requires_grad_()
    with refused("^attn_mask: shape .* has 5 at axis 2"):
        scaled_dot_product_attention(q, q, q, mask)
    with refused("^attn_mask: shape .* has 5 at axis 2"):
        attention(q, q, q, layout="bhsd", attn_mask=mask)


def test_no_heads_give_nothing() -> None:
    q = torch.randn(2, 0, 6, 8, requires_grad=True)
    for gqa in (False, True):
        o, lse = scaled_dot_product_attention(q, q, q, enable_gqa=gqa, return_lse=True)
        assert o.shape == q.shape and lse.shape == (2, 0, 6)
    o.sum().backward()
    assert q.grad is not None and q.grad.shape == q.shape
    with refused("heads"):
        attention(q.transpose(1, 2), *[torch.randn(2, 6, 3, 8)[:, :, :0]] * 2, sink=torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64])
def test_lengths_of_small_integers(dtype: torch.dtype) -> None:
    q = torch.randn(2, 300, 1, 8)
    lengths = torch.tensor([7, 100])
    expected = attention(q, q, q, seqlens_kv=lengths.int())
    assert torch.equal(attention(q, q, q, seqlens_kv=lengths.to(dtype)), expected)


# ---- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"is_causal": True}, {"is_causal": 1}),
        ({"scale": 1.0}, {"scale": True}),
        ({"return_lse": True}, {"return_lse": 1}),
        ({"deterministic": False}, {"deterministic": 0}),
        ({"deterministic": False}, {"deterministic": None}),
        ({"window": (1, 1)}, {"window": (True, 1)}),
        ({"enable_gqa": True}, {"enable_gqa": 1}),
        ({"dropout_p": 0}, {"dropout_p": False}),
        ({"dropout_p": 0.0}, {"dropout_p": None}),
    ],
)
def test_what_is_refused_does_not_depend_on_earlier_calls(good: Any, bad: Any) -> None:
    q = torch.randn(1, 2, 4, 8)
    (name,) = bad
    for _ in range(2):
        with refused(f"^{name}: .* is not allowed"):
            scaled_dot_product_attention(q, q, q, **bad)
        scaled_dot_product_attention(q, q, q, **good)


def test_a_generator_is_one_of_the_device() -> None:
    q = torch.randn(1, 4, 2, 8)
    for rate in (0.0, 0.5):
        bad: Any = 3
        with refused("generator: 3 is not allowed; expected None, or a torch.Generator"):
            attention(q, q, q, dropout_rate=rate, generator=bad)


@pytest.mark.parametrize("call", [attention, scaled_dot_product_attention])
def test_tuning_on_the_host(call: Any) -> None:
    """A tuned plan may sum in another order."""
    q = torch.randn(1, 4, 4, 8, requires_grad=True)
    o = call(q, q, q, engine="cpu", tuning="quick")
    o.sum().backward()
    assert q.grad is not None
    torch.testing.assert_close(o, call(q, q, q, engine="cpu"), **CLOSE)


def test_what_is_kept_is_bounded() -> None:
    q = torch.randn(1, 1, 2, 8)
    for n in range(_attention_run.KEPT + 10):
        _sdpa.form_for(False, 1.0 + n, False, (-1, -1), 0.0, False, False, "cpu", None, "off")
        _attention_run.runner_of(json.dumps({"names": ["q", "k", "v"], "max_q": n}), "forward")
    for kept in (_sdpa.form_for, _attention_run.runner_of):
        assert kept.cache_info().currsize <= _attention_run.KEPT
    for scale in (1.0, 1.0 + n):
        o = scaled_dot_product_attention(q, q, q, scale=scale)
        torch.testing.assert_close(o, F.scaled_dot_product_attention(q, q, q, scale=scale), **CLOSE)


# ---- caches ------------------------------------------------------------------------------------


def appended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    new = torch.ones(2, 1, 2, 8)
    lengths = torch.tensor([3, 6], dtype=torch.int32)
    found: torch.Tensor = attention(q, k, v, k_new=new, v_new=new, seqlens_kv=lengths)
    return found


def test_the_operator_that_appends_has_no_gradient() -> None:
    q, cache = torch.randn(2, 1, 2, 8, requires_grad=True), torch.zeros(2, 6, 2, 8)
    new, ones = torch.ones(2, 1, 2, 8), torch.ones(2, dtype=torch.int32)
    setup = (
        '{"names": ["q", "k", "v", "seqlen_q", "seqlen_kv", "k_new", "v_new"], "mask": "padding"}'
    )
    arguments: Any = (q, cache, cache.clone(), new, new, setup)
    more = {"seqlen_q": ones, "seqlen_kv": ones * 3}
    with pytest.raises(lawson.UnsupportedError, match="appended to has no gradients"):
        torch.ops.lawson.attention_append(*arguments, **more)
    assert not cache.any()
    with torch.no_grad():
        o, *_ = torch.ops.lawson.attention_append(*arguments, **more)
    assert bool((cache[:, 2] == 1).all()) and not o.requires_grad


def test_caches_of_keys_and_values_are_apart() -> None:
    q, cache = torch.randn(2, 1, 2, 8), torch.zeros(2, 6, 2, 8)
    with refused("v: its memory is part of k's"):
        appended(q, cache, cache)
    with refused("v: its memory is part of k's"):
        appended(q, cache, cache.view(cache.shape))
    assert not cache.any()
    both = torch.zeros(2, 2, 6, 2, 8)
    appended(q, both[0], both[1])
    assert bool((both[:, 0, 2] == 1).all())


def test_a_cache_is_written_as_torch_writes() -> None:
    """What autograd kept of it is known to be stale; outside of inference_mode its tensors stay."""
    q, k, v = torch.randn(2, 1, 2, 8), torch.ones(2, 6, 2, 8), torch.ones(2, 6, 2, 8)
    x = torch.ones_like(k, requires_grad=True)
    y = x * k
    appended(q, k, v)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.inference_mode():
        caches = torch.zeros(2, 6, 2, 8), torch.zeros(2, 6, 2, 8)
        appended(q, *caches)
    assert caches[0].any()
    with refused("^k: made in torch.inference_mode"):
        appended(q, *caches)


def test_lengths_and_pages_out_of_range_are_cut_off() -> None:
    q, k, v = (torch.randn(2, n, 2, 8) for n in (1, 6, 6))
    expected = attention(q, k, v, seqlens_kv=torch.tensor([6, 0]))
    assert torch.equal(attention(q, k, v, seqlens_kv=torch.tensor([99, -5])), expected)
    pages = torch.randn(3, 4, 2, 8)
    more: Any = {"seqlens_kv": torch.tensor([8, 8])}
    within = torch.tensor([[0, 2], [0, 1]])
    beyond = torch.tensor([[-7, 99], [0, 1]])
    found = attention(q, pages, pages, page_table_k=beyond, **more)
    assert torch.equal(found, attention(q, pages, pages, page_table_k=within, **more))
