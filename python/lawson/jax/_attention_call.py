"""An attention call, from its arguments to its results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lawson import _attention_arguments as shared
from lawson import _settings
from lawson._attention_setup import MASKS, Choice, Setup
from lawson._errors import InvalidArgumentError, UnsupportedError
from lawson.jax import _attention_arguments as arguments
from lawson.jax import _attention_batching as batching
from lawson.jax import _attention_primitive as primitive
from lawson.jax._attention_arguments import Labels, Operands
from lawson.jax._attention_grad import attend
from lawson.jax._attention_partition import seed_of_shard
from lawson.jax._attention_segments import Segments, cumulative

primitive.register()
batching.register()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Those of `lawson.jax.attention`, as they were given; `labels`: what the user calls them."""

    q: Any
    k: Any
    v: Any
    layout: Any = "bshd"
    mask: Any = "none"
    window: Any = (-1, -1)
    seqlens_q: Any = None
    seqlens_kv: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    cu_seqlens_q_padded: Any = None
    cu_seqlens_kv_padded: Any = None
    max_seqlen_q: Any = None
    max_seqlen_kv: Any = None
    segment_ids: Any = None
    kv_segment_ids: Any = None
    max_segments: Any = None
    page_table_k: Any = None
    page_table_v: Any = None
    k_new: Any = None
    v_new: Any = None
    bias: Any = None
    bias_kind: Any = "post_scale"
    attn_mask: Any = None
    alibi: Any = False
    alibi_slopes: Any = None
    softmax: Any = "vanilla"
    sink: Any = None
    softcap: Any = 0.0
    dropout_rate: Any = 0.0
    dropout_key: Any = None
    dropout_mask: Any = None
    scale: Any = None
    output_dtype: Any = None
    deterministic: Any = False
    return_lse: Any = False
    return_max_logit: Any = False
    return_dropout_mask: Any = False
    engine: Any = None
    target: Any = None
    workspace_limit: Any = None
    tuning: Any = "off"
    labels: Labels = dataclasses.field(default_factory=Labels)

    def choice(self) -> Choice:
        """How the plan is chosen."""
        limit = _settings.workspace_limit(self.workspace_limit)
        return Choice(
            engine=_settings.engine(self.engine),
            target=_settings.target(self.target),
            workspace_limit=-1 if limit is None else limit,
            tuning=_settings.tuning(self.tuning),
        )

    def flag(self, name: str) -> bool:
        return _settings.flag(self.labels[name], getattr(self, name))


# What rows of segments have in another way, or not at all.
_NOT_WITH_SEGMENTS = (
    "seqlens_q",
    "seqlens_kv",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "page_table_k",
    "page_table_v",
    "k_new",
    "v_new",
    "bias",
    "attn_mask",
    "dropout_mask",
)


def run(given: Arguments) -> Any:
    """The results of `lawson.jax.attention`."""
    labels = given.labels
    _check_together(given)
    choice = given.choice()
    words, q, k, v = Operands.unpacked(given.layout, given.q, given.k, given.v, labels)
    mask = _settings.word("mask", given.mask, MASKS)
    softmax = _settings.word("softmax", given.softmax, shared.SOFTMAXES)
    max_q = shared.longest("max_seqlen_q", given.max_seqlen_q)
    max_kv = shared.longest("max_seqlen_kv", given.max_seqlen_kv)
    offsets = {name: getattr(given, name) for name in shared.OFFSETS}
    segments = None
    if given.segment_ids is not None:
        segments = Segments.make(
            words, q, k, given.segment_ids, given.kv_segment_ids, given.max_segments
        )
        max_q = max(1, q.shape[1]) if max_q is None else max_q
        max_kv = max(1, k.shape[1]) if max_kv is None else max_kv
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        words = ("thd", "thd", "thd")
        offsets = {
            "cu_seqlens_q": cumulative(segments.q.lengths),
            "cu_seqlens_kv": cumulative(segments.kv.lengths),
            "cu_seqlens_q_padded": segments.q.starts,
            "cu_seqlens_kv_padded": segments.kv.starts,
        }
    if words[1] == "thd" and k.shape[0] == 0:  # a spec has no ragged side without tokens
        k, v = (jnp.pad(x, [(0, 1), (0, 0), (0, 0)]) for x in (k, v))
    operands = Operands(labels, words, q, k, v)
    operands.add_offsets(offsets)
    paged = given.page_table_k is not None
    longest_q = operands.longest_sequence("q", max_q)
    longest_kv = operands.longest_sequence("kv", max_kv, paged)
    if paged:
        table_v = given.page_table_k if given.page_table_v is None else given.page_table_v
        longest_kv = operands.add_pages(given.page_table_k, table_v, max_kv)
    if given.k_new is not None or given.v_new is not None:
        operands.add_new(given.k_new, given.v_new)
    mask = operands.add_lengths(mask, longest_kv, given.seqlens_q, given.seqlens_kv)
    kind = operands.add_scores(
        given.bias,
        given.bias_kind,
        given.attn_mask,
        given.flag("alibi"),
        given.alibi_slopes,
        given.sink,
    )
    rate = arguments.number("dropout_rate", given.dropout_rate, "rate")
    dropped = given.flag("return_dropout_mask")
    operands.add_dropout(rate, given.dropout_key, given.dropout_mask, dropped)
    scale = given.scale
    if scale is not None:
        scale = arguments.number("scale", scale, "scale")

    setup = Setup(
        names=tuple(operands.in_order()),
        words=words,
        mask=mask,
        window=_settings.window(labels["window"], given.window),
        bias=kind,
        softmax="learnable" if given.sink is not None else softmax,
        softcap=arguments.number("softcap", given.softcap, "softcap"),
        dropout=rate,
        scale=scale,
        max_q=longest_q,
        max_kv=longest_kv,
        output_dtype=arguments.output_dtype(given.output_dtype, q.dtype),
        deterministic=given.flag("deterministic"),
        stats=given.flag("return_lse"),
        max_logit=given.flag("return_max_logit"),
        dropped=dropped,
        choice=choice,
    )
    return _results(setup, operands, segments)


