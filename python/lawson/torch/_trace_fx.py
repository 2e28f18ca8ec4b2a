"""A Python function as a graph of ATen ops: traced with fake tensors, each op with its line.

What PyTorch has several spellings of is decomposed to core ATen, but for the ops that Lawson has
itself. Writes into tensors are made functional; what the function does to gradients that its ops do
not say (a stopped gradient, a rule of its own) is noted.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch._subclasses import fake_tensor
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lawson._errors import UnsupportedError
from lawson._graph import refusals
from lawson.torch._trace_refusals import OWN, WRITES, Failed, quiet, read_closed, refused

T = TypeVar("T")
_Found: TypeAlias = "tuple[torch.fx.GraphModule, str | None, frozenset[int], frozenset[int]]"

# Decomposed otherwise; Lawson has an op or a rule for each.
_KEPT = (
    "silu gelu softplus elu relu6 hardtanh leaky_relu _softmax _log_softmax mm bmm addmm baddbmm "
    "dot mv native_layer_norm _fused_rms_norm split split_with_sizes unbind stack t transpose "
    "squeeze square rsub gelu_backward silu_backward detach logsumexp threshold "
    "max min all roll zeros ones new_zeros new_ones new_full zeros_like ones_like "
    "sum masked_fill tile sinc celu"
)


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a trace knows of an argument: strides in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Spec:
        """Sizes that are symbolic become the numbers that they are here."""
        shape = tuple(int(n) for n in tensor.shape)
        return Spec(shape, tuple(int(n) for n in tensor.stride()), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclasses.dataclass(frozen=True)
class Captured:
    """A graph of ATen ops; ``inputs`` are its placeholders' specs.

    ``own_gradient``: what makes the function's derivative another one than that of the ops.
    ``stopped``: the results that no gradient comes from. ``passed``: those that are arguments, as
    they were given.
    """

    graph: torch.fx.GraphModule
    own_gradient: str | None
    results: tuple[Spec | None, ...]  # None: a result that is no tensor
    stopped: frozenset[int] = frozenset()
    passed: frozenset[int] = frozenset()


@functools.cache
def _table() -> Mapping[Any, Callable[..., Any]]:
    from torch._decomp import core_aten_decompositions

    kept = set(_KEPT.split())
    table = dict(core_aten_decompositions())
    return {op: f for op, f in table.items() if op._schema.name.removeprefix("aten::") not in kept}


def user_line(frame: Any) -> str:
    """``file.py:12`` of the innermost frame that is neither PyTorch's nor Lawson's; "" where a trace
    is before the function."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name == __file__ and frame.f_code.co_name == "flat":
            return ""
        if not name.startswith(OWN):
            return f"{os.path.basename(name)}:{frame.f_lineno}"[-240:]
        frame = frame.f_back
    return ""


def line_of(node: torch.fx.Node) -> str:
    """Where a node was written: ``file.py:12``, also of a trace that has all frames as text."""
    return _line_in(node.stack_trace or "")


def _line_in(text: str) -> str:
    frames = re.findall(r'File "([^"]+)", line (\d+)', text)
    theirs = [(file, line) for file, line in frames if not file.startswith(OWN)]
    if not frames:
        return text
    file, line = (theirs or frames)[-1]
    return f"{os.path.basename(file)}:{line}"[-240:]


_NUMBERS = (torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__complex__)
_READERS = (
    *_NUMBERS, torch.Tensor.__bool__, torch.Tensor.__index__, torch.Tensor.item,
    torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__,
)  # fmt: skip


