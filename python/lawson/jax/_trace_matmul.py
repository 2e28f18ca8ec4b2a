"""``dot_general`` with any dimension numbers, and block-scaled products, as ``matmul``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lawson._graph.product import product
from lawson._graph.values import Operand, is_float
from lawson.jax._trace_ops import rule

if TYPE_CHECKING:
    from lawson.jax._trace import Walk

# Algorithms of `jax.lax.DotAlgorithmPreset` that are what a product of these dtypes is anyway.
_NATURAL = {
    "DEFAULT": None,
    "F16_F16_F32": "f16",
    "BF16_BF16_F32": "bf16",
    "F64_F64_F64": "f64",
}


def _check_precision(walk: Walk, precision: Any, operands: list[Operand]) -> None:
    """f16, bf16, 8 bits and f64 are multiplied exactly whatever the precision; f32 may be TF32."""
    if precision is None:
        return
    name = getattr(precision, "name", None)
    if name in _NATURAL:
        wanted = _NATURAL[name]
        if wanted is None or all(x.dtype == wanted for x in operands):
            return
        walk.refuse(f"algorithm {name} of {', '.join(x.dtype for x in operands)}", "the default")
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    names = [getattr(p, "name", None) for p in pair]
    if any(n not in ("DEFAULT", "HIGH", "HIGHEST") for n in names):
        walk.refuse(f"precision {precision}", "the default, HIGH or HIGHEST")
    if any(n != "DEFAULT" for n in names) and any(x.dtype == "f32" for x in operands):
        walk.needs_full_f32()


@rule("dot_general")
def _dot_general(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    a, b = operands
    (contract_a, contract_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    out = walk.dtype(eqn.outvars[0].aval.dtype)
    _check_precision(walk, eqn.params.get("precision"), operands)
    if "bool" in (a.dtype, b.dtype):
        walk.refuse("bool operands", "convert them to a number first")
    if not is_float(a.dtype) and out != "i32":
        walk.refuse(
            f"a product of {a.dtype} and {b.dtype} as {out} wraps around",
            "preferred_element_type=jnp.int32",
        )
    return product(walk, a, b, (contract_a, contract_b), (batch_a, batch_b), out)


@rule("scaled_matmul", "scaled_matmul_wrapper")
def _scaled_matmul(walk: Walk, eqn: Any, operands: list[Operand]) -> Operand:
    """a [B, M, K], b [B, N, K], scales [B, M, K / block] and [B, N, K / block]."""
    a, b, a_scale, b_scale = operands
    if a_scale.shape[-1] == 0 or a.shape[-1] % a_scale.shape[-1]:
        walk.refuse(
            f"{a_scale.shape[-1]} scales for {a.shape[-1]} values", "one scale for each equal block"
        )
    block = a.shape[-1] // a_scale.shape[-1]
    turned = [walk.emit.transpose(x, (0, 2, 1)) for x in (b, b_scale)]
    values = [walk.emit.whole(x) for x in (a, turned[0], a_scale, turned[1])]
    out = walk.dtype(eqn.outvars[0].aval.dtype)
    shape = tuple(eqn.outvars[0].aval.shape)
    return walk.emit.emit("scaled_matmul", values, out, shape, block=block)
