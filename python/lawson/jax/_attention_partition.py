"""Attention in a sharded program: split over sequences and heads, never along them.

A pass is wrapped in `custom_partitioning`, with a rule for Shardy and one for GSPMD. What decides
is the sharding of q (for the backward pass that of `stats`, which the forward pass made): its batch
axis and its heads. Everything else follows: an operand that does not have these dims is whole on
every device, and a result that sums over them is summed across devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from lawson._attention_setup import Setup
from lawson._errors import Error, UnsupportedError
from lawson.jax import _attention_primitive as primitive
from lawson.jax._jax import at_least_f32

_ALONG = {"q": "sm", "k": "tnp", "v": "tnp"}  # dims that only context parallelism could split
_MIX = 0x9E3779B9  # odd, so distinct shards have distinct seeds


def split(*operands: Any, setup: Setup, which: str) -> list[Any]:
    """The pass, over the devices of the program that is being lowered."""
    return list(_partitioned(setup, which)(*operands))


@functools.lru_cache(maxsize=1024)
def _partitioned(setup: Setup, which: str) -> Callable[..., Any]:
    def one_device(*operands: Any) -> tuple[Any, ...]:
        return tuple(primitive.calls[which].bind(*operands, setup=setup))

    one_device.__name__ = f"lawson_attention_{which}"
    function = custom_partitioning(one_device)
    function.def_partition(
        partition=functools.partial(_partition, setup, which),
        infer_sharding_from_operands=functools.partial(_infer, setup, which),
        sharding_rule=functools.partial(_rule, setup, which),
    )
    return function


# ---- the rule for Shardy -----------------------------------------------------------------------


def _rule(setup: Setup, which: str, mesh: Any, operands: Any, results: Any) -> Any:
    del mesh
    names = setup.operand_names(which)
    shapes = {name: _dims(value) for name, value in zip(names, operands, strict=True)}
    sizes = setup.sizes({name: shapes[name] for name in setup.names})
    group = sizes["h"] // sizes["g"]
    factors: dict[str, int] = {}
    alone = 0

    def side(all_names: Sequence[str], all_shapes: Sequence[Sequence[int]]) -> str:
        nonlocal alone
        terms = []
        for name, shape in zip(all_names, all_shapes, strict=True):
            words = []
            for letter, size in zip(setup.dims(name), shape, strict=True):
                heads = letter in "hg"
                if letter == "b" and size == sizes["b"]:
                    words.append("b")
                elif heads and size == sizes[letter] and not (letter == "g" and size == 1):
                    if letter == "h" and 1 < sizes["g"] < sizes["h"]:
                        factors["r"] = group
                        words.append("(g r)")
                    else:
                        words.append("g")
                else:  # a factor of its own: nothing propagates along it
                    alone += 1
                    words.append(f"{letter}{alone}")
            terms.append(" ".join(words))
        return ", ".join(terms)

    outs = setup.result_names(which)
    left = side(names, [shapes[name] for name in names])
    right = side(outs, [_dims(value) for value in results])
    return f"{left} -> {right}", factors


def _dims(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "type", value).shape)


# ---- what runs on a shard ----------------------------------------------------------------------

Axes = tuple[str, ...]


def _axes(sharding: Any, dims: str, letters: str, name: str) -> Axes:
    """The mesh axes that split the dims `letters` of an operand."""
    if sharding is None:  # not known, or whole
        return ()
    spec = getattr(sharding, "spec", None)
    if spec is None:
        if getattr(sharding, "is_fully_replicated", False):
            return ()
        raise UnsupportedError(
            f"attention: the sharding of {name} is a {type(sharding).__name__}; give the arrays of "
            "a sharded attention a jax.sharding.NamedSharding"
        )
    axes: Axes = ()
    for letter, entry in zip(dims, spec, strict=False):
        if letter in letters and entry is not None:
            axes += tuple(entry) if isinstance(entry, tuple) else (entry,)
    return axes


def _chosen(setup: Setup, which: str, mesh: Any, operands: Sequence[Any]) -> tuple[Axes, Axes]:
    """The mesh axes over sequences and over heads."""
    names = setup.operand_names(which)
    given = {name: value.sharding for name, value in zip(names, operands, strict=True)}
    for name, along in _ALONG.items():
        axes = _axes(given[name], setup.dims(name), along, name)
        if axes and setup.dims(name)[0] in "mn":
            raise UnsupportedError(
                f"attention: the tokens of {name} are split over the mesh axes {axes}; ragged "
                "sequences (and rows with segment_ids) are not split by XLA. Use jax.shard_map "
                "over the batch, where each shard has sequences of its own; a sequence over many "
                "devices needs context parallelism, which Lawson judges and does not run"
            )
        if axes:
            raise UnsupportedError(
                f"attention: {name} is split along its sequence over the mesh axes {axes}; that "
                "needs context parallelism, which Lawson judges (field context_parallel of a spec) "
                "and does not run. Split the batch or the heads, or gather the sequence first with "
                "jax.lax.with_sharding_constraint"
            )
    batch: Axes = ()
    heads: Axes = ()
    for name in (["stats"] if which == "backward" else []) + ["q", "k", "v"]:
        dims = setup.dims(name)
        batch = batch or _axes(given[name], dims, "b", name)
        heads = heads or _axes(given[name], dims, "hg", name)
    if setup.ragged_q or setup.ragged_kv:
        batch = ()  # sequences of different lengths are not split
    shapes = {name: value.shape for name, value in zip(names, operands, strict=True)}
    sizes = setup.sizes({name: shapes[name] for name in setup.names})
    parts = math.prod(mesh.shape[axis] for axis in heads)
    if sizes["h"] % parts != 0 or (sizes["g"] % parts != 0 and sizes["g"] != 1):
        raise UnsupportedError(
            f"attention: {sizes['h']} heads of q and {sizes['g']} of k and v cannot be split over "
            f"the {parts} devices of the mesh axes {heads}; both must be multiples of {parts}, or "
            "k and v must have one head"
        )
    if setup.bias == "alibi" and "slopes" not in setup.names and parts > 1:
        raise UnsupportedError(
            "attention: the default slopes of alibi depend on the number of heads, which are split "
            f"over the mesh axes {heads}; give alibi_slopes"
        )
    parts = math.prod(mesh.shape[axis] for axis in batch)
    if sizes["b"] % parts != 0:
        raise UnsupportedError(
            f"attention: a batch of {sizes['b']} cannot be split evenly over the {parts} devices "
            f"of the mesh axes {batch}"
        )
    return batch, heads


def _sharding(
    setup: Setup, mesh: Any, name: str, shape: Sequence[int], batch: Axes, heads: Axes
) -> NamedSharding:
    spec: list[Axes | None] = []
    for letter, size in zip(setup.dims(name), shape, strict=True):
        axes = batch if letter == "b" else heads if letter in "hg" else ()
        spec.append(axes if axes and size > 1 else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def _shardings(
    setup: Setup, which: str, mesh: Any, operands: Sequence[Any], results: Sequence[Any]
) -> tuple[list[NamedSharding], list[NamedSharding], Axes, Axes]:
    batch, heads = _chosen(setup, which, mesh, operands)
    sides = []
    for names, values in (
        (setup.operand_names(which), operands),
        (setup.result_names(which), results),
    ):
        sides.append(
            [
                _sharding(setup, mesh, name, value.shape, batch, heads)
                for name, value in zip(names, values, strict=True)
            ]
        )
    return sides[0], sides[1], batch, heads


def explicit(
    setup: Setup, which: str, mesh: Any, operands: Sequence[Any], results: Sequence[Any]
) -> list[NamedSharding]:
    """The shardings of results on explicit mesh axes; a gradient has that of its operand."""
    names = setup.operand_names(which)
    given = {name: aval.sharding for name, aval in zip(names, operands, strict=True)}
    own = _shardings(setup, which, mesh, operands, results)[1]
    outs = setup.result_names(which)
    if which == "forward":
        return own
    return [given[name.removeprefix("d")] for name in outs]


def _infer(setup: Setup, which: str, mesh: Any, operands: Any, results: Any) -> Any:
    # GSPMD ends the process when this raises; _partition gives the reason.
    try:
        return tuple(_shardings(setup, which, mesh, operands, results)[1])
    except Error:
        whole = [PartitionSpec(*(None,) * len(value.shape)) for value in results]
        return tuple(NamedSharding(mesh, spec) for spec in whole)


def _partition(setup: Setup, which: str, mesh: Any, operands: Any, results: Any) -> Any:
    in_shardings, out_shardings, batch, heads = _shardings(setup, which, mesh, operands, results)
    names = setup.operand_names(which)

    def on_shard(*values: Any) -> tuple[Any, ...]:
        values = tuple(
            seed_of_shard(value, batch + heads) if name == "seed" else value
            for name, value in zip(names, values, strict=True)
        )
        local = primitive.calls[which].bind(*values, setup=setup)
        # A result that lacks a dim which is split is a part of a sum.
        summed = []
        for value, sharding in zip(local, out_shardings, strict=True):
            # A spec holds a tuple of one axis as that axis's name.
            entries = [e if isinstance(e, tuple) else (e,) for e in sharding.spec if e]
            used = {axis for entry in entries for axis in entry}
            rest = tuple(axis for axis in batch + heads if axis not in used)
            summed.append(_sum(value, rest) if which == "backward" and rest else value)
        return tuple(summed)

    return mesh, on_shard, tuple(out_shardings), tuple(in_shardings)


def _sum(value: Any, axes: Axes) -> Any:
    wide = at_least_f32(value.dtype)
    return jax.lax.psum(value.astype(wide), axes).astype(value.dtype)


def seed_of_shard(seed: Any, axes: Axes) -> Any:
    """The seed, u32[2], of this device's position on the mesh axes: different on each."""
    if not axes:
        return seed
    index = jnp.zeros((), jnp.uint32)
    for axis in axes:
        index = index * jnp.uint32(jax.lax.axis_size(axis)) + jax.lax.axis_index(axis).astype(
            "uint32"
        )
    return seed.at[0].add(index * jnp.uint32(_MIX))
