"""Lawson in PyTorch beside PyTorch's own, on a GPU: one JSON document.

    python3 bench/gpu_torch.py [--json FILE] [--rounds N] [--only SECTION,...]
    python3 bench/gpu_torch.py --cpu          # everything in small on the host: a check of this file

- `host`: microseconds of the host for an eager call, which a kernel short enough never delays: a
  small attention without and with a gradient, and its backward, beside
  `F.scaled_dot_product_attention` (cuDNN's backend, and PyTorch's own choice); a fused layer;
- `graph`: microseconds that one more small attention adds to a captured CUDA graph;
- `attention`: milliseconds of the kernels on the shapes of bench/NOTES.md, forward, and forward and
  backward, beside cuDNN's backend;
- `fusions`: a layer, SwiGLU and an int8 product beside eager PyTorch and torch.compile;
- `gpt`: a training step (forward, backward, AdamW) of a GPT of 24 layers, d = 2048, s = 4096, with
  PyTorch's attention on cuDNN, with Lawson's, and with Lawson's MLPs too; peak memory;
- `memory`: the peak of one attention, forward and backward.

Contestants take turns and change places every round; medians, with the quartiles. Kernel times are
slopes: MANY calls less FEW, over the difference. How fast it was is for the reader; exits 1 where
results differ, or an engine or a plan is not the one that `inspect` tells.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lawson
import lawson.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

FEW, MANY, CALLS = 8, 40, 100
HOST_ROUNDS = 5  # as many more of these short samples
ATTENTION = [  # batch, heads, heads of K and V, length, depth, causal
    (2, 16, 16, 4096, 128, False),
    (2, 16, 16, 4096, 128, True),
    (1, 32, 8, 8192, 128, True),
    (1, 16, 16, 16384, 128, True),
    (4, 16, 16, 2048, 64, True),
    (8, 16, 16, 1024, 128, True),
]
SMALL_ATTENTION = [(1, 4, 2, 64, 16, True), (2, 2, 2, 48, 32, False)]


class Place:
    """Where it is measured; on the host everything is smaller, and graphs are plain calls."""

    def __init__(self, on_cpu: bool, rounds: int) -> None:
        self.on_cpu = on_cpu
        self.rounds = rounds
        self.device = "cpu" if on_cpu else "cuda"
        self.engine = "cpu" if on_cpu else "cudnn"
        self.dtype = torch.float32 if on_cpu else torch.bfloat16
        self.calls = 5 if on_cpu else CALLS
        self.few, self.many = (1, 3) if on_cpu else (FEW, MANY)

    def synchronize(self) -> None:
        if not self.on_cpu:
            torch.cuda.synchronize()

    def normal(self, *shape: int, seed: int = 0, grad: bool = False) -> Tensor:
        generator = torch.Generator(device=self.device).manual_seed(seed)
        x = torch.randn(shape, device=self.device, generator=generator).to(self.dtype)
        return x.requires_grad_(grad)

    def milliseconds(self, run: Callable[[], object]) -> float:
        """By the device's clock."""
        if self.on_cpu:
            begin = time.perf_counter()
            run()
            return (time.perf_counter() - begin) * 1e3
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last)

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        """What replays it as a CUDA graph."""
        if self.on_cpu:
            return run
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """The most that PyTorch's allocator has while it runs, above what it had before."""
        if self.on_cpu:
            run()
            return 0
        used = []
        for _ in range(4):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            torch.cuda.synchronize()
            used.append(torch.cuda.max_memory_allocated() - before)
        # autograd's thread may still have a round's gradients when the next begins.
        return max(used[1:])


def race(samples: dict[str, Callable[[], float]], rounds: int) -> dict[str, dict[str, Any]]:
    """The median, the quartiles and the least of each, in its own unit."""
    found: dict[str, list[float]] = {name: [] for name in samples}
    for sample in samples.values():
        sample()
    for round_ in range(rounds):
        for name in list(samples) if round_ % 2 == 0 else reversed(samples):
            found[name].append(samples[name]())
    rows = {}
    for name, values in found.items():
        low, _, high = (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        )
        rows[name] = {
            "median": statistics.median(values),
            "quartiles": [low, high],
            "least": min(values),
        }
    return rows


