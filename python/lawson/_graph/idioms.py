"""Activations that frameworks spell out, recognised by structure: ``gelu``, ``silu``, ``elu``, ...

Engines have kernels of their own for them, and their gradients are one op. Constants match within
the rounding of their dtype; ``add`` and ``mul`` match in either order. ``relu`` and ``relu6`` are
not here: ``max(x, 0)`` has another gradient at 0 than ``jax.nn.relu``, so they are recognised only
where a ``custom_jvp`` says so (``_trace.py``).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

from lawson._graph.values import Const, Emitter, Operand, Value, is_float, numpy_dtype

_COMMUTES = {"add", "mul"}
# A pattern: "x" (the same operand everywhere), a number, "alpha" (any constant), or (op, *patterns).
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBE = ("mul", ("mul", "x", "x"), "x")
_GELU_TANH = (
    "add",
    1.0,
    ("tanh", ("mul", _SQRT_2_OVER_PI, ("add", "x", ("mul", 0.044715, _CUBE)))),
)
_ERFS = (
    ("sub", 1.0, ("erf", ("mul", ("neg", "x"), math.sqrt(0.5)))),
    ("add", 1.0, ("erf", ("mul", "x", math.sqrt(0.5)))),
    ("add", 1.0, ("erf", ("div", "x", math.sqrt(2.0)))),
)


def _halved(factor: Any) -> list[Any]:
    return [
        ("mul", "x", ("mul", 0.5, factor)),
        ("mul", ("mul", 0.5, "x"), factor),
        ("mul", 0.5, ("mul", "x", factor)),
    ]


_POSITIVE = ("compare_gt", "x", 0.0)
_IDIOMS: list[tuple[str, Any]] = [
    ("silu", ("mul", "x", ("sigmoid", "x"))),
    *(("gelu_tanh", p) for p in _halved(_GELU_TANH)),
    *(("gelu", p) for erf in _ERFS for p in _halved(erf)),
    # jax.nn.softplus is logaddexp(x, 0), with a way around infinities minus themselves
    (
        "softplus",
        (
            "select",
            ("compare_ne", "x", "x"),
            ("add", "x", 0.0),
            ("add", ("max", "x", 0.0), ("log1p", ("exp", ("neg", ("abs", "x"))))),
        ),
    ),
    ("elu", ("select", _POSITIVE, "x", ("expm1", ("select", _POSITIVE, 0.0, "x")))),
    (
        "elu",
        ("select", _POSITIVE, "x", ("mul", "alpha", ("expm1", ("select", _POSITIVE, 0.0, "x")))),
    ),
]


class _Match:
    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.bound: dict[str, Operand] = {}

    def operand(self, pattern: Any, x: Operand) -> bool:
        if isinstance(pattern, float):
            if not isinstance(x, Const) or not is_float(x.dtype):
                return False
            eps = float(ml_dtypes.finfo(numpy_dtype(x.dtype)).eps)  # type: ignore[no-untyped-call]
            return abs(x.number - pattern) <= eps * abs(pattern)
        if pattern == "alpha":
            self.bound["alpha"] = x
            return isinstance(x, Const) and math.isfinite(x.number)
        if pattern == "x":
            if not isinstance(x, Value):
                return False
            return self.bound.setdefault("x", x) == x
        made = self.emitter.made(x)
        return made is not None and self.op(pattern, made.op, made.operands)

    def op(self, pattern: Any, op: str, operands: tuple[Operand, ...]) -> bool:
        if pattern[0] != op or len(pattern) - 1 != len(operands):
            return False
        before = dict(self.bound)
        if all(self.operand(p, x) for p, x in zip(pattern[1:], operands)):
            return True
        if op not in _COMMUTES:
            return False
        self.bound = before
        return all(self.operand(p, x) for p, x in zip(pattern[1:], operands[::-1]))


def recognised(emitter: Emitter, result: Operand) -> Operand:
    """``result``, or the one op that is the same computation."""
    base = emitter.unfolded(result)
    if base is not None:
        known = recognised(emitter, base)
        return result if known is base else emitter.reshape(known, result.shape)
    made = emitter.made(result)
    if made is None or made.op not in ("mul", "select") or not is_float(result.dtype):
        return result
    assert isinstance(result, Value)
    for name, pattern in _IDIOMS:
        match = _Match(emitter)
        if not match.op(pattern, made.op, made.operands):
            continue
        x = match.bound["x"]
        if x.dtype != result.dtype or x.shape != result.shape:
            continue
        attributes = {}
        if name == "elu":
            alpha = match.bound.get("alpha")
            attributes["alpha"] = alpha.number if isinstance(alpha, Const) else 1.0
        return dataclasses.replace(
            emitter.pointwise(name, (x,), result.dtype, **attributes), shape=result.shape
        )
    return result


def rectifier(emitter: Emitter, result: Operand) -> Operand | None:
    """``relu`` or ``relu6`` for a result that is max(x, 0), or min(max(x, 0), 6); else None."""
    base = emitter.unfolded(result)
    if base is not None:
        known = rectifier(emitter, base)
        return None if known is None else emitter.reshape(known, result.shape)
    made = emitter.made(result)
    for name, pattern in (
        ("relu", ("max", "x", 0.0)),
        ("relu6", ("min", ("max", "x", 0.0), 6.0)),
    ):
        match = _Match(emitter)
        if made is not None and match.op(pattern, made.op, made.operands):
            x = match.bound["x"]
            if np.broadcast_shapes(x.shape, result.shape) == x.shape:
                return emitter.pointwise(name, (x,), result.dtype)
    return None
