"""The arguments of `attention`: checked, and turned into the operands of its primitives.

An error names an argument as the user wrote it: `labels` are the names of another function for
those of `lawson.jax.attention`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from lawson import _settings
from lawson._attention_setup import DENSE, FLOATS, PACKED, Setup
from lawson._errors import InvalidArgumentError

_WORDS = (*DENSE, "thd")
_LAYOUTS = f"{', '.join(_WORDS)}, three of these joined by '_', or {', '.join(PACKED)}"
BIAS_KINDS = ("pre_scale", "post_scale")
SOFTMAXES = ("vanilla", "off_by_one")


class Labels(dict[str, str]):
    """What the user calls the arguments of `attention`; those that are not in it by their names."""

    def __missing__(self, name: str) -> str:
        return name


# ---- of one kind -------------------------------------------------------------------------------


def array(name: str, value: Any) -> Any:
    """An array of JAX's. Nothing that has no numbers is one."""
    try:
        if value is not None:
            return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError):
        pass
    _settings.refuse(name, value, "an array")


def floats(name: str, value: Any) -> Any:
    value = array(name, value)
    if value.dtype.name not in FLOATS:
        raise InvalidArgumentError(
            f"{name}: dtype {value.dtype.name} is not allowed; expected one of {', '.join(FLOATS)}"
        )
    return value


