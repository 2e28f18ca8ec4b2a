"""From JAX's primitives to Lawson's ops: each one, its numbers against XLA's, and what is refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lawson
from lawson import _core
from lawson.jax import fusion, inspect
from lawson.jax._trace import trace

RNG = np.random.default_rng(6)


def f32(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


X = f32(4, 6)
Y = f32(4, 6)
POSITIVE = jnp.abs(X) + 0.5
INTEGERS = jnp.asarray(RNG.integers(-9, 9, (4, 6)), jnp.int32)
NONZERO = jnp.where(INTEGERS == 0, 1, INTEGERS)
BYTES = jnp.asarray(RNG.integers(-9, 9, (4, 6)), jnp.int8)
TRUTH = X > 0
HALVES = jnp.asarray([[-2.5, -1.5, -0.5], [0.5, 1.5, 2.5]], jnp.float32)


def document_of(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    jaxpr = jax.make_jaxpr(function)(*args)
    found = trace(jaxpr, "f", [f"x{i}" for i in range(len(jaxpr.in_avals))])
    assert found.document is not None
    return found.document


def ops_of(function: Callable[..., Any], *args: Any) -> list[str]:
    return [op["op"] for op in document_of(function, *args)["ops"]]


def check(function: Callable[..., Any], *args: Any, rtol: float = 3e-6, atol: float = 3e-6) -> None:
    """Numbers, dtypes and shapes of the CPU engine and of XLA; and that the engine ran."""
    fused = fusion(function, engines=["cpu"])
    assert inspect(fused)(*args).engine == "cpu"
    got, want = fused(*args), function(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        b = jnp.asarray(b)
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        wide = (
            jnp.float32 if a.dtype.itemsize < 4 and jnp.issubdtype(a.dtype, jnp.floating) else None
        )
        a, b = (np.asarray(v if wide is None else v.astype(wide)) for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


# ---- every primitive ---------------------------------------------------------------------------

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add": (lax.add, (X, Y)),
    "sub": (lax.sub, (X, Y)),
    "mul": (lax.mul, (X, Y)),
    "div": (lax.div, (X, POSITIVE)),
    "max": (lax.max, (X, Y)),
    "min": (lax.min, (X, Y)),
    "rem": (lax.rem, (X, POSITIVE)),
    "pow": (lax.pow, (POSITIVE, Y)),
    "pow of an integer": (lambda x, n: lax.pow(x, n), (X, INTEGERS)),
    "integer_pow 2": (lambda x: x**2, (X,)),
    "integer_pow 3": (lambda x: x**3, (X,)),
    "integer_pow 7": (lambda x: x**7, (X,)),
    "integer_pow -2": (lambda x: lax.integer_pow(x, -2), (POSITIVE,)),
    "integer_pow 0": (lambda x: lax.integer_pow(x, 0) + x, (X,)),
    "square": (lax.square, (X,)),
    "neg": (lax.neg, (X,)),
    "abs": (lax.abs, (X,)),
    "sign": (lax.sign, (X,)),
    "exp": (lax.exp, (X,)),
    "exp2": (lax.exp2, (X,)),
    "expm1": (lax.expm1, (X,)),
    "log": (lax.log, (POSITIVE,)),
    "log1p": (lax.log1p, (POSITIVE,)),
    "sqrt": (lax.sqrt, (POSITIVE,)),
    "rsqrt": (lax.rsqrt, (POSITIVE,)),
    "sin": (lax.sin, (X,)),
    "cos": (lax.cos, (X,)),
    "tan": (lax.tan, (X / 4,)),
    "tanh": (lax.tanh, (X,)),
    "logistic": (lax.logistic, (X,)),
    "erf": (lax.erf, (X,)),
    "erfc": (lax.erfc, (X,)),
    "ceil": (lax.ceil, (X,)),
    "floor": (lax.floor, (X,)),
    "round to even": (lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), (HALVES,)),
    "round away": (lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO), (HALVES,)),
    "is_finite": (lax.is_finite, (X / jnp.where(X > 0, 1, 0.0),)),
    "eq": (lax.eq, (INTEGERS, INTEGERS.at[0].set(3))),
    "ne": (lax.ne, (X, Y)),
    "lt": (lax.lt, (X, Y)),
    "le": (lax.le, (X, Y)),
    "gt": (lax.gt, (X, Y)),
    "ge": (lax.ge, (X, Y)),
    "eq of bools": (lambda a, b: (a > 0) == (b > 0), (X, Y)),
    "and or not xor": (lambda a, b: (a & b) | (~a ^ b), (TRUTH, Y > 0)),
    "select_n": (lambda p, a, b: lax.select(p, a, b), (TRUTH, X, Y)),
    "select_n of integers": (lambda i, a, b: lax.select_n(i, a, b, a * b),
                             (jnp.abs(INTEGERS) % 3, X, Y)),
    "select_n of bools": (lambda p, a, b: jnp.where(p, a, b), (TRUTH, Y > 0, X > 1)),
    "clamp": (lambda x: lax.clamp(-0.5, x, 0.5), (X,)),
    "clamp by arrays": (lambda a, x, b: lax.clamp(a, x, b), (-POSITIVE, X * 3, POSITIVE)),
    "clip": (lambda x: jnp.clip(x, None, 0.25), (X,)),
    "where -inf": (lambda x: jnp.where(x > 0, x, -jnp.inf), (X,)),
    "where nan": (lambda x: jnp.where(x > 0, x, jnp.nan), (X,)),
    "integers": (lambda a, b: (a + b * 2 - 1, a // b, lax.rem(a, b), -a, abs(a), lax.sign(a)),
                 (INTEGERS, NONZERO)),
    "to integers": (lambda x: (x * 3).astype(jnp.int32), (X,)),
    "to int8": (lambda x: jnp.round(x * 3).astype(jnp.int8), (X,)),
    "of int8": (lambda x: x.astype(jnp.float32) + x.astype(jnp.int32), (BYTES,)),
    "to bool": (lambda x: x.astype(bool), (INTEGERS,)),
    "of bool": (lambda x: x.astype(jnp.float32) * 2, (TRUTH,)),
    "clipped integers": (lambda x: jnp.clip(x, -3, 3).astype(jnp.int8), (INTEGERS,)),
    "bf16": (lambda x: (x.astype(jnp.bfloat16) * 3).astype(jnp.float32), (X,)),
    "f8": (lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), (X,)),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 10), (X.astype(jnp.bfloat16),)),
    "stop_gradient": (lambda x: lax.stop_gradient(x) * 2, (X,)),
    "copy": (lambda x: jnp.copy(x) * 2, (X,)),
    "optimization_barrier": (lambda x, y: sum(lax.optimization_barrier((x, y))), (X, Y)),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (6, 4, 5), (1, 0)) * 2, (X,)),
    "broadcast": (lambda x: jnp.broadcast_to(x[:, None], (4, 3, 6)) + 1, (X,)),
    "broadcast out": (lambda x: jnp.broadcast_to(x, (3, 4, 6)), (X,)),
    "reshape": (lambda x: x.reshape(3, 8) + 1, (X,)),
    "reshape of a result": (lambda x: (x + 1).reshape(2, 2, 6).sum(1), (X,)),
    "squeeze, expand_dims": (lambda x: jnp.squeeze(x[:, None, :1] * 2, 2)[None], (X,)),
    "transpose": (lambda x, y: x.T * 2 + y.T, (X, Y)),
    "transpose of results": (lambda x, y: jnp.exp(x + y).T + jnp.tanh(x).T, (X, Y)),
    "transpose 3": (lambda x: jnp.transpose(jnp.exp(x), (2, 0, 1)), (f32(2, 3, 4),)),
    "slice": (lambda x: x[1:, ::2] * 2, (X,)),
    "slice of a broadcast": (lambda x: jnp.broadcast_to(x, (3, 4, 6))[1:, :2], (X,)),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (1, 2), (2, 9 - 5)), (X,)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y * 2, x], 1), (X, Y)),
    "stack": (lambda x, y: jnp.stack([x, y], 1), (X, Y)),
    "split": (lambda x: [p * 2 for p in jnp.split(x, 3, 1)], (X,)),
    "tile": (lambda x: jnp.tile(x, (2, 3)), (X,)),
    "repeat of rows": (lambda x: jnp.broadcast_to(x[:, None], (4, 2, 6)).reshape(8, 6), (X,)),
    "pad": (lambda x: lax.pad(x, 7.0, ((1, 2, 0), (0, 3, 2))), (X,)),
    "pad, negative": (lambda x: lax.pad(x, 7.0, ((-1, 0, 1), (-2, -1, 0))), (X,)),
    "iota": (lambda x: x * lax.iota(jnp.float32, 6) + jnp.arange(4)[:, None], (X,)),
    "tril": (jnp.tril, (X,)),
    "eye": (lambda x: x @ jnp.eye(6) * 2, (X,)),
    "reduce_sum": (lambda x: (x.sum(), x.sum(0), x.sum(1, keepdims=True)), (X,)),
    "reduce_max": (lambda x: (x.max(), x.max(0), x.min(1)), (X,)),
    "reduce_prod": (lambda x: x.prod(1), (X,)),
    "reduce of bools": (lambda x: (x.any(0), x.all(1), x.sum()), (TRUTH,)),
    "reduce of a broadcast": (lambda x: jnp.broadcast_to(x[:, None], (4, 3, 6)).sum(1), (X,)),
    "reduce of integers": (lambda x: (x.sum(0), x.max()), (INTEGERS,)),
    "sum of bf16": (lambda x: x.astype(jnp.bfloat16).sum(1), (X,)),
    "sum of f16": (lambda x: x.astype(jnp.float16).sum(1), (X,)),
    "mean, var": (lambda x: (x.mean(1), x.var(0), x.std()), (X,)),
    "norms": (lambda x: (jnp.linalg.norm(x, axis=1), jnp.abs(x).sum(0)), (X,)),
    "softmax": (lambda x: jax.nn.softmax(x, -1), (X,)),
    "log_softmax": (lambda x: jax.nn.log_softmax(x, -1), (X,)),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, 0), (X,)),
    "layer norm": (lambda x, g: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(
        x.var(-1, keepdims=True) + 1e-5) * g, (X, Y[0])),
    "constants only": (lambda x: (jnp.full((2, 3), 4.0), jnp.sqrt(jnp.ones(()) * 2) * x), (X,)),
    "checkpoint": (jax.checkpoint(lambda x: jnp.sin(x) * 2), (X,)),
    "jit in jit": (jax.jit(lambda x: jax.jit(jnp.sin)(x) + jax.jit(jnp.sin)(x * 2)), (X,)),
    "a fusion in a fusion": (fusion(lambda x: jnp.sin(x) * 2, engines=["cpu"]), (X,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_primitive(name: str) -> None:
    function, args = CASES[name]
    check(function, *args)


DOTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "matrix": (lambda a, b: a @ b, (X, Y.T)),
    "vectors": (jnp.dot, (X[0], Y[0])),
    "matrix vector": (jnp.dot, (X, Y[0])),
    "vector matrix": (jnp.dot, (X[:, 0], Y)),
    "outer": (lambda a, b: lax.dot_general(a, b, (((), ()), ((), ()))), (X[0], Y[:, 0])),
    "batched": (lax.batch_matmul, (f32(3, 4, 5), f32(3, 5, 2))),
    "two batch dims": (lambda a, b: a @ b, (f32(2, 3, 4, 5), f32(2, 3, 5, 2))),
    "broadcast batch": (lambda a, b: jnp.broadcast_to(a, (3, 4, 5)) @ b, (f32(4, 5), f32(3, 5, 2))),
    "attention scores": (lambda a, b: jnp.einsum("bqhd,bkhd->bhqk", a, b),
                         (f32(2, 3, 4, 5), f32(2, 6, 4, 5))),
    "two contracted": (lambda a, b: lax.dot_general(a, b, (((0, 1), (2, 0)), ((), ()))),
                       (f32(3, 4, 5), f32(4, 6, 3))),
    "batch in the middle": (lambda a, b: lax.dot_general(a, b, (((0,), (2,)), ((1,), (1,)))),
                            (f32(5, 3, 4), f32(6, 3, 5))),
    "rows of several dims": (lambda a, b: jnp.tanh(jnp.tensordot(a, b, 1)) + 1,
                             (f32(2, 3, 5), f32(5, 4, 2))),
    "computed operands": (lambda a, b: jnp.exp(a).T @ jnp.tanh(b + 1), (X, Y)),
    "a weight on one side": (lambda a, w, c: jax.nn.relu(a @ w + c),
                             (f32(2, 3, 5), f32(5, 4), f32(4))),
    "a residual": (lambda a, w, r: a @ w + r, (f32(2, 3, 5), f32(5, 4), f32(2, 3, 4))),
    "a sum of rows": (lambda a, w: (a @ w).sum((0, 1)), (f32(2, 3, 5), f32(5, 4))),
    "a sum of some": (lambda a, w: (a @ w).max(1), (f32(2, 3, 5), f32(5, 4))),
    "integers": (lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((), ())),
                                              preferred_element_type=jnp.int32), (BYTES, BYTES)),
    "bf16 to f32": (lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((), ())),
                                                 preferred_element_type=jnp.float32),
                    (X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16))),
    "f16": (lambda a, b: a @ b.T, (X.astype(jnp.float16), Y.astype(jnp.float16))),
    "HIGHEST": (lambda a, b: jnp.dot(a, b.T, precision="highest"), (X, Y)),
}  # fmt: skip


@pytest.mark.parametrize("name", DOTS)
def test_dot_general(name: str) -> None:
    function, args = DOTS[name]
    # f16: the product is rounded once, and XLA's may be rounded in between
    loose = 2e-3 if args[0].dtype == jnp.float16 else 3e-6
    check(function, *args, rtol=loose, atol=loose)
    assert ops_of(function, *args).count("matmul") == 1


def test_scaled_matmul() -> None:
    """MXFP8; XLA's CPU has no such op, so the reference is NumPy's."""
    a, b = (f32(2, n, 64).astype(jnp.float8_e4m3fn) for n in (8, 4))
    scales = [
        jnp.asarray(2.0 ** RNG.integers(-3, 3, (2, n, 2)), jnp.float8_e8m0fnu) for n in (8, 4)
    ]
    fused = fusion(
        lambda *args: jax.nn.scaled_matmul(*args, preferred_element_type=jnp.float32),
        engines=["cpu"],
    )
    wide = [
        np.asarray(x, np.float32) * np.repeat(np.asarray(s, np.float32), 32, -1)
        for x, s in zip((a, b), scales, strict=True)
    ]
    want = np.einsum("bmk,bnk->bmn", *wide)
    np.testing.assert_allclose(fused(a, b, *scales), want, rtol=1e-5, atol=1e-5)
    assert "scaled_matmul" in inspect(fused)(a, b, *scales).graph.print()


def test_views_of_operands_are_at_the_inputs() -> None:
    """Kernels rearrange inputs, and results on their way out; nothing in between."""
    ops = ops_of(lambda a, b: jnp.tanh(a + 1).T @ jnp.exp(b), X, Y)
    assert ops.index("transpose") < ops.index("tanh") < ops.index("matmul")
    ops = ops_of(lambda a, w, c: jax.nn.gelu(a @ w + c) * 2, f32(2, 3, 5), f32(5, 4), f32(4))
    assert ops == ["reshape", "matmul", "add", "gelu_tanh", "constant", "mul", "reshape"]


# ---- activations -------------------------------------------------------------------------------

ACTIVATIONS = {
    "relu": jax.nn.relu, "relu6": jax.nn.relu6, "silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False), "elu": jax.nn.elu,
    "softplus": jax.nn.softplus, "sigmoid": jax.nn.sigmoid, "tanh": jnp.tanh,
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_activation_is_one_op(name: str, dtype: Any) -> None:
    x = (X * 3).astype(dtype)
    assert ops_of(ACTIVATIONS[name], x) == [name]
    # bf16: XLA rounds after every step, Lawson once
    loose = 3e-6 if dtype == jnp.float32 else 3e-2
    check(ACTIVATIONS[name], x, rtol=loose, atol=loose)


def test_written_out_gelu_is_recognised() -> None:
    assert ops_of(lambda x: 0.5 * x * (1 + lax.erf(x / np.sqrt(2))), X) == ["gelu"]
    assert ops_of(lambda x: x * 0.5 * (1 + lax.erf(x * np.sqrt(0.5))), X) == ["gelu"]
    assert ops_of(lambda x: jax.nn.elu(x, 0.3), X) == ["elu"]
    check(lambda x: jax.nn.elu(x, 0.3), X)
    # near, and not it
    assert "gelu_tanh" not in ops_of(
        lambda x: 0.5 * x * (1 + jnp.tanh(0.79 * (x + 0.044715 * x**3))), X
    )
    assert "silu" not in ops_of(lambda x, y: x * jax.nn.sigmoid(y), X, Y)
    # max(x, 0) has another gradient at 0 than relu
    assert ops_of(lambda x: jnp.maximum(x, 0), X) == ["constant", "max"]


# ---- what is refused ---------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[str]]] = {
    "sort": (lambda x: jnp.sort(x), (X,), ["sort", "outside of the fusion"]),
    "cumsum": (lambda x: jnp.cumsum(x, 0), (X,), ["cumsum", "triangular"]),
    "gather": (lambda x, i: x[i], (X, INTEGERS[0] % 4), ["gather", "constant bounds"]),
    "scan": (lambda x: lax.fori_loop(0, 3, lambda i, c: c + 1, x), (X,), ["scan", "around"]),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), (X,), ["cond", "jnp.where"]),
    "random": (lambda k, x: x * jax.random.uniform(k, x.shape), (jax.random.key(0), X), ["key"]),
    "complex": (lambda x: lax.complex(x, x), (X,), ["complex64"]),
    "uint32": (lambda x: x.astype(jnp.uint32), (INTEGERS,), ["uint32", "int32"]),
    "int8 sum": (lambda x: x + x, (BYTES,), ["i8", "wraps around", "int32"]),
    "int8 product": (lambda a, b: lax.dot(a, b.T), (BYTES, BYTES), ["preferred_element_type"]),
    "narrowing": (lambda x: x.astype(jnp.int8), (INTEGERS,), ["i32 to i8", "jnp.clip"]),
    "bits": (lambda x: x & 3, (INTEGERS,), ["bits of i32"]),
    "start": (lambda x, i: lax.dynamic_slice(x, (i, 0), (1, 6)), (X, jnp.int32(1)),
              ["dynamic_slice", "constant bounds"]),
    "cumulative": (lambda x: lax.cumlogsumexp(x, 0), (X,), ["cumlogsumexp"]),
    "callback": (lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
                 (X,), ["pure_callback"]),
    "bf16 algorithm": (lambda a, b: lax.dot(a, b.T, precision=lax.DotAlgorithmPreset.BF16_BF16_F32),
                       (X, Y), ["BF16_BF16_F32"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_primitive_and_line(name: str) -> None:
    function, args, words = REFUSED[name]
    with pytest.raises(lawson.UnsupportedError) as caught:
        fusion(function, engines=["cpu"])(*args)
    text = str(caught.value)
    for word in [*words, "nearest supported form", "fusion '"]:
        assert word in text
    assert isinstance(caught.value, NotImplementedError)
    if "argument" not in text:
        assert re.search(r"at \w+\.py:\d+", text), text


def test_refusal_has_the_line_of_the_users_code() -> None:
    def model(x: Any) -> Any:
        y = x * 2
        return jnp.sort(y)  # HERE

    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.endswith("# HERE"))
    with pytest.raises(
        lawson.UnsupportedError, match=rf"'model': sort at test_jax_trace.py:{line}"
    ):
        fusion(model, engines=["cpu"])(X)


def test_ops_carry_their_lines() -> None:
    def model(x: Any) -> Any:
        return jnp.sin(x)  # THERE

    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.endswith("# THERE"))
    graph = inspect(fusion(model, engines=["cpu"]))(X).graph
    assert f"# test_jax_trace.py:{line}" in graph.print()


# ---- against StableHLO -------------------------------------------------------------------------

# An op of a graph, and what StableHLO has for it.
SAME = {
    "matmul": "dot_general", "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide",
    "exp": "exponential", "tanh": "tanh", "sin": "sine", "cos": "cosine", "max": "maximum",
    "min": "minimum", "select": "select", "sqrt": "sqrt", "rsqrt": "rsqrt", "neg": "negate",
    "abs": "abs", "convert": "convert", "reduce_sum": "reduce", "reduce_max": "reduce",
    "concat": "concatenate", "slice": "slice", "iota": "iota",
    "log": "log", "floor": "floor",
}  # fmt: skip
TYPES = {"f32": "f32", "bf16": "bf16", "i8": "i8", "i32": "i32", "i1": "bool", "f64": "f64"}
MODELS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "the example": (
        lambda x, y, z: jnp.float32(lax.batch_matmul(jnp.bfloat16(x), y)) + z,
        (BYTES[None], X.T[None].astype(jnp.bfloat16), f32(1, 4, 4)),
    ),
    "an mlp": (lambda x, w, b: jnp.tanh(x @ w + b) * x.sum(), (X, f32(6, 6), f32(6))),
    "two products": (lambda x, v, w: jnp.tanh(x @ v) * (x @ w), (X, f32(6, 5), f32(6, 5))),
    "pointwise": (lambda x, y: jnp.exp(-abs(x - y)) / jnp.sqrt(x * x + 1) + jnp.floor(y), (X, Y)),
    "reductions": (lambda x: (x.max(0), (x * 2).sum(1), lax.log(x.max(1) + 9)), (X,)),
    "views": (lambda x, y: jnp.concatenate([x[:, 1:], lax.rsqrt(y * y + 1)[:, :2]], 1), (X, Y)),
    "select": (lambda x, y: lax.select(x > y, jnp.sin(x), jnp.cos(y)), (X, Y)),
}


@pytest.mark.parametrize("name", MODELS)
def test_graph_says_what_stablehlo_says(name: str) -> None:
    """JAX's own lowering of the same function: the same types at the ends, the same computing ops."""
    function, args = MODELS[name]
    document = document_of(function, *args)
    text = jax.jit(function).lower(*args).as_text()
    main = text[text.index("func.func public @main") :]
    signature = main[: main.index("\n")]
    tensors = re.findall(r"tensor<((?:\d+x)*)(\w+)>", signature)
    types = [(TYPES[t], [int(n) for n in dims.split("x") if n]) for dims, t in tensors]
    graph = _core.Graph.from_json(json.dumps(document))
    assert types == [(t.dtype, list(t.shape)) for t in graph.tensors()]
    mine = Counter(SAME[op["op"]] for op in document["ops"] if op["op"] in SAME)
    theirs = Counter(re.findall(r"= stablehlo\.(\w+)", text))
    assert mine == Counter({k: n for k, n in theirs.items() if k in SAME.values()})
    unknown = {op["op"] for op in document["ops"]} - SAME.keys()
    assert unknown <= {"constant", "broadcast", "reshape", "transpose"} | {
        op for op in unknown if op.startswith("compare_")
    }