class _Lines(TorchFunctionMode):
    """Notes the line of each call of PyTorch's, what failed, and whether gradients are off."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.line = ""
        self.closed: UnsupportedError | None = None  # it read a tensor that is closed over
        self.own_gradient: str | None = None
        self.failed: Failed | None = None  # the last call that raised
        self.read: Failed | None = None  # the first that needed values, caught or not

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        line = user_line(sys._getframe(1))
        if line:
            self.line = line
            fx_traceback.set_stack_trace([line])
        if func is torch._C._set_grad_enabled and not args[0]:
            self.own_gradient = self.own_gradient or f"torch.no_grad at {line}"
        if func is torch.Tensor.register_hook:
            self.own_gradient = self.own_gradient or f"register_hook at {line}"
        if func in _READERS and type(args[0]) in (torch.Tensor, torch.nn.Parameter):
            self.closed = read_closed(self._name, func, self.line)
            raise self.closed
        if func in _NUMBERS and isinstance(args[0], fake_tensor.FakeTensor):
            args = (args[0].detach(), *args[1:])  # it warns otherwise, of gradients that are ours
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            run = fx_traceback.get_current_meta().get("stack_trace")  # of a graph that is run
            self.failed = Failed.of(error, func, args, kwargs, self.line or _line_in(run or ""))
            if self.read is None and self.failed.reads:
                self.read = self.failed
            raise


class _NoWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses writes into tensors that the function closes over, before they are done."""

    def __init__(self, name: str, lines: _Lines) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name
        self._lines = lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            given = {**dict(zip((a.name for a in func._schema.arguments), args)), **(kwargs or {})}
            for a in func._schema.arguments:
                is_written = a.alias_info is not None and a.alias_info.is_write
                if is_written and type(given.get(a.name)) in (torch.Tensor, torch.nn.Parameter):
                    op = str(func).removesuffix(".default")
                    line = f" at {self._lines.line}" if self._lines.line else ""
                    raise UnsupportedError(
                        f"unsupported: fusion '{self._name}': {op}{line}: it writes into a tensor "
                        f"that the function closes over\n  nearest supported form: {WRITES}"
                    )
        return func(*args, **(kwargs or {}))


_tracing = threading.Lock()
_traces: contextvars.ContextVar[bool] = contextvars.ContextVar("lawson_traces", default=False)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """While no other thread traces. Within itself, also in the thread of `outside`, it is no wait.

    PyTorch's tracers keep what is going on in variables of the process: traces of several threads
    at once fail, or end it (torch 2.11).
    """
    if _traces.get():
        yield
        return
    with _tracing:
        token = _traces.set(True)
        try:
            yield
        finally:
            _traces.reset(token)


@functools.cache
def _keep_device_guard() -> None:
    """Makes fake tensors usable from threads that end, on a machine without a GPU.

    There torch 2.11 lets the first thread that makes some hold the device guard of all, and ends the
    process when another one needs it later. So the first is one that stays.
    """
    if torch.cuda.is_available():
        return
    made = threading.Event()

    def stay() -> None:
        with fake_tensor.FakeTensorMode():
            made.set()
        threading.Event().wait()

    threading.Thread(target=stay, name="lawson-fake-tensors", daemon=True).start()
    made.wait()


def outside(function: Callable[[], T]) -> T:
    """``function()``, outside of whatever PyTorch is doing: other traces, transformations, inference
    mode, hooks of what is saved (checkpoint). All of that is of a thread."""
    if (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.is_inference_mode_enabled()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    ):
        return function()
    context = contextvars.copy_context()
    with concurrent.futures.ThreadPoolExecutor(1, "lawson-trace") as thread:
        return thread.submit(context.run, function).result()


