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
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils import _pytree as pytree

from lawson import _settings, _torch
from lawson._errors import InvalidArgumentError
from lawson._graph.kernels import Settings
from lawson.torch._fusion_captured import Slot, slots_in, tensors_in
from lawson.torch._fusion_dynamo import marked
from lawson.torch._fusion_op import apply, is_plain, recorded
from lawson.torch._fusion_program import Program, program
from lawson.torch._fusion_run import code_of, said
from lawson.torch._trace_fx import Spec

_KEPT = 256  # of one fusion: kinds of arguments, and programs of each
_tracing = threading.local()


class _Otherwise(Exception):
    """Arguments of this form are not run by the site's one call."""


# ---- one fusion --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """The program for arguments of one form."""

    program: Program
    out_tree: Any
    slots: tuple[Slot | None, ...]  # of the captured tensors; None: the tensor itself
    swapped: tuple[Slot, ...] = ()  # whose tensors are arguments, behind those of the function

    def captured(self) -> list[torch.Tensor]:
        return [
            *(s.value for s in self.swapped),
            *(
                t if s is None else s.value
                for s, t in zip(self.slots, self.program.captured, strict=True)
            ),
        ]

    @property
    def is_direct(self) -> bool:
        """The kernel's results, in order, are the function's."""
        core = self.program.core
        return (
            core is self.program
            and len(core.specs) > 0
            and core.trace.operands == tuple(range(len(core.specs)))
            and [o.index for o in core.trace.outputs] == list(range(len(core.results)))
        )


