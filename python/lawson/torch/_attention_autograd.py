"""The gradient of attention, also through its log-sum-exp, and the eager call that records it.

The backward pass computes delta = rowsum(dO * O) itself, and dS = P * (dP - delta). A cotangent of
the log-sum-exp adds P * dlse to dS. It comes from one more call of the same plan: with V = 0, dP is
0, and with O = -1 and dO = dlse in the first columns, delta is -dlse. So this holds for whatever
the forward computes, and no plan is needed that was not judged. It runs only where the log-sum-exp
has a cotangent, and where the output has none, it runs alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from lawson._attention_setup import Setup
from lawson._errors import UnsupportedError
from lawson.torch._attention_run import Runner

APPENDED = "a cache that is appended to"
HAS_GRADIENT = ("q", "k", "v", "bias", "sink")
_WHY_NOT = {
    "mask": "an additive attn_mask has no gradient; pass what is learnt as bias",
    "slopes": "alibi slopes have no gradient; pass a bias, or detach them",
}
NO_DERIVATIVE = (
    "second-order derivatives and forward-mode differentiation are not supported; attention has "
    "first-order reverse-mode gradients: backward(), torch.autograd.grad, torch.func.grad"
)

Backward = Callable[..., Sequence[Tensor]]


def refuse_gradients(setup: Setup, wanted: Mapping[str, bool]) -> None:
    """UnsupportedError where a gradient is wanted that attention has not."""
    asked = [name for name, is_wanted in wanted.items() if is_wanted]
    if not asked:
        return
    if setup.paged or setup.appends:
        refuse_cache("a paged cache of keys and values" if setup.paged else APPENDED)
    for name in asked:
        if name in _WHY_NOT:
            raise UnsupportedError(f"attention: {_WHY_NOT[name]}")


def refuse_cache(what: str) -> NoReturn:
    """UnsupportedError: gradients are wanted of a call with a cache."""
    raise UnsupportedError(
        f"attention: {what} has no gradients; train with a dense or ragged layout, or use "
        "torch.no_grad()"
    )


def training_setup(setup: Setup, *, bias_grad: bool) -> Setup:
    """The setup whose both passes run when this one is differentiated."""
    return dataclasses.replace(setup, training=True, bias_grad=bias_grad)


class Pair:
    """Both passes of a differentiated call."""

    def __init__(
        self, setup: Setup, forward: Runner, backward: Runner, results: Sequence[str]
    ) -> None:
        self.setup = setup
        self.forward = forward
        self.backward = backward
        self.results = tuple(results)  # that the caller gets
        found = setup.forward_results()
        self.at = tuple(found.index(name) for name in self.results)
        self.stats_at = found.index("stats")
        self.is_plain = self.results == ("o",)
        self.is_plain_backward = self.is_plain and setup.names == ("q", "k", "v")

    def traced_gradients(
        self, saved: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Of each operand, by the operator of the backward pass."""
        from lawson.torch import _attention_ops as ops  # which are made of this

        *values, o, stats = saved
        given = dict(zip(self.results, grads, strict=True))
        text = self.setup.text()

        def backward(*operands: Tensor) -> Sequence[Tensor]:
            return ops.call("backward", self.setup, text, operands)

        return gradients(self.setup, backward, values, o, stats, given.get("o"), given.get("stats"))


