"""Trains a small GPT on Python's own documentation, with Lawson's attention and fused MLPs.

    python examples/torch/train_gpt.py                        # the host's CPU, 20 steps
    python examples/torch/train_gpt.py --device gpu --steps 500 --width 768 --layers 12 --heads 12
    python examples/torch/train_gpt.py --check                # beside the same model without Lawson

The model is the usual one (Radford et al. 2019) over bytes: learnt positions, layer norm first,
causal attention, an MLP with GELU, tied embeddings, Adam. Two things of it are Lawson's: the
attention is `lawson.torch.scaled_dot_product_attention`, and the halves of the MLP are methods that
are each marked with `lawson.torch.fusion`: product, bias and activation in one kernel, with the
layer's parameters as operands. Either they are fused, forward and backward, or the program ends
with the reason: `--plans` lists what runs, `--compile` runs the step under torch.compile.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lawson.torch


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a model; `dtype` is that of activations: parameters and sums are f32."""

    layers: int
    heads: int
    kv_heads: int
    width: int
    length: int
    dtype: torch.dtype
    vocabulary: int = 256

    @property
    def depth(self) -> int:
        return self.width // self.heads


# ---- the two halves of the MLP, marked and unmarked --------------------------------------------


class Half(nn.Module):
    """x w + b in f32, and what is done with it; the result as x: [n, in] to [n, out]."""

    def __init__(self, inner: int, outer: int, deviation: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inner, outer) * deviation)
        self.bias = nn.Parameter(torch.zeros(outer))

    def product(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype) + self.bias


class Up(Half):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.product(x)).to(x.dtype)


class Down(Half):
    def forward(self, x: Tensor) -> Tensor:
        return self.product(x).to(x.dtype)


class FusedUp(Up):
    """On the CPU the engine has to be named: LAWSON_ENGINE=cpu, as `main` does it."""

    forward = lawson.torch.fusion(Up.forward)


class FusedDown(Down):
    forward = lawson.torch.fusion(Down.forward)


# ---- the model ---------------------------------------------------------------------------------


def normalised(x: Tensor, scale: Tensor) -> Tensor:
    """Layer norm over the last dim, in f32."""
    return F.layer_norm(x, (x.shape[-1],), scale)


