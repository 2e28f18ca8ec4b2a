"""A context in which `F.scaled_dot_product_attention` is Lawson's.

It is a `TorchFunctionMode`: torch asks it about each of its functions that is called, by whatever
name (`torch.nn.functional`'s attribute, one that a module imported before, `nn.MultiheadAttention`'s
own). So it holds for the thread that entered it and for what autograd runs on its behalf, it nests,
torch.compile guards on it, and on exit nothing is left.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

from lawson.torch._attention_arguments import is_foreign
from lawson.torch._sdpa import check_options, scaled_dot_product_attention

_THEIRS = torch.nn.functional.scaled_dot_product_attention
_MULTI_HEAD = torch.nn.functional.multi_head_attention_forward

# Functions that torch asks the mode about run without it. Of those that call attention themselves,
# or run what users wrote (checkpoints), there are copies, which look some names up elsewhere.


def _copy(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    known: Any = function
    elsewhere = {**known.__globals__, **names}
    del elsewhere["__name__"]  # by which torch.compile would find the module's own names
    made = types.FunctionType(known.__code__, elsewhere, known.__name__, known.__defaults__)
    made.__kwdefaults__ = known.__kwdefaults__
    return made


def _nobody(*objects: Any) -> bool:
    """Nobody is to be asked: the mode was."""
    return False


_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_ENGINE = {
    function: _copy(function, **dict.fromkeys(_ASKS, _nobody))
    for function in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}


def _by_their_own(
    asked: Sequence[type],
    func: Callable[..., Any],
    types: Sequence[type],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """What the tensors that say themselves what torch's functions do make of this one."""
    for kind in asked:
        result = kind.__torch_function__(func, types, args, kwargs)  # type: ignore[attr-defined]
        if result is not NotImplemented:
            return result
    raise TypeError(
        f"scaled_dot_product_attention: {', '.join(kind.__qualname__ for kind in asked)} took it "
        "for none of theirs"
    )


_POSITIONAL = tuple(inspect.signature(scaled_dot_product_attention).parameters)


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
        `engine`, `deterministic` or `tuning`, where the call does not give them.

    Raises:
      lawson.InvalidArgumentError: an option that it does not have, or a value that no call takes.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        check_options(options)
        self.options = options
        self.multi_head = _copy(_MULTI_HEAD, scaled_dot_product_attention=self._attention)

    def _attention(self, *args: Any, **kwargs: Any) -> Any:
        said = _POSITIONAL[: len(args)]
        options = {name: x for name, x in self.options.items() if name not in said}
        return scaled_dot_product_attention(*args, **{**options, **kwargs})

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
            foreign = [kind for kind in types if is_foreign(kind)]
            if not all(issubclass(kind, CausalBias) for kind in foreign):
                with self:  # what they make of it is Lawson's again
                    return _by_their_own(foreign, func, types, args, kwargs)
            return self._attention(*args, **kwargs)
        if func is _MULTI_HEAD:
            return self.multi_head(*args, **kwargs)
        if func in _ENGINE:
            with self:
                return _ENGINE[func](*args, **kwargs)
        return func(*args, **kwargs)
