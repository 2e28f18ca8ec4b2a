"""What an attention of a traced program runs: for `lawson.jax.inspect`."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from lawson import _core
from lawson._attention_plan import judge, options_of
from lawson._attention_setup import Setup
from lawson.jax import _attention_primitive as primitive


@dataclasses.dataclass(frozen=True)
class AttentionInspection:
    """One pass of an attention: its spec, the verdict, and the very plan that a call runs.

    In a program that is sharded, of the whole arrays; each device runs the plan of its shard.
    """

    name: str  # "attention.forward" or "attention.backward"
    platform: str
    spec: str  # JSON text: docs/spec.md
    verdict: _core.Verdict
    plan: _core.Plan

    @property
    def plan_id(self) -> str:
        return self.plan.id

    @property
    def plan_ids(self) -> tuple[str, ...]:
        return (self.plan.id,)

    @property
    def key(self) -> str:
        return self.plan.key

    @property
    def engine(self) -> str:
        return self.plan.engine

    @property
    def graph(self) -> _core.Graph:
        """As the spec says it; `.print()` shows it."""
        return _core.AttentionConfig.from_spec(self.spec).graph(self.name.rpartition(".")[2])

    @property
    def workspace_bytes(self) -> int:
        return self.plan.workspace_size

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

    def __str__(self) -> str:
        return (
            f"{self.name} on {self.platform}:\n"
            f"plan {self.plan.id} of engine {self.plan.engine} for {self.plan.target}\n"
            f"{self.graph.print().rstrip()}"
        )


def is_attention(eqn: Any) -> bool:
    """Whether an equation of a jaxpr is a pass of an attention."""
    return any(eqn.primitive is own for own in primitive.primitives.values())


def inspect_attention(eqn: Any, platform: str) -> AttentionInspection:
    """What such an equation runs on a platform. Raises what lowering raises."""
    which = next(which for which, own in primitive.primitives.items() if eqn.primitive is own)
    setup: Setup = eqn.params["setup"]
    avals = [variable.aval for variable in eqn.invars]
    device = primitive.device_of(setup, platform)
    spec = primitive.spec_of(setup, avals)
    options = options_of(setup, platform, spec, device)
    verdict = judge(spec, device, options)
    plan = _core.attention_plan(spec, which, device, options)
    return AttentionInspection(f"attention.{which}", platform, spec, verdict, plan)
