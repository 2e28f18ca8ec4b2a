"""Attention in JAX: the signature of jax.nn, what is refused, faults of others that it has not."""

from __future__ import annotations

import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_oracle as oracle
import lawson
from lawson.jax import attention, dot_product_attention


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    # NumPy's: JAX compiles a program for each shape.
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def dense(q: Any, k: Any, v: Any, see: Any, **more: Any) -> oracle.Attention:
    """The oracle's answer for [b, s, h, d] arrays."""
    q, k, v = (np.asarray(x.astype(jnp.float32)).transpose(0, 2, 1, 3) for x in (q, k, v))
    return oracle.Attention(q, k, v, np.asarray(see), 1 / np.sqrt(q.shape[-1]), **more)


def check_output(got: Any, answer: oracle.Attention, dtype: str = "float32") -> None:
    order = (0, 2, 1, 3)
    oracle.check("o", got, answer.o.transpose(order), answer.bound(dtype).transpose(order))


ALL = np.ones((1, 1, 1, 1), bool)


# ---- the signature of jax.nn -------------------------------------------------------------------


def test_signature_is_that_of_jax_nn() -> None:
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(dot_product_attention).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
        assert ours[name].default == parameter.default, name
    assert all(p.kind == p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])


def _calls() -> dict[str, dict[str, Any]]:
    mask = np.random.default_rng(9).random((2, 4, 12, 12)) < 0.7
    mask[..., 0] = True
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "scale": {"scale": 0.3},
        "bias": {"bias": normal(3, 2, 4, 12, 12)},
        "bias of one head": {"bias": normal(3, 1, 1, 12, 12), "is_causal": True},
        "mask": {"mask": mask},
        "window": {"local_window_size": (3, 2)},
        "window of one number": {"local_window_size": 2, "is_causal": True},
        "lengths": {
            "query_seq_lengths": jnp.array([5, 12], jnp.int32),
            "key_value_seq_lengths": jnp.array([7, 12], jnp.int32),
        },
        "lengths of keys": {
            "key_value_seq_lengths": jnp.array([7, 1], jnp.int32),
            "is_causal": True,
        },
    }


@pytest.mark.parametrize(
    ("name", "heads"),
    [*((name, 2) for name in _calls()), ("bias", 4), ("causal", 4), ("causal", 1)],
)
def test_results_are_those_of_xla(name: str, heads: int) -> None:
    """Output, residual and gradients, where JAX's own have a meaning: no row sees nothing."""
    q, k, v = normal(0, 2, 12, 4, 16), normal(1, 2, 12, heads, 16), normal(2, 2, 12, heads, 16)
    kwargs = _calls()[name]
    do = normal(4, 2, 12, 4, 16)

    def run(function: Any, **more: Any) -> Any:
        def loss(q: Any, k: Any, v: Any) -> Any:
            o, lse = function(q, k, v, **kwargs, **more, return_residual=True)
            return jnp.sum(o * do), (o, lse)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    (_, (o, lse)), gradients = run(dot_product_attention)
    (_, (xla_o, xla_lse)), xla_gradients = run(jax.nn.dot_product_attention, implementation="xla")
    if "query_seq_lengths" in kwargs:  # theirs is a large number there
        rows = np.arange(12)[None, :, None] < np.asarray(kwargs["query_seq_lengths"])[:, None, None]
        assert np.all(np.isneginf(np.where(rows, -np.inf, lse)))
        lse, xla_lse = np.where(rows, lse, 0), np.where(rows, xla_lse, 0)
    # Two f32 computations of sums of 16 and 12 terms, of values of a few units.
    close = {"rtol": 2e-5, "atol": 2e-5}
    np.testing.assert_allclose(o, xla_o, **close)
    np.testing.assert_allclose(lse, xla_lse, **close)
    for got, expected in zip(gradients, xla_gradients, strict=True):
        np.testing.assert_allclose(got, expected, **close)


