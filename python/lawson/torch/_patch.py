"""A context in which `F.scaled_dot_product_attention` is Lawson's.

It is a `TorchFunctionMode`: torch asks it about each of its functions that is called, by whatever
name (`torch.nn.functional`'s attribute, one that a module imported before, `nn.MultiheadAttention`'s
own). So it holds for the thread that entered it and for what autograd runs on its behalf, it nests,
torch.compile guards on it, and on exit nothing is left.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lawson.torch._sdpa import scaled_dot_product_attention

_THEIRS = torch.nn.functional.scaled_dot_product_attention
_MULTI_HEAD = torch.nn.functional.multi_head_attention_forward


def _multi_head(attention: Callable[..., Any]) -> Callable[..., Any]:
    """torch's multi_head_attention_forward over another attention.

    It is one of the functions that the mode is asked about, and while it runs for the mode the mode
    is not asked about those that it calls.
    """
    names = {**_MULTI_HEAD.__globals__, "scaled_dot_product_attention": attention}
    del names["__name__"]  # by which torch.compile would find the module's own globals
    made = types.FunctionType(
        _MULTI_HEAD.__code__, names, _MULTI_HEAD.__name__, _MULTI_HEAD.__defaults__
    )
    made.__kwdefaults__ = _MULTI_HEAD.__kwdefaults__
    return made


class patch(TorchFunctionMode):
    """Within it, `torch.nn.functional.scaled_dot_product_attention` is Lawson's.

        with lawson.torch.patch():
            y = model(x)

    What Lawson refuses raises `lawson.UnsupportedError`; nothing goes back to torch's own. For the
    caller's thread alone, and nestable: the innermost `options` hold. Fast paths of `nn.Transformer`
    and `nn.MultiheadAttention` that would not call it are off within. Each call of a torch function
    costs about a microsecond more within.

    Args:
      options: keywords of `lawson.torch.scaled_dot_product_attention` for every call, such as
        `engine`, `deterministic` or `tuning`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.multi_head = _multi_head(functools.partial(scaled_dot_product_attention, **options))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if func is _THEIRS:
            return scaled_dot_product_attention(*args, **{**self.options, **kwargs})
        if func is _MULTI_HEAD:
            return self.multi_head(*args, **kwargs)
        return func(*args, **kwargs)
