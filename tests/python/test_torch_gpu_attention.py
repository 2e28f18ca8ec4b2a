"""Attention of PyTorch on a GPU: numbers, plans, CUDA graphs, memory. Needs one."""

from __future__ import annotations

import collections
import gc
import resource
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import lawson
import lawson.torch
from lawson.torch import attention, scaled_dot_product_attention
from torch_attention_calls import Call, check

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU that torch sees (torch.cuda.is_available())"
)

_GROUPS = 20
_CALLS = 1000
_SHARES = {torch.bfloat16: 0.5, torch.float16: 0.5}
# What cuDNN 9.19 has not, of that which is drawn.
_REFUSALS = ("the backward pass needs one of them above 1",)


@pytest.mark.parametrize("group", range(_GROUPS))
def test_random_calls(group: int, record_property: Any) -> None:
    """Forward and backward against torch's math in f64; what is refused is known, and rare."""
    refused: collections.Counter[str] = collections.Counter()
    calls = range(group, _CALLS, _GROUPS)
    for call in calls:
        drawn = Call.draw(np.random.default_rng([31, call]), "cuda", _SHARES)
        try:
            check(drawn, scaled_dot_product_attention)
        except lawson.UnsupportedError as error:
            reason = next((r for r in _REFUSALS if r in str(error)), None)
            assert reason is not None, f"{drawn.name}: {error}"
            refused[reason] += 1
    record_property("refused", dict(refused))
    assert refused.total() <= 0.06 * len(calls), refused


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_plan_that_is_told_runs(causal: bool, masked: bool) -> None:
    q, k, v = (
        torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in "qkv"
    )
    mask = None
    if masked and not causal:
        mask = torch.rand(200, 200, device="cuda") < 0.8

    def step(q: Any, k: Any, v: Any) -> None:
        scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=0.2).sum().backward()

    told = lawson.torch.inspect(step)(q, k, v)
    assert [one.name for one in told] == ["attention.forward", "attention.backward"]
    assert all(one.engine == "cudnn" and one.verdict.supported for one in told)
    built = lawson.stats()["totals"]["build_plans"]
    executed = lawson.stats()["totals"]["execute"]
    step(q, k, v)
    after = lawson.stats()["totals"]
    assert after["build_plans"] == built and after["execute"] == executed + 2
    if mask is None:
        from lawson.torch import _sdpa

        more = ((-1, -1), 0.0, False, False, None, None, "off")
        form = _sdpa.form_for(causal, 0.2, False, *more)
        for one, runner in zip(told, (form.pair.forward, form.pair.backward), strict=True):
            assert one.plan_id in [prepared.plan_id for prepared in runner._call.prepared()]


def _captured(call: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


@pytest.mark.parametrize("kind", ["plain", "lse", "mask", "ragged", "append"])
def test_a_captured_graph_gives_what_eager_calls_give(kind: str) -> None:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float16)

    q = normal(2, 4, 128, 64).requires_grad_()
    mask = torch.rand(2, 1, 1, 128, device="cuda") < 0.7
    tokens = normal(300, 4, 64).requires_grad_()
    offsets = torch.tensor([0, 100, 300], device="cuda", dtype=torch.int32)
    cache, new = normal(2, 64, 4, 64), normal(2, 1, 4, 64)
    lengths = torch.tensor([7, 64], device="cuda", dtype=torch.int32)
    do = normal(2, 4, 128, 64)

    def call() -> list[torch.Tensor]:
        if kind == "append":
            own = cache.clone()
            o = attention(new, own, own.clone(), k_new=new, v_new=new, seqlens_kv=lengths)
            return [o, own]
        if kind == "ragged":
            o = attention(
                tokens,
                tokens,
                tokens,
                layout="thd",
                mask="causal",
                cu_seqlens_q=offsets,
                cu_seqlens_kv=offsets,
                max_seqlen_q=256,
                max_seqlen_kv=256,
                deterministic=True,
            )
            return [o, *torch.autograd.grad(o, tokens, torch.ones_like(o))]
        more: dict[str, Any] = {"attn_mask": mask} if kind == "mask" else {"is_causal": True}
        found = scaled_dot_product_attention(
            q, q, q, **more, return_lse=kind == "lse", deterministic=True
        )
        o = found[0] if kind == "lse" else found
        every = list(found) if kind == "lse" else [o]
        return [*every, *torch.autograd.grad(o, q, do)]

    graph, results = _captured(call)
    for _ in range(3):
        with torch.no_grad():
            for x in (q, tokens, new, cache):
                x.copy_(torch.randn_like(x))
        graph.replay()
        for one, other in zip(results, call(), strict=True):
            assert torch.equal(one, other)


