"""Fusions under JAX's transformations: batching, derivatives, control flow, several devices."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lawson
from lawson.jax import fusion, inspect

RNG = np.random.default_rng(8)
cpu = functools.partial(fusion, engines=["cpu"])


def f32(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def squares(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: (function(*args) ** 2).sum()


def mlp(x: Any, w: Any, b: Any) -> Any:
    return jax.nn.gelu(x @ w + b)


X, W, B = f32(8, 16), f32(16, 4), f32(4)


def calls(function: Callable[..., Any], *args: Any) -> int:
    """How many kernels of Lawson's the compiled program has; XLA has no product of its own."""
    text = jax.jit(function).lower(*args).compile().as_text()
    assert " dot(" not in text
    return text.count('custom_call_target="lawson_plan"')


# ---- vmap --------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 0), (2, 1)])
def test_vmap_folds_into_one_kernel(axes: tuple[int | None, int | None]) -> None:
    x = f32(8, 16) if axes[0] is None else jnp.moveaxis(f32(3, 8, 16), 0, axes[0])
    w = f32(16, 4) if axes[1] is None else jnp.moveaxis(f32(3, 16, 4), 0, axes[1])
    plain = lambda x, w: jnp.tanh(x @ w)
    fused = jax.vmap(cpu(plain), axes)
    close(fused(x, w), jax.vmap(plain, axes)(x, w))
    assert calls(fused, x, w) == 1


def test_batched_rows_are_one_product() -> None:
    """A batch of rows with one weight needs no product with a batch."""
    (told,) = inspect(jax.vmap(cpu(mlp), (0, None, None)))(f32(5, 8, 16), W, B)
    assert "f32[40, 4] = matmul" in told.graph.print()


def test_nested_vmap() -> None:
    x, w = f32(2, 8, 16), f32(3, 16, 4)
    plain = lambda x, w: (jnp.tanh(x @ w), x.sum())
    over = lambda f: jax.vmap(jax.vmap(f, (None, 0), (0, None)), (0, None))
    close(over(cpu(plain))(x, w), over(plain)(x, w))
    close(jax.jit(over(cpu(plain)))(x, w), over(plain)(x, w))


def test_vmap_with_names() -> None:
    x = f32(3, 8, 16)
    got = jax.vmap(lambda x: cpu(mlp)(x, W, B) + lax.psum(x.sum(), "i"), axis_name="i")(x)
    close(got, jax.vmap(mlp, (0, None, None))(x, W, B) + x.sum(), 1e-4)


# ---- derivatives -------------------------------------------------------------------------------


def test_gradient_is_lawsons() -> None:
    fused = cpu(mlp)
    close(jax.grad(squares(fused), (0, 1, 2))(X, W, B), jax.grad(squares(mlp), (0, 1, 2))(X, W, B))
    value, grads = jax.jit(jax.value_and_grad(squares(fused), (0, 1)))(X, W, B)
    close((value, grads), jax.value_and_grad(squares(mlp), (0, 1))(X, W, B), 1e-4)
    forward, backward = inspect(jax.grad(squares(fused), (0, 1, 2)))(X, W, B)
    assert (forward.name, backward.name) == ("mlp", "mlp.backward")
    assert "gelu_tanh_grad" in backward.graph.print()
    assert calls(jax.grad(squares(fused), (0, 1, 2)), X, W, B) == 2


def test_gradient_by_one_argument_computes_nothing_else() -> None:
    _, backward = inspect(jax.grad(squares(cpu(lambda x, w: x @ w)), 1))(X, W)
    assert [t.name for t in backward.graph.tensors() if not t.is_input] == ["d_w"]


def test_vjp_with_zero_cotangents() -> None:
    fused = cpu(lambda x, w: (jnp.sin(x @ w), x * 2, x > 0))
    plain = lambda x, w: (jnp.sin(x @ w), x * 2)
    for pick in (0, 1):
        got = jax.grad(lambda x, w, pick=pick: fused(x, w)[pick].sum(), (0, 1))(X, W)
        close(got, jax.grad(lambda x, w, pick=pick: plain(x, w)[pick].sum(), (0, 1))(X, W))
    _, back = jax.vjp(fused, X, W)
    zero = np.zeros(X.shape, jax.dtypes.float0)
    close(back((jnp.ones((8, 4)), X, zero)), jax.vjp(plain, X, W)[1]((jnp.ones((8, 4)), X)))


def test_integer_arguments_have_no_gradient() -> None:
    steps = jnp.arange(8)
    fused = cpu(lambda x, i: x * i[:, None].astype(jnp.float32))
    close(
        jax.grad(lambda x: fused(x, steps).sum())(X),
        jnp.broadcast_to(steps[:, None].astype(jnp.float32), X.shape),
    )