class Block(nn.Module):
    def __init__(self, sizes: Sizes, attention: Callable[..., Tensor], fused: bool) -> None:
        super().__init__()
        d, kv = sizes.width, sizes.kv_heads * sizes.depth
        shrunk = 0.02 / (2 * sizes.layers) ** 0.5  # what adds to the residual stream
        self.sizes, self.attention = sizes, attention
        self.norm1 = nn.Parameter(torch.ones(d))
        self.qkv = nn.Parameter(torch.randn(d, d + 2 * kv) * 0.02)
        self.out = nn.Parameter(torch.randn(d, d) * shrunk)
        self.norm2 = nn.Parameter(torch.ones(d))
        up, down = (FusedUp, FusedDown) if fused else (Up, Down)
        self.up, self.down = up(d, 4 * d, 0.02), down(4 * d, d, shrunk)

    def forward(self, x: Tensor) -> Tensor:
        sizes = self.sizes
        batch, length, _ = x.shape
        y = normalised(x, self.norm1).to(sizes.dtype) @ self.qkv.to(sizes.dtype)
        heads = y.view(batch, length, -1, sizes.depth).transpose(1, 2)
        q, k, v = heads.split([sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=1)
        grouped = sizes.heads != sizes.kv_heads
        y = self.attention(q, k, v, is_causal=True, enable_gqa=grouped)
        y = y.transpose(1, 2).reshape(batch, length, -1)
        x = x + y @ self.out.to(sizes.dtype)
        y = normalised(x, self.norm2).to(sizes.dtype).view(batch * length, -1)
        return x + self.down(self.up(y)).view(x.shape)


class Model(nn.Module):
    """f32 [batch, length, vocabulary] from i64 [batch, length]."""

    def __init__(self, sizes: Sizes, *, with_lawson: bool) -> None:
        super().__init__()
        lawsons, plain = lawson.torch.scaled_dot_product_attention, F.scaled_dot_product_attention
        attention = lawsons if with_lawson else plain
        self.tokens = nn.Parameter(torch.randn(sizes.vocabulary, sizes.width) * 0.02)
        self.positions = nn.Parameter(torch.randn(sizes.length, sizes.width) * 0.02)
        self.blocks = nn.ModuleList(
            Block(sizes, attention, with_lawson) for _ in range(sizes.layers)
        )
        self.norm = nn.Parameter(torch.ones(sizes.width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens[tokens] + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return normalised(x, self.norm) @ self.tokens.t()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of each byte after the ones before it."""
    scores = model(batch[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())


# ---- training ----------------------------------------------------------------------------------


def documentation() -> Tensor:
    """Python's language reference, as every installation has it for `help()`: bytes."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(text: Tensor, size: int, length: int, seed: int) -> Iterator[Tensor]:
    """i64 [size, length + 1], from anywhere in the text."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - length - 1, (size,), generator=generator)
        yield torch.stack([text[start : start + length + 1] for start in starts]).long()


def new_model(options: argparse.Namespace, *, with_lawson: bool) -> Model:
    """The same parameters for the same seed."""
    torch.manual_seed(options.seed)
    on_gpu = options.device == "gpu"
    sizes = Sizes(
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads or options.heads,
        width=options.width,
        length=options.length,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
    )
    return Model(sizes, with_lawson=with_lawson).to("cuda" if on_gpu else "cpu")


def train(options: argparse.Namespace, *, with_lawson: bool) -> list[float]:
    """The loss of every step."""
    model = new_model(options, with_lawson=with_lawson)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    where = next(model.parameters()).device
    of = torch.compile(loss, fullgraph=True) if options.compile else loss
    losses, began = [], time.perf_counter()
    text = batches(documentation(), options.batch, options.length, options.seed)
    for number, batch in zip(range(options.steps), text, strict=False):
        optimizer.zero_grad()
        value = of(model, batch.to(where))
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
        if number % options.every == 0 or number + 1 == options.steps:
            print(f"step {number:5}  loss {losses[-1]:.4f}  {time.perf_counter() - began:7.1f} s")
    return losses


def print_plans(options: argparse.Namespace) -> None:
    """Which plans one step runs, by which engine."""
    model = new_model(options, with_lawson=True)
    where = next(model.parameters()).device
    batch = torch.zeros((options.batch, options.length + 1), dtype=torch.long, device=where)
    step: Callable[[Tensor], Any] = lambda batch: loss(model, batch).backward()
    for found in lawson.torch.inspect(step)(batch):
        print(f"{found.name:24} engine {found.engine:6} plans {' '.join(found.plan_ids)}")


def compare(fused: Sequence[float], plain: Sequence[float], tolerance: float) -> None:
    """Ends the program when the two models do not learn the same."""
    worst = max(abs(a - b) / abs(b) for a, b in zip(fused, plain, strict=True))
    print(f"largest relative difference of a step's loss: {worst:.1e}, allowed {tolerance:.0e}")
    if worst > tolerance:
        raise SystemExit("the fused model's losses are not those of the unfused one")


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, help="fewer than heads: grouped queries")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=5, help="steps between lines of output")
    parser.add_argument("--check", action="store_true", help="also train without Lawson, compare")
    parser.add_argument("--plans", action="store_true", help="list the plans of a step")
    parser.add_argument("--compile", action="store_true", help="the step under torch.compile")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        os.environ.setdefault("LAWSON_ENGINE", "cpu")
    if options.plans:
        print_plans(options)
    losses = train(options, with_lawson=True)
    if options.check:
        # f32 sums in another order, or bf16 roundings, through so many steps of Adam.
        tolerance = 1e-4 if options.device == "cpu" else 3e-2
        compare(losses, train(options, with_lawson=False), tolerance)
    return losses


if __name__ == "__main__":
    main()
