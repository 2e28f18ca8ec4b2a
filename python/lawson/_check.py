"""What of a model fuses, on which GPU: every distinct workload judged for every target."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lawson import _core, _settings
from lawson._documents import Document, is_spec, read
from lawson._errors import Error, InvalidArgumentError, UnavailableError

DEFAULT_TARGETS = ("a100", "l40s", "h200", "b200")

Json = dict[str, Any]
Question = tuple[str, str]  # a spec without its name, as text, and a target
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Workload:
    """A part of the model, with the verdict of each target.

    Attributes:
      name: "attention.full.prefill", ...
      group: "attention" or "gemm"; "spec" where a spec was given instead of a model.
      layers: how many layers of the model have it.
      note: what is special about it.
      spec: its spec document (docs/spec.md).
      verdicts: from target to the verdict's document, or to {"error": {"kind", "message"}}.
      neighbours: from target to the nearest forms that would do, each probed.
    """

    name: str
    group: str
    layers: int
    note: str
    spec: Json
    verdicts: dict[str, Json]
    neighbours: dict[str, list[Json]] = field(default_factory=dict)

    def decision(self, target: str) -> str:
        """ "supported", "unsupported", "undecided" or "error"."""
        verdict = self.verdicts[target]
        return "error" if "error" in verdict else str(verdict["verdict"])

    def reasons(self, target: str) -> list[str]:
        """Why not, in words."""
        verdict = self.verdicts[target]
        if "error" in verdict:
            return [str(verdict["error"]["message"])]
        return [str(reason["message"]) for reason in verdict.get("reasons", [])]


@dataclass(frozen=True)
class Check:
    """The answers of `check`: iterates over the workloads, prints as a table.

    Attributes:
      model: its name.
      model_type: of its config; "" for a spec.
      layers: of the model; 0 for a spec.
      targets: names, in the order in which they were asked.
      warnings: what of the config was not understood.
      workloads: in the model's order.
    """

    model: str
    model_type: str
    layers: int
    targets: tuple[str, ...]
    warnings: tuple[str, ...]
    workloads: tuple[Workload, ...]

    def __iter__(self) -> Iterator[Workload]:
        return iter(self.workloads)

    def __len__(self) -> int:
        return len(self.workloads)

    def __getitem__(self, name: str) -> Workload:
        for workload in self.workloads:
            if workload.name == name:
                return workload
        raise KeyError(name)

    @property
    def supported(self) -> bool:
        """Whether everything is, everywhere."""
        return all(
            workload.decision(target) == "supported"
            for workload in self.workloads
            for target in self.targets
        )

    def to_dict(self) -> Json:
        """The document that `lawson check --json` prints."""
        document: Json = {"model": self.model, "targets": list(self.targets), "workloads": []}
        if self.model_type:
            document["model_type"] = self.model_type
            document["layers"] = self.layers
        for workload in self.workloads:
            document["workloads"].append(
                {
                    "name": workload.name,
                    "group": workload.group,
                    "layers": workload.layers,
                    "note": workload.note,
                    "spec": workload.spec,
                    "verdicts": workload.verdicts,
                    "neighbours": workload.neighbours,
                }
            )
        return document

    def json(self, indent: int | None = 2) -> str:
        """`to_dict()` as text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        words = {"supported": "yes", "unsupported": "no", "undecided": "?", "error": "error"}
        rows = [["workload", *self.targets]]
        for workload in self.workloads:
            decisions = [words[workload.decision(target)] for target in self.targets]
            rows.append([workload.name, *decisions])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        refusals = [
            f"{workload.name} on {target}: {'; '.join(workload.reasons(target))}"
            for workload in self.workloads
            for target in self.targets
            if workload.decision(target) != "supported"
        ]
        return "\n".join([self.model, *lines, *refusals])


def _workloads(
    model: Document, batch: int, seqlen: int, context: int, passes: Sequence[str], dtype: str
) -> Json:
    document = read(model, "model")
    if not is_spec(document):
        text = _core.model_workloads(
            document.text,
            document.source,
            batch=batch,
            seqlen=seqlen,
            context=context,
            passes=",".join(passes),
            dtype=dtype,
        )
        workloads: Json = json.loads(text)
        return workloads
    given = {"batch": batch, "seqlen": seqlen, "context": context, "passes": passes, "dtype": dtype}
    for name, value in given.items():
        if value:
            raise InvalidArgumentError(
                f"{name}: {_settings.shown(value)} goes with a model, and {document.source} is a "
                "spec, which says it itself"
            )
    spec = _core.Spec.from_json(document.text, document.source)
    workload = {"name": spec.name, "group": "spec", "layers": 0, "note": ""}
    return {"model": spec.name, "workloads": [{**workload, "spec": json.loads(document.text)}]}


