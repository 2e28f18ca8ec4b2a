#!/usr/bin/env python3
"""Fusions on a GPU, side by side in one run: Lawson (cuDNN) against torch eager, torch.compile and JAX.

    bench/gpu_fusions.py --lawson build/gpu [--carried DIR] [--json FILE] [--rounds 30] [--only mm,int8]

Every contestant computes the same function of the same random normal data, on several sets of
buffers in turn that together exceed the L2 cache. Times are the device's: work captured into a CUDA
graph and timed by events (torch, Lawson); for JAX, whose work cannot be captured from outside, the
slope between one jitted call of few and one of many chained repetitions. Rounds go through all
contestants, each round in another order; medians are compared.

--lawson   a build folder: bin/lawson and lib/liblawson.so. Each spec of bench/fusions is compiled
           by `lawson compile --target cuda --tuning exhaustive` into a bundle, which is then run.
--carried  bundles NAME.bundle that were compiled without a GPU, to be run beside it.
"""
import argparse
import ctypes
import datetime
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F

HERE = pathlib.Path(__file__).resolve().parent
SPECS = HERE / "fusions"
SET_BYTES = 256 << 20  # of all sets of buffers together: several times the L2 cache
MAX_RANK = 8
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i8": torch.int8,
          "f8e4m3": torch.float8_e4m3fn}


# ---- the computations, as users of torch and JAX write them --------------------------------------

