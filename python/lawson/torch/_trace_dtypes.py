"""Lawson's names of PyTorch's dtypes, and what PyTorch allows for products of f32."""

from __future__ import annotations

from typing import Any

import torch

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.float8_e8m0fnu: "f8e8m0",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str | None:
    """Lawson's name of a dtype; None where it has none (complex, int16, ...)."""
    return _NAMES.get(dtype)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of Lawson's ``name``; KeyError for those that PyTorch does not compute with (i4)."""
    return _DTYPES[name]


_getter: Any = getattr(torch._C, "_get_fp32_precision_getter", None)


def f32_products() -> str:
    """Whether PyTorch allows TF32, however it was set: "tf32"; else "ieee" or "none".

    The older ``get_float32_matmul_precision`` raises after the newer setting.
    """
    if _getter is not None:  # as `fp32_precision` itself, which costs more than this call may
        found: str = _getter("cuda", "matmul")
        return found
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
