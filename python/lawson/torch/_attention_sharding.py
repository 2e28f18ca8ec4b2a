"""How DTensor splits attention: over the batch and over the heads, with each shard its own plan.

What a rank runs is the same operator on its shard, so a plan is judged with a shard's shapes.
Gradients of what every rank has (a bias with one batch, sinks over a split batch) are partial sums.
Splitting the sequence is context parallelism, which this version does not run: DTensor gathers it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from lawson._attention_setup import Setup
from lawson.torch import _attention_ops as ops
from lawson.torch import _attention_run as run

_BROADCAST = ("bias", "mask")


@functools.cache
def _register() -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    for which in ("forward", "backward"):
        register_sharding(ops.OPS[which])(functools.partial(_shardings, which))
        # The Setup takes part in what DTensor remembers of a call.
        DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[ops.OPS[which]] = (
            RuntimeSchemaInfo(ops.ARGUMENTS[which].index("setup"), needs_pytree=True)
        )


def is_distributed(x: torch.Tensor) -> bool:
    """Whether it is a DTensor, which then knows how attention is split."""
    module = sys.modules.get("torch.distributed.tensor")  # without it there is none
    if module is None or not isinstance(x, module.DTensor):
        return False
    _register()
    return True


def seed_of_shard(q: Any, drawn: torch.Tensor) -> Any:
    """Numbers that are the same on every rank, as DTensor; made different on each shard of q."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = q.device_mesh
    place = 0
    for size, at, placement in zip(mesh.shape, mesh.get_coordinate(), q.placements, strict=True):
        if placement.is_shard():
            place = place * size + at
    return DTensor.from_local(drawn + place, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _shardings(which: str, *given: Any) -> list[tuple[list[Any], list[Any]]]:
    from torch.distributed.tensor import Replicate

    named = dict(zip(ops.ARGUMENTS[which], given, strict=False))
    setup = run.setup_of(named["setup"])
    operands = setup.operand_names(which)
    found = []
    for place in ("", *_places(setup, named)):
        inputs = [
            _operand(setup, name, place, named[name]) if name in operands else None
            for name in named
        ]
        results = setup.result_names(which)
        outputs = [
            _result(setup, name, place, named) if name in results else Replicate()
            for name in ops.RESULTS[which]
        ]
        found.append((outputs, inputs))
    return found


def _places(setup: Setup, named: dict[str, Any]) -> Sequence[str]:
    """What may be split: "b", "h"."""
    ragged = setup.ragged_q or setup.ragged_kv
    places = []
    if not ragged and not setup.paged:
        places.append("b")
    counted = setup.bias == "alibi" and "slopes" not in setup.names  # slopes count the heads
    q, k = named["q"], named["k"]
    axis = setup.dims("q").index("h")
    split = [n for n, p in zip(q.mesh.shape, q.placements, strict=True) if p.is_shard(axis)]
    heads = (q.shape[axis], k.shape[setup.dims("k").index("g")])
    # Groups stay whole.
    if not counted and all(n % math.prod(split) == 0 for n in heads):
        places.append("h")
    return places


def _operand(setup: Setup, name: str, place: str, x: Any) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    axis = setup.axis(name, place) if place else None
    if axis is None or (name in _BROADCAST and x.shape[axis] == 1):
        return Replicate()
    return Shard(axis)


def _result(setup: Setup, name: str, place: str, named: dict[str, Any]) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    axis = setup.axis(name, place) if place else None
    if name == "dbias" and axis is not None and named["bias"].shape[axis] == 1:
        return Partial()
    if axis is not None:
        return Shard(axis)
    return Partial() if place and name.startswith("d") and name != "dropped" else Replicate()
