"""A fusion under torch.compile: Dynamo traces the marked function into a subgraph of its own.

What the function closes over (parameters, tensors) Dynamo makes operands of the subgraph. When the
program around it is traced further, the subgraph becomes ``lawson::fusion``: Inductor sees one
operator, and cannot take it apart.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch._higher_order_ops.base_hop import BaseHOP

from lawson._graph.kernels import Settings
from lawson.torch._fusion_op import apply
from lawson.torch._fusion_program import program
from lawson.torch._trace_fx import Spec


class _Marked(BaseHOP):
    """``marked(function, *tensors, name=, settings=)``: in Dynamo's graphs alone."""

    def __init__(self) -> None:
        super().__init__("lawson_fusion")

    def __call__(self, subgraph: Any, *operands: Any, **said: str) -> Any:
        tensors = [t for t in operands if isinstance(t, torch.Tensor)]
        numbers = [None if isinstance(t, torch.Tensor) else int(t) for t in operands]
        interpreter = torch.fx.Interpreter(subgraph)

        def flat(*given: torch.Tensor) -> list[Any]:
            left = iter(given)
            values = [next(left) if n is None else n for n in numbers]
            found = interpreter.run(*values)
            return list(found) if isinstance(found, (tuple, list)) else [found]

        settings = json.loads(said["settings"])
        if settings["engines"] is not None:
            settings["engines"] = tuple(settings["engines"])
        if torch.are_deterministic_algorithms_enabled():
            settings["deterministic"] = True
        names = [n.name for n in subgraph.graph.nodes if n.op == "placeholder"]
        labels = [n for n, number in zip(names, numbers, strict=True) if number is None]
        specs = [Spec.of(t) for t in tensors]
        made = program(flat, said["name"], labels, specs, Settings(**settings))
        return tuple(apply(made, [*tensors, *made.captured]))


marked = _Marked()
