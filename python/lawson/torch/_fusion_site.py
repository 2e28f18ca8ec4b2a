"""Calls of one fusion with arguments of one structure: traced once for each form, and kept.

Where the function's results are the kernel's, in order, a call without a gradient is one call of
``lawson._torch.Call``, which finds the plan by the tensors; one that autograd records finds its
program by their forms.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from lawson import _torch
from lawson._errors import InvalidArgumentError, UnsupportedError
from lawson._graph.kernels import Settings
from lawson.torch._fusion_around import Around, has_more
from lawson.torch._fusion_captured import Slot
from lawson.torch._fusion_op import apply, is_plain, recorded
from lawson.torch._fusion_program import Program, no_tensor, program
from lawson.torch._fusion_run import code_of, named
from lawson.torch._trace_fx import Spec, alone
from lawson.torch._trace_refusals import check_dynamic

KEPT = 256  # programs of one site
STATES = 32  # of what is around one kind of calls
_tracing = threading.local()


def is_tracing() -> bool:
    """Whether a marked function is being traced in this thread."""
    return bool(getattr(_tracing, "on", False))


class _Otherwise(Exception):
    """Arguments of this form are not run by the site's one call."""


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


class Kind:
    """Calls with one structure of arguments and the same settings, in one state of PyTorch's.

    Args:
      function, name, settings: of the fusion.
      tree: the structure of its arguments.
      fixed: those that are no tensors, by their places among the leaves.
      labels: names of the tensors, in order.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        settings: Settings,
        tree: Any,
        fixed: Mapping[int, Any],
        labels: Sequence[str],
    ) -> None:
        self.function = function
        self.name = name
        self.settings = settings
        self.tree = tree
        self.fixed = dict(fixed)
        self.labels = list(labels)
        self._given = [v for v in fixed.values() if has_more(v)]
        self._lock = threading.Lock()
        self._sites: collections.OrderedDict[Hashable, Site] = collections.OrderedDict()
        self._now: tuple[Around, Site] | None = None

    def site(self) -> Site:
        """What runs calls while the function finds around it what it finds now."""
        now = self._now
        if now is not None and (now[0].is_empty or now[0].holds()):
            return now[1]
        return self.look()

    def look(self) -> Site:
        """The same, by a walk."""
        around = Around(self.function, self._given)
        with self._lock:
            if self._now is not None and not self._now[0].is_of(around.objects):
                self._sites.clear()
            found = self._sites.get(around.key)
            if found is None:
                found = self._sites[around.key] = Site(self, around)
                while len(self._sites) > STATES:
                    self._sites.popitem(last=False)
            self._sites.move_to_end(around.key)
            self._now = (around, found)
        return found


class Site:
    """Calls of one kind, in one state of what the function finds around it."""

    def __init__(self, kind: Kind, around: Around) -> None:
        self.kind = kind
        self.around = around
        self.count = len(kind.labels)
        self.first: Traced | None = None
        self.direct: _torch.Call | None = None
        self._fast: tuple[Traced, _torch.Call, Callable[[Sequence[torch.Tensor]], Any]] | None
        self._fast = None
        self._lock = threading.RLock()
        self._traced: collections.OrderedDict[Hashable, Traced] = collections.OrderedDict()
        self._cores: dict[Hashable, Program] = {}  # of calls that autograd records

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        form: Hashable = None
        fast = self._fast
        if fast is None and self.first is None and self._are_tensors():
            self.traced(tensors)
            fast = self._fast
        if fast is not None:
            first, direct, unflatten = fast
            given = (*tensors, *first.captured()) if first.slots else tensors
            if is_plain(given):
                if not (torch.is_grad_enabled() and any(t.requires_grad for t in given)):
                    try:
                        return unflatten(direct(*given))
                    except _Otherwise:
                        pass
                    except InvalidArgumentError as error:
                        self.traced(tensors)  # what no graph has, is said with its line
                        raise named(error, self.kind.name, first.program.labels) from None
                else:
                    form = tuple((t.shape, t.stride(), t.dtype, t.device) for t in given)
                    core = self._cores.get(form)
                    if core is not None:
                        return unflatten(recorded(core, *given))
        if not self._are_tensors():
            return self.kind.look()(tensors)  # a number, say, in the place of one
        traced = self.traced(tensors)
        if form is not None and self._is_as(first, traced):
            if len(self._cores) >= KEPT:
                self._cores.clear()
            self._cores[form] = traced.program
        results = apply(traced.program, [*tensors, *traced.captured()])
        return pytree.tree_unflatten(results, traced.out_tree)

    def _are_tensors(self) -> bool:
        return all(isinstance(s.value, torch.Tensor) for s in self.around.tensors)

    def traced(self, tensors: Sequence[torch.Tensor]) -> Traced:
        """The program for tensors of these shapes, strides, dtypes and device."""
        for label, tensor in zip(self.kind.labels, tensors, strict=True):
            _check(self.kind.name, label, tensor)
            check_dynamic(self.kind.name, label, tensor.shape)
        specs = tuple(Spec.of(t) for t in tensors)
        slots = self.around.tensors
        own = [s.value for s in slots]
        _check_initialized(self.kind.name, slots)
        swapped = not is_plain(own)
        key = (specs, swapped, tuple(map(Spec.of, own)) if slots else ())
        with self._lock:
            found = self._traced.get(key)
            if found is not None:
                self._traced.move_to_end(key)
                return found
        with alone(), self._lock:  # in this order, as a trace may come to another site
            found = self._traced.get(key)
            if found is not None:
                return found
            found = self._trace(specs, slots if swapped else [], own if not swapped else [], slots)
            self._traced[key] = found
            while len(self._traced) > KEPT:
                self._traced.popitem(last=False)
            if self.first is None and not swapped:
                self.first = found
                if found.is_direct:
                    self.direct = _torch.Call(self._describe)
                    self._fast = (found, self.direct, _unflatten(found.out_tree))
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
                s is t if p is None or q is None else p is q
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
        kind, count = self.kind, self.count

        def flat(*given: torch.Tensor) -> list[Any]:
            nonlocal out_tree
            leaves = iter(given[:count])
            total = count + len(kind.fixed)
            values = [kind.fixed[i] if i in kind.fixed else next(leaves) for i in range(total)]
            args, kwargs = pytree.tree_unflatten(values, kind.tree)
            before = [slot.value for slot in swapped]
            outer = is_tracing()
            _tracing.on = True
            try:
                for slot, tensor in zip(swapped, given[count:], strict=True):
                    slot.holder[slot.key] = tensor
                result = kind.function(*args, **kwargs)
                results, tree = pytree.tree_flatten(result)
                if not all(isinstance(x, torch.Tensor) for x in results):
                    no_tensor(kind.name, result)
            finally:
                _tracing.on = outer
                for slot, tensor in zip(swapped, before, strict=True):
                    slot.holder[slot.key] = tensor
            out_tree = out_tree or tree
            return results

        labels = [*kind.labels, *(s.label for s in swapped)]
        more = tuple(Spec.of(s.value) for s in swapped)
        known = [(s.label, t) for s, t in zip(slots, own, strict=False)]
        settings = kind.settings
        if torch.are_deterministic_algorithms_enabled():
            settings = dataclasses.replace(settings, deterministic=True)
        with _unwritten(kind.name, self.around):
            made = program(flat, kind.name, labels, (*specs, *more), settings, known=known)
        if made.trace.own_gradient is None and any(map(_has_node_hooks, self.around.objects)):
            hooked = dataclasses.replace(made.trace, own_gradient="register_backward_hook")
            made = dataclasses.replace(made, trace=hooked)
        found = [next((s for s in slots if own and s.value is t), None) for t in made.captured]
        return Traced(made, out_tree, tuple(found), tuple(swapped))


def _has_node_hooks(value: Any) -> bool:
    """A module with hooks of the old kind, which are those of nodes of autograd's graph."""
    is_module = isinstance(value, torch.nn.Module)
    return is_module and bool(value._backward_hooks) and value._is_full_backward_hook is False


