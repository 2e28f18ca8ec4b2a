"""Products of ATen as ``matmul``; see ``_trace_ops``."""

from __future__ import annotations

from typing import Any

from lawson._graph.pointwise import converted, pointwise
from lawson._graph.product import product
from lawson._graph.values import Const, Operand, const, is_float
from lawson.torch._trace import Call, Walk
from lawson.torch._trace_dtypes import f32_products
from lawson.torch._trace_ops import rule

_NO_BATCH: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


def _product(
    walk: Walk,
    call: Call,
    a: Operand,
    b: Operand,
    contract: tuple[int, int],
    batch: bool = False,
    out: str | None = None,
) -> Operand:
    dtype = walk.dtype(call.dtype) if out is None else out
    if a.dtype != b.dtype and out is None:  # PyTorch's own refusal, which fake tensors do not make
        walk.refuse(
            f"a product of {a.dtype} and {b.dtype}",
            "operands of one dtype, as PyTorch asks for: convert one of them",
        )
    if not is_float(a.dtype) and dtype != "i32":
        walk.refuse(
            f"a product of {a.dtype} as {dtype} wraps around",
            "torch._int_mm of int8 operands, or convert them to a float",
        )
    if a.dtype == "f32" and f32_products() != "tf32":
        walk.needs_full_f32()
    dims = ((0,), (0,)) if batch else _NO_BATCH
    return product(walk, a, b, ((contract[0],), (contract[1],)), dims, dtype)


@rule("mm", "_int_mm")
def _mm(walk: Walk, call: Call, a: Any, b: Any, out_dtype: Any = None) -> Operand:
    return _product(walk, call, a, b, (1, 0))


@rule("bmm")
def _bmm(walk: Walk, call: Call, a: Any, b: Any, out_dtype: Any = None) -> Operand:
    return _product(walk, call, a, b, (2, 1), batch=True)


@rule("mv")
def _mv(walk: Walk, call: Call, a: Any, b: Any) -> Operand:
    return _product(walk, call, a, b, (1, 0))


@rule("dot", "vdot")
def _dot(walk: Walk, call: Call, a: Any, b: Any) -> Operand:
    return _product(walk, call, a, b, (0, 0))


def _sum(walk: Walk, call: Call, first: Any, found: Operand, beta: Any, alpha: Any) -> Operand:
    """beta first + alpha found."""
    dtype = found.dtype
    if alpha != 1:
        found = pointwise(walk, "mul", [found, const(alpha, dtype)])
    if beta == 0:
        return found
    first = converted(walk, first, dtype)
    if beta != 1:
        first = pointwise(walk, "mul", [first, const(beta, dtype)])
    # the order of a bias behind a product, as it is usually written
    return pointwise(walk, "add", [found, first])


@rule("addmm", "baddbmm", "addmv", "addbmm")
def _addmm(
    walk: Walk, call: Call, first: Any, a: Any, b: Any, out_dtype: Any = None, *,
    beta: Any = 1, alpha: Any = 1,
) -> Operand:  # fmt: skip
    name = str(call.node.target).split(".")[1]
    if name == "addbmm":
        walk.refuse("a sum over a batch of products", "torch.baddbmm and a sum")
    is_batched = name == "baddbmm"
    found = _product(walk, call, a, b, (2, 1) if is_batched else (1, 0), batch=is_batched)
    return _sum(walk, call, first, found, beta, alpha)


@rule("_scaled_mm")
def _scaled_mm(
    walk: Walk, call: Call, a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any = None,
    scale_result: Any = None, out_dtype: Any = None, use_fast_accum: bool = False,
) -> Operand:  # fmt: skip
    """a [M, K] and b [K, N] of 8 bits; scales of all, or of each row and column."""
    rows, columns = (a.shape[0], 1), (1, b.shape[1])
    for scale, whole in ((scale_a, rows), (scale_b, columns)):
        if scale.dtype != "f32" or scale.shape not in ((), (1,), (1, 1), whole):
            walk.refuse(
                f"scales {scale.dtype}{list(scale.shape)}",
                "one f32 scale for all, or one for each row of a and each column of b",
            )
    found = _product(walk, call, a, b, (1, 0), out="f32")
    for scale in (scale_a, scale_b):
        shape = scale.shape if len(scale.shape) == 2 else ()
        found = pointwise(walk, "mul", [found, walk.emit.reshape(scale, shape)])
    if bias is not None:
        found = pointwise(walk, "add", [found, converted(walk, bias, "f32")])
    if scale_result is not None and not isinstance(scale_result, Const):
        found = pointwise(walk, "mul", [found, walk.emit.reshape(scale_result, ())])
    return converted(walk, found, walk.dtype(call.dtype))
