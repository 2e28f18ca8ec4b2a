"""lawson._torch: what a call of a plan on torch's tensors gives, keeps and refuses."""

from __future__ import annotations

import ast
import gc
import itertools
import json
import math
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attention_oracle as oracle
from lawson import InvalidArgumentError, UnavailableError, _core
from new_process import in_new_process

torch = pytest.importorskip("torch")

from torch import Tensor

from lawson import _torch

ROOT = Path(__file__).resolve().parents[2]
CPU = _core.Device("cpu")
DTYPES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.int32: "i32"}
Strides = Sequence[int] | None


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides: tuple[int, ...] = torch.empty(tuple(shape), device="meta").stride()
    return strides


class Fusion:
    """relu(x + s · y) through one Call, with what `describe` was asked."""

    def __init__(
        self,
        engine: str = "cpu",
        strides: Strides = None,
        copies: Sequence[int] = (),
        scale: float = 1.0,
        capacity: int = 1024,
    ) -> None:
        self.engine, self.strides, self.copies, self.scale = engine, strides, copies, scale
        self.asked: list[tuple[Any, ...]] = []
        self.call = _torch.Call(self.describe, capacity)

    @staticmethod
    def alignment(tensor: Tensor) -> int:
        """Bytes: what the plan is promised."""
        return 16

    def describe(self, operands: tuple[Tensor | None, ...]) -> _torch.Prepared:
        self.asked.append(tuple(None if x is None else tuple(x.shape) for x in operands))
        x, y = operands
        assert x is not None and y is not None
        dtype = DTYPES[x.dtype]
        inputs = [
            {
                "name": name,
                "dtype": dtype,
                "shape": list(each.shape),
                "strides": list(contiguous(each.shape) if index in self.copies else each.stride()),
                "alignment": self.alignment(each) if index not in self.copies else 16,
            }
            for index, (name, each) in enumerate((("x", x), ("y", y)))
        ]
        strides = contiguous(x.shape) if self.strides is None else self.strides
        graph = {
            "lawson": 1,
            "kind": "graph",
            "name": "test",
            "inputs": [
                *inputs,
                {"name": "s", "dtype": "f64", "shape": [1] * x.dim(), "by_value": True},
            ],
            "ops": [
                {"op": "convert", "in": ["s"], "out": "t", "dtype": dtype},
                {"op": "mul", "in": ["y", "t"], "out": "m"},
                {"op": "add", "in": ["x", "m"], "out": "a"},
                {"op": "relu", "in": ["a"], "out": "r"},
            ],
            "outputs": [{"name": "r", "strides": list(strides)}],
        }
        fusion = _core.fuse(_core.Graph.from_json(json.dumps(graph)), CPU, "require", [self.engine])
        return _torch.Prepared.fusion(
            fusion,
            [0, 1],
            [(tuple(x.shape), tuple(strides), dtype)],
            {"s": self.scale},
            self.copies,
        )

    def __call__(self, *operands: Tensor | None) -> Tensor:
        (result,) = self.call(*operands)
        return result

    def check(self, x: Tensor, y: Tensor) -> Tensor:
        """Against f64: three rounded operations, of a rounded scale."""
        got = self(x, y)
        a, b = x.double(), self.scale * y.double()
        unit = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}[x.dtype]
        bound = 5 * unit * (a.abs() + b.abs())
        assert got.dtype == x.dtype and got.shape == x.shape
        assert bool(((got.double() - (a + b).relu()).abs() <= bound).all())
        return got


