"""The operators `lawson::attention_forward`, `_backward` and `_append`: what tracing sees.

A traced call (torch.compile, torch.export, functorch, tensor subclasses, dispatch modes) goes
through these; an eager one runs the same `Runner` without them. The static Setup is one string, and
an operand of a Setup is the argument of its name. Results that a Setup has not are without
elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from lawson._attention_setup import OPTIONAL, Setup
from lawson._errors import UnsupportedError
from lawson.torch import _attention_autograd as autograd
from lawson.torch import _attention_inspect
from lawson.torch import _attention_run as run
from lawson.torch._asked import record

NAMESPACE = "lawson"
FORWARD = ("q", "k", "v", "setup", *(n for n in OPTIONAL if n not in ("k_new", "v_new")))
BACKWARD = (*FORWARD[:3], "o", "stats", "do", *FORWARD[3:])
APPEND = (*FORWARD[:3], "k_new", "v_new", *FORWARD[3:])
ARGUMENTS = {"forward": FORWARD, "backward": BACKWARD}
RESULTS = {
    "forward": ("o", "stats", "max_logit", "dropped"),
    "backward": ("dq", "dk", "dv", "dbias", "dsink"),
}


def _schema(name: str, arguments: Sequence[str], results: Sequence[str]) -> str:
    def declared(argument: str) -> str:
        if argument == "setup":
            return "str setup"
        if argument in OPTIONAL and argument not in ("k_new", "v_new"):
            return f"Tensor? {argument}=None"
        written = {"k": "(a!)", "v": "(b!)"} if name == "attention_append" else {}
        return f"Tensor{written.get(argument, '')} {argument}"

    given = ", ".join(declared(argument) for argument in arguments)
    return f"{name}({given}) -> ({', '.join(f'Tensor {result}' for result in results)})"


_Library: Any = torch.library.Library
_library = _Library(NAMESPACE, "FRAGMENT")
for _which in ("forward", "backward"):
    _library.define(
        _schema(f"attention_{_which}", ARGUMENTS[_which], RESULTS[_which]),
        tags=torch.Tag.pt2_compliant_tag,
    )
_library.define(
    _schema("attention_append", APPEND, ("o", "stats", "max_logit")),
    tags=torch.Tag.pt2_compliant_tag,
)

OPS: dict[str, Any] = {
    which: getattr(torch.ops.lawson, f"attention_{which}").default
    for which in ("forward", "backward", "append")
}


def bind(which: str, setup: Setup, text: str, operands: Sequence[Any]) -> list[Any]:
    """The operator's arguments, from the operands of the Setup in order."""
    given = dict(zip(setup.operand_names(which), operands, strict=True))
    given["setup"] = text
    return [given.get(argument) for argument in ARGUMENTS[which]]


def call(which: str, setup: Setup, text: str, operands: Sequence[Any]) -> list[Any]:
    """A pass as an operator: the results that the Setup has, in order."""
    results = OPS[which](*bind(which, setup, text, operands))
    found = dict(zip(RESULTS[which], results, strict=True))
    return [found[name] for name in setup.result_names(which) if name in found]


def append(setup: Setup, text: str, operands: Sequence[Any]) -> list[Any]:
    """Writes the new tokens into the caches k and v; the results apart from the two, in order."""
    given = dict(zip(setup.names, operands, strict=True))
    given["setup"] = text
    results = OPS["append"](*(given.get(argument) for argument in APPEND))
    found = dict(zip(("o", "stats", "max_logit"), results, strict=True))
    return [found[name] for name in setup.forward_results() if name in found]


# ---- for real tensors --------------------------------------------------------------------------


def _run(which: str, arguments: Sequence[str], results: Sequence[str], *given: Any) -> Any:
    named = dict(zip(arguments, given, strict=False))
    runner = run.runner_of(named["setup"], which)
    operands = [_plain(named[name]) for name in runner.names]
    found = dict(zip(runner.outs, runner(*operands), strict=True))
    q = operands[0]
    return tuple(found[name] if name in found else q.new_empty(0) for name in results)


def _plain(x: Tensor) -> Tensor:
    """Of a subclass that is none to torch's dispatcher, the tensor that it is."""
    return x if type(x) is Tensor else x.as_subclass(Tensor)


def _forward(*given: Any) -> Any:
    return _run("forward", FORWARD, RESULTS["forward"], *given)


def _backward(*given: Any) -> Any:
    return _run("backward", BACKWARD, RESULTS["backward"], *given)


def _append(*given: Any) -> Any:
    run.check_caches(dict(zip(APPEND, given, strict=False)))
    return _run("forward", APPEND, ("o", "stats", "max_logit"), *given)


# ---- for descriptions --------------------------------------------------------------------------


