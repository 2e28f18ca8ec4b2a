"""Attention in torch's programs: compiled, exported, transformed, checkpointed, counted."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import lawson
from lawson._attention_setup import Choice, Setup
from lawson.torch import attention, scaled_dot_product_attention
from new_process import in_new_process

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAWSON_ENGINE", "cpu")
    torch.manual_seed(11)


def qkv(*lead: int, s: int = 9, grad: bool = True, **more: Any) -> list[torch.Tensor]:
    return [torch.randn(*lead, 2, 4, s, 16, requires_grad=grad, **more) for _ in "qkv"]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    # Unfused: their fused one has no rules for vmap.
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


def same_gradients(
    one: torch.Tensor, other: torch.Tensor, wrt: list[torch.Tensor], **close: Any
) -> None:
    do = torch.randn_like(one)
    torch.testing.assert_close(one, other, **(close or CLOSE))
    for a, b in zip(
        torch.autograd.grad(one, wrt, do), torch.autograd.grad(other, wrt, do), strict=True
    ):
        torch.testing.assert_close(a, b, **(close or CLOSE))


# ---- operators ---------------------------------------------------------------------------------

_HOST = Choice(engine="cpu")
_SETUPS: dict[str, dict[str, Any]] = {
    "plain": {"words": ("bhsd",) * 3, "mask": "causal"},
    "lse": {"words": ("bhsd",) * 3, "stats": True, "max_logit": True},
    "bias": {"words": ("bhsd",) * 3, "bias": "post_scale", "names": ("q", "k", "v", "bias")},
    "sink": {"words": ("bhsd",) * 3, "softmax": "learnable", "names": ("q", "k", "v", "sink")},
}


@pytest.mark.parametrize("kind", _SETUPS)
def test_operators_are_sound(kind: str) -> None:
    names = _SETUPS[kind].get("names", ("q", "k", "v"))
    setup = Setup(**{"names": names, "choice": _HOST, **_SETUPS[kind]})
    more = {"bias": torch.randn(1, 4, 9, 9), "sink": torch.randn(4)}
    kwargs = {name: more[name] for name in names[3:]}
    given = qkv(grad=False)
    forward, backward = (
        torch.ops.lawson.attention_forward.default,
        torch.ops.lawson.attention_backward.default,
    )
    opcheck(forward, (*given, setup.text()), kwargs)
    fields = {field: getattr(setup, field) for field in setup.__dataclass_fields__}
    training = Setup(**{**fields, "training": True, "bias_grad": kind == "bias"})
    o, stats, *_ = forward(*given, training.text(), **kwargs)
    opcheck(backward, (*given, o, stats, torch.randn_like(o), training.text()), kwargs)
    opcheck(
        forward,
        (*(x.requires_grad_() for x in given), training.text()),
        {name: x.requires_grad_() for name, x in kwargs.items()},
    )


def test_the_operator_that_appends_is_sound() -> None:
    setup = Setup(
        names=("q", "k", "v", "seqlen_q", "seqlen_kv", "k_new", "v_new"),
        mask="padding",
        choice=_HOST,
    )
    q, k, new = torch.randn(2, 1, 4, 8), torch.randn(2, 9, 4, 8), torch.randn(2, 1, 4, 8)
    lengths = torch.tensor([4, 9], dtype=torch.int32)
    ones = torch.ones(2, dtype=torch.int32)
    opcheck(
        torch.ops.lawson.attention_append.default,
        (q, k, k.clone(), new, new.clone(), setup.text()),
        {"seqlen_q": ones, "seqlen_kv": lengths},
    )


# ---- compile and export ------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_without_a_graph_break(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    call = torch.compile(causal, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    given = qkv()
    same_gradients(call(*given), theirs(*given), given)
    longer = qkv(s=13)
    same_gradients(call(*longer), theirs(*longer), longer)
    with torch.no_grad():
        torch.testing.assert_close(call(*longer), theirs(*longer), **CLOSE)


@pytest.mark.parametrize("name", ["window", "workspace_limit", "softcap", "scale", "max_seqlen_kv"])
def test_numbers_that_change_compile_again(name: str) -> None:
    """A number of the call selects what runs, so it is a constant of what is compiled."""
    q = torch.randn(2, 8, 2, 8)
    pages: dict[str, Any] = {
        "page_table_k": torch.tensor([[0], [1]], dtype=torch.int32),
        "seqlens_kv": torch.tensor([2, 3]),
    }

    def call(n: int) -> torch.Tensor:
        given: dict[str, Any] = {name: (n, 0) if name == "window" else n}
        if name == "workspace_limit":
            given[name] = n << 20
        if name == "max_seqlen_kv":
            given.update(pages)
        found: torch.Tensor = attention(q, q, q, **given)
        return found

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for n in (4, 5, 6, 4):
        torch.testing.assert_close(compiled(n), call(n))


def test_dynamic_sizes_compile_once() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(causal, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for s in (5, 9, 12):
        given = qkv(s=s, grad=False)
        torch.testing.assert_close(call(*given), theirs(*given), **CLOSE)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


def test_compiled_by_inductor() -> None:
    """A model around it, whose products and sums are inductor's."""
    torch._dynamo.reset()
    weight = torch.randn(16, 16, requires_grad=True)

    def model(attend: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ weight)
        return attend(y, x, y.relu()) * 2 + x

    x = torch.randn(2, 4, 9, 16, requires_grad=True)
    call = torch.compile(model, fullgraph=True)
    same_gradients(call(causal, x), model(theirs, x), [x, weight], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kind", ["ragged", "lse", "dropout", "bias", "lengths", "packed", "pages", "nested heads"]
)
def test_every_form_compiles(kind: str) -> None:
    torch._dynamo.reset()
    q = torch.randn(2, 9, 4, 16, requires_grad=True)
    tokens = torch.randn(18, 4, 16, requires_grad=True)
    bias = torch.randn(1, 4, 9, 9, requires_grad=True)
    lengths = torch.tensor([3, 9])
    offsets = torch.tensor([0, 5, 14])
    calls: dict[str, tuple[Any, list[torch.Tensor]]] = {
        "ragged": (
            lambda x: attention(
                x,
                x,
                x,
                layout="thd",
                cu_seqlens_q=offsets,
                cu_seqlens_kv=offsets,
                max_seqlen_q=9,
                max_seqlen_kv=9,
            ),
            [tokens],
        ),
        "lse": (lambda q: attention(q, q, q, return_lse=True)[1].sin(), [q]),
        "dropout": (lambda q: scaled_dot_product_attention(q, q, q, dropout_p=0.25), [q]),
        "bias": (lambda q, bias: attention(q, q, q, bias=bias, softcap=3.0), [q, bias]),
        "lengths": (lambda q: attention(q, q, q, seqlens_kv=lengths, mask="causal"), [q]),
        "packed": (lambda q: attention(torch.stack([q, q, q], 2), layout="bs3hd"), [q]),
        "pages": (
            lambda q: attention(
                q.detach(),
                q.detach(),
                q.detach(),
                page_table_k=torch.tensor([[0], [1]]),
                seqlens_kv=lengths,
            ),
            [],
        ),
        "nested heads": (
            lambda q: scaled_dot_product_attention(q[None], q[None], q[None]),
            [q],
        ),
    }
    call, wrt = calls[kind]
    given = wrt or [q]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.manual_seed(4)
    one = compiled(*given)
    torch.manual_seed(4)
    other = call(*given)
    if wrt:
        same_gradients(one, other, wrt)
    else:
        torch.testing.assert_close(one, other)


