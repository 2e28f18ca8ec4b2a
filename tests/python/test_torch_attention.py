"""lawson.torch.attention: every kind of call against the oracle, forward and backward."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import torch

import attention_oracle as oracle
import lawson
from attention_cases import CASES, Case
from lawson.torch import attention, scaled_dot_product_attention

_GRADIENTS = ("q", "k", "v", "bias", "sink")
_CASES = [case for case in CASES if not case.mapped]


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAWSON_ENGINE", "cpu")


def to_torch(x: Any) -> torch.Tensor:
    x = np.array(x)
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().to(torch.float64 if x.is_floating_point() else x.dtype).numpy()


def run(case: Case, arrays: dict[str, Any]) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Results and gradients of a case."""
    given = {n: to_torch(x) for n, x in arrays.items() if n not in ("do", "dlse", "dropout_key")}
    wrt = {name: given[name].requires_grad_() for name in _GRADIENTS if name in given}
    found = attention(
        given.pop("q"),
        given.pop("k"),
        given.pop("v"),
        layout=case.layout,
        mask=case.mask,
        window=case.window,
        bias_kind="pre_scale" if case.pre_scale else "post_scale",
        alibi=bool(case.alibi),
        softmax=case.softmax,  # type: ignore[arg-type]
        softcap=case.softcap,
        dropout_rate=0.3 if case.dropout else 0.0,
        scale=case.scale,
        max_seqlen_q=case.s if case.ragged else None,
        max_seqlen_kv=case.t if case.ragged else None,
        return_lse=case.lse,
        return_dropout_mask=case.dropout == "key",
        **given,
    )
    results = list(found) if isinstance(found, tuple) else [found]
    cotangents = [to_torch(arrays["do"])]
    if case.lse:
        cotangents.append(to_torch(arrays["dlse"]))
        assert results[1].dtype == (torch.float64 if case.dtype == "float64" else torch.float32)
    gradients = torch.autograd.grad(results[: len(cotangents)], list(wrt.values()), cotangents)
    for x, gradient in zip(wrt.values(), gradients, strict=True):
        assert gradient.dtype == x.dtype
    named = dict(zip(wrt, (to_numpy(x) for x in gradients), strict=True))
    numbers = [to_numpy(x) for x in results]
    if case.lse:
        numbers[1] = numbers[1].astype(np.float64 if case.dtype == "float64" else np.float32)
    return numbers, named


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    """Output, log-sum-exp and every gradient of each kind of call."""
    rng = np.random.default_rng([77, _CASES.index(case)])
    wide = jax.enable_x64(True) if case.dtype == "float64" else contextlib.nullcontext()
    for _ in range(3):
        with wide:
            arrays, info = case.draw(rng)
        results, gradients = run(case, arrays)
        case.check(arrays, info, results, gradients)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, see: Any, **more: Any) -> Any:
    """The oracle's answer for [b, s, h, d] tensors."""
    q_, k_, v_ = (to_numpy(x).transpose(0, 2, 1, 3) for x in (q, k, v))
    return oracle.Attention(q_, k_, v_, np.asarray(see), 1 / np.sqrt(q.shape[-1]), **more)


def check_output(got: torch.Tensor, answer: oracle.Attention) -> None:
    order = (0, 2, 1, 3)
    bound = answer.bound("float32").transpose(order)
    oracle.check("o", to_numpy(got), answer.o.transpose(order), bound)


