"""A program as text: what the operator ``lawson::fusion`` carries, in this process and in others."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch

from lawson._graph.kernels import Settings
from lawson._graph.values import const
from lawson._graph.walk import Output, Trace
from lawson.torch._fusion_program import Program
from lawson.torch._trace_fx import Spec


def written(made: Program) -> str:
    """All of a program but its function, as JSON: what an operator carries."""

    def spec(s: Spec) -> list[Any]:
        return [list(s.shape), list(s.stride), str(s.dtype).removeprefix("torch."), str(s.device)]

    outputs = []
    for output in made.trace.outputs:
        value = None if output.constant is None else output.constant.value.item()
        kind = None if output.constant is None else output.constant.dtype
        outputs.append([output.kind, output.index, value, kind])
    settings = dataclasses.asdict(made.settings)
    return json.dumps(
        {
            "name": made.name,
            "labels": made.labels,
            "specs": [spec(s) for s in made.specs],
            "captured": len(made.captured),
            "results": [spec(s) for s in made.results],
            "document": made.trace.document,
            "operands": made.trace.operands,
            "outputs": outputs,
            "own_gradient": made.trace.own_gradient,
            "full_f32": made.trace.full_f32,
            "settings": settings,
            "is_derived": made.is_derived,
            "stopped": sorted(made.stopped),
        }
    )


def read(text: str) -> Program:
    """A program of ``written``'s text: without its function, its captured tensors as arguments."""
    found = json.loads(text)

    def spec(given: list[Any]) -> Spec:
        shape, stride, dtype, device = given
        return Spec(tuple(shape), tuple(stride), getattr(torch, dtype), torch.device(device))

    outputs = tuple(
        Output(kind, index, None if own is None else const(value, own))
        for kind, index, value, own in found["outputs"]
    )
    settings = found["settings"]
    if settings["engines"] is not None:
        settings["engines"] = tuple(settings["engines"])
    return Program(
        found["name"],
        tuple(found["labels"]),
        tuple(spec(s) for s in found["specs"]),
        (),
        tuple(spec(s) for s in found["results"]),
        Trace(
            found["document"],
            tuple(found["operands"]),
            outputs,
            found["own_gradient"],
            found["full_f32"],
        ),
        Settings(**settings),
        None,
        found["is_derived"],
        stopped=frozenset(found.get("stopped", ())),  # written since 0.1.0
    )
