"""``inspect``: what a function runs, told without running it."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.nn.attention.bias import CausalBias
from torch.utils import _pytree as pytree

from lawson import _settings
from lawson._errors import UnsupportedError
from lawson.torch._asked import recording
from lawson.torch._fusion import Fusion, fusions_in
from lawson.torch._fusion_run import inspected_program


def inspect(function: Callable[..., Any], *, target: str | None = None) -> Callable[..., Any]:
    """``inspect(f)(*args)``: what runs for these arguments.

    Of a fusion, or a method that is one: its ``Inspection``, with the very plan that a call runs.
    Of any other function, such as one that ends with ``backward``: a tuple with one ``Inspection``
    for each fusion, and one for each pass of an attention, in the order in which they run. The
    function is called with fake tensors, which have no memory: it computes nothing, and may not
    depend on values.

    Args:
      function: a fusion, or a function that calls fusions or attention.
      target: what it would run on another device, such as "h200", which need not be here, wherever
        the tensors are. None: where they are, or on the target that a fusion names.

    Raises what the calls would raise.
    """
    target = _settings.target(target)

    @functools.wraps(function, updated=())
    def inspected(*args: Any, **kwargs: Any) -> Any:
        marked: Fusion | None = next(fusions_in(function), None)
        if marked is not None:
            bound = (function.__self__,) if isinstance(function, types.MethodType) else ()
            site, tensors = marked.site((*bound, *args), kwargs)
            return inspected_program(site.traced(tensors).program, target)
        return _of_function(function, args, kwargs, target)

    return inspected


def _of_function(
    function: Callable[..., Any], args: Any, kwargs: Any, target: str | None
) -> tuple[Any, ...]:
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)

    def fake(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, CausalBias):
            return x
        if x.is_nested and x.layout != torch.jagged:
            raise UnsupportedError(
                f"inspect: a nested tensor of layout {x.layout}; Lawson takes torch.jagged ones"
            )
        made = mode.from_tensor(x, static_shapes=True)
        return made.requires_grad_() if x.requires_grad and x.is_leaf else made

    given, named = pytree.tree_map(fake, (args, kwargs))
    # Gradients of real leaves would be fake ones afterwards.
    leaves = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    before = [(x, x.grad) for x in leaves if x.requires_grad and x.is_leaf]
    try:
        with recording(target) as found, mode:
            function(*given, **named)
    finally:
        for leaf, grad in before:
            if leaf.grad is not grad:
                leaf.grad = grad
    return tuple(found)
