"""How a trace that cannot go on is refused: the call of the user's that failed, where, and what would do.

While a function is traced its tensors have shapes and no values. What PyTorch says about that is
about its own tensors for tracing; here it is said about the function. What is wrong without a fusion
too (shapes that do not fit) is the caller's input, with the operands that the call was given.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from lawson._errors import Error, InvalidArgumentError, UnsupportedError
from lawson._graph import refusals
from lawson.torch._trace_dtypes import dtype_name

# Frames that are not the user's.
OWN = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    contextlib.__file__,
    copy.__file__,
    "<",
)
ATTENTION = refusals.attention("lawson.torch.attention")
WRITES = "the write outside of the fusion: return the new value, and copy it there"

_BRANCH = refusals.branch("torch.where")
_NUMBER = refusals.number("tensor")
_SHAPE = refusals.shape("torch.where")
# The calls that read values, by the last part of their names.
_READS = {
    "__bool__": _BRANCH, "__contains__": _BRANCH, "_assert": _BRANCH, "_assert_async": _BRANCH,
    "allclose": _BRANCH, "equal": _BRANCH, "is_nonzero": _BRANCH,
    "item": _NUMBER, "tolist": _NUMBER, "numpy": _NUMBER, "__array__": _NUMBER,
    "__float__": _NUMBER, "__int__": _NUMBER, "__index__": _NUMBER, "__complex__": _NUMBER,
    "__format__": _NUMBER,
}  # fmt: skip
# What PyTorch says where only its tensors for tracing are in the way, and what it is.
_TEXTS: dict[str, tuple[str, str]] = {
    ".numpy() is not supported": _NUMBER,
    "The tensor has a non-zero number of elements, but its data is not": (
        _NUMBER[0], "torch.stack, which makes a tensor of tensors"),
    "unsupported format string passed to FakeTensor": _NUMBER,
    "argument of type: <class 'torch._C.Generator'>": (
        "its result is random", "random numbers as an argument"),
    "NYI: aten.": ("it is no computation", refusals.OUTSIDE),
    "Only Tensors created explicitly": ("a tensor that is traced has no copies", "Tensor.clone()"),
    ": functions with out=": ("out= writes into a tensor", "the result as a value"),
    "Detected that you are using FX to symbolically trace a dynamo-optimized": (
        "it is compiled by torch.compile", "the function itself; torch.compile around the fusion"),
}  # fmt: skip
_CONTROL = re.compile(r"no rule registered for HigherOrderOperator (\w+?)(?:_impl|_stack_output)? ")
_TWO_DEVICES = "Unhandled FakeTensor Device Propagation"
_OF_INPUT = (RuntimeError, IndexError, ValueError, OverflowError)
_VALUES = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
_SHOWN = 8  # operands in a message


class OperandError(InvalidArgumentError, RuntimeError):
    """Operands that do not fit; a RuntimeError, as PyTorch's is."""


class OperandIndexError(InvalidArgumentError, IndexError):
    """An index or a dim that is out of range; an IndexError, as PyTorch's is."""


