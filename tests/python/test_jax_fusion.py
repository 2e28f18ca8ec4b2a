"""`fusion` as its users meet it: what is called, what is carried along, what is an error."""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import lawson
from lawson import _core
from lawson.jax import Fusion, cudnn_fusion, export_checks, fusion, inspect

RNG = np.random.default_rng(7)
cpu = functools.partial(fusion, engines=["cpu"])


def f32(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


X, W, B = f32(8, 16), f32(16, 4), f32(4)


def mlp(x: Any, w: Any, b: Any) -> Any:
    return jax.nn.gelu(x @ w + b)


def close(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def plans_in(text: str) -> list[str]:
    """The plan ids of Lawson's calls in a compiled program."""
    calls = [line for line in text.splitlines() if 'custom_call_target="lawson_plan"' in line]
    return [re.search(r'plan_id = "(\w+)"', line).group(1) for line in calls]  # type: ignore[union-attr]


# ---- the guarantee -----------------------------------------------------------------------------


def test_the_compiled_program_runs_the_plan_that_inspect_tells() -> None:
    fused = cpu(mlp)
    told = inspect(fused)(X, W, B)
    assert told.engine == "cpu" and told.verdict.supported
    assert told.verdict.plan_id == told.plan_id and told.verdict.strength == "built"
    compiled = jax.jit(fused).lower(X, W, B).compile()
    assert plans_in(compiled.as_text()) == [told.plan_id]
    assert "dot(" not in compiled.as_text() and "fusion(" not in compiled.as_text()
    close(compiled(X, W, B), mlp(X, W, B))
    # and the program itself says the rest
    assert 'engine = "cpu"' in compiled.as_text() and told.key in compiled.as_text()


def test_eager_calls_run_the_same_plan() -> None:
    """JAX's own decorator runs eager calls op by op."""
    fused = cpu(lambda x: jnp.sin(x) * 1.25)
    _core.reset_stats()
    close(fused(X), jnp.sin(X) * 1.25)
    counted = json.loads(_core.stats())["totals"]
    # asked for by the lowering, and once more by the program, which takes the loaded plan
    assert (counted["miss"], counted["hit"], counted["build_plans"]) == (1, 1, 1)
    assert counted["execute"] == 1
    close(fused(X), jnp.sin(X) * 1.25)
    close(jax.jit(fused)(X), jnp.sin(X) * 1.25)
    counted = json.loads(_core.stats())["totals"]
    # the second eager call is the first one's program; jit is another one
    assert (counted["miss"], counted["hit"], counted["build_plans"]) == (1, 2, 1)
    assert counted["execute"] == 3
    # another fusion of the same computation finds the plan
    again = cpu(lambda x: jnp.sin(x) * 1.25)
    close(again(X), jnp.sin(X) * 1.25)
    counted = json.loads(_core.stats())["totals"]
    assert (counted["miss"], counted["hit"], counted["build_plans"]) == (1, 4, 1)
    assert inspect(again)(X).plan_id == inspect(fused)(X).plan_id


def test_the_function_is_traced_once_for_a_signature() -> None:
    seen = []

    @cpu
    def traced(x: Any) -> Any:
        seen.append(x.shape)
        return x * 2

    for _ in range(3):
        traced(X)
    jax.jit(traced)(X)
    traced(W)
    traced(X.astype(jnp.bfloat16))
    assert seen == [X.shape, W.shape, X.shape]


def test_inspect_of_a_whole_function() -> None:
    up, down = cpu(mlp), cpu(lambda h, w: h @ w)

    def model(x: Any) -> Any:
        return jax.jit(lambda h: down(h, W.T))(up(x, W, B)).sum()

    found = inspect(jax.value_and_grad(model))(X)
    assert [i.name for i in found] == ["mlp", "_lambda", "_lambda.backward", "mlp.backward"] or [
        i.name for i in found
    ] == ["mlp", "lambda", "lambda.backward", "mlp.backward"]
    text = jax.jit(jax.value_and_grad(model)).lower(X).compile().as_text()
    assert sorted(plans_in(text)) == sorted(p for i in found for p in i.plan_ids)
    document = json.loads(found[0].json())
    assert document["kernels"][0]["engine"] == "cpu" and document["name"] == "mlp"
    assert "matmul(x, w)" in str(found[0])


# ---- where it does not run ---------------------------------------------------------------------


def test_a_setting_is_its_sign_and_its_type() -> None:
    traces = []

    def over(x: Any, *, c: Any) -> Any:
        traces.append(c)
        return x / (c if isinstance(c, float) else next(iter(c)))

    fused = fusion(over, engines=["cpu"])
    x = jnp.ones((2, 3))
    for c in (0.0, -0.0, frozenset([0.0]), frozenset([-0.0]), 0.0):
        np.testing.assert_array_equal(fused(x, c=c), over(x, c=c))
    del traces[:]
    for _ in range(3):
        assert np.isnan(fused(x, c=float("nan"))).all()
    assert len(traces) == 1


def test_eager_calls_ask_the_environment_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of forms that ran before; a program that jax.jit made is what it was made as."""
    fused = fusion(lambda x: jnp.tanh(x) + 1)
    x = jnp.linspace(-3, 3, 640).reshape(8, 80)
    named = {e: fusion(lambda x: jnp.tanh(x) + 1, engines=[e])(x) for e in ("cpu", "reference")}
    assert (named["cpu"] != named["reference"]).any()
    q = x.reshape(1, 8, 2, 40)
    attended = {e: lawson.jax.dot_product_attention(q, q, q, engine=e) for e in named}
    assert (attended["cpu"] != attended["reference"]).any()
    for engine in ("cpu", "reference", "cpu"):
        monkeypatch.setenv("LAWSON_ENGINE", engine)
        assert inspect(fused)(x).engine == engine
        np.testing.assert_array_equal(fused(x), named[engine])
        got = lawson.jax.dot_product_attention(q, q, q)
        np.testing.assert_array_equal(got, attended[engine])
    monkeypatch.delenv("LAWSON_ENGINE")
    with pytest.raises(lawson.UnsupportedError, match="no engine is named"):
        fused(x)


def test_cpu_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAWSON_ENGINE", raising=False)
    for function in (fusion(mlp), cudnn_fusion(mlp), fusion(mlp, engines=["cudnn"])):
        for call in (function, jax.jit(function), inspect(function)):
            with pytest.raises(lawson.UnsupportedError, match=r"engines=\['cpu'\].*LAWSON_ENGINE"):
                call(X, W, B)
    monkeypatch.setenv("LAWSON_ENGINE", "cpu")
    close(fusion(mlp)(X, W, B), mlp(X, W, B))
    assert inspect(fusion(mlp))(X, W, B).engine == "cpu"


def test_reference_engine() -> None:
    fused = fusion(mlp, engines="reference")
    assert inspect(fused)(X, W, B).engine == "reference"
    close(fused(X, W, B), mlp(X, W, B))


def test_allow_takes_the_engine_of_the_platform() -> None:
    fused = fusion(mlp, policy="allow", engines=["cudnn", "cpu"])
    close(fused(X, W, B), mlp(X, W, B))
    told = json.loads(inspect(fused)(X, W, B).json())["kernels"][0]
    assert (told["engine"], told["policy"]) == ("cpu", "allow")


def test_a_fusion_that_computes_nothing_runs_no_plan() -> None:
    told = inspect(cpu(lambda x: x))(X)
    assert told.kernels == told.plan_ids == () and told.workspace_bytes == 0
    assert str(told) == "lambda on cpu:"
    with pytest.raises(lawson.UnavailableError, match="'lambda' computes nothing"):
        _ = told.plan_id


def test_nine_dims_are_unsupported() -> None:
    double = cpu(lambda x: x * 2)
    x = f32(2, *(1,) * 6, 3)
    close(double(x), x * 2)
    with pytest.raises(lawson.UnsupportedError, match=r"'x': shape \(2, .* has 9 dims.* 8"):
        double(x[..., None])
    close(jax.vmap(double)(x[0][None]), x[0][None] * 2)
    with pytest.raises(lawson.UnsupportedError, match=r"has 9 dims"):
        jax.vmap(double)(x[None])
    wide = cpu(lambda x: jnp.exp(x)[None] + jnp.ones((2,) + (1,) * 8))
    with pytest.raises(lawson.UnsupportedError, match=r"at test_jax_fusion.py:\d+.* has 9 dims"):
        wide(x)


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_other_platforms(platform: str) -> None:
    traced = jax.jit(cpu(mlp)).trace(X, W, B)
    with pytest.raises(lawson.UnsupportedError, match=f"platform '{platform}'.*LAWSON_ENGINE"):
        traced.lower(lowering_platforms=(platform,))


def test_a_refusal_of_the_engine_has_every_reason() -> None:
    fused = fusion(lambda x: (jnp.sin(x) @ x.T) @ x, engines=["cpu"], workspace_limit=0)
    with pytest.raises(
        lawson.UnsupportedError, match=r"(?s)workspace.*test_jax_fusion.py:\d+"
    ) as caught:
        fused(f32(64, 64))
    assert "fusion 'lambda' does not fuse on 'cpu'" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": "maybe"}, "policy: 'maybe'.*require, allow"),
        ({"tuning": "fast"}, "tuning: 'fast'.*quick"),
        ({"engines": ["gpu"]}, "engines: 'gpu'.*cudnn"),
        ({"engines": []}, "engines: an empty list"),
        ({"workspace_limit": -1}, "workspace_limit: -1"),
        ({"workspace_limit": "1k"}, "workspace_limit: '1k'.*bytes"),
        ({"workspace_limit": 1.5}, "workspace_limit: 1.5.*bytes"),
        ({"workspace_limit": 1 << 63}, "workspace_limit: 9223372036854775808.*bytes"),
        ({"deadline_ms": -1}, "deadline_ms: -1.*milliseconds"),
        ({"deadline_ms": "soon"}, "deadline_ms: 'soon'.*milliseconds"),
        ({"deadline_ms": float("nan")}, "deadline_ms: nan.*milliseconds"),
        ({"engines": 3}, "engines: 3.*list of names"),
        ({"deterministic": "no"}, "deterministic: 'no'.*True or False"),
        ({"strict": 1}, "strict: 1.*True or False"),
        ({"definition": None}, "definition: None.*True or False"),
        ({"target": "h9000"}, "h9000"),
        ({"target": 3}, "target: 3.*name"),
    ],
)
def test_settings_that_are_none(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(lawson.Error, match=words):
        fusion(mlp, **settings)


def test_settings_select_the_plan() -> None:
    ids = {
        inspect(cpu(mlp, **settings))(X, W, B).plan_id
        for settings in ({}, {"strict": True}, {"deterministic": True})
    }
    assert len(ids) >= 2
    close(cpu(mlp, strict=True, tuning="off", deterministic=True)(X, W, B), mlp(X, W, B))


# ---- arguments and results ---------------------------------------------------------------------


def test_pytrees_keywords_and_nothing() -> None:
    def model(params: Any, x: Any, *, act: Any, scale: float = 1.0) -> Any:
        return {"y": act(x @ params["w"] + params["b"][0]) * scale, "n": None, "same": x}

    fused = cpu(model)
    params = {"w": W, "b": (B,)}
    close(fused(params, X, act=jnp.tanh), model(params, X, act=jnp.tanh))
    close(fused(params, X, act=jnp.sin, scale=2.0), model(params, X, act=jnp.sin, scale=2.0))
    # a keyword that is an array is an operand
    scale = jnp.float32(3)
    close(fused(params, X, act=jnp.sin, scale=scale), model(params, X, act=jnp.sin, scale=3))
    grad = jax.grad(lambda s: fused(params, X, act=jnp.sin, scale=s)["y"].sum())(scale)
    close(grad, jnp.sin(X @ W + B).sum())
    names = [t.name for t in inspect(fused)(params, X, act=jnp.tanh).graph.tensors() if t.is_input]
    assert names == ["params.b.0", "params.w", "x"]
    assert cpu(lambda x: ())(X) == () and cpu(lambda x: None)(X) is None
    assert cpu(lambda: jnp.ones(3) * 2)().shape == (3,)


def test_keywords_that_are_equal_and_of_other_types() -> None:
    """1, 1.0 and True are one key of a dictionary, and three programs."""
    fused = cpu(lambda x, *, n: x * n)
    ints = jnp.arange(3, dtype=jnp.int32)
    assert [fused(ints, n=n).dtype for n in (2, 2.0)] == [jnp.int32, jnp.float32]


@cpu
def of_this_module(x: Any) -> Any:
    return x * 2


def test_fusions_are_pickled_and_copied() -> None:
    assert pickle.loads(pickle.dumps(of_this_module)) is of_this_module
    assert copy.deepcopy({"f": of_this_module})["f"] is of_this_module
    for made in (cpu(mlp), cpu(functools.partial(mlp, b=np.asarray(B)))):
        args = (X, W, B) if made.__wrapped__ is mlp else (X, W)
        for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
            close(again(*args), mlp(X, W, B))
            assert inspect(again)(*args).engine == "cpu"  # the settings, too


def test_results_that_are_no_computation() -> None:
    close(cpu(lambda x, y: (y, x, 1.5, x))(X, W), (W, X, jnp.float32(1.5), X))
    doubled = cpu(lambda x: (x * 2, x * 2, x))
    close(doubled(X), (X * 2, X * 2, X))
    close(jax.grad(lambda x: sum(r.sum() for r in doubled(x)))(X), jnp.full_like(X, 5))


def test_callables_of_every_kind() -> None:
    class Layer:
        def __init__(self, w: Any) -> None:
            self.w = w

        def __call__(self, x: Any) -> Any:
            return x @ self.w

    jax.tree_util.register_pytree_node(Layer, lambda s: ((s.w,), None), lambda _, c: Layer(*c))

    class Model(Layer):
        @cpu
        def run(self, x: Any) -> Any:
            return jnp.tanh(x @ self.w)

    jax.tree_util.register_pytree_node(Model, lambda s: ((s.w,), None), lambda _, c: Model(*c))
    close(cpu(Layer(W))(X), X @ W)
    close(Model(W).run(X), jnp.tanh(X @ W))
    close(cpu(functools.partial(mlp, b=B))(X, W), mlp(X, W, B))
    close(cpu(functools.partial(functools.partial(mlp, X), W))(B), mlp(X, W, B))
    close(cpu(jax.jit(mlp))(X, W, B), mlp(X, W, B))
    close(cpu(jax.vmap(lambda x: x * 2))(X), X * 2)
    assert cpu(functools.partial(mlp, b=B)).__name__ == "mlp"
    assert cpu(Layer(W)).__name__ == "Layer"

    @fusion(engines=["cpu"])
    def documented(x: Any) -> Any:
        """Twice."""
        return x * 2

    assert isinstance(documented, Fusion)
    assert (documented.__name__, documented.__doc__) == ("documented", "Twice.")
    with pytest.raises(TypeError, match="not callable"):
        fusion(3)


def test_arguments_that_are_no_arrays() -> None:
    with pytest.raises(lawson.InvalidArgumentError, match="argument x is str"):
        cpu(lambda x: x)("a")
    with pytest.raises(lawson.InvalidArgumentError, match="hashable"):
        cpu(lambda x, *, s: x)(X, s={1, 2})


def test_numbers_and_weak_types() -> None:
    fused = cpu(lambda x, s: x * s)
    assert fused(X.astype(jnp.bfloat16), 2.0).dtype == jnp.bfloat16
    assert fused(X, 2).dtype == jnp.float32
    both = fused(2.0, 3.0)
    assert both.weak_type and both == 6.0
    assert cpu(lambda x: x + 1)(np.arange(3, dtype=np.int32)).dtype == jnp.int32
    with jax.enable_x64(True):
        assert cpu(lambda x: x * 2)(np.arange(3.0)).dtype == jnp.float64
    assert cpu(lambda x: x * 2)(X).dtype == jnp.float32


def test_empty_arrays() -> None:
    product = cpu(lambda a, b: a @ b)
    assert product(jnp.zeros((0, 4)), jnp.zeros((4, 3))).shape == (0, 3)
    close(product(jnp.zeros((2, 0)), jnp.zeros((0, 3))), jnp.zeros((2, 3)))
    close(cpu(lambda x: x.sum(0))(jnp.zeros((0, 3))), jnp.zeros(3))
    close(
        jax.grad(lambda a, b: product(a, b).sum(), (0, 1))(jnp.zeros((2, 0)), jnp.zeros((0, 3))),
        (jnp.zeros((2, 0)), jnp.zeros((0, 3))),
    )


def test_closures_over_arrays_and_tracers() -> None:
    def loss(w: Any) -> Any:
        return cpu(lambda x: jnp.sin(x @ w))(X).sum()

    want = jax.grad(lambda w: jnp.sin(X @ w).sum())(W)
    close(jax.grad(loss)(W), want)
    close(jax.jit(jax.grad(loss))(W), want)
    close(
        jax.vmap(loss)(jnp.stack([W, W * 2])),
        jax.vmap(lambda w: jnp.sin(X @ w).sum())(jnp.stack([W, W * 2])),
    )


def test_eight_bits_and_four() -> None:
    nibbles = jnp.asarray(RNG.integers(-8, 8, (8, 16)), jnp.int4)
    y = W.astype(jnp.bfloat16)
    dequantised = cpu(lambda q, y: jnp.float32(q.astype(jnp.bfloat16) @ y))(nibbles, y)
    exact = np.asarray(nibbles, np.float32) @ np.asarray(y, np.float32)
    np.testing.assert_allclose(dequantised, exact, rtol=2**-8, atol=1e-6)
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        eight = X.astype(dtype)
        close(cpu(lambda x: x.astype(jnp.float32) * 2)(eight), eight.astype(jnp.float32) * 2)
        got = cpu(lambda x: (x * 2).astype(dtype))(X)  # noqa: B023
        assert got.dtype == dtype
        close(got.astype(jnp.float32), (X * 2).astype(dtype).astype(jnp.float32))


# ---- programs that outlive the process, or share it --------------------------------------------


def test_export_carries_the_plan() -> None:
    fused = cpu(mlp)
    exported = jax.export.export(jax.jit(fused), disabled_checks=export_checks)(X, W, B)
    assert inspect(fused)(X, W, B).plan_id in str(exported.mlir_module())
    again = jax.export.deserialize(exported.serialize())
    close(again.call(X, W, B), mlp(X, W, B))


def test_symbolic_shapes_are_refused() -> None:
    x = jax.export.symbolic_args_specs((X,), "b, 16")
    with pytest.raises(lawson.UnsupportedError, match=r"argument 'x': the shape \(b, 16\)"):
        jax.export.export(jax.jit(cpu(lambda x: x * 2)), disabled_checks=export_checks)(*x)


def test_export_for_a_gpu_that_is_not_here() -> None:
    """The plan for an H200 is built without one, and is in the program."""
    try:
        told = inspect(fusion(mlp, target="h200"), platform="cuda")(X, W, B)
    except lawson.UnavailableError as error:
        pytest.skip(f"no cuDNN: {error}")
    assert told.engine == "cudnn"
    exported = jax.export.export(
        jax.jit(fusion(mlp, target="h200")), platforms=["cuda"], disabled_checks=export_checks
    )(X, W, B)
    assert told.plan_id in str(exported.mlir_module())


PROGRAM = """
import json, os, sys
import jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from lawson import _core
from lawson.jax import fusion, inspect
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
f = fusion(lambda x: jnp.sin(x) * 3, engines=["cpu"])
y = jax.jit(f)(jnp.arange(4.0))
print(json.dumps({"y": y.tolist(), "hits": sum("cache_hits" in h for h in hits),
                  "plan": inspect(f)(jnp.arange(4.0)).plan_id}))
"""


def test_persistent_compilation_cache(tmp_path: Path) -> None:
    """The second process takes the executable from JAX's cache, and it runs the same plan."""
    told = []
    for _ in range(2):
        found = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
            env={**os.environ, "XLA_FLAGS": ""},
        )
        told.append(json.loads(found.stdout.splitlines()[-1]))
    assert told[0]["hits"] == 0 and told[1]["hits"] >= 1
    assert told[0]["plan"] == told[1]["plan"]
    close(told[0]["y"], told[1]["y"])
    close(jnp.asarray(told[0]["y"]), jnp.sin(jnp.arange(4.0)) * 3)


def test_donated_buffers() -> None:
    fused = jax.jit(cpu(lambda x, y: x * 2 + y), donate_argnums=0)
    given = jnp.array(X)
    close(fused(given, X), X * 3)
    assert given.is_deleted()


def test_threads_share_one_plan() -> None:
    fused = cpu(lambda x: jnp.cos(x) * 0.75)
    _core.reset_stats()
    barrier = threading.Barrier(4)
    results: list[Any] = []

    def call() -> None:
        barrier.wait()
        results.append(fused(X))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        close(result, jnp.cos(X) * 0.75)
    assert json.loads(_core.stats())["totals"]["build_plans"] == 1


def test_cudnn_fusion_carries_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """As JAX's decorator of this name: the StableHLO of the function is the called computation."""
    monkeypatch.setenv("LAWSON_ENGINE", "cpu")

    @cudnn_fusion
    def comp1(x: Any, y: Any, z: Any) -> Any:
        return jnp.float32(jax.lax.batch_matmul(jnp.bfloat16(x), y)) + z

    args = (jnp.ones((2, 8, 8), jnp.int8), jnp.ones((2, 8, 8), jnp.bfloat16), jnp.ones((2, 8, 8)))
    lowered = jax.jit(comp1).lower(*args)
    assert "func.func private @comp1" in lowered.as_text("stablehlo")
    assert "@lawson_plan" in lowered.as_text("stablehlo")
    assert "called_computations=" in lowered.as_text("hlo")
    compiled = lowered.compile()
    assert plans_in(compiled.as_text()) == [inspect(comp1)(*args).plan_id]
    close(compiled(*args), jnp.full((2, 8, 8), 9.0))
    close(comp1(*args), jnp.full((2, 8, 8), 9.0))
    assert "called_computations" not in jax.jit(fusion(mlp)).lower(X, W, B).as_text("hlo")
