"""Attention as functions of arrays: everything that docs/spec.md says and arrays can express."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lawson._attention_setup import MASKS, OPTIONAL, Choice, Setup
from lawson._errors import InvalidArgumentError, UnsupportedError
from lawson.jax import _attention_arguments as arguments
from lawson.jax import _attention_batching as batching
from lawson.jax import _attention_primitive as primitive
from lawson.jax._attention_grad import attend
from lawson.jax._attention_partition import seed_of_shard
from lawson.jax._attention_segments import Segments, cumulative

primitive.register()
batching.register()


def attention(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    layout: str = "bshd",
    mask: str = "none",
    window: tuple[int, int] = (-1, -1),
    seqlens_q: Any = None,
    seqlens_kv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    cu_seqlens_q_padded: Any = None,
    cu_seqlens_kv_padded: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    segment_ids: Any = None,
    kv_segment_ids: Any = None,
    max_segments: int | None = None,
    page_table_k: Any = None,
    page_table_v: Any = None,
    k_new: Any = None,
    v_new: Any = None,
    bias: Any = None,
    bias_kind: Literal["pre_scale", "post_scale"] = "post_scale",
    attn_mask: Any = None,
    alibi: bool = False,
    alibi_slopes: Any = None,
    softmax: Literal["vanilla", "off_by_one"] = "vanilla",
    sink: Any = None,
    softcap: float = 0.0,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    dropout_mask: Any = None,
    scale: float | None = None,
    output_dtype: Any = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_max_logit: bool = False,
    return_dropout_mask: bool = False,
    engine: str | None = None,
    target: str | None = None,
    workspace_limit: int = -1,
    tuning: str = "off",
) -> Any:
    """softmax(softcap(scale * Q K^T) + bias, masked) V, as docs/spec.md defines it.

    One fused plan runs, forward and backward; what does not fuse raises `lawson.UnsupportedError`
    with every reason, when the call is compiled. Differentiable (reverse mode, first order) in q,
    k, v, bias and sink, also through the log-sum-exp.

    Args:
      q, k, v: arrays whose dims are in the order of `layout`, of one dtype (f16, bf16, f32; f64 on
        the host). Heads of q are a multiple of those of k and v; v may have a depth of its own. In
        a packed layout q holds all three (k and v None), or k holds K and V (v None).
      layout: `bshd`, `sbhd`, `bhsd`, `thd` (ragged: all tokens in one axis), three of these joined
        by `_`, or a packed one: `bs3hd sb3hd t3hd bsh3d sbh3d th3d bshd_bs2hd sbhd_sb2hd thd_t2hd
        bshd_bsh2d sbhd_sbh2d thd_th2d`.
      mask: `none`, `causal` (row i sees columns up to i), `causal_bottom_right` (aligned at the
        last row and column of each sequence), or one of these with `padding`.
      window: `(left, right)`: the columns that a row sees to each side, inclusive; -1: all.
      seqlens_q, seqlens_kv: i32[b], lengths in dense layouts and pages: what lies behind them is
        not seen, and gives 0. One of them alone: the other side is whole.
      cu_seqlens_q, cu_seqlens_kv: i32[b+1], offsets of ragged sequences; with `*_padded` the valid
        lengths, and `*_padded` says where the sequences lie. Offsets beyond the array are cut off.
      max_seqlen_q, max_seqlen_kv: the longest sequence that a ragged or paged side may have
        (static; default: all tokens, or what a row of the page table holds). It bounds masks and
        bias.
      segment_ids, kv_segment_ids: i32[b, s] for `bshd`: in each row, tokens of segment 1, 2, ...
        lie together and in order and see only each other; 0 is padding. `kv_segment_ids` defaults
        to `segment_ids`. Run as ragged sequences, at most `max_segments` (static) in each row. Ids
        that are not like this make the result NaN.
      page_table_k, page_table_v: i32[b, pages]; k and v are then pages, `[pages, page, heads,
        depth]` in `bshd`, and `seqlens_kv` the lengths. `page_table_v` defaults to `page_table_k`.
        No gradients.
      k_new, v_new: new tokens that are written to the end of the caches k and v before they are
        used; `seqlens_kv` counts them. The caches are results: give the old ones away with
        `donate_argnums`, or XLA copies them.
      bias: added to the scores, broadcastable to `[b, h, sq, skv]`; `bias_kind="pre_scale"`: to
        Q K^T, before scale and softcap.
      attn_mask: bool, true keeps, or a float mask that is added (without a gradient);
        broadcastable to `[b, h, sq, skv]`.
      alibi, alibi_slopes: linear biases, with default slopes or f32[h].
      softmax: `off_by_one`: an extra logit of 0 without a value. `sink`: f32[h], a learnt one.
      softcap: scores become softcap * tanh(scores / softcap); 0: none.
      dropout_rate, dropout_key: the key (`jax.random.key`) makes the mask, the same one forward and
        backward, another one on each shard of a sharded program. Or `dropout_mask`: u8 or bool
        `[b, h, sq, skv]`, 0 drops.
      scale: a Python number; default 1/sqrt(depth of q).
      output_dtype: of the output; default: as q.
      deterministic: the backward gives the same bits every time.
      return_lse: also the log-sum-exp of each row's scores, f32 (f64 with f64) `[b, h, sq]`, ragged
        `[tokens, h]`: -inf for a row that sees nothing.
      return_max_logit, return_dropout_mask: also the largest score of each row, in the form of the
        log-sum-exp; also the dropout mask, u8 `[b, h, sq, skv]`. Both without a gradient.
      engine, workspace_limit, tuning: as in `lawson.Options`.
      target: a GPU that need not be here ("h200"): the program that is lowered, or exported, has
        the plan for it.

    Returns:
      The output, in q's layout; or a tuple of it and, in this order, what was asked for:
      log-sum-exp, largest score, dropout mask; and the caches k and v after `k_new`. Rows that see
      nothing are 0.

    Raises:
      lawson.InvalidArgumentError: a ValueError; names the argument, what was given and what is
        allowed.
      lawson.UnsupportedError: no engine has it.
    """
    if segment_ids is not None:
        given = {
            "seqlens_q": seqlens_q,
            "seqlens_kv": seqlens_kv,
            "cu_seqlens_q": cu_seqlens_q,
            "page_table_k": page_table_k,
            "bias": bias,
            "attn_mask": attn_mask,
            "dropout_mask": dropout_mask,
        }
        for name, value in given.items():
            if value is not None:
                raise InvalidArgumentError(f"{name}: not together with segment_ids")
    words, q, k, v = arguments.unpacked(layout, q, k, v)
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    arguments.check_dtypes(q, k, v)
    segments = None
    if segment_ids is not None:
        segments = Segments.make(words, q, k, segment_ids, kv_segment_ids, max_segments)
        max_seqlen_q = q.shape[1] if max_seqlen_q is None else max_seqlen_q
        max_seqlen_kv = k.shape[1] if max_seqlen_kv is None else max_seqlen_kv
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        words = ("thd", "thd", "thd")
        cu_seqlens_q, cu_seqlens_q_padded = cumulative(segments.q.lengths), segments.q.starts
        cu_seqlens_kv, cu_seqlens_kv_padded = cumulative(segments.kv.lengths), segments.kv.starts
    if mask not in MASKS:
        raise InvalidArgumentError(f"mask: '{mask}' is none of {', '.join(MASKS)}")
    if page_table_v is None:
        page_table_v = page_table_k
    if sink is not None and softmax != "vanilla":
        raise InvalidArgumentError(f"softmax: '{softmax}' together with sink, which is one itself")
    if not 0 <= dropout_rate < 1:
        raise InvalidArgumentError(f"dropout_rate: {dropout_rate} is not in [0, 1)")
    if scale is not None:
        scale = arguments.number("scale", scale)

    if words[1] == "thd" and k.shape[0] == 0:  # a spec has no ragged side without tokens
        k, v = (jnp.pad(x, [(0, 1), (0, 0), (0, 0)]) for x in (k, v))
    operands: dict[str, Any] = {"q": q, "k": k, "v": v}
    rows = {
        "cu_seqlens_q": (cu_seqlens_q, q, words[0]),
        "cu_seqlens_kv": (cu_seqlens_kv, k, words[1]),
        "cu_seqlens_q_padded": (cu_seqlens_q_padded, q, words[0]),
        "cu_seqlens_kv_padded": (cu_seqlens_kv_padded, k, words[1]),
    }
    for name, (offsets, tensor, word) in rows.items():
        if (word == "thd") != (offsets is not None) and not name.endswith("_padded"):
            raise InvalidArgumentError(
                f"{name}: goes with a thd layout, and it is {'_'.join(words)}"
            )
        if offsets is not None:
            if word != "thd":
                raise InvalidArgumentError(f"{name}: goes with a thd layout, not with {word}")
            operands[name] = jnp.clip(arguments.integers(name, offsets), 0, tensor.shape[0])
    padded = [name for name in operands if name.endswith("_padded")]
    if len(padded) == 1 and words[0] == words[1] == "thd":
        other = "cu_seqlens_kv" if padded[0] == "cu_seqlens_q_padded" else "cu_seqlens_q"
        operands[f"{other}_padded"] = operands[other]
    max_q = arguments.longest_sequence("max_seqlen_q", max_seqlen_q, q, words[0])
    max_kv = arguments.longest_sequence("max_seqlen_kv", max_seqlen_kv, k, words[1])
    if page_table_k is not None:
        max_kv = arguments.add_pages(operands, page_table_k, page_table_v, max_seqlen_kv, words)
        if seqlens_kv is None:
            raise InvalidArgumentError("seqlens_kv: missing; paged k and v need their lengths")
    if k_new is not None or v_new is not None:
        if k_new is None or v_new is None:
            raise InvalidArgumentError("k_new and v_new: come together")
        if seqlens_kv is None:
            raise InvalidArgumentError("seqlens_kv: missing; a cache needs its lengths")
        operands["k_new"], operands["v_new"] = jnp.asarray(k_new), jnp.asarray(v_new)
    mask = arguments.add_lengths(operands, mask, words, max_kv, seqlens_q, seqlens_kv)
    kind = arguments.add_scores(operands, bias, bias_kind, attn_mask, alibi, alibi_slopes, sink)
    if dropout_rate:
        arguments.add_dropout(operands, dropout_key, dropout_mask)
    elif dropout_mask is not None or return_dropout_mask:
        raise InvalidArgumentError("dropout_mask: goes with a dropout_rate above 0")

    names = ("q", "k", "v", *(name for name in OPTIONAL if name in operands))
    setup = Setup(
        names=names,
        words=words,
        mask=mask,
        window=(int(window[0]), int(window[1])),
        bias=kind,
        softmax="learnable" if sink is not None else softmax,
        softcap=float(softcap),
        dropout=float(dropout_rate),
        scale=scale,
        max_q=max_q,
        max_kv=max_kv,
        output_dtype=arguments.output_dtype(output_dtype, q.dtype),
        deterministic=bool(deterministic),
        stats=bool(return_lse),
        max_logit=bool(return_max_logit),
        dropped=bool(return_dropout_mask),
        choice=Choice(engine, target, int(workspace_limit), tuning),
    )
    return _run(setup, [operands[name] for name in names], segments)


def _run(setup: Setup, operands: Sequence[Any], segments: Segments | None) -> Any:
    shapes = {name: x.shape for name, x in zip(setup.names, operands, strict=True)}
    sizes = setup.sizes(shapes)
    values = primitive.varying_alike(operands)
    if "seed" in setup.names:
        at = setup.names.index("seed")
        values[at] = _seed_of_place(operands[at], values[at])
    names = setup.forward_results()
    if 0 in (sizes[letter] for letter in setup.dims("o")):  # nothing to do
        avals = [jax.typeof(x) for x in operands]
        made = primitive.result_shapes(setup, "forward", avals)
        results = [jnp.zeros(shape, dtype) for shape, dtype in made]
        if setup.appends:
            raise InvalidArgumentError("k_new: an attention without queries appends nothing")
    else:
        results = _attend(setup, values)
    if segments is not None:
        results = [segments.apart(name, x) for name, x in zip(names, results, strict=True)]
    for at, name in enumerate(names):
        if name in ("max_logit", "dropped"):
            results[at] = jax.lax.stop_gradient(results[at])
    return results[0] if len(results) == 1 else tuple(results)


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


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    segment_ids: Any = None,
    kv_segment_ids: Any = None,
    max_segments: int | None = None,
    page_table_k: Any = None,
    page_table_v: Any = None,
    sink: Any = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    engine: str | None = None,
    target: str | None = None,
    workspace_limit: int = -1,
    tuning: str = "off",
) -> Any:
    """`jax.nn.dot_product_attention`, run by Lawson, and more by keyword.

    What differs from JAX's, always: a row that sees nothing is 0 (not the mean of the values); the
    residual is f32 whatever the arrays are, and has a gradient; `value` may have a depth of its
    own; bias and mask broadcast over every dim. `implementation` is accepted and chooses nothing:
    Lawson runs, or raises.

    Args:
      query: `[B,T,N,H]` or `[T,N,H]`.
      key, value: `[B,S,K,H]` or `[S,K,H]`, N a multiple of K; with page tables the pages.
      bias: added to the logits, broadcastable to `[B,N,T,S]`.
      mask: bool, true keeps, broadcastable to `[B,N,T,S]`.
      scale: of the logits; default 1/sqrt(H).
      is_causal: row i sees columns up to i.
      query_seq_lengths, key_value_seq_lengths: i32[B].
      local_window_size: `(left, right)`, inclusive; a number means both.
      return_residual: also the log-sum-exp, f32 `[B,T,N]` or `[T,N]`.
      dropout_rate ... tuning: as in `lawson.jax.attention`.

    Returns:
      `[B,T,N,Hv]` or `[T,N,Hv]`; with `return_residual` a tuple of it and the log-sum-exp.

    Raises:
      lawson.InvalidArgumentError: a ValueError.
      lawson.UnsupportedError: no engine has it.
    """
    if implementation not in (None, "xla", "cudnn"):
        raise InvalidArgumentError(
            f"implementation: '{implementation}' is none of xla, cudnn, None"
        )
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    single = query.ndim == 3
    if query.ndim not in (3, 4):
        raise InvalidArgumentError(
            f"query: {query.ndim} dims; expected 4, [B,T,N,H], or 3, [T,N,H]"
        )
    paged = page_table_k is not None
    for name, x in (("key", key), ("value", value)):
        expected = 4 if paged else query.ndim
        if x.ndim != expected:
            raise InvalidArgumentError(f"{name}: {x.ndim} dims; expected {expected}, as query")
    if mask is not None and jnp.asarray(mask).dtype != np.dtype(bool):
        raise InvalidArgumentError(
            f"mask: dtype {jnp.asarray(mask).dtype.name}; expected bool (an additive mask is a "
            "bias)"
        )
    if single:
        query = query[None]
        if not paged:
            key, value = key[None], value[None]
    if local_window_size is None:
        window = (-1, -1)
    elif isinstance(local_window_size, int):
        window = (local_window_size, local_window_size)
    else:
        window = (int(local_window_size[0]), int(local_window_size[1]))
    if min(window) < 0 and local_window_size is not None:
        raise InvalidArgumentError(f"local_window_size: {local_window_size} has a negative bound")
    result = attention(
        query,
        key,
        value,
        mask="causal" if is_causal else "none",
        window=window,
        seqlens_q=query_seq_lengths,
        seqlens_kv=key_value_seq_lengths,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        max_segments=max_segments,
        page_table_k=page_table_k,
        page_table_v=page_table_v,
        bias=bias,
        attn_mask=mask,
        sink=sink,
        softcap=softcap,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        scale=scale,
        deterministic=deterministic,
        return_lse=return_residual,
        engine=engine,
        target=target,
        workspace_limit=workspace_limit,
        tuning=tuning,
    )
    if not return_residual:
        return result[0] if single else result
    out, residual = result
    residual = jnp.swapaxes(residual, 1, 2)
    return (out[0], residual[0]) if single else (out, residual)
