"""Attention as functions of arrays: everything that docs/spec.md says and arrays can express."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp

from lawson import _settings
from lawson._errors import InvalidArgumentError
from lawson.jax import _attention_arguments as arguments
from lawson.jax._attention_call import Arguments, run

# What dot_product_attention calls the arguments of attention.
_LABELS = arguments.Labels(
    q="query",
    k="key",
    v="value",
    mask="is_causal",
    attn_mask="mask",
    window="local_window_size",
    seqlens_q="query_seq_lengths",
    seqlens_kv="key_value_seq_lengths",
    return_lse="return_residual",
)


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
    workspace_limit: int | None = None,
    tuning: str = "off",
) -> Any:
    """softmax(softcap(scale * Q K^T) + bias, masked) V, as docs/spec.md defines it.

    One fused plan runs, forward and backward; what does not fuse raises `lawson.UnsupportedError`
    with every reason, when the call is compiled. Differentiable (reverse mode, first order) in q,
    k, v, bias, a float attn_mask and sink, also through the log-sum-exp.

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
      attn_mask: bool, true keeps, or a float mask that is added, as a `post_scale` bias is (it has
        a gradient where there is no bias); broadcastable to `[b, h, sq, skv]`.
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
      engine: "cudnn", "cpu", "reference"; None: as docs/jax-attention.md says.
      workspace_limit: bytes; None: no limit.
      tuning: "off", "quick" or "exhaustive": docs/fusion.md.
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
    return run(
        Arguments(
            q=q,
            k=k,
            v=v,
            layout=layout,
            mask=mask,
            window=window,
            seqlens_q=seqlens_q,
            seqlens_kv=seqlens_kv,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            segment_ids=segment_ids,
            kv_segment_ids=kv_segment_ids,
            max_segments=max_segments,
            page_table_k=page_table_k,
            page_table_v=page_table_v,
            k_new=k_new,
            v_new=v_new,
            bias=bias,
            bias_kind=bias_kind,
            attn_mask=attn_mask,
            alibi=alibi,
            alibi_slopes=alibi_slopes,
            softmax=softmax,
            sink=sink,
            softcap=softcap,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
            dropout_mask=dropout_mask,
            scale=scale,
            output_dtype=output_dtype,
            deterministic=deterministic,
            return_lse=return_lse,
            return_max_logit=return_max_logit,
            return_dropout_mask=return_dropout_mask,
            engine=engine,
            target=target,
            workspace_limit=workspace_limit,
            tuning=tuning,
        )
    )


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
    workspace_limit: int | None = None,
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
    if implementation is not None:
        _settings.word("implementation", implementation, ("xla", "cudnn"))
    query, key, value = (
        arguments.array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    single = query.ndim == 3
    if query.ndim not in (3, 4):
        raise InvalidArgumentError(
            f"query: shape {query.shape} has {query.ndim} dims; expected 4, [B,T,N,H], or 3, "
            "[T,N,H]"
        )
    paged = page_table_k is not None
    for name, x in (("key", key), ("value", value)):
        expected = 4 if paged else query.ndim
        if x.ndim != expected:
            raise InvalidArgumentError(
                f"{name}: shape {x.shape} has {x.ndim} dims; expected {expected}, "
                + ("[pages,page,K,H]" if paged else "as query has")
            )
    if mask is not None:
        mask = arguments.array("mask", mask)
        if mask.dtype.name != "bool":
            raise InvalidArgumentError(
                f"mask: dtype {mask.dtype.name} is not allowed; expected bool (an additive mask is "
                "a bias)"
            )
    if single:
        query = query[None]
        if not paged:
            key, value = key[None], value[None]
    causal = _settings.flag("is_causal", is_causal)
    return_residual = _settings.flag("return_residual", return_residual)
    given = Arguments(
        labels=_LABELS,
        q=query,
        k=key,
        v=value,
        mask="causal" if causal else "none",
        window=_local_window(local_window_size),
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
    try:
        result = run(given)
    except InvalidArgumentError as error:
        if not single or "shape (" not in str(error):
            raise
        raise InvalidArgumentError(
            f"{error} (arrays [T,N,H] are a batch of one: [1,T,N,H])"
        ) from error
    if not return_residual:
        return result[0] if single else result
    out, residual = result
    residual = jnp.swapaxes(residual, 1, 2)
    return (out[0], residual[0]) if single else (out, residual)


def _local_window(given: Any) -> tuple[int, int]:
    """JAX's local_window_size: None: all, a number: to both sides, or (left, right)."""
    if given is None:
        return -1, -1
    allowed = "None, or a number of columns or (left, right), 0 or more"
    if _settings.is_integer(given):
        given = (given, given)
    try:
        left, right = _settings.window("local_window_size", given)
    except InvalidArgumentError:
        _settings.refuse("local_window_size", given, allowed)
    if left < 0 or right < 0:
        _settings.refuse("local_window_size", given, allowed)
    return left, right
