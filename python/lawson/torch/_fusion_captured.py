"""Where a marked function finds what it closes over, by places.

A place is read at each call: what an optimizer writes, what is put in another's place, what FSDP or
`torch.func.functional_call` puts there for a while, is what runs.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, MutableMapping
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


class _Class:
    """The attributes of a class, as a mapping that is written into."""

    def __init__(self, owner: type) -> None:
        self.cell = owner

    def __getitem__(self, key: str) -> Any:
        return vars(self.cell)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self.cell, key, value)

    def get(self, key: str, other: Any = None) -> Any:
        return vars(self.cell).get(key, other)


class_of = _Class


class _Slots(MutableMapping[str, Any]):
    """The attributes of an object that has slots for them, as a mapping."""

    def __init__(self, owner: Any) -> None:
        self.cell = owner
        self._names = slots_of(type(owner))

    def __getitem__(self, key: str) -> Any:
        found = getattr(self.cell, key, self) if key in self._names else self
        if found is self:
            raise KeyError(key)
        return found

    def __setitem__(self, key: str, value: Any) -> None:
        object.__setattr__(self.cell, key, value)

    def __delitem__(self, key: str) -> None:
        object.__delattr__(self.cell, key)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self.cell, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def slots_of(kind: type) -> tuple[str, ...]:
    found: list[str] = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        found += [names] if isinstance(names, str) else list(names)
    return tuple(name for name in found if not name.startswith("__"))


def attributes_of(owner: Any) -> list[MutableMapping[str, Any]]:
    """Where an object has its attributes: its dict, its slots, or both."""
    found: list[MutableMapping[str, Any]] = [vars(owner)] if hasattr(owner, "__dict__") else []
    return [*found, _Slots(owner)] if not found or slots_of(type(owner)) else found


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