class Attention:
    """A pass of attention on `[b, h, s, d]` through one Call."""

    def __init__(
        self,
        passes: str = "forward",
        engine: str = "cpu",
        stats: bool = False,
        strides: Mapping[str, Sequence[int]] | None = None,
        **fields: Any,
    ) -> None:
        self.passes, self.engine, self.stats = passes, engine, stats
        self.strides, self.fields = strides or {}, fields
        self.asked = 0
        self.names = ["q", "k", "v"] + (["o", "do", "stats"] if passes == "backward" else [])
        self.outs = ["dq", "dk", "dv"] if passes == "backward" else ["o"] + ["stats"] * stats
        self.call = _torch.Call(self.describe)

    def spec(self, operands: tuple[Tensor | None, ...]) -> str:
        given = {n: x for n, x in zip(self.names, operands, strict=False) if x is not None}
        q, k, v = (given[name] for name in ("q", "k", "v"))
        strides = {n: list(x.stride()) for n, x in given.items() if x.dim() == 4}
        return json.dumps(
            {
                "lawson": 1,
                "kind": "attention",
                "pass": self.passes,
                "dtype": DTYPES[q.dtype],
                "batch": q.shape[0],
                "heads": q.shape[1],
                "kv_heads": k.shape[1],
                "seqlen_q": q.shape[2],
                "seqlen_kv": k.shape[2],
                "head_dim_qk": q.shape[3],
                "head_dim_v": v.shape[3],
                "layout": "bhsd",
                "strides": {**strides, **{n: list(s) for n, s in self.strides.items()}},
                "return_stats": self.stats or self.passes == "backward",
                **self.fields,
            }
        )

    def describe(self, operands: tuple[Tensor | None, ...]) -> _torch.Prepared:
        self.asked += 1
        q, k, v = operands[:3]
        assert q is not None and k is not None and v is not None
        shapes = {
            "o": (*q.shape[:3], v.shape[3]),
            "stats": tuple(q.shape[:3]),
            "dq": tuple(q.shape),
            "dk": tuple(k.shape),
            "dv": tuple(v.shape),
        }
        results = [
            (
                shapes[n],
                self.strides.get(n, contiguous(shapes[n])),
                "f32" if n == "stats" else DTYPES[q.dtype],
            )
            for n in self.outs
        ]
        options = _core.Options(engine=self.engine)
        return _torch.Prepared.attention(
            self.spec(operands), self.passes, self.names, self.outs, results, "cpu", options
        )

    def __call__(self, *operands: Tensor | None) -> tuple[Tensor, ...]:
        return self.call(*operands)


def expected(q: Tensor, k: Tensor, v: Tensor) -> oracle.Attention:
    return oracle.Attention(
        q.double().numpy(),
        k.double().numpy(),
        v.double().numpy(),
        see=np.ones((1, 1, q.shape[2], k.shape[2]), bool),
        scale=1 / math.sqrt(q.shape[3]),
    )


def draw(seed: int, *shapes: Sequence[int], dtype: Any = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tuple(s), generator=generator, dtype=dtype or torch.float32) for s in shapes
    ]


def counted(name: str) -> int:
    return int(json.loads(_core.stats())["totals"][name])


# ---- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_fusion_is_right(engine: str, dtype: Any) -> None:
    fusion = Fusion(engine, scale=-1.5)
    for shape in ((3, 5), (2, 3, 7), (1,), ()):
        x, y = (z.to(dtype) for z in draw(1, shape, shape, dtype=torch.float64))
        got = fusion.check(x, y)
        prepared = fusion.call.prepared()[0]
        assert (prepared.engine, prepared.device) == (engine, "cpu")
        assert prepared.plan_id == prepared.loaded.plan.id
        assert got.is_contiguous() and not got.requires_grad


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_attention_is_right_forward_and_backward(engine: str) -> None:
    q, k, v, do = draw(2, (2, 4, 9, 16), (2, 2, 7, 16), (2, 2, 7, 24), (2, 4, 9, 24))
    forward = Attention(engine=engine, stats=True)
    o, stats = forward(q, k, v)
    want = expected(q, k, v)
    oracle.check("o", o.numpy(), want.o, want.bound(np.float32))
    oracle.check("stats", stats.numpy(), want.lse, want.lse_bound())
    backward = Attention("backward", engine)
    gradients = want.gradients(do.numpy())
    for name, got in zip("qkv", backward(q, k, v, o, do, stats), strict=True):
        oracle.check(f"d{name}", got.numpy(), *gradients[name])
    for attention, operands in ((forward, (q, k, v)), (backward, (q, k, v, o, do, stats))):
        (prepared,) = attention.call.prepared()
        plan = _core.attention_plan(
            attention.spec(operands), attention.passes, CPU, _core.Options(engine=engine)
        )
        assert (prepared.engine, prepared.plan_id) == (engine, plan.id)
        assert prepared.workspace_size == plan.workspace_size


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_operands_of_any_strides(engine: str) -> None:
    base = draw(3, (2, 9, 4, 16), (2, 9, 3, 4, 16), (4, 1, 9, 32))
    views: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.transpose(1, 2),  # [b, s, h, d] in memory
        lambda x: x.permute(0, 2, 1, 3)[:, :, ::2],  # every other row
        lambda x: x[:, 4:5].transpose(1, 2).expand(2, 4, 9, 16),  # one row for all
        lambda x: x[:1].transpose(1, 2).expand(2, 4, 9, 16),  # one sequence for all
    ]
    for view in views:
        attention = Attention(engine=engine)
        q, k, v = view(base[0]), base[1][:, :, 0].transpose(1, 2), view(base[0] + 1)
        if q.shape[2] != 9:
            k = k[:, :, : q.shape[2]]
        (o,) = attention(q, k, v)
        want = expected(q, k, v)
        oracle.check("o", o.numpy(), want.o, want.bound(np.float32))
        assert attention.call.prepared()[0].engine == engine
    x = draw(4, (6, 12))[0]
    for each in (x.t(), x[:, ::2], x[1:2].expand(6, 12), x[:, :1].expand(6, 12), x[2]):
        Fusion(engine).check(each, each)
    Fusion(engine).check(x, x[1:2].expand(6, 12))


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_outputs_have_the_strides_that_were_asked(engine: str) -> None:
    q, k, v = draw(5, *[(2, 4, 9, 16)] * 3)
    strides = (9 * 4 * 16, 16, 4 * 16, 1)
    (o,) = Attention(engine=engine, strides={"o": strides})(q, k, v)
    assert o.shape == (2, 4, 9, 16) and o.stride() == strides
    want = expected(q, k, v)
    oracle.check("o", o.numpy(), want.o, want.bound(np.float32))
    x, y = draw(6, (5, 7), (5, 7))
    got = Fusion(engine, strides=(1, 5)).check(x, y)
    assert got.stride() == (1, 5)
    with_gaps = Fusion(engine, strides=(16, 1)).check(x, y)
    assert with_gaps.stride() == (16, 1)


