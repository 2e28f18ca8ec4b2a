"""Fusions and attention on a GPU: numbers, call targets, plans, command buffers. Needs one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lawson
import lawson.jax


def _has_gpu() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


pytestmark = pytest.mark.skipif(
    not _has_gpu(), reason="no GPU that JAX sees (JAX_PLATFORMS=cuda,cpu on a machine with one)"
)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Any:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def _plan_ids(function: Callable[..., Any], args: tuple[Any, ...], target: str) -> set[str]:
    """The plans in the compiled program, all of whose custom calls are of that target."""
    text = jax.jit(function).lower(*args).compile().as_text()
    targets = set(re.findall(r'custom_call_target="([^"]*)"', text))
    assert target in targets, targets
    assert not [name for name in targets if "cudnn" in name], targets
    return set(re.findall(r'plan_id\\?"? ?= ?\\?"([0-9a-f]{32})', text))


def _close(got: Any, want: Any, what: str) -> None:
    """bf16 results and gradients beside f32's, relative to the largest."""
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    assert got.shape == want.shape
    assert np.isfinite(got).all(), what
    assert np.abs(got - want).max() <= 2.0**-6 * max(np.abs(want).max(), 1.0), what


def _attention_case(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    rng = np.random.default_rng([7, seed])
    batch, length = int(rng.integers(1, 4)), int(rng.choice([64, 77, 128, 200, 333]))
    kv_heads = int(rng.choice([1, 2, 4]))
    heads = kv_heads * int(rng.choice([1, 2]))
    depth = int(rng.choice([64, 128]))
    q = _normal(rng, (batch, length, heads, depth))
    k, v = (_normal(rng, (batch, length, kv_heads, depth)) for _ in range(2))
    more: dict[str, Any] = {"is_causal": bool(rng.integers(2))}
    kind = seed % 5
    if kind == 1:
        more["bias"] = _normal(rng, (1, heads, length, length))
    elif kind == 2:
        more["mask"] = (
            jnp.asarray(rng.random((batch, 1, length, length)) < 0.8).at[..., 0].set(True)
        )
    elif kind == 3:
        lengths = jnp.asarray(rng.integers(1, length + 1, batch), jnp.int32)
        more["query_seq_lengths"] = more["key_value_seq_lengths"] = lengths
    elif kind == 4:
        more.update(is_causal=True, local_window_size=(32, 0))
    return (q, k, v), more


@pytest.mark.parametrize("seed", range(15))
def test_random_attention(seed: int) -> None:
    args, more = _attention_case(seed)
    bias = more.pop("bias", None)

    def ours(q: Any, k: Any, v: Any) -> Any:
        return lawson.jax.dot_product_attention(q, k, v, bias, **more)

    def xla(q: Any, k: Any, v: Any) -> Any:
        host = {name: np.asarray(x) for name, x in more.items() if isinstance(x, jax.Array)}
        wide_bias = None if bias is None else np.asarray(bias, np.float32)
        return jax.nn.dot_product_attention(
            q, k, v, wide_bias, implementation="xla", **{**more, **host}
        )

    with jax.default_device(jax.devices("cpu")[0]):
        want, pull = jax.vjp(jax.jit(xla), *(np.asarray(x, np.float32) for x in args))
        gradients = pull(want)
    want, gradients = (np.asarray(want), [np.asarray(x) for x in gradients])
    got, pull = jax.vjp(jax.jit(ours), *args)
    rows = np.ones(got.shape[:2], bool)
    if "query_seq_lengths" in more:  # what is beyond a length is 0; jax.nn leaves it to chance
        rows = np.arange(got.shape[1])[None] < np.asarray(more["query_seq_lengths"])[:, None]
    keep = rows[..., None, None]
    _close(np.where(keep, got, 0), np.where(keep, want, 0), "o")
    if rows.all():
        for name, a, b in zip("qkv", pull(jnp.asarray(want, got.dtype)), gradients, strict=True):
            _close(a, b, f"d{name}")
    (plan,) = lawson.jax.inspect(ours)(*args)
    assert plan.engine == "cudnn"
    assert _plan_ids(ours, args, "lawson_attention_forward") == {plan.plan_id}


FUSIONS: dict[str, Callable[..., Any]] = {
    "product": lambda x, w, z: jnp.matmul(x, w),
    "bias gelu": lambda x, w, z: jax.nn.gelu(
        jnp.matmul(x, w, preferred_element_type=jnp.float32) + z[0]
    ).astype(jnp.bfloat16),
    "addend": lambda x, w, z: jnp.matmul(x, w, preferred_element_type=jnp.float32) + z,
    "relu": lambda x, w, z: jax.nn.relu(jnp.matmul(x, w)),
    "pre-op": lambda x, w, z: jnp.matmul(x * jnp.bfloat16(0.5), w),
    "row sum": lambda x, w, z: jnp.matmul(x, w, preferred_element_type=jnp.float32).sum(-1),
}


@pytest.mark.parametrize("name", FUSIONS)
def test_fusions(name: str) -> None:
    rng = np.random.default_rng([8, len(name)])
    args = (
        _normal(rng, (128, 256)),
        _normal(rng, (256, 192)) * jnp.bfloat16(0.1),
        _normal(rng, (128, 192), jnp.float32),
    )
    fused = lawson.jax.cudnn_fusion(FUSIONS[name])
    with jax.default_device(jax.devices("cpu")[0]):
        want = np.asarray(FUSIONS[name](*(np.asarray(x, np.float32) for x in args)))
    _close(fused(*args), want, "eager")
    _close(jax.jit(fused)(*args), want, "jit")
    plan = lawson.jax.inspect(fused)(*args)
    assert plan.engine == "cudnn"
    assert _plan_ids(fused, args, "lawson_plan") == {plan.plan_id}


def test_what_does_not_fuse_is_an_error() -> None:
    rng = np.random.default_rng(9)
    x, w, v = (_normal(rng, (64, 64)) for _ in range(3))
    fused = lawson.jax.cudnn_fusion(lambda x, w, v: jnp.matmul(jnp.matmul(x, w), v))
    with pytest.raises(lawson.UnsupportedError, match="matmul"):
        jax.jit(fused)(x, w, v)


def test_eager_and_jit_run_one_plan() -> None:
    rng = np.random.default_rng(10)
    x, w = _normal(rng, (64, 128)), _normal(rng, (128, 64))
    fused = lawson.jax.cudnn_fusion(lambda x, w: jax.nn.silu(jnp.matmul(x, w)))
    jax.block_until_ready(fused(x, w))
    before = lawson.stats()["totals"]
    jax.block_until_ready(jax.jit(fused)(x, w))
    after = lawson.stats()["totals"]
    assert after["build_plans"] == before["build_plans"]
    assert after["execute"] == before["execute"] + 1
