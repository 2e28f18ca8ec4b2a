"""The gradient of attention, also through its log-sum-exp.

`attend` is a `jax.custom_vjp` over the two primitives. When it is differentiated, its forward pass
is judged as `training`: what has no backward is refused before anything runs. What has no gradient
(masks, slopes, pages) is refused when it is asked for, and only gradients that are asked for are
computed.

The backward pass computes delta = rowsum(dO * O) itself, and dS = P * (dP - delta). A cotangent of
the log-sum-exp adds P * dlse to dS. It comes from one more call of the same plan: with V = 0, dP is
0, and with O = -1 and dO = dlse in the first columns, delta is -dlse. So this holds for whatever
the forward computes, and no plan is needed that was not judged. It runs only where the log-sum-exp
has a cotangent, and where the output has none, it runs alone.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from lawson._attention_setup import Setup
from lawson._errors import UnsupportedError
from lawson.jax import _attention_primitive as primitive
from lawson.jax._attention_segments import rows_in_use
from lawson.jax._jax import at_least_f32

_HAS_GRADIENT = ("q", "k", "v", "bias", "sink")
_WHY_NOT = {
    "mask": "a float attn_mask has no gradient next to a bias or alibi; add it to the bias",
    "slopes": "alibi slopes have no gradient; pass a bias, or use jax.lax.stop_gradient",
}


def _run(setup: Setup, which: str, operands: Any) -> list[Any]:
    """A pass, with zeros behind the last sequence of ragged results, where no plan writes."""
    run = primitive.forward if which == "forward" else primitive.backward
    results = run(setup, *operands)
    given = dict(zip(setup.names, operands, strict=False))
    for at, name in enumerate(setup.result_names(which)):
        for letter, side in (("m", "q"), ("n", "kv")):
            if letter not in setup.dims(name):
                continue
            offsets = given.get(f"cu_seqlens_{side}_padded", given[f"cu_seqlens_{side}"])
            axis = setup.dims(name).index(letter)
            shape = [1] * results[at].ndim
            shape[axis] = results[at].shape[axis]
            inside = jnp.arange(shape[axis], dtype=offsets.dtype) < offsets[-1]
            results[at] = jnp.where(inside.reshape(shape), results[at], 0)
    return results


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(setup: Setup, *operands: Any) -> tuple[Any, ...]:
    """The results of `setup.forward_results()`, differentiable in q, k, v, bias and sink."""
    return tuple(_run(setup, "forward", operands))


def _forward(setup: Setup, *operands: Any) -> Any:
    asked = {name for name, operand in zip(setup.names, operands, strict=True) if operand.perturbed}
    values = [operand.value for operand in operands]
    floats = {
        name
        for name, value in zip(setup.names, values, strict=True)
        if jnp.issubdtype(value.dtype, jnp.floating)
    }
    if not asked & floats:
        return attend(setup, *values), None
    if setup.paged or setup.appends:
        what = "a paged cache of keys and values" if setup.paged else "a cache that is appended to"
        raise UnsupportedError(
            f"attention: {what} has no gradients; train with a dense or ragged layout, or use "
            "jax.lax.stop_gradient on q, k and v"
        )
    of_mask = "mask" in asked & floats and setup.bias == "none"
    for name in sorted((asked & floats) - set(_HAS_GRADIENT) - ({"mask"} if of_mask else set())):
        raise UnsupportedError(f"attention: {_WHY_NOT[name]}")
    added = "mask" if of_mask else "bias" if "bias" in asked else None
    training = training_setup(setup, added)
    found = _run(training, "forward", values)
    results = dict(zip(training.forward_results(), found, strict=True))
    outputs = tuple(results[name] for name in setup.forward_results())
    marker = {added: None}  # static, in the residuals' tree
    return outputs, (values, results["o"], results["stats"], marker)


def training_setup(setup: Setup, added: str | None) -> Setup:
    """The setup whose both passes run when this one is differentiated.

    `added`: what is added to the scores and has a gradient: the bias; or a float mask, which is
    then the bias; or None.
    """
    setup = dataclasses.replace(setup, training=True, bias_grad=added is not None)
    if added != "mask":
        return setup
    names = tuple("bias" if name == "mask" else name for name in setup.names)
    return dataclasses.replace(setup, names=names, bias="post_scale")


def _backward(setup: Setup, residuals: Any, cotangents: Any) -> Any:
    if residuals is None:
        return (None,) * len(setup.names)
    values, o, stats, marker = residuals
    (added,) = marker
    training = training_setup(setup, added)
    given = dict(zip(setup.forward_results(), cotangents, strict=True))
    zero = jax.custom_derivatives.SymbolicZero
    gradients: dict[str, Any] = {}
    outs = training.backward_results()
    if not isinstance(given["o"], zero):
        found = _run(training, "backward", [*values, o, stats, given["o"]])
        gradients = dict(zip(outs, found, strict=True))
    dlse = given.get("stats")
    if dlse is not None and not isinstance(dlse, zero):
        for name, gradient in _of_log_sum(training, values, o, stats, dlse).items():
            gradients[name] = _add(gradients.get(name), gradient)
    if added == "mask":
        gradients["dmask"] = gradients.pop("dbias", None)
    return tuple(gradients.get(f"d{name}") for name in setup.names)


def _add(a: Any, b: Any) -> Any:
    if a is None:
        return b
    wide = at_least_f32(a.dtype)
    return (a.astype(wide) + b.astype(wide)).astype(a.dtype)


def _of_log_sum(setup: Setup, values: Any, o: Any, stats: Any, dlse: Any) -> dict[str, Any]:
    """The gradients that dlse makes."""
    operands = dict(zip(setup.names, values, strict=True))
    # Rows that saw nothing have no probabilities; what an infinite log-sum-exp made of them stays
    # out.
    dlse = jnp.where(jnp.isneginf(stats), 0, dlse)
    if setup.ragged_q:
        offsets = operands["cu_seqlens_q"]
        places = operands.get("cu_seqlens_q_padded", offsets)
        dlse = jnp.where(rows_in_use(offsets, places, dlse.shape[0])[:, None], dlse, 0)
    gradients: dict[str, Any] = {}
    if "sink" in operands:
        rows, heads = stats, operands["sink"]
        dims = setup.dims("stats")
        at = dims.index("h")
        over = tuple(axis for axis in range(len(dims)) if axis != at)
        shape = [1] * len(dims)
        shape[at] = heads.shape[0]
        weights = jnp.exp(heads.reshape(shape) - rows)
        dsink = jnp.sum(weights * dlse, axis=over).astype(heads.dtype)
        wanted = jax.typeof(heads).sharding
        if jax.typeof(dsink).sharding.spec != wanted.spec:  # explicit mesh axes
            dsink = jax.sharding.reshard(dsink, wanted)
        gradients["dsink"] = dsink
    unit = jnp.ones((), stats.dtype)
    if o.dtype == jnp.float16:
        # Its range is small: relative to the largest, a power of two.
        peak = jnp.max(jnp.abs(dlse))
        unit = jnp.where(peak > 0, jnp.exp2(jnp.floor(jnp.log2(peak))), 1).astype(stats.dtype)
    if o.dtype != stats.dtype and o.dtype.itemsize == 2:
        columns = _parts(dlse / unit, o.dtype, min(3, o.shape[-1]))
    else:
        columns = [(dlse / unit).astype(o.dtype)]
    like_o = "".join(letter for letter in setup.dims("o") if letter != "e")
    order = [setup.dims("stats").index(letter) for letter in like_o]
    stacked = jnp.stack([jnp.transpose(column, order) for column in columns], axis=-1)
    room = [(0, 0)] * (o.ndim - 1) + [(0, o.shape[-1] - len(columns))]
    dout = jnp.pad(stacked, room)
    first = jnp.arange(o.shape[-1]) < len(columns)
    out = jnp.broadcast_to(jnp.where(first, -1, 0).astype(o.dtype), o.shape)
    operands["v"] = jnp.zeros_like(operands["v"])
    every = primitive.varying_alike([*operands.values(), out, stats, dout])
    found = _run(setup, "backward", every)
    for name, gradient in zip(setup.backward_results(), found, strict=True):
        if name in ("dv", "dsink"):
            continue  # dv is that of V = 0; dsink is above
        wide = gradient.astype(at_least_f32(gradient.dtype))
        gradients[name] = (wide * unit.astype(wide.dtype)).astype(gradient.dtype)
    return gradients


def _parts(value: Any, dtype: Any, count: int) -> list[Any]:
    """Numbers of a narrower type whose sum is `value`."""
    exponent, mantissa = (5, 10) if dtype == jnp.float16 else (8, 7)
    parts = []
    for _ in range(count):
        # XLA may drop a conversion to a narrower type and back, but not this.
        part = jax.lax.reduce_precision(value, exponent, mantissa)
        parts.append(part.astype(dtype))
        value = value - part
    return parts


attend.defvjp(_forward, _backward, symbolic_zeros=True)
