"""What a fusion finds around its arguments, and that a change of it is seen at the next call."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import math
import pickle
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import lawson
from lawson.torch import fusion, inspect

cpu = functools.partial(fusion, engines=["cpu"])
torch.manual_seed(9)
X = torch.randn(8, 16)
SCALE = 2.0


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.5)
        self.more = nn.ModuleList([nn.Linear(16, 16)])
        self.k = 2.0
        self.act = torch.tanh
        self.steps = 0
        self.eval()

    def plain(self, x: Tensor) -> Tensor:
        x = self.drop(self.act(self.b(self.a(x)))) * self.k
        for layer in self.more:
            x = layer(x)
        return x

    marked = cpu(plain)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        found: Tensor = self.marked(x)
        return found


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def replaced(m: Block) -> None:
    m.a = nn.Linear(16, 16)


def untied(m: Block) -> None:
    m.b.weight = nn.Parameter(torch.zeros(16, 16))


def set_k(value: Any) -> Callable[[Block], None]:
    return lambda m: setattr(m, "k", value)


CHANGES: dict[str, Callable[[Block], Any]] = {
    "a submodule": replaced,
    "a module of a list": lambda m: m.more.append(nn.Linear(16, 16)),
    "a weight that was tied": untied,
    "a bias that was none": lambda m: setattr(m.a, "bias", nn.Parameter(torch.ones(16))),
    "a bias that is none": lambda m: setattr(m.b, "bias", None),
    "a number": set_k(5.0),
    "a tensor for a number": set_k(torch.tensor(7.0)),
    "a function": lambda m: setattr(m, "act", torch.sin),
    "a hook": lambda m: m.a.register_forward_hook(lambda m, args, out: out * 3),
    "a hook before": lambda m: m.a.register_forward_pre_hook(lambda m, args: (args[0] * 3,)),
    "a parametrization": lambda m: parametrize.register_parametrization(m.b, "weight", Double()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_a_module_are_seen(name: str) -> None:
    m = Block()
    m.b.weight = m.a.weight
    m.a.bias = None
    for _ in range(2):
        close(m.marked(X), m.plain(X))
    before = m.plain(X)
    CHANGES[name](m)
    assert not torch.allclose(m.plain(X), before)
    for _ in range(2):
        close(m.marked(X), m.plain(X))
    weight = m.more[0].weight
    got, want = (torch.autograd.grad(f(X).sin().sum(), weight) for f in (m.marked, m.plain))
    close(got, want)


def test_modes_of_all_modules_are_in_the_key() -> None:
    m = Block()
    seen = []

    @cpu
    def f(x: Tensor) -> Tensor:
        seen.append(m.drop.training)
        return m.plain(x)

    for _ in range(3):
        m.drop.eval()
        close(f(X), m.plain(X))
        close(m.marked(X), m.plain(X))
        m.drop.train()
        with pytest.raises(lawson.UnsupportedError, match="dropout"):
            f(X)
        with pytest.raises(lawson.UnsupportedError, match="dropout"):
            m.marked(X)
    assert seen.count(False) == 1  # either mode is traced once


def test_what_the_function_does_not_read_is_no_part_of_the_key() -> None:
    m = Block()
    m(X)
    site = Block.marked.site((m, X), {})[0]
    m(X)
    assert m.steps == 2 and Block.marked.site((m, X), {})[0] is site
    m.k = float("2")  # another object of the same value
    assert Block.marked.site((m, X), {})[0] is site
    plain = cpu(lambda x: x * 2)
    assert plain.site((X,), {})[0].around.is_empty


def test_a_fusion_and_a_method_in_a_variable() -> None:
    m = Block()
    inner, method = cpu(nn.Sequential(m.a, m.drop)), m.plain
    outer, called = cpu(lambda x: inner(x) * 2), cpu(lambda x: method(x))
    with torch.no_grad():
        for _ in range(2):
            close(outer(X), m.a(X) * 2)
            close(called(X), m.plain(X))
            m.a.weight = nn.Parameter(torch.randn(16, 16))
    m.drop.train()
    for f in (outer, called):
        with pytest.raises(lawson.UnsupportedError, match="dropout"):
            f(X)


class Config:
    scale = 3.0


class Holder:
    def __init__(self) -> None:
        self.config = Config()
        self.k = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.k * self.config.scale


def helper(x: Tensor) -> Tensor:
    return x * SCALE


def test_numbers_wherever_they_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    k: Any = 2.0
    closed = cpu(lambda x: x * k)
    for k in (2.0, 3.0, 2.0, torch.tensor(4.0), 1, True, 0.5):
        got = closed(X)
        assert got.dtype == (X * k).dtype
        close(got, X * k)
    named, helped = cpu(lambda x: x + SCALE), cpu(lambda x: helper(x))
    holder = Holder()
    called, method = cpu(holder), cpu(holder.__call__)
    for value in (2.0, 5.0):
        monkeypatch.setitem(globals(), "SCALE", value)
        holder.k = value
        close(named(X), X + value)
        close(helped(X), X * value)
        close(called(X), X * value * 3)
        close(method(X), X * value * 3)
    holder.config.scale = 1.5
    close(called(X), X * 7.5)
    monkeypatch.setattr(Config, "scale", 0.5)
    del holder.config.scale
    close(method(X), X * 2.5)
    holder.config = Config()
    holder.config.scale = 4.0
    close(method(X), X * 20)


def test_settings_are_compared_exactly() -> None:
    f = cpu(lambda x, s: 1 / (x * s))
    assert f(X.abs(), 0.0).max() == math.inf and f(X.abs(), -0.0).min() == -math.inf
    whole = torch.arange(4, dtype=torch.int32)
    g = cpu(lambda x, s: x * next(iter(s)))
    for values in ({1}, {1.0}, {True}):
        assert g(whole, frozenset(values)).dtype == (whole * next(iter(values))).dtype
    cut = cpu(lambda x, at: x[at] * 2)
    for at in (slice(0, 4), slice(2, 6), slice(0, 4)):
        close(cut(X, at), X[at] * 2)
    f(X, float("nan"))
    kinds = len(f._kinds)
    f(X, float("nan"))
    assert len(f._kinds) == kinds


# ---- what a function writes --------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(16))

    @cpu
    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x + self.count

    @cpu
    def noted(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return self.last + 1


def test_a_trace_leaves_nothing_of_its_own() -> None:
    m = Counting()
    before = m.count
    with pytest.raises(lawson.UnsupportedError, match="assigns to 'count'"):
        m(X)
    assert m.count is before
    with pytest.raises(lawson.UnsupportedError, match="assigns to 'last'"):
        m.noted(X)
    assert not hasattr(m, "last")
    norm = nn.BatchNorm1d(16)
    state = torch.ones(16)

    def write(x: Tensor) -> Tensor:
        state.add_(1)
        return x + state

    for function in (write, lambda x: norm(x)):
        with pytest.raises(lawson.UnsupportedError, match=r"add_.*writes into a tensor that"):
            cpu(function)(X)
    assert state.eq(1).all() and norm.num_batches_tracked == 0


# ---- refused arguments and results -------------------------------------------------------------

REFUSED: dict[str, Callable[[], Any]] = {
    "is a nested tensor": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    r"is sparse \(sparse_csr\)": lambda: torch.eye(3).to_sparse_csr(),
    r"is sparse \(sparse_coo\)": lambda: torch.eye(3).to_sparse(),
    r"is quantised \(qint8\)": lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
    "is on device 'meta'": lambda: X.to("meta"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("words", REFUSED)
def test_tensors_that_no_kernel_takes_are_named(words: str) -> None:
    f = cpu(lambda x, y: y * 2)
    close(f(X, X), X * 2)
    with pytest.raises(lawson.UnsupportedError, match=rf"'lambda': argument 'y' {words}"):
        f(X, REFUSED[words]())
    with pytest.raises(lawson.UnsupportedError, match=rf"argument 'x' {words}"):
        cpu(lambda x: x * 2)(REFUSED[words]())


def test_results_and_calls_that_are_refused() -> None:
    with pytest.raises(lawson.UnsupportedError, match="a result is no tensor"):
        cpu(lambda x: (y for y in (x,)))(X)
    with pytest.raises(lawson.UnsupportedError, match=r"Tensor\.numpy at test_torch_fusion_around"):
        cpu(lambda x: x.numpy())(X)
    f = cpu(lambda x: x * 2)
    for _ in range(2):
        with pytest.raises(lawson.UnsupportedError, match=r"torch.jit.trace\n.*torch.export"):
            torch.jit.trace(f, (X,), check_trace=False)
        close(f(X), X * 2)


# ---- configurations ----------------------------------------------------------------------------


@dataclasses.dataclass
class Settings:
    scale: float = 2.0
    inner: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: Any = 2.0


class Words(dict[str, Any]):
    __getattr__ = dict.__getitem__  # which raises KeyError


class OfClass:
    scale = 2.0

    class Inner:
        scale = 2.0


def changed(owner: Any, value: Any = 5.0) -> Callable[[], None]:
    return lambda: setattr(owner, "scale", value)


@pytest.mark.parametrize("kind", ["dataclass", "namespace", "nested", "slots", "tensor in a slot",
                                  "class", "class in a class"])  # fmt: skip
def test_configurations_that_are_closed_over(kind: str) -> None:
    OfClass.scale = OfClass.Inner.scale = 2.0
    one, inner, slots = Settings(), types.SimpleNamespace(scale=2.0), Slotted()
    nested = Settings(inner=inner)
    made: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], None]]] = {
        "dataclass": (lambda x: x * one.scale, changed(one)),
        "namespace": (lambda x: x * inner.scale, changed(inner)),
        "nested": (lambda x: x * nested.inner.scale, changed(inner)),
        "slots": (lambda x: x * slots.scale, changed(slots)),
        "tensor in a slot": (lambda x: x * slots.scale, changed(slots, torch.full((16,), 3.0))),
        "class": (lambda x: x * OfClass.scale, changed(OfClass)),
        "class in a class": (lambda x: x * OfClass.Inner.scale, changed(OfClass.Inner)),
    }
    function, change = made[kind]
    if kind == "tensor in a slot":
        slots.scale = torch.ones(16)
    fused = cpu(function)
    close(fused(X), X if kind == "tensor in a slot" else X * 2)
    change()
    for _ in range(2):
        close(fused(X), X * (3 if kind == "tensor in a slot" else 5))


class Scaler:
    """No module, and equal to itself alone."""

    every: Any = 1.0

    def __init__(self) -> None:
        self.k: Any = 2.0
        self.w = torch.ones(16)
        self.inner = Settings()

    @cpu
    def method(self, x: Tensor) -> Tensor:
        return x * self.k * self.w * self.inner.scale * self.every


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Any

    def __hash__(self) -> int:
        return 1


Given: TypeAlias = Callable[[Scaler], Callable[[Tensor], Tensor]]
GIVEN: dict[str, Given] = {
    "method": lambda s: s.method,
    "argument": lambda s: lambda x: by_argument(x, s),
    "keyword": lambda s: lambda x: by_argument(x, one=s),
    "in another": lambda s: lambda x: by_another(x, Frozen(s)),
    "partial": lambda s: lambda x: by_call(x, functools.partial(Scaler.method.__wrapped__, s)),
    "closure": lambda s: lambda x: by_call(x, s.plain),
}  # fmt: skip
by_argument = cpu(lambda x, one: x * one.k * one.w * one.inner.scale * one.every)
by_another = cpu(lambda x, it: x * it.inner.k * it.inner.w * it.inner.inner.scale * it.inner.every)
by_call = cpu(lambda x, call: call(x))


@pytest.mark.parametrize("how", GIVEN)
def test_changes_of_an_argument_that_is_no_module_are_seen(how: str) -> None:
    Scaler.every = 1.0
    one, other = Scaler(), Scaler()
    other.k = 7.0
    for s in (one, other):
        s.plain = lambda x, s=s: Scaler.method.__wrapped__(s, x)  # type: ignore[attr-defined]
    calls = [GIVEN[how](s) for s in (one, other)]
    close(calls[0](X), X * 4)
    close(calls[1](X), X * 14)
    one.k = 3.0
    close(calls[0](X), X * 6)
    one.w = torch.full((16,), 2.0)
    close(calls[0](X), X * 12)
    one.inner.scale = 1.0
    close(calls[0](X), X * 6)
    one.inner = Settings(5.0)
    close(calls[0](X), X * 30)
    Scaler.every = 2.0
    close([c(X) for c in calls], [X * 60, X * 28])
    Scaler.every = torch.full((16,), 3.0)
    close([c(X) for c in calls], [X * 90, X * 42])
    Scaler.every = torch.full((16,), 4.0)
    close([c(X) for c in calls], [X * 120, X * 56])
    one.every = 1.0
    close([c(X) for c in calls], [X * 30, X * 56])


def test_objects_are_copied_saved_and_let_go() -> None:
    Scaler.every = 1.0
    for call in (lambda s: s.method(X), lambda s: by_argument(X, s)):
        one = Scaler()
        close(call(one), X * 4)
        for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            other.k = 4.0
            close(call(other), X * 8)
            close(call(one), X * 4)
        alive = weakref.ref(one)
        del one, other
        gc.collect()
        assert alive() is None


class SlotsAndMore(Slotted):
    """Of slots and a dict."""


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = (nn.Dropout(0.5).eval(), nn.Linear(16, 16))
        self.own = (nn.Parameter(torch.ones(16)),)
        self.sizes = frozenset({2})
        self.eval()

    def plain(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.own[0] * max(self.sizes)

    forward = cpu(plain)


def test_slots_beside_a_dict() -> None:
    one = SlotsAndMore()
    fused = cpu(lambda x: x * one.scale)
    for value in (2.0, 3.0, torch.ones(16), torch.full((16,), 4.0)):
        one.scale = value
        close(fused(X), X * value)


def test_what_tuples_hold() -> None:
    m = Held()
    close(m(X), m.plain(X))
    with torch.no_grad():
        m.own[0].mul_(2)
        close(m(X), m.plain(X))
    m.own = (nn.Parameter(torch.full((16,), 3.0)),)
    close(m(X), m.plain(X))
    close(*(torch.autograd.grad(f(X).sum(), m.own[0]) for f in (m, m.plain)))
    m.layers[1].weight = nn.Parameter(torch.randn(16, 16))
    close(m(X), m.plain(X))
    m.sizes = frozenset({3})
    close(m(X), m.plain(X))
    for layer in m.layers:
        layer.train()
    with pytest.raises(lawson.UnsupportedError, match=r"dropout|bernoulli"):
        m(X)
    for layer in m.layers:
        layer.eval()
    close(m(X), m.plain(X))
    m.layers = (nn.Tanh(),)
    close(m(X), m.plain(X))


def test_what_defaults_hold() -> None:
    one = Settings()

    def function(x: Tensor, by: Any = one, *, also: float = 1.0) -> Tensor:
        return x * by.scale * also

    fused = cpu(function)
    close(fused(X), X * 2)
    one.scale = 3.0
    close(fused(X), X * 3)
    assert function.__kwdefaults__ is not None
    function.__kwdefaults__["also"] = 2.0
    close(fused(X), X * 6)


def test_packages_whose_names_begin_as_pytorchs() -> None:
    kind = type("Config", (), {"__module__": "torchtitan.config", "scale": 2.0})
    one = kind()
    one.by = 3.0
    fused = cpu(lambda x: x * one.scale * one.by)
    close(fused(X), X * 6)
    one.by = 4.0
    close(fused(X), X * 8)
    one.scale = 1.0
    close(fused(X), X * 4)


def test_objects_that_raise_what_they_like() -> None:
    words = Words(scale=2.0)
    close(cpu(lambda x: x * words.scale)(X), X * 2)
    with pytest.raises(lawson.InvalidArgumentError, match="argument w is Words, .* not hashable"):
        cpu(lambda x, w: x * w.scale)(X, words)


def tenfold(x: Tensor) -> Tensor:
    return x * 10


def test_a_function_in_anothers_place(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = cpu(lambda x: tenfold(x))
    close(fused(X), X * 10)
    monkeypatch.setitem(globals(), "tenfold", lambda x: x * 7)
    close(fused(X), X * 7)


# ---- gradients, compile, inspect ---------------------------------------------------------------


def test_results_depend_on_what_pytorchs_do() -> None:
    f = cpu(lambda t, u: (t * 2, u * 3))
    t, u = torch.randn(3, requires_grad=True), torch.randn(3)
    assert [r.requires_grad for r in f(t, u)] == [True, False]
    assert [r.requires_grad for r in f(t.detach(), u.requires_grad_())] == [False, True]
    got = torch.autograd.grad(f(t, u)[0].sum(), (t, u), allow_unused=True)
    close(got[0], torch.full((3,), 2.0))
    assert got[1] is None


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(16, 4)
        self.k = 2.0

    @cpu
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.l(x)) * self.k
        return found


def test_compile_of_a_marked_module_and_of_floats_that_change() -> None:
    m = Marked()
    torch._dynamo.reset()
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    for k in (2.0, 3.0, 4.0, 2.0):
        m.k = k
        close(compiled(X), torch.tanh(m.l(X)) * k)
    s = [2.0]
    scaled = cpu(lambda x, by: x * by)
    run = torch.compile(lambda x: scaled(x, s[0]), fullgraph=True, backend="aot_eager")
    for s[0] in (2.0, 3.0, 4.0):
        close(run(X), X * s[0])


def test_compile_of_what_has_no_operand() -> None:
    torch._dynamo.reset()
    constant = cpu(lambda: torch.arange(16.0) * 2)
    run = torch.compile(lambda x: x + constant(), fullgraph=True, backend="aot_eager")
    close(run(X), X + torch.arange(16.0) * 2)


def test_inspect_inside_of_inspect() -> None:
    f = cpu(lambda x: x * 2)
    inner: list[Any] = []

    def outer(x: Tensor) -> Tensor:
        inner.extend(inspect(lambda x: f(x + 1))(x))
        found: Tensor = f(x)
        return found

    told: list[Any] = []
    thread = threading.Thread(target=lambda: told.extend(inspect(outer)(X)), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and len(told) == len(inner) == 1


# ---- values ------------------------------------------------------------------------------------


def test_floor_division_and_sign_are_pytorchs() -> None:
    a = torch.tensor([1.0, -1.0, 5.0, -0.0, 1.0, 1.0, -1.0, 7.5, -7.5, 0.3])
    b = torch.tensor([0.1, 0.1, 0.0, 2.0, -2.0, math.inf, math.inf, 2.5, 2.0, 0.1])
    floored = cpu(lambda a, b: a // b)
    assert torch.equal(floored(a, b), a // b)
    for by in (0.1, 2.0, -0.3, 4):
        assert torch.equal(cpu(lambda a, by: a // by)(a, by), a // by)
    odd = torch.tensor([math.nan, -0.0, 2.0, -3.0, math.inf])
    assert torch.equal(cpu(torch.sign)(odd), torch.sign(odd))
    close(cpu(lambda x: torch.vmap(lambda y: y * 2)(x))(a), a * 2)


def test_modes_that_change_while_other_threads_call() -> None:
    m = nn.Dropout(0.5).eval()
    f = cpu(lambda x: x * 2 if m.training else x * 3)
    wrong: list[Any] = []

    def call() -> None:
        try:
            for _ in range(300):
                got = f(X)
                if not (torch.equal(got, X * 2) or torch.equal(got, X * 3)):
                    wrong.append(got)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        m.train(not m.training)
    assert not wrong