def test_three_dims_are_one_sequence() -> None:
    q, k, v = normal(0, 6, 4, 8), normal(1, 9, 2, 8), normal(2, 9, 2, 8)
    o, lse = dot_product_attention(q, k, v, return_residual=True)
    whole, whole_lse = dot_product_attention(q[None], k[None], v[None], return_residual=True)
    assert o.shape == (6, 4, 8) and lse.shape == (6, 4)
    np.testing.assert_array_equal(o, whole[0])
    np.testing.assert_array_equal(lse, whole_lse[0])


@pytest.mark.parametrize("implementation", ["xla", "cudnn", None])
def test_implementation_is_accepted(implementation: Any) -> None:
    q = normal(0, 1, 4, 2, 8)
    np.testing.assert_array_equal(
        dot_product_attention(q, q, q, implementation=implementation),
        dot_product_attention(q, q, q),
    )


# ---- faults that others have -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_log_sum_exp_is_f32_whatever_the_dtype(dtype: Any) -> None:
    q, k = normal(0, 1, 5, 2, 16, dtype=dtype) * 3, normal(1, 1, 7, 2, 16, dtype=dtype)
    _, lse = dot_product_attention(q, k, k, return_residual=True)
    assert lse.dtype == jnp.float32
    answer = dense(q, k, k, ALL)
    oracle.check("lse", lse, answer.lse.swapaxes(1, 2), answer.lse_bound().swapaxes(1, 2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(0, 0), (2, 0), (0, 2), (3, 1), (100, 0)])
def test_window_bounds_hold_without_causal(window: tuple[int, int], causal: bool) -> None:
    q, k, v = normal(0, 1, 9, 2, 8), normal(1, 1, 9, 2, 8), normal(2, 1, 9, 2, 8)
    got = dot_product_attention(q, k, v, local_window_size=window, is_causal=causal)
    see = oracle.visible("causal" if causal else "none", window, [9], [9], 9, 9)
    check_output(got, dense(q, k, v, see))
    if window[1] == 0:  # and never the future, to the bit
        future = v.at[:, 5:].set(1e9)
        other = dot_product_attention(q, k, future, local_window_size=window, is_causal=causal)
        np.testing.assert_array_equal(got[:, :5], other[:, :5])


@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 7), (1, 1, 1, 7), (2, 4, 1, 1), (1, 4, 5, 1), (7,), (5, 7)]
)
def test_bias_and_mask_broadcast_over_every_dim(shape: tuple[int, ...]) -> None:
    q, k, v = normal(0, 2, 5, 4, 8), normal(1, 2, 7, 2, 8), normal(2, 2, 7, 2, 8)
    bias = normal(3, *shape)
    mask = np.random.default_rng(4).random(shape) < 0.6
    do = normal(5, 2, 5, 4, 8)

    def loss(bias: Any) -> Any:
        o = dot_product_attention(q, k, v, bias, mask)
        return jnp.sum(o * do), o

    dbias, o = jax.jit(jax.grad(loss, has_aux=True))(bias)
    full = np.broadcast_to(np.asarray(bias), (2, 4, 5, 7))
    answer = dense(q, k, v, np.broadcast_to(np.asarray(mask), (2, 4, 5, 7)), bias=full)
    check_output(o, answer)
    rank4 = (1,) * (4 - len(shape)) + shape
    value, bound = answer.gradients(np.asarray(do).transpose(0, 2, 1, 3))["bias"]
    oracle.check(
        "dbias",
        np.asarray(dbias).reshape(rank4),
        oracle.reduce_to(value, rank4),
        oracle.reduce_to(bound, rank4),
    )


