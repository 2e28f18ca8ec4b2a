"""The FFI library by itself: what its handlers run, refuse, and are to XLA."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import export, ffi
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import lawson
from lawson import _core, _settings
from lawson.jax import _runtime as runtime
from new_process import in_new_process

Array = np.ndarray[Any, np.dtype[Any]]
CPU_OPTIONS = lawson.Options(engine="cpu")


def graph_of(rows: int = 4, **changes: Any) -> lawson.Graph:
    """relu(x @ y), x [rows, 8]."""
    document = {
        "lawson": 1,
        "kind": "graph",
        "inputs": [
            {"name": "x", "dtype": "f32", "shape": [rows, 8]},
            {"name": "y", "dtype": "f32", "shape": [8, 16]},
        ],
        "ops": [
            {"op": "matmul", "in": ["x", "y"], "out": "m"},
            {"op": "relu", "in": ["m"], "out": "r"},
        ],
        "outputs": ["r"],
        **changes,
    }
    return lawson.Graph.from_json(json.dumps(document))


DTYPES = {"f32": np.float32, "f64": np.float64, "bf16": jax.numpy.bfloat16, "i32": np.int32}
DTYPES |= {"bool": np.bool_, "u8": np.uint8, "i64": np.int64, "f16": np.float16}


def fused(graph: lawson.Graph, engine: str = "cpu") -> lawson.Plan:
    return _core.fuse(graph, runtime.device_for("cpu", [engine]), None, [engine]).plan


def call_of(
    graph: lawson.Graph, plan: lawson.Plan, drop: Sequence[str] = (), /, **changes: Any
) -> Any:
    """A jitted call of the plan, its workspace left out of the results."""
    avals = [
        jax.ShapeDtypeStruct(tensor.shape, DTYPES[tensor.dtype])
        for tensor in graph.tensors()
        if not tensor.is_input
    ]
    call = ffi.ffi_call(runtime.PLAN_TARGET, [*avals, runtime.workspace_aval(plan)])
    attributes = {**runtime.plan_attributes(plan, graph, options=CPU_OPTIONS), **changes}
    for name in drop:
        del attributes[name]

    def function(*operands: Any) -> Any:
        results = call(*operands, **attributes)[:-1]
        return results[0] if len(results) == 1 else results

    return jax.jit(function)


def operands_of(rows: int = 4, seed: int = 0) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, 8), np.float32)
    return x, random.standard_normal((8, 16), np.float32)


def expected(x: Array, y: Array) -> Array:
    result: Array = np.maximum(x @ y, 0)
    return result


# ---- runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("embed", [True, False])
def test_runs_the_plan_that_it_names(engine: str, embed: bool) -> None:
    graph = graph_of()
    plan = fused(graph, engine)
    call = call_of(graph, plan, () if embed else ("plan",), engine=engine)
    x, y = operands_of()
    text = call.lower(x, y).compile().as_text()
    assert 'custom_call_target="lawson_plan"' in text and plan.id in text
    np.testing.assert_allclose(call(x, y), expected(x, y), rtol=1e-5, atol=1e-5)


def test_nothing_is_built_where_it_executes() -> None:
    graph = graph_of(rows=7)
    call = call_of(graph, fused(graph))
    x, y = operands_of(7)
    jax.block_until_ready(call(x, y))
    lawson.stats(reset=True)
    for _ in range(10):
        jax.block_until_ready(call(x, y))
    totals = lawson.stats()["totals"]
    assert totals.pop("execute") == 10
    assert set(totals.values()) == {0}, totals


def test_two_programs_share_the_processs_plan() -> None:
    graph = graph_of(rows=9)
    plan = fused(graph)
    lawson.stats(reset=True)
    x, y = operands_of(9)
    for _ in range(2):
        jax.block_until_ready(call_of(graph, plan)(x, y))
    totals = lawson.stats()["totals"]
    assert totals["hit"] == 2 and totals["cache_graph"] == totals["load"] == 0


def test_several_results_many_dtypes_and_strides() -> None:
    graph = graph_of(
        inputs=[
            {"name": "a", "dtype": "bf16", "shape": [2, 6], "strides": [1, 2]},
            {"name": "b", "dtype": "i32", "shape": [6]},
            {"name": "c", "dtype": "bool", "shape": [2, 1]},
        ],
        ops=[
            {"op": "convert", "in": ["a"], "out": "wide", "dtype": "f32"},
            {"op": "convert", "in": ["b"], "out": "number", "dtype": "f32"},
            {"op": "add", "in": ["wide", "number"], "out": "sum"},
            {"op": "select", "in": ["c", "sum", "wide"], "out": "r"},
            {"op": "reduce_max", "in": ["sum"], "out": "most", "axes": [1]},
        ],
        outputs=["r", "most"],
    )
    call = call_of(graph, fused(graph))
    a = np.arange(12, dtype=np.float32).reshape(2, 6)
    # The buffer is dense, and the graph's strides say that its columns lie one after another.
    memory = np.ascontiguousarray(a.T).reshape(2, 6).astype(jax.numpy.bfloat16)
    b = np.array([0, 1, -2, 3, 4, -5], np.int32)
    c = np.array([[True], [False]])
    r, most = call(memory, b, c)
    np.testing.assert_array_equal(r, np.where(c, a + b, a))
    np.testing.assert_array_equal(most, (a + b).max(axis=1))


@pytest.mark.parametrize("dtype", ["f32", "f64", "i32"])
def test_scalars_by_value(dtype: str) -> None:
    graph = graph_of(
        inputs=[
            {"name": "s", "dtype": dtype, "shape": [], "by_value": True},
            {"name": "x", "dtype": "f32", "shape": [5]},
        ],
        ops=[
            {"op": "convert", "in": ["s"], "out": "t", "dtype": "f32"},
            {"op": "mul", "in": ["x", "t"], "out": "r"},
        ],
        outputs=["r"],
    )
    plan = fused(graph)
    x = np.arange(5, dtype=np.float32)
    for value in (2.0, -3.0):
        call = call_of(graph, plan, values={"s": value})
        np.testing.assert_array_equal(call(x), x * np.float32(value))
    with pytest.raises(jax.errors.JaxRuntimeError, match="'s' is by value"):
        call_of(graph, plan)(x)


def test_empty_tensors() -> None:
    graph = graph_of(rows=0)
    x, y = operands_of(0)
    assert call_of(graph, fused(graph))(x, y).shape == (0, 16)


def test_more_tensors_than_usual() -> None:
    names = [f"x{i}" for i in range(80)]
    graph = graph_of(
        inputs=[{"name": name, "dtype": "f32", "shape": [3]} for name in names],
        ops=[
            {"op": "add", "in": [names[0] if i == 1 else f"s{i - 1}", names[i]], "out": f"s{i}"}
            for i in range(1, 80)
        ],
        outputs=["s79"],
    )
    values = [np.full(3, i, np.float32) for i in range(80)]
    np.testing.assert_array_equal(call_of(graph, fused(graph))(*values), sum(values))


def test_threads_run_one_program_at_once() -> None:
    graph = graph_of(rows=33)
    compiled = call_of(graph, fused(graph)).lower(*operands_of(33)).compile()

    def act(seed: int) -> bool:
        x, y = operands_of(33, seed)
        for _ in range(20):
            np.testing.assert_allclose(compiled(x, y), expected(x, y), rtol=1e-4, atol=1e-5)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(act, range(8)))


def test_eight_devices() -> None:
    devices = jax.devices("cpu")
    assert len(devices) == 8
    graph = graph_of()
    call = call_of(graph, fused(graph))
    x, y = operands_of()
    for device in devices:
        result = call(jax.device_put(x, device), jax.device_put(y, device))
        assert result.devices() == {device}
        np.testing.assert_allclose(result, expected(x, y), rtol=1e-5, atol=1e-5)

    mesh = Mesh(np.array(devices), ("b",))
    rows = PartitionSpec("b")
    mapped = jax.jit(
        jax.shard_map(
            call, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows, check_vma=False
        )
    )
    x, y = operands_of(32)
    result = mapped(jax.device_put(x, NamedSharding(mesh, rows)), y)
    np.testing.assert_allclose(result, expected(x, y), rtol=1e-5, atol=1e-5)


def test_in_a_loop_and_donated() -> None:
    graph = graph_of(
        inputs=[{"name": "x", "dtype": "f32", "shape": [4, 4]}],
        ops=[{"op": "relu", "in": ["x"], "out": "y"}, {"op": "add", "in": ["y", "x"], "out": "r"}],
    )
    call = call_of(graph, fused(graph))
    function = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, v: call(v), x), donate_argnums=0)
    x = jax.numpy.ones((4, 4))
    np.testing.assert_array_equal(function(x), np.full((4, 4), 8.0))


# ---- in another process -------------------------------------------------------------------------

EXPORTED = """
import json, sys
import jax, numpy as np
from jax import export
import lawson, lawson.jax
program = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
x, y = (np.load(path) for path in sys.argv[2:4])
np.save(sys.argv[4], jax.jit(program.call)(x, y))
print(json.dumps(lawson.stats()["totals"]))
"""


@pytest.mark.parametrize(("embed", "built"), [(True, 0), (False, 1)])
def test_an_exported_program_carries_its_plan(embed: bool, built: int, tmp_path: Path) -> None:
    graph = graph_of()
    call = call_of(graph, fused(graph), () if embed else ("plan",))
    x, y = operands_of()
    checks = [export.DisabledSafetyCheck.custom_call(runtime.PLAN_TARGET)]
    program = export.export(call, disabled_checks=checks)(x, y).serialize()
    files = [tmp_path / name for name in ("program", "x.npy", "y.npy", "r.npy")]
    files[0].write_bytes(program)
    np.save(files[1], x)
    np.save(files[2], y)
    printed = in_new_process(EXPORTED, *map(str, files))
    np.testing.assert_array_equal(np.load(files[3]), call(x, y))
    totals = json.loads(printed)
    assert totals["execute"] == 1 and totals["create_graph"] == built, totals


# ---- refuses ------------------------------------------------------------------------------------

OTHER_ID = "0" * 32


def test_ids_that_differ_are_both_named() -> None:
    graph = graph_of()
    plan = fused(graph)
    call = call_of(graph, plan, ("plan",), plan_id=OTHER_ID)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{OTHER_ID}, and here .* {plan.id}"):
        call(*operands_of())


def test_bytes_of_another_plan_are_refused() -> None:
    graph = graph_of()
    other = np.frombuffer(fused(graph_of(rows=5)).serialize(), np.uint8)
    with pytest.raises(jax.errors.JaxRuntimeError, match="this program was compiled with plan"):
        call_of(graph, fused(graph), plan=other)(*operands_of())


REFUSED_ATTRIBUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "graph": ("no JSON|JSON", {"graph": "{"}),
    "dtype of graph": ("attribute 'graph' is not a string", {"graph": np.int64(3)}),
    "engine": ("nope", {"engine": "nope"}),
    "cuda engine": ("(?i)cpu", {"engine": "cudnn"}),
    "option": ("option 'colour' is not known; expected", {"options": {"colour": "red"}}),
    "tuning": ("option 'tuning': 'much' is not allowed", {"options": {"tuning": "much"}}),
    "type": ("'workspace_limit' is not an i64", {"options": {"workspace_limit": "1"}}),
    "no bytes": ("attribute 'plan' is not an array of u8", {"plan": "text"}),
    "bad bytes": ("INVALID_ARGUMENT", {"plan": np.arange(50, dtype=np.uint8)}),
    "values": ("attribute 'values' is not a dictionary", {"values": "1"}),
}


@pytest.mark.parametrize("name", REFUSED_ATTRIBUTES)
def test_wrong_attributes(name: str) -> None:
    text, changes = REFUSED_ATTRIBUTES[name]
    graph = graph_of()
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        call_of(graph, fused(graph), **changes)(*operands_of())


@pytest.mark.parametrize("name", ["graph", "plan_id", "engine"])
def test_missing_attributes(name: str) -> None:
    graph = graph_of()
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"attribute '{name}' is missing"):
        call_of(graph, fused(graph), (name,))(*operands_of())


def test_wrong_operands() -> None:
    graph = graph_of()
    call = call_of(graph, fused(graph))
    x, y = operands_of()
    for operands, text in [
        ((y, y), r"input 'x' is f32\[8,16\]; the graph says f32\[4,8\]"),
        ((x.T, y), r"input 'x' is f32\[8,4\]"),
        ((x.reshape(4, 8, 1), y), r"input 'x' is f32\[4,8,1\]"),
        ((x.astype(np.float16), y), r"input 'x' is f16\[4,8\]"),
        ((x.astype(np.complex64), y), r"input 'x' is XLA's dtype \d+\[4,8\]"),
        ((x,), "there are 1 operands and 1 results beside the workspace"),
        ((x, y, y), "there are 3 operands"),
        ((), "there are 0 operands"),
    ]:
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            call(*operands)
    np.testing.assert_allclose(call(x, y), expected(x, y), rtol=1e-5, atol=1e-5)  # still right


def test_wrong_results() -> None:
    graph = graph_of()
    attributes = runtime.plan_attributes(fused(graph), graph)
    r = jax.ShapeDtypeStruct((4, 16), np.float32)
    u8 = jax.ShapeDtypeStruct((1,), np.uint8)
    for results, text in [
        ([], "there is no workspace"),
        ([r], r"the last result is the workspace, of dtype u8; it is f32\[4,16\]"),
        ([u8], "there are 2 operands and 0 results"),
        ([r, r, u8], "there are 2 operands and 2 results"),
        ([jax.ShapeDtypeStruct((16, 4), np.float32), u8], r"output 'r' is f32\[16,4\]"),
        ([jax.ShapeDtypeStruct((4, 16), np.int32), u8], r"output 'r' is i32\[4,16\]"),
    ]:
        call = ffi.ffi_call(runtime.PLAN_TARGET, results, has_side_effect=True)
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(jax.jit(lambda *v, c=call: c(*v, **attributes))(*operands_of()))


def test_strides_that_leave_the_buffer() -> None:
    graph = graph_of(
        inputs=[{"name": "x", "dtype": "f32", "shape": [4, 8], "strides": [100, 1]}],
        ops=[{"op": "relu", "in": ["x"], "out": "r"}],
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="128 bytes; its strides .* 1232"):
        call_of(graph, fused(graph))(operands_of()[0])


# ---- attention ----------------------------------------------------------------------------------


def attention_spec(**changes: Any) -> str:
    spec = {
        "lawson": 1, "kind": "attention", "pass": "training", "dtype": "f32", "batch": 2,
        "heads": 4, "seqlen_q": 6, "head_dim_qk": 16, "layout": "bshd", "mask": "causal",
    }  # fmt: skip
    return json.dumps({**spec, **changes})


B, S, H, D = 2, 6, 4, 16
Q = jax.ShapeDtypeStruct((B, S, H, D), np.float32)


def attention_call(
    spec: str, which: str, operands: Sequence[str], results: dict[str, Any], **options: Any
) -> Callable[..., Any]:
    plan = _core.attention_plan(spec, which, runtime.device_for("cpu", ["cpu"]))
    target = runtime.FORWARD_TARGET if which == "forward" else runtime.BACKWARD_TARGET
    aliases = options.pop("input_output_aliases", None)
    changes = options.pop("changes", {})
    call = ffi.ffi_call(
        target, [*results.values(), runtime.workspace_aval(plan)], input_output_aliases=aliases
    )
    attributes = runtime.attention_attributes(plan, spec, operands, list(results), **options)
    return jax.jit(lambda *arrays: call(*arrays, **{**attributes, **changes})[:-1])


def random_arrays(*shapes: tuple[int, ...]) -> list[Array]:
    random = np.random.default_rng(3)
    return [random.standard_normal(shape, np.float32) for shape in shapes]


def test_attention_forward_and_backward() -> None:
    spec = attention_spec()
    forward = attention_call(
        spec, "forward", "qkv", {"o": Q, "stats": jax.ShapeDtypeStruct((B, H, S), np.float32)}
    )
    backward = attention_call(
        spec, "backward", ["q", "k", "v", "o", "do", "stats"], {"dq": Q, "dk": Q, "dv": Q}
    )
    q, k, v, do = random_arrays(*[Q.shape] * 4)
    o, stats = forward(q, k, v)
    reference, pull = jax.vjp(
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), q, k, v
    )
    np.testing.assert_allclose(o, reference, rtol=1e-5, atol=1e-5)
    for gradient, wanted in zip(backward(q, k, v, o, do, stats), pull(do), strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5)


def test_attention_threads_and_scale() -> None:
    spec = attention_spec(**{"pass": "forward"})
    calls = {
        scale: attention_call(spec, "forward", "qkv", {"o": Q}, scale=scale) for scale in (0.3, 2.0)
    }
    lawson.stats(reset=True)

    def act(seed: int) -> bool:
        random = np.random.default_rng(seed)
        q, k, v = (random.standard_normal(Q.shape, np.float32) for _ in range(3))
        scale = (0.3, 2.0)[seed % 2]
        wanted = jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=scale)
        for _ in range(10):
            np.testing.assert_allclose(calls[scale](q, k, v)[0], wanted, rtol=1e-4, atol=1e-5)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(act, range(8)))
    totals = lawson.stats()["totals"]
    assert totals["execute"] == 80 and totals["cache_graph"] == 0


def test_attention_of_a_ragged_batch_with_fewer_tokens() -> None:
    lengths = [3, 5, 2]
    tokens = sum(lengths)
    spec = attention_spec(
        **{
            "pass": "forward",
            "layout": "thd",
            "mask": "padding_causal",
            "batch": 3,
            "total_q": tokens,
        }
    )
    out = {"o": jax.ShapeDtypeStruct((tokens, H, D), np.float32)}
    names = ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv"]
    q, k, v = random_arrays(*[(tokens, H, D)] * 3)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    (o,) = attention_call(spec, "forward", names, out)(q, k, v, offsets, offsets)
    for begin, end in zip(offsets[:-1], offsets[1:], strict=True):
        part = [array[None, begin:end] for array in (q, k, v)]
        wanted = jax.nn.dot_product_attention(*part, is_causal=True)[0]
        np.testing.assert_allclose(o[begin:end], wanted, rtol=1e-5, atol=1e-5)
    # Two of the three sequences, by a run-time scalar and no new plan.
    (two,) = attention_call(spec, "forward", names, out, sequences=2)(q, k, v, offsets, offsets)
    np.testing.assert_array_equal(two[: offsets[2]], o[: offsets[2]])
    with pytest.raises(jax.errors.JaxRuntimeError, match="ends with 10; the tensors have 9"):
        short = {"o": jax.ShapeDtypeStruct((9, H, D), np.float32)}
        attention_call(spec, "forward", names, short)(q[:9], k[:9], v[:9], offsets, offsets)


def test_attention_refuses() -> None:
    spec = attention_spec(**{"pass": "forward"})
    q, k, v = random_arrays(*[Q.shape] * 3)
    out = {"o": Q}
    twice = np.concatenate([k, k])
    plan_id = {"plan_id": OTHER_ID, "plan": np.zeros(0, np.uint8)}
    cases: list[tuple[str, Any, tuple[Array, ...]]] = [
        ("'x' is no tensor of attention", (spec, "forward", ["q", "k", "x"], out), (q, k, v)),
        ("reads no 'bias'", (spec, "forward", ["q", "k", "bias"], out), (q, k, v)),
        ("writes no 'stats'", (spec, "forward", "qkv", {"stats": Q}), (q, k, v)),
        ("tensor 'v' is not set", (spec, "forward", "qk", out), (q, k)),
        ("2 operands .* 'names' has 3", (spec, "forward", "qkv", out), (q, k)),
        (r"tensor 'k' is f32\[4,6,4,16\]", (spec, "forward", "qkv", out), (q, twice, v)),
        ("tensor 'k' is", (spec, "forward", "qkv", out), (q, k[:1], v)),
        (r"tensor 'v' is f16", (spec, "forward", "qkv", out), (q, k, v.astype(np.float16))),
    ]  # fmt: skip
    for text, arguments, arrays in cases:
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            attention_call(*arguments)(*arrays)
    for changes, text in [
        (plan_id, OTHER_ID),
        ({"values": {"temperature": 1.0}}, "expected scale or sequences"),
        ({"spec": "{}"}, "lawson"),
        ({"names": 3}, "attribute 'names' is not a string"),
        ({"values": {"sequences": 1.0}}, "ragged"),
    ]:
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            attention_call(spec, "forward", "qkv", out, changes=changes)(q, k, v)


# ---- platforms and versions ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "engines", "environment", "text"),
    [
        ("tpu", None, "cpu", "platform 'tpu'.*LAWSON_ENGINE=cpu"),
        ("rocm", ["cpu"], "", "platform 'rocm'"),
        ("cpu", None, "", r"no engine is named.*engines=\['cpu'\], or LAWSON_ENGINE=cpu"),
        ("cpu", None, "cudnn", "named are cudnn"),
        ("cpu", ["cudnn"], "cpu", "named are cudnn"),
    ],
)
def test_where_no_engine_runs(
    platform: str,
    engines: list[str] | None,
    environment: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LAWSON_ENGINE", environment)
    with pytest.raises(lawson.UnsupportedError, match=text):
        runtime.device_for(platform, engines)


def test_where_engines_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAWSON_ENGINE", "cudnn, reference")
    assert runtime.device_for("cpu").name == "cpu"
    assert runtime.device_for("cpu", ("cudnn", "cpu")).name == "cpu"
    with pytest.raises(lawson.UnavailableError, match="cuda:63"):
        _settings.device_on("cuda", None, 63)


def test_versions() -> None:
    offered = runtime.offered_version()
    assert offered is not None and offered >= (0, 3)
    assert runtime.version_error((0, 3), (0, 3)) is None
    assert runtime.version_error((0, 3), (0, 4)) is None
    assert runtime.version_error((0, 3), None) is None
    for other in ((0, 2), (1, 0), (1, 4)):
        text = runtime.version_error((0, 3), other)
        assert text is not None
        assert f"built for XLA FFI 0.3, this jaxlib offers {other[0]}.{other[1]}" in text


class Extension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension, with its base."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
    ]


class Metadata(ctypes.Structure):
    """XLA_FFI_Metadata, its API version first."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("version_size", ctypes.c_size_t),
        ("version_extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("traits", ctypes.c_uint32),
        ("state_type_id", ctypes.c_int64),
    ]


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("target", ["plan", "attention_forward", "attention_backward"])
def test_what_handlers_say_of_themselves(platform: str, target: str) -> None:
    library = ctypes.CDLL(str(Path(lawson.__file__).parent / "liblawson_jax.so"))
    metadata = Metadata(struct_size=ctypes.sizeof(Metadata))
    extension = Extension(
        struct_size=ctypes.sizeof(Extension), type=1, metadata=ctypes.addressof(metadata)
    )
    frame = (ctypes.c_size_t * 21)()  # XLA_FFI_CallFrame, up to its attrs
    frame[0], frame[1] = ctypes.sizeof(frame), ctypes.addressof(extension)
    execute = getattr(library, f"lawson_jax_{platform}_{target}_execute")
    execute.restype = ctypes.c_void_p
    assert execute(frame) is None
    assert (metadata.major, metadata.minor) == (0, 3)
    # Compiled in, since XLA refuses it at registration: can be recorded into a CUDA graph.
    assert metadata.traits == (1 if platform == "cuda" else 0)
