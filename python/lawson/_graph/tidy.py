"""Derived graphs in the form that kernels take: what is exact, and changes what fuses.

Kernels rearrange their inputs, and what they computed only on its way out; and they reduce only at
the exit. So views go before conversions of inputs and behind conversions of results, and a reduction
that keeps dims which are then dropped does not keep them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from lawson._graph.shapes import operands_of, results_of, types_of, with_outputs

_VIEWS = {"reshape", "transpose"}
_Op = dict[str, Any]


def tidied(document: dict[str, Any]) -> dict[str, Any]:
    """The same computation, in every bit."""
    while True:
        document = with_outputs(document, document["outputs"])
        ops, rewrites = document["ops"], _Rewrites(document)
        found = next((r for op in ops if (r := rewrites.of(op)) is not None), None)
        if found is None:
            return document
        at, instead = found
        i = next(i for i, op in enumerate(ops) if results_of(op) == [at])
        document = {**document, "ops": [*ops[:i], *instead, *ops[i + 1 :]]}


class _Rewrites:
    def __init__(self, document: dict[str, Any]) -> None:
        self.types = types_of(document)
        self.makers = {results_of(op)[0]: op for op in document["ops"]}
        self.inputs = {item["name"] for item in document["inputs"]}
        names = [x for op in document["ops"] for x in operands_of(op)]
        self.uses = Counter([*names, *document["outputs"]])

    def of(self, op: _Op) -> tuple[str, list[_Op]] | None:
        """The result whose op is replaced, and what by; None: nothing to do. The op before it
        stays where others read it, and is left out later where none do."""
        names = operands_of(op)
        maker = self.makers.get(names[0]) if len(names) == 1 else None
        if maker is None:
            return None
        kind, before, (name,) = op["op"], maker["op"], results_of(op)
        alone = self.uses[names[0]] == 1
        keeps = before.startswith("reduce_") and alone and bool(maker.get("keepdims"))
        if keeps and kind == "reshape" and self._drops_kept(op, maker):
            return name, [{**maker, "out": name, "keepdims": False}]
        if kind == "convert" and before in _VIEWS and alone and not self._is_view(names[0]):
            early = f"{name}.early"
            return name, [
                {**op, "in": operands_of(maker), "out": early},
                {**maker, "in": [early], "out": name, "dtype": op["dtype"]},
            ]
        if kind in _VIEWS and before == "convert" and self._is_early(operands_of(maker)[0]):
            (source,) = operands_of(maker)
            early = f"{name}.early"
            return name, [
                {**op, "in": [source], "out": early, "dtype": self.types[source].dtype},
                {**maker, "in": [early], "out": name},
            ]
        return None

    def _is_early(self, name: str) -> bool:
        """A view of an input, or a reduction (which the view may become part of)."""
        made = self.makers.get(name)
        return self._is_view(name) or (made is not None and bool(made.get("keepdims")))

    def _is_view(self, name: str) -> bool:
        while name in self.makers and self.makers[name]["op"] in (*_VIEWS, "slice"):
            (name,) = operands_of(self.makers[name])
        return name in self.inputs

    def _drops_kept(self, op: _Op, maker: _Op) -> bool:
        kept = self.types[operands_of(op)[0]].shape
        return tuple(op["shape"]) == tuple(n for i, n in enumerate(kept) if i not in maker["axes"])