def test_no_elements() -> None:
    q, k, v = draw(7, *[(0, 4, 9, 16)] * 3)
    (o,) = Attention()(q, k, v)
    assert o.shape == (0, 4, 9, 16) and o.dtype == torch.float32
    with pytest.raises(InvalidArgumentError, match="operand 1.*'k'.*the plan is for"):
        Attention()(q, draw(7, (1, 4, 9, 16))[0], v)


def test_ragged_tensors_with_fewer_tokens_than_the_plan_has_room_for() -> None:
    heads, depth = 2, 8
    asked = 0

    def describe(operands: tuple[Tensor | None, ...]) -> _torch.Prepared:
        nonlocal asked
        asked += 1
        q, k, _, offsets, _ = operands
        assert q is not None and k is not None and offsets is not None
        spec = {
            "lawson": 1,
            "kind": "attention",
            "pass": "forward",
            "dtype": "f32",
            "batch": len(offsets) - 1,
            "heads": heads,
            "seqlen_q": 8,
            "seqlen_kv": 8,
            "head_dim_qk": depth,
            "layout": "thd",
            "total_q": len(q),
            "total_kv": len(k),
            "mask": "padding",
        }
        return _torch.Prepared.attention(
            json.dumps(spec),
            "forward",
            ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv"],
            ["o"],
            [(tuple(q.shape), q.stride(), "f32")],
            "cpu",
            values={"sequences": len(offsets) - 1},
        )

    call = _torch.Call(describe)
    for lengths in ([3, 8, 1], [8, 8], [1], [5, 0, 2, 8, 4]):
        ends = np.cumsum([0, *lengths])
        q, k, v = draw(len(lengths), *[(int(ends[-1]), heads, depth)] * 3)
        offsets = torch.tensor(ends, dtype=torch.int32)
        (o,) = call(q, k, v, offsets, offsets)
        assert o.shape == q.shape
        for start, end in itertools.pairwise(ends):
            if start == end:
                continue
            one = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
            want = expected(*one)
            got = o[start:end].transpose(0, 1)[None]
            oracle.check("o", got.numpy(), want.o, want.bound(np.float32))
    assert asked == 4 and len({p.plan_id for p in call.prepared()}) == 1  # one bucket
    last = call.prepared()[0]
    fixed = _torch.Call(lambda operands: last)
    assert torch.equal(fixed(q, k, v, offsets, offsets)[0], o)
    with pytest.raises(InvalidArgumentError, match=r"operand 0 \('q'\) is f32\[18,2,8\]"):
        fixed(q[:-1], k, v, offsets, offsets)


