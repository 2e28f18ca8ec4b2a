"""Where a marked function finds what it closes over, by places.

A place is read at each call: what an optimizer writes, what is put in another's place, what FSDP or
`torch.func.functional_call` puts there for a while, is what runs.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any


class _Cell:
    """A variable of an enclosing function, as a mapping of one entry."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def __getitem__(self, key: str) -> Any:
        return self.cell.cell_contents

    def __setitem__(self, key: str, value: Any) -> None:
        self.cell.cell_contents = value

    def get(self, key: str, other: Any = None) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:
            return other


cell_of = _Cell


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A place: ``holder[key]``; a module's parameters, an object's attributes, globals, a variable."""

    label: str
    holder: Any
    key: str

    @property
    def value(self) -> Any:
        try:
            return self.holder[self.key]
        except (KeyError, ValueError):  # deleted, or not yet there
            return None


def unbound(function: Any) -> tuple[Any, list[Slot]]:
    """A function without what is bound to it, and the places of that."""
    found: list[Slot] = []
    while True:
        if hasattr(type(function), "_lawson_marks"):  # a fusion
            function = function.__wrapped__
        elif isinstance(function, functools.partial):
            found += [Slot(f"bound{i}", {"": v}, "") for i, v in enumerate(function.args)]
            found += [Slot(name, function.keywords, name) for name in function.keywords]
            function = function.func
        elif isinstance(function, types.MethodType):
            found.append(Slot("", {"": function.__self__}, ""))
            function = function.__func__
        else:
            return function, found