def described(which: str, setup: Setup, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Shape, strides and dtype of each result; sizes may be symbols, and are not compared."""
    shapes: dict[str, Any] = {name: x.shape for name, x in tensors.items()}
    sizes: dict[str, Any] = {}
    if setup.ragged_q:
        sizes["s"] = setup.max_q
    if setup.ragged_kv or setup.paged:
        sizes["t"] = setup.max_kv
    for name in setup.names:
        if name.startswith("cu_"):
            sizes["b"] = shapes[name][0] - 1
    for name in setup.names:
        if name not in ("bias", "mask"):
            for letter, size in zip(setup.dims(name), shapes[name], strict=True):
                sizes.setdefault(letter, size)
    strides = {name: x.stride() for name, x in tensors.items()}
    types = {name: run.type_name(x.dtype) for name, x in tensors.items()}
    forms = run.result_forms(setup, which, sizes, shapes, strides, types)
    return dict(zip(setup.result_names(which), forms, strict=True))


def _fake(which: str, arguments: Sequence[str], results: Sequence[str], *given: Any) -> Any:
    named = dict(zip(arguments, given, strict=False))
    setup = run.setup_of(named["setup"])
    tensors = {name: named[name] for name in setup.operand_names(which)}
    forms = described(which, setup, tensors)
    record(lambda target: _attention_inspect.inspect_pass(which, setup, tensors, target))
    q = named["q"]
    made = []
    for name in results:
        if name not in forms:
            made.append(q.new_empty(0))
            continue
        shape, strides, dtype = forms[name]
        made.append(q.new_empty_strided(shape, strides, dtype=getattr(torch, dtype)))
    return tuple(made)


def _fake_forward(*given: Any) -> Any:
    return _fake("forward", FORWARD, RESULTS["forward"], *given)


def _fake_backward(*given: Any) -> Any:
    return _fake("backward", BACKWARD, RESULTS["backward"], *given)


def _fake_append(*given: Any) -> Any:
    return _fake("forward", APPEND, ("o", "stats", "max_logit"), *given)


# ---- gradients ---------------------------------------------------------------------------------


class _Recorded(torch.autograd.function._SingleLevelFunction):
    """The forward operator with its gradient, for one level of autograd's or functorch's."""

    @staticmethod
    def forward(ctx: Any, keys: Any, *arguments: Any) -> Any:
        results = _below_autograd("forward", keys, arguments)
        named = dict(zip(FORWARD, arguments, strict=False))
        setup = run.setup_of(named["setup"])
        wanted = dict(zip(FORWARD, ctx.needs_input_grad[1:], strict=False))
        autograd.refuse_gradients(setup, {name: wanted[name] for name in setup.names})
        ctx.setup = setup
        ctx.bias_grad = "bias" in setup.names and wanted["bias"]
        ctx.given = FORWARD[: len(arguments)]
        ctx.set_materialize_grads(False)
        o, stats, *others = results
        ctx.mark_non_differentiable(*others)
        ctx.save_for_backward(*(named[name] for name in setup.names), o, stats)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *values, o, stats = ctx.saved_tensors
        setup = autograd.training_setup(ctx.setup, bias_grad=ctx.bias_grad)
        text = setup.text()
        if not ctx.setup.training and not ctx.setup.stats:
            # Differentiated from outside of where it was called (an exported program, say).
            o, stats = call("forward", setup, text, values)[:2]

        def backward(*operands: Tensor) -> Sequence[Tensor]:
            return call("backward", setup, text, operands)

        found = autograd.gradients(setup, backward, values, o, stats, grads[0], grads[1])
        named = dict(zip(setup.names, found, strict=True))
        return None, *(named.get(argument) for argument in ctx.given)


class _Underivable(torch.autograd.function._SingleLevelFunction):
    """The backward operator, which has no derivative."""

    @staticmethod
    def forward(ctx: Any, keys: Any, *arguments: Any) -> Any:
        return _below_autograd("backward", keys, arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(f"attention (backward pass): {autograd.NO_DERIVATIVE}")


def _below_autograd(which: str, keys: Any, arguments: Sequence[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return OPS[which].redispatch(keys & torch._C._after_autograd_keyset, *arguments)


_dual: Any = forward_ad.unpack_dual


def _autograd(which: str, function: Any) -> Callable[..., Any]:
    """The operator's kernel for autograd; that of torch.library has no torch.func.grad."""

    def kernel(keys: Any, *arguments: Any) -> Any:
        if forward_ad._current_level >= 0 and any(
            isinstance(x, Tensor) and _dual(x).tangent is not None for x in arguments
        ):
            raise UnsupportedError(f"attention ({which} pass): {autograd.NO_DERIVATIVE}")
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            with enable_single_level_autograd_function():
                return function.apply(keys, *arguments)
        return _below_autograd(which, keys, arguments)

    return kernel


def _append_has_no_gradient(keys: Any, *arguments: Any) -> Any:
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
        autograd.refuse_cache(autograd.APPENDED)
    return _below_autograd("append", keys, arguments)


def _append_is_not_mapped(info: Any, in_dims: Any, *given: Any) -> Any:
    raise UnsupportedError(
        "attention: a cache that is appended to is written in place, which torch.vmap does not "
        "map; give the call one more batch dim instead"
    )


def register() -> None:
    """Gives the operators what they do."""
    from lawson.torch import _attention_batching

    implementations = {
        "forward": (_forward, _fake_forward),
        "backward": (_backward, _fake_backward),
        "append": (_append, _fake_append),
    }
    for which, (real, fake) in implementations.items():
        name = f"{NAMESPACE}::attention_{which}"
        _library.impl(f"attention_{which}", real, "CompositeExplicitAutograd")
        torch.library.register_fake(name, fake, lib=_library)
    _library.impl("attention_append", _append_has_no_gradient, "Autograd", with_keyset=True)
    torch.library.register_vmap(
        f"{NAMESPACE}::attention_append", _append_is_not_mapped, lib=_library
    )
    for which, function in (("forward", _Recorded), ("backward", _Underivable)):
        name = f"attention_{which}"
        _library.impl(name, _autograd(which, function), "Autograd", with_keyset=True)
        torch.library.register_vmap(
            f"{NAMESPACE}::{name}", _attention_batching.rule(which), lib=_library
        )
