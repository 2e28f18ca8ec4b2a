"""A graph document as one kernel: settings of fusions, and the plan that they lead to."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from lawson import _core, _settings
from lawson._errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a fusion is built: the arguments of ``fusion``, checked."""

    policy: str | None = None
    tuning: str = "off"
    engines: tuple[str, ...] | None = None
    target: str | None = None
    deterministic: bool = False
    workspace_limit: int | None = None
    deadline_ms: float = 0.0
    strict: bool = False

    @property
    def options(self) -> _core.Options:
        return _core.Options(
            workspace_limit=-1 if self.workspace_limit is None else self.workspace_limit,
            deterministic=self.deterministic,
            deadline_ms=self.deadline_ms,
            tuning=self.tuning,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One plan, and the graph that it is of.

    ``chosen``: how it was chosen, as JSON; None, as ``fusion``, for a target that is not here.
    """

    document: dict[str, Any]
    graph: _core.Graph
    plan: _core.Plan
    verdict: _core.Verdict
    options: _core.Options
    chosen: str | None
    fusion: _core.Fusion | None

    @property
    def inputs(self) -> list[str]:
        return [item["name"] for item in self.document["inputs"]]

    @property
    def outputs(self) -> list[str]:
        return list(self.document["outputs"])


def build(
    document: dict[str, Any],
    name: str,
    settings: Settings,
    device: _core.Device,
    engines: Sequence[str] | None,
    full_f32: str | None,
    lower: str = "the default precision",
) -> Kernel:
    """The plan of one graph.

    ``full_f32``: where and how the framework asks for products of f32 without TF32; None: nowhere.
    ``lower``: how to ask for TF32.
    Raises ``UnsupportedError`` (with every reason), ``UnavailableError``.
    """
    options = settings.options
    fusion, chosen = None, None
    with _settings.of_fusion(name):
        graph = _core.Graph.from_json(json.dumps(document), f"fusion '{name}'")
        if device.is_present:
            fusion = _core.fuse(graph, device, settings.policy, engines, options)
            plan, verdict, chosen = fusion.plan, fusion.verdict, fusion.json()
        else:
            plan = _core.compile(graph, device, options)
            verdict = _core.probe(graph, device, options)
    if full_f32 is not None and plan.engine not in _settings.HOST_ENGINES:
        raise UnsupportedError(
            f"unsupported: fusion '{name}': {full_f32}: "
            f"engine {plan.engine} multiplies them as TF32\n"
            f"  nearest supported form: {lower}, or the product outside of the fusion"
        )
    return Kernel(document, graph, plan, verdict, options, chosen, fusion)
