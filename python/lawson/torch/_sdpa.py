"""`scaled_dot_product_attention`: torch.nn.functional's, to the meaning of every argument.

Dims are `[..., h, s, d]`, whatever stands in front. A call with four dims each and nothing beside
q, k and v is looked up by its other arguments, and goes from here into C++.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from lawson import _attention_arguments as shared
from lawson import _settings, _torch
from lawson._attention_setup import Setup
from lawson._errors import InvalidArgumentError
from lawson.torch import _attention_arguments as arguments
from lawson.torch import _attention_nested as nested
from lawson.torch._attention import settled_scale
from lawson.torch._attention_arguments import Operands
from lawson.torch._attention_autograd import Pair, training_setup
from lawson.torch._attention_call import (
    PLAIN,
    STATIC,
    attend,
    number,
    plainly_recorded,
    settled,
    setup_for,
    window_of,
)
from lawson.torch._attention_run import KEPT, Nothing, Runner, host_engine

_LABELS = (("q", "query"), ("k", "key"), ("v", "value"))
_NO_WINDOW = (-1, -1)
_WORDS = ("bhsd", "bhsd", "bhsd")
_DEPTH = 8  # the least that every engine takes
_LEAST_RATE = 2.0**-32  # below it a word of 32 random bits drops nothing; an engine may be coarser


class _Form:
    """What was made for the arguments beside the tensors."""

    def __init__(self, setup: Setup, enable_gqa: bool) -> None:
        check = None if enable_gqa else _same_heads
        labels = dict(_LABELS)
        self.forward = Runner(setup, "forward", check, labels)
        self.run = self.forward.run
        self.is_single = not setup.stats
        training = training_setup(setup, bias_grad=False)
        self.pair = Pair(
            training,
            Runner(training, "forward", check, labels),
            Runner(training, "backward", None, labels),
            setup.forward_results(),
        )


def _same_heads(shapes: Mapping[str, Sequence[int]]) -> None:
    """Without enable_gqa heads broadcast, and nothing else."""
    if shapes["k"][1] not in (1, shapes["q"][1]):
        raise InvalidArgumentError(
            f"key: {shapes['k'][1]} heads and query has {shapes['q'][1]}; expected as many, or "
            "enable_gqa=True"
        )


_is_compiling = torch.compiler.is_compiling


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int, int] = _NO_WINDOW,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    engine: str | None = None,
    workspace_limit: int | None = None,
    tuning: str = "off",
) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention`, run by Lawson, and more by keyword.

    One fused plan runs, forward and backward, or the call raises: nothing goes back to torch's own.
    Rows that see nothing are 0, with gradients 0.

    Args:
      query: `[..., h, sq, d]`, with any strides; f16, bf16, f32, on the host also f64. A jagged
        nested tensor is `[b, h, s, d]`.
      key, value: `[..., h, skv, d]` and `[..., h, skv, e]`; what stands in front of the last two
        dims broadcasts.
      attn_mask: bool, true keeps, or float, added to the scores; broadcastable to
        `[..., h, sq, skv]`. A float mask that requires grad gets its gradient.
      dropout_p: applied always, as torch does; the mask is drawn from the generator of the device.
      is_causal: row i sees columns up to i.
      scale: default 1/sqrt(d).
      enable_gqa: heads of key and value may be fewer than those of query, which they divide.
      window, sink, softcap, return_lse, deterministic, engine, workspace_limit, tuning: as in
        `lawson.torch.attention`. The log-sum-exp is f32 `[..., h, sq]`.

    Returns:
      `[..., h, sq, e]`, with the order of strides of `query`; with `return_lse` a tuple of it and
      the log-sum-exp.

    Raises:
      lawson.InvalidArgumentError: a ValueError; names the argument, what was given and what is
        allowed.
      lawson.UnsupportedError: no engine has it.
    """
    if attn_mask is None and sink is None and not _is_compiling():
        if engine is None and type(query) in PLAIN and query.is_cpu:
            engine = host_engine(None)
        try:
            found = _quick(
                query,
                key,
                value,
                is_causal,
                scale,
                enable_gqa,
                window,
                softcap,
                return_lse,
                deterministic,
                engine,
                workspace_limit,
                tuning,
                dropout_p,
            )
            if type(found) is _Form:
                return plainly_recorded(found.pair, query, key, value)
            if found is not NotImplemented:
                return found
        except InvalidArgumentError:
            pass  # dims that broadcast, or what is told below by the names of the arguments
        except Nothing:
            pass
    return _general(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        enable_gqa,
        sink,
        _static(
            is_causal,
            scale,
            window,
            softcap,
            return_lse,
            deterministic,
            engine,
            workspace_limit,
            tuning,
        ),
    )


