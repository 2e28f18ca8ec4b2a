"""From a jaxpr to a graph document: what a marked function computes, in Lawson's ops.

``trace`` walks the equations once. Nested jaxprs (``jit``, ``custom_jvp_call``, ``remat``, ...) are
walked in place; they are told by their parameters, since their names change between versions of
JAX. A primitive without a rule is an ``UnsupportedError`` that names it, the line of the user's
code, and what could be written instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import lawson.jax._trace_matmul  # noqa: F401  (its rules)
from lawson._graph import walk as _walk
from lawson._graph.idioms import rectifier
from lawson._graph.values import Operand, const, dtype_name
from lawson._graph.walk import Trace
from lawson.jax import _jax
from lawson.jax._trace_ops import RULES
from lawson.jax._trace_refusals import ATTENTION

# What to write instead of a primitive that has no rule.
_HINTS = {
    "argmax": "reduce_max and a comparison", "argmin": "reduce_min and a comparison",
    "cond": "jnp.where over both results, or lax.cond around the fusion",
    "conv_general_dilated": "dot_general; convolutions stay outside of the fusion",
    "cumsum": "a product with a triangular matrix; or outside of the fusion",
    "gather": "a slice with constant bounds; or the gather outside of the fusion",
    "scatter": "jnp.where with an iota; or the scatter outside of the fusion",
    "scatter-add": "a product with a one-hot matrix; or outside of the fusion",
    "scan": "lax.scan around the fusion: its body may be one",
    "while": "lax.while_loop around the fusion: its body may be one",
    "dynamic_update_slice": "jnp.where with an iota",
    "rev": "the reversal outside of the fusion",
    "sort": "the sort outside of the fusion", "top_k": "lax.top_k outside of the fusion",
    "random_bits": "random numbers as an argument", "random_wrap": "random numbers as an argument",
    "threefry2x32": "random numbers as an argument",
    "rng_bit_generator": "random numbers as an argument",
    "shard_map": "shard_map around the fusion", "psum": "the collective outside of the fusion",
    "all_gather": "the collective outside of the fusion",
    "ppermute": "the collective outside of the fusion",
    "axis_index": "the index as an argument", "atan2": "div and a polynomial",
    "acos": "the angle outside of the fusion", "asin": "the angle outside of the fusion",
    "cbrt": "pow(abs(x), 1/3) * sign(x)", "sinh": "(exp(x) - exp(-x)) / 2",
    "cosh": "(exp(x) + exp(-x)) / 2", "shift_left": "a product with a power of two",
    "bitcast_convert_type": "the bit cast outside of the fusion",
    "sharding_constraint": "the constraint outside of the fusion",
    "pure_callback": "the callback outside of the fusion",
    "debug_callback": "the printing outside of the fusion",
    "debug_print": "the printing outside of the fusion",
}  # fmt: skip


class Walk(_walk.Walk):
    """One walk over a jaxpr."""

    framework = "JAX"
    clip = "jnp.clip"

    def dtype(self, dtype: Any) -> str:
        name = dtype_name(dtype)
        if name is None:
            known = {
                "u": "int32",
                "c": "its real and imaginary parts",
                "k": "random numbers as an argument",  # of a key
            }
            near = known.get(str(dtype)[:1], "f32")
            self.refuse(f"dtype {dtype} is none of Lawson's", near)
        return name

    def shape(self, eqn: Any) -> tuple[int, ...]:
        return tuple(int(n) for n in eqn.outvars[0].aval.shape)

    # ---- the walk ----------------------------------------------------------------------------

    def jaxpr(
        self, jaxpr: Any, consts: Sequence[Operand], args: Sequence[Operand]
    ) -> list[Operand]:
        values: dict[Any, Operand] = {}
        values.update(zip(jaxpr.constvars, consts))
        values.update(zip(jaxpr.invars, args))
        for eqn in jaxpr.eqns:
            operands = [self.literal(v) if _jax.is_literal(v) else values[v] for v in eqn.invars]
            results = self.equation(eqn, operands)
            values.update(zip(eqn.outvars, results))
        return [self.literal(v) if _jax.is_literal(v) else values[v] for v in jaxpr.outvars]

    def equation(self, eqn: Any, operands: list[Operand]) -> list[Operand]:
        self.emit.source = _jax.source_line(eqn) or self.emit.source
        self._op = eqn.primitive.name
        for variable in eqn.outvars:
            if hasattr(variable.aval, "dtype"):
                self.dtype(variable.aval.dtype)
        function = RULES.get(eqn.primitive.name)
        if function is not None:
            try:
                result = function(self, eqn, operands)
            except OverflowError as error:
                self.refuse(str(error), "a smaller constant")
            return result if isinstance(result, list) else [result]
        inner = nested_jaxpr(eqn)
        if inner is None and eqn.primitive.name.startswith("lawson_attention"):
            self.refuse(*ATTENTION)
        if inner is None:
            self.refuse("not one of Lawson's ops", nearest_form(eqn.primitive.name))
        jaxpr, consts = inner
        source, before = self.emit.source, self.own_gradient
        results = self.jaxpr(jaxpr, [self.captured(c) for c in consts], operands)
        self.emit.source, self._op = source, eqn.primitive.name
        if _jax.has_derivative_rule(eqn):
            own = rectifier(self.emit, results[0]) if len(results) == 1 else None
            made = self.emit.made(results[0]) if len(results) == 1 else None
            if own is not None or (made is not None and made.op == "softplus"):
                self.own_gradient = before  # the op's gradient is the rule's
                return results if own is None else [own]
            self.own_gradient = before or eqn.params.get("name") or eqn.primitive.name
        return results

    def literal(self, variable: Any) -> Operand:
        return self.captured(variable.val, variable.aval.dtype)

    def captured(self, value: Any, own: Any = None) -> Operand:
        """A number of the jaxpr's own; arrays among them were lifted to arguments before."""
        array = np.asarray(value)
        dtype = self.dtype(array.dtype if own is None else own)
        if array.size != 1 and (array.size == 0 or not (array == array.flat[0]).all()):
            self.refuse("an array inside the function", "the array as an argument")
        return const(array.flat[0] if array.size else 0, dtype, array.shape)


