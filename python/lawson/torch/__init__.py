"""Attention and fusions as operators of PyTorch."""

from __future__ import annotations

from lawson import _torch

# Raises UnavailableError where this torch has no DLPack exchange table.
_torch.connect()

from lawson.torch._attention import attention
from lawson.torch._fusion import Fusion, fusion
from lawson.torch._huggingface import register_when_imported
from lawson.torch._inspect import inspect
from lawson.torch._patch import patch
from lawson.torch._sdpa import scaled_dot_product_attention

__all__ = ["Fusion", "attention", "fusion", "inspect", "patch", "scaled_dot_product_attention"]

register_when_imported()
