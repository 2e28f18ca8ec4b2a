"""Jagged nested tensors as ragged sequences, and results as nested tensors again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lawson import _settings
from lawson._errors import InvalidArgumentError, UnsupportedError


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Tokens of q, k and v in one axis, `[t, h, d]`, and what `attention` needs beside them."""

    q: Tensor
    k: Tensor
    v: Tensor
    offsets: dict[str, Any]
    given: Any  # the q that was given, as [b, s, h, d]
    heads_first: bool

    def back(self, x: Tensor) -> Tensor:
        """A result by token, nested as q was."""
        nested = torch.nested.nested_tensor_from_jagged(
            x,
            self.given.offsets(),
            self.given.lengths(),
            min_seqlen=self.given._maybe_min_seqlen,
            max_seqlen=self.offsets["max_seqlen_q"],
        )
        return nested.transpose(1, 2) if self.heads_first else nested


def ragged(layout: Any, q: Any, k: Any, v: Any) -> Ragged:
    """Of nested tensors in `bshd` or `bhsd`.

    The longest sequence is read where the tensor knows it, else it is computed, once, which waits
    for the device.
    """
    layout = _settings.word("layout", layout, ("bshd", "bhsd"))
    found = dict(zip("qkv", tokens_first(layout, {"q": q, "k": k, "v": v}), strict=True))
    offsets: dict[str, Any] = {}
    for name, side in (("q", "q"), ("k", "kv")):
        x = found[name]
        starts, lengths = x.offsets(), x.lengths()
        offsets[f"max_seqlen_{side}"] = max(1, int(x._get_max_seqlen()))
        if lengths is None:
            offsets[f"cu_seqlens_{side}"] = starts
        else:
            offsets[f"cu_seqlens_{side}_padded"] = starts
            offsets[f"cu_seqlens_{side}"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return Ragged(
        q=found["q"].values(),
        k=found["k"].values(),
        v=found["v"].values(),
        offsets=offsets,
        given=found["q"],
        heads_first=layout == "bhsd",
    )


def tokens_first(layout: str, given: Mapping[str, Any]) -> list[Any]:
    """q, k and v, by what messages call them, as `[b, s, h, d]`."""
    *_, key, value = given
    found: dict[str, Any] = {}
    for name, x in given.items():
        if isinstance(x, Tensor) and x.is_nested and x.layout != torch.jagged:
            raise UnsupportedError(
                f"{name}: a nested tensor of layout {x.layout}; Lawson takes torch.jagged ones"
            )
    for name, x in given.items():
        if not isinstance(x, Tensor) or not x.is_nested:
            raise InvalidArgumentError(
                f"{name}: is not nested, and another of {', '.join(given)} is; expected all three"
            )
        if x.dim() != 4:
            raise InvalidArgumentError(
                f"{name}: {x.dim()} dims; expected 4, those of layout '{layout}'"
            )
        turned: Any = x.transpose(1, 2) if layout == "bhsd" else x
        if turned._ragged_idx != 1:
            raise InvalidArgumentError(
                f"{name}: its ragged axis is not {layout.index('s')}, as in layout '{layout}'"
            )
        found[name] = turned
    starts = found[key].offsets()
    if found[value].offsets() is not starts and not torch.equal(found[value].offsets(), starts):
        raise InvalidArgumentError(
            f"{value}: its sequences are of other lengths than those of {key}"
        )
    return list(found.values())
