"""Attention in plain NumPy and f64, forward and backward, with bounds of the error of others.

Everything is dense and logical, `[b, h, s, d]`; what a call's layout, lengths and masks mean has
been turned into one boolean array before (`visible`). Shares nothing with the library.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

F32 = 2.0**-24
TINY = {"float16": 2.0**-24}  # the smallest step near 0
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": F32, "float64": 2.0**-53}


def visible(
    mask: str,
    window: tuple[int, int],
    lengths_q: Any,
    lengths_kv: Any,
    rows: int,
    columns: int,
) -> np.ndarray:
    """bool `[b, 1, rows, columns]`: which columns a row sees, by mask, window and lengths."""
    lq = np.asarray(lengths_q).reshape(-1, 1, 1, 1)
    lk = np.asarray(lengths_kv).reshape(-1, 1, 1, 1)
    i = np.arange(rows).reshape(1, 1, -1, 1)
    j = np.arange(columns).reshape(1, 1, 1, -1)
    at = i + (lk - lq if mask.endswith("bottom_right") else 0)
    left, right = window
    if "causal" in mask:
        right = 0
    see = (i < lq) & (j < lk)
    if left >= 0:
        see &= j >= at - left
    if right >= 0:
        see &= j <= at + right
    return see


def repeat(x: np.ndarray, heads: int) -> np.ndarray:
    """k or v with a head for each head of q."""
    return np.repeat(x, heads // x.shape[1], axis=1)


def reduce_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sums over the dims that `shape` has as 1."""
    over = tuple(a for a, n in enumerate(shape) if n == 1)
    return x.sum(axis=over, keepdims=True) if over else x


