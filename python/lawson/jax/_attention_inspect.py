"""What an attention of a traced program runs: for `lawson.jax.inspect`."""

from __future__ import annotations

from typing import Any

from lawson import _core
from lawson._attention_plan import judge, options_of
from lawson._attention_setup import Setup
from lawson._inspection import AttentionInspection
from lawson.jax import _attention_primitive as primitive


def is_attention(eqn: Any) -> bool:
    """Whether an equation of a jaxpr is a pass of an attention."""
    return any(eqn.primitive is own for own in primitive.primitives.values())


def inspect_attention(eqn: Any, platform: str, target: str | None) -> AttentionInspection:
    """What such an equation runs on a target of a platform; None: the platform's own device.

    Raises what lowering raises.
    """
    which = next(which for which, own in primitive.primitives.items() if eqn.primitive is own)
    setup: Setup = eqn.params["setup"]
    avals = [variable.aval for variable in eqn.invars]
    device = primitive.device_of(target, platform)
    spec = primitive.spec_of(setup, avals)
    options = options_of(setup, platform, spec, device)
    verdict = judge(spec, device, options)
    plan = _core.attention_plan(spec, which, device, options)
    return AttentionInspection(f"attention.{which}", platform, spec, verdict, plan)
