"""`lawson.torch.fusion` as its users meet it: what is called, what is carried along, what is an error."""

from __future__ import annotations

import copy
import functools
import gc
import io
import json
import pickle
import re
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lawson
from lawson import _core
from lawson.torch import Fusion, fusion, inspect
from new_process import in_new_process

cpu = functools.partial(fusion, engines=["cpu"])
torch.manual_seed(7)
X, W, B = torch.randn(8, 16), torch.randn(16, 4), torch.randn(4)


def mlp(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x @ w + b)


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def totals() -> dict[str, int]:
    found: dict[str, int] = json.loads(_core.stats())["totals"]
    return found


# ---- the guarantee -----------------------------------------------------------------------------


def test_calls_run_the_plan_that_inspect_tells() -> None:
    fused = cpu(mlp)
    told = inspect(fused)(X, W, B)
    assert told.engine == "cpu" and told.verdict.supported
    assert told.verdict.plan_id == told.plan_id and told.verdict.strength == "built"
    assert (told.name, told.platform) == ("mlp", "cpu")
    close(fused(X, W, B), mlp(X, W, B))
    site, _ = fused.site((X, W, B), {})
    (prepared,) = site.direct.prepared()
    assert (prepared.plan_id, prepared.engine) == (told.plan_id, "cpu")
    assert json.loads(told.json())["kernels"][0]["policy"] == "require"


def test_a_call_is_one_execution_of_one_plan() -> None:
    fused = cpu(lambda x: torch.sin(x) * 1.25)
    _core.reset_stats()
    close(fused(X), torch.sin(X) * 1.25)
    assert (totals()["build_plans"], totals()["execute"]) == (1, 1)
    asked = totals()["miss"] + totals()["hit"]
    for _ in range(5):
        fused(X)
    assert totals()["execute"] == 6
    assert totals()["miss"] + totals()["hit"] == asked  # the call itself keeps the plan
    again = cpu(lambda x: torch.sin(x) * 1.25)
    close(again(X), torch.sin(X) * 1.25)
    assert totals()["build_plans"] == 1
    assert inspect(again)(X).plan_id == inspect(fused)(X).plan_id


def test_the_function_is_traced_once_for_a_form() -> None:
    seen: list[Any] = []

    @cpu
    def traced(x: Tensor) -> Tensor:
        seen.append((tuple(x.shape), x.dtype, x.stride()))
        return x * 2

    for _ in range(3):
        traced(X)
        traced(X.clone())
    traced(X.clone().requires_grad_()).sum().backward()
    traced(W)
    traced(X.bfloat16())
    traced(X.t())
    traced(X.t())
    assert seen == [
        ((8, 16), torch.float32, (16, 1)),
        ((16, 4), torch.float32, (4, 1)),
        ((8, 16), torch.bfloat16, (16, 1)),
        ((16, 8), torch.float32, (1, 16)),
    ]


