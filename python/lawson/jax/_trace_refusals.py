"""What JAX raises while a marked function is traced, said about the fusion: where, and what would do.

What the function raises itself is left as it is.
"""

from __future__ import annotations

import os
import re
import types

import jax

from lawson._errors import Error, InvalidArgumentError, UnsupportedError
from lawson._graph import refusals

_JAX = os.path.dirname(jax.__file__) + os.sep
# Frames that are not the user's.
_OTHERS = (_JAX, os.path.dirname(os.path.dirname(__file__)) + os.sep, "<frozen ")
ATTENTION = refusals.attention("lawson.jax.attention")

_NUMBER = refusals.number("array")
_SHAPE = refusals.shape("jnp.where")
# What JAX tells of the call that needs a value: `float`, item(), or the size of jnp.nonzero.
_TOLD = re.compile(
    r"with the `(\w+)` function|the (\w+)\(\) method of|argument of ([\w.]+) must be"
)
_READS: tuple[tuple[type[Exception], str, tuple[str, str]], ...] = (
    (jax.errors.NonConcreteBooleanIndexError, "a boolean index", _SHAPE),
    (jax.errors.TracerBoolConversionError, "bool()", refusals.branch("jnp.where")),
    (jax.errors.TracerIntegerConversionError, "an index", _NUMBER),
    (jax.errors.TracerArrayConversionError, "an array of NumPy", _NUMBER),
    (jax.errors.ConcretizationTypeError, "a concrete value", _NUMBER),
)


class TracedValueError(UnsupportedError, TypeError):
    """What depends on values; a TypeError, as JAX's is."""


class OperandTypeError(InvalidArgumentError, TypeError):
    """Operands that do not fit; a TypeError, as JAX's is."""


class OperandIndexError(InvalidArgumentError, IndexError):
    """An index that is out of range; an IndexError, as JAX's is."""


def refused(error: Exception, fusion: str) -> Error | None:
    """What is raised in the place of an error that ends a trace; None: it is the function's own."""
    frames = _frames(error.__traceback__)
    theirs = [f for f in frames if not f.tb_frame.f_code.co_filename.startswith(_OTHERS)]
    line = _line(theirs[-1]) if theirs else ""
    said: Error | None = None
    for kind, op, words in _READS:
        if isinstance(error, kind):
            told = _TOLD.search(str(error))
            if told is not None and told[3] is not None:
                op, words = told[3], _SHAPE
            elif told is not None:
                op = f"{told[1] or told[2]}()"
            said = TracedValueError(refusals.unsupported(fusion, op, line, *words))
            break
    else:
        of_jax = bool(frames) and frames[-1].tb_frame.f_code.co_filename.startswith(_JAX)
        if of_jax and type(error) in (TypeError, ValueError, IndexError):
            kinds = {TypeError: OperandTypeError, IndexError: OperandIndexError}
            at = f" at {line}" if line else ""
            made = kinds.get(type(error), InvalidArgumentError)
            said = made(f"fusion '{fusion}'{at}: {str(error).strip().rstrip('.')}")
    if said is not None:
        said.with_traceback(refusals.users(error.__traceback__, _OTHERS))
    return said


def _frames(frames: types.TracebackType | None) -> list[types.TracebackType]:
    found = []
    while frames is not None:
        found.append(frames)
        frames = frames.tb_next
    return found


def _line(frame: types.TracebackType) -> str:
    return f"{os.path.basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno}"[-240:]
