"""What frontends' walks have in common: the document that is written, and how ops are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

from lawson._errors import UnsupportedError
from lawson._graph.refusals import unsupported
from lawson._graph.shapes import results_of, types_of
from lawson._graph.values import Const, Emitter, Operand, Value

MAX_RANK = 8  # of a graph's tensors: docs/spec.md


@dataclasses.dataclass(frozen=True)
class Output:
    """Where a result comes from: the graph's output ``index``, the argument ``index``, or a
    constant. ``is_copy``: in memory of its own, which no other result and no argument has.
    ``wrt``: the arguments whose gradients by a constant are zeros, and not none."""

    kind: str  # "graph", "argument" or "constant"
    index: int = 0
    constant: Const | None = None
    is_copy: bool = False
    wrt: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Trace:
    """A graph document, and how it is tied to the function.

    ``document`` is None where nothing is computed. ``operands[i]``: which flat argument is the
    graph's input i. ``own_gradient``: what makes the framework's derivative of the function differ
    from that of the graph (a stopped gradient, a custom rule); None where they agree. ``full_f32``:
    the line that asks for f32 products without TF32; None where nothing does.
    """

    document: dict[str, Any] | None
    operands: tuple[int, ...]
    outputs: tuple[Output, ...]
    own_gradient: str | None
    full_f32: str | None


class Walk:
    """One walk over a framework's program; rules write through ``emit``."""

    framework = ""  # as messages name it
    clip = ""  # its function that brings values into a range

    def __init__(self, fusion: str) -> None:
        self.fusion = fusion
        self.emit = Emitter()
        self.own_gradient: str | None = None
        self.full_f32: str | None = None
        self._op = ""  # the framework's name of what is being translated

    def refuse(self, what: str, nearest: str) -> NoReturn:
        source = self.emit.source
        raise UnsupportedError(unsupported(self.fusion, self._op, source, what, nearest))

    def rounds_gradient(self, what: str) -> None:
        """The framework's derivative of this is not that of the graph's op."""
        self.own_gradient = self.own_gradient or what

    def needs_full_f32(self) -> None:
        self.full_f32 = self.full_f32 or f"{self._op} at {self.emit.source}"

    def traced(
        self, arguments: Sequence[Operand], results: Sequence[Operand], strict: bool
    ) -> Trace:
        """The document with these results, and how it is tied to these arguments."""
        names = [a.name for a in arguments if isinstance(a, Value)]
        outputs: list[Output] = []
        written: list[str] = []
        for result in results:
            if isinstance(result, Const):
                outputs.append(Output("constant", constant=result))
                continue
            whole = self.emit.whole(result)
            if whole.name in names:
                outputs.append(Output("argument", names.index(whole.name)))
                continue
            if whole.name not in written:
                written.append(whole.name)
            outputs.append(Output("graph", written.index(whole.name)))
        if not written:
            return Trace(None, (), tuple(outputs), self.own_gradient, self.full_f32)
        document = self.emit.document(self.fusion, written, strict)
        read = {x for op in document["ops"] for x in op["in"]}
        operands = tuple(i for i, label in enumerate(names) if label in read)
        document["inputs"] = [document["inputs"][i] for i in operands]
        self._check_ranks(document)
        return Trace(document, operands, tuple(outputs), self.own_gradient, self.full_f32)

    def _check_ranks(self, document: dict[str, Any]) -> None:
        sources = {name: op.get("source", "") for op in document["ops"] for name in results_of(op)}
        for name, found in types_of(document).items():
            if len(found.shape) > MAX_RANK:
                self._op, self.emit.source = f"'{name}'", sources.get(name, "")
                self.refuse(
                    f"shape {found.shape} has {len(found.shape)} dims, and at most {MAX_RANK} are "
                    "possible",
                    "fewer dims, joined by a reshape outside of the fusion",
                )
