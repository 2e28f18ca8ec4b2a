"""Jagged nested tensors in and out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lawson
from lawson.torch import attention, patch, scaled_dot_product_attention

LENGTHS = (5, 1, 9, 3)
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAWSON_ENGINE", "cpu")
    torch.manual_seed(0)


def jagged(heads: int, depth: int, like: torch.Tensor | None = None) -> torch.Tensor:
    """[b, j, h, d]"""
    if like is None:
        parts = [torch.randn(n, heads, depth) for n in LENGTHS]
        return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    values = torch.randn(sum(LENGTHS), heads, depth)
    made = torch.nested.nested_tensor_from_jagged(values, like.offsets())  # type: ignore[attr-defined]
    return made.detach().requires_grad_()


def separately(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> list[Any]:
    """Each sequence by itself, by torch."""
    return [
        F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in parts), **more)[
            0
        ].transpose(0, 1)
        for parts in zip(q.unbind(), k.unbind(), v.unbind(), strict=True)
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_sequences_are_separate(causal: bool, kv_heads: int) -> None:
    q = jagged(4, 8)
    k, v = jagged(kv_heads, 8, q), jagged(kv_heads, 16, q)
    o, lse = attention(q, k, v, mask="causal" if causal else "none", return_lse=True)
    assert o.is_nested and o.shape == (4, q.shape[1], 4, 16)  # the same ragged size
    assert lse.is_nested and lse.dtype == torch.float32 and lse.shape == (4, q.shape[1], 4)
    expected = separately(q, k, v, is_causal=causal, enable_gqa=True)
    for one, other in zip(o.unbind(), expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    do = torch.randn(sum(LENGTHS), 4, 16)
    found = torch.autograd.grad(o.values(), (q, k, v), do)
    wanted = torch.autograd.grad(torch.cat(expected), (q, k, v), do)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.values(), other.values(), **CLOSE)


def test_torchs_form_has_heads_in_front() -> None:
    q = jagged(4, 8)
    k, v = jagged(4, 8, q), jagged(4, 8, q)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    theirs = torch.cat(separately(q, k, v, is_causal=True))
    o = scaled_dot_product_attention(*turned, is_causal=True)
    assert o.shape == (4, 4, q.shape[1], 8)
    with patch():
        again = F.scaled_dot_product_attention(*turned, is_causal=True)
    for x in (o, again):
        torch.testing.assert_close(x.transpose(1, 2).values(), theirs, **CLOSE)


def test_room_between_sequences_is_not_seen() -> None:
    """A narrowed nested tensor has lengths beside its offsets."""
    whole = torch.randn(4, 10, 2, 8)
    starts, lengths = torch.tensor([0, 3, 1, 9]), torch.tensor([4, 7, 5, 1])
    x = torch.nested.narrow(whole, 1, starts, lengths, layout=torch.jagged)
    o = attention(x, x, x, mask="causal")
    expected = separately(x, x, x, is_causal=True)
    for one, other in zip(o.unbind(), expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_sequences_of_two_kinds() -> None:
    q = jagged(4, 8)
    parts = [torch.randn(n, 4, 8) for n in (2, 7, 4, 1)]
    k = torch.nested.nested_tensor(parts, layout=torch.jagged)
    o = attention(q, k, k)
    for one, other in zip(o.unbind(), separately(q, k, k), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_what_is_no_such_tensor_is_named() -> None:
    q = jagged(4, 8)
    dense = torch.randn(4, 5, 4, 8)
    for given, name in (((q, dense, dense), "k"), ((dense, q, q), "q")):
        with pytest.raises(lawson.InvalidArgumentError, match=f"^{name}: is not nested"):
            attention(*given)
    with pytest.raises(lawson.InvalidArgumentError, match="^value: is not nested"):
        scaled_dot_product_attention(*[q.transpose(1, 2)] * 2, dense)
    with pytest.raises(lawson.InvalidArgumentError, match="q: its ragged axis is not 2"):
        attention(q, q, q, layout="bhsd")
    with pytest.raises(lawson.InvalidArgumentError, match="layout: 'thd' is not allowed"):
        attention(q, q, q, layout="thd")
    old = torch.nested.nested_tensor([torch.randn(2, 4, 8)], layout=torch.strided)
    with pytest.raises(lawson.UnsupportedError, match="torch.jagged"):
        attention(old, old, old)
    for name in (
        *("cu_seqlens_q", "cu_seqlens_kv_padded", "cu_seqlens_q_padded"),
        *("page_table_v", "v_new"),
    ):
        more: Any = {name: torch.tensor([0, 1])}
        with pytest.raises(lawson.InvalidArgumentError, match=f"{name}: not together"):
            attention(q, q, q, **more)


def test_strided_nested_tensors_are_not_supported() -> None:
    dense = torch.randn(1, 2, 1, 8)
    strided = torch.nested.nested_tensor([torch.randn(2, n, 8) for n in LENGTHS])
    for three in ((strided, strided, strided), (dense, strided, strided)):
        with pytest.raises(lawson.UnsupportedError, match="Lawson takes torch.jagged ones"):
            scaled_dot_product_attention(*three)


def test_grouped_heads_are_said() -> None:
    q = jagged(4, 8)
    turned, fewer = q.transpose(1, 2), jagged(2, 8, q).transpose(1, 2)
    with pytest.raises(lawson.InvalidArgumentError, match="key: 2 heads .* or enable_gqa=True"):
        scaled_dot_product_attention(turned, fewer, fewer)
    o = scaled_dot_product_attention(turned, fewer, fewer, enable_gqa=True)
    assert o.shape == turned.shape


def test_nested_tensors_are_autocast() -> None:
    q = jagged(4, 8)
    turned = q.transpose(1, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention(q, q, q), scaled_dot_product_attention(turned, turned, turned)
    for o in found:
        assert o.is_nested and o.dtype == torch.bfloat16
    found[0].values().float().sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32