@pytest.mark.parametrize("mode", ["jvp", "jacfwd", "jacrev", "hessian", "linearize"])
def test_forward_mode_and_higher_orders(mode: str) -> None:
    x = X[:2]
    fused, plain = (lambda x, f=f: f(x, W, B) for f in (cpu(mlp), mlp))
    if mode == "jvp":
        close(jax.jvp(fused, (x,), (x * 2,)), jax.jvp(plain, (x,), (x * 2,)))
        assert calls(lambda x: jax.jvp(fused, (x,), (x,)), x) == 2
    elif mode == "linearize":
        close(jax.linearize(fused, x)[1](x), jax.linearize(plain, x)[1](x))
    elif mode == "hessian":
        close(jax.hessian(squares(fused))(x), jax.hessian(squares(plain))(x), 1e-4)
    else:
        derivative = getattr(jax, mode)
        close(derivative(fused)(x), derivative(plain)(x))


def test_batches_of_gradients_and_gradients_of_batches() -> None:
    x = f32(5, 8, 16)
    fused = cpu(mlp)
    each = lambda f: jax.vmap(jax.grad(squares(f), (0, 1, 2)), (0, None, None))
    close(each(fused)(x, W, B), each(mlp)(x, W, B), 1e-4)
    all_of = lambda f: jax.grad(squares(jax.vmap(f, (0, None, None))), (0, 1, 2))
    close(all_of(fused)(x, W, B), all_of(mlp)(x, W, B), 1e-4)


def straight_through(x: Any) -> Any:
    return x + lax.stop_gradient(jnp.round(x) - x)


@jax.custom_jvp
def clipped(x: Any) -> Any:
    return jnp.sin(x)


clipped.defjvps(lambda t, ans, x: t * 7 * jnp.cos(x))


@jax.custom_vjp
def reversed_gradient(x: Any) -> Any:
    return x * 2


reversed_gradient.defvjp(lambda x: (x * 2, x), lambda x, g: (-g * x,))

TIES = jnp.asarray([[-1.0, 0.0, 0.0, 1.0, 6.0, 0.5]], jnp.float32)
RULES: dict[str, Callable[[Any], Any]] = {
    "stop_gradient": straight_through,
    "custom_jvp": clipped,
    "custom_vjp": reversed_gradient,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "maximum": lambda x: jnp.maximum(x, 0),
    "clamp": lambda x: lax.clamp(0.0, x, 1.0),
    "clip": lambda x: jnp.clip(x, 0, 1),
    "abs": jnp.abs,
    "max": lambda x: x.max(1),
    "min": lambda x: x.min(1),
    "sort of a softmax": lambda x: jax.nn.softmax(x, -1) ** 2,
    "leaky_relu": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "sign": lambda x: jnp.sign(x) * x,
    "floor": lambda x: jnp.floor(x) * x,
    "to int": lambda x: x.astype(jnp.int32).astype(jnp.float32) * x,
    "slice and pad": lambda x: jnp.pad(x[:, 1::2], ((0, 0), (2, 1))) * 3,
    "concatenate": lambda x: jnp.concatenate([x, x * x], 1),
    "prod": lambda x: (x + 2).prod(1),
    "var": lambda x: x.var(1) + x.std(),
    "returned as it is": lambda x: x,
}