def with_autocast_of_now(function: Callable[..., T]) -> Callable[..., T]:
    """The function under the autocast that is in force now, whenever and wherever it is called."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    state = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]

    def wrapped(*args: Any) -> T:
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype in state:
                stack.enter_context(
                    torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)
                )
            return function(*args)

    return wrapped


def captured(function: Callable[..., Sequence[Any]], specs: Sequence[Spec], name: str) -> Captured:
    """The ATen graph of a function of flat tensors, for such arguments.

    Tensors that the function closes over become attributes of the graph module, by identity.

    Raises:
      UnsupportedError: what depends on values (``item``, ``nonzero``), with its line.
      InvalidArgumentError: operands that do not fit, with the call, its line and their shapes.
    """
    with alone():
        _keep_device_guard()
        found, note, stopped, passed = outside(lambda: _functional(function, specs, name))
    found.graph.eliminate_dead_code(_has_no_effect)
    detached = next((n for n in found.graph.nodes if _is_detach(n)), None)
    if detached is not None and note is None:
        line = line_of(detached)
        note = f"detach at {line}" if line else "detach"
    (output,) = (n for n in found.graph.nodes if n.op == "output")
    results = tuple(
        Spec.of(n.meta["val"]) if isinstance(n, torch.fx.Node) else None for n in output.args[0]
    )
    return Captured(found, note, results, stopped, passed)


def _functional(function: Callable[..., Any], specs: Sequence[Spec], name: str) -> _Found:
    try:
        found, note, *sets = _traced(function, specs, name, functional=False)
    except RuntimeError as error:
        if "in-place" not in str(error):
            raise
        # It writes into an argument, which autograd forbids and the walk refuses.
        written = torch.func.functionalize(function)
        found, note, *sets = _traced(written, specs, name, functional=True)
    if any(_mutates(node) for node in found.graph.nodes):
        again = torch.func.functionalize(torch.fx.Interpreter(found).run)
        found, *_ = _traced(again, specs, name, functional=True)
    return found, note, sets[0], sets[1]


def _traced(
    function: Callable[..., Any], specs: Sequence[Spec], name: str, *, functional: bool
) -> _Found:
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    lines = _Lines(name)
    rule: str | None = None
    stopped: frozenset[int] = frozenset()
    passed: frozenset[int] = frozenset()

    def flat(*tensors: torch.Tensor) -> list[Any]:
        nonlocal rule, stopped, passed
        # no leaves: a function may write into what it is given
        given = tensors if functional else [t.view_as(t) if t.requires_grad else t for t in tensors]
        with lines, fx_traceback.preserve_node_meta(), _NoWrites(name, lines):
            results = list(function(*given))
        if not functional:
            rule = _own_rule(results)
            passed = frozenset(i for i, r in enumerate(results) if any(r is t for t in given))
            stopped = frozenset(
                i for i, r in enumerate(results)
                if isinstance(r, torch.Tensor) and not r.requires_grad
            )  # fmt: skip
        return results

    with mode:
        fakes = [spec.empty() for spec in specs]
    if not functional:
        for fake in fakes:
            fake.requires_grad_(fake.dtype.is_floating_point)
    grad: Any = torch.no_grad() if functional else torch.enable_grad()
    try:
        with grad, quiet():
            made = make_fx(
                flat, decomposition_table=_table(), tracing_mode="fake", _allow_non_fake_inputs=True
            )(*fakes)
    except Exception as error:
        if not functional and isinstance(error, RuntimeError) and "in-place" in str(error):
            raise  # it is traced once more
        said = refused(error, lines.failed, name, lines.line)
        if said is None:
            raise
        raise said.with_traceback(refusals.users(error.__traceback__, OWN)) from None
    if lines.closed is not None:
        raise lines.closed
    if lines.read is not None:  # and the function went another way than it would have gone
        said = lines.read.refused(name)
        assert said is not None
        raise said
    return made, lines.own_gradient or rule, stopped, passed


def _own_rule(results: Sequence[Any]) -> str | None:
    """The name of a custom autograd function on the way to the results; None: there is none."""
    seen: set[Any] = set()
    left = [r.grad_fn for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return str(node.name()).removesuffix("Backward")
        left.extend(n for n, _ in node.next_functions if n is not None)
    return None


def _mutates(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _has_no_effect(node: torch.fx.Node) -> bool:
    return node.op in ("placeholder", "output") or _mutates(node)


def _is_detach(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.aten.detach.default