def nested_jaxpr(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """The one jaxpr that an equation calls with its own operands, and its consts; else None."""
    found = [p for p in eqn.params.values() if _jax.is_jaxpr(p)]
    program = getattr(eqn.params.get("program"), "jaxpr", None)
    if program is not None and _jax.is_jaxpr(program):  # a fusion inside a fusion
        found = [program]
    if len(found) != 1 or "mesh" in eqn.params or "length" in eqn.params:
        return None
    jaxpr, consts = _jax.open_jaxpr(found[0])
    same = [
        (getattr(a.aval, "shape", None), getattr(a.aval, "dtype", None))
        for a in (*eqn.invars, *eqn.outvars)
    ] == [
        (getattr(a.aval, "shape", None), getattr(a.aval, "dtype", None))
        for a in (*jaxpr.invars, *jaxpr.outvars)
    ]
    return (jaxpr, consts) if same else None


def nearest_form(primitive: str) -> str:
    """What to write instead of a primitive without a rule."""
    return _HINTS.get(primitive, "this part outside of the fusion, or split in two fusions")


def trace(jaxpr: Any, name: str, argument_names: Sequence[str], *, strict: bool = False) -> Trace:
    """The graph of a closed jaxpr without consts.

    ``argument_names``: one per flat argument; the graph's inputs have these names, and intermediate
    results carry the lines of code where they were written. Raises ``UnsupportedError``.
    """
    walk = Walk(name)
    inner, consts = _jax.open_jaxpr(jaxpr)
    arguments: list[Operand] = []
    for label, variable in zip(argument_names, inner.invars):
        walk._op = f"argument '{label}'"
        aval = variable.aval
        if not all(isinstance(n, int) for n in aval.shape):
            walk.refuse(f"the shape {aval.shape} is not known", "shapes of numbers")
        arguments.append(walk.emit.input(label, walk.dtype(aval.dtype), tuple(aval.shape)))
    walk.emit.source = ""
    results = walk.jaxpr(inner, [walk.captured(c) for c in consts], arguments)
    return walk.traced(arguments, results, strict)
