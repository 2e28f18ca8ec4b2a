"""From a graph of ATen ops to a graph document: what a marked function computes, in Lawson's ops.

ATen's ops promote dtypes and broadcast by themselves: rules convert operands to the dtype that an op
computes in, and shapes are NumPy's in both. An op without a rule is an ``UnsupportedError`` that
names it, the line of the user's code, and what could be written instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lawson._graph import walk as _walk
from lawson._graph.values import Const, Operand, Value, const
from lawson._graph.walk import Output, Trace
from lawson.torch._trace_dtypes import dtype_name
from lawson.torch._trace_fx import Captured, Spec, line_of
from lawson.torch._trace_refusals import ATTENTION, WRITES

# What to write instead of an op that has no rule, by the beginning of its name.
_HINTS = {
    "argmax": "amax and a comparison", "argmin": "amin and a comparison",
    "convolution": "a product; convolutions stay outside of the fusion",
    "cumsum": "a product with a triangular matrix; or outside of the fusion",
    "cumprod": "the cumulative product outside of the fusion",
    "embedding": "the embedding outside of the fusion; or a product with a one-hot matrix",
    "index": "a slice with constant bounds; or the indexing outside of the fusion",
    "gather": "a slice with constant bounds; torch.where(index == torch.arange(n), x, 0).sum(-1); or the gather outside of the fusion",
    "scatter": "torch.where with torch.arange; or the scatter outside of the fusion",
    "flip": "the flip outside of the fusion",
    "sort": "the sort outside of the fusion", "topk": "torch.topk outside of the fusion",
    "rand": "random numbers as an argument", "bernoulli": "the dropout outside of the fusion, or random numbers as an argument",
    "native_dropout": "the dropout outside of the fusion, or its mask as an argument",
    "normal": "random numbers as an argument", "uniform": "random numbers as an argument",
    "copy_": WRITES,
    "_to_copy": "the copy to another device outside of the fusion",
    "atan": "the angle outside of the fusion", "acos": "the angle outside of the fusion",
    "asin": "the angle outside of the fusion", "hypot": "torch.sqrt(x * x + y * y)",
    "exponential": "random numbers as an argument",
    "native_group_norm": "torch.nn.functional.layer_norm of the groups; or the normalisation outside of the fusion",
    "diagonal": "a product with torch.eye, and a sum; or the diagonal outside of the fusion",
    "sinh": "(exp(x) - exp(-x)) / 2",
    "cosh": "(exp(x) + exp(-x)) / 2", "cummax": "the cumulative maximum outside of the fusion",
    "as_strided": "reshape, transpose and slices",
    "scaled_dot_product": "lawson.torch.scaled_dot_product_attention outside of the fusion",
    "_scaled_dot_product": "lawson.torch.scaled_dot_product_attention outside of the fusion",
    "native_batch_norm": "the normalisation outside of the fusion, or its mean as an argument",
    "_native_batch_norm": "the normalisation outside of the fusion, or its mean as an argument",
    "linalg": "the factorisation outside of the fusion",
}  # fmt: skip


def op_name(target: Any) -> str:
    """``aten.sort`` of ``aten.sort.default``; other overloads keep theirs."""
    return str(target).removesuffix(".default")


class Walk(_walk.Walk):
    """One walk over a graph of ATen ops."""

    framework = "PyTorch"
    clip = "torch.clamp"

    def dtype(self, dtype: torch.dtype) -> str:
        name = dtype_name(dtype)
        if name is None:
            short = str(dtype).removeprefix("torch.")
            near = "its real and imaginary parts" if short.startswith("complex") else "int32"
            self.refuse(f"dtype {short} is none of Lawson's", near)
        return name

    def inputs(self, specs: Sequence[Spec], labels: Sequence[str]) -> list[Value]:
        found = []
        for spec, label in zip(specs, labels, strict=True):
            self._op = f"argument '{label}'"
            found.append(self.emit.input(label, self.dtype(spec.dtype), spec.shape))
        return found

    def node(self, node: torch.fx.Node, given: Any) -> Any:
        """What a node computes; ``given``: from nodes to operands (or tuples of them)."""
        from lawson.torch._trace_rules import RULES

        self.emit.source = line_of(node) or self.emit.source
        if not isinstance(node.target, torch._ops.OpOverload):  # operator.getitem
            source, index = node.args
            return given(source)[index]
        self._op = op_name(node.target)
        value = node.meta["val"]
        several = isinstance(value, (tuple, list))
        for result in value if several else (value,):
            # indices are the i64 among several results
            if isinstance(result, torch.Tensor) and not (several and result.dtype is torch.int64):
                self.dtype(result.dtype)
        function = RULES.get(_schema_name(node.target))
        if function is None and _schema_name(node.target).startswith("lawson::attention"):
            self.refuse(*ATTENTION)
        if function is None:
            self.refuse("not one of Lawson's ops", nearest_form(node.target))
        args = torch.fx.map_arg(node.args, given)
        kwargs = torch.fx.map_arg(node.kwargs, given)
        try:
            return function(self, Call(node, value), *args, **kwargs)
        except OverflowError as error:
            self.refuse(str(error), "a smaller constant")


@dataclasses.dataclass(frozen=True)
class Call:
    """The op that a rule translates: its node, and its result as a fake tensor (or several)."""

    node: torch.fx.Node
    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.value.dtype
        return found

    def promoted(self) -> torch.dtype:
        """What PyTorch converts the tensors and numbers among the arguments to."""
        values = [
            a.meta["val"] if isinstance(a, torch.fx.Node) else a
            for a in self.node.args
            if isinstance(a, (torch.fx.Node, bool, int, float))
        ]
        found = values[0]
        for value in values[1:]:
            found = torch.empty((), dtype=torch.result_type(found, value), device="meta")
            # a dim keeps the category of what has dims
            shaped = any(isinstance(v, torch.Tensor) and v.dim() for v in values)
            found = found.expand(1) if shaped else found
        if isinstance(found, torch.Tensor):
            return found.dtype
        return torch.result_type(found, found)

    def uses(self, index: int) -> bool:
        """Whether anything reads the result ``index`` of several."""
        return any(user.args[1] == index for user in self.node.users)


def _schema_name(target: Any) -> str:
    return str(target._schema.name)


def nearest_form(target: Any) -> str:
    """What to write instead of an op without a rule."""
    name = _schema_name(target).removeprefix("aten::")
    for start, hint in sorted(_HINTS.items(), key=lambda item: -len(item[0])):
        if name.startswith(start):
            return hint
    return "this part outside of the fusion, or split in two fusions"


@dataclasses.dataclass(frozen=True)
class Lifted:
    """A trace, and the tensors that its function closes over: its last arguments."""

    trace: Trace
    captured: tuple[torch.Tensor, ...]
    results: tuple[Spec | None, ...]
    stopped: frozenset[int]  # results that no gradient comes from


def trace(
    found: Captured,
    name: str,
    specs: Sequence[Spec],
    labels: Sequence[str],
    known: Sequence[tuple[str, torch.Tensor]] = (),
    *,
    strict: bool = False,
) -> Lifted:
    """The graph document of an ATen graph.

    Args:
      found: the graph; its placeholders have ``specs`` and are called ``labels``.
      known: tensors that the function may close over, and their names.

    Raises:
      UnsupportedError: an op that is none of Lawson's, with its line.
    """
    walk = Walk(name)
    arguments: list[Value] = walk.inputs(specs, labels)
    captured: list[torch.Tensor] = []
    values: dict[torch.fx.Node, Any] = {}
    placeholders = iter(list(arguments))
    device = specs[0].device if specs else None
    for node in found.graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(placeholders)
        elif node.op == "get_attr":
            tensor = getattr(found.graph, str(node.target))
            position = next((i for i, t in enumerate(captured) if t is tensor), None)
            if _is_number(node, tensor):
                walk._op = "constant"
                with _disable_current_modes():  # of what traces around the fusion
                    value = tensor.item()
                number = const(value, walk.dtype(tensor.dtype), tuple(tensor.shape))
                values[node] = number
            elif position is not None:
                values[node] = arguments[len(specs) + position]
            else:
                label = next((n for n, t in known if t is tensor), f"captured{len(captured)}")
                arguments += walk.inputs([Spec.of(tensor)], [label])
                captured.append(tensor)
                values[node] = arguments[-1]
                device = device or tensor.device
        elif node.op == "call_function":
            values[node] = walk.node(node, values.__getitem__)
        elif node.op == "output":
            (given,) = node.args
            results: list[Operand] = [
                values[n] if isinstance(n, torch.fx.Node) else const(0, "f32") for n in given
            ]
    own_gradient = walk.own_gradient or found.own_gradient
    if own_gradient is not None:
        results = _apart(walk, arguments, results, given, found)
    made = walk.traced(arguments, results, strict)
    outputs = _in_own_memory(made.outputs, given)
    places = {n: i for i, a in enumerate(arguments) for n, v in values.items() if v is a}
    outputs = tuple(
        dataclasses.replace(o, wrt=_reached(n, places))
        if o.kind == "constant" and isinstance(n, torch.fx.Node) and i not in found.stopped
        else o
        for i, (o, n) in enumerate(zip(outputs, given, strict=True))
    )
    made = dataclasses.replace(made, own_gradient=own_gradient, outputs=outputs)
    return Lifted(made, tuple(captured), found.results, found.stopped)


def _apart(
    walk: Walk,
    arguments: Sequence[Value],
    results: Sequence[Operand],
    nodes: Sequence[Any],
    found: Captured,
) -> list[Operand]:
    """The results, each with a gradient of its own a value of its own: equal ones that were come to
    in two ways have two derivatives, and what has an argument's values may have another one."""
    given = {a.name for a in arguments}
    seen: dict[str, dict[Any, Value]] = {}  # of each value, the ways to it
    apart = list(results)
    for i, (result, node) in enumerate(zip(results, nodes, strict=True)):
        if isinstance(result, Const) or i in found.stopped or i in found.passed:
            continue
        whole = walk.emit.whole(result)
        if whole.name in given and node.op == "get_attr":  # as it is closed over
            continue
        ways = seen.setdefault(whole.name, {})
        if node not in ways:
            last = next(reversed(ways.values()), whole)  # equal ops are written once
            is_new = bool(ways) or whole.name in given
            ways[node] = (
                walk.emit.emit("convert", [last], last.dtype, last.shape) if is_new else last
            )
        apart[i] = ways[node]
    return apart


