"""Attention and fusions as operators of PyTorch."""

from __future__ import annotations

from lawson import _torch

# Raises UnavailableError where this torch has no DLPack exchange table.
_torch.connect()