@dataclasses.dataclass
class Attention:
    """One attention, in f64. `see` and `kept` broadcast to the scores."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    see: np.ndarray
    scale: float
    bias: np.ndarray | None = None
    pre_scale: bool = False
    added: np.ndarray | None = None  # ALiBi, additive masks
    softcap: float = 0.0
    sink: np.ndarray | None = None  # [h]; zeros: off by one
    kept: np.ndarray | None = None
    dropout: float = 0.0
    unit: float = F32  # of the arithmetic whose error is bounded
    step: float = 0.0  # weights are rounded to its multiples, too

    def __post_init__(self) -> None:
        self.q, k, v = (np.asarray(x, np.float64) for x in (self.q, self.k, self.v))
        heads = self.q.shape[1]
        self.k, self.v = repeat(k, heads), repeat(v, heads)
        self.kv_heads = k.shape[1]
        raw = self.q @ self.k.swapaxes(-1, -2)
        size = np.abs(self.q) @ np.abs(self.k).swapaxes(-1, -2)
        bias = None if self.bias is None else np.asarray(self.bias, np.float64)
        if bias is not None and self.pre_scale:
            raw, size = raw + bias, size + np.abs(bias)
        x, size = raw * self.scale, size * abs(self.scale)
        self.slope = np.ones_like(x)
        if self.softcap:
            t = np.tanh(x / self.softcap)
            x, self.slope = self.softcap * t, 1 - t * t
        if bias is not None and not self.pre_scale:
            x, size = x + bias, size + np.abs(bias)
        if self.added is not None:
            x = x + self.added
            size = size + np.where(np.isfinite(self.added), np.abs(self.added), 0)
        see = np.broadcast_to(self.see, x.shape) & ~np.isneginf(x)
        x = np.where(see, x, -np.inf)
        extra = (
            None if self.sink is None else np.asarray(self.sink, np.float64).reshape(1, -1, 1, 1)
        )
        top = x.max(axis=-1, keepdims=True, initial=-np.inf)
        self.max_logit = top[..., 0]
        if extra is not None:
            top = np.maximum(top, extra)
        finite = np.where(np.isfinite(top), top, 0)
        weights = np.exp(x - finite)
        total = weights.sum(axis=-1, keepdims=True)
        if extra is not None:
            total = total + np.exp(extra - finite)
        with np.errstate(divide="ignore"):
            self.lse = (finite + np.log(total))[..., 0]
        self.p = np.where(total > 0, weights / np.where(total > 0, total, 1), 0)
        self.drop = np.ones_like(x)
        if self.kept is not None:
            self.drop = np.asarray(self.kept, np.float64) / (1 - self.dropout)
        self.o = (self.p * self.drop) @ self.v
        # The relative error of a row's weights: that of its scores, in f32.
        depth = self.q.shape[-1]
        here = np.where(see, size, 0).max(axis=-1, keepdims=True, initial=0)
        self.error = 2 * self.unit * ((depth + 4) * here + x.shape[-1] + 8)

    def bound(self, dtype: Any) -> np.ndarray:
        """How far an output computed in f32 and stored as `dtype` may be off."""
        name = np.dtype(dtype).name
        weighed = (self.p * self.drop) @ np.abs(self.v)
        lost = self.step * np.abs(self.v).sum(axis=-2, keepdims=True)
        stored = 2 * UNITS[name] * np.abs(self.o) + TINY.get(name, 1e-30)
        return 2 * self.error * weighed + lost + stored

    def lse_bound(self) -> np.ndarray:
        """The same of the log-sum-exp."""
        lse = np.where(np.isfinite(self.lse), np.abs(self.lse), 0)
        return self.error[..., 0] + 4 * self.unit * (1 + lse)

    def gradients(
        self, do: Any, dlse: Any = None, dtype: Any = np.float32
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Of each operand, the gradient and the bound of its error in a run that stores `dtype`."""
        do = np.asarray(do, np.float64)
        extra = np.zeros_like(self.lse) if dlse is None else np.asarray(dlse, np.float64)
        extra = np.where(np.isneginf(self.lse), 0, extra)[..., None]
        dp = (do @ self.v.swapaxes(-1, -2)) * self.drop
        dp_size = (np.abs(do) @ np.abs(self.v).swapaxes(-1, -2)) * self.drop
        delta = (self.p * dp).sum(axis=-1, keepdims=True)
        delta_size = (np.abs(do) * ((self.p * self.drop) @ np.abs(self.v))).sum(-1, keepdims=True)
        ds = self.p * (dp - delta + extra)
        unit = UNITS[np.dtype(dtype).name]
        # The backward reads the rounded output, and dlse as up to three numbers of its type.
        error = 4 * self.error + (2 * unit if unit > F32 else 0)
        ds_size = (error * self.p + self.step) * (dp_size + delta_size + np.abs(extra))
        dx, dx_size = ds * self.slope, ds_size * (1 + np.abs(self.slope))
        q, k = self.q, self.k

        def heads(x: np.ndarray) -> np.ndarray:
            b, h, s, d = x.shape
            return x.reshape(b, self.kv_heads, h // self.kv_heads, s, d).sum(axis=2)

        kept = self.p * self.drop
        found = {
            "q": (self.scale * dx @ k, abs(self.scale) * dx_size @ np.abs(k)),
            "k": (
                heads(self.scale * dx.swapaxes(-1, -2) @ q),
                heads(abs(self.scale) * dx_size.swapaxes(-1, -2) @ np.abs(q)),
            ),
            "v": (
                heads(kept.swapaxes(-1, -2) @ do),
                heads((error * kept + self.step).swapaxes(-1, -2) @ np.abs(do)),
            ),
        }
        if self.bias is not None:
            shape = np.asarray(self.bias).shape
            at, size = (
                (dx * self.scale, dx_size * abs(self.scale)) if self.pre_scale else (ds, ds_size)
            )
            found["bias"] = (reduce_to(at, shape), reduce_to(size, shape))
        if self.sink is not None:
            share = np.exp(np.asarray(self.sink).reshape(1, -1, 1, 1) - self.lse[..., None])
            found["sink"] = (
                (share * (extra - delta)).sum(axis=(0, 2, 3)),
                (share * error * (np.abs(extra) + delta_size)).sum(axis=(0, 2, 3)),
            )
        stored = {name: np.dtype(dtype).name for name in found}
        stored["sink"] = "float32"
        if self.bias is not None:
            stored["bias"] = np.asarray(self.bias).dtype.name
        # Two gradients, of the output and of the log-sum-exp, rounded and added.
        return {
            name: (
                value,
                size + 6 * UNITS[stored[name]] * np.abs(value) + 3 * TINY.get(stored[name], 1e-30),
            )
            for name, (value, size) in found.items()
        }


def check(name: str, got: Any, expected: np.ndarray, bound: np.ndarray) -> None:
    """Asserts that every element is within its bound, and infinities are where they should be."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
    both = np.isfinite(expected)
    np.testing.assert_array_equal(np.where(both, 0, got), np.where(both, 0, expected), err_msg=name)
    assert np.all(np.isfinite(got) == both), f"{name}: not finite where it should be"
    off = np.where(both, np.abs(np.where(both, got, 0) - np.where(both, expected, 0)), 0)
    worst = np.argmax(off / bound)
    assert np.all(off <= bound), (
        f"{name}: {got.flat[worst]} instead of {expected.flat[worst]} at "
        f"{np.unravel_index(worst, off.shape)}; the bound is "
        f"{np.broadcast_to(bound, off.shape).flat[worst]}"
    )
