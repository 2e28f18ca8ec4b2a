"""Lawson in JAX beside JAX's own, on a GPU.

    python3 bench/gpu_jax.py [--json FILE] [--rounds N]

- `cudnn_fusion` of int8 . bf16 + f32 at 4 x 1024^3 beside the same function compiled by XLA: by the
  device's clock, and in a program of many;
- attention beside `jax.nn.dot_product_attention(implementation="cudnn")`, forward, and forward and
  backward, on the shapes of bench/NOTES.md;
- what one more call costs inside a compiled program, for a small attention, where the host is the
  limit: beside XLA's own custom call, and by the device's clock;
- the same results with command buffers (CUDA graphs) on and off, in processes of their own.

Times are slopes: MANY calls less FEW, over the difference. Contestants take turns and change places
every round; medians. The device's clock is the profiler's: of one execution, from the begin of its
first kernel to the end of its last. Random data. How fast it was is for the reader; exits 1 when
results differ or the compiled program has another call target or plan than expected.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FEW, MANY = 8, 40
ATTENTION = [  # batch, heads, heads of K and V, length, depth, causal
    (2, 16, 16, 4096, 128, False),
    (2, 16, 16, 4096, 128, True),
    (1, 32, 8, 8192, 128, True),
    (1, 16, 16, 16384, 128, True),
    (4, 16, 16, 2048, 64, True),
    (8, 16, 16, 1024, 128, True),
    (1, 16, 16, 16384, 64, False),
]


class Contestant:
    """FEW and MANY calls by `make(count)`, which gives a function that starts them."""

    def __init__(self, make):
        import jax

        self.programs = {count: make(count) for count in (FEW, MANY)}
        self.samples = []
        for start in self.programs.values():
            jax.block_until_ready(start())

    def seconds(self, count):
        import jax

        begin = time.perf_counter()
        jax.block_until_ready(self.programs[count]())
        return time.perf_counter() - begin

    def sample(self):
        few, many = self.seconds(FEW), self.seconds(MANY)
        self.samples.append((many - few) / (MANY - FEW) * 1e3)

    def milliseconds(self):
        return statistics.median(self.samples)


def one_by_one(function, arguments):
    """Calls that are long enough to hide the host."""
    import jax

    compiled = jax.jit(function)
    return Contestant(lambda count: lambda: [compiled(*arguments) for _ in range(count)][-1])


def chained(function, q, k, v):
    """One program, in which each call's q is the result of the call before."""
    import jax

    def make(count):
        def run(q):
            for _ in range(count):
                q = function(q, k, v)
            return q

        compiled = jax.jit(run)
        return lambda: compiled(q)

    return Contestant(make)


def side_by_side(function, sets):
    """One program of calls with arguments and results of their own, which nothing has in a cache."""
    import jax

    compiled = jax.jit(lambda sets: [function(*arguments) for arguments in sets])
    return Contestant(lambda count: lambda: compiled(sets[:count]))


def race(contestants, rounds):
    """Median milliseconds by name."""
    order = list(contestants)
    for round_ in range(rounds):
        for name in order if round_ % 2 == 0 else reversed(order):
            contestants[name].sample()
    return {name: contestant.milliseconds() for name, contestant in contestants.items()}