# ---- strides and rows ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)])
def test_the_output_lies_as_the_query(order: tuple[int, ...]) -> None:
    back = [order.index(axis) for axis in range(4)]
    q = normal(0, *(np.array((2, 4, 5, 8))[list(order)])).permute(back)
    k, v = normal(1, 2, 4, 6, 8), normal(2, 2, 4, 6, 16)
    o = scaled_dot_product_attention(q, k, v)
    assert o.permute(order).is_contiguous()
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(o, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_log_sum_exp_is_f32_whatever_the_dtype(dtype: torch.dtype) -> None:
    q, k = normal(0, 1, 5, 2, 16, dtype=dtype) * 3, normal(1, 1, 7, 2, 16, dtype=dtype)
    _, lse = attention(q, k, k, return_lse=True)
    assert lse.dtype == torch.float32
    answer = dense(q, k, k, np.ones((1, 1, 1, 1), bool))
    oracle.check("lse", to_numpy(lse), answer.lse, answer.lse_bound())


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("traced", [False, True])
def test_log_sum_exp_cotangents_are_not_rounded(
    dtype: torch.dtype, size: float, traced: bool
) -> None:
    """A cotangent of 1 + 2^-13, which neither type has; dbias is f32 and has to show it."""
    q, k = normal(0, 1, 6, 2, 16, dtype=dtype), normal(1, 1, 6, 2, 16, dtype=dtype)
    bias = normal(2, 1, 2, 6, 6).requires_grad_()

    def lse(bias: torch.Tensor) -> torch.Tensor:
        return attention(q, k, k, bias=bias, return_lse=True)[1]

    call = torch.compile(lse, backend="aot_eager") if traced else lse

    def dbias(weight: float) -> np.ndarray:
        return to_numpy(torch.autograd.grad((call(bias) * weight).sum(), bias)[0]) / size

    low, high = dbias(size), dbias(size * (1 + 2.0**-13))
    np.testing.assert_allclose(high / low, 1 + 2.0**-13, rtol=2e-6)


@pytest.mark.parametrize("softmax", ["vanilla", "off_by_one", "learnable"])
def test_rows_that_see_nothing_are_0_with_gradients_0(softmax: str) -> None:
    q, k, v = normal(0, 1, 4, 2, 8), normal(1, 1, 6, 2, 8), normal(2, 1, 6, 2, 8)
    q.requires_grad_()
    mask = torch.ones(1, 1, 4, 6, dtype=torch.bool)
    mask[:, :, 1] = False
    sink = normal(3, 2) if softmax == "learnable" else None
    kind: Any = "vanilla" if softmax == "learnable" else softmax
    o, lse = attention(q, k, v, attn_mask=mask, sink=sink, softmax=kind, return_lse=True)
    dlse = normal(5, 1, 2, 4)
    if softmax == "vanilla":  # what users' code makes of an infinite log-sum-exp stays out
        dlse[:, :, 1] = torch.nan
    (dq,) = torch.autograd.grad((o, lse), q, (normal(4, 1, 4, 2, 8), dlse))
    assert (o[:, 1] == 0).all() and (o[:, 0] != 0).all()
    assert (dq[:, 1] == 0).all() and (dq[:, 0] != 0).all()
    expected = {"vanilla": -torch.inf, "off_by_one": 0.0, "learnable": sink}[softmax]
    assert (lse[0, :, 1] == expected).all()


def test_empty_batches_and_sequences() -> None:
    q, k = normal(0, 2, 4, 2, 8).requires_grad_(), normal(1, 2, 6, 2, 8).requires_grad_()
    o, lse = attention(q[:0], k[:0], k[:0], return_lse=True)
    assert o.shape == (0, 4, 2, 8) and lse.shape == (0, 2, 4)
    o, lse = attention(q, k[:, :0], k[:, :0], return_lse=True)
    assert (o == 0).all() and torch.isneginf(lse).all()
    (dk,) = torch.autograd.grad(attention(q[:, :0], k, k).sum(), k)
    assert dk.shape == k.shape and (dk == 0).all()
    (dq,) = torch.autograd.grad(attention(q, k[:, :0], k[:, :0]).sum(), q)
    assert dq.shape == q.shape and (dq == 0).all()
    nothing = torch.zeros(0, 2, 8)
    for tokens in (q[0], nothing):  # ragged: without a key, and without anything
        o, lse = attention(
            tokens,
            nothing,
            nothing,
            layout="thd",
            cu_seqlens_q=torch.tensor([0, tokens.shape[0]]),
            cu_seqlens_kv=torch.tensor([0, 0]),
            max_seqlen_q=4,
            max_seqlen_kv=4,
            return_lse=True,
        )
        assert o.shape == tokens.shape and (o == 0).all() and torch.isneginf(lse).all()


# ---- gradients ---------------------------------------------------------------------------------


def test_gradcheck_in_f64_through_the_reference() -> None:
    q, k, v = (normal(n, 1, 2, 3, 4, dtype=torch.float64).requires_grad_() for n in range(3))
    bias = normal(3, 1, 1, 3, 3, dtype=torch.float64).requires_grad_()
    sink = torch.zeros(2, requires_grad=True)

    def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return attention(
            q, k, v, bias=bias, sink=sink, layout="bhsd", return_lse=True, engine="reference"
        )

    assert torch.autograd.gradcheck(call, (q, k, v, bias))

    def torchs(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return scaled_dot_product_attention(q, k, v, mask, engine="reference")

    assert torch.autograd.gradcheck(torchs, (q, k, v, bias))


def test_only_what_is_asked_for_is_computed() -> None:
    q, bias = normal(0, 1, 4, 2, 8).requires_grad_(), normal(1, 1, 2, 4, 4)

    def specs(learnt: bool) -> list[str]:
        def step(q: torch.Tensor, bias: torch.Tensor) -> None:
            attention(q, q, q, bias=bias).sum().backward()

        return [one.spec for one in lawson.torch.inspect(step)(q, bias.requires_grad_(learnt))]

    assert all('"bias_grad": false' in spec for spec in specs(False))
    assert all('"bias_grad": true' in spec for spec in specs(True))


def test_what_has_no_gradient_is_refused() -> None:
    q, pages = normal(0, 2, 1, 4, 8).requires_grad_(), normal(1, 6, 4, 2, 8)
    table = torch.tensor([[0, 2], [5, 1]])
    more: Any = {"page_table_k": table, "seqlens_kv": torch.tensor([3, 8])}
    with pytest.raises(lawson.UnsupportedError, match="paged cache.*no gradients"):
        attention(q, pages, pages, **more)
    with torch.no_grad():
        attention(q, pages, pages, **more)
    x = normal(0, 1, 4, 2, 8)
    with pytest.raises(lawson.UnsupportedError, match="alibi slopes have no gradient"):
        attention(x, x, x, alibi_slopes=torch.ones(2, requires_grad=True))
    mask = normal(1, 1, 1, 4, 4).requires_grad_()
    with pytest.raises(lawson.UnsupportedError, match="pass what is learnt as bias"):
        attention(x, x, x, attn_mask=mask, bias=normal(2, 1, 1, 4, 4))


@pytest.mark.parametrize("traced", [False, True])
def test_a_cache_that_is_appended_to_has_no_gradient(traced: bool) -> None:
    cache, new = normal(0, 2, 8, 2, 8), normal(1, 2, 1, 2, 8)

    def call(q: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([8, 5])
        return attention(q, cache, cache.clone(), k_new=new, v_new=new, seqlens_kv=lengths)

    run = torch.vmap(call) if traced else call
    with pytest.raises(lawson.UnsupportedError, match="torch.vmap|appended to has no gradients"):
        run(normal(2, 3, 2, 1, 2, 8) if traced else normal(2, 2, 1, 2, 8).requires_grad_())


class _Unused(torch.autograd.Function):
    """Its argument has no gradient, and says so with None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        return None


@pytest.mark.parametrize("call", [attention, scaled_dot_product_attention])
def test_an_output_without_a_cotangent_gives_no_gradients(call: Any) -> None:
    q, other = normal(0, 1, 2, 4, 8).requires_grad_(), normal(1, 1, 2, 4, 8).requires_grad_()
    _Unused.apply(call(q, q, q) + 0 * other).sum().backward()
    assert q.grad is None and other.grad is None
    o = call(q, q, q)
    (_Unused.apply(o).sum() + o.sum()).backward()
    assert q.grad is not None


def test_second_order_is_refused() -> None:
    q = normal(0, 1, 2, 4, 8).requires_grad_()
    for call in (scaled_dot_product_attention, torch.ops.lawson.attention_forward):
        if call is scaled_dot_product_attention:
            o = call(q, q, q)
        else:
            setup = '{"names": ["q", "k", "v"], "training": true}'
            o = call(q, q, q, setup)[0]
        (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
        with pytest.raises(lawson.UnsupportedError, match="first-order reverse-mode"):
            torch.autograd.grad(dq.sum(), q)


def test_training_is_judged_before_the_forward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config whose backward is refused refuses the differentiated forward, and no other."""
    from lawson import _attention_plan

    asked = []

    def select(config: Any, device: Any, options: Any) -> Any:
        asked.append(config.spec())
        raise lawson.UnsupportedError("the backward pass does not fit")

    class Core:
        def __getattr__(self, name: str) -> Any:
            return select if name == "attention_select" else getattr(lawson._core, name)

    monkeypatch.setattr(_attention_plan, "_core", Core())
    q = normal(0, 1, 3, 2, 40)
    attention(q, q, q)
    assert asked == []
    with pytest.raises(lawson.UnsupportedError, match="backward pass does not fit"):
        attention(q.requires_grad_(), q, q)
    assert asked and '"pass":"training"' in asked[0].replace(" ", "")


# ---- dropout -----------------------------------------------------------------------------------


def test_dropout_is_of_torchs_generator() -> None:
    q = normal(0, 4, 64, 4, 8)

    def call() -> Any:
        return attention(q, q, q, dropout_rate=0.4, return_dropout_mask=True)

    torch.manual_seed(3)
    o, kept = call()
    assert not torch.equal(call()[1], kept)
    torch.manual_seed(3)
    again, same = call()
    assert torch.equal(o, again) and torch.equal(kept, same)
    own = torch.Generator().manual_seed(3)
    _, drawn = attention(q, q, q, dropout_rate=0.4, generator=own, return_dropout_mask=True)
    assert torch.equal(drawn, kept)
    # 65536 draws: four standard deviations of a mean of 0.6.
    assert abs(float(kept.float().mean()) - 0.6) < 4 * np.sqrt(0.24 / kept.numel())


def test_dropout_of_torchs_form_is_the_same_forward_and_backward() -> None:
    """In a call with V the identity the output is the mask, so its gradient can be foretold."""
    q, k = normal(0, 1, 1, 6, 8), normal(1, 1, 1, 6, 8)
    v = torch.eye(6)[None, None].requires_grad_()
    torch.manual_seed(1)
    o = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    do = normal(2, 1, 1, 6, 6)
    (dv,) = torch.autograd.grad(o, v, do)
    assert (o == 0).any()
    torch.testing.assert_close(dv, o.detach().mT @ do)


# ---- pages and packed layouts ------------------------------------------------------------------


def test_pages_are_read_through_their_table() -> None:
    k, v = normal(1, 2, 11, 2, 8), normal(2, 2, 11, 2, 16)
    q = normal(0, 2, 3, 4, 8)
    table = torch.tensor([[4, 0, 7], [1, 6, 2]])
    lengths = torch.tensor([11, 5])
    pages_k, pages_v = torch.full((8, 4, 2, 8), 1e4), torch.full((8, 4, 2, 16), 1e4)
    for n in range(2):
        for j in range(int(lengths[n])):
            pages_k[table[n, j // 4], j % 4] = k[n, j]
            pages_v[table[n, j // 4], j % 4] = v[n, j]
    got = attention(
        q, pages_k, pages_v, page_table_k=table, seqlens_kv=lengths, mask="causal_bottom_right"
    )
    see = oracle.visible("causal_bottom_right", (-1, -1), [3, 3], lengths, 3, 11)
    check_output(got, dense(q, k, v, see))


@pytest.mark.parametrize("traced", [False, True])
def test_new_tokens_are_written_into_the_cache(traced: bool) -> None:
    k, v = normal(1, 2, 8, 2, 8), normal(2, 2, 8, 2, 8)
    k_new, v_new, q = normal(3, 2, 2, 2, 8), normal(4, 2, 2, 2, 8), normal(0, 2, 2, 4, 8)
    lengths = torch.tensor([8, 5])  # with the new ones
    expected = [k.clone(), v.clone()]
    for n, length in enumerate([8, 5]):
        expected[0][n, length - 2 : length] = k_new[n]
        expected[1][n, length - 2 : length] = v_new[n]
    versions = k._version, v._version

    def step(q: Any, k: Any, v: Any, k_new: Any, v_new: Any, lengths: Any) -> Any:
        return attention(
            q, k, v, k_new=k_new, v_new=v_new, seqlens_kv=lengths, mask="causal_bottom_right"
        )

    call = torch.compile(step, fullgraph=True, backend="aot_eager") if traced else step
    o = call(q, k, v, k_new, v_new, lengths)
    assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])
    assert k._version > versions[0] and v._version > versions[1]
    see = oracle.visible("causal_bottom_right", (-1, -1), [2, 2], lengths, 2, 8)
    check_output(o, dense(q, k, v, see))


def test_a_cache_shares_no_memory_with_what_is_read() -> None:
    kv = normal(1, 2, 8, 2, 2, 8)
    q, new, lengths = normal(0, 2, 1, 2, 8), normal(3, 2, 1, 2, 8), torch.tensor([4, 5])
    # Side by side in one tensor is not shared.
    k, v = kv[:, :, 0], kv[:, :, 1]
    apart = [k.clone(), v.clone()]
    expected = attention(q, *apart, k_new=new, v_new=new, seqlens_kv=lengths)
    assert torch.equal(attention(q, k, v, k_new=new, v_new=new, seqlens_kv=lengths), expected)
    assert torch.equal(k, apart[0]) and torch.equal(v, apart[1])
    flat = torch.zeros(2 * 8 * 2 * 8 + 32)
    first, second = flat[:-32].view(2, 8, 2, 8), flat[32:].view(2, 8, 2, 8)
    own = normal(4, 2, 8, 2, 8)
    for given, named in (
        ((q, first, second, new, new), "v"),
        ((first[:, 4:5], first, own, new, new), "q"),
        ((q, first, own, first[:, :1], new), "k_new"),
        ((q, own, first, new, first[:, 7:]), "v_new"),
    ):
        q_, k_, v_, k_new, v_new = given
        version = flat._version
        with pytest.raises(lawson.InvalidArgumentError, match=f"^{named}: its memory is part of"):
            attention(q_, k_, v_, k_new=k_new, v_new=v_new, seqlens_kv=lengths)
        assert flat._version == version and not flat.any()


def test_a_refused_append_is_no_write() -> None:
    k, v, new = normal(1, 2, 8, 2, 8), normal(2, 2, 8, 2, 8), normal(3, 2, 1, 2, 8)
    versions = k._version, v._version
    with pytest.raises(lawson.InvalidArgumentError, match="alibi_slopes"):
        attention(
            new,
            k,
            v,
            k_new=new,
            v_new=new,
            seqlens_kv=torch.tensor([1, 2]),
            alibi_slopes=torch.ones(3),
        )
    assert (k._version, v._version) == versions


def test_the_host_needs_a_named_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    q = normal(0, 2, 2, 4, 8)
    for given in (q, torch.nn.Parameter(q)):
        scaled_dot_product_attention(given, q, q)
    monkeypatch.delenv("LAWSON_ENGINE")
    for given in (q, torch.nn.Parameter(q)):
        for call in (scaled_dot_product_attention, attention):
            with pytest.raises(lawson.UnsupportedError, match="no engine is named"):
                call(given, q, q)


def test_the_order_of_engines_is_that_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    from lawson.torch import inspect

    monkeypatch.setenv("LAWSON_POLICY", "allow")
    q = normal(0, 2, 2, 4, 8)
    for order in ("cpu,reference", "reference,cpu", "cpu,reference"):
        monkeypatch.setenv("LAWSON_ENGINE", order)
        got = scaled_dot_product_attention(q, q, q)
        (told,) = inspect(scaled_dot_product_attention)(q, q, q)
        assert told.engine == order.partition(",")[0]
        assert torch.equal(got, scaled_dot_product_attention(q, q, q, engine=told.engine))


PACKED: dict[str, Any] = {
    "bs3hd": lambda q, k, v: (torch.stack([q, k, v], 2),),
    "bsh3d": lambda q, k, v: (torch.stack([q, k, v], 3),),
    "sb3hd": lambda q, k, v: (torch.stack([x.transpose(0, 1) for x in (q, k, v)], 2),),
    "sbh3d": lambda q, k, v: (torch.stack([x.transpose(0, 1) for x in (q, k, v)], 3),),
    "bshd_bs2hd": lambda q, k, v: (q, torch.stack([k, v], 2)),
    "bshd_bsh2d": lambda q, k, v: (q, torch.stack([k, v], 3)),
    "sbhd_sb2hd": lambda q, k, v: (q.transpose(0, 1), torch.stack([k, v], 2).transpose(0, 1)),
    "sbhd_sbh2d": lambda q, k, v: (q.transpose(0, 1), torch.stack([k, v], 3).transpose(0, 1)),
    "t3hd": lambda q, k, v: (torch.stack([x.reshape(-1, 4, 8) for x in (q, k, v)], 1),),
    "th3d": lambda q, k, v: (torch.stack([x.reshape(-1, 4, 8) for x in (q, k, v)], 2),),
    "thd_t2hd": lambda q, k, v: (q.reshape(-1, 4, 8), torch.stack([k, v], 2).reshape(-1, 2, 4, 8)),
    "thd_th2d": lambda q, k, v: (q.reshape(-1, 4, 8), torch.stack([k, v], 3).reshape(-1, 4, 2, 8)),
}


@pytest.mark.parametrize("layout", PACKED)
def test_packed_layouts(layout: str) -> None:
    q, k, v = normal(0, 2, 5, 4, 8), normal(1, 2, 5, 4, 8), normal(2, 2, 5, 4, 8)
    do = normal(3, 2, 5, 4, 8)
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = attention(*plain, mask="causal")
    gradients = torch.autograd.grad(expected, plain, do)
    more: dict[str, Any] = {}
    if layout.startswith("t"):
        offsets = torch.tensor([0, 5, 10])
        more = {
            "cu_seqlens_q": offsets,
            "cu_seqlens_kv": offsets,
            "max_seqlen_q": 5,
            "max_seqlen_kv": 5,
        }
        expected, do = expected.reshape(-1, 4, 8), do.reshape(-1, 4, 8)
    elif layout.startswith("s"):
        expected, do = expected.transpose(0, 1), do.transpose(0, 1)
    packed = [x.detach().requires_grad_() for x in PACKED[layout](q, k, v)]
    got = attention(*packed, layout=layout, mask="causal", **more)
    assert torch.equal(got, expected)
    for own, whole in zip(
        torch.autograd.grad(got, packed, do), PACKED[layout](*gradients), strict=True
    ):
        assert torch.equal(own, whole)


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"layout": "bsdh"}, "layout: 'bsdh' is not allowed; expected one of bshd"),
        ({"mask": "diagonal"}, "mask: 'diagonal' is not allowed; expected one of none, padding"),
        ({"dropout_rate": 1.0}, "dropout_rate: 1.0 is not allowed"),
        ({"attn_mask": torch.ones(3, 4) > 0}, "attn_mask: shape .* has 3 at axis 2"),
        ({"bias": torch.ones(4, 4, dtype=torch.int32)}, "bias: dtype int32 is not allowed"),
        ({"seqlens_q": torch.tensor([1, 2, 3])}, "seqlens_q: shape .* has 3 at axis 0"),
        ({"seqlens_kv": torch.tensor([1.5, 2])}, "seqlens_kv: dtype float32 is not allowed"),
        ({"cu_seqlens_q": torch.tensor([0, 4])}, "cu_seqlens_q: goes with a thd layout"),
        ({"k_new": torch.ones(2, 1, 2, 8), "seqlens_kv": torch.tensor([1, 2])}, "v_new: missing"),
        (
            {
                "k_new": torch.ones(2, 5, 2, 8),
                "v_new": torch.ones(2, 5, 2, 8),
                "seqlens_kv": torch.tensor([1, 2]),
            },
            "k_new: shape .* has 5 new tokens; expected at most 4",
        ),
        ({"softcap": 1e31}, "softcap: 1e\\+31 is not allowed"),
        ({"alibi_slopes": torch.ones(2) > 0}, "alibi_slopes: dtype bool is not allowed"),
        (
            {"page_table_k": torch.zeros(2, 2, dtype=torch.int32)},
            "page_table_k: goes with seqlens_kv",
        ),
        ({"sink": torch.zeros(3)}, "sink: shape .* has 3 at axis 0"),
        ({"scale": torch.ones(3)}, "scale: .* is not allowed"),
        ({"window": (-2, 0)}, "window: .* is not allowed"),
        ({"softcap": -1.0}, "softcap: -1.0 is not allowed"),
        ({"engine": "flash"}, "engine: 'flash' is not allowed"),
        ({"workspace_limit": -2}, "workspace_limit: -2 is not allowed"),
    ],
)
def test_bad_arguments_are_named(kwargs: dict[str, Any], message: str) -> None:
    q, k, v = (normal(seed, 2, 4, 2, 8) for seed in range(3))
    with pytest.raises(lawson.InvalidArgumentError, match=message):
        attention(q, k, v, **kwargs)


@pytest.mark.parametrize(
    ("shapes", "kwargs", "message"),
    [
        (((1, 4, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8)), {}, "heads .without enable_gqa."),
        (((1, 3, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8)), {"enable_gqa": True}, "key: 2 heads"),
        (((2, 4, 3, 8), (3, 4, 3, 8), (3, 4, 3, 8)), {}, "query, key, value: leading dims"),
        (((1, 4, 3, 8), (1, 4, 3, 4), (1, 4, 3, 8)), {}, "key: shape .* has depth 4; expected 8"),
        (((1, 4, 3, 8), (1, 4, 3, 8), (1, 4, 2, 8)), {}, "value: shape .* has 2 rows; expected 3"),
        (((8,), (4, 8), (4, 8)), {}, "query: shape .* has 1 dims"),
        (((1, 4, 3, 8),) * 3, {"attn_mask": torch.ones(3, 3) > 0, "is_causal": True}, "attn_mask"),
        (((1, 4, 3, 8),) * 3, {"attn_mask": torch.ones(2, 3) > 0}, "attn_mask: shape"),
        (((1, 4, 3, 8),) * 3, {"attn_mask": torch.ones(3, 3).double()}, "attn_mask: dtype float64"),
        (((1, 4, 3, 8),) * 3, {"dropout_p": 1.5}, "dropout_p: 1.5 is not allowed"),
    ],
)
def test_bad_calls_of_torchs_form_are_named(shapes: Any, kwargs: Any, message: str) -> None:
    q, k, v = (torch.zeros(shape) for shape in shapes)
    for _ in range(2):  # a call that is known is checked as well
        with pytest.raises(lawson.InvalidArgumentError, match=message):
            scaled_dot_product_attention(q, k, v, **kwargs)
        if len(shapes[0]) == 4:
            scaled_dot_product_attention(q, q, q, enable_gqa=kwargs.get("enable_gqa", False))


def test_dtypes_that_no_plan_has_are_named() -> None:
    q = normal(0, 1, 4, 2, 16)
    with pytest.raises(lawson.InvalidArgumentError, match="q: dtype float8_e4m3fn is not allowed"):
        attention(*[q.to(torch.float8_e4m3fn)] * 3)
    with pytest.raises(lawson.InvalidArgumentError, match="key: dtype bfloat16 differs"):
        scaled_dot_product_attention(q, q.bfloat16(), q)


def test_the_host_needs_an_engine_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    q = normal(0, 1, 4, 2, 16)
    monkeypatch.delenv("LAWSON_ENGINE")
    for call in (attention, scaled_dot_product_attention):
        call(q, q, q, engine="cpu")
        with pytest.raises(lawson.UnsupportedError, match='engine="cpu", or LAWSON_ENGINE=cpu'):
            call(q, q, q)
    with pytest.raises(lawson.UnsupportedError, match="cudnn"):
        attention(q, q, q, engine="cudnn")


def test_meta_tensors_have_results_of_their_shape() -> None:
    q = torch.empty(2, 3, 4, 8, device="meta")
    assert attention(q, q, q).shape == q.shape


def test_the_static_side_survives_as_text() -> None:
    """The static side of a call survives as text, with every field."""
    from lawson._attention_setup import Choice, Setup

    fields: dict[str, Any] = {
        "words": ("thd", "thd", "thd"),
        "mask": "causal",
        "window": (3, 0),
        "softcap": 2.5,
        "scale": 0.1,
        "max_q": 7,
        "output_dtype": "float16",
        "training": True,
        "choice": Choice(engine="cpu", workspace_limit=5, tuning="quick"),
    }
    setup = Setup(names=("q", "k", "v"), **fields)
    assert Setup.of_text(setup.text()) == setup
    plain = Setup(names=("q", "k", "v"))
    for name, value in fields.items():
        other = dataclasses.replace(plain, **{name: value})
        assert Setup.of_text(other.text()) == other != plain
