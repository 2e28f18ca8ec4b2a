"""The host's cost of a call of lawson._torch: what an eager PyTorch program pays for each one.

    python bench/torch_call.py [--device cpu|cuda] [--rounds N]

Each row: microseconds on the host per call, the least of the rounds, without waiting for the device
(on a GPU the queue is emptied between rounds). "again" is the same measured a second time: how much
of a difference is the machine's. Nothing is timed that is not checked first.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import torch
from torch.nn import functional

import lawson
import lawson.torch
from lawson import InvalidArgumentError, _core, _torch

CALLS = 200


def attention_call(device: str, passes: str, stats: bool) -> _torch.Call:
    """Of q, k, v (backward: and o, do, stats), contiguous `[b, h, s, d]`."""

    def describe(operands: tuple[torch.Tensor | None, ...]) -> _torch.Prepared:
        q = operands[0]
        assert q is not None
        b, h, s, d = q.shape
        dtype = {torch.float32: "f32", torch.bfloat16: "bf16"}[q.dtype]
        spec = {
            "lawson": 1,
            "kind": "attention",
            "pass": passes,
            "dtype": dtype,
            "batch": b,
            "heads": h,
            "seqlen_q": s,
            "head_dim_qk": d,
            "layout": "bhsd",
            "return_stats": stats or passes == "backward",
        }
        like_q = (tuple(q.shape), q.stride(), dtype)
        rows = ((b, h, s), (h * s, s, 1), "f32")
        if passes == "backward":
            names: list[str | None] = ["q", "k", "v", "o", "do", "stats"]
            return _torch.Prepared.attention(
                json.dumps(spec), passes, names, ["dq", "dk", "dv"], [like_q] * 3, device
            )
        outs = ["o", "stats"] if stats else ["o"]
        return _torch.Prepared.attention(
            json.dumps(spec), passes, ["q", "k", "v"], outs, [like_q, rows][: len(outs)], device
        )

    return _torch.Call(describe)


def fusion_call(device: str) -> _torch.Call:
    """relu(x + y)."""

    def describe(operands: tuple[torch.Tensor | None, ...]) -> _torch.Prepared:
        x = operands[0]
        assert x is not None
        shape = list(x.shape)
        graph = {
            "lawson": 1,
            "kind": "graph",
            "name": "add_relu",
            "inputs": [{"name": n, "dtype": "f32", "shape": shape} for n in ("x", "y")],
            "ops": [
                {"op": "add", "in": ["x", "y"], "out": "a"},
                {"op": "relu", "in": ["a"], "out": "r"},
            ],
            "outputs": ["r"],
        }
        fusion = _core.fuse(
            _core.Graph.from_json(json.dumps(graph)),
            _core.Device(device),
            "require",
            ["cpu" if device == "cpu" else "cudnn"],
        )
        return _torch.Prepared.fusion(fusion, [0, 1], [(tuple(shape), x.stride(), "f32")])

    return _torch.Call(describe)


def microseconds(function: Callable[[], object], device: str, rounds: int) -> float:
    """Of one call on the host."""
    best = float("inf")
    for _ in range(rounds):
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            function()
        best = min(best, (time.perf_counter_ns() - start) / CALLS / 1e3)
    return best


def check_capture(call: _torch.Call, operands: list[torch.Tensor]) -> None:
    """That a captured call computes again when it is replayed, and that a new one is refused."""
    (expected,) = call(*operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (captured,) = call(*operands)
        try:
            call(*(x[:, :, :32] for x in operands))
        except InvalidArgumentError as error:
            refusal = str(error)
        else:
            raise AssertionError("a new shape was taken during a capture")
    captured.zero_()
    graph.replay()
    torch.testing.assert_close(captured, expected, rtol=0, atol=0)
    print(f"captured and replayed: the same bits; a new shape: {refusal}")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda:0" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu or cuda:N (%(default)s)")
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    device, rounds = arguments.device, arguments.rounds
    print(f"lawson {lawson.__version__}, torch {torch.__version__}, device {device}")
    if device == "cpu":
        os.environ.setdefault("LAWSON_ENGINE", "cpu")
    else:
        print(torch.cuda.get_device_name(device), json.dumps(lawson.info()["engines"]))
        torch.cuda.set_device(device)

    # So little work that the GPU keeps up: what is measured is the host alone.
    on_cpu = device == "cpu"
    shape = (1, 1, 2, 8) if on_cpu else (1, 2, 64, 64)
    dtype = torch.float32 if on_cpu else torch.bfloat16
    q, k, v, grad = (torch.randn(shape, device=device).to(dtype) for _ in range(4))
    x, y = (torch.randn(8, 8, device=device) for _ in range(2))
    forward, training = (attention_call(device, "forward", stats) for stats in (False, True))
    backward, fused = attention_call(device, "backward", False), fusion_call(device)

    o, stats = training(q, k, v)
    expected = functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(o.double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(forward(q, k, v)[0], o)
    torch.testing.assert_close(fused(x, y)[0], (x + y).relu())
    backward(q, k, v, o, grad, stats)
    if not on_cpu:
        check_capture(forward, [q, k, v])
    sdpa = lawson.torch.scaled_dot_product_attention
    torch.testing.assert_close(sdpa(q, k, v), o)
    rows: list[tuple[str, _torch.Call | None, Callable[[], object]]] = [
        ("relu(x + y), lawson", fused, lambda: fused(x, y)),
        ("relu(x + y), torch", None, lambda: (x + y).relu_()),
        ("attention, lawson", forward, lambda: forward(q, k, v)),
        ("lawson.torch.scaled_dot_...", None, lambda: sdpa(q, k, v)),
        (
            "attention, torch",
            None,
            lambda: functional.scaled_dot_product_attention(q, k, v),
        ),
        ("attention with stats, lawson", training, lambda: training(q, k, v)),
        ("backward, lawson", backward, lambda: backward(q, k, v, o, grad, stats)),
        ("empty_strided, torch", None, lambda: torch.empty_strided(shape, q.stride())),
        ("nothing", None, lambda: None),
    ]
    print(f"{'':30} {'us':>7} {'again':>7}  engine     plan")
    for name, call, function in rows:
        first, second = (microseconds(function, device, rounds) for _ in range(2))
        prepared = call.prepared()[0] if call is not None else None
        what = f"{prepared.engine:10} {prepared.plan_id}" if prepared is not None else ""
        print(f"{name:30} {first:7.2f} {second:7.2f}  {what}")


if __name__ == "__main__":
    main()