def test_what_is_written_in_place_is_returned_itself() -> None:
    def describe(operands: tuple[Tensor | None, ...]) -> _torch.Prepared:
        q = operands[0]
        assert q is not None
        spec = {
            "lawson": 1,
            "kind": "attention",
            "pass": "forward",
            "dtype": "f32",
            "batch": 2,
            "heads": 2,
            "seqlen_q": 1,
            "seqlen_kv": 8,
            "head_dim_qk": 8,
            "layout": "bshd",
            "paged": {"page_size_k": 4, "page_size_v": 4, "pages": 4},
            "append": 1,
            "mask": "padding",
        }
        lengths = ["seqlen_q", "seqlen_kv", "page_table_k", "page_table_v"]
        names = ["q", "k", "v", *lengths, "k_new", "v_new"]
        return _torch.Prepared.attention(
            json.dumps(spec),
            "forward",
            names,
            ["o", "k", "v"],
            [(tuple(q.shape), q.stride(), "f32"), 1, 2],
            "cpu",
        )

    q, k, v, k_new, v_new = draw(8, (2, 1, 2, 8), *[(4, 4, 2, 8)] * 2, *[(2, 1, 2, 8)] * 2)
    pages = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    # With the new token.
    lengths = torch.tensor([6, 3], dtype=torch.int32)
    ones = torch.ones(2, dtype=torch.int32)
    before = k.clone(), v.clone()
    call = _torch.Call(describe)
    o, k_out, v_out = call(q, k, v, ones, lengths, pages, pages, k_new, v_new)
    assert k_out is k and v_out is v and k._version == 1 and v._version == 1
    for cache, old, new in ((k, before[0], k_new), (v, before[1], v_new)):
        old[0, 1], old[1, 2] = new[0, 0], new[1, 0]  # tokens 5 and 2: pages 0 and 1
        assert torch.equal(cache, old)
    for b, length in enumerate(lengths.tolist()):
        keys, values = (
            x[pages[b].long()].reshape(1, 8, 2, 8)[:, :length].transpose(1, 2) for x in (k, v)
        )
        want = expected(q[b : b + 1].transpose(1, 2), keys, values)
        got = o[b : b + 1].transpose(1, 2)
        oracle.check("o", got.numpy(), want.o, want.bound(np.float32))


def test_gradients_are_not_recorded() -> None:
    x, y = (z.requires_grad_() for z in draw(9, (3, 4), (3, 4)))
    fusion = Fusion()
    got = fusion(x, torch.nn.Parameter(y.detach()))
    assert not got.requires_grad and got.grad_fn is None
    with torch.inference_mode():
        assert fusion(x, y).is_inference()
    assert len(fusion.asked) == 1


# ---- what is kept -------------------------------------------------------------------------------


def test_one_description_for_each_form_of_operands() -> None:
    fusion = Fusion()
    x, y = draw(10, (4, 6), (4, 6))
    for _ in range(3):
        fusion.check(x, y)
        fusion.check(x.clone(), y.clone())
    assert len(fusion.asked) == 1
    before = counted("build_plans"), counted("execute")
    fusion.check(x, y)
    assert (counted("build_plans"), counted("execute")) == (before[0], before[1] + 1)
    forms: list[tuple[Tensor, Tensor]] = [
        (x[:3], y[:3]),  # shape
        (x.t().contiguous().t(), y),  # strides
        (x.double(), y.double()),  # dtype
        (x[None], y[None]),  # rank
        (x, x[:1].expand(4, 6)),
    ]
    for number, (a, b) in enumerate(forms):
        for _ in range(2):
            fusion.check(a, b)
        assert len(fusion.asked) == 2 + number
    kept = fusion.call.prepared()
    assert len(kept) == 1 + len(forms)
    fusion.check(x, y)
    assert fusion.call.prepared() == [kept[-1], *kept[:-1]]  # the last used is first
    fusion.call.clear()
    fusion.check(x, y)
    assert len(fusion.asked) == 2 + len(forms) and len(fusion.call.prepared()) == 1


def test_alignment_is_part_of_the_form() -> None:
    memory = draw(11, (65,))[0]
    aligned, odd = memory[:64].view(8, 8), memory[1:].view(8, 8)
    assert aligned.data_ptr() % 16 == 0
    fusion = Fusion()
    fusion.check(aligned, aligned)
    with pytest.raises(InvalidArgumentError, match=r"operand 1 \('y'\) is at an address.*copy it"):
        fusion(aligned, odd)
    assert len(fusion.asked) == 2 and len(fusion.call.prepared()) == 1
    copying = Fusion(copies=[1])
    copying.check(aligned, odd)
    copying.check(aligned, odd.t())
    assert copying.asked == [((8, 8), (8, 8))] * 2


