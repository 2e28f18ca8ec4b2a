"""What runs when a function is called: the answers of a frontend's `inspect`."""

from __future__ import annotations

import dataclasses
import json

from lawson import _core
from lawson._errors import UnavailableError
from lawson._graph.kernels import Kernel


class _Inspected:
    """What is read off the plans that run; the first one's, where one is asked for."""

    name: str
    platform: str

    def _plans(self) -> tuple[_core.Plan, ...]:
        raise NotImplementedError

    def _graphs(self) -> tuple[_core.Graph, ...]:
        raise NotImplementedError

    @property
    def plan_ids(self) -> tuple[str, ...]:
        return tuple(plan.id for plan in self._plans())

    @property
    def plan_id(self) -> str:
        return self._first().id

    @property
    def key(self) -> str:
        return self._first().key

    @property
    def engine(self) -> str:
        return self._first().engine

    @property
    def workspace_bytes(self) -> int:
        """The most that a plan takes."""
        return max((plan.workspace_size for plan in self._plans()), default=0)

    def _first(self) -> _core.Plan:
        if not self._plans():
            raise UnavailableError(f"inspect: '{self.name}' computes nothing, so no plan runs")
        return self._plans()[0]

    def __str__(self) -> str:
        lines = [f"{self.name} on {self.platform}:"]
        for plan, graph in zip(self._plans(), self._graphs(), strict=True):
            lines.append(f"plan {plan.id} of engine {plan.engine} for {plan.target}")
            lines.append(graph.print().rstrip())
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Inspection(_Inspected):
    """What runs when a fusion is called with these arguments.

    ``graph``, ``verdict``, ``plan_id``, ``key``, ``engine`` and ``plan`` are those of the one
    kernel; of several (a gradient) they are those of the first, and ``kernels`` has them all.
    """

    name: str
    platform: str
    kernels: tuple[Kernel, ...]

    def _plans(self) -> tuple[_core.Plan, ...]:
        return tuple(kernel.plan for kernel in self.kernels)

    def _graphs(self) -> tuple[_core.Graph, ...]:
        return tuple(kernel.graph for kernel in self.kernels)

    @property
    def plan(self) -> _core.Plan:
        return self._first()

    @property
    def graph(self) -> _core.Graph:
        """As it was traced; ``.print()`` shows it."""
        self._first()
        return self.kernels[0].graph

    @property
    def verdict(self) -> _core.Verdict:
        self._first()
        return self.kernels[0].verdict

    def json(self) -> str:
        """Policy, engines, what was tried before, verdict and graph of each kernel."""
        found = [json.loads(k.chosen) if k.chosen else {"plan_id": k.plan.id} for k in self.kernels]
        return json.dumps({"name": self.name, "platform": self.platform, "kernels": found})


@dataclasses.dataclass(frozen=True)
class AttentionInspection(_Inspected):
    """One pass of an attention: its spec, the verdict, and the very plan that a call runs.

    In a program that is sharded, of the whole arrays; each device runs the plan of its shard.
    """

    name: str  # "attention.forward" or "attention.backward"
    platform: str
    spec: str  # JSON text: docs/spec.md
    verdict: _core.Verdict
    plan: _core.Plan

    def _plans(self) -> tuple[_core.Plan, ...]:
        return (self.plan,)

    def _graphs(self) -> tuple[_core.Graph, ...]:
        return (self.graph,)

    @property
    def graph(self) -> _core.Graph:
        """As the spec says it; ``.print()`` shows it."""
        return _core.AttentionConfig.from_spec(self.spec).graph(self.name.rpartition(".")[2])

    def json(self) -> str:
        """Spec, verdict and plan."""
        return json.dumps(
            {
                "name": self.name,
                "platform": self.platform,
                "spec": json.loads(self.spec),
                "verdict": json.loads(self.verdict.json()),
                "plan_id": self.plan.id,
                "engine": self.plan.engine,
            }
        )