def test_a_bias_gradient_is_computed_only_when_it_is_asked_for() -> None:
    q, bias = normal(0, 1, 4, 2, 8), normal(1, 1, 2, 4, 4)

    def loss(q: Any, bias: Any) -> Any:
        return dot_product_attention(q, q, q, bias).sum()

    without = str(jax.make_jaxpr(jax.grad(loss))(q, bias))
    assert "bias_grad=False" in without and "bias_grad=True" not in without
    assert "bias_grad=True" in str(jax.make_jaxpr(jax.grad(loss, argnums=1))(q, bias))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads_of_packed_sequences_read_their_own_keys(kv_heads: int) -> None:
    """Offsets of ragged k and v count their heads, not those of q."""
    q, k, v = normal(0, 2, 8, 4, 8), normal(1, 2, 8, kv_heads, 8), normal(2, 2, 8, kv_heads, 8)
    ids = jnp.array([[1, 1, 1, 2, 2, 0, 0, 0], [1, 2, 2, 2, 2, 2, 3, 3]])
    do = normal(3, 2, 8, 4, 8)

    def loss(q: Any, k: Any, v: Any) -> Any:
        o = attention(q, k, v, segment_ids=ids, max_segments=3, mask="causal")
        return jnp.sum(o * do), o

    gradients, o = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    same = np.asarray((ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] > 0))[:, None]
    answer = dense(q, k, v, same & np.tril(np.ones((8, 8), bool)))
    check_output(o, answer)
    found = answer.gradients(np.asarray(do).transpose(0, 2, 1, 3))
    for name, got in zip("qkv", gradients, strict=True):
        value, bound = (x.transpose(0, 2, 1, 3) for x in found[name])
        oracle.check("d" + name, got, value, bound)


def test_vmap_keeps_the_depth_of_v() -> None:
    q, k, v = normal(0, 3, 2, 5, 4, 8), normal(1, 3, 2, 6, 2, 8), normal(2, 3, 2, 6, 2, 24)
    o = jax.vmap(dot_product_attention)(q, k, v)
    assert o.shape == (3, 2, 5, 4, 24)
    np.testing.assert_array_equal(
        o, jnp.stack([dot_product_attention(*x) for x in zip(q, k, v, strict=True)])
    )


def test_paged_attention_is_not_differentiated() -> None:
    q, pages = normal(0, 2, 1, 4, 8), normal(1, 6, 4, 2, 8)
    table = jnp.array([[0, 2], [5, 1]])

    def loss(q: Any) -> Any:
        return attention(q, pages, pages, page_table_k=table, seqlens_kv=jnp.array([3, 8])).sum()

    loss(q)
    with pytest.raises(lawson.UnsupportedError, match="paged cache.*no gradients"):
        jax.grad(loss)(q)


def test_fp8_is_refused_by_name() -> None:
    """So there is no amax that a device could hold alone."""
    q = normal(0, 1, 4, 2, 16).astype(jnp.float8_e4m3fn)
    with pytest.raises(
        lawson.InvalidArgumentError,
        match="query: dtype float8_e4m3fn is not allowed; expected one of float16",
    ):
        dot_product_attention(q, q, q)


@pytest.mark.parametrize("softmax", ["vanilla", "off_by_one", "learnable"])
def test_rows_that_see_nothing_are_0_with_gradients_0(softmax: str) -> None:
    q, k, v = normal(0, 1, 4, 2, 8), normal(1, 1, 6, 2, 8), normal(2, 1, 6, 2, 8)
    mask = np.ones((1, 1, 4, 6), bool)
    mask[:, :, 1] = False
    sink = normal(3, 2) if softmax == "learnable" else None

    def call(q: Any) -> Any:
        kind = "vanilla" if softmax == "learnable" else softmax
        return attention(q, k, v, attn_mask=mask, sink=sink, softmax=kind, return_lse=True)

    (o, lse), pull = jax.vjp(call, q)
    dlse = normal(5, 1, 2, 4)
    if softmax == "vanilla":  # what users' code makes of an infinite log-sum-exp stays out
        dlse = dlse.at[:, :, 1].set(jnp.nan)
    (dq,) = pull((normal(4, 1, 4, 2, 8), dlse))
    assert np.all(np.asarray(o)[:, 1] == 0) and np.all(np.asarray(o)[:, 0] != 0)
    assert np.all(np.asarray(dq)[:, 1] == 0) and np.all(np.asarray(dq)[:, 0] != 0)
    expected = {"vanilla": -np.inf, "off_by_one": 0.0, "learnable": None if sink is None else sink}
    np.testing.assert_array_equal(
        np.asarray(lse)[0, :, 1], np.broadcast_to(expected[softmax], (2,))
    )


