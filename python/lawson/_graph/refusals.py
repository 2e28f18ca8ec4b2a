"""Why a function cannot be traced, and what to write: (what, nearest supported form) in one wording.

A function is traced with shapes and without values, whatever the framework.
"""

from __future__ import annotations

import types

OUTSIDE = "this part outside of the fusion"
_UNKNOWN = "depends on values, which are not known while tracing"

READ = (f"it {_UNKNOWN}", OUTSIDE)


def branch(where: str) -> tuple[str, str]:
    """``where``: the framework's function that takes both cases."""
    return (
        f"it {_UNKNOWN}: a fusion cannot branch on them",
        f"{where} over both cases; or {OUTSIDE}",
    )


def number(kind: str) -> tuple[str, str]:
    """``kind``: what the framework's values are."""
    return (
        f"it {_UNKNOWN}: a fusion cannot make Python numbers, arrays or text of them",
        f"the {kind} itself in the place of the number; or {OUTSIDE}",
    )


def shape(where: str) -> tuple[str, str]:
    return (
        f"the shape of its result {_UNKNOWN}",
        f"{where} with the condition, which keeps the shape; or {OUTSIDE}",
    )


def attention(function: str) -> tuple[str, str]:
    return (
        "attention is a kernel of its own, and no part of a fusion",
        f"{function} beside the fusion: one fusion before it, another one behind it",
    )


def unsupported(fusion: str, op: str, line: str, what: str, nearest: str) -> str:
    at = f" at {line}" if line else ""
    return f"unsupported: fusion '{fusion}': {op}{at}: {what}\n  nearest supported form: {nearest}"


def users(
    frames: types.TracebackType | None, others: tuple[str, ...]
) -> types.TracebackType | None:
    """What of a traceback is in files that do not begin like ``others``."""
    if frames is None:
        return None
    rest = users(frames.tb_next, others)
    if frames.tb_frame.f_code.co_filename.startswith(others):
        return rest
    return types.TracebackType(rest, frames.tb_frame, frames.tb_lasti, frames.tb_lineno)
