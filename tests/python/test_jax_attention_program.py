"""What is in the compiled program, what is told about it, and the context that patches jax.nn."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.nn
import jax.numpy as jnp
import numpy as np
import pytest

import lawson
import lawson.jax
from lawson.jax import attention, dot_product_attention, patch


def normal(seed: int, *shape: int) -> jax.Array:
    # NumPy's: JAX compiles a program for each shape.
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def calls(text: str) -> list[tuple[str, str, str]]:
    """Target, engine and plan id of every call of Lawson in HLO text."""
    lines = [line for line in text.splitlines() if 'custom_call_target="lawson_' in line]
    pattern = r'custom_call_target="(\w+)".*engine = "(\w+)".*plan_id = "(\w+)"'
    return [re.search(pattern, line).groups() for line in lines]  # type: ignore[union-attr, misc]


def loss(q: Any, k: Any, bias: Any) -> Any:
    return jnp.sum(dot_product_attention(q, k, k, bias, is_causal=True) ** 2)


def test_the_compiled_program_runs_the_plan_that_inspect_names() -> None:
    args = (normal(0, 2, 8, 4, 16), normal(1, 2, 8, 2, 16), normal(2, 1, 4, 8, 8))
    function = jax.grad(loss, argnums=(0, 2))
    found = lawson.jax.inspect(function)(*args)
    text = jax.jit(function).lower(*args).compile().as_text()
    assert [one.name for one in found] == ["attention.forward", "attention.backward"]
    assert calls(text) == [
        ("lawson_attention_forward", "cpu", found[0].plan_id),
        ("lawson_attention_backward", "cpu", found[1].plan_id),
    ]
    for one in found:
        assert one.verdict.supported and one.engine == "cpu"
        assert '"pass": "training"' in one.spec and '"bias_grad": true' in one.spec
        assert one.plan_id in str(one) and one.plan_id in one.json()
    assert " dot(" not in text and " exponential(" not in text


def test_the_engine_may_be_named() -> None:
    q = normal(0, 1, 4, 2, 8)
    for engine in ("cpu", "reference"):
        function = jax.jit(lambda q, engine=engine: dot_product_attention(q, q, q, engine=engine))
        assert [call[1] for call in calls(function.lower(q).compile().as_text())] == [engine]
    with pytest.raises(lawson.Error, match="cudnn"):
        dot_product_attention(q, q, q, engine="cudnn")


def test_workspace_limit_refuses_with_the_size() -> None:
    q = normal(0, 1, 64, 2, 16)
    with pytest.raises(lawson.UnsupportedError, match="workspace"):
        dot_product_attention(q, q, q, workspace_limit=16)


def test_an_exported_program_carries_its_plan() -> None:
    args = (normal(0, 2, 8, 4, 16), normal(1, 2, 8, 2, 16), normal(2, 1, 4, 8, 8))
    function = jax.jit(jax.grad(loss))
    exported = jax.export.export(function, disabled_checks=lawson.jax.export_checks)(*args)
    assert lawson.jax.inspect(jax.grad(loss))(*args)[0].plan_id in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(*args), function(*args))
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(*args), function(*args))


# ---- what is told ------------------------------------------------------------------------------


def run(code: str, **environment: str) -> tuple[str, str]:
    """Output and errors of a process of its own."""
    paths = [p for p in sys.path if p]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(("LAWSON_", "NVTE_"))},
            "PYTHONPATH": os.pathsep.join(paths),
            "JAX_PLATFORMS": "cpu",
            "LAWSON_CACHE": "off",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


_TRAIN = """
    import jax, jax.numpy as jnp
    from lawson.jax import dot_product_attention
    q = jax.random.normal(jax.random.key(0), (2, 8, 4, 16))
    step = jax.jit(jax.grad(lambda q: jnp.sum(dot_product_attention(q, q, q, is_causal=True) ** 2)))
    for _ in range(5):
        q = jax.block_until_ready(step(q))
    compiled = step.lower(q).compile().as_text()
    import re
    print(*re.findall(r'[^_]key = "(\\w+)"', compiled))
