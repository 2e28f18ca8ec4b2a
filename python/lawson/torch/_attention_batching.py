"""vmap of attention: a mapped axis becomes part of the batch, or of the heads.

One plan with a larger batch (or more heads) is what runs. Where neither can hold the axis (dropout,
whose mask is by position; offsets of its own for each element) the elements run one after another
with the plan of one, and the results are those of separate calls to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lawson._attention_setup import Setup
from lawson.torch import _attention_ops as ops
from lawson.torch import _attention_run as run


def _fold(value: Tensor, dim: int | None, axis: int, size: int) -> Tensor:
    """The mapped axis, in front of `axis` of an element, merged with it."""
    if dim is None:
        value = value.unsqueeze(axis).expand(*value.shape[:axis], size, *value.shape[axis:])
    else:
        value = value.movedim(dim, axis)
    return value.flatten(axis, axis + 1)


def _unfold(value: Tensor, axis: int, size: int) -> Tensor:
    shape = (*value.shape[:axis], size, value.shape[axis] // size, *value.shape[axis + 1 :])
    return value.reshape(shape)


def _folded(
    setup: Setup,
    text: str,
    which: str,
    place: str,
    size: int,
    args: Mapping[str, Tensor],
    dims: Mapping[str, int | None],
) -> tuple[dict[str, Tensor], dict[str, int | None]]:
    element = {
        name: tuple(n for i, n in enumerate(arg.shape) if i != dims[name])
        for name, arg in args.items()
    }
    sizes = setup.sizes({name: element[name] for name in setup.names})
    mapped_pages = (
        place == "b" and setup.paged and any(dims[name] is not None for name in ("k", "v"))
    )
    folded = []
    expanded_bias = False
    for name, given in args.items():
        arg, dim = given, dims[name]
        axis = setup.axis(name, place)
        if setup.paged and place == "b" and name in ("k", "v"):
            if mapped_pages:
                arg = _fold(arg, dim, setup.dims(name).index("p"), size)
            folded.append(arg)
            continue
        if axis is None:
            folded.append(arg)
            continue
        if name in ("bias", "mask") and element[name][axis] == 1:
            apart = name == "bias" and which == "backward" and setup.bias_grad
            if dim is None and not apart:
                folded.append(arg)
                continue
            # One for each element: as large as the dim that it is merged with.
            full = sizes["b" if place == "b" else "h"]
            expanded_bias |= apart
            at = axis if dim is None or axis < dim else axis + 1
            arg = arg.expand(*arg.shape[:at], full, *arg.shape[at + 1 :])
        value = _fold(arg, dim, axis, size)
        if mapped_pages and name.startswith("page_table"):
            step = torch.arange(size, dtype=value.dtype, device=value.device)
            value = value + (step.repeat_interleave(sizes["b"]) * sizes["p"])[:, None]
        folded.append(value)
    results = ops.call(which, setup, text, folded)
    outs: dict[str, Tensor] = {}
    out_dims: dict[str, int | None] = {}
    for name, result in zip(setup.result_names(which), results, strict=True):
        axis = setup.axis(name, place)
        assert axis is not None  # no result lacks it where a place was found
        value = _unfold(result, axis, size)
        if name == "dbias" and expanded_bias:
            wide = torch.promote_types(value.dtype, torch.float32)
            value = value.sum(axis + 1, keepdim=True, dtype=wide).to(value.dtype)
        outs[name] = value
        out_dims[name] = axis
    return outs, out_dims


def _one_by_one(
    setup: Setup,
    text: str,
    which: str,
    size: int,
    args: Mapping[str, Tensor],
    dims: Mapping[str, int | None],
) -> tuple[dict[str, Tensor], dict[str, int | None]]:
    names = setup.result_names(which)
    rows = [
        ops.call(
            which,
            setup,
            text,
            [x if dims[name] is None else x.select(dims[name], n) for name, x in args.items()],
        )
        for n in range(size)
    ]
    stacked = {name: torch.stack(list(x)) for name, x in zip(names, zip(*rows, strict=True))}
    return stacked, dict.fromkeys(names, 0)


def _of_nothing(
    setup: Setup,
    which: str,
    args: Mapping[str, Tensor],
    dims: Mapping[str, int | None],
) -> tuple[dict[str, Tensor], dict[str, int | None]]:
    """An axis without elements: results without elements."""
    elements = {
        name: x.new_empty([n for i, n in enumerate(x.shape) if i != dims[name]])
        for name, x in args.items()
    }
    forms = ops.described(which, setup, elements)
    outs = {
        name: args["q"].new_empty((0, *shape), dtype=getattr(torch, dtype))
        for name, (shape, _, dtype) in forms.items()
    }
    return outs, dict.fromkeys(outs, 0)


def rule(which: str) -> Callable[..., Any]:
    """What `torch.library.register_vmap` takes for a pass."""

    def batch(info: Any, in_dims: Sequence[int | None], *given: Any) -> Any:
        arguments = ops.ARGUMENTS[which]
        named = dict(zip(arguments, given, strict=False))
        named_dims = dict(zip(arguments, in_dims, strict=False))
        text = named["setup"]
        setup = run.setup_of(text)
        names = setup.operand_names(which)
        args = {name: named[name] for name in names}
        dims = {name: named_dims[name] for name in names}
        mapped = {name for name in names if dims[name] is not None}
        size = info.batch_size
        if size == 0:
            outs, out_dims = _of_nothing(setup, which, args, dims)
        elif place := setup.place_of_mapped(which, mapped):
            outs, out_dims = _folded(setup, text, which, place, size, args, dims)
        else:
            outs, out_dims = _one_by_one(setup, text, which, size, args, dims)
        absent = args["q"].new_empty(0)
        results = ops.RESULTS[which]
        return (
            tuple(outs.get(name, absent) for name in results),
            tuple(out_dims.get(name) for name in results),
        )

    return batch
