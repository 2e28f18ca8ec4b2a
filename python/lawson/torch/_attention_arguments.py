"""The arguments of `attention`: checked, and turned into the operands of a Setup.

An error names an argument as the user wrote it: `labels` are the names of another function for
those of `lawson.torch.attention`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from lawson import _settings
from lawson._attention_setup import DENSE, FLOATS, OPTIONAL, PACKED
from lawson._errors import InvalidArgumentError
from lawson.torch._attention_sharding import is_distributed, seed_of_shard

_WORDS = (*DENSE, "thd")
_LAYOUTS = f"{', '.join(_WORDS)}, three of these joined by '_', or {', '.join(PACKED)}"
BIAS_KINDS = ("pre_scale", "post_scale")
SOFTMAXES = ("vanilla", "off_by_one")
FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def type_text(x: Tensor) -> str:
    """ "float32" for a dtype in a message."""
    return str(x.dtype)[6:]


# ---- of one kind -------------------------------------------------------------------------------


_ASKS_NOBODY: Any = torch._C._disabled_torch_function_impl
_USUAL: Any = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def is_foreign(kind: type) -> bool:
    """A class of tensors that says itself what torch's functions do with it."""
    asked: Any = getattr(kind, "__torch_function__", _ASKS_NOBODY)
    if asked is _ASKS_NOBODY or issubclass(kind, NestedTensor):
        return False
    return getattr(asked, "__func__", asked) is not _USUAL


def tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        _settings.refuse(name, value, "a torch.Tensor")
    if type(value) is not Tensor and is_foreign(type(value)):
        raise InvalidArgumentError(
            f"{name}: a {type(value).__qualname__}, which says itself what torch's functions do with "
            "it, is not allowed; expected a plain torch.Tensor"
        )
    if value.layout is not torch.strided:
        raise InvalidArgumentError(
            f"{name}: a tensor of layout {value.layout} is not allowed here; expected torch.strided"
        )
    return value


def causal_bias(name: str, bias: CausalBias, rows: int, columns: int) -> str:
    """The mask that torch's causal bias stands for."""
    if (bias.seq_len_q, bias.seq_len_kv) != (rows, columns):
        raise InvalidArgumentError(
            f"{name}: a causal bias of {bias.seq_len_q} x {bias.seq_len_kv}; expected "
            f"{rows} x {columns}, as query and key say"
        )
    return "causal" if bias.variant == CausalVariant.UPPER_LEFT else "causal_bottom_right"


def floats(name: str, value: Any) -> Tensor:
    x = tensor(name, value)
    float_type(name, x.dtype)
    return x


def float_type(name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOAT_TYPES:
        raise InvalidArgumentError(
            f"{name}: dtype {str(dtype)[6:]} is not allowed; expected one of {', '.join(FLOATS)}"
        )


def integers(name: str, value: Any, least: int, most: int) -> Tensor:
    """i32, what is out of the range cut off."""
    x = tensor(name, value)
    if x.dtype not in _INTEGERS:
        raise InvalidArgumentError(
            f"{name}: dtype {type_text(x)} is not allowed; expected integers, int32"
        )
    if x.dtype.itemsize < 4:  # which may not hold the bounds
        x = x.to(torch.int32)
    return x.clamp(least, most).to(torch.int32)


def heads(name: str, value: Any) -> Tensor:
    """f32, a number for each head."""
    x = tensor(name, value)
    if not x.dtype.is_floating_point:
        raise InvalidArgumentError(f"{name}: dtype {type_text(x)} is not allowed; expected float32")
    return x.to(torch.float32)


def rank4(name: str, value: Tensor) -> Tensor:
    """`[b, h, sq, skv]`, with 1 for what is missing in front, and for what was expanded.

    Where it has a gradient, that is of each element, so nothing is left out.
    """
    if value.dim() > 4:
        raise InvalidArgumentError(
            f"{name}: shape {tuple(value.shape)}; expected at most [b, h, sq, skv]"
        )
    if value.dim() < 4:
        value = value.reshape((1,) * (4 - value.dim()) + tuple(value.shape))
    return value if value.requires_grad else once(value)


def once(value: Tensor) -> Tensor:
    """With size 1 where a tensor was expanded."""
    strides = value.stride()
    if 0 not in strides:
        return value
    for axis, stride in enumerate(strides):
        if stride == 0 and value.shape[axis] > 1:
            value = value.narrow(axis, 0, 1)
    return value


def output_dtype(given: Any, own: torch.dtype) -> str | None:
    if given is None or given == own:
        return None
    if given not in FLOAT_TYPES:
        _settings.refuse("output_dtype", given, f"None, or one of {', '.join(FLOATS)} of torch")
    return str(given)[6:]


def autocast(q: Any, *others: Any) -> tuple[Any, ...]:
    """These tensors (or None) in the dtype that autocast computes attention in on q's device."""
    given = (q, *others)
    device = q.device.type if isinstance(q, Tensor) else ""
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return given
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Any) -> Any:
        is_cast = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if is_cast else x

    return tuple(cast(x) for x in given)