def test_a_plan_gets_the_alignment_that_it_was_promised() -> None:
    class Promising(Fusion):
        @staticmethod
        def alignment(tensor: Tensor) -> int:
            address = tensor.data_ptr()
            return math.gcd(address, 16)

    fusion = Promising()
    memory = draw(11, (80,))[0]
    assert memory.data_ptr() % 32 == 0
    whole = memory[:64].clone()
    for offset, descriptions in ((1, 1), (3, 1), (2, 2), (6, 2), (4, 3), (8, 3), (5, 3)):
        fusion.check(whole, memory[offset : offset + 64])
        assert len(fusion.asked) == descriptions, offset
    prepared = Promising().describe((memory[4:8], memory[2:6]))
    call = _torch.Call(lambda operands: prepared)
    call(memory[:4], memory[6:10])
    with pytest.raises(InvalidArgumentError, match=r"operand 1 \('y'\).*no multiple of 8 bytes"):
        call(memory[:4], memory[1:5])


def test_none_is_a_form_of_its_own() -> None:
    asked: list[int] = []

    def describe(operands: tuple[Tensor | None, ...]) -> _torch.Prepared:
        given = [i for i, x in enumerate(operands) if x is not None]
        asked.extend(given)
        return Fusion().describe(tuple(operands[i] for i in given[:2]))

    x, y = draw(12, (3, 4), (3, 4))
    call = _torch.Call(describe)
    call(x, y, None)
    with pytest.raises(InvalidArgumentError, match=r"operand 0 \('x'\) is None; expected a tensor"):
        call(None, x, y)
    assert asked == [0, 1, 1, 2]


def test_the_least_recently_used_go() -> None:
    fusion = Fusion(capacity=3)
    assert fusion.call.capacity == 3
    tensors = [draw(n, (n, 4), (n, 4)) for n in range(1, 6)]
    for x, y in tensors[:3]:
        fusion.check(x, y)
    fusion.check(*tensors[0])
    fusion.check(*tensors[3])  # in place of the second
    fusion.check(*tensors[0])
    fusion.check(*tensors[2])
    assert [shape[0][0] for shape in fusion.asked] == [1, 2, 3, 4]
    fusion.check(*tensors[1])
    assert len(fusion.asked) == 5 and len(fusion.call.prepared()) == 3


