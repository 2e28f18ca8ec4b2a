"""Probe, explain, compile and load; and what the process knows and counts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

from lawson import _core
from lawson._documents import Computation, device_of, graph_of, spec_of
from lawson._errors import IOError_

_PLAN_MAGIC = b"LAWSONP"


def probe(
    computation: Computation,
    target: str | _core.Device | None = None,
    *,
    engine: str | None = None,
    build: bool = False,
    options: _core.Options | None = None,
) -> _core.Verdict:
    """Does this run as one fused kernel on the target?

    Args:
      computation: a spec or graph: a path, a dict, JSON text, or an object of this package.
      target: a name of `lawson.targets()`, "cpu", or "cuda:N"; None: this machine's first GPU.
      engine: "cudnn", "cpu" or "reference"; None: the device's own.
      build: also compile the kernel.
      options: instead of `engine` and `build`, everything.

    Returns:
      The verdict: true when supported, with reasons when not. Unsupported is an answer.

    Raises:
      InvalidArgumentError: bad input; the message names file, field, value and what is allowed.
      UnavailableError: a library, device or file of Lawson's is not there.
    """
    if options is None:
        options = _core.Options(engine=engine, strength="built" if build else "judged")
    device = device_of(target)
    if isinstance(computation, _core.Graph):
        return _core.probe(computation, device, options)
    return _core.probe(spec_of(computation), device, options)


def explain(
    computation: Computation,
    target: str | _core.Device | None = None,
    *,
    options: _core.Options | None = None,
    limit: int = 0,
) -> dict[str, Any]:
    """The verdict, every failing condition, and the nearest neighbours, each probed.

    Args:
      computation: as for `probe`.
      target: as for `probe`.
      options: as for `probe`.
      limit: the most neighbours to probe; 0: the default.

    Returns:
      {"verdict": {...}, "neighbours": [{"change", "field"?, "kind", "verdict"}], ...}.
    """
    if options is None:
        options = _core.Options(strength="judged")
    text = _core.explain(spec_of(computation), device_of(target), options, limit)
    document: dict[str, Any] = json.loads(text)
    return document


def compile(  # noqa: A001 - the library's word for it
    computation: Computation,
    target: str | _core.Device | None = None,
    *,
    options: _core.Options | None = None,
) -> _core.Plan:
    """The plan of one graph for the target, which need not be in this machine.

    Args:
      computation: as for `probe`; it has to stand for one graph.
      target: as for `probe`.
      options: engine, workspace limit, determinism, tuning.

    Raises:
      UnsupportedError: it does not fuse; the message has every reason.
    """
    device = device_of(target)
    return _core.compile(graph_of(computation, device), device, options)


class Plans(Sequence[_core.Plan]):
    """The plans of a file. Of a bundle, each is read when it is asked for."""

    def __init__(self, content: _core.Bundle | _core.Plan) -> None:
        self._content = content

    def __len__(self) -> int:
        return len(self._content) if isinstance(self._content, _core.Bundle) else 1

    @overload
    def __getitem__(self, index: int) -> _core.Plan: ...
    @overload
    def __getitem__(self, index: slice) -> list[_core.Plan]: ...
    def __getitem__(self, index: int | slice) -> _core.Plan | list[_core.Plan]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"plan {index} of {len(self)}")
        if isinstance(self._content, _core.Bundle):
            return self._content.plan(index % len(self))
        return self._content

    def find(
        self,
        computation: Computation,
        target: str | _core.Device | None = None,
        *,
        options: _core.Options | None = None,
    ) -> _core.Plan | None:
        """The plan of this graph for the target, compiled with the cuDNN that this process uses."""
        device = device_of(target)
        key = _core.compile_key(graph_of(computation, device), device, options)
        if isinstance(self._content, _core.Bundle):
            return self._content.find(key)
        return self._content if self._content.key == key else None

    def __repr__(self) -> str:
        return f"<lawson.Plans: {len(self)}>"


def load(path: str | os.PathLike[str]) -> Plans:
    """The plans of a bundle (`lawson.save`, `lawson compile`), or of a file with one plan's bytes.

    Raises:
      InvalidArgumentError: neither, truncated or damaged; the message names the defect.
      IOError_: the file cannot be read.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(len(_PLAN_MAGIC))
            if head == _PLAN_MAGIC:
                return Plans(_core.Plan.deserialize(head + file.read()))
    except OSError as error:
        raise IOError_(f"{path}: cannot be opened ({error.strerror or error})") from error
    return Plans(_core.Bundle.open(str(path)))


def save(
    path: str | os.PathLike[str], plans: Sequence[_core.Plan], *, append: bool = False
) -> None:
    """Writes a bundle in one step; `append`: adds to it, and replaces plans of the same id."""
    write = _core.Bundle.append if append else _core.Bundle.write
    write(str(Path(path)), list(plans))


def targets() -> list[dict[str, Any]]:
    """All known devices: GPUs of this machine, the host CPU, the target library."""
    document: list[dict[str, Any]] = json.loads(_core.devices())
    return document


def info() -> dict[str, Any]:
    """Versions, libraries found and where, devices, environment variables."""
    document: dict[str, Any] = json.loads(_core.info())
    return document


def stats(*, reset: bool = False) -> dict[str, Any]:
    """What this process counted (docs/diagnostics.md), in Python and in everything else in it.

    `reset`: counts from 0 afterwards.
    """
    document: dict[str, Any] = json.loads(_core.stats())
    if reset:
        _core.reset_stats()
    return document


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Within it, each step is noted with its time; then a file that Perfetto opens is written.

    Raises:
      InvalidArgumentError: a trace is under way, or the path cannot be written.
    """
    _core.trace_start(str(Path(path)))
    try:
        yield
    finally:
        _core.trace_stop()