class _Model(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return causal(q, k, v)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_and_read_back(strict: bool) -> None:
    """What comes back runs, also with gradients that the export knew nothing of."""
    program = torch.export.export(_Model(), tuple(qkv(grad=False)), strict=strict)
    assert "torch.ops.lawson.attention_forward" in str(program.graph_module.code)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    given = qkv()
    same_gradients(again(*given), theirs(*given), given)


# ---- functorch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (2, 1, 0)])
def test_vmap_is_separate_calls(in_dims: Any) -> None:
    given = [
        torch.randn(2, 4, 9, 16) if dim is None else torch.randn(3, 2, 4, 9, 16).movedim(0, dim)
        for dim in in_dims
    ]
    mapped = torch.vmap(causal, in_dims=in_dims)(*given)
    torch.testing.assert_close(mapped, torch.vmap(theirs, in_dims=in_dims)(*given), **CLOSE)


def test_vmap_and_grad_in_any_order() -> None:
    given = qkv(3, grad=False)

    def loss(attend: Any) -> Any:
        return lambda *x: attend(*x).sin().sum()

    def grad(attend: Any) -> Any:
        return torch.func.grad(loss(attend), argnums=(0, 1, 2))

    def over(attend: Any) -> Any:
        return torch.func.grad(loss(torch.vmap(attend)), argnums=(0, 1, 2))

    torch.testing.assert_close(
        grad(causal)(*(x[0] for x in given)), grad(theirs)(*(x[0] for x in given)), **CLOSE
    )
    mapped = torch.vmap(grad(causal))(*given)
    torch.testing.assert_close(mapped, torch.vmap(grad(theirs))(*given), **CLOSE)
    torch.testing.assert_close(over(causal)(*given), over(theirs)(*given), **CLOSE)
    _, pull = torch.func.vjp(causal, *(x[0] for x in given))
    _, pull_theirs = torch.func.vjp(theirs, *(x[0] for x in given))
    do = torch.randn(2, 4, 9, 16)
    torch.testing.assert_close(pull(do), pull_theirs(do), **CLOSE)


@pytest.mark.parametrize("mapped", ["sink", "bias", "lengths", "dropout", "ragged", "nothing"])
def test_vmap_of_other_operands(mapped: str) -> None:
    q = torch.randn(3, 2, 9, 4, 16)
    sink, bias = torch.randn(3, 4), torch.randn(3, 1, 1, 9, 9)
    lengths = torch.tensor([[3, 9], [1, 2], [0, 5]])
    offsets = torch.tensor([[0, 3, 9], [0, 1, 2], [0, 8, 9]])

    def ragged(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return attention(
            x[0],
            x[0],
            x[0],
            layout="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=9,
            max_seqlen_kv=9,
        )

    calls: dict[str, tuple[Any, Any]] = {
        "sink": (lambda q, x: attention(q, q, q, sink=x), sink),
        "bias": (lambda q, x: attention(q, q, q, bias=x), bias),
        "lengths": (lambda q, x: attention(q, q, q, seqlens_kv=x), lengths),
        "dropout": (lambda q, x: attention(q + x, q, q, dropout_rate=0.5), torch.zeros(3)),
        "ragged": (ragged, offsets),
        "nothing": (lambda q, x: attention(q, q, q, sink=x), sink),
    }
    call, other = calls[mapped]
    if mapped == "nothing":
        assert torch.vmap(call)(q[:0], other[:0]).shape == (0, 2, 9, 4, 16)
        return
    if mapped == "dropout":
        torch.manual_seed(2)
        one = torch.vmap(call, randomness="same")(q, other)
        expected = []
        for x, y in zip(q, other, strict=True):
            torch.manual_seed(2)
            expected.append(call(x, y))
        assert torch.equal(one, torch.stack(expected))
        assert not torch.equal(torch.vmap(call, randomness="different")(q, other)[0], expected[0])
        return

    def loss(q: Any, x: Any) -> Any:
        return call(q, x).sin().sum()

    expected = [call(x, y) for x, y in zip(q, other, strict=True)]
    torch.testing.assert_close(torch.vmap(call)(q, other), torch.stack(expected), **CLOSE)
    found = torch.vmap(torch.func.grad(loss))(q, other)
    each = [torch.func.grad(loss)(x, y) for x, y in zip(q, other, strict=True)]
    torch.testing.assert_close(found, torch.stack(each), **CLOSE)


def test_batched_cotangents_are_separate_ones() -> None:
    given = qkv()
    do = torch.randn(3, 2, 4, 9, 16)
    found = torch.autograd.grad(causal(*given), given, do, is_grads_batched=True)
    o = theirs(*given)
    for n in range(3):
        for one, other in zip(
            found, torch.autograd.grad(o, given, do[n], retain_graph=True), strict=True
        ):
            torch.testing.assert_close(one[n], other, **CLOSE)


def test_forward_mode_is_refused() -> None:
    given = qkv(grad=False)
    with pytest.raises(lawson.UnsupportedError, match="first-order reverse-mode"):
        torch.func.jvp(causal, tuple(given), tuple(given))
    import torch.autograd.forward_ad as forward_ad

    with (
        forward_ad.dual_level(),
        pytest.raises(lawson.UnsupportedError, match="first-order reverse-mode"),
    ):
        causal(forward_ad.make_dual(given[0], given[0]), given[1], given[2])


# ---- what surrounds a call ---------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_draws_the_same_mask_again(reentrant: bool) -> None:
    given = qkv()

    def call(*x: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(*x, dropout_p=0.3)

    do = torch.randn(2, 4, 9, 16)
    torch.manual_seed(5)
    kept = call(*given)
    gradients = torch.autograd.grad(kept, given, do)
    torch.manual_seed(5)
    again = checkpoint(call, *given, use_reentrant=reentrant)
    again.backward(do)
    assert torch.equal(kept, again)
    for x, gradient in zip(given, gradients, strict=True):
        assert torch.equal(x.grad, gradient)  # type: ignore[arg-type]


def test_autocast_holds_for_every_form() -> None:
    q = torch.randn(2, 9, 4, 16, requires_grad=True)
    bias = torch.randn(1, 4, 9, 9)
    qkv = torch.randn(2, 9, 3, 4, 16)
    expected = attention(*[q.bfloat16()] * 3, bias=bias.bfloat16())
    cache, new = torch.zeros(2, 9, 4, 16), torch.ones(2, 1, 4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = attention(q, q, q, bias=bias)
        assert attention(qkv, layout="bs3hd").dtype == torch.bfloat16
        more: Any = {"k_new": new, "v_new": new, "seqlens_kv": torch.tensor([9, 4])}
        with torch.no_grad():  # what is written to has a dtype already
            written = attention(q[:, :1], cache, cache.clone(), **more)
    assert torch.equal(o, expected) and o.dtype == torch.bfloat16
    assert written.dtype == torch.float32 and bool((cache[0, 8] == 1).all())
    o.float().sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_is_that_of_torchs_own(compiled: bool) -> None:
    torch._dynamo.reset()
    given = qkv()
    mask = torch.randn(9, 9)

    def call(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return scaled_dot_product_attention(q, k, v, mask)

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    o = run(*given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.scaled_dot_product_attention(*given, mask)
    assert o.dtype == expected.dtype == torch.bfloat16
    # Two roundings to bf16 of values of a few units.
    torch.testing.assert_close(o, expected, rtol=2e-2, atol=2e-2)
    o.float().sum().backward()
    assert given[0].grad is not None and given[0].grad.dtype == torch.float32


def test_deterministic_algorithms_are_respected() -> None:
    given = qkv()

    def step(*x: torch.Tensor) -> None:
        causal(*x).sum().backward()

    def asked() -> set[bool]:
        return {
            bool(json.loads(one.spec)["deterministic"])
            for one in lawson.torch.inspect(step)(*given)
        }

    assert asked() == {False}
    torch.use_deterministic_algorithms(True)
    try:
        assert asked() == {True}
        from lawson.torch import _sdpa

        causal(*given)
        more = ((-1, -1), 0.0, False, True, "cpu", None, "off")
        form = _sdpa.form_for(True, None, False, *more)
        assert form.forward.setup.deterministic and form.pair.forward._call.prepared()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_inspect_names_what_runs(engine: str) -> None:
    """The plan that is told is the one that the call keeps, forward and backward."""
    q = torch.randn(1, 2, 7, 24, requires_grad=True)

    def step(q: torch.Tensor) -> None:
        scaled_dot_product_attention(q, q, q, scale=0.21, engine=engine).sum().backward()

    forward, backward = lawson.torch.inspect(step)(q)
    assert forward.name == "attention.forward" and backward.name == "attention.backward"
    assert forward.engine == backward.engine == engine
    assert forward.verdict.supported and '"pass": "training"' in forward.spec
    step(q)
    from lawson.torch import _sdpa

    form = _sdpa.form_for(False, 0.21, False, (-1, -1), 0.0, False, False, engine, None, "off")
    for told, runner in ((forward, form.pair.forward), (backward, form.pair.backward)):
        (prepared,) = runner._call.prepared()
        assert (prepared.plan_id, prepared.engine) == (told.plan_id, engine)


def test_counters_tell_builds_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new process: one build for each pass, none for calls of the same form; all told."""
    monkeypatch.setenv("LAWSON_CACHE_DEBUG", "2")
    out = in_new_process(
        """
import json, os, sys
os.dup2(1, 2)  # where events are told
import torch, lawson
from lawson.torch import attention, scaled_dot_product_attention

def builds():
    totals = json.loads(lawson._core.stats())["totals"]
    return totals["build_plans"], totals["execute"]

counts = []
x = torch.randn(2, 4, 9, 16, requires_grad=True)
for _ in range(3):
    scaled_dot_product_attention(x, x, x).sum().backward()
    counts.append(builds())
attention(x, x, x, layout="bhsd").sum().backward()  # the same plans
counts.append(builds())
y = torch.randn(2, 4, 10, 16)
scaled_dot_product_attention(y, y, y)
counts.append(builds())
print(json.dumps(counts))
"""
    )
    lines = out.splitlines()
    (counts,) = [json.loads(line) for line in lines if line.startswith("[[")]
    assert counts == [[2, 2], [2, 4], [2, 6], [2, 8], [3, 9]]
    told = [line.split(" dev=- ")[1].split()[:3] for line in lines if " dev=- " in line]
    for event, passes in (("BUILD_PLANS", (2, 1)), ("EXECUTE", (5, 4))):
        for which, count in zip(("forward", "backward"), passes, strict=True):
            assert told.count([event, "engine=cpu", f"pass={which}"]) == count, event
