"""What XLA's own tests of cuDNN fusions prove, said in JAX, and built for an H200 that is not here.

Each is one plan of cuDNN, or a refusal with a reason; cuDNN has to be there, no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import lawson
from lawson.jax import fusion, inspect

BF16, F16, F32, I8, F8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8, jnp.float8_e4m3fn


def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


A, B = of(BF16, 64, 128), of(BF16, 128, 256)
WIDE = {"preferred_element_type": F32}
TURNED = (((1,), (1,)), ((), ()))


def dot(a: Any, b: Any) -> Any:
    return lax.dot(a, b, **WIDE)


Cases = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]
FUSES: Cases = {
    "f32 dot": (lambda a, b: a @ b, (of(F32, 64, 128), of(F32, 128, 256))),
    "vector and tensor": (lambda v, t: v @ t, (of(BF16, 128), B)),
    "tensor and vector": (lambda t, v: t @ v, (A, of(BF16, 128))),
    "bf16 to f32": (dot, (A, B)),
    "s4 and bf16": (lambda a, b: a.astype(BF16) @ b, (of(jnp.int4, 64, 128), B)),
    "s8 and bf16": (lambda a, b: a.astype(BF16) @ b, (of(I8, 64, 128), B)),
    "s8 with a scale of columns": (lambda a, b, s: a @ (b.astype(BF16) * s),
                                   (A, of(I8, 128, 256), of(BF16, 256))),
    "s8 with a scale of rows": (lambda a, b, s: a @ (b.astype(BF16) * s[:, None]),
                                (A, of(I8, 128, 256), of(BF16, 128))),
    "output subtraction": (lambda a, b, c: a @ b - c, (A, B, of(BF16, 64, 256))),
    "turned left operand": (lambda a, b: a.T @ b, (of(BF16, 128, 64), B)),
    "turned right operand": (lambda a, b: a @ b.T, (A, of(BF16, 256, 128))),
    "right operand computed": (lambda a, b, c: a @ (b * c), (A, B, B)),
    "f16 negate": (lambda a, b: -a @ b, (of(F16, 64, 128), of(F16, 128, 256))),
    "integers": (lambda a, b: lax.dot(a, b, preferred_element_type=jnp.int32),
                 (of(I8, 64, 128), of(I8, 128, 256))),
    "row added": (lambda a, b, c: a @ b + c, (A, B, of(BF16, 256))),
    "column added": (lambda a, b, c: a @ b + c[:, None], (A, B, of(BF16, 64))),
    "scalar added": (lambda a, b, c: a @ b + c, (A, B, of(BF16))),
    "constants": (lambda a, b: a @ b * 2.5 + 1, (A, B)),
    "clip": (lambda a, b: jnp.clip(a @ b, -1, 1), (A, B)),
    "clamp": (lambda a, b: lax.clamp(-1.0, dot(a, b), 1.0), (A, B)),
    "fp8": (lambda a, b: lax.dot_general(a, b, TURNED, **WIDE), (of(F8, 64, 128), of(F8, 256, 128))),
    "slice of rows": (lambda a, b: a[:32] @ b, (A, B)),
    "slice of depth": (lambda a, b: a[:, :64] @ b[:64], (A, B)),
    "split rows": (lambda a, b: jnp.tensordot(a, b, 1), (of(BF16, 4, 16, 128), B)),
    "heads": (lambda a, b: jnp.einsum("bhqd,bhkd->bhqk", a, b),
              (of(BF16, 2, 4, 64, 32), of(BF16, 2, 4, 64, 32))),
    "select": (lambda a, b, c: jnp.where(c > 0, a @ b, 0), (A, B, of(BF16, 64, 256))),
    "compare": (lambda a, b, c: (a @ b) > c, (A, B, of(BF16, 64, 256))),
    "odd dims": (lambda a, b: jax.nn.relu(a @ b), (of(BF16, 63, 127), of(BF16, 127, 255))),
    "int8 result": (lambda a, b: jnp.round(dot(a, b)).astype(I8), (A, B)),
    "fp8 result": (lambda a, b: (a @ b).astype(F8), (A, B)),
    "row sums": (lambda a, b: dot(a, b).sum(1), (A, B)),
    "two results": (lambda a, b, c: (a @ b + c, jax.nn.gelu(a @ b + c)), (A, B, of(BF16, 256))),
    "swiglu": (lambda x, v, w: jax.nn.silu(x @ v) * (x @ w), (A, B, B)),
    "batch of rows": (lambda x, w, b: jax.nn.gelu(x @ w + b), (of(BF16, 2, 64, 128), B, of(BF16, 256))),
    **{f"{name} of the product": (lambda a, b, f=f: f(dot(a, b)), (A, B)) for name, f in {
        "exp": lax.exp, "log": lax.log, "sqrt": lax.sqrt, "sin": lax.sin, "tanh": lax.tanh,
        "abs": lax.abs, "ceil": lax.ceil, "logistic": lax.logistic, "erf": lax.erf,
        "softplus": jax.nn.softplus, "leaky_relu": jax.nn.leaky_relu,
    }.items()},
    **{f"{name} with the product": (lambda a, b, c, f=f: f(dot(a, b), c), (A, B, of(F32, 64, 256)))
       for name, f in {"div": lax.div, "max": lax.max, "pow": lax.pow, "rem": lax.rem}.items()},
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "a product of a product": (lambda a, b, c: (a @ b) @ c, (A, B, of(BF16, 256, 64)), "matmul"),
    "a repeated row": (lambda a, c: a @ jnp.broadcast_to(c, (128, 256)), (A, of(BF16, 256)),
                       "broadcasts only the batch"),
    "more than rank 3": (lambda a, b: jnp.einsum("bqhd,bkhd->bhqk", a, b),
                         (of(BF16, 2, 64, 4, 32), of(BF16, 2, 64, 4, 32)), "rank 3"),
    "an op behind a reduction": (lambda a, b: jax.nn.softmax(dot(a, b), -1), (A, B), "reduc"),
    "HIGHEST": (lambda a, b: jnp.dot(a, b, precision="highest"),
                (of(F32, 64, 128), of(F32, 128, 256)), "precision HIGHEST"),
}  # fmt: skip


def told(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return inspect(fusion(function, target="h200"), platform="cuda")(*args)
    except lawson.UnavailableError as error:
        pytest.skip(f"no cuDNN: {error}")


@pytest.mark.parametrize("name", FUSES)
def test_fuses(name: str) -> None:
    found = told(*FUSES[name])
    assert len(found.kernels) == 1
    assert (found.engine, found.plan.target) == ("cudnn", "h200")


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_with_a_reason(name: str) -> None:
    function, args, word = REFUSED[name]
    with pytest.raises(lawson.UnsupportedError, match=word):
        told(function, args)
