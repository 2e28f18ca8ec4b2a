"""Where an attention call goes: straight to its plan, to autograd's record of it, or to an operator.

The static side of a call is a tuple of the values of Setup's fields (`STATIC`), so that it is a key
of what was made for it, and a constant where torch.compile traces.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lawson import _attention_arguments as shared
from lawson import _settings, _torch
from lawson._attention_setup import Choice, Setup
from lawson.torch import _attention_ops as ops
from lawson.torch._attention_autograd import (
    APPENDED,
    Attend,
    Pair,
    refuse_cache,
    refuse_gradients,
    training_setup,
)
from lawson.torch._attention_run import KEPT, Runner, check_caches, device_of, host_engine
from lawson.torch._attention_sharding import is_distributed

ops.register()

recorded_call: Any = Attend.apply
# Without what Function.apply does for tensors that outlived a transform of functorch.
plainly_recorded: Any = super(torch.autograd.Function, Attend).apply
PLAIN = (Tensor, torch.nn.Parameter)
_transforms = torch._C._are_functorch_transforms_active
_is_compiling = torch.compiler.is_compiling

# In the order in which `setup_for` takes them.
STATIC = (
    "names",
    "words",
    "mask",
    "window",
    "bias",
    "softmax",
    "softcap",
    "dropout",
    "scale",
    "max_q",
    "max_kv",
    "output_dtype",
    "deterministic",
    "training",
    "bias_grad",
    "stats",
    "max_logit",
    "dropped",
    "engine",
    "workspace_limit",
    "tuning",
)


def is_traced() -> bool:
    """Whether operators have to be called as such: something looks at them, or transforms them."""
    return _is_compiling() or _torch.is_watched()


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether these are nothing but memory with a shape."""
    return all(type(x) in PLAIN for x in tensors)


@functools.lru_cache(maxsize=KEPT)
def setup_for(*static: Any) -> Setup:
    """The Setup of these values."""
    fields = dict(zip(STATIC, static, strict=True))
    choice = Choice(
        engine=fields.pop("engine"),
        workspace_limit=fields.pop("workspace_limit"),
        tuning=fields.pop("tuning"),
    )
    return Setup(**fields, choice=choice)


def text_for(*static: Any) -> str:
    """`Setup.text()` of these values; a constant where it is traced."""
    return _text_for(*static)


text_for._dynamo_marked_constant = True  # type: ignore[attr-defined]  # assume_constant_result


@functools.lru_cache(maxsize=KEPT)
def _text_for(*static: Any) -> str:
    return setup_for(*static).text()


@functools.lru_cache(maxsize=KEPT)
def pair_for(bias_grad: bool, labels: tuple[tuple[str, str], ...], *static: Any) -> Pair:
    """Both passes of a differentiated call."""
    setup = setup_for(*static)
    training = training_setup(setup, bias_grad=bias_grad)
    forward = Runner(training, "forward", labels=dict(labels))
    return Pair(training, forward, Runner(training, "backward"), setup.forward_results())


@functools.lru_cache(maxsize=KEPT)
def runner_for(labels: tuple[tuple[str, str], ...], *static: Any) -> Runner:
    """The forward pass of a call without gradients."""
    return Runner(setup_for(*static), "forward", labels=dict(labels))


def wants_gradient(operands: Mapping[str, Tensor]) -> bool:
    """Whether autograd records what is done with these."""
    if not torch.is_grad_enabled():
        return False
    return any(x.requires_grad for x in operands.values())


def number(name: str, value: Any, kind: str) -> float:
    """A number of a kind of the shared rules', as a constant where it is traced."""
    return _number(name, known(value), kind)


def _number(name: str, value: Any, kind: str) -> float:
    return shared.number(name, value, kind)


_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


