"""Attention over eight virtual devices: sharded jit by Shardy and by GSPMD, shard_map, pmap.

Every sharded program has to give what one device gives, with the gradients of everything, and to
hold calls of Lawson for the shapes of a shard; nothing is gathered on the way.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lawson
from lawson.jax import attention, dot_product_attention

WRT = (0, 1, 2, 3, 4)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}  # sums over shards in another order


@functools.cache
def mesh(axis_type: str = "Auto") -> jax.sharding.Mesh:
    kind = getattr(jax.sharding.AxisType, axis_type)
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))


def normal(seed: int, *shape: int) -> jax.Array:
    # NumPy's: JAX compiles a program for each shape.
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def loss(q: Any, k: Any, v: Any, bias: Any, sink: Any, lengths: Any) -> Any:
    o, lse = attention(
        q, k, v, bias=bias, sink=sink, seqlens_kv=lengths, mask="causal", return_lse=True
    )
    return jnp.sum(o * jnp.cos(o)) + jnp.sum(jnp.sin(lse)), o


def arguments(heads: int, kv_heads: int, bias: tuple[int, ...]) -> tuple[jax.Array, ...]:
    return (
        normal(0, 8, 12, heads, 8),
        normal(1, 8, 12, kv_heads, 8),
        normal(2, 8, 12, kv_heads, 16),
        normal(3, *bias),
        normal(4, heads),
        jnp.arange(5, 13, dtype=jnp.int32),
    )


def calls(text: str, which: str) -> int:
    return text.count(f'custom_call_target="lawson_attention_{which}"')


@pytest.mark.parametrize(
    ("heads", "kv_heads", "of_q", "of_k", "bias"),
    [
        (4, 4, P("x"), P("x"), (1, 4, 12, 12)),
        (4, 2, P("x", None, "y"), P("x", None, "y"), (8, 1, 1, 12)),
        (4, 1, P("x", None, "y"), P("x"), (1, 1, 12, 1)),
        (4, 4, P(None, None, "x"), P(None, None, "x"), (8, 4, 1, 12)),
        (2, 2, P(("x", "y")), P(("x", "y")), (1, 1, 1, 12)),
        (4, 2, P("x"), P(), (1, 4, 1, 12)),
    ],
    ids=["batch", "batch and heads", "one kv head", "heads", "both axes", "only q"],
)
def test_sharded_jit(
    partitioner: str, heads: int, kv_heads: int, of_q: P, of_k: P, bias: tuple[int, ...]
) -> None:
    args = arguments(heads, kv_heads, bias)
    run = jax.value_and_grad(loss, argnums=WRT, has_aux=True)
    expected = jax.jit(run)(*args)
    shardings = [NamedSharding(mesh(), spec) for spec in (of_q, of_k, of_k, P(), P(), P())]
    placed = tuple(jax.device_put(x, s) for x, s in zip(args, shardings, strict=True))
    compiled = jax.jit(run).lower(*placed).compile()
    text = compiled.as_text()
    assert calls(text, "forward") == 1 and calls(text, "backward") == 2  # of o, and of lse
    assert "all-gather" not in text
    got = compiled(*placed)
    (_, o), gradients = got
    assert o.sharding.is_equivalent_to(NamedSharding(mesh(), of_q), 4)
    assert gradients[0].sharding.is_equivalent_to(NamedSharding(mesh(), of_q), 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), got, expected)


@pytest.mark.parametrize(
    ("of_q", "of_k", "message"),
    [
        (P("x", "y"), P("x"), "q is split along its sequence.*context parallelism"),
        (P("x"), P("x", "y"), "k is split along its sequence.*context parallelism"),
    ],
)
def test_a_split_sequence_is_refused(partitioner: str, of_q: P, of_k: P, message: str) -> None:
    q, k, v, *_ = arguments(4, 4, (1, 1, 1, 1))
    q = jax.device_put(q, NamedSharding(mesh(), of_q))
    k = jax.device_put(k, NamedSharding(mesh(), of_k))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"(?s)UnsupportedError: .*{message}"):
        jax.jit(dot_product_attention)(q, k, v)


def test_rows_with_segments_are_split_by_shard_map_alone(partitioner: str) -> None:
    q = jax.device_put(normal(0, 8, 12, 2, 8), NamedSharding(mesh(), P("x")))

    def call(q: Any) -> Any:
        return attention(q, q, q, segment_ids=jnp.ones((8, 12), jnp.int32), max_segments=1)

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)tokens of q .*Use jax\.shard_map"):
        jax.jit(call)(q)


def test_heads_that_do_not_divide_are_refused(partitioner: str) -> None:
    q, k, v, *_ = arguments(4, 2, (1, 1, 1, 1))
    q = jax.device_put(q, NamedSharding(mesh(), P(None, None, "x")))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="(?s)4 heads of q and 2 of k and v cannot"
    ):
        jax.jit(dot_product_attention)(q, k, v)


def _masks(q: Any, key: Any) -> Any:
    o, kept = attention(q, q, q, dropout_rate=0.5, dropout_key=key, return_dropout_mask=True)
    return jnp.sum(o**2), (o, kept)


def _check_dropout(q: Any, key: Any, dq: Any, o: Any, kept: Any) -> None:
    """Masks of shards differ, and the backward used those of the forward."""
    kept = np.asarray(kept)
    assert len({kept[n : n + 2].tobytes() for n in range(0, 8, 2)}) == 4

    def plain(q: Any) -> Any:
        p = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, q) / np.sqrt(8), axis=-1)
        return jnp.einsum("bhst,bthd->bshd", p * kept * 2.0, q)

    np.testing.assert_allclose(o, plain(q), **CLOSE)
    np.testing.assert_allclose(
        dq, jax.grad(lambda q: jnp.sum(plain(q) ** 2))(q), rtol=2e-4, atol=2e-4
    )


def test_dropout_differs_between_shards(partitioner: str) -> None:
    q, key = normal(0, 8, 12, 2, 8), jax.random.key(3)
    placed = jax.device_put(q, NamedSharding(mesh(), P("x")))
    dq, (o, kept) = jax.jit(jax.grad(_masks, has_aux=True))(placed, key)
    _check_dropout(q, key, dq, o, kept)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma: bool) -> None:
    """Replicated operands get the gradient of all shards; results vary as the operands do."""
    args = arguments(4, 2, (1, 4, 1, 12))
    specs = (P("x", None, "y"), P("x", None, "y"), P("x", None, "y"), P(None, "y"), P("y"), P("x"))

    def total(*args: Any) -> Any:
        def body(q: Any, k: Any, v: Any, bias: Any, sink: Any, lengths: Any) -> Any:
            more = {"bias": bias, "sink": sink, "seqlens_kv": lengths}
            return attention(q, k, v, mask="causal", return_lse=True, **more)

        o, lse = jax.shard_map(
            body,
            mesh=mesh(),
            in_specs=specs,
            out_specs=(P("x", None, "y"), P("x", "y")),
            check_vma=check_vma,
        )(*args)
        return jnp.sum(o * jnp.cos(o)) + jnp.sum(jnp.sin(lse)), o

    run = jax.value_and_grad(total, argnums=WRT, has_aux=True)
    got = jax.jit(run)(*args)
    expected = jax.jit(jax.value_and_grad(loss, argnums=WRT, has_aux=True))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), got, expected)


def test_shard_map_with_gradients_inside() -> None:
    """Gradients that are taken on each shard have the types that the operands have."""
    q = normal(0, 8, 12, 2, 8)
    bias = normal(1, 1, 2, 1, 12)

    def body(q: Any, bias: Any) -> Any:
        f = lambda q, bias: jnp.sum(dot_product_attention(q, q, q, bias) ** 2)  # noqa: E731
        dq, dbias = jax.grad(f, argnums=(0, 1))(q, bias)
        return dq, dbias

    dq, dbias = jax.jit(
        jax.shard_map(body, mesh=mesh(), in_specs=(P("x"), P()), out_specs=(P("x"), P()))
    )(q, bias)
    expected = jax.grad(
        lambda q, bias: jnp.sum(dot_product_attention(q, q, q, bias) ** 2), argnums=(0, 1)
    )(q, bias)
    np.testing.assert_allclose(dq, expected[0], **CLOSE)
    np.testing.assert_allclose(dbias, expected[1], **CLOSE)


def test_dropout_differs_between_shards_of_a_shard_map() -> None:
    q, key = normal(0, 8, 12, 2, 8), jax.random.key(3)

    def total(q: Any) -> Any:
        body = lambda q, key: _masks(q, key)[1]  # noqa: E731
        o, kept = jax.shard_map(
            body, mesh=mesh(), in_specs=(P("x"), P()), out_specs=(P("x"), P("x"))
        )(q, key)
        return jnp.sum(o**2), (o, kept)

    dq, (o, kept) = jax.jit(jax.grad(total, has_aux=True))(q)
    _check_dropout(q, key, dq, o, kept)


def test_ragged_sequences_in_shard_map() -> None:
    """Data parallelism of packed rows: each shard has sequences of its own."""
    q = normal(0, 8, 12, 2, 8)
    ids = jnp.sort(jax.random.randint(jax.random.key(1), (8, 12), 1, 4), axis=1)

    def call(q: Any, ids: Any) -> Any:
        return attention(q, q, q, segment_ids=ids, max_segments=3)

    got = jax.jit(jax.shard_map(call, mesh=mesh(), in_specs=P("x"), out_specs=P("x")))(q, ids)
    np.testing.assert_allclose(got, call(q, ids), **CLOSE)


def test_pmap() -> None:
    q = normal(0, 8, 2, 12, 2, 8)
    f = lambda q: jnp.sum(dot_product_attention(q, q, q, is_causal=True) ** 2)  # noqa: E731
    got = jax.pmap(jax.value_and_grad(f))(q)
    expected = jax.vmap(jax.value_and_grad(f))(q)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), got, expected)


def test_vmap_in_a_sharded_program(partitioner: str) -> None:
    """The mapped axis, sharded, is part of the batch that is split."""
    q = normal(0, 8, 2, 12, 2, 8)
    f = jax.vmap(lambda q: dot_product_attention(q, q, q, is_causal=True))
    placed = jax.device_put(q, NamedSharding(mesh(), P("x")))
    compiled = jax.jit(f).lower(placed).compile()
    assert "all-gather" not in compiled.as_text()
    np.testing.assert_allclose(compiled(placed), f(q), **CLOSE)


@pytest.mark.parametrize("spec", [P("data"), P(None, None, "model"), P("data", None, "model")])
def test_axes_with_long_names(spec: P) -> None:
    """The gradient of what is split is no sum over its axis, whatever that is called."""
    named = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    arrays = [normal(seed, 4, 16, 2, 8) for seed in range(4)]

    def pulled(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> Any:
        return jax.vjp(functools.partial(attention, scale=0.5), q, k, v)[1](g)

    want = jax.jit(pulled)(*arrays)
    got = jax.jit(pulled)(*(jax.device_put(a, NamedSharding(named, spec)) for a in arrays))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)


@pytest.mark.parametrize("of_k", [P("x", None, "y"), P("x")])
def test_explicit_mesh_axes(of_k: P) -> None:
    """Where shardings are part of types: results have those that the operands say."""
    q, k, _, bias, sink, lengths = arguments(4, 2, (1, 4, 1, 12))
    args = (q, k, k, bias, sink, lengths)
    specs = (P("x", None, "y"), of_k, of_k, P(), P(), P())
    explicit = mesh("Explicit")
    placed = tuple(
        jax.device_put(x, NamedSharding(explicit, spec))
        for x, spec in zip(args, specs, strict=True)
    )
    run = jax.value_and_grad(loss, argnums=WRT, has_aux=True)
    with jax.set_mesh(explicit):
        told = jax.eval_shape(run, *placed)
        got = jax.jit(run)(*placed)
        split = jax.device_put(q, NamedSharding(explicit, P("x", "y")))
        with pytest.raises(lawson.UnsupportedError, match="context parallelism"):
            jax.jit(dot_product_attention)(split, k, k)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), got, jax.jit(run)(*args))
    (_, o), gradients = told
    assert o.sharding.spec == P("x", None, "y", None)
    for gradient, operand in zip(gradients, placed, strict=False):
        assert tuple(gradient.sharding.spec) == tuple(jax.typeof(operand).sharding.spec)
