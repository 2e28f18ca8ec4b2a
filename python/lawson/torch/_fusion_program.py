"""A marked computation for tensors of one form, and those that are derived from it.

A ``Program`` is a function of flat tensors with known shapes, strides, dtypes and device, and its
graph. Its last arguments are the tensors that the function closes over. Derived programs (its
gradient, itself over a further dim) are made once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch.utils import _pytree as pytree

from lawson._errors import UnsupportedError
from lawson._graph.gradient import gradient_trace
from lawson._graph.kernels import Settings
from lawson._graph.shapes import operands_of, results_of
from lawson._graph.tidy import tidied
from lawson._graph.walk import Output, Trace
from lawson._settings import shown
from lawson.torch._trace import trace
from lawson.torch._trace_fx import Spec, captured, with_autocast_of_now

T = TypeVar("T")
Flat = Callable[..., Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a program is the gradient of: of ``forward``'s results ``of``, by its arguments
    ``wrt``."""

    forward: Program
    wrt: tuple[int, ...]
    of: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Compared by identity; safe to share between threads.

    ``function``: of the arguments that are no captured tensors, which it finds itself; None: it is
    not here (a program that was loaded). ``origin``: what it is the gradient of. ``stopped``: the
    results that no gradient comes from.
    """

    name: str
    labels: tuple[str, ...]
    specs: tuple[Spec, ...]
    captured: tuple[torch.Tensor, ...]
    results: tuple[Spec, ...]
    trace: Trace
    settings: Settings
    function: Flat | None
    is_derived: bool = False
    origin: Origin | None = None
    stopped: frozenset[int] = frozenset()
    codes: dict[Any, Any] = dataclasses.field(init=False)  # of _fusion_run

    def __post_init__(self) -> None:
        object.__setattr__(self, "_lock", threading.RLock())
        object.__setattr__(self, "_once", {})
        object.__setattr__(self, "codes", {})

    def __repr__(self) -> str:
        return self.name

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """``make()``, the first time that it is asked for under this key."""
        lock, kept = self._lock, self._once  # type: ignore[attr-defined]
        with lock:
            if key not in kept:
                kept[key] = make()
            return cast(T, kept[key])

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return (*self.specs, *self.results)[0].device

    @property
    def arguments(self) -> int:
        """How many arguments are no captured tensors."""
        return len(self.specs) - len(self.captured)

    # ---- what a kernel computes of it ----------------------------------------------------------

    @property
    def used(self) -> tuple[int, ...]:
        """The arguments that the graph reads."""
        return tuple(sorted(set(self.trace.operands)))

    @property
    def core(self) -> Program | None:
        """Of the arguments that the graph reads, to the results that it computes, each once; None:
        it computes nothing."""
        return self.once("core", self._core)

    def _core(self) -> Program | None:
        document, used = self.trace.document, self.used
        if document is None:
            return None
        count = len(document["outputs"])
        outputs = self.trace.outputs
        # Of results that are one value, one that a gradient comes from.
        in_order = sorted(range(len(outputs)), key=lambda p: p in self.stopped)
        first = [
            next(p for p in in_order if (outputs[p].kind, outputs[p].index) == ("graph", i))
            for i in range(count)
        ]
        if used == tuple(range(len(self.specs))) and first == list(range(len(self.results))):
            return self
        own = [i for i in used if i >= self.arguments]
        forward, specs, arguments = self.function, self.specs, self.arguments
        given = used[: len(used) - len(own)]

        def function(*args: torch.Tensor) -> list[Any]:
            assert forward is not None
            passed = dict(zip(given, args, strict=True))
            everything = [
                passed[i] if i in passed else specs[i].empty().zero_() for i in range(arguments)
            ]
            results = forward(*everything)
            return [results[p] for p in first]

        return Program(
            self.name,
            tuple(self.labels[i] for i in used),
            tuple(specs[i] for i in used),
            tuple(self.captured[i - arguments] for i in own),
            tuple(self.results[p] for p in first),
            dataclasses.replace(
                self.trace,
                operands=tuple(used.index(i) for i in self.trace.operands),
                outputs=tuple(Output("graph", i) for i in range(count)),
            ),
            self.settings,
            None if forward is None else function,
            self.is_derived,
            stopped=frozenset(i for i, p in enumerate(first) if p in self.stopped),
        )

    @property
    def reach(self) -> tuple[frozenset[int], ...]:
        """Of a core: the arguments that each of its results depends on."""
        return self.once("reach", self._reach)

    def _reach(self) -> tuple[frozenset[int], ...]:
        document = self.trace.document
        assert document is not None
        names = [item["name"] for item in document["inputs"]]
        of = {n: frozenset((i,)) for n, i in zip(names, self.trace.operands, strict=True)}
        for op in document["ops"]:
            found = frozenset[int]().union(*(of[n] for n in operands_of(op)))
            of.update(dict.fromkeys(results_of(op), found))
        return tuple(
            frozenset[int]() if i in self.stopped else of[name]
            for i, name in enumerate(document["outputs"])
        )

    @property
    def text(self) -> str:
        """All of it but its function, as JSON: what an operator carries."""
        from lawson.torch._fusion_text import written

        return self.once("text", lambda: written(self))

    # ---- derived programs --------------------------------------------------------------------

    def gradient(self, wrt: tuple[int, ...], of: tuple[int, ...]) -> Program:
        """From the arguments, and cotangents of the results ``of``, to those of the arguments
        ``wrt``."""
        return self.once(("gradient", wrt, of), lambda: self._gradient(wrt, of))

    def _gradient(self, wrt: tuple[int, ...], of: tuple[int, ...]) -> Program:
        name = f"{self.name}.backward"
        count = self.arguments
        cotangents = tuple(_dense(self.results[i]) for i in of)
        labels = (*self.labels[:count], *(f"d_result{i}" for i in of), *self.labels[count:])
        specs = (*self.specs[:count], *cotangents, *self.specs[count:])
        # the library puts cotangents behind all arguments; here captured tensors are last
        derived = gradient_trace(self.trace, len(self.specs), wrt, of, name)
        function = self._backward(wrt, of)
        if derived is None:
            if function is None:
                raise UnsupportedError(
                    f"unsupported: fusion '{self.name}': its gradient is PyTorch's own "
                    f"({self.trace.own_gradient or 'a result is an argument'}), and the function "
                    "is not in this process\n"
                    "  nearest supported form: the gradient taken before the program is exported"
                )
            return program(
                function,
                name,
                labels[: count + len(of)],
                specs[: count + len(of)],
                self.settings,
                known=list(zip(self.labels[count:], self.captured, strict=True)),
                is_derived=True,
                origin=Origin(self, wrt, of),
            )
        order = [*range(count), *range(count + len(of), len(specs)), *range(count, count + len(of))]
        derived = dataclasses.replace(
            derived,
            operands=tuple(order[i] for i in derived.operands),
            outputs=tuple(
                dataclasses.replace(o, index=order[o.index]) if o.kind == "argument" else o
                for o in derived.outputs
            ),
        )
        results = tuple(_dense(self.specs[i]) for i in wrt)
        return Program(
            name,
            labels,
            specs,
            self.captured,
            results,
            derived,
            self.settings,
            function,
            True,
            Origin(self, wrt, of),
        )

    def _backward(self, wrt: tuple[int, ...], of: tuple[int, ...]) -> Flat | None:
        """PyTorch's derivative of the function, as a function."""
        if self.function is None:
            return None
        forward, count, own = self.function, self.arguments, self.captured

        def function(*args: torch.Tensor) -> list[torch.Tensor]:
            given, cotangents = list(args[:count]), list(args[count:])
            if torch._C._functorch.peek_interpreter_stack() is not None:
                return _pulled_back(forward, given, cotangents, wrt, of)
            further = torch.is_grad_enabled()
            with torch.enable_grad(), _unhooked(own):
                given = [
                    x if x.requires_grad or not x.is_floating_point() else x.requires_grad_()
                    for x in (a.view_as(a) for a in given)
                ]
                xs = [given[i] if i < count else own[i - count] for i in wrt]
                results = forward(*given)
                found = torch.autograd.grad(
                    [results[i] for i in of],
                    xs,
                    cotangents,
                    create_graph=further,
                    allow_unused=True,
                )
                return [
                    torch.zeros_like(x) if d is None else d for x, d in zip(xs, found, strict=True)
                ]

        return function

    def batched(self, size: int, dims: tuple[int | None, ...], specs: tuple[Spec, ...]) -> Program:
        """Over a further dim, at ``dims[i]`` of argument i; first in every result."""
        return self.once(("batched", size, dims, specs), lambda: self._batched(size, dims, specs))

    def _batched(self, size: int, dims: tuple[int | None, ...], specs: tuple[Spec, ...]) -> Program:
        count = self.arguments
        forward = self.function
        if forward is None:
            raise UnsupportedError(
                f"unsupported: fusion '{self.name}': torch.vmap of a fusion whose function is not "
                "in this process\n  nearest supported form: torch.vmap before the export"
            )
        if any(d is not None for d in dims[count:]):
            raise UnsupportedError(
                f"unsupported: fusion '{self.name}': torch.vmap over a tensor that the function "
                f"closes over ({', '.join(self.labels[count:])})\n"
                "  nearest supported form: the tensor as an argument"
            )

        origin = self.origin
        if origin is not None:
            first = origin.forward.arguments
            # A gradient by what is not mapped is per element all the same, and the gradient of the
            # mapped forward would add them up.
            mapped = [d for i, d in enumerate(dims[:count]) if i >= first or i in origin.wrt]
            if all(d == 0 for d in mapped) and max(origin.wrt) < first:
                own = range(count, len(dims))
                forward_over = origin.forward.batched(
                    size,
                    (*dims[:first], *(dims[i] for i in own)),
                    (*specs[:first], *(specs[i] for i in own)),
                )
                return forward_over.gradient(origin.wrt, origin.of)

        def function(*args: torch.Tensor) -> list[torch.Tensor]:
            over: Any = torch.vmap(
                lambda *xs: tuple(forward(*xs)), in_dims=dims[:count], out_dims=0
            )
            return list(over(*args))

        return program(
            function,
            self.name,
            self.labels[:count],
            specs[:count],
            self.settings,
            known=list(zip(self.labels[count:], self.captured, strict=True)),
            is_derived=self.is_derived,
        )