def longest(name: str, given: Any) -> int | None:
    if given is None:
        return None
    if isinstance(given, torch.SymInt):
        given = int(given)
    return _settings.integer(name, given, "None, or a number of tokens, 1 or more", least=1)


# ---- q, k and v --------------------------------------------------------------------------------


def unpacked(
    layout: Any, q: Any, k: Any, v: Any
) -> tuple[tuple[str, str, str], Tensor, Tensor, Tensor]:
    """The layout's word for each of q, k and v, and the three."""
    words = layout.split("_") if isinstance(layout, str) else []
    packed = isinstance(layout, str) and layout in PACKED
    if not packed and (len(words) not in (1, 3) or any(word not in _WORDS for word in words)):
        _settings.refuse("layout", layout, f"one of {_LAYOUTS}")
    if packed:
        word, axis, count = PACKED[layout]
        name, whole, rest = ("q", q, {"k": k, "v": v}) if count == 3 else ("k", k, {"v": v})
        for other, given in rest.items():
            if given is not None:
                raise InvalidArgumentError(
                    f"{other}: {_settings.shown(given)} is not allowed in layout '{layout}', where "
                    f"{name} holds it; expected None"
                )
        whole = tensor(name, whole)
        if whole.dim() != len(word) + 1 or whole.shape[axis] != count:
            raise InvalidArgumentError(
                f"{name}: shape {tuple(whole.shape)}; layout '{layout}' has {len(word) + 1} dims, "
                f"with {count} at axis {axis}"
            )
        parts = whole.unbind(axis)
        q, k, v = parts if count == 3 else (q, *parts)
        words = [word]
    words = words * 3 if len(words) == 1 else words
    found: list[Tensor] = []
    for name, given, word in zip("qkv", (q, k, v), words, strict=True):
        x = floats(name, given)
        if x.dim() != len(word):
            raise InvalidArgumentError(
                f"{name}: shape {tuple(x.shape)} has {x.dim()} dims; expected {len(word)}, "
                f"[{', '.join(word)}] in layout '{layout}'"
            )
        if found and x.dtype != found[0].dtype:
            raise InvalidArgumentError(
                f"{name}: dtype {type_text(x)} differs from that of q, {type_text(found[0])}"
            )
        found.append(x)
    return (words[0], words[1], words[2]), found[0], found[1], found[2]


# ---- operands ----------------------------------------------------------------------------------