def gelu_grad(x):
    c, a = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(c * (x + a * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * a * x * x)


TORCH = {
    "mm": lambda a, b: a @ b,
    "mm-bias": lambda a, b, bias: torch.addmm(bias, a, b),
    "mm-gelu": lambda a, b: F.gelu(a @ b, approximate="tanh"),
    "mm-addend-gelu": lambda a, b, addend: F.gelu((a @ b).float() + addend, approximate="tanh"),
    "mm-bias-relu": lambda a, b, bias: torch.relu(torch.addmm(bias, a, b)),
    "swiglu": lambda x, gate, up: F.silu(x @ gate) * (x @ up),
    "int8": lambda x, y, z: (x.bfloat16() @ y).float() + z,
    "fp8": lambda a, b, s, t: torch._scaled_mm(a, b, scale_a=s, scale_b=t, out_dtype=torch.bfloat16,
                                               use_fast_accum=True),
    "batched": lambda a, b: a @ b,
    "skinny": lambda a, b: a @ b,
    "gelu-backward": lambda dy, w, x: torch.ops.aten.gelu_backward(dy @ w.t(), x, approximate="tanh"),
    "mm-amax": lambda a, b: (lambda c: (c, c.abs().amax().float().reshape(1, 1)))(a @ b),
}
# Other spellings that torch eager offers for the same computation; the fastest one counts.
TORCH_MORE = {
    "mm-bias-relu": [lambda a, b, bias: torch._addmm_activation(bias, a, b)],
    "int8": [lambda x, y, z: torch.baddbmm(z, x.float(), y.float())],
}
# What each computes exactly, for the comparison of numbers.
EXACT = {
    "mm": lambda a, b: a @ b,
    "mm-bias": lambda a, b, bias: a @ b + bias,
    "mm-gelu": lambda a, b: F.gelu(a @ b, approximate="tanh"),
    "mm-addend-gelu": lambda a, b, addend: F.gelu(a @ b + addend, approximate="tanh"),
    "mm-bias-relu": lambda a, b, bias: torch.relu(a @ b + bias),
    "swiglu": lambda x, gate, up: F.silu(x @ gate) * (x @ up),
    "int8": lambda x, y, z: x @ y + z,
    "fp8": lambda a, b, s, t: (a @ b) * s * t,
    "batched": lambda a, b: a @ b,
    "skinny": lambda a, b: a @ b,
    "gelu-backward": lambda dy, w, x: (dy @ w.t()) * gelu_grad(x),
    "mm-amax": lambda a, b: a @ b,
}


def jax_functions():
    import jax
    import jax.numpy as jnp

    f32, bf16 = jnp.float32, jnp.bfloat16

    def mm(a, b, out=f32):
        return jnp.matmul(a, b, preferred_element_type=out)

    def gelu(x):
        return jax.nn.gelu(x, approximate=True)

    def gelu_backward(dy, w, x):
        dh = mm(dy, w.T)
        return jax.vjp(gelu, x.astype(f32))[1](dh)[0].astype(bf16)

    def amax(a, b):
        c = mm(a, b)
        return c.astype(bf16), jnp.max(jnp.abs(c)).reshape(1, 1)

    return {
        "mm": lambda a, b: mm(a, b, bf16),
        "mm-bias": lambda a, b, bias: (mm(a, b) + bias.astype(f32)).astype(bf16),
        "mm-gelu": lambda a, b: gelu(mm(a, b)).astype(bf16),
        "mm-addend-gelu": lambda a, b, addend: gelu(mm(a, b) + addend),
        "mm-bias-relu": lambda a, b, bias: jax.nn.relu(mm(a, b) + bias.astype(f32)).astype(bf16),
        "swiglu": lambda x, gate, up: (jax.nn.silu(mm(x, gate)) * mm(x, up)).astype(bf16),
        "int8": lambda x, y, z: mm(x.astype(bf16), y) + z,
        "fp8": lambda a, b, s, t: (mm(a, b.T) * s * t).astype(bf16),
        "batched": lambda a, b: mm(a, b, bf16),
        "skinny": lambda a, b: mm(a, b, bf16),
        "gelu-backward": gelu_backward,
        "mm-amax": amax,
    }


# ---- data ------------------------------------------------------------------------------------------

def flops(name, spec):
    shapes = {i["name"]: i["shape"] for i in spec["inputs"]}
    total = 0
    for op in spec["ops"]:
        operands = [shapes[name] for name in op["in"]]
        if op["op"] == "matmul":
            total += 2 * math.prod(operands[0]) * operands[1][-1]
            shapes[op["out"]] = operands[0][:-1] + operands[1][-1:]
        elif op["op"] == "transpose":
            shapes[op["out"]] = operands[0][::-1]
        else:
            shapes[op["out"]] = max(operands, key=math.prod)
    return total


def random_tensor(item, generator):
    shape, dtype = item["shape"], DTYPES[item["dtype"]]
    if item["dtype"] == "i8":
        return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda", generator=generator)
    if item["dtype"] == "f32" and math.prod(shape) == 1:
        return torch.full(shape, 0.1, device="cuda")
    value = torch.randn(shape, device="cuda", generator=generator)
    if "strides" in item:  # column-major
        value = value.t().contiguous().to(dtype).t()
    return value.to(dtype)


def make_sets(spec):
    generator = torch.Generator("cuda").manual_seed(2026)
    first = [random_tensor(i, generator) for i in spec["inputs"]]
    one = sum(t.numel() * t.element_size() for t in first)
    count = max(2, min(32, math.ceil(SET_BYTES / one)))
    return [first] + [[random_tensor(i, generator) for i in spec["inputs"]]
                      for _ in range(count - 1)]


# ---- Lawson, through its C ABI ------------------------------------------------------------------------

class TensorInfo(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("uid", ctypes.c_int64), ("name", ctypes.c_char_p),
                ("dtype", ctypes.c_char_p), ("rank", ctypes.c_int32),
                ("shape", ctypes.c_int64 * MAX_RANK), ("strides", ctypes.c_int64 * MAX_RANK),
                ("is_input", ctypes.c_int32), ("is_by_value", ctypes.c_int32),
                ("alignment", ctypes.c_int32), ("size", ctypes.c_size_t)]


class Binding(ctypes.Structure):
    _fields_ = [("uid", ctypes.c_int64), ("data", ctypes.c_void_p)]


class Lawson:
    def __init__(self, build):
        self.tool = str(build / "bin" / "lawson")
        self.lib = ctypes.CDLL(str(build / "lib" / "liblawson.so"))
        for name in ("lawson_last_error_message", "lawson_plan_id", "lawson_plan_name",
                     "lawson_plan_engine", "lawson_version"):
            getattr(self.lib, name).restype = ctypes.c_char_p
        for name in ("lawson_plan_workspace_size", "lawson_graph_tensor_count"):
            getattr(self.lib, name).restype = ctypes.c_size_t
        self.device = self.make("lawson_device_find", b"cuda")

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.lawson_last_error_message().decode())

    def make(self, function, *arguments):
        handle = ctypes.c_void_p()
        self.check(getattr(self.lib, function)(*arguments, ctypes.byref(handle)))
        return handle

    def tuned(self, spec_file, bundle, tuning, environment):
        """Compiles in a process of its own; returns seconds: of the tuning, and of the process."""
        begin = time.monotonic()
        command = [self.tool, "compile", str(spec_file), "--target", "cuda", "-o", str(bundle),
                   "--json"]
        if tuning != "off":
            command += ["--tuning", tuning]
        done = subprocess.run(command, capture_output=True, text=True,
                              env={**os.environ, **environment})
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip()[-500:])
        plan = json.loads(done.stdout)["plans"][0]
        return {"tuning": round(plan["seconds"], 3), "process": round(time.monotonic() - begin, 3)}

    def open(self, bundle):
        return LoadedPlan(self, bundle)