def check(got: Tensor, want: Tensor, what: str) -> None:
    """16-bit results beside f32's or each other's, relative to the largest."""
    a, b = got.detach().double(), want.detach().double()
    worst, scale = float((a - b).abs().max()), max(1.0, float(b.abs().max()))
    if not torch.isfinite(a).all() or worst > 2.0**-5 * scale:
        raise SystemExit(f"{what}: results differ by {worst} (largest: {scale})")


@contextlib.contextmanager
def backend(place: Place, which: str) -> Iterator[None]:
    """PyTorch's attention on cuDNN, or as PyTorch chooses."""
    if which == "cudnn" and not place.on_cpu:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            yield
    else:
        yield


def attentions(place: Place, causal: bool, grouped: bool = False) -> dict[str, Any]:
    """Ways to compute it, of [b, h, s, d]."""
    settings = {"is_causal": causal, "enable_gqa": grouped}

    torchs = functools.partial(F.scaled_dot_product_attention, **settings)
    lawsons = functools.partial(lawson.torch.scaled_dot_product_attention, **settings)
    return {"lawson": lawsons, "torch cudnn": torchs, "torch": torchs}


def plans_of(function: Callable[..., Any], *args: Any) -> list[dict[str, Any]]:
    """Name, engine and plan ids of all that it runs."""
    return [
        {"name": found.name, "engine": found.engine, "plans": list(found.plan_ids)}
        for found in lawson.torch.inspect(function)(*args)
    ]


