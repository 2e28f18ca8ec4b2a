"""What attention in JAX asks of cuDNN on an H200: judged and built by cuDNN, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest

import lawson
import lawson.jax
from lawson.jax import attention, dot_product_attention

pytestmark = pytest.mark.skipif(
    "h200" not in {target["name"] for target in lawson.targets()}, reason="built without cuDNN"
)
F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
Q, KV = (2, 1024, 16, 128), (2, 1024, 4, 128)


def shape(dims: tuple[int, ...], dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def ids() -> jax.Array:
    return jnp.ones((2, 1024), I32)


def keep() -> jax.Array:
    return jnp.ones((2, 1, 1, 1024), bool)


Call = Callable[..., Any]
TRAINING: dict[str, tuple[Call, tuple[Any, ...]]] = {
    "plain": (lambda *x, **m: dot_product_attention(*x, **m), (Q, KV, KV)),
    "causal": (lambda *x, **m: dot_product_attention(*x, is_causal=True, **m), (Q, KV, KV)),
    "window": (
        lambda *x, **m: dot_product_attention(*x, is_causal=True, local_window_size=(128, 0), **m),
        (Q, KV, KV),
    ),
    "window without causal": (
        lambda *x, **m: dot_product_attention(*x, local_window_size=(128, 0), **m),
        (Q, KV, KV),
    ),
    "lengths": (
        lambda *x, **m: dot_product_attention(
            *x, key_value_seq_lengths=jnp.array([700, 1024]), **m
        ),
        (Q, KV, KV),
    ),
    "mask": (lambda *x, **m: dot_product_attention(*x, mask=keep(), **m), (Q, KV, KV)),
    "bias": (lambda *x, **m: dot_product_attention(*x, **m), (Q, KV, KV, (1, 16, 1024, 1024))),
    "segments": (
        lambda *x, **m: attention(*x, mask="causal", segment_ids=ids(), max_segments=8, **m),
        (Q, KV, KV),
    ),
    "softcap": (lambda *x, **m: attention(*x, mask="causal", softcap=30.0, **m), (Q, KV, KV)),
    "dropout": (
        lambda *x, **m: attention(*x, dropout_rate=0.1, dropout_key=jax.random.key(0), **m),
        (Q, KV, KV),
    ),
    "values of less depth": (
        lambda *x, **m: attention(*x, mask="causal", **m),
        ((2, 1024, 16, 192), (2, 1024, 16, 192), (2, 1024, 16, 128)),
    ),
}


@pytest.mark.parametrize("name", TRAINING)
def test_training_is_cudnn_forward_and_backward(name: str) -> None:
    function, dims = TRAINING[name]
    args = [shape(d) for d in dims]

    def loss(*args: Any) -> Any:
        return function(*args, target="h200").astype(F32).sum()

    gradient = jax.grad(loss, argnums=tuple(range(len(args))))
    try:
        forward, backward = lawson.jax.inspect(gradient, platform="cuda")(*args)
    except lawson.UnavailableError as error:
        pytest.skip(f"no cuDNN: {error}")
    assert (forward.name, backward.name) == ("attention.forward", "attention.backward")
    assert forward.engine == backward.engine == "cudnn"
    assert forward.verdict.supported and '"pass": "training"' in forward.spec


def test_a_decode_step_with_pages_is_cudnn() -> None:
    def decode(q: Any, pages: Any, table: Any, lengths: Any) -> Any:
        return attention(q, pages, pages, page_table_k=table, seqlens_kv=lengths, target="h200")

    args = [
        shape((8, 1, 16, 128)),
        shape((256, 64, 4, 128)),
        shape((8, 32), I32),
        shape((8,), I32),
    ]
    try:
        (found,) = lawson.jax.inspect(decode, platform="cuda")(*args)
    except lawson.UnavailableError as error:
        pytest.skip(f"no cuDNN: {error}")
    assert found.engine == "cudnn"


def test_a_program_for_a_gpu_that_is_not_here_has_its_plan() -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        return dot_product_attention(q, k, v, is_causal=True, target="h200")

    args = [shape(d) for d in (Q, KV, KV)]
    try:
        (found,) = lawson.jax.inspect(call, platform="cuda")(*args)
    except lawson.UnavailableError as error:
        pytest.skip(f"no cuDNN: {error}")
    exported = jax.export.export(
        jax.jit(call), platforms=["cuda"], disabled_checks=lawson.jax.export_checks
    )(*args)
    assert found.plan_id in exported.mlir_module()
    with pytest.raises(lawson.UnsupportedError, match="target 'h200' is none of platform 'cpu'"):
        jax.jit(call).lower(*args)


def test_what_cudnn_refuses_has_its_reasons() -> None:
    """A depth that it has not: refused when the program is lowered, by name."""
    q = shape((2, 1024, 16, 130))

    def loss(q: Any) -> Any:
        return dot_product_attention(q, q, q, target="h200").astype(F32).sum()

    try:
        with pytest.raises(lawson.UnsupportedError, match="head_dim"):
            lawson.jax.inspect(jax.grad(loss), platform="cuda")(q)
    except lawson.UnavailableError as error:
        pytest.skip(f"no cuDNN: {error}")
