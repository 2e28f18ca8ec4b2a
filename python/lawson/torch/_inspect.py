"""``inspect``: what a function runs, told without running it."""

from __future__ import annotations

import functools
import gc
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.utils import _pytree as pytree

from lawson._inspection import Inspection
from lawson.torch._fusion import Fusion, fusions_in
from lawson.torch._fusion_program import Program
from lawson.torch._fusion_run import code_of

_lock = threading.RLock()  # a function that is inspected may inspect another one
# Of the inspection that is under way. Autograd's threads add to it.
_found: list[Any] | None = None


def record(tell: Callable[[], Any]) -> None:
    """For operators' descriptions (``register_fake``): ``tell`` says what would run, and is called
    only while something is inspected."""
    if _found is not None:
        _found.append(tell())


def of_program(program: Program) -> Inspection:
    """The kernels of a program. Raises what running it raises."""
    core = program.core
    kernels = () if core is None else tuple(code_of(core).kernels())
    return Inspection(program.name, program.device.type, kernels)


@contextmanager
def _recording() -> Iterator[list[Any]]:
    global _found
    with _lock:
        outer, _found = _found, []
        try:
            yield _found
        finally:
            _found = outer


def inspect(function: Callable[..., Any]) -> Callable[..., Any]:
    """``inspect(f)(*args)``: what runs for these arguments.

    Of a fusion, or a method that is one: its ``Inspection``, with the very plan that a call runs.
    Of any other function, such as one that ends with ``backward``: a tuple with one ``Inspection``
    for each fusion, and one for each pass of an attention, in the order in which they run. The
    function is called with fake tensors, which have no memory: it computes nothing, and may not
    depend on values.

    Raises what the calls would raise.
    """

    @functools.wraps(function, updated=())
    def inspected(*args: Any, **kwargs: Any) -> Any:
        marked: Fusion | None = next(fusions_in(function), None)
        if marked is not None:
            bound = (function.__self__,) if isinstance(function, types.MethodType) else ()
            site, tensors = marked.site((*bound, *args), kwargs)
            return of_program(site.traced(tensors).program)
        return _of_function(function, args, kwargs)

    return inspected


def _of_function(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, ...]:
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)

    def fake(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        made = mode.from_tensor(x, static_shapes=True)
        return made.requires_grad_() if x.requires_grad and x.is_leaf else made

    given, named = pytree.tree_map(fake, (args, kwargs))
    # Gradients of real leaves would be fake ones afterwards.
    leaves = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    before = [(x, x.grad) for x in leaves if x.requires_grad and x.is_leaf]
    try:
        with _recording() as found, mode:
            function(*given, **named)
    finally:
        for leaf, grad in before:
            if leaf.grad is not grad:
                leaf.grad = grad
    return tuple(found)
