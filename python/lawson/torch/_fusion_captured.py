"""What a marked function closes over: tensors and modules, by the places where it finds them.

A place is read at each call: what an optimizer writes, what is put in another's place, what FSDP or
`torch.func.functional_call` puts there for a while, is what runs.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch


class _Cell:
    """A variable of an enclosing function, as a mapping of one entry."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, key: str) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, key: str, value: Any) -> None:
        self._cell.cell_contents = value


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

    def is_as(self, other: Slot) -> bool:
        """The same place."""
        same = self.holder is other.holder
        cells = isinstance(self.holder, _Cell) and isinstance(other.holder, _Cell)
        if cells:
            same = self.holder._cell is other.holder._cell
        return same and self.key == other.key


def slots_in(function: Any) -> list[Slot]:
    """Where a function finds modules and tensors: what it is bound to and its attributes, what it
    closes over, globals that it names."""
    return [s for s in _places(function) if isinstance(s.value, (torch.nn.Module, torch.Tensor))]


def _places(function: Any) -> Iterator[Slot]:
    while True:
        if isinstance(function, functools.partial):
            for i, value in enumerate(function.args):
                yield (
                    Slot("", {"": value}, "")
                    if _is_module(value)
                    else Slot(f"bound{i}", {"": value}, "")
                )
            yield from (Slot(name, function.keywords, name) for name in function.keywords)
            function = function.func
        elif isinstance(function, types.MethodType):
            owner = function.__self__
            yield Slot("", {"": owner}, "")
            if not _is_module(owner):
                attributes = getattr(owner, "__dict__", {})
                yield from (Slot(name, attributes, name) for name in list(attributes))
            function = function.__func__
        else:
            break
    yield Slot("", {"": function}, "")
    code = getattr(function, "__code__", None)
    if code is not None:
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            yield Slot(name, _Cell(cell), name)
        yield from (Slot(n, function.__globals__, n) for n in code.co_names)


def _is_module(value: Any) -> bool:
    return isinstance(value, torch.nn.Module)


def tensors_in(slots: Sequence[Slot]) -> list[Slot]:
    """The places of tensors: those among ``slots``, and the parameters, buffers and attributes of
    the modules among them."""
    found: dict[tuple[int, str], Slot] = {}
    for slot in slots:
        value = slot.value
        if isinstance(value, torch.Tensor):
            found.setdefault((id(slot.holder), slot.key), slot)
        elif _is_module(value):
            for path, inner in value.named_modules():
                for holder in (inner._parameters, inner._buffers, inner.__dict__):
                    for key, tensor in holder.items():
                        if isinstance(tensor, torch.Tensor):
                            label = ".".join(part for part in (slot.label, path, key) if part)
                            found.setdefault((id(holder), key), Slot(label, holder, key))
    return list(found.values())
