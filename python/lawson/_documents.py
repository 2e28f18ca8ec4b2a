"""What `lawson` takes as a model, a spec or a graph: a path, a dict, or JSON text."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from lawson import _core
from lawson._errors import InvalidArgumentError, IOError_, UnsupportedError

MAX_BYTES = 8 << 20

# A dict is the parsed document; a string is JSON text when it begins with a brace, else a path.
Document: TypeAlias = str | os.PathLike[str] | Mapping[str, Any]
Computation: TypeAlias = Document | _core.Spec | _core.Graph | _core.AttentionConfig


class Text(NamedTuple):
    """JSON text, and what messages call it."""

    text: str
    source: str


def read(document: Document, what: str) -> Text:
    """The text of a document. `what` names the argument in messages.

    Raises:
      InvalidArgumentError: no document, too large, not text.
      IOError_: the file cannot be read.
    """
    if isinstance(document, Mapping):
        try:
            return Text(json.dumps(document), what)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"{what}: the dict is no JSON document ({error})") from error
    if isinstance(document, str) and document.lstrip().startswith("{"):
        try:
            document.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"{what}: is no text ({error})") from error
        return Text(document, what)
    if not isinstance(document, (str, os.PathLike)):
        raise InvalidArgumentError(
            f"{what}: {type(document).__name__} is not allowed; expected a path, a dict or JSON"
        )
    return _read_file(Path(document))


def _read_file(path: Path) -> Text:
    """Of a folder, its config.json."""
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidArgumentError(f"{path}: is a directory without a config.json")
        path = path / "config.json"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise IOError_(f"{path}: cannot be opened ({error.strerror or error})") from error
    except ValueError as error:  # a NUL in the path
        raise InvalidArgumentError(f"{str(path)!r}: is no path ({error})") from error
    if len(data) > MAX_BYTES:
        raise InvalidArgumentError(f"{path}: larger than {MAX_BYTES} bytes, the most that is read")
    if not data.strip():
        raise InvalidArgumentError(f"{path}: is empty; expected a JSON document")
    try:
        return Text(data.decode(), str(path))
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{path}: is not UTF-8 ({error})") from error


def is_spec(text: Text) -> bool:
    """Whether it is a spec and no model's config: specs say so with a field "lawson"."""
    try:
        document = json.loads(text.text)
    except (ValueError, RecursionError):
        return False  # whoever reads it says what is wrong
    return isinstance(document, dict) and "lawson" in document


def spec_of(computation: Computation, what: str = "spec") -> _core.Spec:
    """A spec of whatever says what is computed."""
    if isinstance(computation, _core.Spec):
        return computation
    if isinstance(computation, _core.Graph):
        return _core.Spec.from_json(computation.json(), computation.name or what)
    if isinstance(computation, _core.AttentionConfig):
        return _core.Spec.from_json(computation.spec(), what)
    return _core.Spec.from_json(*read(computation, what))


def graph_of(computation: Computation, device: _core.Device) -> _core.Graph:
    """The one graph that it stands for.

    Raises:
      UnsupportedError: it stands for none, since what it asks for cannot be expressed.
      InvalidArgumentError: it stands for two (an attention of pass "training").
    """
    if isinstance(computation, _core.Graph):
        return computation
    spec = spec_of(computation)
    graphs = spec.graphs()
    if not graphs:
        verdict = _core.probe(spec, device, _core.Options(strength="judged"))
        raise UnsupportedError("; ".join(message for _, message in verdict.reasons))
    if len(graphs) != 1:
        names = ", ".join(graph.name for graph in graphs)
        raise InvalidArgumentError(
            f"{spec.name}: a plan is of one graph; this spec stands for {len(graphs)} ({names}): "
            "for each of Spec.graphs() ask by itself"
        )
    return graphs[0]


def device_of(target: str | _core.Device | None) -> _core.Device:
    """A device by name; None: this machine's first GPU."""
    if isinstance(target, _core.Device):
        return target
    return _core.Device("cuda" if target is None else target)
