"""What a marked function reads that is no argument, as far as a program depends on it.

Modules with their modes, submodules and hooks; the numbers, words and functions that code which the
function reaches names, where they are attributes, globals or variables. A picture of that is taken
by a walk, which costs what a trace may cost; that it still holds is seen in well under a
microsecond. Values of tensors are no part of it: they are read from their places at each call.
"""

from __future__ import annotations

import enum
import functools
import operator
import types
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch

from lawson._settings import exact
from lawson.torch._fusion_captured import (
    Slot,
    attributes_of,
    cell_of,
    class_of,
    slots_of,
    unbound,
)

_MISSING = object()
_VALUES = (int, float, complex, str, bytes, types.NoneType, enum.Enum, np.generic, torch.dtype,
           torch.device)  # fmt: skip
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_value(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_value, value))
    return isinstance(value, _VALUES)


def is_owner(value: Any) -> bool:
    """Whether an argument is equal to itself alone, and keeps what is made for it."""
    by: Any = type(value).__hash__
    return isinstance(value, torch.nn.Module) or (
        by is object.__hash__
        and isinstance(attribute(value, "__dict__"), dict)
        and _has_attributes(value)
    )


def has_more(value: Any) -> bool:
    """Whether a function may find something in an argument, or behind it."""
    return not _is_value(value) and (
        isinstance(value, torch.nn.Module)
        or _has_attributes(value)
        or _plain(value) is not None
        or unbound(value)[0] is not value
    )


class _Same:
    """An object as a key: itself, whatever it is equal to."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _plain(value: Any) -> Any:
    """The function of Python's that a method, a property or a marked function is; None: none."""
    for name in ("__func__", "fget", "_lawson_fusion", "__wrapped__"):
        if name == "__wrapped__" and isinstance(value, types.FunctionType):
            break  # what it wraps is in a variable of it
        value = attribute(value, name) or value
    return value if isinstance(value, types.FunctionType) else None


def attribute(value: Any, name: str) -> Any:
    """None where there is none, also of objects that raise something of their own for that."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _names(code: types.CodeType) -> set[str]:
    found = {*code.co_names, *code.co_freevars}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= _names(inner)
    return found


def _bases(cls: type) -> list[type]:
    """Those that may have something of the user's."""
    return [c for c in cls.__mro__ if c not in (torch.nn.Module, object)]