@contextlib.contextmanager
def _unhooked(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Without the hooks of closed-over tensors: autograd calls them with the gradient, afterwards."""
    hooks = [(t, t._backward_hooks) for t in tensors if t._backward_hooks]
    for tensor, _ in hooks:
        tensor._backward_hooks = None
    try:
        yield
    finally:
        for tensor, own in hooks:
            tensor._backward_hooks = own


def _pulled_back(
    forward: Flat,
    given: list[torch.Tensor],
    cotangents: list[torch.Tensor],
    wrt: tuple[int, ...],
    of: tuple[int, ...],
) -> list[torch.Tensor]:
    """The gradient inside of functorch's transformations."""
    if wrt and max(wrt) >= len(given):
        raise UnsupportedError(
            "unsupported: torch.vmap over the gradient of a tensor that a fusion closes over\n"
            "  nearest supported form: the tensor as an argument"
        )

    def changed(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args = list(given)
        for i, x in zip(wrt, xs, strict=True):
            args[i] = x
        results = forward(*args)
        return tuple(results[i] for i in of)

    _, back, *_ = torch.func.vjp(changed, *(given[i] for i in wrt))
    return list(back(tuple(cotangents)))


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides, step = [0] * len(shape), 1
    for i in reversed(range(len(shape))):
        strides[i] = step
        step *= max(1, shape[i])
    return tuple(strides)


def _dense(spec: Spec) -> Spec:
    return dataclasses.replace(spec, stride=dense_strides(spec.shape))


def no_tensor(name: str, result: Any = ()) -> NoReturn:
    """Refuses the first result that is none; ``result``: all that the function returns."""
    said = "a result is no tensor"
    for path, leaf in pytree.tree_flatten_with_path(result)[0]:
        if not isinstance(leaf, torch.Tensor):
            where = f"result {pytree.keystr(path)}" if path else "it"
            what = "None" if leaf is None else f"{shown(leaf)} ({type(leaf).__name__})"
            said = f"{said}: {where} is {what}"
            break
    raise UnsupportedError(
        f"unsupported: fusion '{name}': {said}\n"
        "  nearest supported form: results that are tensors, in tuples, lists, dicts, and in "
        "classes that torch.export.register_dataclass knows"
    )


def program(
    function: Flat,
    name: str,
    labels: Sequence[str],
    specs: Sequence[Spec],
    settings: Settings,
    *,
    known: Sequence[tuple[str, torch.Tensor]] = (),
    is_derived: bool = False,
    origin: Origin | None = None,
) -> Program:
    """The program of a function of flat tensors: traced, and written in Lawson's ops.

    ``known``: tensors that the function may close over, with names for messages.
    Raises ``UnsupportedError``, with the line of what is not supported.
    """
    devices = {str(s.device) for s in specs}
    if len(devices) > 1:
        _apart(name, devices)
    function = with_autocast_of_now(function)
    found = captured(function, specs, name)
    lifted = trace(found, name, specs, labels, known, strict=settings.strict)
    names = {id(t): n for n, t in known}
    own = [names.get(id(t), f"captured{i}") for i, t in enumerate(lifted.captured)]
    results = []
    for spec, output in zip(lifted.results, lifted.trace.outputs, strict=True):
        if spec is None:
            no_tensor(name)
        # An expanded result is written in full: elements that share memory are no kernel's.
        is_shared = any(n > 1 and s == 0 for n, s in zip(spec.shape, spec.stride, strict=True))
        results.append(_dense(spec) if is_shared and output.kind != "argument" else spec)
    made = lifted.trace
    if is_derived and made.document is not None:
        made = dataclasses.replace(made, document=tidied(made.document))
    everything = (*specs, *(Spec.of(t) for t in lifted.captured))
    devices = {str(s.device) for s in everything}
    if len(devices) > 1:
        _apart(name, devices)
    return Program(
        name,
        (*labels, *own),
        everything,
        lifted.captured,
        tuple(results),
        made,
        settings,
        function,
        is_derived,
        origin,
        lifted.stopped,
    )


def _apart(name: str, devices: set[str]) -> NoReturn:
    raise UnsupportedError(
        f"unsupported: fusion '{name}': its tensors are on {', '.join(sorted(devices))}\n"
        "  nearest supported form: all tensors on one device"
    )
