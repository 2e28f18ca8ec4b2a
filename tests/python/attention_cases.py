"""Attention calls of many shapes, with random contents, beside the oracle's answer to each."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import attention_oracle as oracle
from lawson.jax import attention

ORDER = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "bhsd": (0, 1, 2, 3)}
_GRADIENTS = ("q", "k", "v", "bias", "sink")


@dataclasses.dataclass(frozen=True)
class Case:
    """The static side of a call. Sizes are logical; `ragged` packs the sequences."""

    name: str
    b: int = 2
    h: int = 4
    g: int = 4
    s: int = 9
    t: int = 9
    d: int = 16
    e: int = 16
    layout: str = "bshd"
    dtype: str = "float32"
    mask: str = "none"
    window: tuple[int, int] = (-1, -1)
    lengths: str = ""  # of "q", "kv", "q kv"
    gaps: bool = False  # ragged: room between sequences
    bias: tuple[int, ...] | None = None
    bias_dtype: str = "float32"
    pre_scale: bool = False
    attn_mask: tuple[int, ...] | None = None
    softmax: str = "vanilla"
    sink: bool = False
    softcap: float = 0.0
    alibi: str = ""  # "default", "given"
    dropout: str = ""  # "key", "mask"
    scale: float | None = None
    lse: bool = True
    mapped: tuple[str, ...] = ()  # of vmap
    elements: int = 3

    @property
    def ragged(self) -> bool:
        return self.layout == "thd"

    def words(self) -> list[str]:
        words = self.layout.split("_")
        return words * 3 if len(words) == 1 else words

    def draw(
        self, rng: np.random.Generator, like: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arrays of the call, and what the oracle needs beside them; lengths as those of `like`."""
        dtype = jnp.dtype(self.dtype)
        size = float(rng.choice([0.3, 1.0, 4.0]))

        def normal(*shape: int, scale: float = 1.0, dtype: Any = dtype) -> np.ndarray:
            return np.asarray(jnp.asarray(rng.standard_normal(shape) * scale, dtype))

        at = {
            "q": normal(self.b, self.h, self.s, self.d, scale=size),
            "k": normal(self.b, self.g, self.t, self.d),
            "v": normal(self.b, self.g, self.t, self.e),
        }
        info: dict[str, Any] = dict(at)
        info["lq"] = np.full(self.b, self.s)
        info["lk"] = np.full(self.b, self.t)
        sides = "q kv" if self.ragged else self.lengths
        if "q" in sides.split():
            info["lq"] = rng.integers(0, self.s + 1, self.b)
        if "kv" in sides.split():
            info["lk"] = rng.integers(0, self.t + 1, self.b)
        if like is not None:
            info["lq"], info["lk"] = like["lq"], like["lk"]
        arrays: dict[str, Any] = {}
        if self.ragged:
            for name, side, length in (
                ("q", "q", self.s),
                ("k", "kv", self.t),
                ("v", "kv", self.t),
            ):
                lens = info["lq" if side == "q" else "lk"]
                if like is not None:
                    info[f"places_{side}"] = like[f"places_{side}"]
                elif name != "v":
                    room = lens + (rng.integers(0, 3, self.b) if self.gaps else 0)
                    info[f"places_{side}"] = np.concatenate([[0], np.cumsum(room)]).astype(np.int32)
                arrays[name] = self.pack(
                    at[name], info[f"places_{side}"], lens, self.b * (length + 2)
                )
                arrays[f"cu_seqlens_{side}"] = np.concatenate([[0], np.cumsum(lens)]).astype(
                    np.int32
                )
                if self.gaps:
                    arrays[f"cu_seqlens_{side}_padded"] = info[f"places_{side}"]
        else:
            for name, word in zip("qkv", self.words(), strict=True):
                arrays[name] = at[name].transpose(ORDER[word])
            if "q" in sides.split():
                arrays["seqlens_q"] = info["lq"].astype(np.int32)
            if "kv" in sides.split():
                arrays["seqlens_kv"] = info["lk"].astype(np.int32)
        if self.bias is not None:
            arrays["bias"] = normal(*self.bias, scale=2.0, dtype=jnp.dtype(self.bias_dtype))
        if self.attn_mask is not None:
            keep = rng.random(self.attn_mask) < 0.7
            keep &= rng.random((*self.attn_mask[:3], 1)) < 0.8  # rows that see nothing
            arrays["attn_mask"] = keep
        if self.sink:
            arrays["sink"] = (rng.standard_normal(self.h) * 2).astype(np.float32)
        if self.alibi == "given":
            arrays["alibi_slopes"] = rng.random(self.h).astype(np.float32)
        if self.dropout == "key":
            arrays["dropout_key"] = jax.random.key_data(jax.random.key(int(rng.integers(1 << 30))))
        if self.dropout == "mask":
            arrays["dropout_mask"] = rng.random((self.b, self.h, self.s, self.t)) < 0.7
        info["do"] = normal(self.b, self.h, self.s, self.e)
        wide = np.float64 if self.dtype == "float64" else np.float32
        info["dlse"] = rng.standard_normal((self.b, self.h, self.s)).astype(wide)
        arrays["do"] = self.like_o(info["do"], info)
        arrays["dlse"] = self.like_rows(info["dlse"], info)
        return arrays, info

    def pack(self, x: Any, places: Any, lens: Any, tokens: int) -> np.ndarray:
        """[b, h, s, d] as [tokens, h, d]; what belongs to no sequence is huge."""
        out = np.full((tokens, x.shape[1], x.shape[3]), 1e4, x.dtype)
        for n in range(self.b):
            out[places[n] : places[n] + lens[n]] = x[n, :, : lens[n]].swapaxes(0, 1)
        return out

    def like_o(self, x: Any, info: dict[str, Any]) -> np.ndarray:
        if self.ragged:
            return self.pack(x, info["places_q"], info["lq"], self.b * (self.s + 2))
        return x.transpose(ORDER[self.words()[0]])

    def like_rows(self, x: Any, info: dict[str, Any]) -> np.ndarray:
        return self.like_o(x[..., None], info)[..., 0] if self.ragged else x

    # ---- the call ----

    def forward(self, arrays: dict[str, Any]) -> tuple[Any, ...]:
        """Output, and what else the case asks for."""
        given = {name: x for name, x in arrays.items() if name not in ("do", "dlse")}
        result = attention(
            given.pop("q"),
            given.pop("k"),
            given.pop("v"),
            layout=self.layout,
            mask=self.mask,
            window=self.window,
            bias_kind="pre_scale" if self.pre_scale else "post_scale",
            alibi=bool(self.alibi),
            softmax=self.softmax,
            softcap=self.softcap,
            dropout_rate=0.3 if self.dropout else 0.0,
            scale=self.scale,
            max_seqlen_q=self.s if self.ragged else None,
            max_seqlen_kv=self.t if self.ragged else None,
            return_lse=self.lse,
            return_dropout_mask=self.dropout == "key",
            **given,
        )
        return result if isinstance(result, tuple) else (result,)

    def with_gradients(self, arrays: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The results, and the gradients of what has one."""
        wrt = {name: arrays[name] for name in _GRADIENTS if name in arrays}
        results, pull = jax.vjp(lambda wrt: self.forward({**arrays, **wrt}), wrt)
        cotangents = [arrays["do"]]
        if self.lse:
            cotangents.append(arrays["dlse"])
        if self.dropout == "key":
            cotangents.append(np.zeros(results[-1].shape, jax.dtypes.float0))
        return results, pull(tuple(cotangents))[0]

    @property
    def is_jax_nn(self) -> bool:
        """Whether jax.nn.dot_product_attention has it, with a depth of f32 sums."""
        more = self.sink or self.softcap or self.alibi or self.dropout or self.pre_scale
        plain = self.layout == "bshd" and self.d == self.e and self.softmax == "vanilla"
        kept = self.dtype == "float32" and not self.mapped
        return plain and kept and not more and not self.mask.endswith("bottom_right")

    def by_xla(self, arrays: dict[str, Any], do: Any) -> tuple[Any, dict[str, Any]]:
        """The output and the gradients for `do` of JAX's own implementation."""
        window = tuple(1000 if bound < 0 else bound for bound in self.window)
        wrt = {name: arrays[name] for name in _GRADIENTS if name in arrays}

        def call(wrt: dict[str, Any]) -> Any:
            return jax.nn.dot_product_attention(
                wrt["q"],
                wrt["k"],
                wrt["v"],
                wrt.get("bias"),
                arrays.get("attn_mask"),
                scale=self.scale,
                is_causal="causal" in self.mask,
                query_seq_lengths=arrays.get("seqlens_q"),
                key_value_seq_lengths=arrays.get("seqlens_kv"),
                local_window_size=window,
                implementation="xla",
            )

        o, pull = jax.vjp(call, wrt)
        return o, pull(do)[0]

    def check_xla(
        self, arrays: dict[str, Any], info: dict[str, Any], results: Any, run: Any
    ) -> None:
        """The output against XLA's, and XLA's gradients against the oracle's."""
        answer = self.expected(arrays, info, None)
        # Where a row sees nothing, XLA takes the mean of all values.
        sees = ~np.isneginf(answer.lse)[..., None]
        do = np.where(sees, np.asarray(info["do"], np.float64), 0)
        o, gradients = run(arrays, do.transpose(ORDER["bshd"]).astype(np.float32))
        got, theirs = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in (results[0], o))
        off = np.where(sees, np.abs(got - theirs), 0)
        assert np.all(off <= 2 * answer.bound(self.dtype)), f"{self.name}: o is not XLA's"
        for name, (value, bound) in answer.gradients(do, None, self.dtype).items():
            if name in "qkv":
                value, bound = value.transpose(0, 2, 1, 3), bound.transpose(0, 2, 1, 3)
            oracle.check(f"{self.name}: XLA's d{name}", gradients[name], value, 2 * bound)

    # ---- what it has to be ----

    def expected(self, arrays: dict[str, Any], info: dict[str, Any], kept: Any) -> oracle.Attention:
        see = oracle.visible(self.mask, self.window, info["lq"], info["lk"], self.s, self.t)
        if "attn_mask" in arrays:
            see = see & arrays["attn_mask"]
        added = None
        if self.alibi:
            slopes = arrays.get("alibi_slopes", 2.0 ** (-8.0 * np.arange(1, self.h + 1) / self.h))
            i = np.arange(self.s).reshape(1, 1, -1, 1)
            if self.mask.endswith("bottom_right"):
                i = i + (info["lk"] - info["lq"]).reshape(-1, 1, 1, 1)
            added = slopes.astype(np.float64).reshape(1, -1, 1, 1) * (np.arange(self.t) - i)
        sink = arrays.get("sink")
        if self.softmax == "off_by_one":
            sink = np.zeros(self.h)
        bias = arrays.get("bias")
        return oracle.Attention(
            info["q"],
            info["k"],
            info["v"],
            see,
            1 / np.sqrt(self.d) if self.scale is None else self.scale,
            bias=bias,
            pre_scale=self.pre_scale,
            added=added,
            softcap=self.softcap,
            sink=sink,
            kept=kept,
            dropout=0.3 if self.dropout else 0.0,
            unit=oracle.UNITS["float64"] if self.dtype == "float64" else oracle.F32,
        )

    def check(
        self, arrays: dict[str, Any], info: dict[str, Any], results: Any, gradients: Any
    ) -> None:
        """Every element of every result against the oracle."""
        kept = arrays.get("dropout_mask")
        if self.dropout == "key":
            kept = np.asarray(results[-1])
            assert set(np.unique(kept)) <= {0, 1}
        answer = self.expected(arrays, info, kept)
        where = f"{self.name}: "
        rows = np.arange(self.s)[None, :] < info["lq"][:, None]  # [b, s]
        zero = np.where(rows[:, None, :, None], answer.o, 0)
        if self.ragged:
            self._ragged_rows(where + "o", results[0], zero, answer.bound(self.dtype), "q", info)
        else:
            word = self.words()[0]
            oracle.check(
                where + "o",
                results[0],
                zero.transpose(ORDER[word]),
                answer.bound(self.dtype).transpose(ORDER[word]),
            )
        if self.lse:
            assert results[1].dtype == ("float64" if self.dtype == "float64" else "float32")
            bound = answer.lse_bound()
            if self.ragged:
                self._ragged_rows(
                    where + "lse",
                    results[1][..., None],
                    answer.lse[..., None],
                    bound[..., None],
                    "q",
                    info,
                )
            else:
                oracle.check(where + "lse", results[1], answer.lse, bound)
        if gradients is None:
            return
        dlse = None
        if self.lse:
            dlse = np.where(rows[:, None], info["dlse"], 0)
            if not self.ragged and (self.sink or self.softmax != "vanilla"):
                dlse = info["dlse"]  # of a hidden row, the log-sum-exp is the sink
        found = answer.gradients(
            np.where(rows[:, None, :, None], np.asarray(info["do"], np.float64), 0),
            dlse,
            self.dtype,
        )
        for name, (value, bound) in found.items():
            if name not in gradients:
                continue
            got = gradients[name]
            if name in "qkv" and self.ragged:
                self._ragged_rows(
                    where + "d" + name, got, value, bound, "q" if name == "q" else "kv", info
                )
                continue
            if name in "qkv":
                order = ORDER[self.words()["qkv".index(name)]]
                value, bound = value.transpose(order), bound.transpose(order)
            oracle.check(where + "d" + name, got, value, bound)

    def _ragged_rows(
        self, name: str, got: Any, value: Any, bound: Any, side: str, info: dict[str, Any]
    ) -> None:
        lens, places = info["lq" if side == "q" else "lk"], info[f"places_{side}"]
        got = np.asarray(got)
        used = np.zeros(got.shape[0], bool)
        for n in range(self.b):
            here = slice(places[n], places[n] + lens[n])
            used[here] = True
            oracle.check(
                f"{name}, sequence {n}",
                got[here],
                value[n, :, : lens[n]].swapaxes(0, 1),
                bound[n, :, : lens[n]].swapaxes(0, 1),
            ) if lens[n] else None
        assert np.all(got[~used] == 0), f"{name}: rows of no sequence are not 0"


