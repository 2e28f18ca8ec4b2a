"""How a program runs: directly for plain tensors, else as the operator ``lawson::fusion``.

The operator is what tracing, functorch and tensor subclasses see. It carries its program as text, so
that a compiled or exported graph holds all that it runs. Its gradient is another program, called in
the same way: derivatives of any order are programs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from lawson._errors import UnsupportedError
from lawson.torch._asked import record
from lawson.torch._fusion_program import Program
from lawson.torch._fusion_run import code_of, inspected_program
from lawson.torch._fusion_text import read
from lawson.torch._trace_fx import Spec

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Programs of this process, by their texts: with their functions.
_programs: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()


def is_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Tensors with memory, and nothing that watches or transforms what is done with them."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and all(type(t) in _PLAIN for t in tensors)
    )


def apply(program: Program, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a program for all of its arguments, captured tensors last."""
    core = program.core
    computed = () if core is None else run(core, [tensors[i] for i in program.used])
    results: list[torch.Tensor] = []
    for i, (output, spec) in enumerate(zip(program.trace.outputs, program.results, strict=True)):
        if output.kind == "graph":
            assert core is not None
            found = computed[output.index]
            # one value in two orders, or in two memories
            if output.is_copy or core.results[output.index].stride != spec.stride:
                found = _copied(found, spec)
            results.append(_stopped(found) if i in program.stopped else found)
        elif output.kind == "argument":
            given = tensors[output.index]
            if output.is_copy:
                given = _copied(given, spec)
            results.append(_stopped(given) if i in program.stopped else given)
        else:
            assert output.constant is not None
            number, wrt = output.constant.value.item(), [tensors[i] for i in output.wrt]
            if torch.is_grad_enabled() and any(t.requires_grad for t in wrt) and is_plain(wrt):
                results.append(_Constant.apply(spec, number, *wrt))  # type: ignore[no-untyped-call]
            else:
                results.append(spec.empty().fill_(number))
    return results


