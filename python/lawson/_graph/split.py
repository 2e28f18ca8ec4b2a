"""A derived graph (a gradient, a tangent) that is no one kernel, as several that are.

What a user marks is one kernel or an error. Its gradient is nothing that anybody wrote, and most
gradients are several kernels by nature: those of a product's two operands are two products. Such a
graph is cut where a product would read what another product computes and behind reductions, into
parts that are fusions of their own: each judged, each under the policy of the marked one. What is
nothing but a change of dtype or shape between two of them, or behind them, is the framework's (``Glue``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from lawson._errors import UnsupportedError
from lawson._graph.shapes import operands_of, results_of, types_of, with_outputs

_VIEWS = {"transpose", "reshape", "broadcast", "slice"}
_GLUE = {"convert", "reshape", "transpose"}
_HEAVY = {
    "matmul", "scaled_matmul", "layer_norm", "rms_norm", "layer_norm_backward",
    "rms_norm_backward", "attention", "attention_backward",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Glue:
    """A part that computes nothing: a document of conversions and views."""

    document: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _State:
    """Of a value, within the kernel that computes it: what is behind it."""

    heavy: bool = False
    reduced: bool = False


def parts(document: dict[str, Any], builds: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """``builds`` of each part, in an order in which later ones may read the results of earlier ones.

    ``builds`` raises ``UnsupportedError`` for what is no one kernel. All is one part where that
    builds, and parts that compute the same product are one where that builds.
    """
    whole = document
    document = _wide_reductions(document)
    cuts = _cuts(document)
    order = [r for op in document["ops"] for r in results_of(op)]
    roots = sorted({*cuts, *document["outputs"]}, key=order.index)
    try:
        return [builds(whole)]
    except UnsupportedError:
        if len(roots) == 1:
            raise
    slices = [_slice(document, together, cuts) for together in _together(document, roots)]
    built: list[Any] = []
    for group in _groups(slices):
        if len(group) == 1 and all(op["op"] in _GLUE for op in group[0]["ops"]):
            built.append(Glue(group[0]))
            continue
        names = [n for s in group for n in s["outputs"]]
        if len(group) > 1:
            try:
                built.append(builds(_slice(document, names, cuts)))
                continue
            except UnsupportedError:
                pass
        built.extend(builds(s) for s in group)
    return built


def _together(document: dict[str, Any], roots: list[str]) -> list[list[str]]:
    """Roots that are results of one op are of one part."""
    producer = {r: results_of(op)[0] for op in document["ops"] for r in results_of(op)}
    found: dict[str, list[str]] = {}
    for root in roots:
        found.setdefault(producer[root], []).append(root)
    return list(found.values())


def _wide_reductions(document: dict[str, Any]) -> dict[str, Any]:
    """Reductions give f32, and are converted to a narrower dtype afterwards: kernels do not."""
    ops = []
    for op in document["ops"]:
        if op["op"].startswith("reduce_") and op["dtype"] in ("f16", "bf16"):
            (name,) = results_of(op)
            wide = f"{name}.wide"
            ops.append({**op, "out": wide, "dtype": "f32"})
            op = {"op": "convert", "in": [wide], "out": name, "dtype": op["dtype"]}
        ops.append(op)
    return {**document, "ops": ops}


def _cuts(document: dict[str, Any]) -> set[str]:
    """Values that have to be in memory between two kernels."""
    producer = {r: op for op in document["ops"] for r in results_of(op)}
    states: dict[str, _State] = {item["name"]: _State() for item in document["inputs"]}
    cuts: set[str] = set()

    def base(name: str) -> str:
        while name in producer and producer[name]["op"] in _VIEWS:
            (name,) = operands_of(producer[name])
        return name

    def read(name: str) -> _State:
        return _State() if base(name) in cuts else states[name]

    for op in document["ops"]:
        kind, operands = op["op"], operands_of(op)
        is_heavy = kind in _HEAVY
        for name in operands:
            state = read(name)
            behind_reduction = state.reduced and kind not in _VIEWS
            if behind_reduction or (is_heavy and state.heavy):
                cuts.add(base(name))
        seen = [read(name) for name in operands]
        state = _State(
            heavy=is_heavy or any(s.heavy for s in seen),
            reduced=kind.startswith("reduce_") or any(s.reduced for s in seen),
        )
        states.update(dict.fromkeys(results_of(op), state))
        if len(results_of(op)) > 1:  # kernels of norms write all of their results
            cuts.update(results_of(op))
    return cuts


def _slice(document: dict[str, Any], outputs: list[str], cuts: set[str]) -> dict[str, Any]:
    """The part that computes ``outputs``; other cut values are its inputs."""
    given = [c for c in sorted(cuts) if c not in outputs]
    ops = [op for op in document["ops"] if not any(r in given for r in results_of(op))]
    types = types_of(document)
    between = [{"name": c, "dtype": types[c].dtype, "shape": list(types[c].shape)} for c in given]
    inputs = [*document["inputs"], *between]
    return with_outputs({**document, "inputs": inputs, "ops": ops}, outputs)


def _groups(slices: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Slices that have a heavy op in common and do not read each other's results."""
    left = list(slices)
    while left:
        first, *left = left
        group = [first]
        rest: list[dict[str, Any]] = []
        for other in left:
            shared = any(_heavy(s) & _heavy(other) for s in group)
            apart = all(not _reads(s, other) and not _reads(other, s) for s in group)
            # what it reads has to be there already
            waits = any(_reads(other, s) for s in rest)
            (group if shared and apart and not waits else rest).append(other)
        left = rest
        yield group


def _heavy(document: dict[str, Any]) -> set[str]:
    return {r for op in document["ops"] if op["op"] in _HEAVY for r in results_of(op)}


def _reads(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return any(item["name"] in b["outputs"] for item in a["inputs"])