class Attend(torch.autograd.Function):
    """Eager attention with gradients: the results that the Pair names."""

    @staticmethod
    def forward(ctx: Any, pair: Pair, *operands: Tensor) -> Any:
        found = pair.forward(*operands)
        ctx.pair = pair
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, found[0], found[pair.stats_at])
        if pair.is_plain:
            return found[0]
        results = tuple(found[at] for at in pair.at)
        ctx.mark_non_differentiable(
            *(x for n, x in zip(pair.results, results, strict=True) if n not in ("o", "stats"))
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        pair: Pair = ctx.pair
        if (
            torch._C._are_functorch_transforms_active()
            or torch._C._len_torch_dispatch_stack()
            or not all(x is None or torch._C._has_storage(x) for x in grads)
        ):
            # Batched cotangents (is_grads_batched), or a mode that looks on: as an operator.
            return None, *pair.traced_gradients(ctx.saved_tensors, grads)
        do = grads[0]
        if pair.is_plain_backward and do is not None and not torch.is_grad_enabled():
            return None, *pair.backward(*ctx.saved_tensors, do)
        *values, o, stats = ctx.saved_tensors
        given = dict(zip(pair.results, grads, strict=True))
        if torch.is_grad_enabled():
            arguments = (*values, o, stats, given.get("o"), given.get("stats"))
            apply: Any = Gradients.apply
            return None, *apply(pair, *arguments)
        return None, *gradients(
            pair.setup, pair.backward, values, o, stats, given.get("o"), given.get("stats")
        )


class Gradients(torch.autograd.Function):
    """The backward pass where it is recorded itself: it has no derivative."""

    @staticmethod
    def forward(ctx: Any, pair: Pair, *arguments: Any) -> Any:
        *values, o, stats, do, dlse = arguments
        return gradients(pair.setup, pair.backward, values, o, stats, do, dlse)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(f"attention (backward pass): {NO_DERIVATIVE}")


def gradients(
    setup: Setup,
    run: Backward,
    values: Sequence[Tensor],
    o: Tensor,
    stats: Tensor,
    do: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Of each operand in order, its gradient, or None where it has none.

    Args:
      setup: of training.
      run: its backward pass: from `setup.backward_operands()` to `setup.backward_results()`.
      values: the operands of `setup.names`.
      o, stats: what the forward gave.
      do, dlse: the cotangents of the two; None: it has none.
    """
    found: dict[str, Tensor] = {}
    outs = setup.backward_results()
    if do is not None:
        found = dict(zip(outs, run(*values, o, stats, do), strict=True))
    if dlse is not None:
        for name, gradient in _of_log_sum(setup, run, values, o, stats, dlse).items():
            found[name] = found[name] + gradient if name in found else gradient
    return tuple(found.get(f"d{name}") if name in HAS_GRADIENT else None for name in setup.names)


def _of_log_sum(
    setup: Setup,
    run: Backward,
    values: Sequence[Tensor],
    o: Tensor,
    stats: Tensor,
    dlse: Tensor,
) -> dict[str, Tensor]:
    """The gradients that dlse makes."""
    operands = dict(zip(setup.names, values, strict=True))
    # Rows that saw nothing have no probabilities; what an infinite log-sum-exp made of them stays
    # out.
    dlse = torch.where(torch.isneginf(stats), 0.0, dlse)
    if setup.ragged_q:
        offsets = operands["cu_seqlens_q"]
        places = operands.get("cu_seqlens_q_padded", offsets)
        dlse = torch.where(rows_in_use(offsets, places, dlse.shape[0])[:, None], dlse, 0.0)
    found: dict[str, Tensor] = {}
    dims = setup.dims("stats")
    if "sink" in operands:
        heads = operands["sink"]
        at = dims.index("h")
        shape = [1] * len(dims)
        shape[at] = heads.shape[0]
        over = [axis for axis in range(len(dims)) if axis != at]
        weights = torch.exp(heads.reshape(shape) - stats)
        found["dsink"] = (weights * dlse).sum(over).to(heads.dtype)
    unit = None
    if o.dtype == torch.float16:
        # Its range is small: relative to the largest, a power of two.
        peak = dlse.abs().amax() if dlse.numel() else dlse.new_zeros(())
        unit = torch.where(peak > 0, torch.exp2(torch.floor(torch.log2(peak))), 1.0)
    scaled = dlse if unit is None else dlse / unit
    if o.dtype != stats.dtype and o.dtype.itemsize == 2:
        columns = _parts(scaled, o.dtype, min(3, o.shape[-1]))
    else:
        columns = [scaled.to(o.dtype)]
    like_o = [letter for letter in setup.dims("o") if letter != "e"]
    order = [dims.index(letter) for letter in like_o]
    stacked = torch.stack([column.permute(order) for column in columns], -1)
    rest = torch.zeros_like(o[..., len(columns) :])
    dout = torch.cat([stacked, rest], -1)
    out = torch.cat([-torch.ones_like(stacked), rest], -1)
    operands["v"] = torch.zeros_like(operands["v"])
    results = run(*operands.values(), out, stats, dout)
    for name, gradient in zip(setup.backward_results(), results, strict=True):
        if name in ("dv", "dsink"):
            continue  # dv is that of V = 0; dsink is above
        found[name] = gradient if unit is None else (gradient.float() * unit).to(gradient.dtype)
    return found


def _parts(value: Tensor, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Numbers of a 16-bit type whose sum is `value`, of f32.

    By bits: a compiler may leave out a conversion to a narrower type and back.
    """
    kept = ~((1 << (13 if dtype == torch.float16 else 16)) - 1)
    parts = []
    for _ in range(count):
        part = (value.view(torch.int32) & kept).view(torch.float32)
        parts.append(part.to(dtype))
        value = value - part
    return parts


def rows_in_use(cu_seqlens: Tensor, cu_seqlens_padded: Tensor, tokens: int) -> Tensor:
    """bool[tokens]: which rows of a ragged tensor belong to a sequence."""
    starts = cu_seqlens_padded[:-1].contiguous()
    ends = starts + cu_seqlens.diff()
    position = torch.arange(tokens, dtype=starts.dtype, device=starts.device)
    # Sequences lie in order, so a row belongs to the last one that starts at or before it.
    number = torch.searchsorted(starts, position, right=True) - 1
    return (number >= 0) & (position < ends[number.clamp(min=0)])