def resident() -> int:
    """Bytes."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * 4096


def test_memory_stays_what_it_is() -> None:
    # The smallest of Python's objects has 16 bytes, and a leaked tensor, tuple or Prepared more:
    # 400,000 calls that leak one take 6.4 MB, 20,000 descriptions that leak their plan's 1 KB 20.
    allowed = 6_000_000
    x, y = draw(13, (4, 4), (4, 4))
    fusion = Fusion(capacity=4)
    for _ in range(1000):
        fusion(x, y)
    before = resident()
    for _ in range(400_000):
        fusion(x, y)
    assert resident() - before < allowed
    tensors = [draw(n, (1, 1, n, 8), (1, 1, 3, 8), (1, 1, 3, 8)) for n in range(1, 21)]
    attention = Attention()
    call = _torch.Call(attention.describe, 4)  # of plans that the process has
    for _ in range(50):
        for each in tensors:
            call(*each)
    before = resident()
    for _ in range(1000):
        for each in tensors:
            call(*each)
    assert attention.asked == 21_000
    assert resident() - before < allowed


def test_operands_and_results_are_held_by_nobody() -> None:
    fusion = Fusion(copies=[1])
    x, y = draw(14, (3, 4), (3, 4))
    counts = sys.getrefcount(x), sys.getrefcount(y)
    result = fusion(x, y)
    for _ in range(100):
        fusion(x, y)
    assert (sys.getrefcount(x), sys.getrefcount(y)) == counts
    assert sys.getrefcount(result) == 2
    gone = weakref.ref(result)
    del result
    assert gone() is None
    outputs = fusion.call(x, y)
    assert type(outputs) is tuple and sys.getrefcount(outputs) == 2


def test_a_call_that_refers_to_itself_is_collected() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.call = _torch.Call(self.describe)

        def describe(self, operands: tuple[Tensor | None, ...]) -> _torch.Prepared:
            return Fusion().describe(operands)

    cycle = Cycle()
    cycle.call(*draw(15, (2, 2), (2, 2)))
    gone = weakref.ref(cycle), weakref.ref(cycle.call), weakref.ref(cycle.call.prepared()[0])
    del cycle
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def test_eight_threads_use_one_call() -> None:
    fusion, attention = Fusion(capacity=4), Attention()
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        try:
            start.wait()
            for turn in range(60):
                rows = 1 + (seed + turn) % 6
                fusion.check(*draw(seed * 100 + turn, (rows, 8), (rows, 8)))
                q, k, v = draw(seed + turn, *[(1, 2, rows, 8)] * 3)
                (o,) = attention(q, k, v)
                want = expected(q, k, v)
                oracle.check("o", o.numpy(), want.o, want.bound(np.float32))
        except BaseException as failure:  # noqa: BLE001 - told to the test
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert len(fusion.call.prepared()) == 4 and len(attention.call.prepared()) == 6


# ---- what is refused ----------------------------------------------------------------------------


def test_what_describe_raises_comes_through_and_leaves_nothing() -> None:
    class Odd(Exception):
        pass

    odd = Odd()
    answers: list[Any] = [odd, None, "next"]

    def describe(operands: tuple[Tensor | None, ...]) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Fusion().describe(operands) if answer == "next" else answer

    call = _torch.Call(describe)
    x, y = draw(16, (3, 4), (3, 4))
    counts = sys.getrefcount(x), sys.getrefcount(y)
    with pytest.raises(Odd) as raised:
        call(x, y)
    assert raised.value is odd
    del raised
    odd.__traceback__ = None
    with pytest.raises(
        TypeError, match=r"returned a NoneType; expected a lawson\._torch\.Prepared"
    ):
        call(x, y)
    assert call.prepared() == []
    call(x, y)
    assert answers == [] and len(call.prepared()) == 1
    gc.collect()
    assert (sys.getrefcount(x), sys.getrefcount(y)) == counts


def test_a_describe_that_changes_an_operand_is_refused() -> None:
    def describe(operands: tuple[Tensor | None, ...]) -> _torch.Prepared:
        prepared = Fusion().describe(operands)
        assert operands[0] is not None
        operands[0].resize_(2, 2)
        return prepared

    call = _torch.Call(describe)
    with pytest.raises(InvalidArgumentError, match="describe changed an operand's shape"):
        call(*draw(17, (3, 4), (3, 4)))
    assert call.prepared() == []


def _fake() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake: Tensor = torch.zeros(3, 4)
    return fake


def _freed() -> Tensor:
    freed: Tensor = torch.zeros(3, 4)
    freed.untyped_storage().resize_(0)
    return freed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: 3, r"operand 1 is of type int; expected a torch\.Tensor.*or None"),
        (lambda: np.zeros((3, 4)), r"operand 1 is of type ndarray; expected a torch\.Tensor"),
        (_fake, "operand 1 is of type FakeTensor; expected"),
        (lambda: torch.zeros(3, 4).to_sparse(), "operand 1 has no memory.*expected a strided"),
        (lambda: torch.zeros(3, 4, device="meta"), "operand 1 has no memory.*meta"),
        (lambda: torch._neg_view(torch.zeros(3, 4)), r"operand 1 is a lazily negated.*resolve_neg"),
        (lambda: torch._efficientzerotensor((3, 4)), "operand 1 has elements and no memory"),
        (_freed, "operand 1 has elements and no memory: its storage was resized"),
        (lambda: torch.zeros([1] * 9), "operand 1 has 9 dims; expected at most 8"),
    ],
)
def test_an_operand_that_is_no_tensor_in_memory(make: Callable[[], Any], message: str) -> None:
    fusion = Fusion()
    with pytest.raises(InvalidArgumentError, match=message) as raised:
        fusion.call(torch.zeros(3, 4), make())
    assert "\n" not in str(raised.value)  # no stack trace of torch's
    assert fusion.asked == []


def test_a_tensor_inside_a_transform() -> None:
    def inside(x: Tensor) -> Tensor:
        with pytest.raises(InvalidArgumentError, match=r"outside torch\.func's transforms"):
            Fusion()(x, x)
        return x

    torch.func.vmap(inside)(torch.zeros(3, 4))


def test_operands_that_the_plan_is_not_for() -> None:
    prepared = Fusion().describe((torch.zeros(3, 4), torch.zeros(3, 4)))
    call = _torch.Call(lambda operands: prepared)
    x = torch.zeros(3, 4)
    call(x, x)
    wrong = r"operand 1 \('y'\) is {}; the plan is for f32\[3,4\] with strides \[4,1\]"
    for y, what in (
        (torch.zeros(3, 5), r"f32\[3,5\] with strides \[5,1\]"),
        (torch.zeros(3, 4, dtype=torch.int16), r"a dtype that Lawson has not\[3,4\] with.*"),
        (torch.zeros(3, 4, dtype=torch.float64), r"f64\[3,4\] with strides \[4,1\]"),
        (torch.zeros(4, 3).t(), r"f32\[3,4\] with strides \[1,3\]"),
    ):
        with pytest.raises(InvalidArgumentError, match=wrong.format(what)):
            call(x, y)
    with pytest.raises(InvalidArgumentError, match=r"operand 1 \('y'\) is missing: there are 1"):
        call(x)
    with pytest.raises(InvalidArgumentError, match="every operand is None"):
        call(None, None)
    with pytest.raises(InvalidArgumentError, match="there are 65 operands; expected at most 64"):
        call(*[x] * 65)
    with pytest.raises(TypeError, match="operands by position alone"):
        call(x, y=x)  # type: ignore[call-arg]
    assert len(call.prepared()) == 1


def test_bad_arguments_of_call() -> None:
    with pytest.raises(TypeError, match="describe is a int; expected a callable"):
        _torch.Call(3)  # type: ignore[arg-type]
    with pytest.raises(
        InvalidArgumentError, match="capacity: 0 is not allowed; expected 1 or more"
    ):
        _torch.Call(lambda operands: None, 0)  # type: ignore[arg-type, return-value]


def test_bad_arguments_of_prepared() -> None:
    q = torch.zeros(1, 1, 2, 8)
    spec = Attention().spec((q, q, q))
    form = ((1, 1, 2, 8), (16, 16, 8, 1), "f32")

    def attention(**changes: Any) -> _torch.Prepared:
        arguments: dict[str, Any] = {
            "spec": spec,
            "pass_": "forward",
            "names": ["q", "k", "v"],
            "outs": ["o"],
            "results": [form],
            "device": "cpu",
            **changes,
        }
        return _torch.Prepared.attention(**arguments)

    attention()
    for changes, message in (
        ({"pass_": "both"}, "pass: 'both' is not allowed; expected forward or backward"),
        ({"names": ["q", "k", "w"]}, "names: the plan of this spec reads no 'w'"),
        ({"outs": ["p"]}, "outs: the plan of this spec writes no 'p'"),
        ({"names": ["q", "k"]}, "tensor 'v' is not set"),
        ({"results": []}, "there are 0 results and 1 outs"),
        ({"results": [3.0]}, r"results\[0\] is 3\.0; expected \(shape, strides, dtype\)"),
        ({"results": [((1,), (1, 1), "f32")]}, r"results\[0\].*expected one stride for each dim"),
        ({"results": [(*form[:2], "float32")]}, r"results\[0\]: 'float32' is no dtype.*f64, f32"),
        ({"device": "tpu"}, "device: 'tpu' is not allowed; expected cpu, cuda or cuda:N"),
        ({"values": {"sale": 1.0}}, "values: 'sale' is not known; expected scale or sequences"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            attention(**changes)
    with pytest.raises(UnavailableError, match="'cudnn' runs on GPUs, and 'cpu' is the host"):
        attention(options=_core.Options(engine="cudnn"))
    call = _torch.Call(lambda operands: attention(results=[((1, 1, 2, 8), (16, 8, 8, 1), "f64")]))
    with pytest.raises(InvalidArgumentError, match="result 'o' is f64.*the plan writes f32"):
        call(q, q, q)
    fusion = Fusion().describe((q, q)).loaded
    result = [(tuple(q.shape), q.stride(), "f32")]
    with pytest.raises(InvalidArgumentError, match="1 operands and 1 results; the graph has 2 inp"):
        _torch.Prepared.fusion(fusion, [0], result, {"s": 1.0})
    with pytest.raises(InvalidArgumentError, match="input 's' is by value.*'values' has none"):
        _torch.Prepared.fusion(fusion, [0, 1], result)


# ---- the table ----------------------------------------------------------------------------------

_WITHOUT = """
import torch
name = "__dlpack_c_exchange_api__"
capsule = torch.Tensor.__dict__[name]
delattr(torch.Tensor, name)
"""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("", "has none"),
        ("torch.Tensor.__c_dlpack_exchange_api__ = 1", "has another kind of it"),
    ],
)
def test_a_torch_without_the_table(change: str, found: str) -> None:
    code = f"""
{_WITHOUT}
{change}
from lawson import UnavailableError
try:
    import lawson.torch
