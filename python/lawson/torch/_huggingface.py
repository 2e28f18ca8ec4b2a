"""The attention implementation "lawson" of Hugging Face's transformers.

`AutoModel.from_pretrained(..., attn_implementation="lawson")` runs its attention here, with the masks
that the library makes for "sdpa". It is registered when both packages are imported, in whichever
order; importing this one does not import transformers.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from lawson._errors import UnsupportedError
from lawson.torch._sdpa import scaled_dot_product_attention

NAME = "lawson"
_MODULE = "transformers.modeling_utils"  # which has the table of implementations


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' call of an attention implementation.

    Args:
      query, key, value: `[b, h, s, d]`, with fewer heads of key and value in grouped attention.
      attention_mask: bool or float `[b, 1, sq, skv]`; None: all, or causal as `is_causal` or the
        module says, where there is more than one row.
      more: `softcap` and `s_aux` (sinks, one for each head) of models that have them.

    Returns:
      `[b, s, h, d]`, and None for the weights, which are never made.
    """
    for name in ("position_bias", "head_mask"):
        if more.get(name) is not None:
            raise UnsupportedError(
                f"attention implementation '{NAME}': {name} is not supported; expected None (a bias "
                "is added in attention_mask)"
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        bool(causal) and attention_mask is None and query.shape[2] > 1,
        scaling,
        True,
        softcap=more.get("softcap") or 0.0,
        sink=more.get("s_aux"),
    )
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Makes the implementation known, where this version of transformers has a table of them."""
    try:
        from transformers import AttentionInterface  # type: ignore[import-not-found]
    except ImportError:
        return  # before 4.48 implementations are classes of the models
    AttentionInterface.register(NAME, attention_forward)
    try:
        from transformers import AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask  # type: ignore[import-not-found]
    except ImportError:
        return  # before 4.53 masks are the model's own
    AttentionMaskInterface.register(NAME, sdpa_mask)


class _Loader(importlib.abc.Loader):
    """A module's own loader, and the registration after it.

    For the time of the import alone: the module keeps its own.
    """

    def __init__(self, own: importlib.abc.Loader) -> None:
        self._own = own

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        module.__loader__ = self._own
        self._own.exec_module(module)
        if _FINDER in sys.meta_path:
            sys.meta_path.remove(_FINDER)
        register()


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the import of transformers' models, until one succeeds."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


_FINDER = _Finder()


def register_when_imported() -> None:
    """Registers now where transformers' models are imported, else when they will be."""
    if _MODULE in sys.modules:
        register()
    elif _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
