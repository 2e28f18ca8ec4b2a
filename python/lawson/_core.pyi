"""Lawson's C++ API. Use the package `lawson`, which is over it."""

from collections.abc import Mapping, Sequence
from typing import overload


def version() -> str:
    """The library's version, "0.1.0"."""

def configure(cudnn_path: str = '', max_workers: int = 0) -> None:
    """
    Process-wide settings, before the first call that needs an engine. `cudnn_path`: a
    libcudnn.so.9 or a folder with one. `max_workers`: deviceless workers at once.
    """

def info() -> str:
    """
    Versions, libraries found and where, devices, environment variables, as JSON.
    """

def devices() -> str:
    """
    GPUs of this machine, the host CPU and the target library, as a JSON list.
    """

def stats() -> str:
    """What this process counted, as JSON."""

def reset_stats() -> None:
    """Counts from 0 again."""

def trace_start(path: str) -> None:
    """Notes each step with its time from here on. One trace at a time."""

def trace_stop() -> None:
    """Writes the trace to its file."""

def model_workloads(config: str, source: str = 'config.json', *, batch: int = 0, seqlen: int = 0, context: int = 0, passes: str = '', dtype: str = '') -> str:
    """
    A model's config.json as the JSON document of its workloads. 0 and "": the defaults
    (batch 1, seqlen 4096, context 8192, all passes, the config's dtype).
    """

class Device:
    """A GPU of this machine, the host CPU, or a target of the library."""

    def __init__(self, name: str) -> None:
        """"cpu", "cuda", "cuda:N", or a target ("h200", also an alias)."""

    @property
    def name(self) -> str: ...

    @property
    def is_present(self) -> bool:
        """Whether it is in this machine."""

    def limits(self, engine: str = '') -> str:
        """What was measured as the most that it does, as JSON. Takes seconds."""

    def __repr__(self) -> str: ...