class LoadedPlan:
    def __init__(self, lawson, bundle):
        self.lawson, lib = lawson, lawson.lib
        handle = lawson.make("lawson_bundle_open", str(bundle).encode())
        self.plan = lawson.make("lawson_bundle_plan", handle, ctypes.c_size_t(0))
        lib.lawson_bundle_destroy(handle)
        lawson.check(lib.lawson_plan_load(self.plan, lawson.device))
        self.id = lib.lawson_plan_id(self.plan).decode()
        self.name = lib.lawson_plan_name(self.plan).decode()
        self.engine = lib.lawson_plan_engine(self.plan).decode()
        assert self.engine == "cudnn", self.engine
        graph = lawson.make("lawson_plan_graph", self.plan)
        self.tensors = []
        for index in range(lib.lawson_graph_tensor_count(graph)):
            info = TensorInfo(struct_size=ctypes.sizeof(TensorInfo))
            lawson.check(lib.lawson_graph_tensor(graph, ctypes.c_size_t(index), ctypes.byref(info)))
            self.tensors.append(info)
        size = lib.lawson_plan_workspace_size(self.plan)
        self.workspace = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
        self.workspace_size = size

    def outputs(self):
        results = []
        for info in self.tensors:
            if not info.is_input:
                results.append(torch.full(info.shape[:info.rank], float("nan"), device="cuda").to(
                    DTYPES[info.dtype.decode()]))
        return results

    def bindings(self, inputs, outputs):
        array = (Binding * len(self.tensors))()
        for slot, info, tensor in zip(array, self.tensors, [*inputs, *outputs]):
            strides = list(info.strides[:info.rank])
            assert list(tensor.shape) == list(info.shape[:info.rank]), info.name
            assert all(s == t or d == 1 for s, t, d in
                       zip(strides, tensor.stride(), tensor.shape)), info.name
            slot.uid, slot.data = info.uid, tensor.data_ptr()
        return array

    def run(self, bindings):
        self.lawson.check(self.lawson.lib.lawson_plan_execute(
            self.plan, bindings, ctypes.c_size_t(len(bindings)),
            ctypes.c_void_p(self.workspace.data_ptr()), ctypes.c_size_t(self.workspace_size),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)))


# ---- timing ------------------------------------------------------------------------------------------

class Captured:
    """Calls captured into one CUDA graph; time() is milliseconds per call."""

    def __init__(self, calls):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        self.keep = []
        with torch.cuda.stream(stream):
            for call in calls:  # compile, autotune, allocate
                self.keep.append(call())
        torch.cuda.synchronize()
        self.keep.clear()
        self.graph, self.count = torch.cuda.CUDAGraph(), len(calls)
        with torch.cuda.graph(self.graph):
            for call in calls:
                self.keep.append(call())
        self.time()

    def time(self):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / self.count


def to_jax(tensor):
    """A column-major matrix arrives as its transpose, row-major."""
    import jax
    if not tensor.is_contiguous():
        tensor = tensor.t()
    if tensor.dtype == torch.float8_e4m3fn:
        return jax.dlpack.from_dlpack(tensor.view(torch.uint8)).view(jax.numpy.float8_e4m3fn)
    return jax.dlpack.from_dlpack(tensor)