def _copied(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    found = tensor.clone()
    if torch._C._functorch.peek_interpreter_stack() is not None or found.stride() == spec.stride:
        return found
    return spec.empty().copy_(tensor)


def _stopped(result: torch.Tensor) -> torch.Tensor:
    is_watched = result.requires_grad or torch._C._functorch.peek_interpreter_stack() is not None
    return result.detach() if is_watched and result.is_floating_point() else result


def run(core: Program, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What a core computes."""
    if forward_ad._current_level >= 0:
        _no_tangent(core)
    if torch._C._functorch.peek_interpreter_stack() is not None:
        transformed: Sequence[torch.Tensor] = _Transformed.apply(core, *tensors)  # type: ignore[no-untyped-call]
        return transformed
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors) and is_plain(tensors):
        found: Sequence[torch.Tensor] = recorded(core, *tensors)
        return found
    return _without_gradient(core, tensors)


def _without_gradient(core: Program, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if is_plain(tensors):
        return code_of(core)(*tensors)
    _programs[core.text] = core
    found: Sequence[torch.Tensor] = torch.ops.lawson.fusion(list(tensors), core.text)
    return found


def _no_tangent(core: Program) -> None:
    raise UnsupportedError(
        f"unsupported: fusion '{core.name}': forward-mode differentiation (jvp, jacfwd)\n"
        "  nearest supported form: reverse mode: torch.autograd.grad, torch.func.vjp, jacrev"
    )


def _gradients(
    core: Program,
    tensors: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Of each argument; None where none is asked for, or none comes."""
    of = tuple(i for i, c in enumerate(cotangents) if c is not None and _has(core.results[i]))
    reached = frozenset[int]().union(*(core.reach[i] for i in of))
    wrt = tuple(i for i, n in enumerate(needed) if n and i in reached and _has(core.specs[i]))
    found: list[torch.Tensor | None] = [None] * len(tensors)
    if of and wrt:
        back, count = core.gradient(wrt, of), core.arguments
        given = [cotangents[i] for i in of]
        results = apply(back, [*tensors[:count], *given, *tensors[count:]])  # type: ignore[list-item]
        for i, result in zip(wrt, results, strict=True):
            found[i] = result
    return found


def _has(spec: Spec) -> bool:
    return spec.dtype.is_floating_point


def _batched(core: Program, size: int, dims: Sequence[int | None], tensors: Any) -> Any:
    """The results over a further dim, which is their first."""
    given = tuple(None if d is None else d % t.dim() for d, t in zip(dims, tensors, strict=True))
    over = core.batched(size, given, tuple(Spec.of(t) for t in tensors))
    return apply(over, tensors)


class _Constant(torch.autograd.Function):
    """A number everywhere, as a function of tensors."""

    @staticmethod
    def forward(ctx: Any, spec: Spec, number: float, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.specs = [Spec.of(t) for t in tensors]
        return spec.empty().fill_(number)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        needed = zip(ctx.specs, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(s.empty().zero_() if n else None for s, n in needed))


class _Recorded(torch.autograd.Function):
    """A core with a gradient, for plain tensors."""

    @staticmethod
    def forward(ctx: Any, core: Program, *tensors: torch.Tensor) -> Any:
        found = tuple(code_of(core)(*tensors))
        needed = {i for i, n in enumerate(ctx.needs_input_grad[1:]) if n}
        _keep(ctx, core, tensors, found, [not r.isdisjoint(needed) for r in core.reach])
        return found

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        needed = ctx.needs_input_grad[1:]
        return (None, *_gradients(ctx.core, ctx.saved_tensors, cotangents, needed))


class _Transformed(torch.autograd.Function):
    """A core with a gradient, inside of functorch's transformations."""

    @staticmethod
    def forward(core: Program, *tensors: torch.Tensor) -> Any:
        return tuple(_without_gradient(core, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        core, *tensors = inputs
        _keep(ctx, core, tensors, output, [bool(r) for r in core.reach])

    backward = _Recorded.backward

    @staticmethod
    def vmap(info: Any, in_dims: Any, core: Program, *tensors: torch.Tensor) -> Any:
        results = tuple(_batched(core, int(info.batch_size), in_dims[1:], tensors))
        return results, (0,) * len(results)


def _keep(
    ctx: Any,
    core: Program,
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    differ: Sequence[bool],
) -> None:
    """``differ``: which results depend on an argument with a gradient."""
    ctx.core = core
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    without = [
        x for x, s, d in zip(results, core.results, differ, strict=True) if not (d and _has(s))
    ]
    if without:
        ctx.mark_non_differentiable(*without)


# recorded(core, *tensors): its results, which autograd knows about.
recorded: Any = _Recorded.apply


# ---- the operator ------------------------------------------------------------------------------

_library: Any = torch.library.Library("lawson", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "fusion(Tensor[] tensors, str program) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag
)
_NAME = "lawson::fusion"


@functools.lru_cache(maxsize=1024)
def _loaded(text: str) -> Program:
    return read(text)


def _program(text: str) -> Program:
    return _programs.get(text) or _loaded(text)


def _run(tensors: Sequence[torch.Tensor], program: str) -> list[torch.Tensor]:
    core = _program(program)
    for tensor, spec, label in zip(tensors, core.specs, core.labels, strict=True):
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise UnsupportedError(
                f"unsupported: fusion '{core.name}': argument '{label}' is {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}; the program is for {spec.dtype} of shape {spec.shape}\n"
                "  nearest supported form: a program traced for these shapes"
            )
    # of a subclass that is about Python alone
    bare = [t if type(t) in _PLAIN else t.as_subclass(torch.Tensor) for t in tensors]
    return list(code_of(core)(*bare))


# Not by device: a program may have no operand.
_library.impl("fusion", _run, "CompositeExplicitAutograd")


def _described(tensors: Sequence[torch.Tensor], program: str) -> list[torch.Tensor]:

    core = _program(program)
    record(lambda target: inspected_program(core, target))
    device = tensors[0].device if tensors else core.device
    return [
        torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=device) for s in core.results
    ]


torch.library.register_fake(_NAME, _described, lib=_library)


def _set_up(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.text = inputs
    ctx.save_for_backward(*tensors)
    ctx.needed = [t.requires_grad for t in tensors]
    ctx.set_materialize_grads(False)
    needed = {i for i, n in enumerate(ctx.needed) if n}
    reach = _program(ctx.text).reach
    without = [x for x, r in zip(output, reach, strict=True) if r.isdisjoint(needed)]
    if without:
        ctx.mark_non_differentiable(*without)


def _differentiated(ctx: Any, cotangents: Any) -> Any:
    core = _program(ctx.text)
    return _gradients(core, ctx.saved_tensors, cotangents, ctx.needed), None


torch.library.register_autograd(_NAME, _differentiated, setup_context=_set_up, lib=_library)


def _mapped(info: Any, in_dims: Any, tensors: Sequence[torch.Tensor], program: str) -> Any:
    results = _batched(_program(program), int(info.batch_size), in_dims[0], tensors)
    return results, [0] * len(results)


torch.library.register_vmap(_NAME, _mapped, lib=_library)