def test_each_replay_draws_another_dropout_mask() -> None:
    q = torch.randn(2, 128, 4, 64, device="cuda", dtype=torch.float16)

    def call() -> torch.Tensor:
        return attention(q, q, q, dropout_rate=0.5, return_dropout_mask=True)[1]

    graph, kept = _captured(call)
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append(kept.clone())
        assert 0.45 < float(kept.float().mean()) < 0.55
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])
    torch.manual_seed(9)
    first = call()
    torch.manual_seed(9)
    assert torch.equal(first, call())


def test_memory_stays_over_many_calls_of_many_shapes() -> None:
    """30 shapes, 20,000 calls with and without gradients."""
    lengths = [int(n) for n in np.random.default_rng(3).integers(1, 400, 30)]
    tensors = [
        torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in lengths
    ]

    def rounds(count: int) -> tuple[int, int]:
        for n in range(count):
            x = tensors[n % len(tensors)]
            o = scaled_dot_product_attention(x, x, x, is_causal=True)
            if n % 2:
                torch.autograd.grad(o, x, o)
            else:
                with torch.no_grad():
                    scaled_dot_product_attention(x, x, x)
        del o
        gc.collect()
        torch.cuda.synchronize()
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return torch.cuda.memory_allocated(), host

    rounds(1000)
    device, host = rounds(1000)
    for x in range(3):
        after, peak = rounds(6000)
        assert after == device, f"{x}: {after - device} bytes more"
    # Kilobytes: what an allocator keeps, not a leak of 18,000 calls.
    assert peak - host < 16_000


@pytest.mark.parametrize("length", [512, 4096])
def test_peak_memory_is_no_more_than_torchs_cudnn_path(length: int) -> None:
    q, k, v, do = (
        torch.randn(2, 16, length, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    for x in (q, k, v):
        x.requires_grad_()

    def peak(function: Any) -> int:
        used = []
        for _ in range(6):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(function(q, k, v, is_causal=True), (q, k, v), do)
            torch.cuda.synchronize()
            used.append(torch.cuda.max_memory_allocated() - before)
        # autograd's thread may still have the last round's gradients when a round begins: that one
        # needs less.
        return max(used[1:])

    own = peak(scaled_dot_product_attention)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        theirs = peak(F.scaled_dot_product_attention)
    assert own <= theirs, f"{own} bytes, torch's {theirs}"


@pytest.mark.parametrize("length", [128, 192, 256, 320, 448])
@pytest.mark.parametrize("kind", ["float", "bool", "none"])
@pytest.mark.parametrize("depth", [64, 128])
def test_large_and_small_scores_stay_finite_and_right(length: int, kind: str, depth: int) -> None:
    """Sizes and scores for which torch's own cuDNN path makes NaN on an H200."""
    torch.manual_seed(0)
    q, k, v, do = (
        torch.randn(1, 2, length, depth, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    mask = None
    if kind == "float":
        mask = torch.full((1, 2, length, length), -200.0, device="cuda", dtype=torch.bfloat16)
    else:
        q, k = q.abs() + 25, -k.abs() - 1
        if kind == "bool":
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda").tril()
    for x in (q, k, v):
        x.requires_grad_()

    def patched(*args: Any, **kwargs: Any) -> Any:
        with lawson.torch.patch():
            return F.scaled_dot_product_attention(*args, **kwargs)

    check(Call(q, k, v, mask, False, None, False, do, f"{length} {kind}"), patched)


def test_compiled_by_inductor_on_the_gpu() -> None:
    torch._dynamo.reset()

    def block(x: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(x, x * 0.5, x.tanh(), is_causal=True) + x

    x = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    do = torch.randn_like(x)
    for mode in ("default", "reduce-overhead"):
        call = torch.compile(block, fullgraph=True, mode=mode)
        for _ in range(3):
            o = call(x)
            found = [o.clone(), *(g.clone() for g in torch.autograd.grad(o, x, do))]
        expected = block(x)
        wanted = [expected, *torch.autograd.grad(expected, x, do)]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