_ONE_MASK = (
    "attn_mask: not together with is_causal=True; put the causal mask into it, or use "
    "lawson.torch.attention, which takes both"
)
_defaults = {
    name: one.default
    for name, one in inspect.signature(scaled_dot_product_attention).parameters.items()
    if one.default is not inspect.Parameter.empty
}


def _static(
    is_causal: bool,
    scale: Any,
    window: Any,
    softcap: Any,
    return_lse: bool,
    deterministic: bool,
    engine: Any,
    workspace_limit: Any,
    tuning: Any,
) -> dict[str, Any]:
    return {
        "words": _WORDS,
        "mask": "causal" if _settings.flag("is_causal", is_causal) else "none",
        "window": window_of("window", window),
        "bias": "none",
        "softmax": "vanilla",
        "softcap": number("softcap", softcap, "softcap"),
        "dropout": 0.0,
        "scale": settled_scale(scale),
        "max_q": 0,
        "max_kv": 0,
        "output_dtype": None,
        "stats": _settings.flag("return_lse", return_lse),
        "max_logit": False,
        "dropped": False,
        **settled(deterministic, engine, workspace_limit, tuning),
    }


@functools.lru_cache(maxsize=KEPT, typed=True)  # True is not 1: what was checked is what is found
def form_for(is_causal: Any, scale: Any, enable_gqa: Any, *rest: Any) -> _Form:
    """The form of a call with these arguments, in the order of `_static`, checked."""
    fields = _static(is_causal, scale, *rest)
    fields.update(names=("q", "k", "v"), training=False, bias_grad=False)
    values = [fields[name] for name in STATIC]
    return _Form(setup_for(*values), _settings.flag("enable_gqa", enable_gqa))


def _form_of(everywhere: bool, *given: Any) -> _Form | None:
    """The form of a call, of torch's setting and the arguments; None: none has what is asked."""
    is_causal, scale, enable_gqa, window, softcap, stats, deterministic, *choice, dropout_p = given
    if type(dropout_p) not in (float, int) or dropout_p != 0:
        return None
    exact = everywhere if deterministic is False else deterministic
    window = _settings.window("window", window)
    static = (is_causal, scale, enable_gqa, window, softcap, stats, exact, *choice)
    try:
        return form_for(*static)
    except TypeError:
        if _is_hashable(static):
            raise
        return None


