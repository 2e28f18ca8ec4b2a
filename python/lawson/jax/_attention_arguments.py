"""The arguments of `attention`: checked, and turned into the operands of its primitives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lawson._attention_setup import DENSE, FLOATS
from lawson._errors import InvalidArgumentError

# Packed layouts: where the packed axis is, and which tensors it holds.
_PACKED = {
    "bs3hd": ("bshd", 2, 3),
    "sb3hd": ("sbhd", 2, 3),
    "t3hd": ("thd", 1, 3),
    "bsh3d": ("bshd", 3, 3),
    "sbh3d": ("sbhd", 3, 3),
    "th3d": ("thd", 2, 3),
    "bshd_bs2hd": ("bshd", 2, 2),
    "sbhd_sb2hd": ("sbhd", 2, 2),
    "thd_t2hd": ("thd", 1, 2),
    "bshd_bsh2d": ("bshd", 3, 2),
    "sbhd_sbh2d": ("sbhd", 3, 2),
    "thd_th2d": ("thd", 2, 2),
}


def unpacked(layout: str, q: Any, k: Any, v: Any) -> tuple[tuple[str, str, str], Any, Any, Any]:
    if layout in _PACKED:
        word, axis, count = _PACKED[layout]
        packed, missing = (q, (k, v)) if count == 3 else (k, (v,))
        if packed is None or any(x is not None for x in missing):
            raise InvalidArgumentError(
                f"layout: in '{layout}', "
                + (
                    "q holds q, k and v; k and v are None"
                    if count == 3
                    else "k holds k and v; v is None"
                )
            )
        packed = jnp.asarray(packed)
        if packed.ndim != len(word) + 1 or packed.shape[axis] != count:
            raise InvalidArgumentError(
                f"layout: '{layout}' has {len(word) + 1} dims with {count} at axis {axis}; the "
                f"array is {packed.shape}"
            )
        parts = [jax.lax.index_in_dim(packed, i, axis, keepdims=False) for i in range(count)]
        first, second, third = parts if count == 3 else [q, *parts]
        return (word, word, word), first, second, third
    if k is None or v is None:
        raise InvalidArgumentError(f"k and v: missing; layout '{layout}' is not packed")
    words = layout.split("_")
    if len(words) == 1:
        words *= 3
    if len(words) != 3 or any(word not in (*DENSE, "thd") for word in words):
        raise InvalidArgumentError(
            f"layout: '{layout}' is none of {', '.join((*DENSE, 'thd'))}, three of these joined by "
            f"'_', or {', '.join(_PACKED)}"
        )
    return (words[0], words[1], words[2]), q, k, v


def check_dtypes(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype.name not in FLOATS:
            raise InvalidArgumentError(
                f"{name}: dtype {x.dtype.name} is none of {', '.join(FLOATS)}"
            )
        if x.dtype != q.dtype:
            raise InvalidArgumentError(
                f"{name}: dtype {x.dtype.name} differs from that of q, {q.dtype.name}"
            )


def number(name: str, value: Any) -> float:
    if isinstance(value, jax.core.Tracer) or not np.ndim(value) == 0:
        raise InvalidArgumentError(
            f"{name}: {value!r} is not a Python number; multiply q by what is computed"
        )
    return float(value)


def integers(name: str, value: Any) -> Any:
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise InvalidArgumentError(f"{name}: dtype {value.dtype.name}; expected int32")
    return value.astype(jnp.int32)


def longest_sequence(name: str, given: int | None, tensor: Any, word: str) -> int:
    if word != "thd":
        return 0
    if given is None:
        return int(tensor.shape[0])
    if given < 1:
        raise InvalidArgumentError(f"{name}: {given} is not positive")
    return int(given)


def add_pages(
    operands: dict[str, Any], table_k: Any, table_v: Any, longest: int | None, words: Sequence[str]
) -> int:
    """Puts the page tables into the operands; returns the longest sequence of k and v."""
    tables = {"k": integers("page_table_k", table_k), "v": integers("page_table_v", table_v)}
    for name, word in zip("kv", words[1:], strict=True):
        if word == "thd":
            raise InvalidArgumentError("layout: the words of paged k and v are bshd, sbhd or bhsd")
        if tables[name].ndim != 2:
            raise InvalidArgumentError(
                f"page_table_{name}: shape {tables[name].shape}; expected [b, pages of a sequence]"
            )
    size = {n: operands[n].shape[w.index("s")] for n, w in zip("kv", words[1:], strict=True)}
    if longest is None:
        longest = min(int(tables[n].shape[1]) * int(size[n]) for n in "kv")
    for name in "kv":
        needed = max(1, math.ceil(longest / size[name]))
        if tables[name].shape[1] < needed:
            raise InvalidArgumentError(
                f"page_table_{name}: {tables[name].shape[1]} pages of {size[name]} tokens cannot "
                f"hold max_seqlen_kv = {longest}"
            )
        pages = operands[name].shape[words[1 if name == "k" else 2].index("b")]
        operands[f"page_table_{name}"] = jnp.clip(tables[name][:, :needed], 0, max(pages - 1, 0))
    return longest


def add_lengths(
    operands: dict[str, Any],
    mask: str,
    words: Sequence[str],
    longest_kv: int,
    seqlens_q: Any,
    seqlens_kv: Any,
) -> str:
    """Puts lengths into the operands; returns the mask with its padding."""
    paged = "page_table_k" in operands
    ragged_q, ragged_kv = words[0] == "thd", words[1] == "thd"
    for name, given, is_ragged in (
        ("seqlens_q", seqlens_q, ragged_q),
        ("seqlens_kv", seqlens_kv, ragged_kv),
    ):
        if given is not None and is_ragged:
            raise InvalidArgumentError(f"{name}: a ragged side has cu_{name} instead")
    has_lengths = seqlens_q is not None or seqlens_kv is not None
    if not has_lengths and (not mask.startswith("padding") or (ragged_q and ragged_kv)):
        return mask
    q, k = operands["q"], operands["k"]
    if ragged_q:
        batch = operands["cu_seqlens_q"].shape[0] - 1
    else:
        batch = q.shape[words[0].index("b")]
        longest = q.shape[words[0].index("s")]
        whole = jnp.full((batch,), longest, jnp.int32)
        given = whole if seqlens_q is None else integers("seqlens_q", seqlens_q)
        operands["seqlen_q"] = jnp.clip(given, 0, longest)
    if not ragged_kv:
        if paged:
            operands["seqlen_kv"] = jnp.clip(integers("seqlens_kv", seqlens_kv), 0, longest_kv)
        else:
            longest = k.shape[words[1].index("s")]
            whole = jnp.full((batch,), longest, jnp.int32)
            given = whole if seqlens_kv is None else integers("seqlens_kv", seqlens_kv)
            operands["seqlen_kv"] = jnp.clip(given, 0, longest)
    if mask.startswith("padding"):
        return mask
    return "padding" if mask == "none" else f"padding_{mask}"


def rank4(name: str, value: Any) -> Any:
    value = jnp.asarray(value)
    if value.ndim > 4:
        raise InvalidArgumentError(f"{name}: shape {value.shape}; expected at most [b, h, sq, skv]")
    return value.reshape((1,) * (4 - value.ndim) + value.shape)


def add_scores(
    operands: dict[str, Any],
    bias: Any,
    bias_kind: str,
    attn_mask: Any,
    alibi: bool,
    slopes: Any,
    sink: Any,
) -> str:
    """Puts what is added to the scores into the operands; returns the kind of bias."""
    kind = "none"
    if bias is not None:
        if bias_kind not in ("pre_scale", "post_scale"):
            raise InvalidArgumentError(f"bias_kind: '{bias_kind}' is none of pre_scale, post_scale")
        kind = bias_kind
        operands["bias"] = rank4("bias", bias)
        if operands["bias"].dtype.name not in FLOATS:
            raise InvalidArgumentError(
                f"bias: dtype {operands['bias'].dtype.name} is none of {', '.join(FLOATS)}"
            )
    if alibi or slopes is not None:
        if bias is not None:
            raise InvalidArgumentError("alibi: not together with bias; add its terms to the bias")
        kind = "alibi"
        if slopes is not None:
            operands["slopes"] = jnp.asarray(slopes, jnp.float32)
    if attn_mask is not None:
        given = rank4("attn_mask", attn_mask)
        if given.dtype.name not in ("bool", *FLOATS):
            raise InvalidArgumentError(
                f"attn_mask: dtype {given.dtype.name} is none of bool, {', '.join(FLOATS)}"
            )
        operands["mask"] = given
    if sink is not None:
        operands["sink"] = jnp.asarray(sink, jnp.float32)
    return kind


def add_dropout(operands: dict[str, Any], key: Any, mask: Any) -> None:
    if (key is None) == (mask is None):
        raise InvalidArgumentError(
            "dropout_rate: above 0; needs dropout_key (jax.random.key) or dropout_mask, and one of "
            "them"
        )
    if mask is not None:
        operands["dropout_mask"] = jnp.asarray(mask).astype(jnp.uint8)
        return
    key = jnp.asarray(key)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.ndim != 0:
        raise InvalidArgumentError(f"dropout_key: {key.shape} keys; expected one")
    bits = jax.random.bits(key, (4,), jnp.uint32)
    operands["seed"], operands["offset"] = bits[:2], bits[2:]


def output_dtype(given: Any, own: Any) -> str | None:
    if given is None:
        return None
    name = jnp.dtype(given).name
    if name not in FLOATS:
        raise InvalidArgumentError(f"output_dtype: {name} is none of {', '.join(FLOATS)}")
    return None if name == own.name else name