class Chained:
    """JAX: one jitted call of `few`, one of `many` repetitions, each kept behind the one before."""

    def __init__(self, function, sets):
        import jax

        def repeat(count):
            def run(sets):
                results, sets = [], list(sets)
                for i in range(count):
                    out = function(*sets[i % len(sets)])
                    following = (i + 1) % len(sets)
                    sets[following], out = jax.lax.optimization_barrier((sets[following], out))
                    results.append(out)  # what nobody reads would not be computed
                return results
            return jax.jit(run)

        sets = [tuple(map(to_jax, s)) for s in sets]
        self.few, self.many = len(sets), 5 * len(sets)
        self.sets = sets
        self.runs = {n: repeat(n) for n in (self.few, self.many)}
        for run in self.runs.values():
            jax.block_until_ready(run(sets))
        self.block = jax.block_until_ready

    def time(self):
        taken = {}
        for n, run in self.runs.items():
            begin = time.perf_counter()
            self.block(run(self.sets))
            taken[n] = time.perf_counter() - begin
        return 1e3 * (taken[self.many] - taken[self.few]) / (self.many - self.few)


def summary(times):
    return {"ms": statistics.median(times), "min": min(times), "max": max(times)}


def check_numbers(name, spec, plan, inputs):
    """The largest error relative to the result's scale; the reference in f32 without TF32."""
    outputs = plan.outputs()
    plan.run(plan.bindings(inputs, outputs))
    torch.cuda.synchronize()
    wide = [t.float() for t in inputs]
    exact = EXACT[name](*wide)
    error = float((outputs[0].float() - exact).abs().max() / exact.abs().max())
    allowed = 2.0 ** (-7 if outputs[0].dtype == torch.bfloat16 else -12)
    if not error <= allowed:
        raise RuntimeError(f"{name}: plan {plan.id}: error {error:.2e}, allowed {allowed:.2e}")
    if name == "mm-amax":
        assert abs(float(outputs[1]) / float(exact.abs().max()) - 1) < 1e-3
    return error


def contest(name, lawson, arguments, work):
    spec_file = SPECS / f"{name}.json"
    spec = json.loads(spec_file.read_text())
    sets = make_sets(spec)
    row = {"case": name, "flop": flops(name, spec), "sets": len(sets), "contestants": {}}
    contestants = {}

    def enter(label, make, facts=None):
        facts = {} if facts is None else facts  # `make` adds to them
        try:
            contestants[label] = make()
            row["contestants"][label] = facts
        except Exception as error:  # recorded in the results: a contestant that cannot is a fact
            row["contestants"][label] = {**facts, "error": str(error).strip()[-400:]}
            torch.cuda.synchronize()

    def enter_plan(label, bundle, **facts):
        def make():
            plan = lawson.open(bundle)
            facts.update(engine=plan.engine, plan=plan.name, plan_id=plan.id,
                         workspace=plan.workspace_size,
                         error_over_scale=check_numbers(name, spec, plan, sets[0]))
            outputs = [plan.outputs() for _ in sets]
            bindings = [plan.bindings(s, o) for s, o in zip(sets, outputs)]
            captured = Captured([lambda b=b: plan.run(b) for b in bindings])
            captured.held = plan, outputs, bindings  # the graph writes to them
            return captured
        enter(label, make, facts)

    cache = {"LAWSON_CACHE_DIR": str(work / "cache" / name), "LAWSON_CACHE": "rw"}
    try:
        cold = lawson.tuned(spec_file, work / f"{name}.tuned", arguments.tuning, cache)
        stored = lawson.tuned(spec_file, work / f"{name}.again", arguments.tuning, cache)
        enter_plan("lawson", work / f"{name}.tuned", tuning=arguments.tuning, seconds_cold=cold,
                   seconds_stored=stored)
    except RuntimeError as error:
        row["contestants"]["lawson"] = {"error": str(error)}
    if arguments.carried:
        enter_plan("lawson carried", pathlib.Path(arguments.carried) / f"{name}.bundle")

    spellings = [TORCH[name], *TORCH_MORE.get(name, [])]
    for i, function in enumerate(spellings):
        enter("torch eager" + (f" {i + 1}" if i else ""),
              lambda f=function: Captured([lambda f=f, s=s: f(*s) for s in sets]))
    if not arguments.no_compile:
        torch._dynamo.reset()
        compiled = torch.compile(TORCH[name], mode="max-autotune-no-cudagraphs", dynamic=False)
        enter("torch.compile", lambda: Captured([lambda s=s: compiled(*s) for s in sets]))
    if not arguments.no_jax:
        enter("jax", lambda: Chained(jax_functions()[name], sets))

    times = {label: [] for label in contestants}
    # What runs after whom matters (clocks, power): the same plan lost 2 to 5% in a fixed place.
    order = list(contestants)
    dice = random.Random(name)
    for _ in range(arguments.rounds):
        dice.shuffle(order)
        for label in order:
            times[label].append(contestants[label].time())
    for label, list_ in times.items():
        row["contestants"][label].update(summary(list_))
    peers = {k: v["ms"] for k, v in row["contestants"].items()
             if not k.startswith("lawson") and "ms" in v}
    best = min(peers, key=peers.get)
    row["best_peer"] = best
    for label in ("lawson", "lawson carried"):
        ours = row["contestants"].get(label, {})
        if "ms" in ours:
            ours["tflops"] = row["flop"] / ours["ms"] / 1e9
            ours["over_best_peer"] = peers[best] / ours["ms"]
            for peer in ("torch.compile", "jax"):
                if peer in peers:
                    ours["over_" + peer] = peers[peer] / ours["ms"]
    return row


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def print_row(row):
    cells = [f"{k} {v['ms']:.4f}" if "ms" in v else f"{k} ({v['error'][-120:]})"
             for k, v in row["contestants"].items()]
    ratio = row["contestants"].get("lawson", {}).get("over_best_peer", float("nan"))
    plan = row["contestants"].get("lawson", {}).get("plan", "-")
    print(f"{row['case']:16} {ratio:5.2f}x of {row['best_peer']}; {plan}; ms: " + ", ".join(cells),
          flush=True)


