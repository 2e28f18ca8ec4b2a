"""All rules, by the names of ATen's ops."""

from __future__ import annotations

import lawson.torch._trace_matmul
import lawson.torch._trace_views  # noqa: F401
from lawson.torch._trace_ops import RULES

__all__ = ["RULES"]