def _in_own_memory(outputs: Sequence[Output], nodes: Sequence[Any]) -> tuple[Output, ...]:
    """The outputs, those that share memory here alone as copies: PyTorch's share what is a view of
    an argument, or of one tensor."""
    first: dict[int, torch.fx.Node] = {}
    found = []
    for output, node in zip(outputs, nodes, strict=True):
        if isinstance(node, torch.fx.Node):
            base = _base(node)
            is_given = base.op in ("placeholder", "get_attr")
            if output.kind == "argument" and not is_given:
                output = dataclasses.replace(output, is_copy=True)
            elif output.kind == "graph" and first.setdefault(output.index, base) is not base:
                output = dataclasses.replace(output, is_copy=True)
        found.append(output)
    return tuple(found)


def _reached(node: torch.fx.Node, places: Mapping[torch.fx.Node, int]) -> tuple[int, ...]:
    """The arguments that a node is computed from, of whatever value."""
    left, seen = [node], {node}
    while left:
        more = set(left.pop().all_input_nodes) - seen
        seen |= more
        left += more
    return tuple(sorted({places[n] for n in seen if n in places}))


def _base(node: torch.fx.Node) -> torch.fx.Node:
    """What a node is a view of; itself: of nothing."""
    while node.op == "call_function" and node.args:
        (source, *_) = node.args
        schema = getattr(node.target, "_schema", None)  # None: operator.getitem
        is_view = schema is None or schema.arguments[0].alias_info is not None
        if not (is_view and isinstance(source, torch.fx.Node)):
            return node
        if schema is None and _base(source) is source:  # one of several results
            return node
        node = source
    return node


def _is_number(node: torch.fx.Node, tensor: torch.Tensor) -> bool:
    """A constant that the function makes itself (``torch.tensor(2.0)``), and nobody writes into."""
    lift = torch.ops.aten.lift_fresh_copy.default
    is_own = all(user.target is lift for user in node.users)
    return is_own and tensor.numel() == 1 and tensor.device.type == "cpu"


__all__ = ["Call", "Const", "Lifted", "Trace", "Walk", "trace"]