"""


def test_cache_debug_counts_what_jax_does() -> None:
    """One build, one load for each pass, however often the step runs; a line for each event."""
    out, err = run(_TRAIN, LAWSON_CACHE_DEBUG="2")
    keys = dict(zip(("forward", "backward"), out.split(), strict=True))
    for which, key in keys.items():
        events = re.findall(rf"(\w+) engine=cpu pass={which} key={key}", err)
        counted = {name: events.count(name) for name in events}
        # The judging as training builds; the lowering, the handle at load, and each of the second
        # to fifth steps find the plan.
        assert counted["CREATE_GRAPH"] == counted["BUILD_PLANS"] == counted["LOAD"] == 1, counted
        assert counted["CACHE_GRAPH"] == 1, counted
        assert counted["EXECUTE"] == 5, counted
        assert counted["HIT"] >= 5, counted
    form = r"^lawson: rank=0 pid=\d+ thread=\d+ dev=\S+ \w+ engine=cpu pass=\w+ key=\w+$"
    lines = [line for line in err.splitlines() if " key=" in line and "thread=" in line]
    assert lines and all(re.match(form, line) for line in lines), lines
    assert "lawson: cache summary: rank=0" in err


def test_debug_tells_engine_and_reasons() -> None:
    _, err = run(_TRAIN, LAWSON_DEBUG="1")
    chosen = re.findall(
        r"^lawson: '(\S+)' \((\w+)\) on cpu: engine=cpu plan=\S+ key=\w+$", err, re.M
    )
    assert {which for _, which in chosen} == {"forward", "backward"}, err
    assert "not reference" not in err
    _, err = run(_TRAIN, LAWSON_DEBUG="1", LAWSON_DEBUG_LEVEL="2")
    assert re.search(r"^lawson:   not reference: ", err, re.M), err


def test_the_persistent_compilation_cache_runs_the_same_plan(tmp_path: Path) -> None:
    """The second process compiles nothing: its program has the plan with it."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    code = _TRAIN + "    print(float(jnp.sum(q)))\n"
    first, _ = run(code, **cache)
    assert list(tmp_path.iterdir())
    second, _ = run(code, **cache)
    assert second == first


# ---- patch -------------------------------------------------------------------------------------


class Block:
    """As Flax and Haiku models do: jax.nn's attribute, when it is called."""

    def __call__(self, x: Any) -> Any:
        return jax.nn.dot_product_attention(x, x, x, is_causal=True)


def targets(function: Any, *args: Any) -> list[str]:
    return [call[0] for call in calls(jax.jit(function).lower(*args).compile().as_text())]


def test_patch_makes_a_model_use_lawson_and_restores() -> None:
    x, block, original = normal(0, 1, 6, 2, 8), Block(), jax.nn.dot_product_attention
    before = block(x)
    assert targets(block, x) == []
    with patch():
        assert targets(block, x) == ["lawson_attention_forward"]
        inside = block(x)
        with patch(engine="reference"):
            compiled = jax.jit(block).lower(x).compile()
            assert [call[1] for call in calls(compiled.as_text())] == ["reference"]
        assert jax.nn.dot_product_attention is not original
    assert jax.nn.dot_product_attention is original
    assert targets(block, x) == []
    np.testing.assert_allclose(inside, before, rtol=1e-5, atol=1e-6)


def test_arrays_among_patchs_options_are_what_they_are() -> None:
    """Also long ones, whose texts are alike: what was traced with one is not used with another."""
    x = normal(0, 1, 1200, 1, 8)
    call = jax.jit(lambda x: jax.nn.dot_product_attention(x, x, x))
    for boundary in (600, 300, 600):
        ids = jnp.asarray(np.arange(1200) >= boundary, jnp.int32)[None]
        with patch(segment_ids=ids, max_segments=2):
            got = call(x)
        expected = lawson.jax.dot_product_attention(x, x, x, segment_ids=ids, max_segments=2)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_patch_leaves_what_somebody_else_put_there() -> None:
    original = jax.nn.dot_product_attention
    try:
        with patch():
            theirs = lambda *args, **kwargs: original(*args, **kwargs)
            jax.nn.dot_product_attention = theirs
        assert jax.nn.dot_product_attention is theirs
    finally:
        jax.nn.dot_product_attention = original


