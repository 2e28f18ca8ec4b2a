"""A fusion under torch.compile: Dynamo traces the marked function into a subgraph of its own.

What the function closes over (parameters, tensors) Dynamo makes operands of the subgraph. When the
program around it is traced further, the subgraph becomes ``lawson::fusion``: Inductor sees one
operator, and cannot take it apart.
"""

from __future__ import annotations

import collections
import json
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch._higher_order_ops.base_hop import BaseHOP
from torch._subclasses.fake_tensor import FakeTensor

from lawson._graph.kernels import Settings
from lawson.torch._fusion_op import apply
from lawson.torch._fusion_program import Program, program
from lawson.torch._trace_fx import Spec
from lawson.torch._trace_refusals import check_dynamic

lift: Any = torch.ops.aten.lift_fresh_copy.default
# Until the backward pass is traced, which may need their functions.
_kept: collections.deque[Program] = collections.deque(maxlen=64)


class _Marked(BaseHOP):
    """``marked(function, *tensors, name=, settings=)``: in Dynamo's graphs alone."""

    def __init__(self) -> None:
        super().__init__("lawson_fusion")

    def __call__(self, subgraph: Any, *operands: Any, **said: str) -> Any:
        if not isinstance(subgraph, torch.fx.GraphModule):
            return _as_it_stands(subgraph)
        placeholders = [n for n in subgraph.graph.nodes if n.op == "placeholder"]
        numbers = [_number(n, t) for n, t in zip(placeholders, operands, strict=True)]
        tensors = [t for t, n in zip(operands, numbers, strict=True) if n is None]
        interpreter = _Interpreter(subgraph)

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
        labels = [n.name for n, x in zip(placeholders, numbers, strict=True) if x is None]
        for label, tensor in zip(labels, tensors, strict=True):
            check_dynamic(said["name"], label, tensor.shape)
        specs = [Spec.of(t) for t in tensors]
        made = program(flat, said["name"], labels, specs, Settings(**settings))
        _kept.append(made)
        # Those that the function makes itself (torch.tensor) are constants of the program around it.
        own = [t if isinstance(t, FakeTensor) else lift(t) for t in made.captured]
        return tuple(apply(made, [*tensors, *own]))


@_disable_dynamo
def _as_it_stands(call: Any) -> Any:
    """The call of a fusion that Dynamo could not trace, where it may break the graph: not compiled.

    ``call`` is the function of ``Fusion.__call__``, which Dynamo took for compiled by now.
    """
    own = dict(zip(call.__code__.co_freevars, (c.cell_contents for c in call.__closure__)))
    return own["self"](*own["args"], **own["kwargs"])


class _Interpreter(torch.fx.Interpreter):
    """Where a tensor of no dim is the number that Dynamo made it of."""

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == "item" and isinstance(args[0], float):
            return args[0]
        return super().call_method(target, args, kwargs)


def _number(node: torch.fx.Node, given: Any) -> Any:
    """A number that Dynamo made an operand, as it is now, with a guard for it; None: a tensor.

    Floats that change it hands over as tensors of no dim, whose ``item()`` the subgraph takes.
    """
    if not isinstance(given, torch.Tensor):
        return float(given) if isinstance(given, (float, torch.SymFloat)) else int(given)
    uses = list(node.users)
    if given.dim() or not uses or any(u.target != "item" for u in uses):
        return None
    return float(given.item())


marked = _Marked()