def test_the_smallest_numbers_of_f16_are_not_flushed() -> None:
    """XLA's threads treat subnormals as 0; f16's begin at 6e-5."""
    v = jnp.asarray([[[[4e-5, -1e-6, 6e-5, 1e-3, 6e-8, 0, 0, 0]]]], jnp.float16)
    zero = jnp.zeros_like(v)
    np.testing.assert_array_equal(dot_product_attention(zero, zero, v), v)


def test_empty_batches_and_sequences() -> None:
    q, k = normal(0, 2, 4, 2, 8), normal(1, 2, 6, 2, 8)
    o, lse = dot_product_attention(q[:0], k[:0], k[:0], return_residual=True)
    assert o.shape == (0, 4, 2, 8) and lse.shape == (0, 4, 2)
    o, lse = dot_product_attention(q, k[:, :0], k[:, :0], return_residual=True)
    assert np.all(np.asarray(o) == 0) and np.all(np.isneginf(lse))
    dk = jax.grad(lambda k: dot_product_attention(q[:, :0], k, k).sum())(k)
    assert np.all(np.asarray(dk) == 0) and dk.shape == k.shape
    assert (
        jax.grad(lambda q: dot_product_attention(q, k[:, :0], k[:, :0]).sum())(q).shape == q.shape
    )
    nothing = jnp.zeros((0, 2, 8))
    for tokens in (q[0], nothing):  # ragged: without a key, and without anything
        o, lse = attention(
            tokens,
            nothing,
            nothing,
            layout="thd",
            cu_seqlens_q=jnp.array([0, tokens.shape[0]]),
            cu_seqlens_kv=jnp.array([0, 0]),
            max_seqlen_q=4,
            max_seqlen_kv=4,
            return_lse=True,
        )
        assert o.shape == tokens.shape and np.all(np.asarray(o) == 0) and np.all(np.isneginf(lse))


# ---- gradients ---------------------------------------------------------------------------------


def test_log_sum_exp_has_a_gradient() -> None:
    """Also alone, where the output has none: its gradient in q is scale * P K."""
    q, k, v = normal(0, 1, 5, 2, 16), normal(1, 1, 7, 2, 16), normal(2, 1, 7, 2, 16)
    weights = normal(3, 1, 5, 2)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(dot_product_attention(q, k, v, return_residual=True)[1] * weights)

    dq, dk, dv = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    def plain(q: Any, k: Any) -> Any:
        scores = jnp.einsum("btnh,bsnh->btns", q, k) / 4
        return jnp.sum(jax.nn.logsumexp(scores, axis=-1) * weights)

    expected = jax.grad(plain, argnums=(0, 1))(q, k)
    np.testing.assert_allclose(dq, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dk, expected[1], rtol=1e-5, atol=1e-6)
    assert np.all(np.asarray(dv) == 0)
    assert str(jax.make_jaxpr(jax.grad(loss))(q, k, v)).count("lawson_attention_backward") == 1


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_log_sum_exp_cotangents_are_not_rounded_to_16_bits(dtype: Any, size: float) -> None:
    """A cotangent of 1 + 2^-13, which neither type has; the same in every row and of any size.

    dbias is f32, and in f32 the difference to a cotangent of 1 has to be there.
    """
    q, k = normal(0, 1, 6, 2, 16, dtype=dtype), normal(1, 1, 6, 2, 16, dtype=dtype)
    bias = normal(2, 1, 2, 6, 6)

    def dbias(weight: float) -> Any:
        def loss(bias: Any) -> Any:
            return jnp.sum(dot_product_attention(q, k, k, bias, return_residual=True)[1] * weight)

        return np.asarray(jax.grad(loss)(bias), np.float64) / size

    low, high = dbias(size), dbias(size * (1 + 2.0**-13))
    np.testing.assert_allclose(high / low, 1 + 2.0**-13, rtol=2e-6)