def test_results_lie_as_pytorchs_do() -> None:
    function = lambda x, y: (x.t() + 1, (x * y).t(), x[:, 1:] * 2, x @ y.t(), x.unsqueeze(0) * 2)
    a, b = torch.randn(4, 6), torch.randn(4, 6)
    for x in (a, a.t().contiguous().t(), torch.randn(4, 12)[:, ::2], torch.randn(6).expand(4, 6)):
        got, want = cpu(function)(x, b), function(x, b)
        for one, other in zip(got, want, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert one.stride() == other.stride()
            close(one, other)


def test_addresses_of_any_alignment() -> None:
    fused = cpu(lambda x: x * 2)
    storage = torch.randn(64)
    for offset in (0, 1, 2, 3, 4):
        x = storage[offset : offset + 16]
        close(fused(x), x * 2)


# ---- arguments ---------------------------------------------------------------------------------


def test_pytrees_settings_and_nothing() -> None:
    @cpu
    def layer(x: dict[str, Any], factors: Any, *, act: str = "none", scale: float = 1.0) -> Any:
        y = x["a"] * factors[0] + x["more"][0]
        y = torch.tanh(y) if act == "tanh" else y
        return {"y": y * scale, "all": (y.sum(), [y.max()])}

    args = ({"a": X, "more": [X + 1]}, (2.5, None))
    for keywords in ({}, {"act": "tanh"}, {"scale": 3.0}, {"scale": 3}, {"act": "tanh"}):
        got = layer(*args, **keywords)
        y = X * 2.5 + (X + 1)
        y = torch.tanh(y) if "act" in keywords else y
        close(got["y"], y * keywords.get("scale", 1.0))
        close(got["all"][0], y.sum())
        close(got["all"][1][0], y.max())
    for factor in (1.5, np.float32(1.5)):
        close(layer(args[0], (factor, None))["y"], X * 1.5 + (X + 1))
    assert cpu(dict)() == {}
    close(cpu(lambda: torch.arange(4.0) * 2)(), torch.arange(4.0) * 2)


def test_settings_that_are_equal_and_of_other_types() -> None:
    seen: list[Any] = []

    @cpu
    def f(x: Tensor, *, n: Any) -> Tensor:
        seen.append(n)
        return x * n

    for n in (1, 1.0, True, 1):
        close(f(X, n=n), X * n)
    assert [type(n) for n in seen] == [int, float, bool]


def test_arguments_that_are_none() -> None:
    with pytest.raises(lawson.InvalidArgumentError, match=r"argument x is ndarray.*as_tensor"):
        cpu(lambda x: x)(np.ones(3))
    with pytest.raises(lawson.InvalidArgumentError, match="hashable"):
        cpu(lambda x, s: x)(X, {1, 2})


def test_nine_dims_are_unsupported() -> None:
    fused = cpu(lambda x: x * 2)
    close(fused(X), X * 2)
    for many in (torch.ones(1, 1, 1, 1, 1, 1, 1, 1, 2), torch.ones(1, 1, 2, 1, 1, 1, 1, 1, 2)):
        with pytest.raises(lawson.UnsupportedError, match="has 9 dims, and at most 8"):
            fused(many)


def test_results_that_are_no_computation() -> None:
    x = X.clone()
    got = cpu(lambda x: (x, x * 2, torch.ones(3), x.t(), 1.5 * torch.zeros(2)))(x)
    assert got[0] is x
    close(list(got[1:]), [x * 2, torch.ones(3), x.t(), torch.zeros(2)])
    with pytest.raises(lawson.UnsupportedError, match="a result is no tensor"):
        cpu(lambda x: (x * 2, 3))(x)


def test_one_value_in_two_orders() -> None:
    def twice(x: Tensor) -> Any:
        y = x @ x.t()
        z = torch.empty_strided((8, 8), (1, 8)).copy_(y)
        return y, y, z

    got, want = cpu(twice)(X), twice(X)
    close(got, want)


def test_empty_tensors() -> None:
    close(cpu(lambda x: torch.sin(x) + 1)(torch.ones(0, 3)), torch.ones(0, 3))
    close(cpu(lambda x, y: x @ y)(torch.ones(2, 0), torch.ones(0, 3)), torch.zeros(2, 3))


def test_callables_of_every_kind() -> None:
    class Scale:
        factor = 3.0

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.factor

        def method(self, x: Tensor) -> Tensor:
            return x + self.factor

        @cpu
        def marked(self, x: Tensor) -> Tensor:
            return x - self.factor

    instance = Scale()
    close(cpu(instance)(X), X * 3)
    close(cpu(instance.method)(X), X + 3)
    close(instance.marked(X), X - 3)
    close(cpu(functools.partial(torch.mul, X))(X), X * X)
    close(cpu(functools.partial(lambda x, *, s: x * s, s=2.0))(X), X * 2)
    close(cpu(nn.GELU())(X), F.gelu(X))
    assert repr(cpu(mlp)) == "<lawson fusion 'mlp'>" and cpu(mlp).__doc__ == mlp.__doc__
    with pytest.raises(TypeError, match="not callable"):
        fusion(3)  # type: ignore[arg-type]


def test_a_fusion_in_a_fusion_is_part_of_it() -> None:
    inner = cpu(lambda x: torch.sin(x) * 2)
    outer = cpu(lambda x: inner(x) + inner(x * 2))
    _core.reset_stats()
    close(outer(X), torch.sin(X) * 2 + torch.sin(X * 2) * 2)
    assert totals()["execute"] == 1


@cpu
def at_module_level(x: Tensor) -> Tensor:
    return x * 3


def test_fusions_are_pickled_and_copied() -> None:
    assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level
    close(copy.deepcopy(cpu(torch.sin))(X), torch.sin(X))


# ---- modules -----------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.register_buffer("shift", torch.randn(32))

    @cpu
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return F.gelu(self.up(x) + self.shift) * scale

    def plain(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x) + self.shift)