CASES = [
    Case("plain"),
    Case("lengths", mask="causal", window=(5, -1), lengths="q kv", b=3),
    Case("one-row", s=1, t=33, lse=False),
    Case("causal-gqa", h=4, g=2, s=70, t=70, mask="causal"),
    Case("mqa-cross", h=4, g=1, s=5, t=67, e=8, layout="sbhd", mask="causal_bottom_right"),
    Case("wide-value", d=8, e=24, layout="bhsd", window=(3, 2), lengths="kv"),
    Case("mixed-layout", layout="bshd_sbhd_bhsd", mask="padding_causal", lengths="q kv"),
    Case("bottom-right", s=6, t=11, mask="causal_bottom_right", window=(4, -1), lengths="q kv"),
    Case("left-window", window=(3, 0)),
    Case("right-window", window=(-1, 2), s=12, t=7, lse=False),
    Case("bias-full", bias=(2, 4, 9, 9), attn_mask=(1, 1, 9, 9)),
    Case("bias-columns", bias=(1, 1, 1, 9), attn_mask=(2, 1, 1, 9), h=4, g=2),
    Case("bias-pre", bias=(1, 4, 9, 1), pre_scale=True, softcap=5.0, mask="causal"),
    Case("bias-bf16", bias=(2, 1, 9, 9), bias_dtype="bfloat16", lengths="kv", lse=False),
    Case("mask-heads", attn_mask=(1, 4, 9, 9), softmax="off_by_one"),
    Case("softcap", softcap=2.0, scale=0.7, lse=False),
    Case("alibi", alibi="default", mask="causal", lse=False),
    Case("slopes", alibi="given", mask="causal_bottom_right", s=5, lengths="kv"),
    Case("sink", sink=True, h=4, g=2, window=(4, 0), lengths="q kv"),
    Case("off-by-one", softmax="off_by_one", mask="causal", lengths="q", lse=False),
    Case("dropout", dropout="key", h=4, g=2, mask="causal"),
    Case("dropout-mask", dropout="mask", bias=(1, 4, 9, 9), lse=False),
    Case("ragged", b=3, layout="thd", mask="causal", h=4, g=2),
    Case("ragged-many", b=40, s=30, t=30, layout="thd", mask="causal", h=2, g=1, d=8, e=8),
    Case("ragged-gaps", b=3, layout="thd", gaps=True, s=7, t=11, sink=True),
    Case(
        "ragged-right", b=3, layout="thd", s=7, t=11, mask="padding_causal_bottom_right", lse=False
    ),
    Case("bf16", dtype="bfloat16", h=4, g=2, s=40, t=40, mask="causal", lengths="kv"),
    Case("f16", dtype="float16", bias=(1, 4, 9, 9), bias_dtype="float16", sink=True),
    Case("f64", dtype="float64", g=2, bias=(1, 4, 9, 9), bias_dtype="float64", softcap=3.0),
    Case("f64-plain", dtype="float64", s=33, t=65, e=24),
    Case("vmap-all", mapped=("q", "k", "v", "do", "dlse"), h=4, g=2, mask="causal"),
    Case("vmap-q", mapped=("q", "do", "dlse"), e=8, lengths="kv", bias=(1, 4, 1, 9)),
    Case("vmap-kv", mapped=("k", "v", "seqlens_kv"), e=8, lengths="kv", layout="sbhd", lse=False),
    Case(
        "vmap-bias", mapped=("bias", "q", "do", "dlse"), bias=(1, 1, 9, 9), attn_mask=(1, 1, 1, 9)
    ),
    Case("vmap-mask", mapped=("attn_mask", "v"), attn_mask=(2, 1, 1, 9), e=24, lse=False),
    Case("vmap-sink", mapped=("sink", "q", "do"), sink=True, h=4, g=2),
    Case("vmap-sink-whole", mapped=("q", "k", "v", "do"), sink=True, h=4, g=1, lse=False),
    Case(
        "vmap-sink-lengths", mapped=("q", "sink", "seqlens_kv"), sink=True, lengths="kv", lse=False
    ),
    Case("vmap-dropout", mapped=("q", "do", "dropout_key"), dropout="key"),
    Case("vmap-same-dropout", mapped=("q", "k", "v", "do"), dropout="key", lse=False),
    Case("vmap-ragged", mapped=("q", "k", "v", "do", "dlse"), layout="thd", h=4, g=2, gaps=True),
    Case(
        "vmap-ragged-lengths",
        mapped=("q", "k", "v", "do", "cu_seqlens_q", "cu_seqlens_kv"),
        layout="thd",
        lse=False,
    ),
]