@pytest.mark.parametrize("name", RULES)
def test_gradient_is_jaxs_where_it_is_a_convention(name: str) -> None:
    """At kinks and ties, behind stop_gradient, and where a function has a rule of its own."""
    function = RULES[name]
    weights = f32(6)
    if name == "var":
        weights = jnp.float32(1)

    def loss(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: (
            f(x) * (weights[: f(x).shape[-1]] if f(x).ndim == 2 and f(x).shape[-1] == 6 else 1.5)
        ).sum()

    got, want = jax.grad(loss(cpu(function)))(TIES), jax.grad(loss(function))(TIES)
    close(got, want)


def test_checkpoint() -> None:
    fused = cpu(mlp)
    kept = jax.checkpoint(lambda x: jnp.sin(fused(x, W, B)))
    close(jax.grad(lambda x: kept(x).sum())(X), jax.grad(lambda x: jnp.sin(mlp(x, W, B)).sum())(X))
    policy = jax.checkpoint_policies.dots_saveable
    kept = jax.checkpoint(lambda x: fused(x, W, B), policy=policy)
    close(jax.grad(lambda x: kept(x).sum())(X), jax.grad(lambda x: mlp(x, W, B).sum())(X))


def test_bf16_gradients_have_the_arguments_dtypes() -> None:
    args = [a.astype(jnp.bfloat16) for a in (X, W, B)]
    got = jax.grad(lambda *a: cpu(mlp)(*a).astype(jnp.float32).sum(), (0, 1, 2))(*args)
    want = jax.grad(lambda *a: mlp(*a).astype(jnp.float32).sum(), (0, 1, 2))(*args)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.bfloat16
        # XLA rounds to bf16 after every op; sums of 8 and 16 terms of size 1
        np.testing.assert_allclose(
            a.astype(np.float32), b.astype(np.float32), rtol=0.05, atol=16 * 2**-7
        )


# ---- control flow ------------------------------------------------------------------------------


def test_scan_while_cond_and_fori() -> None:
    w = f32(16, 16) / 4
    fused, plain = cpu(lambda x: jnp.tanh(x @ w)), lambda x: jnp.tanh(x @ w)

    def scanned(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: lax.scan(lambda c, _: (f(c), c.sum()), x, None, length=3)

    close(jax.jit(scanned(fused))(X), scanned(plain)(X))
    assert calls(scanned(fused), X) == 1
    loss = lambda f: lambda x: scanned(f)(x)[0].sum()
    close(jax.grad(loss(fused))(X), jax.grad(loss(plain))(X))
    close(lax.fori_loop(0, 3, lambda i, c: fused(c), X), scanned(plain)(X)[0])
    once = lambda f: lax.while_loop(lambda c: c[1] < 2, lambda c: (f(c[0]), c[1] + 1), (X, 0))
    close(once(fused), once(plain))
    for flag in (True, False):
        close(
            jax.jit(lambda p, x: lax.cond(p, fused, jnp.sin, x))(flag, X),
            plain(X) if flag else jnp.sin(X),
        )


# ---- several devices ---------------------------------------------------------------------------


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def on(value: Any, *spec: Any) -> Any:
    return jax.device_put(value, NamedSharding(mesh(), P(*spec)))


SHARDINGS = {
    "rows": (("a", None), (None, None), ("a",), 0),
    "rows and columns": (("a", None), (None, "b"), ("a", "b"), 0),
    "batch over both": ((("a", "b"), None), (None, None), (("a", "b"),), 0),
    "contracted": ((None, "b"), ("b", None), (), 1),
}


@pytest.mark.parametrize("name", SHARDINGS)
def test_sharded_product(partitioner: str, name: str) -> None:
    """Each device runs the plan of its shard: nothing is gathered, and only sums are summed."""
    x_spec, w_spec, out_spec, sums = SHARDINGS[name]
    fused = cpu(lambda x, w: x @ w)
    args = (on(X, *x_spec), on(W, *w_spec))
    compiled = jax.jit(fused).lower(*args).compile()
    text = compiled.as_text()
    assert "all-gather" not in text and text.count(" all-reduce(") == sums
    assert text.count('custom_call_target="lawson_plan"') == 1
    result = compiled(*args)
    close(result, X @ W)
    assert result.sharding.is_equivalent_to(NamedSharding(mesh(), P(*out_spec)), 2)


TWICE: dict[str, Callable[[Any], Any]] = {
    "gram": lambda x: x @ x.T,
    "square": lambda x: x @ x,
    "symmetric": lambda x: x + x.T,
    "of a batch": lambda x: (x.reshape(4, 2, 8) @ x.reshape(4, 8, 2)).sum((1, 2)),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_dim_that_a_tensor_has_twice_is_whole(partitioner: str, name: str) -> None:
    x = f32(8, 8)
    fused = cpu(TWICE[name])
    for spec in ((), ("a",), (None, "b"), ("a", "b")):
        got = jax.jit(fused)(on(x, *spec))
        close(got, TWICE[name](x))
        close(
            jax.jit(jax.grad(squares(fused)))(on(x, *spec)), jax.grad(squares(TWICE[name]))(x), 1e-3
        )
    explicit = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(explicit):
        close(jax.jit(fused)(jax.device_put(x, NamedSharding(explicit, P("a")))), TWICE[name](x))


def test_the_engine_of_a_shard_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that was made under another LAWSON_ENGINE is not that of a program lowered now."""
    fused = fusion(lambda x: jnp.tanh(x) * 2)
    for engine in ("cpu", "reference"):
        monkeypatch.setenv("LAWSON_ENGINE", engine)
        lowered = jax.jit(lambda x: fused(x)).lower(on(X, "a"))
        assert f'engine = "{engine}"' in lowered.compile().as_text()


def test_a_fusion_itself_is_not_transposed() -> None:
    doubled = cpu(lambda x: x * 2)
    with pytest.raises(lawson.UnsupportedError, match="(?s)linear_transpose.*jax.vjp"):
        jax.linear_transpose(doubled, X)(X)


def test_data_parallel_gradient(partitioner: str) -> None:
    """The gradient of a weight is a sum over the shards of the batch."""
    args = (on(f32(2, 8, 16), None, "a"), on(W), on(B))
    step = jax.jit(jax.value_and_grad(squares(cpu(mlp)), (0, 1, 2)))
    text = step.lower(*args).compile().as_text()
    assert "all-gather" not in text and "all-reduce" in text
    value, grads = step(*args)
    close((value, grads), jax.value_and_grad(squares(mlp), (0, 1, 2))(*args), 1e-4)
    assert grads[0].sharding.is_equivalent_to(args[0].sharding, 3)
    # what is not linear in the sum cannot be summed afterwards: it is gathered
    gathered = (on(X, None, "a"), on(W, "a"), on(B))
    assert "all-gather" in jax.jit(cpu(mlp)).lower(*gathered).compile().as_text()
    close(jax.jit(cpu(mlp))(*gathered), mlp(X, W, B))


def test_eager_call_of_sharded_arrays() -> None:
    result = cpu(mlp)(on(X, "a"), W, B)
    close(result, mlp(X, W, B))
    assert result.sharding.is_equivalent_to(NamedSharding(mesh(), P("a")), 2)


def test_what_cannot_be_split_is_whole() -> None:
    """Reductions behind which something follows, slices, iotas, concatenations."""
    functions: list[Callable[..., Any]] = [
        lambda x: jax.nn.softmax(x, 0),
        lambda x: jnp.tril(x),
        lambda x: jnp.concatenate([x, x], 0),
        lambda x: x[1:5] * 2,
        lambda x: x.reshape(4, 2, 16).sum(1),
        lambda x: x.max(0),
        lambda x: x.sum(0) * 3,
    ]
    for function, spec in itertools.product(functions, [("a",), (None, "a")]):
        close(jax.jit(cpu(function))(on(X, *spec)), function(X))


def test_shard_map() -> None:
    over = functools.partial(jax.shard_map, mesh=mesh())
    fused = cpu(mlp)
    split = over(fused, in_specs=(P("a", None), P(None, "b"), P("b")), out_specs=P("a", "b"))
    close(jax.jit(split)(X, W, B), mlp(X, W, B))
    close(split(X, W, B), mlp(X, W, B))

    def loss(x: Any, w: Any, b: Any) -> Any:
        return lax.psum((fused(x, w, b) ** 2).sum(), "a")

    summed = over(loss, in_specs=(P("a"), P(), P()), out_specs=P())
    close(
        jax.jit(jax.grad(summed, (0, 1, 2)))(X, W, B),
        jax.grad(squares(mlp), (0, 1, 2))(X, W, B),
        1e-4,
    )
    batched = over(jax.vmap(fused, (0, None, None)), in_specs=(P("a"), P(), P()), out_specs=P("a"))
    close(
        batched(f32(4, 2, 16) * 0 + 1, W, B),
        jax.vmap(mlp, (0, None, None))(jnp.ones((4, 2, 16)), W, B),
    )


def test_pmap() -> None:
    x = f32(8, 3, 16)
    close(
        jax.pmap(cpu(mlp), in_axes=(0, None, None))(x, W, B),
        jax.vmap(mlp, (0, None, None))(x, W, B),
    )


def test_explicit_axes() -> None:
    """Where shardings are part of types, those of results follow from the operands."""
    explicit = jax.make_mesh(
        (4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    x = jax.device_put(X, NamedSharding(explicit, P("data")))
    w = jax.device_put(W, NamedSharding(explicit, P(None, "model")))
    fused = cpu(lambda x, w: (jnp.tanh(x @ w), x))

    def together(x: Any, w: Any) -> Any:
        y, same = fused(x, w)
        assert jax.typeof(y).sharding.spec == P("data", "model")
        assert jax.typeof(same).sharding.spec == P("data", None)
        return y + jnp.tanh(x @ w)  # JAX refuses to add what is sharded otherwise

    with jax.set_mesh(explicit):
        close(jax.jit(together)(x, w), 2 * jnp.tanh(X @ W))
        got = jax.jit(jax.grad(lambda x, w: together(x, w).sum(), (0, 1)))(x, w)
        close(got, jax.grad(lambda x, w: 2 * jnp.tanh(x @ w).sum(), (0, 1))(X, W))


def test_shard_map_over_some_axes() -> None:
    plain = lambda x, w: jnp.tanh(x @ w)
    some = jax.shard_map(
        cpu(plain), mesh=mesh(), in_specs=(P("a"), P()), out_specs=P("a"), axis_names={"a"}
    )
    close(jax.jit(some)(X, W), plain(X, W))
    unchecked = jax.shard_map(
        cpu(plain), mesh=mesh(), in_specs=(P("a"), P()), out_specs=P("a"), check_vma=False
    )
    close(jax.jit(unchecked)(X, W), plain(X, W))