def gradients(loss: Tensor, *of: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, of))


def test_parameters_are_operands_with_gradients() -> None:
    layer = Layer()
    told = inspect(layer.forward)(X)
    assert [t.name for t in told.graph.tensors() if t.is_input] == [
        "x", "up.weight", "up.bias", "shift"
    ]  # fmt: skip
    loss, want = layer(X).sin().sum(), layer.plain(X).sin().sum()
    close(loss, want)
    parameters = list(layer.parameters())
    close(gradients(loss, *parameters), gradients(want, *parameters))


@pytest.mark.parametrize("how", ["closure", "bound method", "module", "global"])
def test_modules_however_they_are_reached(how: str) -> None:
    linear = nn.Linear(16, 8)
    made: dict[str, Callable[[], Any]] = {
        "closure": lambda: cpu(lambda x: torch.tanh(linear(x))),
        "bound method": lambda: cpu(Bound(linear).run),
        "module": lambda: cpu(nn.Sequential(linear, nn.Tanh())),
        "global": lambda: cpu(of_global),
    }
    globals()["GLOBAL"] = linear
    fused = made[how]()
    got, want = fused(X), torch.tanh(linear(X))
    close(got, want)
    parameters = list(linear.parameters())
    close(gradients(got.sum(), *parameters), gradients(want.sum(), *parameters))
    with torch.no_grad():  # what is written into them, or put in their place, is read
        linear.weight.mul_(2)
        close(fused(X), torch.tanh(linear(X)))
        linear.bias = nn.Parameter(torch.randn(8))
        close(fused(X), torch.tanh(linear(X)))
    if how == "closure":  # another module in its place
        linear = nn.Linear(16, 5)
        close(fused(X), torch.tanh(linear(X)))
    weight = nn.Parameter(linear.weight.detach() * 2)
    del linear.weight  # as FSDP does it, for a while
    linear.weight = weight.view(weight.shape)  # type: ignore[assignment]
    close(fused(X), torch.tanh(F.linear(X, weight, linear.bias)))
    got = torch.autograd.grad(fused(X).sum(), weight)
    close(got, torch.autograd.grad(torch.tanh(F.linear(X, weight, linear.bias)).sum(), weight))