def _check_together(given: Arguments) -> None:
    labels = given.labels
    if given.segment_ids is not None:
        for name in _NOT_WITH_SEGMENTS:
            if getattr(given, name) is not None:
                raise InvalidArgumentError(
                    f"{labels[name]}: not together with segment_ids; expected None"
                )
    for name in ("kv_segment_ids", "max_segments"):
        if getattr(given, name) is not None and given.segment_ids is None:
            raise InvalidArgumentError(f"{labels[name]}: goes with segment_ids, which is None")
    names = ("page_table_k", "page_table_v", "k_new", "v_new", "seqlens_kv", "sink", "softmax")
    shared.check_together({name: getattr(given, name) for name in names}, labels)


def _results(setup: Setup, operands: Operands, segments: Segments | None) -> Any:
    sizes = operands.sizes(setup)
    arrays = [operands.named[name] for name in setup.names]
    values = primitive.varying_alike(arrays)
    if "seed" in setup.names:
        at = setup.names.index("seed")
        values[at] = _seed_of_place(arrays[at], values[at])
    names = setup.forward_results()
    if 0 in (sizes[letter] for letter in setup.dims("o")):  # nothing to do
        results = _of_nothing(setup, operands, sizes)
    else:
        results = _attend(setup, values)
    if segments is not None:
        results = [segments.apart(name, x) for name, x in zip(names, results, strict=True)]
    for at, name in enumerate(names):
        if name in ("max_logit", "dropped"):
            results[at] = jax.lax.stop_gradient(results[at])
    return results[0] if len(results) == 1 else tuple(results)


def _of_nothing(setup: Setup, operands: Operands, sizes: dict[str, int]) -> list[Any]:
    """The results where the output has no elements."""
    label = operands.label
    if setup.appends:
        raise InvalidArgumentError(
            f"k_new: an attention whose output has no elements appends nothing; {label('q')} has "
            f"shape {operands.named['q'].shape}, {label('v')} {operands.named['v'].shape}"
        )
    made = primitive.result_shapes(
        setup, "forward", [jax.typeof(operands.named[name]) for name in setup.names]
    )
    for name, (shape, _) in zip(setup.forward_results(), made, strict=True):
        if 0 not in shape:
            raise InvalidArgumentError(
                f"{label('v')}: shape {operands.named['v'].shape}: the depth of v is {sizes['e']}; "
                f"expected 1 or more where {label(_ASKED[name])} is"
            )
    return [jnp.zeros(shape, dtype) for shape, dtype in made]


_ASKED = {
    "stats": "return_lse",
    "max_logit": "return_max_logit",
    "dropped": "return_dropout_mask",
}


def _attend(setup: Setup, values: Sequence[Any]) -> list[Any]:
    try:
        return list(attend(setup, *values))
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise UnsupportedError(f"attention: {primitive.NO_DERIVATIVE}") from error


def _seed_of_place(given: Any, seed: Any) -> Any:
    """Inside shard_map, a seed that is the same on axes over which q differs becomes different."""
    axes = jax.typeof(seed).manual_axis_type.varying - jax.typeof(given).manual_axis_type.varying
    return seed_of_shard(seed, tuple(sorted(axes)))