@dataclasses.dataclass(frozen=True, eq=False)
class Failed:
    """A call of PyTorch's that raised ``error``; ``op`` and ``line`` as messages have them."""

    error: Exception
    op: str
    line: str
    operands: tuple[str, ...]
    devices: tuple[str, ...]

    @staticmethod
    def of(error: Exception, function: Any, args: Any, kwargs: Any, line: str) -> Failed:
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        shown = [_described(x) for x in given]
        more = [f"{len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
        name = torch.overrides.resolve_name(function) or getattr(function, "__name__", "PyTorch")
        devices = sorted({str(x.device) for x in given})
        return Failed(error, name, line, (*shown[:_SHOWN], *more), tuple(devices))

    @property
    def reads(self) -> bool:
        """Whether it wanted values that there are without a trace."""
        return isinstance(self.error, _VALUES) or (self._text or _SHAPE)[0] == _NUMBER[0]

    @property
    def _text(self) -> tuple[str, str] | None:
        return next((said for part, said in _TEXTS.items() if part in str(self.error)), None)

    def refused(self, fusion: str) -> Error | None:
        """What is raised in the error's place; None: nothing."""
        error, text = self.error, str(self.error)
        if isinstance(error, fake_tensor.UnsupportedOperatorException):
            what = "it has no implementation for fake tensors, which a trace needs"
            return self._unsupported(
                fusion, what, f"torch.library.register_fake; or {refusals.OUTSIDE}"
            )
        if isinstance(error, fake_tensor.DynamicOutputShapeException):
            return self._unsupported(fusion, *_SHAPE)
        read = _READS.get(self.op.rpartition(".")[2])
        if isinstance(error, fake_tensor.DataDependentOutputException):
            return self._unsupported(fusion, *(read or refusals.READ))
        if self._text is not None:
            return self._unsupported(fusion, *self._text)
        if (found := _CONTROL.search(text)) is not None:
            near = "torch.where over both cases; or torch.cond" if found[1] == "cond" else found[1]
            near = f"{near} around the fusion, in which its body may be a fusion"
            return self._unsupported(fusion, "control flow is no part of a fusion", near)
        if isinstance(error, NotImplementedError):
            return self._unsupported(fusion, _sentence(error), refusals.OUTSIDE)
        if read is _BRANCH and "is ambiguous" in text:
            return self._unsupported(fusion, *read)
        if text.startswith(_TWO_DEVICES):
            what = f"its tensors are on {', '.join(self.devices)}"
            return self._unsupported(fusion, what, "all tensors on one device")
        if isinstance(error, _OF_INPUT):
            operands = f"\n  operands: {', '.join(self.operands)}" if self.operands else ""
            kind = OperandIndexError if isinstance(error, IndexError) else OperandError
            at = f" at {self.line}" if self.line else ""
            return kind(f"fusion '{fusion}': {self.op}{at}: {_sentence(error)}{operands}")
        return None

    def _unsupported(self, fusion: str, what: str, nearest: str) -> UnsupportedError:
        inner = getattr(self.error, "func", None)
        op = self.op
        if inner is not None:
            name = str(inner).removesuffix(".default")
            op = f"{op} ({name})" if op else name
        return UnsupportedError(refusals.unsupported(fusion, op, self.line, what, nearest))


def _sentence(error: Exception) -> str:
    text = str(error).strip().rstrip(".")
    return text or type(error).__name__


def _described(tensor: torch.Tensor) -> str:
    """``f32[4, 8]``"""
    dtype = dtype_name(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}[{', '.join(str(n) for n in tensor.shape)}]"


def read_closed(fusion: str, function: Any, line: str) -> UnsupportedError:
    """Of a call that reads the values of a tensor that the marked function closes over."""
    op = torch.overrides.resolve_name(function) or "PyTorch"
    what = "it reads a tensor that the function closes over, whose values may be others at the next"
    nearest = "the tensor itself in the place of the number; or the number as an argument"
    return UnsupportedError(refusals.unsupported(fusion, op, line, f"{what} call", nearest))


def refused(error: Exception, failed: Failed | None, fusion: str, line: str) -> Error | None:
    """What is raised in the place of an error that ends a trace; None: nothing, it is the user's.

    ``failed``: the last call of PyTorch's that raised; ``line``: of the last call.
    """
    if isinstance(error, Error):
        if not _is_of_attention(error):
            return None
        return UnsupportedError(refusals.unsupported(fusion, "attention", line, *ATTENTION))
    if failed is None or failed.error is not error:
        # not of a call: an op of a graph that is run, or what a function of PyTorch's does itself
        is_of_trace = isinstance(error, (*_VALUES, fake_tensor.UnsupportedOperatorException))
        is_known = any(part in str(error) for part in _TEXTS)
        op = "" if is_of_trace else "the function" if is_known else _raised_by(error)
        if op is None:
            return None
        failed = Failed(error, op, line, (), ())
    return failed.refused(fusion)


def _raised_by(error: Exception) -> str | None:
    """The layer or function of PyTorch's that checked its arguments; None: it is no such one."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    if frames is None:
        return None
    name = str(frames.tb_frame.f_globals.get("__name__"))
    is_of_layer = name.startswith(("torch.nn.", "torch.functional", "torch.distributions."))
    return f"{name}.{frames.tb_frame.f_code.co_qualname}" if is_of_layer else None


def _is_of_attention(error: Exception) -> bool:
    """Whether Lawson's attention, called while a fusion is traced, raised it."""
    own = os.path.dirname(__file__)
    frames, found = error.__traceback__, False
    while frames is not None:
        folder, name = os.path.split(frames.tb_frame.f_code.co_filename)
        found = found or (folder == own and name.startswith(("_attention", "_sdpa")))
        frames = frames.tb_next
    return found


# ---- PyTorch's log -----------------------------------------------------------------------------


class _Quiet(logging.Filter):
    """Leaves out what fake tensors log before they raise, in threads that trace a fusion."""

    def __init__(self) -> None:
        super().__init__()
        self.on = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        is_on = getattr(self.on, "count", 0) > 0
        return not (is_on and str(record.msg).startswith("failed while attempting to run meta"))


_quiet = _Quiet()
logging.getLogger(fake_tensor.__name__).addFilter(_quiet)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The error is raised, and says it all; its log would say it before, once more."""
    on = _quiet.on
    on.count = getattr(on, "count", 0) + 1
    try:
        yield
    finally:
        on.count -= 1


# ---- sizes that are to stay open ---------------------------------------------------------------


def check_dynamic(fusion: str, label: str, shape: Sequence[Any]) -> None:
    """Refuses sizes that ``dynamic_shapes`` of an export asks to keep open (but for ``Dim.AUTO``),
    and sizes that are values of tensors.

    Raises ``UnsupportedError`` with the dim, and its name.
    """
    for dim, size in enumerate(shape):
        said = _open_size(size) if isinstance(size, torch.SymInt) else None
        if said is not None:
            what, nearest = said
            raise UnsupportedError(
                f"unsupported: fusion '{fusion}': argument '{label}': dim {dim} depends on {what}, "
                "and a fusion is a kernel for the sizes that it is traced with\n"
                f"  nearest supported form: {nearest}; this part outside of the fusion"
            )


def _open_size(size: torch.SymInt) -> tuple[str, str] | None:
    """What it depends on, and what to do; None: it need not stay open."""
    env: Any = size.node.shape_env
    if env is None:
        return None
    if free_unbacked_symbols(size):
        return f"{size}, a value that is not known while tracing", "a size that is a constant"
    name = _dynamic_dim(env, size) if torch.compiler.is_exporting() else None
    if name is None:
        return None
    return (
        f"{name}, which dynamic_shapes keeps open",
        "an export for each size, without this dim in dynamic_shapes (or with Dim.AUTO for it)",
    )


def _dynamic_dim(env: Any, size: torch.SymInt) -> str | None:
    """``dim 'batch'``, or ``L['x'].size()[0]`` where it has no name; None: it need not stay open."""
    kept: dict[str, None] = {}
    for fake in getattr(env, "tracked_fakes", None) or ():
        limits = getattr(fake.symbolic_context, "constraint_sizes", None) or ()
        for i, limit in enumerate(limits):
            if limit is not None and not limit.warn_only:
                kept[f"{_text(fake.source)}.size()[{i}]"] = None
    for symbol in sorted(size.node.expr.free_symbols, key=str):
        for source in env.var_to_sources.get(symbol, ()):
            text = _text(source)
            if text in kept:
                name = env.source_name_to_debug_name.get(text)
                return text if name is None else f"dim '{name}'"
    return None


def _text(source: Any) -> str:
    name = source.name  # a method in older versions
    return str(name() if callable(name) else name)
