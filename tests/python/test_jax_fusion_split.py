"""Gradients as several kernels: where they are cut, that the parts are the whole, and on an H200.

The CPU engine takes every gradient as one kernel. To run the parts it is told to refuse what cuDNN
refuses: two products one behind the other or beside each other, and whatever follows a reduction.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lawson
from lawson import _core
from lawson._graph.kernels import Kernel
from lawson._graph.shapes import operands_of, results_of, types_of
from lawson._graph.split import Glue
from lawson._graph.tidy import tidied
from lawson.jax import _fusion_primitive, fusion, inspect
from lawson.jax._fusion_partition import factors_of, shard
from lawson.jax._fusion_primitive import compiled

RNG = np.random.default_rng(9)
BF16 = jnp.bfloat16


def f32(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def mlp(x: Any, w: Any, b: Any) -> Any:
    return jax.nn.gelu(x @ w + b)


def swiglu(x: Any, v: Any, w: Any) -> Any:
    return jax.nn.silu(x @ v) * (x @ w)


def attention_scores(x: Any, w: Any) -> Any:
    return jax.nn.softmax(x @ w, -1)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "mlp": (mlp, (f32(8, 16), f32(16, 4), f32(4))),
    "mlp of a batch": (mlp, (f32(2, 8, 16), f32(16, 4), f32(4))),
    "swiglu": (swiglu, (f32(8, 16), f32(16, 4), f32(16, 4))),
    "linear": (lambda x, w, b: x @ w + b, (f32(8, 16), f32(16, 4), f32(4))),
    "softmax": (attention_scores, (f32(8, 16), f32(16, 4))),
    "layer norm": (
        lambda x, g: (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * g,
        (f32(8, 16), f32(16)),
    ),
    "einsum": (lambda x, w: jnp.einsum("bsd,dhk->bshk", x, w), (f32(2, 4, 6), f32(6, 2, 3))),
}  # fmt: skip


def refuses_what_cudnn_refuses(document: dict[str, Any]) -> None:
    made = {r: op for op in document["ops"] for r in results_of(op)}

    def behind(name: str, kinds: tuple[str, ...]) -> bool:
        op = made.get(name)
        return op is not None and (
            op["op"].startswith(kinds) or any(behind(n, kinds) for n in operands_of(op))
        )

    for op in document["ops"]:
        reads = operands_of(op)
        if op["op"] == "matmul" and any(behind(n, ("matmul",)) for n in reads):
            raise lawson.UnsupportedError("a product behind a product")
        if any(behind(n, ("reduce_",)) for n in reads):
            raise lawson.UnsupportedError("an op behind a reduction")

    def products(name: str) -> set[str]:
        op = made.get(name)
        found = {name} if op is not None and op["op"] == "matmul" else set()
        return found.union(*(products(n) for n in operands_of(op))) if op is not None else found

    behind_each = [p for p in map(products, document["outputs"]) if p]
    if any(not a & b for a in behind_each for b in behind_each):
        raise lawson.UnsupportedError("products beside each other")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_parts_are_the_gradient(name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _fusion_primitive.kernel

    def strict(program: Any, settings: Any, platform: str, document: dict[str, Any]) -> Kernel:
        if program.is_derived:
            refuses_what_cudnn_refuses(document)
        return real(program, settings, platform, document)

    monkeypatch.setattr(_fusion_primitive, "kernel", strict)
    function, args = CASES[name]
    args = tuple(a.astype(dtype) for a in args)
    every = tuple(range(len(args)))

    def loss(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *a: (f(*a).astype(jnp.float32) ** 2).sum()

    got_of = jax.grad(loss(fusion(function, engines=["cpu"])), every)
    *_, backward = inspect(got_of)(*args)
    assert len(backward.kernels) > 1
    for kernel in backward.kernels:
        refuses_what_cudnn_refuses(kernel.document)
    compiled_text = jax.jit(got_of).lower(*args).compile().as_text()
    for kernel in backward.kernels:
        assert kernel.plan.id in compiled_text
    got = jax.jit(got_of)(*args)
    exact = jax.grad(loss(function), every)(*(a.astype(jnp.float32) for a in args))
    # bf16: of the result, the cotangent and what lies between two kernels; each at most 2^-8 of the
    # largest term, of which at most 16 are added
    tolerance = 1e-4 if dtype == jnp.float32 else 16 * 2**-8
    for a, b in zip(got, exact, strict=True):
        assert a.dtype == dtype
        largest = float(jnp.abs(b).max())
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0, atol=tolerance * largest)


def test_what_is_refused_as_parts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that does not build is told, not sent to XLA."""
    real = _fusion_primitive.kernel

    def strict(program: Any, settings: Any, platform: str, document: dict[str, Any]) -> Kernel:
        if "d_w" in document["outputs"]:
            raise lawson.UnsupportedError("no kernel for d_w")
        return real(program, settings, platform, document)

    monkeypatch.setattr(_fusion_primitive, "kernel", strict)
    args = (f32(8, 16), f32(16, 4), f32(4))
    fused = fusion(mlp, engines=["cpu"])
    loss = lambda *a: fused(*a).sum()
    np.testing.assert_allclose(fused(*args), mlp(*args), rtol=1e-5, atol=1e-5)
    assert jax.grad(loss, 0)(*args).shape == (8, 16)
    for call in (jax.grad(loss, 1), jax.jit(jax.grad(loss, (0, 1))), inspect(jax.grad(loss, 1))):
        with pytest.raises(lawson.UnsupportedError, match="no kernel for d_w"):
            call(*args)