def known(value: Any) -> Any:
    """The number itself, where a trace has a symbol for it: it selects what runs."""
    is_symbol = isinstance(value, (torch.SymInt, torch.SymFloat))
    if is_symbol or (torch.compiler.is_compiling() and isinstance(value, (int, float))):
        return torch.fx.experimental.symbolic_shapes.guard_scalar(value)
    return value


def window_of(name: str, value: Any) -> tuple[int, int]:
    """`_settings.window`, of numbers that a trace may have symbols for."""
    if isinstance(value, (tuple, list)):
        value = tuple(known(x) for x in value)
    return _settings.window(name, value)


def settled(deterministic: Any, engine: Any, workspace_limit: Any, tuning: Any) -> dict[str, Any]:
    """The static fields that say how a plan is chosen, checked."""
    limit = _settings.workspace_limit(known(workspace_limit))
    if isinstance(engine, str) and "," in engine:  # `host_engine`'s
        for name in engine.split(","):
            _settings.engine(name)
    else:
        engine = _settings.engine(engine)
    exact = _settings.flag("deterministic", deterministic)
    return {
        "deterministic": exact or torch.are_deterministic_algorithms_enabled(),
        "engine": engine,
        "workspace_limit": -1 if limit is None else limit,
        "tuning": _settings.tuning(tuning),
    }


def attend(
    operands: dict[str, Tensor],
    static: dict[str, Any],
    labels: tuple[tuple[str, str], ...] = (),
) -> dict[str, Tensor]:
    """The results of an attention by name, without those that are only for the backward.

    Args:
      operands: by their names in a Setup, in the order of a call.
      static: Setup's fields, without `names`, `training` and `bias_grad`.
      labels: what messages call the operands, as pairs.
    """
    static["names"] = tuple(operands)
    static["training"] = static["bias_grad"] = False
    where = operands["q"].device.type
    if where == "cpu":
        static["engine"] = host_engine(static["engine"])
    elif where not in ("cuda", "meta"):
        device_of(operands["q"].device)  # which refuses it
    recorded = wants_gradient(operands)
    tensors = list(operands.values())
    if is_traced() or where == "meta" or not is_plain(tensors):
        is_distributed(operands["q"])
        return _traced(operands, static, recorded)
    values = tuple(static[name] for name in STATIC)
    if "k_new" in operands and not recorded:
        check_caches(operands)
    outs = ["o"]
    outs += [name for name in ("stats", "max_logit", "dropped") if static[name]]
    if recorded:
        wanted = {name: x.requires_grad for name, x in operands.items()}
        refuse_gradients(setup_for(*values), wanted)
        results = recorded_call(pair_for(wanted.get("bias", False), labels, *values), *tensors)
        if len(outs) == 1:
            results = (results,)
    else:
        results = runner_for(labels, *values)(*tensors)
    return dict(zip(outs, results, strict=False))


def _traced(
    operands: dict[str, Tensor], static: dict[str, Any], recorded: bool
) -> dict[str, Tensor]:
    if "k_new" in operands:
        if recorded:
            refuse_cache(APPENDED)
        given: dict[str, Any] = {name: operands.get(name) for name in ops.APPEND}
        given["setup"] = text_for(*(static[name] for name in STATIC))
        o, stats, max_logit = torch.ops.lawson.attention_append(*given.values())
        dropped = None
    else:
        # functorch's levels hide whether an outer one differentiates.
        static["training"] = recorded or (
            not torch.compiler.is_compiling() and _transforms() and torch.is_grad_enabled()
        )
        static["bias_grad"] = bool(
            static["training"] and "bias" in operands and operands["bias"].requires_grad
        )
        given = {name: operands.get(name) for name in ops.FORWARD}
        given["setup"] = text_for(*(static[name] for name in STATIC))
        o, stats, max_logit, dropped = torch.ops.lawson.attention_forward(*given.values())
    results = {"o": o}
    for name, x in (("stats", stats), ("max_logit", max_logit), ("dropped", dropped)):
        if static[name]:
            results[name] = x
    return results
