"""What torch's tensors are as the arguments of `attention`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from lawson import _attention_arguments as shared
from lawson import _settings
from lawson._attention_setup import FLOATS
from lawson._errors import InvalidArgumentError
from lawson.torch._attention_sharding import is_distributed, seed_of_shard

FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def type_text(x: Tensor) -> str:
    """ "float32" for a dtype in a message."""
    return str(x.dtype)[6:]


# ---- of one kind -------------------------------------------------------------------------------


_ASKS_NOBODY: Any = torch._C._disabled_torch_function_impl
_USUAL: Any = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def is_foreign(kind: type) -> bool:
    """A class of tensors that says itself what torch's functions do with it."""
    asked: Any = getattr(kind, "__torch_function__", _ASKS_NOBODY)
    if asked is _ASKS_NOBODY or issubclass(kind, NestedTensor):
        return False
    return getattr(asked, "__func__", asked) is not _USUAL


def tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        _settings.refuse(name, value, "a torch.Tensor")
    if type(value) is not Tensor and is_foreign(type(value)):
        raise InvalidArgumentError(
            f"{name}: a {type(value).__qualname__}, which says itself what torch's functions do with "
            "it, is not allowed; expected a plain torch.Tensor"
        )
    if value.layout is not torch.strided:
        raise InvalidArgumentError(
            f"{name}: a tensor of layout {value.layout} is not allowed here; expected torch.strided"
        )
    return value


def causal_bias(name: str, bias: CausalBias, rows: int, columns: int) -> str:
    """The mask that torch's causal bias stands for."""
    if (bias.seq_len_q, bias.seq_len_kv) != (rows, columns):
        raise InvalidArgumentError(
            f"{name}: a causal bias of {bias.seq_len_q} x {bias.seq_len_kv}; expected "
            f"{rows} x {columns}, as query and key say"
        )
    return "causal" if bias.variant == CausalVariant.UPPER_LEFT else "causal_bottom_right"


def once(value: Tensor) -> Tensor:
    """With size 1 where a tensor was expanded."""
    strides = value.stride()
    if 0 not in strides:
        return value
    for axis, stride in enumerate(strides):
        if stride == 0 and value.shape[axis] > 1:
            value = value.narrow(axis, 0, 1)
    return value


def output_dtype(given: Any, own: torch.dtype) -> str | None:
    if given is None or given == own:
        return None
    if given not in FLOAT_TYPES:
        _settings.refuse("output_dtype", given, f"None, or one of {', '.join(FLOATS)} of torch")
    return str(given)[6:]


def autocast(q: Any, *others: Any) -> tuple[Any, ...]:
    """These tensors (or None) in the dtype that autocast computes attention in on q's device."""
    given = (q, *others)
    device = q.device.type if isinstance(q, Tensor) else ""
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return given
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Any) -> Any:
        is_cast = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if is_cast else x

    return tuple(cast(x) for x in given)


class Operands(shared.Operands):
    array = staticmethod(tensor)
    dtype = staticmethod(type_text)

    @staticmethod
    def cast(x: Tensor, dtype: str) -> Tensor:
        return x.to(getattr(torch, dtype))

    @staticmethod
    def integers(name: str, value: Any, least: int, most: int) -> Tensor:
        x = tensor(name, value)
        if x.dtype not in _INTEGERS:
            raise InvalidArgumentError(
                f"{name}: dtype {type_text(x)} is not allowed; expected integers, int32"
            )
        if x.dtype.itemsize < 4:  # which may not hold the bounds
            x = x.to(torch.int32)
        return x.clamp(least, most).to(torch.int32)

    @staticmethod
    def unstacked(x: Tensor, axis: int, count: int) -> Sequence[Tensor]:
        del count
        return x.unbind(axis)

    def filled(self, size: int, value: int) -> Tensor:
        q: Tensor = self.named["q"]
        return q.new_full((size,), value, dtype=torch.int32)

    @classmethod
    def rank4(cls, name: str, x: Tensor) -> Tensor:
        """Also with 1 for what was expanded.

        Where it has a gradient, that is of each element, so nothing is left out.
        """
        found: Tensor = super().rank4(name, x)
        return found if found.requires_grad else once(found)

    def add_mask(self, given: Tensor, kind: str) -> str:
        """A mask, as a bias where it is learnt and there is none; returns the kind of bias."""
        if kind != "none" or not given.requires_grad or not torch.is_grad_enabled():
            return super().add_mask(given, kind)
        self.labels["bias"] = self.label("attn_mask")
        bias = self.rank4(self.label("attn_mask"), given)
        self.named["bias"] = bias
        # A bias that hides a whole row is not one that every engine takes; a mask may.
        self.named["mask"] = bias.detach() != -math.inf
        return "post_scale"

    def add_dropout(
        self, rate: float, generator: torch.Generator | None, mask: Any, returned: bool
    ) -> None:
        """The mask, or seed and offset that the generator draws."""
        if generator is not None:
            if not isinstance(generator, torch.Generator):
                _settings.refuse("generator", generator, "None, or a torch.Generator")
            where = self.named["q"].device.type
            if generator.device.type != where:
                self.fail(
                    "generator", f"of device {generator.device}; expected one of {where}, as q"
                )
            if rate > 0 and mask is not None:
                self.fail("generator", "not together with dropout_mask, which is the mask itself")
        if self.add_dropout_mask(rate, mask, returned):
            self.named["seed"], self.named["offset"] = seeds(self.named["q"], generator)


def seeds(q: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Seed and offset of the engine's Philox, i64[1] each, drawn on q's device by torch.

    On the device, so that a captured CUDA graph draws others at each replay: torch registers its
    generator's state with the graph.
    """
    drawn = torch.randint(
        0, (1 << 63) - 1, (4,), dtype=torch.int64, device=q.device, generator=generator
    )
    if is_distributed(q):
        drawn = seed_of_shard(q, drawn)
    return drawn[0:1], drawn[2:3]  # 16 bytes apart, as plans take them