class Operands:
    """Operands of an attention by their names in a `Setup`, checked as they are added."""

    def __init__(self, words: Sequence[str], q: Tensor, k: Tensor, v: Tensor) -> None:
        self.words = words
        self.labels: tuple[tuple[str, str], ...] = ()  # of operands that have another name
        self.named: dict[str, Tensor] = {"q": q, "k": k, "v": v}

    def in_order(self) -> dict[str, Tensor]:
        """As a call passes them."""
        names = ("q", "k", "v", *(name for name in OPTIONAL if name in self.named))
        return {name: self.named[name] for name in names}

    def _fail(self, name: str, text: str) -> NoReturn:
        raise InvalidArgumentError(f"{name}: {text}")

    def size(self, name: str, letter: str) -> int:
        return self.named[name].shape[self.words["qkv".index(name)].index(letter)]

    def add_offsets(self, given: Mapping[str, Any]) -> None:
        """Offsets of the ragged sides; of the other side too where one has padded ones."""
        layout = "_".join(self.words)
        for name, offsets in given.items():
            side, word = ("q", self.words[0]) if "_q" in name else ("k", self.words[1])
            if word == "thd" and offsets is None and not name.endswith("_padded"):
                self._fail(
                    name, f"missing; layout '{layout}' is ragged and needs offsets, i32[b+1]"
                )
            if offsets is not None:
                if word != "thd":
                    self._fail(name, f"goes with a thd layout, and it is '{layout}'")
                self.named[name] = integers(name, offsets, 0, self.named[side].shape[0])
        padded = [name for name in self.named if name.endswith("_padded")]
        if len(padded) == 1 and self.words[0] == self.words[1] == "thd":
            other = "cu_seqlens_kv" if padded[0] == "cu_seqlens_q_padded" else "cu_seqlens_q"
            self.named[f"{other}_padded"] = self.named[other]

    def longest_sequence(self, side: str, given: int | None, paged: bool) -> int:
        """The longest sequence of a ragged side; 0 for a dense one, whose tensors say it."""
        word = self.words[0 if side == "q" else 1]
        if word == "thd":
            tokens = self.named["q" if side == "q" else "k"].shape[0]
            return max(1, int(tokens)) if given is None else given
        if given is not None and not paged:
            self._fail(
                f"max_seqlen_{side}",
                f"{given} is not allowed where {side} is not ragged ('{word}') or paged; its "
                "tensors say how long it is",
            )
        return 0

    def add_pages(self, table_k: Any, table_v: Any, most: int | None) -> int:
        """The page tables; returns the longest sequence of k and v."""
        size = {}
        for name, word, table in zip("kv", self.words[1:], (table_k, table_v), strict=True):
            argument = f"page_table_{name}"
            if word == "thd":
                self._fail(argument, "the layout of paged k and v is bshd, sbhd or bhsd, not thd")
            if tensor(argument, table).dim() != 2:
                self._fail(
                    argument, f"shape {tuple(table.shape)}; expected [b, pages of a sequence]"
                )
            size[name] = int(self.size(name, "s"))
            if size[name] == 0:
                self._fail(
                    name, f"shape {tuple(self.named[name].shape)}: pages of 0 tokens hold nothing"
                )
        tables = {"k": table_k, "v": table_v}
        if most is None:
            most = min(int(tables[name].shape[1]) * size[name] for name in "kv")
        for name in "kv":
            needed = max(1, math.ceil(most / size[name]))
            if tables[name].shape[1] < needed:
                self._fail(
                    f"page_table_{name}",
                    f"shape {tuple(tables[name].shape)}: {tables[name].shape[1]} pages of "
                    f"{size[name]} tokens cannot hold max_seqlen_kv = {most}",
                )
            last = max(self.size(name, "b") - 1, 0)
            argument = f"page_table_{name}"
            self.named[argument] = integers(argument, tables[name][:, :needed], 0, last)
        return most

    def add_new(self, k_new: Any, v_new: Any) -> None:
        """What is appended to the caches k and v."""
        for name, given, other in (("k_new", k_new, "v_new"), ("v_new", v_new, "k_new")):
            if given is None:
                self._fail(name, f"missing; it comes together with {other}")
            x = floats(name, given)
            if x.dtype != self.named["q"].dtype:
                self._fail(
                    name,
                    f"dtype {type_text(x)} differs from that of q, {type_text(self.named['q'])}",
                )
            self.named[name] = x

    def add_lengths(self, mask: str, longest_kv: int, seqlens_q: Any, seqlens_kv: Any) -> str:
        """Lengths of dense and paged sequences; returns the mask with its padding."""
        paged = "page_table_k" in self.named
        is_ragged = {"q": self.words[0] == "thd", "kv": self.words[1] == "thd"}
        for side, given in (("q", seqlens_q), ("kv", seqlens_kv)):
            if given is not None and is_ragged[side]:
                self._fail(f"seqlens_{side}", f"a ragged side has cu_seqlens_{side} instead")
        has_lengths = seqlens_q is not None or seqlens_kv is not None
        if not has_lengths and (not mask.startswith("padding") or all(is_ragged.values())):
            return mask
        if is_ragged["q"]:
            batch = self.named["cu_seqlens_q"].shape[0] - 1
        else:
            batch = self.size("q", "b")
        for side, given in (("q", seqlens_q), ("kv", seqlens_kv)):
            if is_ragged[side]:
                continue
            room = longest_kv if paged and side == "kv" else self.size(side[0], "s")
            name = f"seqlen_{side}"
            if given is None:
                q = self.named["q"]
                self.named[name] = q.new_full((batch,), room, dtype=torch.int32)
            else:
                self.named[name] = integers(f"seqlens_{side}", given, 0, room)
        if mask.startswith("padding"):
            return mask
        return "padding" if mask == "none" else f"padding_{mask}"

    def add_scores(
        self, bias: Any, bias_kind: Any, attn_mask: Any, alibi: bool, slopes: Any, sink: Any
    ) -> str:
        """What is added to the scores; returns the kind of bias."""
        kind = _settings.word("bias_kind", bias_kind, BIAS_KINDS)
        if bias is None:
            if kind != "post_scale":
                self._fail("bias_kind", f"'{kind}' says what a bias is, and bias is None")
            kind = "none"
        else:
            self.named["bias"] = rank4("bias", floats("bias", bias))
        if alibi or slopes is not None:
            if bias is not None:
                name = "alibi" if slopes is None else "alibi_slopes"
                self._fail(name, "not together with bias; add its terms to the bias")
            kind = "alibi"
            if slopes is not None:
                self.named["slopes"] = heads("alibi_slopes", slopes)
        if attn_mask is not None:
            given = tensor("attn_mask", attn_mask)
            if given.dtype != torch.bool and given.dtype not in FLOAT_TYPES:
                self._fail(
                    "attn_mask",
                    f"dtype {type_text(given)} is not allowed; expected one of bool, "
                    f"{', '.join(FLOATS)}",
                )
            kind = self.add_mask("attn_mask", given, kind)
        if sink is not None:
            self.named["sink"] = heads("sink", sink)
        return kind

    def add_mask(self, name: str, given: Tensor, kind: str) -> str:
        """A mask, as a bias where it is learnt and there is none; returns the kind of bias."""
        given = rank4(name, given)
        if kind == "none" and given.requires_grad and torch.is_grad_enabled():
            self.named["bias"] = given
            self.labels = (("bias", name),)
            # A bias that hides a whole row is not one that every engine takes; a mask may.
            self.named["mask"] = given.detach() != -math.inf
            return "post_scale"
        self.named["mask"] = given
        return kind

    def add_dropout(
        self, rate: float, generator: torch.Generator | None, mask: Any, returned: bool
    ) -> None:
        """The mask, or seed and offset that the generator draws."""
        if generator is not None:
            if not isinstance(generator, torch.Generator):
                _settings.refuse("generator", generator, "None, or a torch.Generator")
            where = self.named["q"].device.type
            if generator.device.type != where:
                self._fail(
                    "generator", f"of device {generator.device}; expected one of {where}, as q"
                )
        if rate == 0:
            for name, is_given in (
                ("dropout_mask", mask is not None),
                ("return_dropout_mask", returned),
            ):
                if is_given:
                    self._fail(name, "goes with a dropout_rate above 0")
            return
        if mask is not None:
            if generator is not None:
                self._fail("generator", "not together with dropout_mask, which is the mask itself")
            given = tensor("dropout_mask", mask)
            if given.dtype not in (torch.uint8, torch.bool):
                self._fail(
                    "dropout_mask",
                    f"dtype {type_text(given)} is not allowed; expected uint8 or bool, 0 drops",
                )
            self.named["dropout_mask"] = given.to(torch.uint8)
            return
        self.named["seed"], self.named["offset"] = seeds(self.named["q"], generator)


def seeds(q: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Seed and offset of the engine's Philox, i64[1] each, drawn on q's device by torch.

    On the device, so that a captured CUDA graph draws others at each replay: torch registers its
    generator's state with the graph.
    """
    drawn = torch.randint(
        0, (1 << 63) - 1, (4,), dtype=torch.int64, device=q.device, generator=generator
    )
    if is_distributed(q):
        drawn = seed_of_shard(q, drawn)
    return drawn[0:1], drawn[2:3]  # 16 bytes apart, as plans take them