def expect_engine(place: Place, plans: list[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    if not plans or {p["engine"] for p in plans} != {place.engine}:
        raise SystemExit(f"{what}: expected plans of {place.engine}, found {plans}")
    return plans


# ---- the host's cost of an eager call ----------------------------------------------------------


def host(place: Place) -> dict[str, Any]:
    shape = (1, 2, 64, 64)
    q, k, v = (place.normal(*shape, seed=i) for i in range(3))
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    seed = place.normal(*shape, seed=3)
    ways = attentions(place, causal=True)

    def of(run: Callable[[], object], which: str, grad: bool = True) -> Callable[[], float]:
        def sample() -> float:
            with backend(place, which), torch.set_grad_enabled(grad):
                place.synchronize()
                begin = time.perf_counter_ns()
                for _ in range(place.calls):
                    run()
                found = (time.perf_counter_ns() - begin) / place.calls / 1e3
                place.synchronize()
                return found

        return sample

    def pieces(way: Callable[..., Tensor]) -> dict[str, Callable[[], object]]:
        def training() -> object:
            return torch.autograd.grad(way(*given), given, seed)

        return {
            "without gradient": lambda: way(q, k, v),
            "in no_grad": lambda: way(*given),
            "with gradient": lambda: way(*given),
            "forward and backward": training,
        }

    names = {name: name.removeprefix("torch ") for name in ways}
    with backend(place, "cudnn"):
        want = ways["torch cudnn"](q, k, v)
    check(ways["lawson"](q, k, v), want, "host")
    rows: dict[str, Any] = {"unit": "microseconds of the host per call"}
    for what in pieces(ways["lawson"]):
        rows[what] = race(
            {
                name: of(pieces(way)[what], names[name], grad=what != "in no_grad")
                for name, way in ways.items()
            },
            HOST_ROUNDS * place.rounds,
        )
    step = lambda q, k, v: torch.autograd.grad(ways["lawson"](q, k, v), (q, k, v), seed)
    rows["plans"] = expect_engine(place, plans_of(step, *given), "host")

    x, w, b = place.normal(64, 64), place.normal(64, 64, seed=1), place.normal(64, seed=2)
    layer = lambda x, w, b: F.gelu(x @ w + b)
    fused = lawson.torch.fusion(layer, engines=[place.engine])
    check(fused(x, w, b), layer(x, w, b), "host: layer")
    rows["layer"] = race(
        {
            "lawson": of(lambda: fused(x, w, b), ""),
            "torch": of(lambda: layer(x, w, b), ""),
            "empty": of(lambda: torch.empty_strided((64, 64), (64, 1), device=place.device), ""),
        },
        HOST_ROUNDS * place.rounds,
    )
    told = lawson.torch.inspect(fused)(x, w, b)
    rows["layer plan"] = {"engine": told.engine, "plan": told.plan_id}
    return rows


# ---- inside a captured graph -------------------------------------------------------------------


def graph(place: Place) -> dict[str, Any]:
    """Each call's q is the result of the call before."""
    q, k, v = (place.normal(1, 2, 128, 64, seed=i) for i in range(3))
    ways = attentions(place, causal=True)
    del ways["torch"]
    samples = {}
    for name, way in ways.items():
        replays = {}
        for count in (place.few, place.many):

            def chain(way: Callable[..., Tensor] = way, count: int = count) -> Tensor:
                x = q
                for _ in range(count):
                    x = way(x, k, v)
                return x

            with backend(place, "cudnn"), torch.no_grad():
                replays[count] = place.captured(chain)

        def sample(replays: dict[int, Callable[[], object]] = replays) -> float:
            few, many = (place.milliseconds(replays[n]) for n in (place.few, place.many))
            return (many - few) / (place.many - place.few) * 1e3

        samples[name] = sample
    return {
        "unit": "microseconds of one more attention, kernel and all",
        **race(samples, place.rounds),
        "plans": expect_engine(place, plans_of(ways["lawson"], q, k, v), "graph"),
    }


# ---- kernels -----------------------------------------------------------------------------------


def slope(place: Place, run: Callable[[], object], which: str = "") -> Callable[[], float]:
    """Milliseconds of one call."""

    def some(count: int) -> Callable[[], object]:
        def call() -> object:
            for _ in range(count):
                run()
            return None

        return call

    def sample() -> float:
        with backend(place, which):
            few, many = (place.milliseconds(some(n)) for n in (place.few, place.many))
        return (many - few) / (place.many - place.few)

    return sample


def attention(place: Place) -> list[dict[str, Any]]:
    rows = []
    for batch, heads, kv_heads, length, depth, causal in (
        SMALL_ATTENTION if place.on_cpu else ATTENTION
    ):
        q = place.normal(batch, heads, length, depth, grad=True)
        k, v = (place.normal(batch, kv_heads, length, depth, seed=i, grad=True) for i in (1, 2))
        seed = place.normal(batch, heads, length, depth, seed=3)
        ways = attentions(place, causal, heads != kv_heads)
        del ways["torch"]

        def step(
            way: Callable[..., Tensor],
            q: Tensor = q,
            k: Tensor = k,
            v: Tensor = v,
            s: Tensor = seed,
        ) -> Any:
            return torch.autograd.grad(way(q, k, v), (q, k, v), s)

        def forward(
            way: Callable[..., Tensor], q: Tensor = q, k: Tensor = k, v: Tensor = v
        ) -> Tensor:
            with torch.no_grad():
                return way(q, k, v)

        with backend(place, "cudnn"):
            want = [forward(ways["torch cudnn"]), *step(ways["torch cudnn"])]
        for got, other in zip([forward(ways["lawson"]), *step(ways["lawson"])], want, strict=True):
            check(got, other, "attention")
        row: dict[str, Any] = {
            "config": f"{batch} {heads}/{kv_heads} {length} {depth} "
            f"{'causal' if causal else 'full'}",
            "unit": "milliseconds",
            "forward": race(
                {
                    n: slope(place, lambda way=way: forward(way), "cudnn")  # type: ignore[misc]
                    for n, way in ways.items()
                },
                place.rounds,
            ),
            "forward and backward": race(
                {
                    n: slope(place, lambda way=way: step(way), "cudnn")  # type: ignore[misc]
                    for n, way in ways.items()
                },
                place.rounds,
            ),
            "plans": expect_engine(
                place, plans_of(lambda way=ways["lawson"]: step(way)), "attention"
            ),
            "peak bytes": {},
        }
        for name, way in ways.items():
            with backend(place, "cudnn"):
                row["peak bytes"][name] = place.peak_bytes(lambda way=way: step(way))  # type: ignore[misc]
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def fusions(place: Place) -> list[dict[str, Any]]:
    m, k, n = (32, 64, 48) if place.on_cpu else (4096, 4096, 4096)
    x, w, u = place.normal(m, k), place.normal(k, n, seed=1), place.normal(k, n, seed=2)
    w, u = w / k**0.5, u / k**0.5
    bias = place.normal(n, seed=3)
    small = torch.randint(-8, 8, (k, n), device=place.device, dtype=torch.int8)
    scale = (place.normal(n, seed=4).abs() + 0.5) / k**0.5
    cases: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "gelu(x w + b)": (lambda x, w, b: F.gelu(x @ w + b), (x, w, bias)),
        "silu(x w) (x u)": (lambda x, w, u: F.silu(x @ w) * (x @ u), (x, w, u)),
        "x (int8 scale)": (lambda x, w, s: x @ (w.to(x.dtype) * s), (x, small, scale)),
    }
    rows = []
    for name, (function, args) in cases.items():
        fused = lawson.torch.fusion(function, engines=[place.engine])
        tuned = lawson.torch.fusion(function, engines=[place.engine], tuning="quick")
        compiled = function if place.on_cpu else torch.compile(function)
        ways = {"lawson": fused, "lawson tuned": tuned, "torch": function, "compile": compiled}
        with torch.no_grad():
            for other, way in ways.items():
                check(way(*args), function(*args), f"{name}: {other}")
            times = race(
                {
                    other: slope(place, lambda way=way, args=args: way(*args))  # type: ignore[misc]
                    for other, way in ways.items()
                },
                place.rounds,
            )
        told = {n: lawson.torch.inspect(f)(*args) for n, f in list(ways.items())[:2]}
        rows.append(
            {
                "case": f"{name}, {m} x {k} x {n}, {place.dtype}",
                "unit": "milliseconds",
                **times,
                "plans": {n: [t.engine, t.plan_id] for n, t in told.items()},
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


# ---- a training step ---------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, place: Place, width: int, heads: int, way: str) -> None:
        super().__init__()
        self.heads, self.depth = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention = attentions(place, causal=True)[
            "lawson" if way.startswith("lawson") else "torch cudnn"
        ]
        self.act: Callable[[Tensor], Tensor] = lambda x: F.gelu(self.up(x))
        self.project: Callable[[Tensor], Tensor] = lambda x: self.down(x)
        if way == "lawson, fused MLP":
            up, down = self.up, self.down
            self.act = lawson.torch.fusion(lambda x: F.gelu(up(x)), engines=[place.engine])
            self.project = lawson.torch.fusion(lambda x: down(x), engines=[place.engine])

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, self.depth)
        q, k, v = y.permute(2, 0, 3, 1, 4).unbind(0)
        y = self.attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        y = self.project(self.act(self.norm2(x).view(batch * length, width)))
        return x + y.view(x.shape)


class Gpt(nn.Module):
    def __init__(
        self, place: Place, layers: int, width: int, heads: int, length: int, way: str
    ) -> None:
        super().__init__()
        vocabulary = 256 if place.on_cpu else 50304
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(place, width, heads, way) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        return F.linear(self.norm(x), self.tokens.weight)


def gpt(place: Place) -> dict[str, Any]:
    layers, width, heads, length, batch = (
        (2, 32, 2, 16, 2) if place.on_cpu else (24, 2048, 16, 4096, 1)
    )
    generator = torch.Generator(device=place.device).manual_seed(7)
    top = 256 if place.on_cpu else 50304
    tokens = torch.randint(0, top, (batch, length + 1), device=place.device, generator=generator)
    rows: dict[str, Any] = {
        "config": f"{layers} layers, d {width}, {heads} heads, s {length}, batch {batch}, "
        f"{place.dtype} parameters, AdamW",
        "unit": "milliseconds of a step",
        "peak bytes": {},
        "first losses": {},
    }
    samples, kept = {}, []
    for way in ("torch cudnn", "lawson", "lawson, fused MLP"):
        torch.manual_seed(7)
        model = Gpt(place, layers, width, heads, length, way).to(place.device, place.dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not place.on_cpu)

        def loss(model: nn.Module = model) -> Tensor:
            found = model(tokens[:, :-1])
            return F.cross_entropy(found.flatten(0, 1).float(), tokens[:, 1:].flatten())

        def step(
            loss: Callable[[], Tensor] = loss, optimizer: torch.optim.Optimizer = optimizer
        ) -> Tensor:
            with backend(place, "cudnn"):
                optimizer.zero_grad(set_to_none=True)
                found = loss()
                found.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            return found.detach()

        if way != "torch cudnn":
            wanted = 2 * layers * (3 if "MLP" in way else 1)
            plans = expect_engine(place, plans_of(lambda loss=loss: loss().backward()), way)
            if len(plans) != wanted:
                raise SystemExit(f"{way}: {len(plans)} passes were told, expected {wanted}")
            # every layer runs the same
            rows[f"plans, {way}"] = [p for i, p in enumerate(plans) if p not in plans[:i]]
        first = step()
        rows["first losses"][way] = float(first)
        check(first, torch.tensor(rows["first losses"]["torch cudnn"]), f"gpt: {way}")
        rows["peak bytes"][way] = place.peak_bytes(step)
        kept.append((model, optimizer))
        samples[way] = lambda step=step: place.milliseconds(step)
    rows.update(race(samples, max(2, place.rounds)))
    return rows


def memory(place: Place) -> dict[str, Any]:
    """Of one attention, above its operands."""
    shape = (1, 2, 32, 16) if place.on_cpu else (4, 16, 8192, 128)
    q, k, v = (place.normal(*shape, seed=i, grad=True) for i in range(3))
    seed = place.normal(*shape, seed=3)
    rows: dict[str, Any] = {"config": str(shape), "unit": "bytes"}
    for name, way in attentions(place, causal=True).items():
        with backend(place, name.removeprefix("torch ")):
            rows[name] = place.peak_bytes(
                lambda way=way: torch.autograd.grad(way(q, k, v), (q, k, v), seed)  # type: ignore[misc]
            )
    return rows


SECTIONS: dict[str, Callable[[Place], Any]] = {
    "host": host,
    "graph": graph,
    "attention": attention,
    "fusions": fusions,
    "gpt": gpt,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the document there")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", default=",".join(SECTIONS), help="%(default)s")
    parser.add_argument("--cpu", action="store_true", help="a check of this file, on the host")
    options = parser.parse_args()
    place = Place(options.cpu, options.rounds)
    if options.cpu:
        import os

        os.environ["LAWSON_ENGINE"] = "cpu"
    elif not torch.cuda.is_available():
        raise SystemExit("no GPU that PyTorch sees; --cpu checks this file on the host")
    document: dict[str, Any] = {
        "device": "cpu" if options.cpu else torch.cuda.get_device_name(),
        "versions": {
            "lawson": lawson.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn of torch": torch.backends.cudnn.version(),
            "engines": json.loads(
                json.dumps(lawson.info().get("engines")),
                object_hook=lambda found: {k: v for k, v in found.items() if k != "path"},
            ),
        },
        "rounds": options.rounds,
    }
    for name in options.only.split(","):
        document[name] = SECTIONS[name](place)
    text = json.dumps(document, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