def test_xla_has_only_views_and_dtypes_between_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _fusion_primitive.kernel

    def strict(program: Any, settings: Any, platform: str, document: dict[str, Any]) -> Kernel:
        refuses_what_cudnn_refuses(document)
        return real(program, settings, platform, document)

    monkeypatch.setattr(_fusion_primitive, "kernel", strict)
    args = (f32(8, 16).astype(BF16), f32(16, 4).astype(BF16), f32(4).astype(BF16))
    fused = fusion(mlp, engines=["cpu"])
    jaxpr = jax.make_jaxpr(jax.grad(lambda *a: fused(*a).astype(jnp.float32).sum(), (0, 1, 2)))(
        *args
    )
    program = [e.params["program"] for e in jaxpr.eqns if "program" in e.params][-1]
    code = compiled(program, "cpu")
    assert code is not None
    glue = [p for p in code.parts if isinstance(p, Glue)]
    assert [[op["op"] for op in p.document["ops"]] for p in glue] == [["convert"]]
    # the product is computed again once, for both that need it
    assert [sum(op["op"] == "matmul" for op in k.document["ops"]) for k in code.kernels] == [
        1,
        1,
        1,
    ]


# ---- on the GPU that is not here ---------------------------------------------------------------

H200: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int]] = {
    "mlp": (mlp, ((512, 64), (64, 256), (256,)), 3),
    "mlp of a batch": (mlp, ((4, 128, 64), (64, 256), (256,)), 3),
    "linear": (lambda x, w, b: x @ w + b, ((4, 128, 64), (64, 256), (256,)), 3),
    "relu": (lambda x, w, b: jax.nn.relu(x @ w + b), ((512, 64), (64, 256), (256,)), 3),
    "swiglu": (swiglu, ((512, 64), (64, 256), (64, 256)), 4),
    "batched weights": (lambda x, w: jax.nn.silu(x @ w), ((4, 128, 64), (4, 64, 256)), 3),
    "heads": (lambda x, w: jnp.einsum("bsd,dhk->bshk", x, w), ((4, 128, 64), (64, 4, 64)), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", H200)
def test_forward_is_one_kernel_of_cudnn_and_backward_few(name: str) -> None:
    """Judged and built for an H200 by cuDNN itself, on any machine that has cuDNN."""
    function, shapes, kernels = H200[name]
    fused = fusion(function, target="h200")
    args = [jax.ShapeDtypeStruct(s, BF16) for s in shapes]
    gradient = jax.grad(lambda *a: fused(*a).astype(jnp.float32).sum(), tuple(range(len(args))))
    try:
        forward, backward = inspect(gradient, platform="cuda")(*args)
    except lawson.UnavailableError as error:
        pytest.skip(f"no cuDNN: {error}")
    assert len(forward.kernels) == 1
    assert len(backward.kernels) == kernels
    assert {k.plan.engine for k in (*forward.kernels, *backward.kernels)} == {"cudnn"}


def test_the_example_of_xlas_users_on_an_h200() -> None:
    def comp1(x: Any, y: Any, z: Any) -> Any:
        return jnp.float32(jax.lax.batch_matmul(jnp.bfloat16(x), y)) + z

    args = [jax.ShapeDtypeStruct((4, 1024, 1024), t) for t in (jnp.int8, BF16, jnp.float32)]
    try:
        told = inspect(fusion(comp1, target="h200"), platform="cuda")(*args)
    except lawson.UnavailableError as error:
        pytest.skip(f"no cuDNN: {error}")
    assert told.engine == "cudnn" and len(told.kernels) == 1


# ---- tidying and sharding of documents ---------------------------------------------------------


def document(
    ops: list[dict[str, Any]], outputs: list[str], **inputs: tuple[str, list[int]]
) -> dict[str, Any]:
    found = [{"name": n, "dtype": t, "shape": s} for n, (t, s) in inputs.items()]
    return {
        "lawson": 1,
        "kind": "graph",
        "name": "g",
        "inputs": found,
        "ops": ops,
        "outputs": outputs,
    }


def test_tidying_moves_views_and_keeps_types() -> None:
    given = document(
        [
            {"op": "convert", "in": ["x"], "out": "a", "dtype": "f32"},
            {"op": "reshape", "in": ["a"], "out": "b", "dtype": "f32", "shape": [8, 4]},
            {"op": "exp", "in": ["b"], "out": "c", "dtype": "f32"},
            {"op": "reshape", "in": ["c"], "out": "d", "dtype": "f32", "shape": [2, 4, 4]},
            {"op": "convert", "in": ["d"], "out": "y", "dtype": "bf16"},
            {"op": "reduce_sum", "in": ["c"], "out": "e", "dtype": "f32", "axes": [0], "keepdims": True},
            {"op": "reshape", "in": ["e"], "out": "z", "dtype": "f32", "shape": [4]},
        ],
        ["y", "z"],
        x=("bf16", [2, 4, 4]),
    )  # fmt: skip
    out = tidied(given)
    assert [op["op"] for op in out["ops"]] == [
        "reshape", "convert", "exp", "convert", "reshape", "reduce_sum",
    ]  # fmt: skip
    before, after = types_of(given), types_of(out)
    assert all(before[n] == after[n] for n in ("y", "z"))
    shapes = {
        t.name: (t.dtype, list(t.shape)) for t in _core.Graph.from_json(json.dumps(out)).tensors()
    }
    assert shapes == {"x": ("bf16", [2, 4, 4]), "y": ("bf16", [2, 4, 4]), "z": ("f32", [4])}
    assert tidied(out) == out


def test_factors_of_a_product() -> None:
    given = document(
        [
            {"op": "matmul", "in": ["x", "w"], "out": "p", "dtype": "f32"},
            {"op": "add", "in": ["p", "b"], "out": "y", "dtype": "f32"},
            {"op": "reduce_max", "in": ["y"], "out": "m", "dtype": "f32", "axes": [2]},
        ],
        ["y", "m"],
        x=("f32", [2, 8, 16]), w=("f32", [16, 4]), b=("f32", [4]),
    )  # fmt: skip
    factors = factors_of(given)
    batch, rows, depth = factors.of("x")
    assert factors.of("y") == [batch, rows, None] and factors.of("m") == [batch, rows]
    assert None not in (batch, rows)
    assert depth is None and factors.of("w") == [None, None]  # added to, and reduced over
    assert batch is not None and rows is not None
    local = shard(given, factors, {batch: 2, rows: 4})
    assert [i["shape"] for i in local["inputs"]] == [[1, 2, 16], [16, 4], [4]]
    assert types_of(local)["m"].shape == (1, 2)
    _core.Graph.from_json(json.dumps(local))


def test_factors_of_a_sum_at_the_end() -> None:
    given = document(
        [
            {"op": "transpose", "in": ["x"], "out": "t", "dtype": "bf16", "perm": [1, 0]},
            {"op": "matmul", "in": ["t", "g"], "out": "p", "dtype": "f32"},
            {"op": "convert", "in": ["p"], "out": "dw", "dtype": "bf16"},
        ],
        ["dw"],
        x=("bf16", [8, 16]), g=("bf16", [8, 4]),
    )  # fmt: skip
    factors = factors_of(given)
    rows = factors.of("x")[0]
    assert rows is not None and factors.of("g")[0] == rows
    assert factors.partial["dw"] == {rows}
    squared = {**given, "ops": [*given["ops"], {"op": "mul", "in": ["dw", "dw"], "out": "s", "dtype": "bf16"}],
               "outputs": ["s"]}  # fmt: skip
    assert factors_of(squared).of("x")[0] is None  # a square of a sum is no sum of squares