except UnavailableError as error:
    print(error)
"""
    said = in_new_process(code)
    assert f"and torch {torch.__version__} {found}; install torch 2.11 or newer" in said


def test_the_table_under_its_former_name() -> None:
    said = in_new_process(
        _WITHOUT
        + "torch.Tensor.__c_dlpack_exchange_api__ = capsule\n"
        + "from lawson import _torch\n_torch.connect()\nprint('found')"
    )
    assert said == "found\n"


def test_a_torch_without_its_fast_ways_to_make_tensors() -> None:
    said = in_new_process(
        """
import sys
import torch
del torch._C._dynamo.guards._empty_strided_cpu, torch._C._dynamo.guards._empty_strided_cuda
sys.path.insert(0, sys.argv[1])
from test_torch_core import Fusion, draw
x, y = draw(6, (5, 7), (5, 7))
print(Fusion(strides=(1, 5)).check(x, y).stride())
x, y = draw(6, (), ())
print(Fusion().check(x, y).stride())
""",
        str(Path(__file__).parent),
    )
    assert said == "(1, 5)\n()\n"


class Asked:
    """What `quick` asks for; each form runs the first tensor's negative."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def __call__(self, deterministic: bool, *static: Any) -> Any:
        self.asked.append((deterministic, *static))
        if static[0] == "other":
            return None

        class Form:
            run = staticmethod(lambda q, k, v: (-q, k))
            is_single = static[0] == "single"

        return Form()