_quick = _torch.quick(_form_of)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuses what is no keyword beside query, key and value, and values that no call takes."""
    given = {**_defaults, **options}
    for name, value in options.items():
        if name not in _defaults:
            raise InvalidArgumentError(
                f"{name}: {_settings.shown(value)} is not allowed; expected keywords of "
                f"lawson.torch.scaled_dot_product_attention: {', '.join(_defaults)}"
            )
    number("dropout_p", given.pop("dropout_p"), "rate")
    _settings.flag("enable_gqa", given.pop("enable_gqa"))
    for name in ("attn_mask", "sink"):
        value = given.pop(name)
        if value is not None:
            arguments.tensor(name, value)
    _static(**given)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _general(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: Any,
    is_causal: bool,
    enable_gqa: bool,
    sink: Tensor | None,
    static: dict[str, Any],
) -> Any:
    enable_gqa = _settings.flag("enable_gqa", enable_gqa)
    rate = number("dropout_p", dropout_p, "rate")
    rate = rate if rate >= _LEAST_RATE else 0.0
    if any(isinstance(x, Tensor) and x.is_nested for x in (query, key, value)):
        return _nested(query, key, value, attn_mask, rate, enable_gqa, sink, static)
    if isinstance(attn_mask, CausalBias):
        if is_causal:
            raise InvalidArgumentError(_ONE_MASK)
        for name, x in (("query", query), ("key", key)):
            arguments.tensor(name, x)
        rows, columns = query.shape[-2:-1] + key.shape[-2:-1]
        static["mask"] = arguments.causal_bias("attn_mask", attn_mask, rows, columns)
        attn_mask = None
    query, key, value, attn_mask = arguments.autocast(query, key, value, attn_mask)
    _check(query, key, value, attn_mask, is_causal)
    if query.shape[-1] == 0:  # every score is 0, and so is one of a depth of zeros
        query, key = (torch.nn.functional.pad(x, (0, _DEPTH)) for x in (query, key))
        static["scale"] = 1.0
    rank = max(query.dim(), key.dim(), value.dim())
    query, key, value, lead = _batched(query, key, value, enable_gqa)
    operands = Operands(dict(_LABELS), _WORDS, query, key, value)
    if attn_mask is not None:
        attn_mask = _mask(attn_mask, lead)
        static["bias"] = operands.add_mask(attn_mask, "none")
    if sink is not None:
        operands.named["sink"] = operands.heads("sink", sink)
        static["softmax"] = "learnable"
    static["dropout"] = rate
    operands.add_dropout(rate, None, None, False)
    labels = tuple(operands.labels.items())
    results = [
        _as_given(x, lead, rank) for x in attend(operands.in_order(), static, labels).values()
    ]
    return results[0] if len(results) == 1 else tuple(results)


def _same_kinds(named: Mapping[str, Tensor]) -> None:
    """Floats of one dtype, on one device."""
    query = named["query"]
    for name, x in named.items():
        shared.check_float(name, arguments.type_text(x))
        if x.dtype != query.dtype:
            raise InvalidArgumentError(
                f"{name}: dtype {arguments.type_text(x)} differs from that of query, "
                f"{arguments.type_text(query)}"
            )
        if x.device != query.device:
            raise InvalidArgumentError(
                f"{name}: on {x.device}, and query is on {query.device}; expected one device"
            )


def _check(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> None:
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if arguments.tensor(name, x).dim() < 2:
            raise InvalidArgumentError(
                f"{name}: shape {tuple(x.shape)} has {x.dim()} dims; expected at least 2"
            )
    _same_kinds(named)
    if key.shape[-1] != query.shape[-1]:
        raise InvalidArgumentError(
            f"key: shape {tuple(key.shape)} has depth {key.shape[-1]}; expected "
            f"{query.shape[-1]}, as query says"
        )
    if value.shape[-2] != key.shape[-2]:
        raise InvalidArgumentError(
            f"value: shape {tuple(value.shape)} has {value.shape[-2]} rows; expected "
            f"{key.shape[-2]}, as key says"
        )
    if attn_mask is None:
        return
    arguments.tensor("attn_mask", attn_mask)
    if is_causal:
        raise InvalidArgumentError(_ONE_MASK)
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise InvalidArgumentError(
            f"attn_mask: dtype {arguments.type_text(attn_mask)} is not allowed; expected bool, "
            f"float32, or that of query, {arguments.type_text(query)}"
        )


def _batched(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """As `[b, h, s, d]`, and what b was."""
    if query.dim() == key.dim() == value.dim() == 4 and (
        query.shape[0] == key.shape[0] == value.shape[0]
    ):
        lead: tuple[int, ...] = (query.shape[0],)
    else:
        rank = max(3, query.dim(), key.dim(), value.dim())
        query, key, value = (
            x.reshape((1,) * (rank - x.dim()) + tuple(x.shape)) for x in (query, key, value)
        )
        lead = _broadcast(query, key, value, slice(0, -3), "leading dims")
        query, key, value = (
            x.expand(*lead, *x.shape[-3:]) if tuple(x.shape[:-3]) != lead else x
            for x in (query, key, value)
        )
        if len(lead) == 0:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif len(lead) > 1:
            query, key, value = (x.flatten(0, len(lead) - 1) for x in (query, key, value))
    h, g, gv = query.shape[1], key.shape[1], value.shape[1]
    if enable_gqa:
        for name, heads in (("key", g), ("value", gv)):
            if h % heads if heads else h:
                raise InvalidArgumentError(
                    f"{name}: {heads} heads; expected a divisor of those of query, {h}"
                )
        if g != gv:
            key, value = key.repeat_interleave(h // g, 1), value.repeat_interleave(h // gv, 1)
        return query, key, value, lead
    if h == g == gv:
        return query, key, value, lead
    (heads,) = _broadcast(query, key, value, slice(1, 2), "heads (without enable_gqa)")
    query = query.expand(-1, heads, -1, -1)
    if g != gv:
        key, value = key.expand(-1, heads, -1, -1), value.expand(-1, heads, -1, -1)
    return query, key, value, lead


def _broadcast(
    query: Tensor, key: Tensor, value: Tensor, dims: slice, what: str
) -> tuple[int, ...]:
    shapes = [tuple(x.shape[dims]) for x in (query, key, value)]
    try:
        broadcast: Any = torch.broadcast_shapes
        return tuple(broadcast(*shapes))
    except RuntimeError:
        raise InvalidArgumentError(
            f"query, key, value: {what} {shapes[0]}, {shapes[1]} and {shapes[2]}; expected ones "
            "that are equal or 1"
        ) from None


def _mask(mask: Tensor, lead: tuple[int, ...]) -> Tensor:
    """With one dim for all in front of the heads."""
    if mask.dim() > 3 + len(lead):
        raise InvalidArgumentError(
            f"attn_mask: shape {tuple(mask.shape)}; expected at most {3 + len(lead)} dims"
        )
    if mask.dim() <= 4 and len(lead) <= 1 or mask.dim() <= 3:
        return mask
    outer = mask.shape[:-3]
    if all(size == 1 for size in outer):
        return mask.reshape(1, *mask.shape[-3:])
    try:
        return mask.expand(*lead, *mask.shape[-3:]).flatten(0, len(lead) - 1)
    except RuntimeError:
        raise InvalidArgumentError(
            f"attn_mask: shape {tuple(mask.shape)}; its leading dims do not broadcast to "
            f"{tuple(lead)}"
        ) from None


def _as_given(x: Tensor, lead: tuple[int, ...], rank: int) -> Tensor:
    """A result with the leading dims of the call."""
    if len(lead) > 1:
        return x.reshape(*lead, *x.shape[1:])
    if len(lead) == 0:
        x = x.squeeze(0)
        return x.squeeze(0) if rank == 2 else x
    return x


def _nested(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    rate: float,
    enable_gqa: bool,
    sink: Tensor | None,
    static: dict[str, Any],
) -> Any:
    from lawson.torch._attention import attention

    if attn_mask is not None:
        raise InvalidArgumentError(
            "attn_mask: not together with nested tensors; lawson.torch.attention takes a bias"
        )
    named = {"query": query, "key": key, "value": value}
    nested.tokens_first("bhsd", named)
    _same_kinds(named)
    if not enable_gqa:
        for name, x in named.items():
            if x.shape[1] != query.shape[1]:
                raise InvalidArgumentError(
                    f"{name}: {x.shape[1]} heads and query has {query.shape[1]}; expected as many, "
                    "or enable_gqa=True"
                )
    return attention(
        query,
        key,
        value,
        layout="bhsd",
        mask=static["mask"],
        window=static["window"],
        sink=sink,
        softcap=static["softcap"],
        dropout_rate=rate,
        scale=static["scale"],
        deterministic=static["deterministic"],
        return_lse=static["stats"],
        engine=static["engine"],
        workspace_limit=None if static["workspace_limit"] < 0 else static["workspace_limit"],
        tuning=static["tuning"],
    )