def by_the_device(start, executions=20):
    """Microseconds of each execution: `start(number)` begins one that takes no other's memory."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            for number in range(executions):
                jax.block_until_ready(start(number))
        (path,) = glob.glob(f"{folder}/**/perfetto_trace.json.gz", recursive=True)
        with gzip.open(path) as file:
            trace = json.load(file)
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    gpus = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "GPU" in event["args"]["name"]
    }
    nodes = [e for e in events if e.get("ph") == "X" and e["pid"] in gpus and e.get("args")]
    nodes = sorted((e for e in nodes if "correlation_id" in e["args"]), key=lambda e: e["ts"])
    if not nodes or len(nodes) % executions != 0:
        raise SystemExit(f"{len(nodes)} kernels were seen in {executions} executions")
    each = len(nodes) // executions
    spans = []
    for at in range(0, len(nodes), each):
        mine = nodes[at : at + each]
        spans.append(max(e["ts"] + e["dur"] for e in mine) - mine[0]["ts"])
    return {"microseconds": statistics.median(spans), "nodes": each}


def normal(seed, shape, dtype):
    import jax

    return jax.random.normal(jax.random.key(seed), shape, dtype)


def check_target(function, arguments, target):
    """The ids of the plans in the compiled program, which has to have calls of that target."""
    import re

    import jax

    text = jax.jit(function).lower(*arguments).compile().as_text()
    if f'custom_call_target="{target}' not in text:
        raise SystemExit(f"no {target} in the compiled program")
    return sorted(set(re.findall(r'plan_id\\?"? ?= ?\\?"([0-9a-f]{32})', text)))


def fusion(rounds):
    import jax
    import jax.numpy as jnp
    import lawson.jax

    def example(x, y, z):
        return jnp.float32(jax.lax.batch_matmul(jnp.bfloat16(x), y)) + z

    fused = lawson.jax.cudnn_fusion(example)
    tuned = lawson.jax.fusion(example, tuning="exhaustive")
    shape = (4, 1024, 1024)
    sets = [
        (
            jax.random.randint(jax.random.key(3 * i), shape, -128, 127, jnp.int8),
            normal(3 * i + 1, shape, jnp.bfloat16),
            normal(3 * i + 2, shape, jnp.float32),
        )
        for i in range(MANY)
    ]
    arguments = sets[0]
    ways = {"lawson": fused, "lawson tuned": tuned, "xla": example}
    times = race({name: side_by_side(way, sets) for name, way in ways.items()}, rounds)
    compiled = {name: jax.jit(way) for name, way in ways.items()}
    for function in compiled.values():
        jax.block_until_ready(function(*arguments))
    device = {
        name: by_the_device(lambda number, f=function: f(*sets[number]))
        for name, function in compiled.items()
    }
    clock = {name: found["microseconds"] for name, found in device.items()}
    plans = {
        name: lawson.jax.inspect(function)(*arguments)
        for name, function in (("lawson", fused), ("lawson tuned", tuned))
    }
    return {
        "case": "int8 . bf16 + f32, 4 x 1024^3",
        "by_the_device": device,
        "over_xla_by_the_device": clock["xla"] / clock["lawson"],
        "tuned_over_xla_by_the_device": clock["xla"] / clock["lawson tuned"],
        "milliseconds": times,
        "over_xla": times["xla"] / times["lawson"],
        "tuned_over_xla": times["xla"] / times["lawson tuned"],
        "plans": {name: [plan.engine, plan.plan_id] for name, plan in plans.items()},
        "in_program": check_target(fused, arguments, "lawson_plan"),
    }


def attention(rounds):
    import functools

    import jax
    import jax.numpy as jnp
    import lawson.jax

    rows = []
    for batch, heads, kv_heads, length, depth, causal in ATTENTION:
        q = normal(0, (batch, length, heads, depth), jnp.bfloat16)
        k = normal(1, (batch, length, kv_heads, depth), jnp.bfloat16)
        v = normal(2, (batch, length, kv_heads, depth), jnp.bfloat16)
        seed = normal(3, q.shape, jnp.bfloat16)  # the cotangent
        ways = {
            "lawson": functools.partial(lawson.jax.dot_product_attention, is_causal=causal),
            "jax": functools.partial(
                jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn"
            ),
        }

        def both(way, q, k, v, seed):
            out, pull = jax.vjp(way, q, k, v)
            return out, pull(seed)

        forward = {name: one_by_one(way, (q, k, v)) for name, way in ways.items()}
        backward = {
            name: one_by_one(functools.partial(both, way), (q, k, v, seed))
            for name, way in ways.items()
        }
        row = {
            "config": f"{batch} {heads}/{kv_heads} {length} {depth} {'causal' if causal else 'full'}",
            "forward_ms": race(forward, rounds),
            "training_ms": race(backward, rounds),
            "plans": check_target(
                functools.partial(both, ways["lawson"]), (q, k, v, seed), "lawson_attention"
            ),
        }
        for what in ("forward", "training"):
            times = row[f"{what}_ms"]
            row[f"{what}_over_jax"] = times["jax"] / times["lawson"]
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def overhead(rounds):
    """Microseconds of one more small attention in a program."""
    import functools

    import jax
    import jax.numpy as jnp
    import lawson.jax

    q, k, v = (normal(i, (1, 128, 2, 64), jnp.bfloat16) for i in range(3))
    ways = {
        "lawson": functools.partial(lawson.jax.dot_product_attention, is_causal=True),
        "jax": functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
        ),
    }
    contestants = {name: chained(way, q, k, v) for name, way in ways.items()}
    times = race(contestants, rounds)
    found = {name: 1e3 * ms for name, ms in times.items()}
    for name, contestant in contestants.items():
        device = by_the_device(lambda number, c=contestant: c.programs[MANY]())
        found[f"{name}, by the device"] = device["microseconds"] / MANY
        found[f"{name}, nodes"] = device["nodes"] / MANY
    return found


def child(kind, path, rounds):
    """What one process with its own XLA_FLAGS does."""
    import jax
    import jax.numpy as jnp
    import lawson.jax
    import numpy as np

    if kind == "overhead":
        Path(path).write_text(json.dumps(overhead(rounds)))
        return
    q, k, v = (normal(i, (2, 512, 4, 64), jnp.bfloat16) for i in range(3))
    weights = normal(4, (64, 256), jnp.bfloat16)

    @lawson.jax.cudnn_fusion
    def fused(x, w):
        return jax.nn.relu(jnp.matmul(x, w, preferred_element_type=jnp.float32)).astype(
            jnp.bfloat16
        )

    @jax.jit
    def step(q, k, v, w):
        def loss(q, k, v):
            out = q
            for _ in range(4):
                out = lawson.jax.dot_product_attention(out, k, v, is_causal=True)
            return jnp.sum(out.astype(jnp.float32) ** 2), out

        (value, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return value, out, gradients, fused(out.reshape(-1, 64), w)

    results = []
    for round_ in range(6):  # new buffers and new values behind the same program
        shift = jnp.bfloat16(round_)
        results.append(jax.block_until_ready(step(q + shift, k, v - shift, weights)))
    flat = [np.asarray(x).astype(np.float32) for x in jax.tree.leaves(results)]
    np.savez(path, *flat)


def in_process(kind, flags, rounds):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "result.npz")
        environment = {
            **os.environ,
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        }
        subprocess.run(
            [sys.executable, __file__, "--child", kind, path, "--rounds", str(rounds)],
            env=environment,
            check=True,
        )
        if kind == "overhead":
            return json.loads(Path(path).read_text())
        import numpy as np

        with np.load(path) as arrays:
            return [arrays[name] for name in arrays.files]


BUFFERS = {
    "as XLA has them": "",
    "off": "--xla_gpu_enable_command_buffer=",
    "on": "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUDNN,CUSTOM_CALL "
    "--xla_gpu_graph_min_graph_size=1",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child, arguments.rounds)
        return 0
    import jax
    import lawson
    import numpy as np

    document = {
        "gpu": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "lawson": lawson.__version__,
        "overhead_us": {
            name: in_process("overhead", flags, arguments.rounds) for name, flags in BUFFERS.items()
        },
    }
    off, on = (in_process("results", BUFFERS[name], 1) for name in ("off", "on"))
    same = [np.array_equal(a, b, equal_nan=True) for a, b in zip(off, on, strict=True)]
    worst = max(float(np.max(np.abs(a - b))) for a, b in zip(off, on, strict=True))
    document["command_buffers"] = {"arrays": len(same), "equal": sum(same), "worst": worst}
    print(json.dumps(document), flush=True)
    document["fusion"] = fusion(arguments.rounds)
    print(json.dumps(document["fusion"]), flush=True)
    document["attention"] = attention(arguments.rounds)
    for what in ("forward", "training"):
        ratios = [row[f"{what}_over_jax"] for row in document["attention"]]
        document[f"{what}_over_jax"] = {
            "geomean": statistics.geometric_mean(ratios),
            "least": min(ratios),
        }
        print(what, document[f"{what}_over_jax"])
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(not all(same))


if __name__ == "__main__":
    sys.exit(main())