# ---- numbers of the jaxpr ----------------------------------------------------------------------


def test_numbers_inside_are_constants_and_arrays_are_operands() -> None:
    table = f32(4, 6)
    scale = np.float32(2.5)

    def model(x: Any) -> Any:
        return x * scale + table

    graph = inspect(fusion(model, engines=["cpu"]))(X).graph
    assert [t.name for t in graph.tensors() if t.is_input] == ["captured0", "x"]
    assert "constant(2.5)" in graph.print()
    check(model, X)


def test_infinities_survive_json() -> None:
    with jax.enable_x64(True):
        wide = jnp.asarray(RNG.standard_normal((3, 4)))
        for value in (-jnp.inf, jnp.inf, jnp.nan):
            check(lambda x, v=value: jnp.where(x > 0, x, v), wide, rtol=0, atol=0)
            check(lambda x, v=value: jnp.where(x > 0, x, v), X, rtol=0, atol=0)
    assert "Infinity" not in json.dumps(document_of(lambda x: jnp.where(x > 0, x, -jnp.inf), X))


def test_equal_ops_are_written_once() -> None:
    assert ops_of(lambda x: jnp.sin(x) + jnp.sin(x) * jnp.sin(x), X) == ["sin", "mul", "add"]


def test_full_precision_of_f32_is_asked_for() -> None:
    jaxpr = jax.make_jaxpr(lambda a, b: jnp.dot(a, b.T, precision="highest"))(X, Y)
    assert "dot_general at test_jax_trace.py" in str(trace(jaxpr, "f", ["a", "b"]).full_f32)
    jaxpr = jax.make_jaxpr(lambda a, b: jnp.dot(a, b.T))(X, Y)
    assert trace(jaxpr, "f", ["a", "b"]).full_f32 is None
