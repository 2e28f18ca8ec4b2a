"""What a pass of an attention runs: for `lawson.torch.inspect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lawson import _core, _settings
from lawson._attention_plan import judge
from lawson._attention_setup import Setup
from lawson._inspection import AttentionInspection
from lawson.torch._attention_run import choose, result_forms, type_name


def inspect_pass(
    which: str, setup: Setup, tensors: Mapping[str, Tensor], target: str | None
) -> AttentionInspection:
    """The plan of a pass for operands of these descriptions, on a target or where they are. Raises
    what the call raises.

    It says nothing of addresses: a tensor at an odd one is copied, whatever is said here.
    """
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    strides = {name: tuple(x.stride()) for name, x in tensors.items()}
    types = {name: type_name(x.dtype) for name, x in tensors.items()}
    sizes = setup.sizes({name: shapes[name] for name in setup.names})
    forms = result_forms(setup, which, sizes, shapes, strides, types)
    operands = list(tensors.values())

    def look(
        spec: str, device: _core.Device, options: _core.Options, copies: Sequence[int]
    ) -> AttentionInspection:
        verdict: Any = judge(spec, device, options)
        plan = _core.attention_plan(spec, which, device, options)
        platform = operands[0].device.type if target is None else _settings.platform_of(target)
        return AttentionInspection(f"attention.{which}", platform, spec, verdict, plan)

    return choose(setup, which, operands, forms, shapes, look, target=target)
