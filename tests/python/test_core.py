"""lawson._core and the functions over it: answers, errors, odd inputs, threads, bytes."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import lawson
from lawson import _core
from new_process import in_new_process

ROOT = Path(__file__).resolve().parents[2]
SPECS = ROOT / "examples/specs"
Json = dict[str, Any]


def graph_document(rows: int = 4, **changes: Any) -> Json:
    """relu(x @ y), x [rows, 8]."""
    return {
        "lawson": 1,
        "kind": "graph",
        "name": "mm_relu",
        "inputs": [
            {"name": "x", "dtype": "f32", "shape": [rows, 8]},
            {"name": "y", "dtype": "f32", "shape": [8, 16]},
        ],
        "ops": [
            {"op": "matmul", "in": ["x", "y"], "out": "m", "source": "mlp.py:12"},
            {"op": "relu", "in": ["m"], "out": "r"},
        ],
        "outputs": ["r"],
        **changes,
    }


def graph_of(**changes: Any) -> lawson.Graph:
    return lawson.Graph.from_json(json.dumps(graph_document(**changes)), "test")


CPU = lawson.Device("cpu")


def loaded_library() -> ctypes.CDLL:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    paths = set(re.findall(r"/\S*liblawson\.so\S*", maps))
    assert len(paths) == 1, paths  # one for everything in the process
    return ctypes.CDLL(paths.pop())


# ---- what it is ---------------------------------------------------------------------------------


def test_version_is_the_librarys() -> None:
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    assert f"project(lawson VERSION {lawson.__version__} " in text
    assert lawson.info()["version"] == lawson.__version__


def test_stub_is_what_nanobind_says() -> None:
    from nanobind.stubgen import StubGen  # type: ignore[import-untyped]

    generator = StubGen(_core, quiet=True)
    generator.put(_core)
    committed = (ROOT / "python/lawson/_core.pyi").read_text(encoding="utf-8")
    assert generator.get().strip() == committed.strip()


def test_all_names_exist_and_are_documented() -> None:
    for name in lawson.__all__:
        value = getattr(lawson, name)
        assert isinstance(value, str) or value.__doc__, name


def test_targets() -> None:
    names = {target["name"] for target in lawson.targets()}
    assert {"cpu", "h200", "b200"} <= names


# ---- graphs -------------------------------------------------------------------------------------


def test_tensors_of_a_graph() -> None:
    document = graph_document(
        inputs=[
            {"name": "x", "dtype": "bf16", "shape": [2, 8], "strides": [1, 2], "alignment": 4},
            {"name": "s", "dtype": "f32", "shape": [1, 1], "by_value": True},
        ],
        ops=[{"op": "mul", "in": ["x", "s"], "out": "r"}],
    )
    x, s, r = lawson.Graph.from_json(json.dumps(document)).tensors()
    assert (x.name, x.dtype, x.shape, x.strides) == ("x", "bf16", [2, 8], [1, 2])
    assert (x.is_input, x.is_by_value, x.alignment, x.size) == (True, False, 4, 32)
    assert (s.name, s.is_by_value, s.is_input) == ("s", True, True)
    assert (r.name, r.dtype, r.shape, r.is_input) == ("r", "f32", [2, 8], False)
    assert len({x.uid, s.uid, r.uid}) == 3


def test_graph_document_round_trip() -> None:
    graph = graph_of()
    again = lawson.Graph.from_json(graph.json())
    assert again.json() == graph.json()
    assert graph.name == "mm_relu"
    assert "matmul" in graph.print() and "digraph" in graph.dot()


def test_gradient() -> None:
    backward = _core.gradient(graph_of(), ["y", "x"])
    names = [(tensor.name, tensor.is_input) for tensor in backward.tensors()]
    assert names[-2:] == [("d_y", False), ("d_x", False)]
    assert ("d_r", True) in names
    plan = lawson.compile(backward, "cpu")
    plan.load(CPU)
    assert plan.verify(3)[0]


# ---- verdicts and plans -------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_probe_compile_and_run(engine: str) -> None:
    options = lawson.Options(engine=engine)
    verdict = _core.probe(graph_of(), CPU, options)
    assert verdict and verdict.supported and verdict.decision == "supported"
    assert verdict.engine == engine and verdict.strength == "built" and verdict.reasons == []
    plan = _core.compile(graph_of(), CPU, options)
    assert (plan.id, plan.key, plan.engine) == (verdict.plan_id, verdict.key, engine)
    assert plan.target == "cpu"
    plan.load(CPU)
    is_right, errors = plan.verify(7)
    assert is_right and json.loads(errors)["outputs"][0]["name"] == "r"


def test_execute_on_the_callers_memory() -> None:
    plan = _core.compile(graph_of(), CPU)
    x, y, r = (ctypes.create_string_buffer(4 * n + 64) for n in (32, 128, 64))

    def aligned(buffer: ctypes.Array[Any]) -> int:
        return -(-ctypes.addressof(buffer) // 64) * 64

    for buffer, count in ((x, 32), (y, 128)):
        (ctypes.c_float * count).from_address(aligned(buffer))[:] = [1.0] * count
    uids = [tensor.uid for tensor in plan.graph().tensors()]
    addresses = dict(zip(uids, map(aligned, (x, y, r)), strict=True))
    with pytest.raises(lawson.InvalidArgumentError, match="is not loaded"):
        plan.execute(addresses)
    plan.load(CPU)
    plan.execute(addresses)
    assert list((ctypes.c_float * 64).from_address(aligned(r))) == [8.0] * 64
    with pytest.raises(lawson.InvalidArgumentError):
        plan.execute({})


def test_fusion() -> None:
    fusion = _core.fuse(graph_of(), None, None, ["cpu"])
    assert fusion.engine == fusion.plan.engine == fusion.verdict.engine == "cpu"
    assert fusion.device == "cpu"
    assert fusion.plan.id == fusion.verdict.plan_id == _core.compile(graph_of(), CPU).id
    assert json.loads(fusion.json())["engines_from"] == "argument"
    plan = fusion.plan
    del fusion  # the plan keeps what it is borrowed from
    assert plan.verify(1)[0]


def test_fusion_chooses_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAWSON_ENGINE", raising=False)
    allowed = _core.fuse(graph_of(), CPU, "allow", ["cudnn", "cpu"])
    assert allowed.engine == "cpu"
    assert json.loads(allowed.json())["tried"][0]["engine"] == "cudnn"
    with pytest.raises(lawson.Error, match="cpu"):
        _core.fuse(graph_of(), CPU, "require", ["cudnn"])


def test_options_are_read_back_and_matter() -> None:
    options = lawson.Options(
        engine="cpu", strength="judged", workspace_limit=5, deterministic=True,
        deadline_ms=2.5, tuning="quick", retune=True, dynamic_shapes=True,
    )  # fmt: skip
    assert (options.engine, options.strength, options.workspace_limit) == ("cpu", "judged", 5)
    assert (options.deterministic, options.deadline_ms, options.tuning) == (True, 2.5, "quick")
    assert (options.retune, options.dynamic_shapes) == (True, True)
    assert lawson.Options().engine is None and lawson.Options().strength == "built"
    with pytest.raises(AttributeError):
        options.engine = "reference"  # type: ignore[misc]
    keys = {
        _core.compile_key(graph_of(), CPU, lawson.Options(engine=e)) for e in ("cpu", "reference")
    }
    assert len(keys) == 2


def test_attention() -> None:
    spec = (SPECS / "attention-training.json").read_text(encoding="utf-8")
    document = {**json.loads(spec), "dtype": "f32", "seqlen_q": 16, "batch": 2}
    text = json.dumps(document)
    config = lawson.AttentionConfig.from_spec(text)
    assert json.loads(config.spec())["seqlen_q"] == 16
    verdict = _core.attention_select(config, CPU)
    assert verdict.supported, verdict.reasons
    for which in ("forward", "backward"):
        graph = config.graph(which)
        plan = _core.attention_plan(text, which, CPU)
        assert plan.id == _core.compile(graph, CPU).id
        plan.load(CPU)
        assert plan.verify(5)[0]
    with pytest.raises(lawson.InvalidArgumentError, match="expected forward or backward"):
        config.graph("training")


# ---- bytes and files ----------------------------------------------------------------------------


def test_plan_bytes() -> None:
    plan = _core.compile(graph_of(), CPU)
    data = plan.serialize()
    again = lawson.Plan.deserialize(data)
    assert (again.id, again.key, again.engine, again.name) == (
        plan.id, plan.key, plan.engine, plan.name,
    )  # fmt: skip
    assert again.graph().json() == plan.graph().json()
    again.load(CPU)
    assert again.verify(2)[0]
    for bad in (
        b"",
        b"LAWSONP1",
        data[:-1],
        data + b"x",
        bytes(len(data)),
        data[:40] + b"~" + data[41:],
    ):
        with pytest.raises(lawson.InvalidArgumentError):
            lawson.Plan.deserialize(bad)
    with pytest.raises(TypeError):
        lawson.Plan.deserialize("text")  # type: ignore[arg-type]


@pytest.mark.parametrize(("what", "events"), [("keep", [1, 0]), ("build", [0, 1])])
def test_kept_plan_is_found_instead_of_built(what: str, events: list[int], tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(json.dumps(graph_document()), encoding="utf-8")
    plan = _core.compile(graph_of(), CPU)
    (tmp_path / "plan").write_bytes(plan.serialize())
    out = in_new_process(
        """
