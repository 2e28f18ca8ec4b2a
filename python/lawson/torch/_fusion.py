"""``fusion``: a marked function becomes one kernel, in every way that PyTorch calls it, or an error."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import json
import re
import sys
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Never, TypeAlias

import numpy as np
import torch
from torch.utils import _pytree as pytree

from lawson import _settings
from lawson._errors import InvalidArgumentError, UnsupportedError
from lawson._graph.kernels import Settings
from lawson._settings import exact, said
from lawson.torch._fusion_around import attribute, is_owner
from lawson.torch._fusion_dynamo import marked
from lawson.torch._fusion_site import Kind, Site, is_tracing
from lawson.torch._trace_dtypes import f32_products

_KEPT = 256  # kinds of arguments of one fusion

_Kinds: TypeAlias = "collections.OrderedDict[Hashable, Kind]"


class _Kept(dict["Fusion", _Kinds]):
    """What a module or another object keeps for the fusions that it is an argument of; a copy
    begins empty."""

    def __deepcopy__(self, memo: Any) -> _Kept:
        return _Kept()

    def __reduce__(self) -> Any:
        return (_Kept, ())


def _kept_by(owner: Any) -> _Kept:
    found: _Kept | None = owner.__dict__.get("_lawson_kinds")
    if found is None:
        found = owner.__dict__.setdefault("_lawson_kinds", _Kept())
    return found


class Fusion:
    """A marked function. Call it like the function; see ``fusion``."""

    _lawson_marks = True

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        _settings.marked(function)
        if isinstance(function, type) and issubclass(function, torch.nn.Module):
            raise TypeError(
                f"fusion: {function.__name__} is a class; mark its forward method, or an instance"
            )
        self._function = function
        self._settings = settings
        self._said = json.dumps(dataclasses.asdict(settings))
        self._lock = threading.Lock()
        self._kinds: _Kinds = collections.OrderedDict()
        inner = innermost(function)
        functools.update_wrapper(self, inner, updated=())
        self.__wrapped__ = function
        self.__name__ = name_of(function)
        self._method = _method_of(self)

    def __repr__(self) -> str:
        return f"<lawson fusion '{self.__name__}'>"

    def __reduce__(self) -> Any:
        """As a function is pickled: by its name where that is it, else what it was made of."""
        found: Any = sys.modules.get(self.__module__)
        name = getattr(self, "__qualname__", "")
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (Fusion, (self._function, self._settings))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        if torch.compiler.is_dynamo_compiling():
            return functools.partial(self, instance)
        return types.MethodType(self._method, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return marked(
                lambda: self._function(*args, **kwargs), name=self.__name__, settings=self._said
            )
        if is_tracing():  # a fusion inside a fusion
            return self._function(*args, **kwargs)
        if torch._C._get_tracing_state() is not None:
            raise UnsupportedError(
                f"unsupported: fusion '{self.__name__}': torch.jit.trace\n"
                "  nearest supported form: torch.export.export, or torch.compile"
            )
        site, tensors = self.site(args, kwargs)
        return site(tensors)

    def site(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Site, Sequence[torch.Tensor]]:
        """What runs calls with such arguments, and the tensors among them."""
        kinds = self._kinds
        tensors: Sequence[torch.Tensor] = args
        fixed: dict[int, Any] = {}
        shape: Any = len(args)
        known: tuple[Any, ...] = ()
        is_method = len(args) > 0 and isinstance(args[0], torch.nn.Module)
        if kwargs or not all(isinstance(a, torch.Tensor) for a in args[is_method:]):
            leaves, shape = pytree.tree_flatten((tuple(args), dict(kwargs)))
            fixed = {i: x for i, x in enumerate(leaves) if not isinstance(x, torch.Tensor)}
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        elif is_method:
            fixed, tensors = {0: args[0]}, args[1:]
        if fixed:
            owners = {i: x for i, x in fixed.items() if is_owner(x)}
            if owners:  # they live as long as the first of them
                first = next(iter(owners.values()))
                kinds = _kept_by(first).setdefault(self, collections.OrderedDict())
            known = tuple((i, id(x) if i in owners else exact(x)) for i, x in fixed.items())
        device = tensors[0].device.type if tensors else "cpu"
        key = (shape, known, _state(device))
        try:
            found = kinds.get(key)
        except TypeError as error:
            self._labels(args, kwargs)
            self._check_hashable(args, kwargs)
            raise InvalidArgumentError(
                f"fusion '{self.__name__}': arguments that are no tensors must be hashable: {error}"
            ) from error
        if found is None:
            found = self._new_kind(kinds, key, args, kwargs, fixed)
        return found.site(), tensors

    def _new_kind(
        self,
        kinds: _Kinds,
        key: Hashable,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        fixed: Mapping[int, Any],
    ) -> Kind:
        tree, labels = (
            pytree.tree_structure((tuple(args), dict(kwargs))),
            self._labels(args, kwargs),
        )
        kind = Kind(self._function, self.__name__, self._settings, tree, fixed, labels)
        with self._lock:
            kind = kinds.setdefault(key, kind)
            while len(kinds) > _KEPT:
                kinds.popitem(last=False)
        return kind

    def _labels(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """Of the tensors. Raises ``InvalidArgumentError`` where there are arrays of others."""
        found = []
        for path, leaf in pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]:
            label = self._label(path)
            if isinstance(leaf, torch.Tensor):
                found.append(label)
            elif isinstance(leaf, torch.fx.Proxy):
                raise UnsupportedError(
                    f"unsupported: fusion '{self.__name__}': torch.fx.symbolic_trace\n"
                    "  nearest supported form: torch.export.export, or torch.compile"
                )
            elif not isinstance(leaf, np.generic) and attribute(leaf, "__array__") is not None:
                raise InvalidArgumentError(
                    f"fusion '{self.__name__}': argument {label} is {type(leaf).__name__}, which "
                    "is no tensor; torch.as_tensor makes it one"
                )
        return found

    def _check_hashable(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for path, leaf in pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]:
            try:
                hash(exact(leaf))
            except TypeError:
                raise InvalidArgumentError(
                    f"fusion '{self.__name__}': argument {self._label(path)} is "
                    f"{type(leaf).__name__}, which is not hashable; what is no tensor is a setting "
                    "of the function, and hashable. Tensors may be in tuples, lists, dicts, and in "
                    "classes that torch.export.register_dataclass knows"
                ) from None

    def _label(self, path: Sequence[Any]) -> str:
        """``x``, ``params.w``: the parameter of the function, and the way to the leaf."""
        group, first, *rest = path
        if group.idx == 0:
            names = _parameter_names(self._function)
            name = names[first.idx] if first.idx < len(names) else f"x{first.idx}"
        else:
            name = str(first.key)
        return re.sub(r"[^\w.]+", ".", name + pytree.keystr(tuple(rest))).strip(".")[:200]


def _method_of(marked: Fusion) -> Callable[..., Any]:
    """The fusion as a function of Python's: torch.compile asks methods for their code."""

    def method(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return marked(instance, *args, **kwargs)

    functools.update_wrapper(method, marked, updated=())
    method.__name__ = getattr(innermost(marked._function), "__name__", marked.__name__)
    method._lawson_fusion = marked  # type: ignore[attr-defined]
    return method


def _state(device: str) -> Hashable:
    """What of PyTorch's and the environment's a program depends on."""
    device = device if device in ("cpu", "cuda") else "cpu"  # others are refused later
    return (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        torch.get_default_dtype(),
        f32_products(),
        torch.are_deterministic_algorithms_enabled(),
        *said(),
    )


def fusion(
    function: Callable[..., Any] | None = None,
    *,
    policy: str | None = None,
    tuning: str = "off",
    engines: Sequence[str] | str | None = None,
    target: str | None = None,
    deterministic: bool = False,
    workspace_limit: int | None = None,
    deadline_ms: float = 0.0,
    strict: bool = False,
    **unknown: Never,
) -> Any:
    """Marks a function: it becomes one kernel, or an error that says why not.

    ``@fusion`` and ``@fusion(engines=["cpu"])`` both work, on functions and on methods of modules.
    Arguments are pytrees of tensors; what is no tensor is a setting of the function, and hashable.
    The function is traced once for each form of its arguments. Its gradient is Lawson's too: as few
    kernels as the engine takes, under the same policy.

    Args:
      function: of tensors and pytrees of tensors; all of ``docs/torch.md``'s ops. Parameters and
        buffers of modules that it is bound to or closes over are operands, with gradients.
      policy: "require": one engine builds it, or it is an error. "allow": ``engines`` in order, of
        those that run where the tensors are. None: LAWSON_POLICY of the environment, else
        "require".
      tuning: "off", "quick" or "exhaustive": docs/fusion.md.
      engines: names, or one: "cudnn", "cpu", "reference". None: LAWSON_ENGINE of the environment,
        else "cudnn". The CPU is used only when it is named here or there.
      target: a GPU that need not be here ("h200"): ``inspect`` has the plan for it.
      deterministic: the same bits every time.
      workspace_limit: bytes; None: no limit.
      deadline_ms: for building and tuning; 0: none.
      strict: intermediate results are rounded exactly as written; otherwise an engine may keep more
        bits.

    Raises:
      UnsupportedError: an op outside the set, with the line of code; it does not fuse, with every
        reason and the nearest supported form; tensors of the CPU without an engine of it named.
      UnavailableError: no GPU, or no cuDNN.
      InvalidArgumentError: a setting that is none, an argument that is an array of others, or
        operands that do not fit, with the op, its line and their shapes.
      TypeError: no function, or a setting that there is none of.
    """
    _settings.known(fusion, unknown)
    settings = Settings(
        policy=_settings.policy(policy),
        tuning=_settings.tuning(tuning),
        engines=_settings.engines(engines),
        target=_settings.target(target),
        deterministic=_settings.flag("deterministic", deterministic),
        workspace_limit=_settings.workspace_limit(workspace_limit),
        deadline_ms=_settings.deadline_ms(deadline_ms),
        strict=_settings.flag("strict", strict),
    )
    if function is None:
        return lambda f: Fusion(f, settings)
    return Fusion(function, settings)


# ---- names -------------------------------------------------------------------------------------


def innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def name_of(function: Any) -> str:
    """Of a function (of a method with its class), of what a ``functools.partial`` binds, or of the
    class of a callable."""
    function = innermost(function)
    if isinstance(function, (types.FunctionType, types.MethodType)):
        *outer, name = function.__qualname__.split(".")
        if outer and outer[-1] != "<locals>":
            return f"{outer[-1]}.{name}"
    name = getattr(function, "__name__", None) or type(function).__name__
    return re.sub(r"\W+", "_", str(name)).strip("_") or "fusion"


def _parameter_names(function: Any) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if isinstance(function, torch.nn.Module):
        function = function.forward
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in kinds)


def fusions_in(value: Any) -> Iterator[Fusion]:
    """``value`` where it is a fusion, or a method that is one."""
    found = getattr(value, "_lawson_fusion", value)
    if isinstance(found, Fusion):
        yield found
