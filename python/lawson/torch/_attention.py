"""Attention as functions of tensors: everything that docs/spec.md says, and torch's own form."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lawson import _attention_arguments as shared
from lawson import _settings
from lawson._attention_setup import MASKS
from lawson._errors import InvalidArgumentError
from lawson.torch import _attention_arguments as arguments
from lawson.torch import _attention_nested as nested
from lawson.torch._attention_arguments import Operands
from lawson.torch._attention_call import attend, known, number, settled, window_of


def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    layout: str = "bshd",
    mask: str = "none",
    window: tuple[int, int] = (-1, -1),
    seqlens_q: Tensor | None = None,
    seqlens_kv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    page_table_k: Tensor | None = None,
    page_table_v: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    bias: Tensor | None = None,
    bias_kind: Literal["pre_scale", "post_scale"] = "post_scale",
    attn_mask: Tensor | None = None,
    alibi: bool = False,
    alibi_slopes: Tensor | None = None,
    softmax: Literal["vanilla", "off_by_one"] = "vanilla",
    sink: Tensor | None = None,
    softcap: float = 0.0,
    dropout_rate: float = 0.0,
    generator: torch.Generator | None = None,
    dropout_mask: Tensor | None = None,
    scale: float | None = None,
    output_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_max_logit: bool = False,
    return_dropout_mask: bool = False,
    engine: str | None = None,
    workspace_limit: int | None = None,
    tuning: str = "off",
) -> Any:
    """softmax(softcap(scale * Q K^T) + bias, masked) V, as docs/spec.md defines it.

    One fused plan runs, forward and backward; what does not fuse raises `lawson.UnsupportedError`
    with every reason, before anything runs. Differentiable (reverse mode, first order) in q, k, v,
    bias and sink, also through the log-sum-exp.

    Args:
      q, k, v: tensors whose dims are in the order of `layout`, of one dtype (f16, bf16, f32; f64 on
        the host), with any strides. Heads of q are a multiple of those of k and v; v may have a
        depth of its own. In a packed layout q holds all three (k and v None), or k holds K and V (v
        None). Jagged nested tensors in `bshd` or `bhsd` are ragged sequences.
      layout: `bshd`, `sbhd`, `bhsd`, `thd` (ragged: all tokens in one axis), three of these joined
        by `_`, or a packed one: `bs3hd sb3hd t3hd bsh3d sbh3d th3d bshd_bs2hd sbhd_sb2hd thd_t2hd
        bshd_bsh2d sbhd_sbh2d thd_th2d`.
      mask: `none`, `causal` (row i sees columns up to i), `causal_bottom_right` (aligned at the
        last row and column of each sequence), or one of these with `padding`.
      window: `(left, right)`: the columns that a row sees to each side, inclusive; -1: all.
      seqlens_q, seqlens_kv: i32[b], lengths in dense layouts and pages: what lies behind them is
        not seen, and gives 0. One of them alone: the other side is whole.
      cu_seqlens_q, cu_seqlens_kv: i32[b+1], offsets of ragged sequences; with `*_padded` the valid
        lengths, and `*_padded` says where the sequences lie. Offsets beyond the tensor are cut off.
      max_seqlen_q, max_seqlen_kv: the longest sequence that a ragged or paged side may have (a
        number; default: all tokens, or what a row of the page table holds). It bounds masks and
        bias.
      page_table_k, page_table_v: i32[b, pages]; k and v are then pages, `[pages, page, heads,
        depth]` in `bshd`, and `seqlens_kv` the lengths. `page_table_v` defaults to `page_table_k`.
        Numbers that are no page's are those of the first or last page. No gradients.
      k_new, v_new: new tokens, written in place to the end of the caches k and v before they are
        used; `seqlens_kv` counts them, and has to leave room for them: lengths beyond the caches
        are cut off, and the last slots overwritten. k and v are two tensors. No gradients.
      bias: added to the scores, broadcastable to `[b, h, sq, skv]`; `bias_kind="pre_scale"`: to
        Q K^T, before scale and softcap.
      attn_mask: bool, true keeps, or a float mask that is added, as a `post_scale` bias is (it has
        a gradient where there is no bias); broadcastable to `[b, h, sq, skv]`.
      alibi, alibi_slopes: linear biases, with default slopes or f32[h]. Without a gradient.
      softmax: `off_by_one`: an extra logit of 0 without a value. `sink`: f32[h], a learnt one.
      softcap: scores become softcap * tanh(scores / softcap); 0: none.
      dropout_rate: the mask is made from two numbers that `generator` (default: that of q's device)
        draws, the same one forward and backward. Or `dropout_mask`: u8 or bool `[b, h, sq, skv]`,
        0 drops.
      scale: a number; default 1/sqrt(depth of q).
      output_dtype: of the output; default: as q.
      deterministic: the backward gives the same bits every time; on with
        `torch.use_deterministic_algorithms(True)`.
      return_lse: also the log-sum-exp of each row's scores, f32 (f64 with f64) `[b, h, sq]`, ragged
        `[tokens, h]`: -inf for a row that sees nothing.
      return_max_logit, return_dropout_mask: also the largest score of each row, in the form of the
        log-sum-exp; also the dropout mask, u8 `[b, h, sq, skv]`. Both without a gradient.
      engine: "cudnn", "cpu", "reference"; None: cudnn on a GPU; on the host LAWSON_ENGINE's.
      workspace_limit: bytes; None: no limit.
      tuning: "off", "quick" or "exhaustive": docs/fusion.md.

    Returns:
      The output, in q's layout and order of strides; or a tuple of it and, in this order, what was
      asked for: log-sum-exp, largest score, dropout mask. Rows that see nothing are 0.

    Raises:
      lawson.InvalidArgumentError: a ValueError; names the argument, what was given and what is
        allowed.
      lawson.UnsupportedError: no engine has it.
    """
    if any(isinstance(x, Tensor) and x.is_nested for x in (q, k, v)):
        unpacked = nested.ragged(layout, q, k, v)
        given = {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_kv": max_seqlen_kv,
            "page_table_k": page_table_k,
            "page_table_v": page_table_v,
            "k_new": k_new,
            "v_new": v_new,
        }
        for name, value in given.items():
            if value is not None:
                raise InvalidArgumentError(f"{name}: not together with nested tensors")
        result = attention(
            unpacked.q,
            unpacked.k,
            unpacked.v,
            layout="thd",
            mask=mask,
            window=window,
            seqlens_q=seqlens_q,
            seqlens_kv=seqlens_kv,
            **unpacked.offsets,
            bias=bias,
            bias_kind=bias_kind,
            attn_mask=attn_mask,
            alibi=alibi,
            alibi_slopes=alibi_slopes,
            softmax=softmax,
            sink=sink,
            softcap=softcap,
            dropout_rate=dropout_rate,
            generator=generator,
            dropout_mask=dropout_mask,
            scale=scale,
            output_dtype=output_dtype,
            deterministic=deterministic,
            return_lse=return_lse,
            return_max_logit=return_max_logit,
            return_dropout_mask=return_dropout_mask,
            engine=engine,
            workspace_limit=workspace_limit,
            tuning=tuning,
        )
        results = result if isinstance(result, tuple) else (result,)
        dense = 1 if return_dropout_mask else 0  # the last one is by sequence, not by token
        back = [unpacked.back(x) for x in results[: len(results) - dense]]
        back += results[len(results) - dense :]
        return back[0] if len(back) == 1 else tuple(back)

    if k_new is None:  # else the caches' dtype is the call's
        q, k, v, bias, attn_mask = arguments.autocast(q, k, v, bias, attn_mask)
    words, q, k, v = Operands.unpacked(layout, q, k, v, {})
    mask = _settings.word("mask", mask, MASKS)
    softmax_kind = _settings.word("softmax", softmax, shared.SOFTMAXES)
    shared.check_together(
        {
            "page_table_k": page_table_k,
            "page_table_v": page_table_v,
            "k_new": k_new,
            "v_new": v_new,
            "seqlens_kv": seqlens_kv,
            "sink": sink,
            "softmax": softmax,
        },
        {},
    )
    paged = page_table_k is not None
    most_kv = shared.longest("max_seqlen_kv", known(max_seqlen_kv))
    most_q = shared.longest("max_seqlen_q", known(max_seqlen_q))
    if words[1] == "thd" and k.shape[0] == 0:  # a spec has no ragged side without tokens
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
    operands = Operands({}, words, q, k, v)
    operands.add_offsets(
        {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
        }
    )
    longest_q = operands.longest_sequence("q", most_q)
    longest_kv = operands.longest_sequence("kv", most_kv, paged)
    if paged:
        table_v = page_table_k if page_table_v is None else page_table_v
        longest_kv = operands.add_pages(page_table_k, table_v, most_kv)
    if k_new is not None or v_new is not None:
        operands.add_new(k_new, v_new)
    mask = operands.add_lengths(mask, longest_kv, seqlens_q, seqlens_kv)
    alibi = _settings.flag("alibi", alibi)
    kind = operands.add_scores(bias, bias_kind, attn_mask, alibi, alibi_slopes, sink)
    rate = number("dropout_rate", dropout_rate, "rate")
    dropped = _settings.flag("return_dropout_mask", return_dropout_mask)
    operands.add_dropout(rate, generator, dropout_mask, dropped)
    named = attend(
        operands.in_order(),
        {
            "words": words,
            "mask": mask,
            "window": window_of("window", window),
            "bias": kind,
            "softmax": "learnable" if sink is not None else softmax_kind,
            "softcap": number("softcap", softcap, "softcap"),
            "dropout": rate,
            "scale": settled_scale(scale),
            "max_q": longest_q,
            "max_kv": longest_kv,
            "output_dtype": arguments.output_dtype(output_dtype, q.dtype),
            "stats": _settings.flag("return_lse", return_lse),
            "max_logit": _settings.flag("return_max_logit", return_max_logit),
            "dropped": dropped,
            **settled(deterministic, engine, workspace_limit, tuning),
        },
        tuple(operands.labels.items()),
    )
    found = tuple(named.values())
    return found[0] if len(found) == 1 else found


def settled_scale(scale: Any) -> float | None:
    """The scale as a plain number."""
    if scale is None:
        return None
    return number("scale", scale, "scale")
