"""The arguments of attention: one set of rules for every frontend.

A frontend says what its arrays are, in a class of `Operands`; what is checked, in which order and
in which words, stands here. An error names an argument as the user wrote it: `labels` are the names
of another function for those of the frontend's `attention`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from lawson import _settings
from lawson._attention_setup import DENSE, FLOATS, OPTIONAL, PACKED
from lawson._errors import InvalidArgumentError

_WORDS = (*DENSE, "thd")
_LAYOUTS = f"{', '.join(_WORDS)}, three of these joined by '_', or {', '.join(PACKED)}"
_BIAS_KINDS = ("pre_scale", "post_scale")
SOFTMAXES = ("vanilla", "off_by_one")
OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


class Range(NamedTuple):
    """Of the numbers that an argument takes."""

    allowed: str
    least: float = -math.inf
    below: float = math.inf


RANGES = {
    "rate": Range("a number from 0 to below 1", 0, 1),
    "scale": Range("None, or a finite number (multiply q by what is computed)"),
    "softcap": Range("0 (none), or a number up to 1e30", 0, math.nextafter(1e30, math.inf)),
}


def number(name: str, value: Any, kind: str) -> float:
    """A number of this kind of `RANGES`."""
    limits = RANGES[kind]
    return _settings.number(name, value, limits.allowed, least=limits.least, below=limits.below)


def longest(name: str, given: Any) -> int | None:
    """The longest sequence, as the user says it."""
    if given is None:
        return None
    allowed = "None, or a number of tokens from 1 to 2^40"
    return _settings.integer(name, given, allowed, least=1, most=1 << 40)


def check_float(name: str, dtype: str) -> None:
    if dtype not in FLOATS:
        raise InvalidArgumentError(
            f"{name}: dtype {dtype} is not allowed; expected one of {', '.join(FLOATS)}"
        )


def check_together(given: Mapping[str, Any], labels: Mapping[str, str]) -> None:
    """Refuses what has no meaning without another argument, or beside one."""

    def missing(name: str, needed: str, why: str) -> None:
        if given[name] is not None and given[needed] is None:
            named = labels.get(name, name), labels.get(needed, needed)
            raise InvalidArgumentError(f"{named[0]}: goes with {named[1]}, {why}")

    missing("page_table_v", "page_table_k", "which is None")
    for name in ("page_table_k", "k_new", "v_new"):
        missing(name, "seqlens_kv", "the lengths, which are None")
    if given["sink"] is not None and given["softmax"] != "vanilla":
        raise InvalidArgumentError(
            f"softmax: {_settings.shown(given['softmax'])} together with sink, which is one itself; "
            "expected 'vanilla'"
        )


class Operands(ABC):
    """Operands of an attention by their names in a `Setup`, checked as they are added.

    Args:
      labels: what the user calls the arguments of `attention`, where that is another name.
      words: the layout of q, of k and of v.
    """

    def __init__(
        self, labels: Mapping[str, str], words: Sequence[str], q: Any, k: Any, v: Any
    ) -> None:
        self.labels = dict(labels)
        self.words = words
        self.named: dict[str, Any] = {"q": q, "k": k, "v": v}

    # ---- what a frontend's arrays are ----------------------------------------------------------

    @staticmethod
    @abstractmethod
    def array(name: str, value: Any) -> Any:
        """An array of the frontend; refused by its name where it is none."""

    @staticmethod
    @abstractmethod
    def dtype(x: Any) -> str:
        """As in "float32"."""

    @staticmethod
    @abstractmethod
    def cast(x: Any, dtype: str) -> Any: ...

    @staticmethod
    @abstractmethod
    def integers(name: str, value: Any, least: int, most: int) -> Any:
        """i32 from integers of any width, what is out of the range cut off."""

    @staticmethod
    @abstractmethod
    def unstacked(x: Any, axis: int, count: int) -> Sequence[Any]:
        """The arrays that lie at each of the `count` places of an axis."""

    @abstractmethod
    def filled(self, size: int, value: int) -> Any:
        """i32[size], beside q."""

    # ---- of one kind ---------------------------------------------------------------------------

    @classmethod
    def floats(cls, name: str, value: Any) -> Any:
        x = cls.array(name, value)
        check_float(name, cls.dtype(x))
        return x

    @classmethod
    def heads(cls, name: str, value: Any) -> Any:
        """f32, a number for each head."""
        x = cls.array(name, value)
        if not cls.dtype(x).startswith(("float", "bfloat", "int", "uint")):
            raise InvalidArgumentError(
                f"{name}: dtype {cls.dtype(x)} is not allowed; expected float32"
            )
        return cls.cast(x, "float32")

    @classmethod
    def rank4(cls, name: str, x: Any) -> Any:
        """`[b, h, sq, skv]`, with 1 for what is missing in front."""
        if x.ndim > 4:
            raise InvalidArgumentError(
                f"{name}: shape {tuple(x.shape)}; expected at most [b, h, sq, skv]"
            )
        return x if x.ndim == 4 else x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))

    # ---- q, k and v ----------------------------------------------------------------------------

    @classmethod
    def unpacked(
        cls, layout: Any, q: Any, k: Any, v: Any, labels: Mapping[str, str]
    ) -> tuple[tuple[str, str, str], Any, Any, Any]:
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
                        f"{other}: {_settings.shown(given)} is not allowed in layout '{layout}', "
                        f"where {name} holds it; expected None"
                    )
            whole = cls.array(name, whole)
            if whole.ndim != len(word) + 1 or whole.shape[axis] != count:
                raise InvalidArgumentError(
                    f"{name}: shape {tuple(whole.shape)}; layout '{layout}' has {len(word) + 1} "
                    f"dims, with {count} at axis {axis}"
                )
            parts = cls.unstacked(whole, axis, count)
            q, k, v = parts if count == 3 else (q, *parts)
            words = [word]
        words = words * 3 if len(words) == 1 else words
        found: list[Any] = []
        for name, given, word in zip("qkv", (q, k, v), words, strict=True):
            label = labels.get(name, name)
            x = cls.floats(label, given)
            if x.ndim != len(word):
                raise InvalidArgumentError(
                    f"{label}: shape {tuple(x.shape)} has {x.ndim} dims; expected {len(word)}, "
                    f"[{', '.join(word)}] in layout '{layout}'"
                )
            if found and x.dtype != found[0].dtype:
                raise InvalidArgumentError(
                    f"{label}: dtype {cls.dtype(x)} differs from that of {labels.get('q', 'q')}, "
                    f"{cls.dtype(found[0])}"
                )
            found.append(x)
        return (words[0], words[1], words[2]), found[0], found[1], found[2]

    # ---- beside q, k and v ---------------------------------------------------------------------

    def in_order(self) -> dict[str, Any]:
        """As a call passes them."""
        names = ("q", "k", "v", *(name for name in OPTIONAL if name in self.named))
        return {name: self.named[name] for name in names}

    def label(self, name: str) -> str:
        return self.labels.get(name, name)

    def fail(self, name: str, text: str) -> NoReturn:
        raise InvalidArgumentError(f"{self.label(name)}: {text}")

    def size(self, name: str, letter: str) -> int:
        return int(self.named[name].shape[self.words["qkv".index(name)].index(letter)])

    def add_offsets(self, given: Mapping[str, Any]) -> None:
        """Offsets of the ragged sides; of the other side too where one has padded ones."""
        layout = "_".join(self.words)
        for name, offsets in given.items():
            tensor, word = ("q", self.words[0]) if "_q" in name else ("k", self.words[1])
            if word == "thd" and offsets is None and not name.endswith("_padded"):
                self.fail(name, f"missing; layout '{layout}' is ragged and needs offsets, i32[b+1]")
            if offsets is not None:
                if word != "thd":
                    self.fail(name, f"goes with a thd layout, and it is '{layout}'")
                tokens = self.named[tensor].shape[0]
                self.named[name] = self.integers(self.label(name), offsets, 0, tokens)
        padded = [name for name in self.named if name.endswith("_padded")]
        if len(padded) == 1 and self.words[0] == self.words[1] == "thd":
            other = "cu_seqlens_kv" if padded[0] == "cu_seqlens_q_padded" else "cu_seqlens_q"
            self.named[f"{other}_padded"] = self.named[other]

    def longest_sequence(self, side: str, given: int | None, paged: bool = False) -> int:
        """The longest sequence of a ragged side; 0 for a dense one, whose array says it."""
        word = self.words[0 if side == "q" else 1]
        if word == "thd":
            tokens = self.named["q" if side == "q" else "k"].shape[0]
            return max(1, int(tokens)) if given is None else given
        if given is not None and not paged:
            self.fail(
                f"max_seqlen_{side}",
                f"{given} is not allowed where {side} is not ragged ('{word}') or paged; its "
                "array says how long it is",
            )
        return 0

    def add_pages(self, table_k: Any, table_v: Any, most: int | None) -> int:
        """The page tables; returns the longest sequence of k and v."""
        tables, size = {}, {}
        for name, word, given in zip("kv", self.words[1:], (table_k, table_v), strict=True):
            argument = f"page_table_{name}"
            if word == "thd":
                self.fail(argument, "the layout of paged k and v is bshd, sbhd or bhsd, not thd")
            last = max(self.size(name, "b") - 1, 0)
            table = self.integers(self.label(argument), given, 0, last)
            if table.ndim != 2:
                self.fail(
                    argument, f"shape {tuple(table.shape)}; expected [b, pages of a sequence]"
                )
            size[name] = self.size(name, "s")
            if size[name] == 0:
                shape = tuple(self.named[name].shape)
                self.fail(name, f"shape {shape}: pages of 0 tokens hold nothing")
            tables[name] = table
        if most is None:
            most = min(int(tables[name].shape[1]) * size[name] for name in "kv")
        for name, table in tables.items():
            needed = max(1, math.ceil(most / size[name]))
            if table.shape[1] < needed:
                self.fail(
                    f"page_table_{name}",
                    f"shape {tuple(table.shape)}: {table.shape[1]} pages of {size[name]} tokens "
                    f"cannot hold max_seqlen_kv = {most}",
                )
            self.named[f"page_table_{name}"] = table[:, :needed]
        return most

    def add_new(self, k_new: Any, v_new: Any) -> None:
        """What is appended to the caches k and v."""
        for name, given, other in (("k_new", k_new, "v_new"), ("v_new", v_new, "k_new")):
            if given is None:
                self.fail(name, f"missing; it comes together with {other}")
            x, q = self.floats(self.label(name), given), self.named["q"]
            if x.dtype != q.dtype:
                self.fail(
                    name,
                    f"dtype {self.dtype(x)} differs from that of {self.label('q')}, "
                    f"{self.dtype(q)}",
                )
            self.named[name] = x

    def add_lengths(self, mask: str, longest_kv: int, seqlens_q: Any, seqlens_kv: Any) -> str:
        """Lengths of dense and paged sequences; returns the mask with its padding."""
        paged = "page_table_k" in self.named
        is_ragged = {"q": self.words[0] == "thd", "kv": self.words[1] == "thd"}
        for side, given in (("q", seqlens_q), ("kv", seqlens_kv)):
            if given is not None and is_ragged[side]:
                self.fail(f"seqlens_{side}", f"a ragged side has cu_seqlens_{side} instead")
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
            if given is None:
                lengths = self.filled(batch, room)
            else:
                lengths = self.integers(self.label(f"seqlens_{side}"), given, 0, room)
            self.named[f"seqlen_{side}"] = lengths
        if mask.startswith("padding"):
            return mask
        return "padding" if mask == "none" else f"padding_{mask}"

    def add_scores(
        self, bias: Any, bias_kind: Any, attn_mask: Any, alibi: bool, slopes: Any, sink: Any
    ) -> str:
        """What is added to the scores; returns the kind of bias."""
        kind = _settings.word("bias_kind", bias_kind, _BIAS_KINDS)
        if bias is None:
            if kind != "post_scale":
                self.fail("bias_kind", f"'{kind}' says what a bias is, and bias is None")
            kind = "none"
        else:
            name = self.label("bias")
            self.named["bias"] = self.rank4(name, self.floats(name, bias))
        if alibi or slopes is not None:
            if bias is not None:
                name = "alibi" if slopes is None else "alibi_slopes"
                self.fail(name, "not together with bias; add its terms to the bias")
            kind = "alibi"
            if slopes is not None:
                self.named["slopes"] = self.heads("alibi_slopes", slopes)
        if attn_mask is not None:
            name = self.label("attn_mask")
            given = self.array(name, attn_mask)
            if self.dtype(given) not in ("bool", *FLOATS):
                self.fail(
                    "attn_mask",
                    f"dtype {self.dtype(given)} is not allowed; expected one of bool, "
                    f"{', '.join(FLOATS)}",
                )
            kind = self.add_mask(given, kind)
        if sink is not None:
            self.named["sink"] = self.heads(self.label("sink"), sink)
        return kind

    def add_mask(self, given: Any, kind: str) -> str:
        """A mask of an allowed dtype; returns the kind of bias."""
        self.named["mask"] = self.rank4(self.label("attn_mask"), given)
        return kind

    def add_dropout_mask(self, rate: float, mask: Any, returned: bool) -> bool:
        """The mask, where it is given; returns whether one has to be drawn."""
        if rate == 0:
            for name, is_given in (
                ("dropout_mask", mask is not None),
                ("return_dropout_mask", returned),
            ):
                if is_given:
                    self.fail(name, "goes with a dropout_rate above 0")
            return False
        if mask is None:
            return True
        given = self.array("dropout_mask", mask)
        if self.dtype(given) not in ("uint8", "bool"):
            self.fail(
                "dropout_mask",
                f"dtype {self.dtype(given)} is not allowed; expected uint8 or bool, 0 drops",
            )
        self.named["dropout_mask"] = self.cast(given, "uint8")
        return False