class Bound:
    def __init__(self, linear: nn.Module) -> None:
        self.linear = linear

    def run(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


GLOBAL: Any = None


def of_global(x: Tensor) -> Tensor:
    found: Tensor = torch.tanh(GLOBAL(x))
    return found


def test_a_closed_over_tensor_is_an_operand() -> None:
    scale = torch.randn(16, requires_grad=True)
    fused = cpu(lambda x: x * scale)
    got = fused(X)
    close(gradients(got.sin().sum(), scale), gradients((X * scale).sin().sum(), scale))
    with torch.no_grad():
        scale.mul_(2)
        close(fused(X), X * scale)
    scale = torch.randn(16)  # another one in its place
    close(fused(X), X * scale)
    scale = torch.randn(8, 1)  # also of another shape
    close(fused(X), X * scale)
    one = torch.tensor(2.0)
    fused = cpu(lambda x: x * one + torch.tensor(3.0))
    close(fused(X), X * 2 + 3)
    one.fill_(5.0)
    close(fused(X), X * 5 + 3)


def test_tensors_of_a_subclass() -> None:
    class Named(Tensor):
        pass

    x = X.clone().as_subclass(Named)
    got = cpu(lambda x: x * 2)(x)
    assert type(got) is Named
    close(got.as_subclass(Tensor), X * 2)


def test_a_module_as_an_argument() -> None:
    def run(module: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = module(x) * 2
        return found

    one, two = nn.Linear(16, 3), nn.Linear(16, 3)
    for function in (run, lambda m, x: m(x) * 3):
        fused = cpu(function)  # each may have the address of the one before
        for module in (one, two, one):
            close(fused(module, X), function(module, X))
        del fused
        gc.collect()
    drop = nn.Dropout(0.5).eval()
    fused = cpu(run)
    close(fused(drop, X), X * 2)
    with pytest.raises(lawson.UnsupportedError, match="dropout"):
        fused(drop.train(), X)  # the mode is part of the form
    closed = cpu(lambda x: drop(x) * 2)
    for _ in range(2):
        drop.eval()
        close(closed(X), X * 2)
        drop.train()
        with pytest.raises(lawson.UnsupportedError, match="dropout"):
            closed(X)


def test_modules_are_copied_saved_and_let_go() -> None:
    layer = Layer()
    layer(X)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.up.weight.zero_()
        close(other(X), other.plain(X))
        close(layer(X), layer.plain(X))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    close(loaded(X), layer.plain(X))
    alive = weakref.ref(layer)
    del layer
    gc.collect()
    assert alive() is None


# ---- engines, policy, refusals -----------------------------------------------------------------


def test_cpu_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAWSON_ENGINE", raising=False)
    with pytest.raises(lawson.UnsupportedError, match=r"engines=\['cpu'\], or LAWSON_ENGINE=cpu"):
        fusion(mlp)(X, W, B)
    monkeypatch.setenv("LAWSON_ENGINE", "cpu")
    fused = fusion(mlp)
    close(fused(X, W, B), mlp(X, W, B))
    assert inspect(fused)(X, W, B).engine == "cpu"
    monkeypatch.setenv("LAWSON_ENGINE", "reference")
    assert inspect(fused)(X, W, B).engine == "reference"
    close(fused(X, W, B), mlp(X, W, B))
    monkeypatch.setenv("LAWSON_ENGINE", "cudnn")
    with pytest.raises(lawson.UnsupportedError, match="the engines named are cudnn"):
        fused(X, W, B)


def test_allow_takes_the_engine_of_the_platform() -> None:
    fused = fusion(mlp, policy="allow", engines=["cudnn", "cpu"])
    assert inspect(fused)(X, W, B).engine == "cpu"
    close(fused(X, W, B), mlp(X, W, B))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": "maybe"}, "policy: 'maybe' is not allowed; expected one of require, allow"),
        ({"tuning": "all"}, "tuning: 'all' is not allowed"),
        ({"engines": ["gpu"]}, "engines: 'gpu' is not allowed"),
        ({"engines": []}, "engines: an empty list"),
        ({"workspace_limit": -1}, "workspace_limit: -1 is not allowed"),
        ({"deadline_ms": float("nan")}, "deadline_ms: nan is not allowed"),
        ({"strict": "yes"}, "strict: 'yes' is not allowed"),
        ({"target": "z80"}, "target: "),
    ],
)
def test_settings_that_are_none(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(lawson.Error, match=words):
        fusion(mlp, **settings)


def test_settings_select_the_plan() -> None:
    plain = inspect(cpu(mlp))(X, W, B)
    assert inspect(cpu(mlp, deterministic=True))(X, W, B).key != plain.key
    assert inspect(cpu(mlp, workspace_limit=1 << 20))(X, W, B).key != plain.key
    strict = inspect(cpu(mlp, strict=True))(X, W, B)
    assert strict.key != plain.key and json.loads(strict.graph.json())["strict"] is True
    with pytest.raises(lawson.UnsupportedError, match="bytes of workspace"):
        cpu(mlp, workspace_limit=0)(torch.randn(300, 400), torch.randn(400, 300), torch.zeros(300))


def test_a_target_that_is_not_here_is_told_and_not_run() -> None:
    fused = cpu(mlp, target="h200")
    with pytest.raises(lawson.UnsupportedError, match="target 'h200' is none of platform 'cpu'"):
        fused(X, W, B)


def test_tensors_on_two_devices() -> None:
    with pytest.raises((lawson.UnsupportedError, RuntimeError), match="device|meta"):
        cpu(lambda x, y: x + y)(X, torch.empty(8, 16, device="meta"))


# ---- inspection --------------------------------------------------------------------------------


def test_inspect_of_a_whole_function() -> None:
    up, down = cpu(mlp), cpu(lambda h, w: h @ w.t())
    w, b = W.clone().requires_grad_(), B.clone().requires_grad_()

    def step(x: Tensor) -> None:
        down(up(x, w, b), w).sum().backward()

    found = inspect(step)(X)
    assert [i.name for i in found] == ["mlp", "lambda", "lambda.backward", "mlp.backward"]
    assert w.grad is None  # nothing was computed
    assert {i.engine for i in found} == {"cpu"}
    _core.reset_stats()
    step(X)
    assert totals()["build_plans"] == 0  # the very plans
    assert totals()["execute"] == sum(len(i.kernels) for i in found)
    assert w.grad is not None


# ---- counters, threads, memory -----------------------------------------------------------------

COUNTED = """
import os, sys
os.environ["LAWSON_CACHE_DEBUG"] = "2"
os.environ["LAWSON_DEBUG"] = "1"
import torch
from lawson.torch import fusion

@fusion(engines=["cpu"])
def layer(x):
    return torch.tanh(x) * 2

for _ in range(10):
    layer(torch.ones(3, 4))
layer(torch.ones(5, 4))
"""


def test_counters_and_debug_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNTED], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    events = Counter(m.group(1) for line in lines if (m := re.search(r" dev=- ([A-Z_]+) ", line)))
    # two forms, eleven calls; no call asks for a plan again
    wanted = {"MISS": 2, "CREATE_GRAPH": 2, "BUILD_PLANS": 2, "LOAD": 2, "CACHE_GRAPH": 2}
    assert events == {**wanted, "EXECUTE": 11}, done.stderr
    chosen = [line for line in lines if "'layer' (fusion) on cpu: engine=cpu plan=" in line]
    assert len(chosen) == 2, done.stderr


