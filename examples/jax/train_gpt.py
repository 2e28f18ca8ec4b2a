"""Trains a small GPT on Python's own documentation, with Lawson's attention and fused MLPs.

    python examples/jax/train_gpt.py                        # the host's CPU, 20 steps
    python examples/jax/train_gpt.py --device gpu --steps 500 --width 768 --layers 12 --heads 12
    python examples/jax/train_gpt.py --check                # beside the same model without Lawson

The model is the usual one (Radford et al. 2019) over bytes: learnt positions, layer norm first,
causal attention, an MLP with GELU, tied embeddings, Adam. Two things of it are Lawson's: the
attention is `lawson.jax.dot_product_attention`, and the halves of the MLP are each marked with
`lawson.jax.fusion`, product, bias and activation in one kernel. Either they are fused, forward and
backward, or the program ends with the reason: `--plans` lists what runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lawson.jax

Params = dict[str, Any]
Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes, and which functions the model is made of."""

    layers: int
    heads: int
    kv_heads: int
    width: int
    length: int
    dtype: Any  # of activations; parameters and sums are f32
    attention: Callable[..., Array]
    up: Callable[..., Array]
    down: Callable[..., Array]
    vocabulary: int = 256

    @property
    def depth(self) -> int:
        return self.width // self.heads


# ---- the two halves of the MLP, marked and unmarked --------------------------------------------


def up(x: Array, w: Array, b: Array) -> Array:
    """gelu(x w + b): [n, d], [d, 4d], [4d]; sums in f32, the result as x."""
    y = jnp.dot(x, w, preferred_element_type=jnp.float32) + b
    return jax.nn.gelu(y).astype(x.dtype)


def down(x: Array, w: Array, b: Array) -> Array:
    """x w + b: [n, 4d], [4d, d], [d]; sums in f32, the result as x."""
    return (jnp.dot(x, w, preferred_element_type=jnp.float32) + b).astype(x.dtype)


def with_lawson(sizes: dict[str, Any], device: str) -> Model:
    """The model that runs Lawson's kernels. On the CPU the engine has to be named."""
    fused = lawson.jax.fusion(engines=["cpu"] if device == "cpu" else ["cudnn"])
    return Model(
        **sizes, attention=lawson.jax.dot_product_attention, up=fused(up), down=fused(down)
    )


def without_lawson(sizes: dict[str, Any]) -> Model:
    """The same model, as XLA compiles it."""
    attention = functools.partial(jax.nn.dot_product_attention, implementation="xla")
    return Model(**sizes, attention=attention, up=up, down=down)


# ---- the model ---------------------------------------------------------------------------------


def initial(model: Model, seed: int) -> Params:
    """Normal with deviation 0.02; what adds to the residual stream smaller, by its depth."""
    keys = iter(jax.random.split(jax.random.key(seed), 2 + 4 * model.layers))
    d, kv = model.width, model.kv_heads * model.depth

    def normal(*shape: int, deviation: float = 0.02) -> Array:
        return jax.random.normal(next(keys), shape, jnp.float32) * deviation

    shrunk = 0.02 / (2 * model.layers) ** 0.5
    blocks = [
        {
            "norm1": jnp.ones(d),
            "qkv": normal(d, d + 2 * kv),
            "out": normal(d, d, deviation=shrunk),
            "norm2": jnp.ones(d),
            "w1": normal(d, 4 * d),
            "b1": jnp.zeros(4 * d),
            "w2": normal(4 * d, d, deviation=shrunk),
            "b2": jnp.zeros(d),
        }
        for _ in range(model.layers)
    ]
    return {
        "tokens": normal(model.vocabulary, d),
        "positions": normal(model.length, d),
        "blocks": blocks,
        "norm": jnp.ones(d),
    }


