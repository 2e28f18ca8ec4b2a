"""What a fusion finds around its arguments, and that a change of it is seen at the next call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import lawson
from lawson.torch import fusion

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
