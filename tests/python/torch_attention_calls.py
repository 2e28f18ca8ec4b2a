"""Random calls of scaled_dot_product_attention, and torch's own answer to each, in f64.

Shapes, dtypes, strides, masks and what is differentiated are drawn. The error that a call may have
is that of `attention_oracle`, which knows the sizes of the sums.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attention_oracle as oracle

DTYPES = {
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
STRIDES = ("plain", "transposed", "permuted", "sliced", "padded", "expanded", "turned", "shifted")


def strided(rng: np.random.Generator, x: torch.Tensor, kind: str) -> torch.Tensor:
    """The same numbers with other strides; of `expanded`, the first of a dim for all of it."""
    if kind == "transposed" and x.dim() >= 3:
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if kind == "permuted":
        order = [*rng.permutation(x.dim() - 1).tolist(), x.dim() - 1]
        back = [order.index(axis) for axis in range(x.dim())]
        return x.permute(order).contiguous().permute(back)
    if kind == "sliced":
        room = x.new_full((*x.shape[:-2], 2 * x.shape[-2], x.shape[-1]), 1e4)
        room[..., ::2, :] = x
        return room[..., ::2, :]
    if kind == "padded":
        room = x.new_full((*x.shape[:-1], x.shape[-1] + 3), 1e4)
        room[..., 1:-2] = x
        return room[..., 1:-2]
    if kind == "expanded":
        axis = int(rng.integers(0, x.dim() - 1))
        return x.narrow(axis, 0, 1).expand(x.shape) if x.shape[axis] else x
    if kind == "turned":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if kind == "shifted":
        room = x.new_empty(x.numel() + 1)
        view = room[1:].view(x.shape)
        view.copy_(x)
        return view
    return x


@dataclasses.dataclass
class Call:
    """One call: its tensors, the keywords, and the gradient of its output."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    grad_out: torch.Tensor
    name: str

    @staticmethod
    def draw(rng: np.random.Generator, device: str, dtypes: dict[torch.dtype, float]) -> Call:
        """One of many kinds; `dtypes` with their shares."""
        dtype = list(dtypes)[int(rng.choice(len(dtypes), p=list(dtypes.values())))]
        h, g = [(4, 4), (4, 2), (4, 1), (6, 3), (1, 1), (3, 3)][int(rng.integers(6))]
        few = rng.random() < 0.85
        s, t = (int(rng.integers(1, 24) if few else rng.choice([63, 64, 65, 128])) for _ in "st")
        if rng.random() < 0.3:
            t = s
        depths = [4, 16] if dtype == torch.float64 else [8, 16, 24, 32, 64]
        d, e = (int(rng.choice(depths)) for _ in "de")
        if rng.random() < 0.6:
            e = d
        lead: tuple[int, ...] = [(), (1,), (2,), (3,), (2,), (2, 3)][int(rng.integers(6))]
        enable_gqa = h != g

        def normal(*shape: int) -> torch.Tensor:
            numbers = rng.standard_normal(shape) * float(rng.choice([0.3, 1.0, 3.0]))
            return torch.from_numpy(numbers).to(device, dtype)

        shapes = [(*lead, h, s, d), (*lead, g, t, d), (*lead, g, t, e)]
        if not enable_gqa and h == 1 and not lead and rng.random() < 0.5:
            shapes = [shape[1:] for shape in shapes]
        elif rng.random() < 0.15:  # broadcasts
            shapes[1] = (*(1 for _ in lead), *shapes[1][-3:])
            if not enable_gqa:
                shapes[2] = (*shapes[2][:-3], 1, t, e)
        kinds = [str(rng.choice(STRIDES)) if rng.random() < 0.7 else "plain" for _ in "qkvo"]
        query, key, value = (
            strided(rng, normal(*shape), kind) for shape, kind in zip(shapes, kinds, strict=False)
        )
        mask, causal = Call._draw_mask(rng, device, dtype, shapes[0][:-1], t)
        out = (*shapes[0][:-1], e)
        grad_out = strided(rng, normal(*out), kinds[3])
        if rng.random() < 0.1:
            grad_out = normal(*(1 for _ in out)).expand(out)
        scale = float(rng.choice([0.3, 0.125]))
        drawn = None if rng.random() < 0.7 else scale
        named = f"{dtype} {shapes} {kinds} mask {None if mask is None else mask.shape} {causal}"
        call = Call(query, key, value, mask, causal, drawn, enable_gqa, grad_out, named)
        for x in (query, key, value):
            x.requires_grad_(rng.random() < 0.85)
        if mask is not None and mask.is_floating_point():
            mask.requires_grad_(rng.random() < 0.5)
        return call

    @staticmethod
    def _draw_mask(
        rng: np.random.Generator, device: str, dtype: torch.dtype, rows: tuple[int, ...], t: int
    ) -> tuple[torch.Tensor | None, bool]:
        kind = str(rng.choice(["none", "causal", "bool", "bool", "float", "float"]))
        if kind in ("none", "causal"):
            return None, kind == "causal"
        full = (*rows, t)
        shape = tuple(1 if rng.random() < 0.35 else n for n in full)
        shape = shape[int(rng.integers(0, len(shape) - 1)) :]
        keep = torch.from_numpy(rng.random(shape) < 0.7).to(device)
        if len(shape) > 1:
            keep &= torch.from_numpy(rng.random((*shape[:-1], 1)) < 0.8).to(device)
        if kind == "float":
            wide = dtype if rng.random() < 0.7 or dtype == torch.float64 else torch.float32
            numbers = torch.from_numpy(rng.standard_normal(shape) * 2).to(device, wide)
            if rng.random() < 0.7:
                numbers = numbers.masked_fill(~keep, -torch.inf)
            keep = numbers
        if rng.random() < 0.3:
            keep = keep.expand(torch.broadcast_shapes(keep.shape, full))
        elif rng.random() < 0.3 and keep.dim() >= 2:
            keep = keep.transpose(-1, -2).contiguous().transpose(-1, -2)
        return keep.detach(), False

    def leaves(self) -> dict[str, torch.Tensor]:
        """What is differentiated."""
        named = {"q": self.query, "k": self.key, "v": self.value, "bias": self.attn_mask}
        return {name: x for name, x in named.items() if x is not None and x.requires_grad}

    def run(self, function: Any, **more: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The output, and the gradients of the leaves."""
        wrt = self.leaves()
        o = function(
            self.query,
            self.key,
            self.value,
            attn_mask=self.attn_mask,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
            **more,
        )
        assert o.requires_grad == bool(wrt), self.name
        if not wrt:
            return o, {}
        found = torch.autograd.grad(o, list(wrt.values()), self.grad_out)
        return o, dict(zip(wrt, found, strict=True))

    def by_torch(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The same by torch's own function, unfused and in f64."""

        def wide(x: torch.Tensor | None) -> torch.Tensor | None:
            if x is None or not x.is_floating_point():
                return x
            return x.detach().double().requires_grad_(x.requires_grad)

        call = dataclasses.replace(
            self,
            query=wide(self.query),
            key=wide(self.key),
            value=wide(self.value),
            attn_mask=wide(self.attn_mask),
            grad_out=wide(self.grad_out),
        )
        with sdpa_kernel(SDPBackend.MATH):
            o, found = call.run(F.scaled_dot_product_attention)
        return numbers(o), {name: numbers(x) for name, x in found.items()}

    def bounds(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """How far output and gradients may be off, in the shapes that they have."""
        lead = self.grad_out.shape[:-3]
        dims = len(lead)

        def four(x: torch.Tensor) -> np.ndarray:
            x = x.reshape((1,) * (3 + dims - x.dim()) + tuple(x.shape))
            whole = x.expand(*lead, *x.shape[-3:]).reshape(-1, *x.shape[-3:])
            return numbers(whole)

        query, key, value = (four(x) for x in (self.query, self.key, self.value))
        if key.shape[1] != value.shape[1]:
            key, value = (oracle.repeat(x, query.shape[1]) for x in (key, value))
        see: Any = np.ones((1, 1, 1, 1), bool)
        bias = None
        if self.is_causal:
            see = np.tril(np.ones((query.shape[2], key.shape[2]), bool))[None, None]
        if self.attn_mask is not None:
            full = (*self.grad_out.shape[:-1], key.shape[2])
            mask = self.attn_mask.expand(full).reshape(-1, *(1,) * (3 - len(full)), *full[-3:])
            if mask.dtype == torch.bool:
                see = numbers(mask.reshape(-1, query.shape[1], *full[-2:])) != 0
            else:
                bias = numbers(mask.reshape(-1, query.shape[1], *full[-2:]))
        exact = self.query.dtype == torch.float64
        answer = oracle.Attention(
            query,
            key,
            value,
            see,
            query.shape[-1] ** -0.5 if self.scale is None else self.scale,
            bias=bias,
            unit=oracle.UNITS["float64"] if exact else oracle.F32,
        )
        dtype = DTYPES[self.query.dtype]
        if self.query.is_cuda:  # kernels round the weights, and what comes back to them, to it
            answer.error = answer.error + 2 * oracle.UNITS[dtype.name]
            answer.step = oracle.TINY.get(dtype.name, 0.0)
        found = answer.gradients(four(self.grad_out), None, dtype)
        bounds = {}
        for name, x in self.leaves().items():
            # Terms of a sum over what was broadcast are stored in the dtype; those of a bias are
            # the scores', of the dtype of the values, whatever its own.
            whole = found[name][1] + oracle.TINY.get(dtype.name, 0.0)
            unit = max(oracle.UNITS[DTYPES[x.dtype].name], oracle.UNITS[dtype.name])
            whole = whole + 4 * unit * np.abs(found[name][0])
            bounds[name] = _summed(whole.reshape(*lead, *whole.shape[1:]), x.shape)
        return answer.bound(dtype).reshape(self.grad_out.shape), bounds


def _summed(x: np.ndarray, shape: Any) -> np.ndarray:
    """Over the dims that were broadcast from `shape`."""
    if x.ndim < len(shape):
        x = x.reshape((1,) * (len(shape) - x.ndim) + x.shape)
    while x.ndim > len(shape):
        x = x.sum(0)
    over = tuple(axis for axis, n in enumerate(shape) if n == 1 and x.shape[axis] != 1)
    return x.sum(over, keepdims=True) if over else x


def numbers(x: torch.Tensor) -> np.ndarray:
    """As f64, on the host."""
    return x.detach().to("cpu", torch.float64).numpy()


def check(call: Call, function: Any, **more: Any) -> None:
    """Runs the call and compares every element of output and gradients."""
    o, found = call.run(function, **more)
    expected, gradients = call.by_torch()
    bound, bounds = call.bounds()
    assert o.dtype == call.query.dtype, call.name
    oracle.check(f"{call.name}: o", numbers(o), expected, bound)
    for name, x in call.leaves().items():
        assert found[name].dtype == x.dtype and found[name].shape == x.shape, call.name
        oracle.check(f"{call.name}: d{name}", numbers(found[name]), gradients[name], bounds[name])
