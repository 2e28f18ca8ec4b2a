"""Lawson in JAX: fusions that are guaranteed, and attention, on CUDA; on the CPU when it is named."""

from __future__ import annotations

from lawson._inspection import AttentionInspection, Inspection
from lawson.jax import _runtime as _runtime
from lawson.jax._attention import attention, dot_product_attention
from lawson.jax._attention_patch import patch
from lawson.jax._fusion import Fusion, cudnn_fusion, export_checks, fusion, inspect

__all__ = [
    "AttentionInspection",
    "Fusion",
    "Inspection",
    "attention",
    "cudnn_fusion",
    "dot_product_attention",
    "export_checks",
    "fusion",
    "inspect",
    "patch",
]