def normalised(x: Array, scale: Array) -> Array:
    """Layer norm over the last dim, in f32."""
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def logits(model: Model, params: Params, tokens: Array) -> Array:
    """f32 [batch, length, vocabulary] from i32 [batch, length]."""
    batch, length = tokens.shape
    x = params["tokens"][tokens] + params["positions"][:length]
    cast = functools.partial(jnp.asarray, dtype=model.dtype)
    for block in params["blocks"]:
        y = cast(normalised(x, block["norm1"])) @ cast(block["qkv"])
        y = y.reshape(batch, length, -1, model.depth)
        q, k, v = jnp.split(y, [model.heads, model.heads + model.kv_heads], axis=2)
        y = model.attention(q, k, v, is_causal=True)
        x = x + y.reshape(batch, length, -1) @ cast(block["out"])
        y = cast(normalised(x, block["norm2"])).reshape(batch * length, -1)
        y = model.up(y, cast(block["w1"]), block["b1"])
        y = model.down(y, cast(block["w2"]), block["b2"])
        x = x + y.reshape(x.shape)
    return normalised(x, params["norm"]) @ params["tokens"].T


def loss(model: Model, params: Params, batch: Array) -> Array:
    """Mean cross-entropy, in nats, of each byte after the ones before it."""
    found = logits(model, params, batch[:, :-1])
    scores = jax.nn.log_softmax(found)
    return -jnp.mean(jnp.take_along_axis(scores, batch[:, 1:, None], axis=-1))


# ---- training ----------------------------------------------------------------------------------


def adam(
    params: Params, gradients: Params, state: Params, rate: float = 1e-3
) -> tuple[Params, Params]:
    """Kingma and Ba 2015, with their constants."""
    step = state["step"] + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], gradients)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["second"], gradients)

    def moved(p: Array, m: Array, v: Array) -> Array:
        return p - rate * (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.999**step)) + 1e-8)

    params = jax.tree.map(moved, params, first, second)
    return params, {"step": step, "first": first, "second": second}


def rest(params: Params) -> Params:
    """Adam's state before the first step."""
    first, second = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    return {"step": jnp.zeros(()), "first": first, "second": second}


def training_step(model: Model) -> Callable[..., tuple[Array, Params, Params]]:
    """jitted: (params, state, batch) -> (loss, params, state)."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Params, batch: Array) -> tuple[Array, Params, Params]:
        value, gradients = jax.value_and_grad(functools.partial(loss, model))(params, batch)
        params, state = adam(params, gradients, state)
        return value, params, state

    return step


def documentation() -> np.ndarray:
    """Python's language reference, as every installation has it for `help()`: bytes."""
    from pydoc_data.topics import topics

    return np.frombuffer("\n\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def batches(text: np.ndarray, size: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """i32 [size, length + 1], from anywhere in the text."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - length - 1, size)
        yield np.stack([text[start : start + length + 1] for start in starts]).astype(np.int32)


def train(model: Model, options: argparse.Namespace) -> list[float]:
    """The loss of every step."""
    params = initial(model, options.seed)
    state = rest(params)
    step = training_step(model)
    losses, began = [], time.perf_counter()
    for number, batch in zip(
        range(options.steps),
        batches(documentation(), options.batch, options.length, options.seed),
        strict=False,
    ):
        value, params, state = step(params, state, batch)
        losses.append(float(value))
        if number % options.every == 0 or number + 1 == options.steps:
            print(f"step {number:5}  loss {losses[-1]:.4f}  {time.perf_counter() - began:7.1f} s")
    return losses


def print_plans(model: Model, options: argparse.Namespace) -> None:
    """Which plans one step runs, by which engine."""
    params = jax.eval_shape(functools.partial(initial, model, options.seed))
    batch = jax.ShapeDtypeStruct((options.batch, options.length + 1), jnp.int32)
    gradient = jax.grad(functools.partial(loss, model))
    for found in lawson.jax.inspect(gradient)(params, batch):
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
    options = parser.parse_args(arguments)
    sizes = {
        "layers": options.layers,
        "heads": options.heads,
        "kv_heads": options.kv_heads or options.heads,
        "width": options.width,
        "length": options.length,
        "dtype": jnp.float32 if options.device == "cpu" else jnp.bfloat16,
    }
    with jax.default_device(jax.devices(options.device)[0]):
        model = with_lawson(sizes, options.device)
        if options.plans:
            print_plans(model, options)
        losses = train(model, options)
        if options.check:
            # f32 sums in another order, or bf16 roundings, through so many steps of Adam.
            tolerance = 1e-4 if options.device == "cpu" else 3e-2
            compare(losses, train(without_lawson(sizes), options), tolerance)
    return losses


if __name__ == "__main__":
    main()