def test_patch_restores_after_an_error_and_refuses_loudly() -> None:
    original = jax.nn.dot_product_attention
    x = normal(0, 1, 64, 2, 16)
    with pytest.raises(lawson.UnsupportedError, match="workspace"), patch(workspace_limit=16):
        Block()(x)
    assert jax.nn.dot_product_attention is original


def test_what_was_traced_outside_is_not_used_inside() -> None:
    """One jitted function, on both sides of the context."""
    x = normal(0, 1, 6, 2, 8)
    mask = jnp.zeros((1, 1, 6, 6), bool)  # all hidden: JAX gives a mean, Lawson 0

    @jax.jit
    def hidden(x: Any) -> Any:
        return jax.nn.dot_product_attention(x, x, x, mask=mask)

    assert np.all(np.asarray(hidden(x)) != 0)
    with patch():
        assert np.all(np.asarray(hidden(x)) == 0)
    assert np.all(np.asarray(hidden(x)) != 0)


def test_patch_is_for_its_own_thread() -> None:
    """Another thread goes on with JAX's own; a task that is started inside takes it along."""
    x = normal(0, 1, 6, 2, 8)
    seen: dict[str, list[str]] = {}

    def look(name: str) -> None:
        seen[name] = targets(lambda x: Block()(x) + 1, x)

    async def task() -> None:
        look("task")

    with patch():
        thread = threading.Thread(target=look, args=("thread",))
        thread.start()
        thread.join()
        asyncio.run(task())
        look("here")
    assert seen == {
        "thread": [],
        "task": ["lawson_attention_forward"],
        "here": ["lawson_attention_forward"],
    }


def test_attention_in_a_program_with_donated_buffers() -> None:
    """A decode step that writes its cache in place: the caches come back in the memory given."""
    cache = [normal(n, 1, 16, 2, 8) for n in (1, 2)]
    new = normal(3, 1, 1, 2, 8)

    def step(k: Any, v: Any, new: Any, length: Any) -> Any:
        return attention(
            new, k, v, k_new=new, v_new=new, seqlens_kv=length, mask="causal_bottom_right"
        )

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*cache, new, jnp.array([4])).compile()
    header = compiled.as_text().splitlines()[0]
    assert header.count("may-alias") + header.count("must-alias") == 2, header
    assert "copy(" not in compiled.as_text()
    expected = [np.asarray(x).copy() for x in cache]
    for x in expected:
        x[:, 3] = np.asarray(new)[:, 0]
    _, k, v = compiled(*cache, new, jnp.array([4]))
    np.testing.assert_array_equal(k, expected[0])
    np.testing.assert_array_equal(v, expected[1])


@pytest.mark.parametrize(
    ("named", "error", "words"),
    [
        ("x", lawson.InvalidArgumentError, "'x' is not allowed; expected.* cudnn, cpu, reference"),
        ("cudnn", lawson.UnsupportedError, "LAWSON_ENGINE names cudnn, of which none runs there"),
    ],
)
def test_an_engine_of_the_environment_that_cannot_run_is_an_error(
    monkeypatch: pytest.MonkeyPatch, named: str, error: type[Exception], words: str
) -> None:
    q = jnp.ones((1, 3, 1, 8 if named == "x" else 16))
    monkeypatch.setenv("LAWSON_ENGINE", named)
    with pytest.raises(error, match=words):
        dot_product_attention(q, q, q)
    monkeypatch.setenv("LAWSON_ENGINE", "cudnn,reference")
    (told,) = lawson.jax.inspect(dot_product_attention)(q, q, q)
    assert told.engine == "reference"