def test_first_calls_of_many_threads_that_end() -> None:
    # PyTorch's tracers keep state of the process, and of the first thread that traced.
    code = """
import os
os.environ["LAWSON_ENGINE"] = "cpu"
import threading
import torch
from lawson.torch import fusion

right = []

def work(i):
    def scaled(x):
        return torch.relu(x * (i + 1))

    x = torch.randn(3 + i, 5)
    barrier.wait()
    right.append(torch.equal(fusion(scaled)(x), scaled(x)))

for _ in range(3):
    barrier = threading.Barrier(16)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
assert fusion(lambda x: x + 1)(torch.ones(2)).sum() == 4
print(right.count(True), right.count(False))
"""
    assert in_new_process(code) == "48 0\n"


def test_threads_share_one_program() -> None:
    seen: list[int] = []

    @cpu
    def traced(x: Tensor) -> Tensor:
        seen.append(1)
        return torch.sin(x) * 0.75

    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(traced(X))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and len(seen) == 1
    for result in results:
        close(result, torch.sin(X) * 0.75)


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def test_many_calls_leave_nothing_behind() -> None:
    fused = cpu(lambda x, w: torch.tanh(x @ w))
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)

    def some() -> None:
        for _ in range(300):
            with torch.no_grad():
                fused(x, w)
            fused(x, w).sum().backward()

    some()
    gc.collect()
    before, tensors = _resident(), sum(issubclass(type(o), Tensor) for o in gc.get_objects())
    for _ in range(5):
        some()
    gc.collect()
    assert sum(issubclass(type(o), Tensor) for o in gc.get_objects()) <= tensors
    # 3,000 results and gradients of 16 KiB would be 48 MB
    assert _resident() - before < 16 << 20


def test_kept_programs_are_bounded() -> None:
    from lawson.torch import _fusion_site

    fused = cpu(lambda x: x + 1)
    for n in range(1, 40):
        close(fused(torch.ones(n)), torch.full((n,), 2.0))
    site, _ = fused.site((torch.ones(1),), {})
    assert len(site._traced) == 39 <= _fusion_site.KEPT
    assert isinstance(fused, Fusion)