class TensorInfo:
    """A tensor that a graph's caller binds."""

    @property
    def uid(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str:
        """As in a spec: "bf16", "f8e4m3", ..."""

    @property
    def shape(self) -> list[int]: ...

    @property
    def strides(self) -> list[int]:
        """In elements."""

    @property
    def is_input(self) -> bool: ...

    @property
    def is_by_value(self) -> bool:
        """One element, bound on the host."""

    @property
    def alignment(self) -> int:
        """Bytes."""

    @property
    def size(self) -> int:
        """Bytes from the first to the last element."""

    def __repr__(self) -> str: ...

class Graph:
    """A typed program over a closed set of ops (docs/spec.md)."""

    @staticmethod
    def from_json(text: str, source: str = 'graph') -> Graph:
        """Of a document of kind "graph"; `source` names it in messages."""

    @property
    def name(self) -> str: ...

    def tensors(self) -> list[TensorInfo]:
        """Inputs first, then outputs."""

    def json(self) -> str:
        """The document, with defaults filled in."""

    def print(self) -> str:
        """As text, one op a line."""

    def dot(self) -> str:
        """As a Graphviz drawing."""

    def simplified(self) -> Graph:
        """After the clean-ups that change no bit: what a plan of it is of."""

    def __repr__(self) -> str: ...

def gradient(graph: Graph, wrt: Sequence[str]) -> Graph:
    """
    The backward graph for the inputs named in `wrt`. Its inputs: those of the graph that it
    reads, then a cotangent d_NAME for each float output; its outputs: d_NAME for each of
    `wrt`. UnsupportedError names an op without a gradient and where it was written.
    """

class Spec:
    """A spec document and the graphs that it stands for."""

    @staticmethod
    def from_json(text: str, source: str = 'spec') -> Spec:
        """Of a document of either kind."""

    @property
    def name(self) -> str: ...

    def json(self) -> str:
        """The document, with defaults filled in."""

    def graphs(self) -> list[Graph]:
        """
        One, two for an attention of pass "training", or none: what the spec asks for cannot
        be expressed, and a probe says what.
        """

class Options:
    """How to judge, build and choose. Immutable."""

    def __init__(self, engine: str | None = None, strength: str = 'built', workspace_limit: int = -1, deterministic: bool = False, deadline_ms: float = 0.0, tuning: str = 'off', retune: bool = False, dynamic_shapes: bool = False) -> None:
        """
        `engine`: "cudnn", "cpu", "reference"; None: cudnn for GPUs, cpu for the CPU.
        `strength`: "judged", "built" or "verified". `workspace_limit`: bytes; negative:
        none. `deadline_ms`: for building and tuning; 0: none. `tuning`: "off", "quick" or
        "exhaustive". `retune`: time the stored candidates again. `dynamic_shapes`: one kernel
        for all lengths, where the engine has such plans.
        """

    @property
    def engine(self) -> str | None: ...

    @property
    def strength(self) -> str: ...

    @property
    def workspace_limit(self) -> int:
        """Bytes; negative: none."""

    @property
    def deterministic(self) -> bool: ...

    @property
    def deadline_ms(self) -> float: ...

    @property
    def tuning(self) -> str: ...

    @property
    def retune(self) -> bool: ...

    @property
    def dynamic_shapes(self) -> bool: ...

class Verdict:
    """The answer to: does this run as one fused kernel?"""

    @property
    def decision(self) -> str:
        """
        "supported", "unsupported" or "undecided" (only the live device can tell).
        """

    @property
    def supported(self) -> bool: ...

    @property
    def strength(self) -> str:
        """"judged", "built" or "verified"."""

    @property
    def engine(self) -> str: ...

    @property
    def key(self) -> str: ...

    @property
    def plan_id(self) -> str:
        """"" when there is none."""

    @property
    def reasons(self) -> list[tuple[str, str]]:
        """Pairs of code and message: why not."""

    def json(self) -> str:
        """All of it, as JSON."""

    def __bool__(self) -> bool: ...

    def __repr__(self) -> str: ...

@overload
def probe(graph: Graph, device: Device, options: Options | None = None) -> Verdict:
    """
    Judges a graph, or all graphs of a spec. Unsupported is an answer; what is raised is a
    fault or bad input.
    """

@overload
def probe(spec: Spec, device: Device, options: Options | None = None) -> Verdict: ...

def explain(spec: Spec, device: Device, options: Options | None = None, limit: int = 0) -> str:
    """
    The verdict, every failing condition and the nearest neighbours, each probed, as JSON.
    `limit`: the most neighbours to probe; 0: the default.
    """

def compile_key(graph: Graph, device: Device, options: Options | None = None) -> str:
    """The key that a plan of this has, found without judging or building."""

class Plan:
    """What was compiled for graph, device, engine and options."""

    @staticmethod
    def deserialize(data: bytes) -> Plan:
        """
        Of serialize()'s bytes. InvalidArgumentError: bad, stale or foreign bytes.
        """

    def serialize(self) -> bytes:
        """As bytes, for another process."""

    @property
    def id(self) -> str:
        """Hash of what will run."""

    @property
    def key(self) -> str:
        """Hash of what was asked."""

    @property
    def engine(self) -> str: ...

    @property
    def name(self) -> str:
        """cuDNN's engine config."""

    @property
    def target(self) -> str: ...

    @property
    def workspace_size(self) -> int:
        """Bytes."""

    def graph(self) -> Graph:
        """What it computes, after clean-ups."""

    def tuning(self) -> str:
        """How it was chosen, as JSON."""

    def load(self, device: Device) -> None:
        """Makes it executable on a device of this machine."""

    def keep(self, device: Device, options: Options | None = None) -> None:
        """
        Loads it for those of this process who ask for its key on that device. `options`: what
        it was compiled with. A plan that is there already stays.
        """

    def execute(self, addresses: Mapping[int, int], workspace: int = 0, workspace_size: int = 0, stream: int = 0) -> None:
        """
        Runs a loaded plan: `addresses` from uid to device address (host address for the CPU
        and for by-value tensors). `workspace`: its address; `stream`: a CUstream. The memory
        is the caller's, and is used until the work on the stream is done.
        """

    def verify(self, seed: int = 0) -> tuple[bool, str]:
        """
        Runs a loaded plan on random data and compares with the float64 oracle: whether all
        is within the bounds, and the errors as JSON.
        """

    def bench(self, seed: int = 0, rounds: int = 20) -> str:
        """Times a loaded plan on random data by the device's clock, as JSON."""

    def __repr__(self) -> str: ...

def compile(graph: Graph, device: Device, options: Options | None = None) -> Plan:
    """
    The plan of this graph, from the process's cache, the bundles, the store, or built.
    UnsupportedError has every reason in its message when it does not fuse.
    """

class Fusion:
    """A loaded plan, and how it was chosen."""

    @property
    def plan(self) -> Plan: ...

    @property
    def verdict(self) -> Verdict: ...

    @property
    def graph(self) -> Graph: ...

    @property
    def engine(self) -> str: ...

    @property
    def device(self) -> str:
        """The name of the device that it runs on."""

    def json(self) -> str:
        """Policy, engines, what was tried before, verdict and graph, as JSON."""

def fuse(graph: Graph, device: Device | None = None, policy: str | None = None, engines: Sequence[str] | None = None, options: Options | None = None) -> Fusion:
    """
    The loaded plan for this graph; built once however many threads ask. `device` None:
    where the engine runs. `policy` None: LAWSON_POLICY, else "require". `engines` None:
    LAWSON_ENGINE, else cudnn (with "allow": then cpu).
    """

class BundleEntry:
    """What a bundle's index says of a plan."""

    @property
    def key(self) -> str: ...

    @property
    def plan_id(self) -> str: ...

    @property
    def target(self) -> str: ...

    @property
    def engine(self) -> str: ...

    @property
    def engine_version(self) -> str: ...

    @property
    def device_fingerprint(self) -> str: ...

    @property
    def size(self) -> int:
        """Bytes, as Plan.serialize() gives it."""

    @property
    def stored_size(self) -> int:
        """Bytes in the file."""

class Bundle:
    """Several plans in one file (docs/bundles.md)."""

    @staticmethod
    def write(path: str, plans: Sequence[Plan]) -> None:
        """Replaces the file in one step."""

    @staticmethod
    def append(path: str, plans: Sequence[Plan]) -> None:
        """Adds to the bundle, or makes it, in one step."""

    @staticmethod
    def open(path: str) -> Bundle:
        """Reads the index; a plan is read when it is asked for."""

    def __len__(self) -> int: ...

    def entries(self) -> list[BundleEntry]:
        """In the order of their keys."""

    def plan(self, index: int) -> Plan: ...

    def find(self, key: str) -> Plan | None:
        """The plan with this key (compile_key), or None."""

class AttentionConfig:
    """What an attention is: everything that selects a plan."""

    @staticmethod
    def from_spec(text: str, source: str = 'spec') -> AttentionConfig:
        """Of a spec document of kind "attention" (docs/spec.md)."""

    def spec(self) -> str:
        """
        The spec with every default filled in: the form in which configs are compared.
        """

    def graph(self, pass_: str) -> Graph:
        """The graph of the pass "forward" or "backward"."""

def attention_select(config: AttentionConfig, device: Device, options: Options | None = None) -> Verdict:
    """
    Judges the config: of a training config both passes, of a context-parallel one every step.
    """

def attention_plan(spec: str, pass_: str, device: Device, options: Options | None = None) -> Plan:
    """
    The plan that lawson_attention_forward ("forward") or lawson_attention_backward
    ("backward") runs for this spec; loaded, where the device is in this machine.
    """