def document_of(rows, versions, rounds):
    ratios = {label: geometric_mean([r["contestants"][label]["over_best_peer"] for r in rows
                                     if "over_best_peer" in r["contestants"].get(label, {})])
              for label in ("lawson", "lawson carried")}
    both = [r["contestants"]["lawson"]["ms"] / r["contestants"]["lawson carried"]["ms"] for r in rows
            if "ms" in r["contestants"].get("lawson carried", {})
            and "ms" in r["contestants"].get("lawson", {})]
    return {"date": datetime.date.today().isoformat(), "versions": versions, "rounds": rounds,
            "geometric_mean_over_best_peer": ratios,
            "geometric_mean_tuned_over_carried": geometric_mean(both), "rows": rows}


def versions_of(lawson, jax_too):
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda,
                "lawson": lawson.lib.lawson_version().decode(), "gpu": torch.cuda.get_device_name()}
    if jax_too:
        import jax
        versions["jax"] = jax.__version__
    versions["driver"] = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=True).stdout.strip()
    info = json.loads(subprocess.run([lawson.tool, "info", "--json"], capture_output=True,
                                     text=True).stdout or "{}")
    versions["cudnn"] = info.get("engines", {}).get("cudnn", {}).get("cudnn", {}).get("version")
    return versions


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lawson", type=pathlib.Path, required=True)
    parser.add_argument("--carried")
    parser.add_argument("--json")
    parser.add_argument("--only", default=",".join(TORCH))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tuning", default="exhaustive", choices=["off", "quick", "exhaustive"])
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-jax", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    torch.backends.cuda.matmul.allow_tf32 = False
    lawson = Lawson(arguments.lawson)
    versions = versions_of(lawson, not arguments.no_jax)
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for name in arguments.only.split(","):
            rows.append(contest(name, lawson, arguments, pathlib.Path(work)))
            print_row(rows[-1])
            document = document_of(rows, versions, arguments.rounds)
            if arguments.json:
                pathlib.Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")
            torch.cuda.empty_cache()
    print("geometric mean over the best peer:", document["geometric_mean_over_best_peer"],
          "tuned/carried:", document["geometric_mean_tuned_over_carried"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