class _Site:
    """Calls with one structure of arguments and the same settings, in one state of PyTorch's."""

    def __init__(self, fusion: Fusion, tree: Any, fixed: Mapping[int, Any], count: int) -> None:
        self.fusion = fusion
        self.tree = tree
        self.fixed = dict(fixed)
        self.count = count
        self.roots = [
            *slots_in(fusion._function),
            *(Slot("", {"": v}, "") for v in fixed.values() if isinstance(v, torch.nn.Module)),
        ]
        self.modules = self._modules()
        self.labels: list[str] = []
        self.first: Traced | None = None
        self.direct: _torch.Call | None = None
        self.unflatten: Callable[[Sequence[torch.Tensor]], Any] | None = None
        self._lock = threading.RLock()
        self._traced: collections.OrderedDict[Hashable, Traced] = collections.OrderedDict()
        self._cores: dict[Hashable, Program] = {}  # of calls that autograd records

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        for slot, module, mode in self.modules:
            if slot.value is not module or module.training is not mode:
                self._forget()
                break
        first = self.first or self.traced(tensors)
        form: Hashable = None
        if self.direct is not None:
            given = (*tensors, *first.captured()) if first.slots else tensors
            if is_plain(given):
                assert self.unflatten is not None
                if not (torch.is_grad_enabled() and any(t.requires_grad for t in given)):
                    try:
                        return self.unflatten(self.direct(*given))
                    except _Otherwise:
                        pass
                    except InvalidArgumentError:
                        self.traced(tensors)  # what no graph has, is said with its line
                        raise
                else:
                    form = tuple((t.shape, t.stride(), t.dtype, t.device) for t in given)
                    core = self._cores.get(form)
                    if core is not None:
                        return self.unflatten(recorded(core, *given))
        traced = self.traced(tensors)
        if form is not None and self._is_as(first, traced):
            if len(self._cores) >= _KEPT:
                self._cores.clear()
            self._cores[form] = traced.program
        results = apply(traced.program, [*tensors, *traced.captured()])
        return pytree.tree_unflatten(results, traced.out_tree)

    def _modules(self) -> list[tuple[Slot, torch.nn.Module, bool]]:
        """Of the places: what may be replaced there, or put into another mode."""
        found = [(slot, slot.value) for slot in self.roots]
        return [(s, m, m.training) for s, m in found if isinstance(m, torch.nn.Module)]

    def _forget(self) -> None:
        """What was traced with another module, or in another mode of it."""
        with self._lock:
            self.modules = self._modules()
            self.first = self.direct = self.unflatten = None
            self._traced.clear()
            self._cores.clear()

    def traced(self, tensors: Sequence[torch.Tensor]) -> Traced:
        """The program for tensors of these shapes, strides, dtypes and device."""
        specs = tuple(Spec.of(t) for t in tensors)
        slots = tensors_in(self.roots)
        own = [s.value for s in slots]
        swapped = not is_plain(own)
        key = (specs, swapped, tuple(map(Spec.of, own)) if slots else ())
        with self._lock:
            found = self._traced.get(key)
            if found is not None:
                self._traced.move_to_end(key)
                return found
            found = self._trace(specs, slots if swapped else [], own if not swapped else [], slots)
            self._traced[key] = found
            while len(self._traced) > _KEPT:
                self._traced.popitem(last=False)
            if self.first is None and not swapped:
                self.first = found
                if found.is_direct:
                    self.unflatten = _unflatten(found.out_tree)
                    self.direct = _torch.Call(self._describe)
            return found

    def _describe(self, tensors: Sequence[Any]) -> _torch.Prepared:
        traced, first = self.traced(tensors[: self.count]), self.first
        if first is None or not self._is_as(first, traced):
            raise _Otherwise
        single = code_of(traced.program).single
        if single is None:
            raise _Otherwise
        return single.describe(tensors)

    def _is_as(self, a: Traced, b: Traced) -> bool:
        """Whether both are direct, with results and captured tensors alike."""
        return (
            a.is_direct
            and b.is_direct
            and a.out_tree == b.out_tree
            and len(a.slots) == len(b.slots)
            and not (a.swapped or b.swapped)
            and all(
                s is t if p is None or q is None else p.is_as(q)
                for p, q, s, t in zip(
                    a.slots, b.slots, a.program.captured, b.program.captured, strict=True
                )
            )
        )

    def _trace(
        self,
        specs: tuple[Spec, ...],
        swapped: Sequence[Slot],
        own: Sequence[torch.Tensor],
        slots: Sequence[Slot],
    ) -> Traced:
        """``swapped``: parameters that are no plain tensors (functorch's, fake ones of an export)
        are arguments of the program, put in their places while it is traced."""
        out_tree: Any = None
        count = self.count

        def flat(*given: torch.Tensor) -> list[Any]:
            nonlocal out_tree
            leaves = iter(given[:count])
            total = count + len(self.fixed)
            values = [self.fixed[i] if i in self.fixed else next(leaves) for i in range(total)]
            args, kwargs = pytree.tree_unflatten(values, self.tree)
            before = [slot.value for slot in swapped]
            outer = getattr(_tracing, "on", False)
            _tracing.on = True
            try:
                for slot, tensor in zip(swapped, given[count:], strict=True):
                    slot.holder[slot.key] = tensor
                results, tree = pytree.tree_flatten(self.fusion._function(*args, **kwargs))
            finally:
                _tracing.on = outer
                for slot, tensor in zip(swapped, before, strict=True):
                    slot.holder[slot.key] = tensor
            out_tree = out_tree or tree
            return results

        labels = [*self.labels, *(s.label for s in swapped)]
        more = tuple(Spec.of(s.value) for s in swapped)
        known = [(s.label, t) for s, t in zip(slots, own, strict=False)]
        settings = self.fusion._settings
        if torch.are_deterministic_algorithms_enabled():
            settings = dataclasses.replace(settings, deterministic=True)
        made = program(flat, self.fusion.__name__, labels, (*specs, *more), settings, known=known)
        found = [next((s for s in slots if own and s.value is t), None) for t in made.captured]
        return Traced(made, out_tree, tuple(found), tuple(swapped))