class Around:
    """A picture, made by a walk from a function and those of its arguments that have more in them.

    ``tensors`` are the places of tensors, in a fixed order; ``key`` what a program depends on, for
    these very ``objects``.
    """

    def __init__(self, function: Any, given: Sequence[Any]) -> None:
        self.objects: list[Any] = []  # modules, other objects with attributes, hooks
        self.tensors: list[Slot] = []
        self.holders: list[tuple[str, Any]] = []  # of attributes, with their owners' labels
        self._watched: list[tuple[Any, str, Any]] = []
        self._equal: list[Any] = []
        self._sized: list[Any] = []
        self._seen: set[Any] = set()
        self._named: set[str] = set()
        self._classes: list[type] = []
        inner, bound = unbound(function)
        self._home = str(getattr(_plain(inner), "__module__", None)).split(".")[0]
        for slot in bound:
            self._place(slot, called=not self._has(slot.value, inner))
        for one in given:
            self._place(Slot("", {"": one}, ""), called=not self._has(one, inner))
        if _plain(inner) is not None:
            self._function(_plain(inner))
        else:
            self._place(Slot("", {"": inner}, ""), called=True)
        self._attributes()
        self._copies = [dict(d) for d in self._equal]
        self._sizes = [len(d) for d in self._sized]
        first: dict[int, int] = {}
        same = [first.setdefault(id(s.value), i) for i, s in enumerate(self.tensors)]
        self._ties = [(self.tensors[i], self.tensors[j]) for i, j in enumerate(same) if i != j]
        self.is_empty = not (self._watched or self._equal or self._ties)
        self.key: Hashable = (
            tuple(
                (key, exact(value) if _is_value(value) else _Same(value))
                for _, key, value in self._watched
            ),
            tuple(slot.label for slot in self.tensors),
            tuple(same),
        )

    def holds(self) -> bool:
        """Whether a walk would find the same."""
        for holder, key, value in self._watched:
            if holder.get(key, _MISSING) is not value:
                return False
        return (
            self._equal == self._copies
            and list(map(len, self._sized)) == self._sizes
            and all(a.value is b.value for a, b in self._ties)
        )

    def is_of(self, objects: Sequence[Any]) -> bool:
        """Whether it is a picture of these very objects."""
        return len(objects) == len(self.objects) and all(map(operator.is_, objects, self.objects))

    # ---- the walk ------------------------------------------------------------------------------

    def _has(self, owner: Any, function: Any) -> bool:
        """Whether ``function`` is a method of the object: its ``forward`` is not what runs."""
        wanted = _plain(function)
        found = (_plain(v) for c in _bases(type(owner)) for v in vars(c).values())
        return wanted is not None and any(f is wanted for f in found)

    def _function(self, function: types.FunctionType) -> None:
        """What code names; what it closes over and its globals too where it is of the same package
        as the marked function."""
        code = function.__code__
        if code in self._seen:
            return
        self._seen.add(code)
        self._named |= _names(code)
        names = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ or ()
        for name, value in zip(names[len(names) - len(defaults) :], defaults, strict=True):
            self._place(Slot(name, {"": value}, ""))
        for name in function.__kwdefaults__ or ():
            self._place(Slot(name, function.__kwdefaults__, name))
        if str(function.__module__).split(".")[0] != self._home:
            return
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._place(Slot(name, cell_of(cell), name))
        space = function.__globals__
        for name in sorted(_names(code) & space.keys()):
            if isinstance(space[name], type):
                self._class(space[name])
            else:
                self._place(Slot(name, space, name))

    def _place(self, slot: Slot, called: bool = True) -> None:
        value = slot.value
        if isinstance(value, type):
            self._class(value)
        if isinstance(value, torch.Tensor):
            self._tensor(slot)
        elif _is_value(value) or isinstance(value, _FUNCTIONS):
            self._watch(slot.holder, slot.key, value)
            if _plain(value) is not None:
                self._function(_plain(value))
        elif isinstance(value, torch.nn.Module):
            self._watch(slot.holder, slot.key, value)
            self._module(slot.label, value, called)
        elif unbound(value)[0] is not value or _plain(value) is not None:
            self._watch(slot.holder, slot.key, value)
            inner, bound = unbound(value)
            if _plain(inner) is None:
                bound.append(Slot("", {"": inner}, ""))
            for one in bound:
                label = ".".join(part for part in (slot.label, one.label) if part)
                self._place(Slot(label, one.holder, one.key), not self._has(one.value, inner))
            if _plain(inner) is not None:
                self._function(_plain(inner))
        elif isinstance(value, (tuple, frozenset)):
            self._watch(slot.holder, slot.key, value)
            for i, one in enumerate(value):
                self._place(Slot(f"{slot.label}.{i}", {"": one}, ""), called)
        elif _has_attributes(value):
            self._watch(slot.holder, slot.key, value)
            self._object(slot.label, value, called)

    def _class(self, cls: type) -> None:
        if _is_users(cls) and cls not in self._classes:
            self._classes.append(cls)

    def _watch(self, holder: Any, key: str, value: Any) -> None:
        if not (key == "" and type(holder) is dict):  # what a call hands over, or is bound
            self._watched.append((holder, key, value))

    def _tensor(self, slot: Slot) -> None:
        place = (id(getattr(slot.holder, "cell", slot.holder)), slot.key)
        if place not in self._seen:
            self._seen.add(place)
            self.tensors.append(slot)

    def _module(self, label: str, module: torch.nn.Module, called: bool) -> None:
        for path, inner in module.named_modules():
            name = ".".join(p for p in (label, path) if p)
            self._object(name, inner, called or inner is not module)

    def _object(self, label: str, value: Any, called: bool) -> None:
        if ("object", id(value)) in self._seen:
            return
        self._seen.add(("object", id(value)))
        self.objects.append(value)
        holders: list[Any] = attributes_of(value)
        if isinstance(value, torch.nn.Module):
            holders = [value._parameters, value._buffers, *holders]
            self._watch(vars(value), "training", value.training)
            for holder in holders[:2]:
                self._sized.append(holder)
                for key, tensor in holder.items():
                    if tensor is None:
                        self._watch(holder, key, None)
            self._equal.append(value._modules)
            for hooks in (getattr(value, name) for name in _HOOKS):
                self._equal.append(hooks)
                self.objects.extend(hooks.values())
        self.holders += [(label, holder) for holder in holders]
        for holder in holders:
            for key, tensor in list(holder.items()):
                if isinstance(tensor, torch.Tensor):
                    name = ".".join(part for part in (label, key) if part)
                    self._tensor(Slot(name, holder, key))
        if called:
            self._methods(type(value), {"forward", "__call__"})

    def _methods(self, cls: type, names: set[str]) -> None:
        for base in _bases(cls):
            for name in names & vars(base).keys():
                function = _plain(vars(base)[name])
                if function is not None:
                    self._function(function)

    def _attributes(self) -> None:
        """Of all objects, those that code names; objects that are found there are more of them, and
        methods more code."""
        done: set[tuple[int, str]] = set()
        size = (-1, -1, -1)
        while size != (len(self.objects), len(self._named), len(self._classes)):
            size = (len(self.objects), len(self._named), len(self._classes))
            for cls in list(self._classes):
                for name in sorted(self._named):
                    if (id(cls), name) not in done:
                        done.add((id(cls), name))
                        self._class_attribute(cls, name)
            for value in list(self.objects):
                if not _has_attributes(value) and not isinstance(value, torch.nn.Module):
                    continue
                self._methods(type(value), set(self._named))
                for name in sorted(self._named):
                    if (id(value), name) not in done:
                        done.add((id(value), name))
                        self._attribute(value, name)

    def _attribute(self, owner: Any, name: str) -> None:
        places = attributes_of(owner)
        for own in places:
            if name in own:
                if name != "training":
                    self._place(Slot(name, own, name))
                return
        for base in _bases(type(owner)):
            value = vars(base).get(name, _MISSING)
            if _is_value(value) or isinstance(value, (torch.Tensor, tuple)):
                self._watched.append((places[0], name, _MISSING))
                self._place(Slot(name, class_of(base), name))
            if value is not _MISSING:
                return

    def _class_attribute(self, cls: type, name: str) -> None:
        for base in _bases(cls):
            value = vars(base).get(name, _MISSING)
            if isinstance(value, type):
                self._class(value)
            if _is_value(value) or isinstance(value, (torch.Tensor, tuple)):
                self._place(Slot(name, class_of(base), name))
            if value is not _MISSING:
                return


def _is_users(kind: type) -> bool:
    return str(kind.__module__).split(".")[0] not in ("torch", "lawson", "builtins")


def _has_attributes(value: Any) -> bool:
    """An object of the user's, in whose attributes a function may find something."""
    return (
        not isinstance(value, (type, types.ModuleType, torch.nn.Module, functools.partial))
        and _is_users(type(value))
        and (isinstance(attribute(value, "__dict__"), dict) or slots_of(type(value)) != ())
    )
