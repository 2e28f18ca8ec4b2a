"""vmap of attention: a mapped axis becomes part of the batch, or of the heads.

One plan with a larger batch (or more heads) is what runs. Where neither can hold the axis (dropout,
whose mask is by position; offsets of its own for each element) the elements run one after another
with the plan of one, and the results are those of separate calls to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from lawson._attention_setup import Setup
from lawson.jax import _attention_primitive as primitive
from lawson.jax._jax import at_least_f32


def _fold(value: Any, dim: int | None, axis: int, size: int) -> Any:
    """The mapped axis, in front of `axis` of an element, merged with it."""
    if dim is None:
        shape = (*value.shape[:axis], size, *value.shape[axis:])
        value = jnp.broadcast_to(jnp.expand_dims(value, axis), shape)
    else:
        value = jnp.moveaxis(value, dim, axis)
    shape = (*value.shape[:axis], size * value.shape[axis + 1], *value.shape[axis + 2 :])
    return value.reshape(shape)


def _unfold(value: Any, axis: int, size: int) -> Any:
    shape = (*value.shape[:axis], size, value.shape[axis] // size, *value.shape[axis + 1 :])
    return value.reshape(shape)


def _folded(setup: Setup, which: str, place: str, size: int, args: Any, dims: Any) -> Any:
    names = setup.operand_names(which)
    element = {
        name: tuple(n for i, n in enumerate(arg.shape) if i != dim)
        for name, arg, dim in zip(names, args, dims, strict=True)
    }
    sizes = setup.sizes({name: element[name] for name in setup.names})
    pages_mapped = place == "b" and setup.paged
    mapped_pages = pages_mapped and any(
        dim is not None for name, dim in zip(names, dims, strict=True) if name in ("k", "v")
    )
    folded = []
    expanded_bias = False
    for name, arg, dim in zip(names, args, dims, strict=True):
        axis = setup.axis(name, place)
        if setup.paged and place == "b" and name in ("k", "v"):
            if mapped_pages:
                arg = _fold(arg, dim, setup.dims(name).index("p"), size)
            folded.append(arg)
            continue
        if axis is None:
            folded.append(arg)
            continue
        if name in ("bias", "mask") and element[name][axis] == 1:
            apart = name == "bias" and which == "backward" and setup.bias_grad
            if dim is None and not apart:
                folded.append(arg)
                continue
            # One for each element: as large as the dim that it is merged with.
            full = sizes["b" if place == "b" else "h"]
            expanded_bias |= apart
            at = axis if dim is None or axis < dim else axis + 1
            shape = list(arg.shape)
            shape[at] = full
            arg = jnp.broadcast_to(arg, shape)
        value = _fold(arg, dim, axis, size)
        if mapped_pages and name.startswith("page_table"):
            step = jnp.repeat(jnp.arange(size, dtype=value.dtype), sizes["b"]) * sizes["p"]
            value = value + step[:, None]
        folded.append(value)
    results = primitive.primitives[which].bind(*folded, setup=setup)
    outs, out_dims = [], []
    for name, value in zip(setup.result_names(which), results, strict=True):
        axis = setup.axis(name, place)
        assert axis is not None  # no result lacks it where a place was found
        value = _unfold(value, axis, size)
        if name == "dbias" and expanded_bias:
            value = value.sum(axis + 1, keepdims=True, dtype=_sum_dtype(value)).astype(value.dtype)
        outs.append(value)
        out_dims.append(axis)
    return outs, out_dims


def _sum_dtype(value: Any) -> Any:
    return at_least_f32(value.dtype)


def _of_nothing(setup: Setup, which: str, args: Sequence[Any], dims: Any) -> Any:
    """An axis without elements: results without elements."""
    elements = [
        jax.ShapeDtypeStruct(tuple(n for i, n in enumerate(arg.shape) if i != dim), arg.dtype)
        for arg, dim in zip(args, dims, strict=True)
    ]
    bind = functools.partial(primitive.primitives[which].bind, setup=setup)
    outs = [jnp.zeros((0, *out.shape), out.dtype) for out in jax.eval_shape(bind, *elements)]
    return outs, [0] * len(outs)


def _batch(args: Sequence[Any], dims: Sequence[int | None], *, setup: Setup, which: str) -> Any:
    names = setup.operand_names(which)
    mapped = {name for name, dim in zip(names, dims, strict=True) if dim is not None}
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    if size == 0:
        return _of_nothing(setup, which, args, dims)
    place = setup.place_of_mapped(which, mapped)
    if place:
        return _folded(setup, which, place, size, args, dims)

    front = [
        jnp.moveaxis(arg, dim, 0) for arg, dim in zip(args, dims, strict=True) if dim is not None
    ]

    def element(values: Sequence[Any]) -> list[Any]:
        moving = iter(values)
        every = [arg if dim is None else next(moving) for arg, dim in zip(args, dims, strict=True)]
        return list(primitive.primitives[which].bind(*every, setup=setup))

    outs = jax.lax.map(element, front)
    return outs, [0] * len(outs)


def register() -> None:
    """Gives the primitives their batching rules."""
    for which in primitive.PASSES:
        batching.primitive_batchers[primitive.primitives[which]] = functools.partial(
            _batch, which=which
        )