def _names(argument: str, given: Any, allowed: str) -> tuple[str, ...]:
    """A list of names, or one text with commas between them."""
    listed = given.split(",") if isinstance(given, str) and given else given or ()
    if not isinstance(listed, (list, tuple)) or not all(isinstance(x, str) for x in listed):
        _settings.refuse(argument, given, f"a list of {allowed}, or text with commas")
    return tuple(name.strip() for name in listed)


def _in_threads(function: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """The library lets so many deviceless workers run as there are cores, 8 at most."""
    threads = max(1, min(len(items), 2 * min(8, os.cpu_count() or 1)))
    with ThreadPoolExecutor(threads, "lawson-check") as pool:
        return list(pool.map(function, items))


def _document_of(error: Error) -> Json:
    return {"error": {"kind": error.status.replace(" ", "_"), "message": str(error)}}


def check(
    model: Document,
    targets: Sequence[str] | str = DEFAULT_TARGETS,
    *,
    batch: int = 0,
    seqlen: int = 0,
    context: int = 0,
    passes: Sequence[str] = (),
    dtype: str = "",
    build: bool = False,
    neighbours: int = 0,
) -> Check:
    """Judges every workload of a model for every target, in parallel; none need be in this machine.

    Args:
      model: a model's config.json (Hugging Face form), its folder, or a spec: a path, a dict, or
        JSON text.
      targets: names of `lawson.targets()`, or "cuda:N" for a GPU of this machine.
      batch: 0: 1.
      seqlen: of prefill and training; 0: 4096.
      context: keys and values at decode; 0: 8192.
      passes: of "prefill", "decode", "training"; empty: all.
      dtype: "" for the config's, else bf16.
      build: also compile every kernel.
      neighbours: for each "no", probe so many of the nearest forms that would do.

    Returns:
      A verdict for each workload and target. A fault of one is in its place, as an error.

    Raises:
      InvalidArgumentError: the config or a target; the message names the field.
      UnavailableError: nothing could be judged: no cuDNN, no worker.
    """
    names = _names("targets", targets, "names of lawson.targets()")
    if not names:
        raise InvalidArgumentError("targets: an empty list; expected names of lawson.targets()")
    passes = _names("passes", passes, "passes: prefill, decode, training")
    build = _settings.flag("build", build)
    neighbours, batch, seqlen, context = (
        _settings.integer(name, value, "a whole number, 0 or more", least=0)
        for name, value in (
            ("neighbours", neighbours),
            ("batch", batch),
            ("seqlen", seqlen),
            ("context", context),
        )
    )
    devices = {name: _core.Device(name) for name in names}
    found = _workloads(model, batch, seqlen, context, passes, dtype)
    options = _core.Options(strength="built" if build else "judged")

    keys: list[str] = []
    specs: dict[str, _core.Spec] = {}
    for workload in found["workloads"]:
        unnamed = {name: value for name, value in workload["spec"].items() if name != "name"}
        keys.append(json.dumps(unnamed, sort_keys=True))
        if keys[-1] not in specs:
            specs[keys[-1]] = _core.Spec.from_json(json.dumps(workload["spec"]), workload["name"])

    def judge(question: Question) -> Json | Error:
        try:
            verdict = _core.probe(specs[question[0]], devices[question[1]], options)
            document: Json = json.loads(verdict.json())
            return document
        except Error as error:
            return error

    questions = [(key, name) for key in specs for name in devices]
    answers = dict(zip(questions, _in_threads(judge, questions), strict=True))
    faults = [answer for answer in answers.values() if isinstance(answer, Error)]
    if faults and len(faults) == len(answers) and isinstance(faults[0], UnavailableError):
        raise faults[0]
    verdicts = {
        question: _document_of(answer) if isinstance(answer, Error) else answer
        for question, answer in answers.items()
    }

    def explain(question: Question) -> list[Json]:
        try:
            text = _core.explain(specs[question[0]], devices[question[1]], options, neighbours)
            answers: list[Json] = json.loads(text)["neighbours"]
            return answers
        except Error:
            return []  # the verdict stands without

    refused = [q for q in questions if verdicts[q].get("verdict") == "unsupported"]
    nearest: dict[Question, list[Json]] = {}
    if neighbours > 0:
        nearest = dict(zip(refused, _in_threads(explain, refused), strict=True))
    rows = [
        Workload(
            name=workload["name"],
            group=workload["group"],
            layers=workload["layers"],
            note=workload["note"],
            spec=workload["spec"],
            verdicts={name: verdicts[key, name] for name in names},
            neighbours={name: nearest[key, name] for name in names if nearest.get((key, name))},
        )
        for key, workload in zip(keys, found["workloads"], strict=True)
    ]
    return Check(
        model=found["model"],
        model_type=found.get("model_type", ""),
        layers=found.get("layers", 0),
        targets=names,
        warnings=tuple(str(warning) for warning in found.get("warnings", ())),
        workloads=tuple(rows),
    )