def test_the_short_way_asks_once_for_what_is_the_same() -> None:
    asked = Asked()
    quick = _torch.quick(asked)
    q, k, v = (torch.randn(3) for _ in range(3))
    for _ in range(3):
        assert torch.equal(quick(q, k, v, "single"), -q)
        found = quick(q, k, v, "both", 1.5)
        assert torch.equal(found[0], -q) and found[1] is k
        assert quick(q, k, v, "other") is NotImplemented
    assert asked.asked == [(False, "single"), (False, "both", 1.5), (False, "other")]
    torch.use_deterministic_algorithms(True)
    try:
        quick(q, k, v, "single")
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked.asked[3:] == [(True, "single")]
    assert type(quick(torch.nn.Parameter(q), k, v, "single")).__qualname__.endswith("Form")
    with torch.no_grad():
        assert torch.equal(quick(torch.nn.Parameter(q), k, v, "single"), -q)
    # 1 is not True, and what may change is asked for each time.
    for other in (1, True, 1.0, [2], [2]):
        quick(q, k, v, "single", other)
    assert len(asked.asked) == 9
    for number in range(200):  # more than are kept
        quick(q, k, v, "single", number + 1000)
    assert torch.equal(quick(q, k, v, "single"), -q)


def test_the_short_way_is_not_for_what_is_watched() -> None:
    asked = Asked()
    quick = _torch.quick(asked)
    q, k, v = (torch.randn(3) for _ in range(3))
    seen: list[Any] = []

    def look(x: Tensor) -> Tensor:
        seen.append(quick(q, k, v, "single"))
        return x

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return func(*args, **(kwargs or {}))

    with Mode():
        look(q)
    with torch.overrides.TorchFunctionMode():
        look(q)
    with torch.autocast("cpu"):
        look(q)
    with torch.autograd.forward_ad.dual_level():
        look(q)
    torch.vmap(look)(torch.zeros(2, 3))
    torch.func.grad(lambda x: look(x).sum())(q)
    torch.jit.trace(look, q, check_trace=False)
    assert len(seen) == 7 and all(x is NotImplemented for x in seen)

    class Sub(torch.Tensor):
        pass

    for other in (q.as_subclass(Sub), None, 1, np.zeros(3)):
        assert quick(q, other, v, "single") is NotImplemented
    assert asked.asked == []
    with pytest.raises(TypeError, match="three tensors"):
        quick(q)
    look(q)
    assert torch.equal(seen[-1], -q)


def test_the_short_way_lets_errors_through() -> None:
    def find(deterministic: bool, which: str) -> Any:
        raise InvalidArgumentError(which)

    q = torch.randn(3)
    with pytest.raises(InvalidArgumentError, match="this one"):
        _torch.quick(find)(q, q, q, "this one")


def test_the_stub_has_what_the_module_has() -> None:
    text = (ROOT / "python/lawson/_torch.pyi").read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    assert set(classes) == {"Prepared", "Call"}
    for name, node in classes.items():
        stated = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        actual = {n for n in vars(getattr(_torch, name)) if not n.startswith("_")}
        assert {n for n in stated if not n.startswith("_")} == actual
        if name == "Prepared":
            for member, definition in stated.items():
                said = getattr(_torch.Prepared, member).__doc__ or ""
                written = ast.get_docstring(definition) or ""
                assert said.rstrip().endswith(written), member