import json, pathlib, sys, lawson
from lawson import _core
folder = pathlib.Path(sys.argv[1])
device = lawson.Device("cpu")
if sys.argv[2] == "keep":
    lawson.load(folder / "plan")[0].keep(device)
before = lawson.stats()["totals"]
graph = lawson.Graph.from_json((folder / "graph.json").read_text())
plan = _core.fuse(graph, device, None, ["cpu"]).plan
after = lawson.stats()["totals"]
print(json.dumps([plan.id, *(after[event] - before[event] for event in ("hit", "cache_graph"))]))
""",
        str(tmp_path),
        what,
    )
    assert json.loads(out) == [plan.id, *events]


def test_kept_with_other_options_is_refused() -> None:
    plan = _core.compile(graph_of(rows=5), CPU)
    with pytest.raises(lawson.InvalidArgumentError, match=plan.id):
        plan.keep(CPU, lawson.Options(engine="cpu", deterministic=True, workspace_limit=12345))


def test_bundles(tmp_path: Path) -> None:
    path = tmp_path / "plans.lawson"
    plans = [_core.compile(graph_of(rows=rows), CPU) for rows in (2, 3)]
    lawson.save(path, plans[:1])
    lawson.save(path, plans[1:], append=True)
    found = lawson.load(path)
    assert len(found) == 2
    assert {plan.id for plan in found} == {plan.id for plan in plans}
    assert [plan.id for plan in found[::-1]] == [found[-1].id, found[0].id]
    hit = found.find(graph_document(rows=3), "cpu")
    assert hit is not None and hit.id == plans[1].id
    assert found.find(graph_document(rows=9), "cpu") is None
    with pytest.raises(IndexError):
        found[2]
    (tmp_path / "plan").write_bytes(plans[0].serialize())
    single = lawson.load(tmp_path / "plan")
    assert [plan.id for plan in single] == [plans[0].id]
    assert single.find(graph_document(rows=2), "cpu") is not None
    assert single.find(graph_document(rows=3), "cpu") is None
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(lawson.InvalidArgumentError, match="plans.lawson"):
        lawson.load(path)


# ---- models -------------------------------------------------------------------------------------


def test_check_is_what_the_tool_prints() -> None:
    tool = os.environ.get("LAWSON_BIN", str(ROOT / "build/bin/lawson"))
    model = ROOT / "examples/models/gpt2.json"
    result = lawson.check(model, targets=["cpu"], seqlen=64, context=64)
    arguments = [
        "check",
        str(model),
        "--target",
        "cpu",
        "--seqlen",
        "64",
        "--context",
        "64",
        "--json",
    ]
    printed = subprocess.run(
        [tool, *arguments], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert json.loads(result.json()) == json.loads(printed)
    assert result.supported and len(result) == len(list(result)) > 3
    assert result.model_type == "gpt2" and result.layers == 12
    first = next(iter(result))
    assert result[first.name] is first and first.decision("cpu") == "supported"
    assert first.name in str(result)


def test_check_of_a_config_as_dict_and_of_its_folder(tmp_path: Path) -> None:
    text = (ROOT / "examples/models/gpt2.json").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    names = [
        [workload.name for workload in lawson.check(given, "cpu", passes=passes, seqlen=32)]
        for given, passes in (
            (tmp_path, ["decode"]),
            (json.loads(text), "decode"),
            (text, ("decode",)),
        )
    ]
    assert names[0] == names[1] == names[2] != []


def test_check_says_why_not() -> None:
    result = lawson.check(FP8, ["cpu"], neighbours=4)
    assert not result.supported
    workload = result["eight"]
    assert workload.group == "spec" and workload.decision("cpu") == "unsupported"
    assert workload.reasons("cpu") and workload.reasons("cpu")[0] in str(result)
    assert result.to_dict()["workloads"][0]["verdicts"]["cpu"]["verdict"] == "unsupported"


def test_explain() -> None:
    answer = lawson.explain(SPECS / "mm-f64.json", "cpu")
    assert answer["verdict"]["verdict"] == "supported"
    assert answer["neighbours"] == []


# ---- errors -------------------------------------------------------------------------------------


def test_one_class_for_each_status() -> None:
    from lawson._errors import BY_STATUS

    library = loaded_library()
    library.lawson_status_string.restype = ctypes.c_char_p
    builtin = {
        "unsupported": NotImplementedError,
        "invalid argument": ValueError,
        "unavailable": RuntimeError,
        "out of memory": MemoryError,
        "I/O error": OSError,
    }
    words = []
    for status in range(1, 100):
        word = library.lawson_status_string(status).decode()
        if word == "unknown status":
            break
        error = BY_STATUS[status]
        assert error.status == word
        assert issubclass(error, lawson.Error) and issubclass(
            error, builtin.get(word, RuntimeError)
        )
        assert str(error("text")) == "text"
        words.append(word)
    assert len(words) == len(BY_STATUS) == len(set(BY_STATUS.values()))


FP8 = {
    "lawson": 1, "kind": "attention", "name": "eight", "dtype": "f8e4m3", "heads": 2,
    "seqlen_q": 8, "head_dim_qk": 64, "fp8": {"recipe": "current"},
}  # fmt: skip


def second_order() -> None:
    spec = (SPECS / "attention-backward.json").read_text(encoding="utf-8")
    _core.gradient(lawson.AttentionConfig.from_spec(spec).graph("backward"), ["q"])


HUGE = {
    "inputs": [{"name": "x", "dtype": "f64", "shape": [1 << 40, 32]}],
    "ops": [{"op": "relu", "in": ["x"], "out": "r"}],
}

NO_PLANS: Any = [None]

ERRORS: dict[str, tuple[type[Exception], str, Callable[[Path], object]]] = {
    "unsupported": (lawson.UnsupportedError, "second order", lambda _: second_order()),
    "no graph": (NotImplementedError, "FP8", lambda _: lawson.compile(FP8, "cpu")),
    "field": (
        lawson.InvalidArgumentError,
        "field 'lawson'",
        lambda _: lawson.probe({"lawson": 7}, "cpu"),
    ),
    "engine": (
        lawson.InvalidArgumentError,
        "nope",
        lambda _: _core.probe(graph_of(), CPU, lawson.Options(engine="nope")),
    ),
    "device": (lawson.InvalidArgumentError, "known: cpu", lambda _: lawson.Device("nope")),
    "no gpu": (lawson.UnavailableError, "cuda:63", lambda _: lawson.Device("cuda:63")),
    "memory": (MemoryError, "GiB", lambda _: run(graph_of(**HUGE))),
    "io": (
        OSError,
        "none",
        lambda folder: lawson.save(folder / "none/x", [_core.compile(graph_of(), CPU)]),
    ),
    "no file": (
        lawson.IOError_,
        "cannot be opened",
        lambda folder: lawson.probe(folder / "x", "cpu"),
    ),
    "no bundle": (lawson.IOError_, "cannot be opened", lambda folder: lawson.load(folder / "x")),
    "a folder": (
        lawson.InvalidArgumentError,
        "config.json",
        lambda folder: lawson.probe(folder, "cpu"),
    ),
    "strength": (lawson.InvalidArgumentError, "built", lambda _: lawson.Options(strength="hard")),
    "tuning": (lawson.InvalidArgumentError, "exhaustive", lambda _: lawson.Options(tuning="x")),
    "policy": (lawson.InvalidArgumentError, "allow", lambda _: _core.fuse(graph_of(), None, "x")),
    "engines": (
        lawson.InvalidArgumentError,
        "empty",
        lambda _: _core.fuse(graph_of(), None, None, []),
    ),
    "two graphs": (
        lawson.InvalidArgumentError,
        "stands for 2",
        lambda _: lawson.compile(SPECS / "attention-training.json", "cpu"),
    ),
    "gradient": (lawson.InvalidArgumentError, "'z'", lambda _: _core.gradient(graph_of(), ["z"])),
    "targets": (
        lawson.InvalidArgumentError,
        "targets",
        lambda _: lawson.check(graph_document(), []),
    ),
    "target": (
        lawson.InvalidArgumentError,
        "h999",
        lambda _: lawson.check(graph_document(), ["h999"]),
    ),
    "spec and batch": (
        lawson.InvalidArgumentError,
        "batch: 2 goes with a model",
        lambda _: lawson.check(graph_document(), "cpu", batch=2),
    ),
    "spec and passes": (
        lawson.InvalidArgumentError,
        "goes with a model",
        lambda _: lawson.check(graph_document(), "cpu", passes="decode"),
    ),
    "build": (
        lawson.InvalidArgumentError,
        "build: 'no'",
        lambda _: lawson.check(graph_document(), "cpu", build="no"),  # type: ignore[arg-type]
    ),
    "neighbours": (
        lawson.InvalidArgumentError,
        "neighbours: -1",
        lambda _: lawson.check(graph_document(), "cpu", neighbours=-1),
    ),
    "config": (lawson.InvalidArgumentError, "field", lambda _: lawson.check({"x": 1}, ["cpu"])),
    "type": (lawson.InvalidArgumentError, "int is not allowed", lambda _: lawson.probe(3, "cpu")),  # type: ignore[arg-type]
    "dict": (lawson.InvalidArgumentError, "no JSON", lambda _: lawson.probe({"x": {1}}, "cpu")),
    "json": (lawson.InvalidArgumentError, "spec", lambda _: lawson.probe("{", "cpu")),
    "surrogate": (
        lawson.InvalidArgumentError,
        "no text",
        lambda _: lawson.probe("{\udc80}", "cpu"),
    ),
    "nul": (lawson.InvalidArgumentError, "no path", lambda _: lawson.probe("a\0b", "cpu")),
    "none": (TypeError, "incompatible", lambda _: _core.probe(None, CPU)),  # type: ignore[call-overload]
    "no plan": (
        lawson.InvalidArgumentError,
        "None",
        lambda folder: lawson.save(folder / "x", NO_PLANS),
    ),
}


def run(graph: lawson.Graph) -> None:
    plan = _core.compile(graph, CPU)
    plan.load(CPU)
    plan.verify(0)


@pytest.mark.parametrize("name", ERRORS)
def test_error(name: str, tmp_path: Path) -> None:
    kind, text, act = ERRORS[name]
    with pytest.raises(kind, match=re.escape(text)):
        act(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b" \n", b"\xff\xfe{}", b"{", b"[1]", b"{}" + b" " * (9 << 20)]
)
def test_files_that_are_no_documents(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_bytes(content)
    for act in (lambda: lawson.probe(path, "cpu"), lambda: lawson.check(path, ["cpu"])):
        with pytest.raises(lawson.InvalidArgumentError, match="spec.json|field"):
            act()


def test_messages_keep_what_a_user_wrote() -> None:
    with pytest.raises(lawson.InvalidArgumentError, match="größe ✓"):
        lawson.probe(graph_document(outputs=["größe ✓"]), "cpu")


# ---- threads ------------------------------------------------------------------------------------


def test_threads_share_one_build() -> None:
    lawson.stats(reset=True)
    begin = threading.Barrier(16)

    def act(_: int) -> str:
        begin.wait()
        return _core.fuse(graph_of(rows=61), CPU, None, ["cpu"]).plan.id

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(act, range(16)))) == 1
    totals = lawson.stats()["totals"]
    assert totals["cache_graph"] == 1 and totals["hit"] == 15


def test_threads_have_errors_of_their_own() -> None:
    def act(number: int) -> bool:
        for _ in range(50):
            with pytest.raises(lawson.InvalidArgumentError, match=f"field 'f{number}'"):
                lawson.Graph.from_json(json.dumps(graph_document(**{f"f{number}": 1})))
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(act, range(8)))


def test_other_threads_run_meanwhile() -> None:
    slow = _core.compile(
        graph_of(
            inputs=[
                {"name": "x", "dtype": "f32", "shape": [256, 256]},
                {"name": "y", "dtype": "f32", "shape": [256, 256]},
            ]
        ),
        CPU,
        lawson.Options(engine="reference"),
    )
    slow.load(CPU)
    started, ended = threading.Event(), threading.Event()

    def act() -> None:
        started.set()
        slow.verify(0)
        ended.set()

    thread = threading.Thread(target=act)
    thread.start()
    started.wait()
    steps = 0
    while not ended.is_set():
        time.sleep(0.0005)
        steps += 1
    thread.join()
    assert steps > 10  # with the lock held it would be one or two


# ---- what happened ------------------------------------------------------------------------------


def test_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with lawson.trace(path):
        _core.compile(graph_of(rows=77), CPU)
        with pytest.raises(lawson.InvalidArgumentError), lawson.trace(tmp_path / "second.json"):
            pass
    assert json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    with (
        pytest.raises(lawson.InvalidArgumentError, match="none"),
        lawson.trace(tmp_path / "none/x"),
    ):
        pass
    with pytest.raises(KeyError), lawson.trace(tmp_path / "third.json"):
        raise KeyError
    assert (tmp_path / "third.json").exists()


def test_stats() -> None:
    lawson.stats(reset=True)
    _core.fuse(graph_of(rows=78), CPU, None, ["cpu"]).plan.verify(0)
    totals = lawson.stats(reset=True)["totals"]
    assert totals["cache_graph"] == 1 and totals["execute"] >= 1
    assert lawson.stats()["totals"]["execute"] == 0


# ---- the page -----------------------------------------------------------------------------------


def test_the_examples_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    code = "\n".join(blocks)
    for name in ("plans.lawson", "trace.json"):
        code = code.replace(f'"{name}"', repr(str(tmp_path / name)))
    printed = in_new_process(code, cwd=ROOT)
    assert "attention.full.prefill" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"plans.lawson", "trace.json"}


def test_the_page_names_every_error() -> None:
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    from lawson._errors import BY_STATUS

    assert [name for name in BY_STATUS.values() if name.__name__ not in page] == []
