"""Shapes and dtypes of all tensors of a graph document of the ops that fusions are made of."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from lawson._graph.values import POINTWISE


@dataclasses.dataclass(frozen=True)
class Type:
    dtype: str
    shape: tuple[int, ...]


def operands_of(op: dict[str, Any]) -> list[str]:
    """Names of the tensors that an op reads."""
    given = op.get("in", [])
    if isinstance(given, str):
        return [given]
    return [x for x in (given.values() if isinstance(given, dict) else given) if x]


def results_of(op: dict[str, Any]) -> list[str]:
    """Names of the tensors that an op makes."""
    out = op["out"]
    if isinstance(out, str):
        return [out]
    return [x for x in (out.values() if isinstance(out, dict) else out) if x]


def types_of(document: dict[str, Any]) -> dict[str, Type]:
    """Of every tensor by name. The document's ops have an explicit dtype."""
    types = {x["name"]: Type(x["dtype"], tuple(x["shape"])) for x in document["inputs"]}
    for op in document["ops"]:
        if op["op"] in _NORMS:
            types.update(_norm(op, types))
            continue
        (name,) = results_of(op)
        shapes = [types[x].shape for x in operands_of(op)]
        types[name] = Type(op["dtype"], _shape(op, shapes))
    return types


# Operands and results in the order of lists.
_NORMS = {
    "layer_norm": (("x", "scale", "bias"), ("y", "mean", "inv_std")),
    "rms_norm": (("x", "scale", "bias"), ("y", "inv_std")),
    "layer_norm_backward": (("dy", "x", "scale", "mean", "inv_std"), ("dx", "dscale", "dbias")),
    "rms_norm_backward": (("dy", "x", "scale", "inv_std"), ("dx", "dscale", "dbias")),
}


def _norm(op: dict[str, Any], types: dict[str, Type]) -> dict[str, Type]:
    """Of a norm's results, by name."""

    def named(given: Any, names: tuple[str, ...]) -> dict[str, str]:
        if isinstance(given, str):
            given = [given]
        return dict(given) if isinstance(given, dict) else dict(zip(names, given, strict=False))

    operands, results = (named(op[k], n) for k, n in zip(("in", "out"), _NORMS[op["op"]]))
    x, scale = types[operands["x"]], types[operands["scale"]]
    kept = tuple(1 if i in op["axes"] else n for i, n in enumerate(x.shape))
    statistics = Type("f64" if x.dtype == "f64" else "f32", kept)
    found = {
        "y": Type(op["dtype"], x.shape), "mean": statistics, "inv_std": statistics, "dx": x,
        "dscale": scale, "dbias": scale,
    }  # fmt: skip
    return {name: found[part] for part, name in results.items() if name}


def _shape(op: dict[str, Any], shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    kind = op["op"]
    if kind in POINTWISE or kind.endswith("_grad"):
        return np.broadcast_shapes(*shapes)
    if kind in ("matmul", "scaled_matmul"):
        a, b = shapes[0], shapes[1]
        return (*np.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])
    if kind in ("reshape", "broadcast", "iota"):
        return tuple(op["shape"])
    if kind == "constant":
        return ()
    if kind == "transpose":
        return tuple(shapes[0][i] for i in op["perm"])
    if kind == "slice":
        strides = op.get("stride", [1] * len(op["start"]))
        return tuple(-(-(b - a) // k) for a, b, k in zip(op["start"], op["limit"], strides))
    if kind == "concat":
        axis = op["axis"]
        joined = list(shapes[0])
        joined[axis] = sum(s[axis] for s in shapes)
        return tuple(joined)
    if kind.startswith("reduce_"):
        kept = op.get("keepdims", False)
        axes = op["axes"]
        return tuple(
            1 if i in axes else n for i, n in enumerate(shapes[0]) if kept or i not in axes
        )
    raise NotImplementedError(f"op '{kind}' of a fusion")


def with_outputs(document: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A document with these outputs alone, without ops and inputs that they do not need."""
    needed, ops = set(names), []
    for op in reversed(document["ops"]):
        if any(out in needed for out in results_of(op)):
            needed.update(operands_of(op))
            ops.append(op)
    inputs = [item for item in document["inputs"] if item["name"] in needed]
    return {**document, "inputs": inputs, "ops": ops[::-1], "outputs": list(names)}


def output_names(document: dict[str, Any]) -> list[str]:
    """Names of a document's outputs, however they are written."""
    return [o if isinstance(o, str) else o["name"] for o in document["outputs"]]
