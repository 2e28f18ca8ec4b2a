"""From segment ids to ragged sequences, with static sizes, at run time.

In a row of ids, 0 is padding and the segments are numbered 1, 2, ... in order; a segment's tokens
lie together. Ids that are not like this, or more segments than there is room for, have no meaning:
the attention of the whole batch is then NaN, so that it cannot go unseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lawson import _settings
from lawson._errors import InvalidArgumentError
from lawson.jax._attention_arguments import integers


class Ragged(NamedTuple):
    """Sequences of a flat array of tokens, those of row 0 first."""

    lengths: Any  # i32[rows * segments]
    starts: Any  # i32[rows * segments + 1]: where each lies, and the end
    valid: Any  # bool[]: whether the ids are well-formed

    def only_if(self, valid: Any) -> Ragged:
        """Without any token, unless `valid`."""
        return Ragged(jnp.where(valid, self.lengths, 0), jnp.where(valid, self.starts, 0), valid)


def ragged(ids: Any, segments: int) -> Ragged:
    """The segments 1..`segments` of each row of ids, i32[rows, tokens]."""
    rows, tokens = ids.shape
    number = jnp.arange(1, segments + 1, dtype=ids.dtype)
    is_in = ids[:, :, None] == number
    lengths = jnp.sum(is_in, axis=1, dtype=jnp.int32)
    position = jnp.arange(tokens, dtype=jnp.int32)[None, :, None]
    first = jnp.min(jnp.where(is_in, position, tokens), axis=1)
    last = jnp.max(jnp.where(is_in, position, -1), axis=1)
    empty = lengths == 0
    together = jnp.all(empty | (last - first + 1 == lengths))
    # An empty segment lies where the one before it ends.
    ends = jax.lax.cummax(jnp.where(empty, 0, last + 1), axis=1)
    before = jnp.concatenate([jnp.zeros((rows, 1), ends.dtype), ends[:, :-1]], axis=1)
    starts = jnp.where(empty, before, first)
    ordered = jnp.all(starts >= before)
    known = jnp.all((ids >= 0) & (ids <= segments))
    base = jnp.arange(rows, dtype=jnp.int32)[:, None] * tokens
    flat = (starts.astype(jnp.int32) + base).reshape(-1)
    flat = jnp.concatenate([flat, jnp.full((1,), rows * tokens, jnp.int32)])
    return Ragged(lengths.reshape(-1), flat, together & ordered & known)


def cumulative(lengths: Any) -> Any:
    """Offsets, one more than there are lengths."""
    zero = jnp.zeros((1,), jnp.int32)
    return jnp.concatenate([zero, jnp.cumsum(lengths, dtype=jnp.int32)])


def rows_in_use(cu_seqlens: Any, cu_seqlens_padded: Any, tokens: int) -> Any:
    """bool[tokens]: which rows of a ragged array belong to a sequence."""
    starts = cu_seqlens_padded[:-1]
    ends = starts + jnp.diff(cu_seqlens)
    position = jnp.arange(tokens, dtype=starts.dtype)
    # Sequences lie in order, so a row belongs to the last one that starts at or before it.
    number = jnp.searchsorted(starts, position, side="right") - 1
    return (number >= 0) & (position < ends[jnp.maximum(number, 0)])


class Segments(NamedTuple):
    """The segments of both sides, and the shape that results come back to."""

    q: Ragged
    kv: Ragged
    rows: int
    valid: Any

    @staticmethod
    def make(words: Sequence[str], q: Any, k: Any, ids: Any, kv_ids: Any, most: Any) -> Segments:
        if set(words) != {"bshd"}:
            raise InvalidArgumentError(
                f"layout: segment_ids go with bshd, not with {'_'.join(words)}; ragged arrays have "
                "cu_seqlens"
            )
        allowed = "the largest number of segments in a row, from 1 to 2^31 - 1"
        most = _settings.integer("max_segments", most, allowed, least=1, most=(1 << 31) - 1)
        both = []
        for name, given, tensor in (
            ("segment_ids", ids, q),
            ("kv_segment_ids", ids if kv_ids is None else kv_ids, k),
        ):
            array = integers(name, given)
            if array.shape != tensor.shape[:2]:
                raise InvalidArgumentError(
                    f"{name}: shape {array.shape}; expected [b, s] = {tensor.shape[:2]}"
                )
            both.append(ragged(array, most))
        valid = both[0].valid & both[1].valid
        return Segments(both[0].only_if(valid), both[1].only_if(valid), q.shape[0], valid)

    def apart(self, name: str, value: Any) -> Any:
        """A ragged result as rows; NaN where the ids have no meaning."""
        if name == "dropped":
            return value
        value = value.reshape(self.rows, -1, *value.shape[1:])
        if name != "o":
            value = jnp.moveaxis(value, 2, 1)  # [b, h, s], as without segments
        return jnp.where(self.valid, value, jnp.nan)