def _unflatten(tree: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
    if tree.is_leaf():
        return lambda results: results[0]
    if tree.type is tuple and all(child.is_leaf() for child in tree.children()):
        return tuple
    return lambda results: pytree.tree_unflatten(list(results), tree)


def _check(name: str, label: str, tensor: torch.Tensor) -> None:
    """Refuses tensors that no kernel takes, by the names of their arguments."""
    kind = None
    if tensor.is_nested:
        kind = "a nested tensor"
    elif tensor.layout is not torch.strided:
        kind = f"sparse ({str(tensor.layout).removeprefix('torch.')})"
    elif tensor.is_quantized:
        kind = f"quantised ({str(tensor.dtype).removeprefix('torch.')})"
    elif tensor.is_neg() or tensor.is_conj():
        kind = "a lazily negated or conjugated view (Tensor.resolve_neg(), resolve_conj())"
    elif tensor.device.type not in ("cpu", "cuda"):
        kind = f"on device '{tensor.device}'"
    if kind is not None:
        raise UnsupportedError(
            f"unsupported: fusion '{name}': argument '{label}' is {kind}\n"
            "  nearest supported form: a dense, strided tensor on cuda, or on cpu"
        )


def _check_initialized(name: str, slots: Sequence[Slot]) -> None:
    for slot in slots:
        if is_lazy(slot.value):
            raise InvalidArgumentError(
                f"fusion '{name}': '{slot.label}' has no shape yet (a lazy module); call the module "
                "once, outside of the fusion"
            )


@contextlib.contextmanager
def _unwritten(name: str, around: Around) -> Iterator[None]:
    """Where a trace leaves tensors of its own in the user's objects, they are taken out again, and
    the function is refused."""
    places = [Slot("", s.holder, s.key) for s in around.tensors]
    values = [slot.value for slot in places]
    before = [(label, holder, dict(holder)) for label, holder in around.holders]
    left: list[str] = []
    try:
        yield
    finally:
        for label, holder, old in before:
            for key, value in list(holder.items()):
                if _is_of_a_trace(value) and old.get(key) is not value:
                    left.append(".".join(part for part in (label, key) if part))
                    if key in old:
                        holder[key] = old[key]
                    else:
                        del holder[key]
        for slot, shown, old_value in zip(places, around.tensors, values, strict=True):
            if _is_of_a_trace(slot.value) and slot.value is not old_value:
                left.append(shown.label)
                slot.holder[slot.key] = old_value
    if left:
        raise UnsupportedError(
            f"unsupported: fusion '{name}': it assigns to '{left[0]}', which it does not own\n"
            "  nearest supported form: the new value as a result, assigned outside of the fusion"
        )


def _is_of_a_trace(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (
        isinstance(value, FakeTensor)
        or torch._is_functional_tensor(value)
        or torch._C._functorch.is_functorch_wrapped_tensor(value)
    )