def test_forward_mode_and_second_order_are_refused() -> None:
    q = normal(0, 1, 4, 2, 8)

    def f(q: Any) -> Any:
        return dot_product_attention(q, q, q).sum()

    for refused in (
        lambda: jax.jvp(f, (q,), (q,)),
        lambda: jax.jacfwd(f)(q),
        lambda: jax.hessian(f)(q),
        lambda: jax.grad(lambda q: jax.grad(f)(q).sum())(q),
        lambda: jax.jit(jax.grad(lambda q: jax.grad(f)(q).sum()))(q),
    ):
        with pytest.raises(lawson.UnsupportedError, match="first-order reverse-mode"):
            refused()
    with pytest.raises(TypeError, match="forward-mode"):  # JAX's own words, once it is in a jit
        jax.jvp(jax.jit(f), (q,), (q,))


def test_a_float_mask_has_the_gradient_of_a_bias() -> None:
    q, mask, slopes = normal(0, 1, 4, 2, 8), normal(1, 1, 1, 4, 4), normal(2, 2)
    weights = normal(3, 1, 4, 2, 8)

    def loss(q: Any, added: Any, name: str) -> Any:
        o, lse = attention(q, q, q, return_lse=True, **{name: added})
        return (o * weights).sum() + jnp.sin(lse).sum()

    by_mask = jax.jit(jax.grad(lambda q, m: loss(q, m, "attn_mask"), (0, 1)))(q, mask)
    by_bias = jax.jit(jax.grad(lambda q, m: loss(q, m, "bias"), (0, 1)))(q, mask)
    assert np.abs(by_bias[1]).max() > 1e-3
    for got, expected in zip(by_mask, by_bias, strict=True):
        np.testing.assert_array_equal(got, expected)
    each = jnp.stack([mask, mask + 1, -mask])
    mapped = jax.vmap(jax.grad(lambda m: loss(q, m, "attn_mask")))(each)
    for got, one in zip(mapped, each, strict=True):
        alone = jax.grad(lambda m: loss(q, m, "attn_mask"))(one)
        np.testing.assert_allclose(got, alone, rtol=1e-6, atol=1e-6)

    for other in ({"bias": mask}, {"alibi_slopes": slopes}):

        def both(mask: Any, other: dict[str, Any] = other) -> Any:
            return attention(q, q, q, attn_mask=mask, **other).sum()

        with pytest.raises(lawson.UnsupportedError, match="next to a bias or alibi; add it to the"):
            jax.grad(both)(mask)
    jax.grad(lambda q: attention(q, q, q, attn_mask=mask, alibi_slopes=slopes).sum())(q)


def test_slopes_have_no_gradient() -> None:
    q, slopes = normal(0, 1, 4, 2, 8), normal(2, 2)
    with pytest.raises(lawson.UnsupportedError, match="alibi slopes have no gradient"):
        jax.grad(lambda slopes: attention(q, q, q, alibi_slopes=slopes).sum())(slopes)


