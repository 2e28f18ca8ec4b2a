"""The backward of a traced function as the library derives it."""

from __future__ import annotations

import json
from typing import Any

from lawson import _core
from lawson._graph.shapes import operands_of, output_names, results_of, with_outputs
from lawson._graph.tidy import tidied
from lawson._graph.walk import Output, Trace


def gradient_trace(
    forward: Trace, arguments: int, wrt: tuple[int, ...], of: tuple[int, ...], name: str
) -> Trace | None:
    """From ``forward``'s ``arguments``, and cotangents of its results ``of``, to cotangents of the
    arguments ``wrt``; None where the framework's derivative is another one.

    It is another one where a function stops gradients or has a rule of its own, and where the
    forward graph does not hold everything (an argument that is returned as it is).
    """
    used = [forward.outputs[i] for i in of]
    if forward.document is None or forward.own_gradient is not None:
        return None
    if any(o.kind != "graph" for o in used) or len({o.index for o in used}) != len(used):
        return None
    read = {a: i for i, a in enumerate(forward.operands)}
    if not used or any(a not in read for a in wrt):
        return None
    document = dict(forward.document)
    names = [document["outputs"][o.index] for o in used]
    document = with_outputs(document, names)
    inputs = {item["name"]: item for item in document["inputs"]}
    wanted = [forward.document["inputs"][read[a]]["name"] for a in wrt]
    if any(w not in inputs or f"d_{w}" in inputs for w in wanted):
        return None
    if any(f"d_{n}" in inputs for n in names):
        return None
    graph = _core.gradient(_core.Graph.from_json(json.dumps(document), name), wanted)
    backward = json.loads(graph.json())
    backward.update(name=name, outputs=output_names(backward))
    position = {forward.document["inputs"][i]["name"]: a for a, i in read.items()}
    first = arguments
    position.update({f"d_{n}": first + i for i, n in enumerate(names)})
    return _forwarding(tidied(backward), position, forward.full_f32)


def _forwarding(document: dict[str, Any], position: dict[str, int], full_f32: str | None) -> Trace:
    """The trace of a document; a result that is an argument as it was given is not computed."""
    types = {item["name"]: item["dtype"] for item in document["inputs"]}
    makers = {r: op for op in document["ops"] for r in results_of(op)}
    outputs: list[Output] = []
    computed: list[str] = []
    for name in document["outputs"]:
        source = operands_of(makers[name])[0] if operands_of(makers[name]) else ""
        if makers[name]["op"] == "convert" and types.get(source) == makers[name]["dtype"]:
            outputs.append(Output("argument", position[source]))
        else:
            outputs.append(Output("graph", len(computed)))
            computed.append(name)
    if not computed:
        return Trace(None, (), tuple(outputs), None, full_f32)
    document = with_outputs(document, computed)
    operands = tuple(position[item["name"]] for item in document["inputs"])
    return Trace(document, operands, tuple(outputs), None, full_f32)