def _unflatten(tree: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
    if tree.is_leaf():
        return lambda results: results[0]
    if tree.type is tuple and all(child.is_leaf() for child in tree.children()):
        return tuple
    return lambda results: pytree.tree_unflatten(list(results), tree)


_Sites: TypeAlias = "collections.OrderedDict[Hashable, _Site]"


class _Kept(dict["Fusion", _Sites]):
    """What a module keeps for the fusions that it is an argument of; a copy begins empty."""

    def __deepcopy__(self, memo: Any) -> _Kept:
        return _Kept()

    def __reduce__(self) -> Any:
        return (_Kept, ())


def _kept_by(module: torch.nn.Module) -> _Kept:
    found: _Kept | None = module.__dict__.get("_lawson_sites")
    if found is None:
        found = module.__dict__.setdefault("_lawson_sites", _Kept())
    return found


class Fusion:
    """A marked function. Call it like the function; see ``fusion``."""

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        if not callable(function):
            raise TypeError(f"fusion: {function!r} is not callable")
        self._function = function
        self._settings = settings
        self._said = json.dumps(dataclasses.asdict(settings))
        self._lock = threading.Lock()
        self._sites: _Sites = collections.OrderedDict()
        inner = innermost(function)
        functools.update_wrapper(self, inner, updated=())
        self.__wrapped__ = function
        self.__name__ = name_of(function)

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
        return types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            function = self._function
            return marked(
                lambda: function(*args, **kwargs), name=self.__name__, settings=self._said
            )
        if getattr(_tracing, "on", False):  # a fusion inside a fusion
            return self._function(*args, **kwargs)
        site, tensors = self.site(args, kwargs)
        return site(tensors)

    def site(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[_Site, Sequence[torch.Tensor]]:
        """What runs calls with such arguments, and the tensors among them."""
        sites = self._sites
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
            modules = [x for x in fixed.values() if isinstance(x, torch.nn.Module)]
            if modules:  # they live as long as the first of them
                sites = _kept_by(modules[0]).setdefault(self, collections.OrderedDict())
            known = tuple(
                (i, type(x), (id(x), x.training) if isinstance(x, torch.nn.Module) else x)
                for i, x in fixed.items()
            )
        device = tensors[0].device.type if tensors else "cpu"
        key = (shape, known, _state(device))
        try:
            found = sites.get(key)
        except TypeError as error:
            self._labels(args, kwargs)
            raise InvalidArgumentError(
                f"fusion '{self.__name__}': arguments that are no tensors must be hashable: {error}"
            ) from error
        if found is None:
            found = self._new_site(sites, key, args, kwargs, fixed, len(tensors))
        return found, tensors

    def _new_site(
        self,
        sites: _Sites,
        key: Hashable,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        fixed: Mapping[int, Any],
        count: int,
    ) -> _Site:
        site = _Site(self, pytree.tree_structure((tuple(args), dict(kwargs))), fixed, count)
        site.labels = self._labels(args, kwargs)
        with self._lock:
            site = sites.setdefault(key, site)
            while len(sites) > _KEPT:
                sites.popitem(last=False)
        return site

    def _labels(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """Of the tensors. Raises ``InvalidArgumentError`` where there are arrays of others."""
        found = []
        for path, leaf in pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]:
            label = self._label(path)
            if isinstance(leaf, torch.Tensor):
                found.append(label)
            elif not isinstance(leaf, np.generic) and hasattr(leaf, "__array__"):
                raise InvalidArgumentError(
                    f"fusion '{self.__name__}': argument {label} is {type(leaf).__name__}, which "
                    "is no tensor; torch.as_tensor makes it one"
                )
        return found

    def _label(self, path: Sequence[Any]) -> str:
        """``x``, ``params.w``: the parameter of the function, and the way to the leaf."""
        group, first, *rest = path
        if group.idx == 0:
            names = _parameter_names(self._function)
            name = names[first.idx] if first.idx < len(names) else f"x{first.idx}"
        else:
            name = str(first.key)
        return re.sub(r"[^\w.]+", ".", name + pytree.keystr(tuple(rest))).strip(".")[:200]


def _state(device: str) -> Hashable:
    """What of PyTorch's and the environment's a program depends on."""
    return (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
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
      InvalidArgumentError: a setting that is none, or an argument that is an array of others.
    """
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
    found = value.__func__ if isinstance(value, types.MethodType) else value
    if isinstance(found, Fusion):
        yield found