def integers(name: str, value: Any) -> Any:
    """i32; what is beyond its range becomes the nearest, not what the low bits are."""
    if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.integer):
        value = np.clip(value, -(1 << 31), (1 << 31) - 1)
    value = array(name, value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise InvalidArgumentError(
            f"{name}: dtype {value.dtype.name} is not allowed; expected integers, int32"
        )
    limits = np.iinfo(value.dtype)
    if limits.max > (1 << 31) - 1:
        value = jnp.clip(value, max(limits.min, -(1 << 31)), (1 << 31) - 1)
    return value.astype(jnp.int32)


def heads(name: str, value: Any) -> Any:
    """f32, a number for each head."""
    value = array(name, value)
    if value.dtype == np.dtype(bool) or not (
        jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    ):
        raise InvalidArgumentError(
            f"{name}: dtype {value.dtype.name} is not allowed; expected float32"
        )
    return value.astype(jnp.float32)


def number(name: str, value: Any, allowed: str, **limits: float) -> float:
    """A number that is known when the call is traced, also as an array of one."""
    if isinstance(value, jax.core.Tracer):
        raise InvalidArgumentError(
            f"{name}: {_settings.shown(value)} is not known when the program is made; expected "
            f"{allowed}, which is no array of the program"
        )
    is_array = isinstance(value, (jax.Array, np.ndarray))
    if is_array and value.ndim == 0 and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = value.item()
    return _settings.number(name, value, allowed, **limits)


def rank4(name: str, value: Any) -> Any:
    if value.ndim > 4:
        raise InvalidArgumentError(f"{name}: shape {value.shape}; expected at most [b, h, sq, skv]")
    return value.reshape((1,) * (4 - value.ndim) + value.shape)


def output_dtype(given: Any, own: Any) -> str | None:
    if given is None:
        return None
    allowed = f"None, or one of {', '.join(FLOATS)}"
    try:
        name = jnp.dtype(given).name
    except (TypeError, ValueError):
        _settings.refuse("output_dtype", given, allowed)
    if name not in FLOATS:
        _settings.refuse("output_dtype", name, allowed)
    if jax.dtypes.canonicalize_dtype(name).name != name:
        _settings.refuse("output_dtype", name, f"{allowed}; float64 needs jax_enable_x64")
    return None if name == own.name else name


def prng_key(name: str, given: Any) -> Any:
    """One key, of either form that JAX has."""
    allowed = "None, or one key: jax.random.key(seed)"
    key = array(name, given)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        try:
            key = jax.random.wrap_key_data(key)
        except TypeError:
            _settings.refuse(name, given, allowed)
    if key.ndim != 0:
        raise InvalidArgumentError(f"{name}: {key.shape} keys are not allowed; expected {allowed}")
    return key


def longest(name: str, given: Any) -> int | None:
    if given is None:
        return None
    allowed = "None, or a number of tokens from 1 to 2^40"
    return _settings.integer(name, given, allowed, least=1, most=1 << 40)


# ---- q, k and v --------------------------------------------------------------------------------


def unpacked(
    layout: Any, q: Any, k: Any, v: Any, labels: Mapping[str, str]
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
                    f"{other}: {_settings.shown(given)} is not allowed in layout '{layout}', where "
                    f"{name} holds it; expected None"
                )
        whole = array(name, whole)
        if whole.ndim != len(word) + 1 or whole.shape[axis] != count:
            raise InvalidArgumentError(
                f"{name}: shape {whole.shape}; layout '{layout}' has {len(word) + 1} dims, with "
                f"{count} at axis {axis}"
            )
        parts = [jax.lax.index_in_dim(whole, i, axis, keepdims=False) for i in range(count)]
        q, k, v = parts if count == 3 else (q, *parts)
        words = [word]
    words = words * 3 if len(words) == 1 else words
    arrays: list[Any] = []
    for name, given, word in zip("qkv", (q, k, v), words, strict=True):
        x = floats(labels[name], given)
        if x.ndim != len(word):
            raise InvalidArgumentError(
                f"{labels[name]}: shape {x.shape} has {x.ndim} dims; expected {len(word)}, "
                f"[{', '.join(word)}] in layout '{layout}'"
            )
        if arrays and x.dtype != arrays[0].dtype:
            raise InvalidArgumentError(
                f"{labels[name]}: dtype {x.dtype.name} differs from that of {labels['q']}, "
                f"{arrays[0].dtype.name}"
            )
        arrays.append(x)
    return (words[0], words[1], words[2]), arrays[0], arrays[1], arrays[2]


# ---- operands ----------------------------------------------------------------------------------


class Operands(dict[str, Any]):
    """Operands of an attention by their names in a `Setup`, checked as they are added."""

    def __init__(self, labels: Labels, words: Sequence[str], q: Any, k: Any, v: Any) -> None:
        super().__init__(q=q, k=k, v=v)
        self.labels = labels
        self.words = words

    def _fail(self, name: str, text: str) -> NoReturn:
        raise InvalidArgumentError(f"{self.labels[name]}: {text}")

    def size(self, name: str, letter: str) -> int:
        return int(self[name].shape[self.words["qkv".index(name)].index(letter)])

    def add_offsets(self, given: Mapping[str, Any]) -> None:
        """Offsets of the ragged sides; of the other side too where one has padded ones."""
        layout = "_".join(self.words)
        for name, offsets in given.items():
            tensor, word = ("q", self.words[0]) if "_q" in name else ("k", self.words[1])
            if word == "thd" and offsets is None and not name.endswith("_padded"):
                self._fail(
                    name, f"missing; layout '{layout}' is ragged and needs offsets, i32[b+1]"
                )
            if offsets is not None:
                if word != "thd":
                    self._fail(name, f"goes with a thd layout, and it is '{layout}'")
                value = integers(self.labels[name], offsets)
                self[name] = jnp.clip(value, 0, self[tensor].shape[0])
        padded = [name for name in self if name.endswith("_padded")]
        if len(padded) == 1 and self.words[0] == self.words[1] == "thd":
            other = "cu_seqlens_kv" if padded[0] == "cu_seqlens_q_padded" else "cu_seqlens_q"
            self[f"{other}_padded"] = self[other]

    def longest_sequence(self, side: str, given: int | None, paged: bool = False) -> int:
        """The longest sequence of a ragged side; 0 for a dense one, whose arrays say it."""
        word = self.words[0 if side == "q" else 1]
        if word == "thd":
            return int(self["q" if side == "q" else "k"].shape[0]) if given is None else given
        if given is not None and not paged:
            self._fail(
                f"max_seqlen_{side}",
                f"{given} is not allowed where {side} is not ragged ('{word}') or paged; its "
                "arrays say how long it is",
            )
        return 0

    def add_pages(self, table_k: Any, table_v: Any, most: int | None) -> int:
        """The page tables; returns the longest sequence of k and v."""
        tables = {}
        for name, word, table in zip("kv", self.words[1:], (table_k, table_v), strict=True):
            argument = f"page_table_{name}"
            if word == "thd":
                self._fail(argument, "the layout of paged k and v is bshd, sbhd or bhsd, not thd")
            tables[name] = integers(argument, table)
            if tables[name].ndim != 2:
                self._fail(
                    argument, f"shape {tables[name].shape}; expected [b, pages of a sequence]"
                )
        size = {name: self.size(name, "s") for name in "kv"}
        for name in "kv":
            if size[name] == 0:
                self._fail(name, f"shape {self[name].shape}: pages of 0 tokens hold nothing")
        if most is None:
            most = min(int(tables[name].shape[1]) * size[name] for name in "kv")
        for name in "kv":
            needed = max(1, math.ceil(most / size[name]))
            if tables[name].shape[1] < needed:
                self._fail(
                    f"page_table_{name}",
                    f"shape {tables[name].shape}: {tables[name].shape[1]} pages of {size[name]} "
                    f"tokens cannot hold max_seqlen_kv = {most}",
                )
            last = max(self.size(name, "b") - 1, 0)
            self[f"page_table_{name}"] = jnp.clip(tables[name][:, :needed], 0, last)
        return most

    def add_new(self, k_new: Any, v_new: Any) -> None:
        """What is appended to the caches k and v."""
        for name, given, other in (("k_new", k_new, "v_new"), ("v_new", v_new, "k_new")):
            if given is None:
                self._fail(name, f"missing; it comes together with {other}")
            self[name] = floats(self.labels[name], given)
            if self[name].dtype != self["q"].dtype:
                self._fail(
                    name,
                    f"dtype {self[name].dtype.name} differs from that of {self.labels['q']}, "
                    f"{self['q'].dtype.name}",
                )

    def check_new(self, sizes: Mapping[str, int]) -> None:
        """No more is appended than a sequence of the cache holds."""
        if sizes.get("a", 0) > sizes["t"]:
            self._fail(
                "k_new",
                f"shape {self['k_new'].shape} has {sizes['a']} new tokens; expected at most "
                f"{sizes['t']}, which a sequence of the cache holds",
            )

    def add_lengths(self, mask: str, longest_kv: int, seqlens_q: Any, seqlens_kv: Any) -> str:
        """Lengths of dense and paged sequences; returns the mask with its padding."""
        paged = "page_table_k" in self
        is_ragged = {"q": self.words[0] == "thd", "kv": self.words[1] == "thd"}
        for side, given in (("q", seqlens_q), ("kv", seqlens_kv)):
            if given is not None and is_ragged[side]:
                self._fail(f"seqlens_{side}", f"a ragged side has cu_seqlens_{side} instead")
        has_lengths = seqlens_q is not None or seqlens_kv is not None
        if not has_lengths and (not mask.startswith("padding") or all(is_ragged.values())):
            return mask
        if is_ragged["q"]:
            batch = self["cu_seqlens_q"].shape[0] - 1
        else:
            batch = self.size("q", "b")
        for side, given in (("q", seqlens_q), ("kv", seqlens_kv)):
            if is_ragged[side]:
                continue
            room = longest_kv if paged and side == "kv" else self.size(side[0], "s")
            whole = jnp.full((batch,), room, jnp.int32)
            name = f"seqlens_{side}"
            value = whole if given is None else integers(self.labels[name], given)
            self[f"seqlen_{side}"] = jnp.clip(value, 0, room)
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
            self["bias"] = rank4(self.labels["bias"], floats(self.labels["bias"], bias))
        if alibi or slopes is not None:
            if bias is not None:
                name = "alibi" if slopes is None else "alibi_slopes"
                self._fail(name, "not together with bias; add its terms to the bias")
            kind = "alibi"
            if slopes is not None:
                self["slopes"] = heads("alibi_slopes", slopes)
        if attn_mask is not None:
            given = rank4(self.labels["attn_mask"], array(self.labels["attn_mask"], attn_mask))
            if given.dtype.name not in ("bool", *FLOATS):
                self._fail(
                    "attn_mask",
                    f"dtype {given.dtype.name} is not allowed; expected one of bool, "
                    f"{', '.join(FLOATS)}",
                )
            self["mask"] = given
        if sink is not None:
            self["sink"] = heads(self.labels["sink"], sink)
        return kind

    def add_dropout(self, rate: float, key: Any, mask: Any, returned: bool) -> None:
        """The mask, or the seed and offset that the key makes."""
        if key is not None:
            key = prng_key(self.labels["dropout_key"], key)
        if rate == 0:
            for name, given in (
                ("dropout_mask", mask is not None),
                ("return_dropout_mask", returned),
            ):
                if given:
                    self._fail(name, "goes with a dropout_rate above 0")
            return
        if (key is None) == (mask is None):
            self._fail(
                "dropout_rate",
                f"{rate} needs dropout_key (jax.random.key) or dropout_mask, and one of them",
            )
        if mask is not None:
            given = array("dropout_mask", mask)
            if given.dtype.name not in ("uint8", "bool"):
                self._fail(
                    "dropout_mask",
                    f"dtype {given.dtype.name} is not allowed; expected uint8 or bool, 0 drops",
                )
            self["dropout_mask"] = given.astype(jnp.uint8)
            return
        bits = jax.random.bits(key, (4,), jnp.uint32)
        self["seed"], self["offset"] = bits[:2], bits[2:]

    def checked(self, setup: Setup) -> dict[str, int]:
        """The sizes of the call's dims, which agree."""
        sizes = setup.sizes({name: self[name].shape for name in setup.names}, self.labels)
        self.check_new(sizes)
        return sizes