def test_training_is_judged_before_the_forward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config whose backward is refused refuses the differentiated forward, and no other."""
    from lawson import _attention_plan

    asked = []

    def select(config: Any, device: Any, options: Any) -> Any:
        asked.append(config.spec())
        raise lawson.UnsupportedError("the backward pass does not fit")

    class Core:
        def __getattr__(self, name: str) -> Any:
            return select if name == "attention_select" else getattr(lawson._core, name)

    monkeypatch.setattr(_attention_plan, "_core", Core())
    q = normal(0, 1, 3, 2, 40)
    dot_product_attention(q, q, q)
    assert asked == []
    with pytest.raises(lawson.UnsupportedError, match="backward pass does not fit"):
        jax.vjp(lambda q: dot_product_attention(q, q, q), q)
    assert len(asked) == 1 and '"pass":"training"' in asked[0].replace(" ", "")


def test_transformations_around_gradients() -> None:
    """checkpoint, scan and vmap of grad give what grad alone gives."""
    q = normal(0, 3, 1, 4, 2, 8)

    def f(q: Any) -> Any:
        return dot_product_attention(q, q, q, is_causal=True)

    each = jnp.stack([jax.grad(lambda q: jnp.sum(f(q) ** 2))(x) for x in q])
    mapped = jax.vmap(jax.grad(lambda q: jnp.sum(jax.checkpoint(f)(q) ** 2)))(q)
    np.testing.assert_allclose(mapped, each, rtol=1e-6, atol=1e-6)

    def summed(q: Any) -> Any:
        return jax.lax.scan(lambda total, x: (total + jnp.sum(f(x) ** 2), None), 0.0, q)[0]

    np.testing.assert_allclose(jax.jit(jax.grad(summed))(q), each, rtol=1e-6, atol=1e-6)


# ---- dropout -----------------------------------------------------------------------------------


def test_dropout_is_of_its_key() -> None:
    q = normal(0, 2, 8, 2, 16)

    def call(key: Any, rate: float = 0.4) -> Any:
        return attention(q, q, q, dropout_rate=rate, dropout_key=key, return_dropout_mask=True)

    o, kept = call(jax.random.key(1))
    np.testing.assert_array_equal(o, call(jax.random.key(1))[0])
    assert np.mean(np.asarray(kept) != np.asarray(call(jax.random.key(2))[1])) > 0.3
    big = attention(
        *[normal(0, 4, 64, 4, 8)] * 3,
        dropout_rate=0.4,
        dropout_key=jax.random.key(5),
        return_dropout_mask=True,
    )[1]
    # 65536 draws: four standard deviations of a mean of 0.6.
    assert abs(float(jnp.mean(big.astype(jnp.float32))) - 0.6) < 4 * np.sqrt(0.24 / big.size)
    np.testing.assert_array_equal(  # the old form of keys
        call(jax.random.PRNGKey(1))[0], call(jax.random.wrap_key_data(jax.random.PRNGKey(1)))[0]
    )


def test_vmap_of_dropout_is_that_of_separate_calls() -> None:
    q = normal(0, 3, 1, 8, 2, 16)
    keys = jax.random.split(jax.random.key(7), 3)

    def call(q: Any, key: Any) -> Any:
        return dot_product_attention(q, q, q, dropout_rate=0.5, dropout_key=key)

    np.testing.assert_array_equal(
        jax.vmap(call)(q, keys), jnp.stack([call(x, key) for x, key in zip(q, keys, strict=True)])
    )
    np.testing.assert_array_equal(
        jax.vmap(call, in_axes=(0, None))(q, keys[0]), jnp.stack([call(x, keys[0]) for x in q])
    )


# ---- pages and packed layouts ------------------------------------------------------------------


@pytest.mark.parametrize("mapped", ["", "tables", "pages"])
def test_pages_are_read_through_their_table(mapped: str) -> None:
    k, v = normal(1, 2, 11, 2, 8), normal(2, 2, 11, 2, 16)
    q = normal(0, 2, 3, 4, 8)
    order = np.array([[4, 0, 7], [1, 6, 2]])
    lengths = jnp.array([11, 5])
    pages_k, pages_v = (
        np.full((8, 4, 2, 8), 1e4, np.float32),
        np.full((8, 4, 2, 16), 1e4, np.float32),
    )
    for n in range(2):
        for j in range(int(lengths[n])):
            pages_k[order[n, j // 4], j % 4] = k[n, j]
            pages_v[order[n, j // 4], j % 4] = v[n, j]

    def call(q: Any, table: Any, lengths: Any, k: Any, v: Any) -> Any:
        return attention(
            q, k, v, page_table_k=table, seqlens_kv=lengths, mask="causal_bottom_right"
        )

    if not mapped:
        got = jax.jit(call)(q, order, lengths, pages_k, pages_v)
    else:
        one = (q[:, None], order[:, None], lengths[:, None])
        both: tuple[Any, Any] = (pages_k, pages_v)
        axes: tuple[int | None, ...] = (0, 0, 0, None, None)
        if mapped == "pages":  # each sequence has pages of its own, the second's are turned around
            both = (np.stack([pages_k, pages_k[::-1]]), np.stack([pages_v, pages_v[::-1]]))
            one = (one[0], np.stack([order[:1], 7 - order[1:]]), one[2])
            axes = (0, 0, 0, 0, 0)
        got = jax.vmap(call, in_axes=axes)(*one, *both)[:, 0]
    see = oracle.visible("causal_bottom_right", (-1, -1), [3, 3], lengths, 3, 11)
    check_output(got, dense(q, k, v, see))


def test_new_tokens_are_appended_to_a_cache() -> None:
    cache_k, cache_v = normal(1, 2, 8, 2, 8), normal(2, 2, 8, 2, 8)
    k_new, v_new, q = normal(3, 2, 2, 2, 8), normal(4, 2, 2, 2, 8), normal(0, 2, 2, 4, 8)
    lengths = jnp.array([8, 5], jnp.int32)  # with the new ones

    @jax.jit
    def step(q: Any, k: Any, v: Any, k_new: Any, v_new: Any) -> Any:
        return attention(
            q, k, v, k_new=k_new, v_new=v_new, seqlens_kv=lengths, mask="causal_bottom_right"
        )

    o, k, v = step(q, cache_k, cache_v, k_new, v_new)
    for n, length in enumerate([8, 5]):
        np.testing.assert_array_equal(k[n], cache_k[n].at[length - 2 : length].set(k_new[n]))
        np.testing.assert_array_equal(v[n], cache_v[n].at[length - 2 : length].set(v_new[n]))
    see = oracle.visible("causal_bottom_right", (-1, -1), [2, 2], lengths, 2, 8)
    check_output(o, dense(q, k, v, see))


PACKED = {
    "bs3hd": lambda q, k, v: (jnp.stack([q, k, v], 2),),
    "bsh3d": lambda q, k, v: (jnp.stack([q, k, v], 3),),
    "sb3hd": lambda q, k, v: (jnp.stack([x.swapaxes(0, 1) for x in (q, k, v)], 2),),
    "sbh3d": lambda q, k, v: (jnp.stack([x.swapaxes(0, 1) for x in (q, k, v)], 3),),
    "bshd_bs2hd": lambda q, k, v: (q, jnp.stack([k, v], 2)),
    "bshd_bsh2d": lambda q, k, v: (q, jnp.stack([k, v], 3)),
    "sbhd_sb2hd": lambda q, k, v: (q.swapaxes(0, 1), jnp.stack([k, v], 2).swapaxes(0, 1)),
    "sbhd_sbh2d": lambda q, k, v: (q.swapaxes(0, 1), jnp.stack([k, v], 3).swapaxes(0, 1)),
    "t3hd": lambda q, k, v: (jnp.stack([x.reshape(-1, 4, 8) for x in (q, k, v)], 1),),
    "th3d": lambda q, k, v: (jnp.stack([x.reshape(-1, 4, 8) for x in (q, k, v)], 2),),
    "thd_t2hd": lambda q, k, v: (q.reshape(-1, 4, 8), jnp.stack([k, v], 2).reshape(-1, 2, 4, 8)),
    "thd_th2d": lambda q, k, v: (q.reshape(-1, 4, 8), jnp.stack([k, v], 3).reshape(-1, 4, 2, 8)),
}


@pytest.mark.parametrize("layout", PACKED)
def test_packed_layouts(layout: str) -> None:
    q, k, v = normal(0, 2, 5, 4, 8), normal(1, 2, 5, 4, 8), normal(2, 2, 5, 4, 8)
    expected = attention(q, k, v, mask="causal")
    more: dict[str, Any] = {}
    if layout.startswith("t"):
        offsets = jnp.array([0, 5, 10], jnp.int32)
        more = {
            "cu_seqlens_q": offsets,
            "cu_seqlens_kv": offsets,
            "max_seqlen_q": 5,
            "max_seqlen_kv": 5,
        }
        expected = expected.reshape(-1, 4, 8)
    elif layout.startswith("s"):
        expected = expected.swapaxes(0, 1)
    got = attention(*PACKED[layout](q, k, v), layout=layout, mask="causal", **more)
    np.testing.assert_array_equal(got, expected)


# ---- segments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [[1, 2, 1, 0], [2, 2, 1, 1], [1, 2, 3, 4], [1, -1, 2, 2]],
    ids=["torn", "out of order", "too many", "negative"],
)
def test_segment_ids_without_meaning_give_nan(ids: list[int]) -> None:
    q = normal(0, 2, 4, 2, 8)
    good = jnp.array([1, 1, 2, 3])
    both = jnp.stack([good, jnp.array(ids)])
    o = attention(q, q, q, segment_ids=both, max_segments=3)
    assert np.all(np.isnan(o))
    fine = attention(q, q, q, segment_ids=jnp.stack([good, good]), max_segments=3)
    assert np.all(np.isfinite(fine))


def test_segments_of_cross_attention_pair_by_number() -> None:
    q, k, v = normal(0, 1, 5, 2, 8), normal(1, 1, 7, 2, 8), normal(2, 1, 7, 2, 8)
    ids, kv_ids = jnp.array([[1, 1, 3, 3, 3]]), jnp.array([[1, 2, 2, 0, 3, 3, 3]])
    o, lse = attention(
        q, k, v, segment_ids=ids, kv_segment_ids=kv_ids, max_segments=3, return_lse=True
    )
    answer = dense(q, k, v, np.asarray(ids[:, None, :, None] == kv_ids[:, None, None, :]))
    check_output(o, answer)
    oracle.check("lse", lse, answer.lse, answer.lse_bound())


def test_another_platform_is_a_typed_error() -> None:
    q = normal(0, 1, 4, 2, 8)
    with pytest.raises(lawson.UnsupportedError, match="platforms cuda and cpu.*compiled for tpu"):
        jax.export.export(jax.jit(lambda q: dot_product_attention(q, q, q)), platforms=["tpu"])(q)


def test_f64_where_jax_has_it() -> None:
    with jax.enable_x64(True):
        q, k, v = (
            jnp.asarray(np.random.default_rng(i).standard_normal((1, 5, 2, 24))) for i in range(3)
        )
        assert q.dtype == jnp.float64
        o, lse = dot_product_attention(q, k, v, return_residual=True, is_causal=True)
        dropped = attention(q, k, v, dropout_rate=0.5, dropout_key=jax.random.key(0))
    assert o.dtype == lse.dtype == dropped.dtype == np.float64
    answer = oracle.Attention(
        *(np.asarray(x).transpose(0, 2, 1, 3) for x in (q, k, v)),
        oracle.visible("causal", (-1, -1), [5], [5], 5, 5),
        1 / math.sqrt(24),
    )
    np.testing.assert_allclose(
        np.asarray(o).transpose(0, 2, 1, 3), answer.o, rtol=1e-13, atol=1e-14
    )
    np.testing.assert_allclose(np.asarray(lse).transpose(0, 2, 1), answer.lse, rtol=1e-13)


def test_a_mapped_axis_without_elements_has_results_without_elements() -> None:
    q = jnp.ones((0, 2, 4, 2, 8))
    call = jax.vmap(lambda q: dot_product_attention(q, q, q))
    assert call(q).shape == q.shape
    gradient = jax.grad(lambda q: call(q).sum())(q)
    assert gradient.shape == q.shape
