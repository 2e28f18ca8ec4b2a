"""Does this computation run as one fused GPU kernel, and then exactly that."""

from __future__ import annotations

from lawson._errors import (
    CancelledError,
    CudaError,
    CudnnError,
    Error,
    InternalError,
    InvalidArgumentError,
    IOError_,
    OutOfMemoryError,
    UnavailableError,
    UnsupportedError,
)
from lawson import _core

__version__: str = _core.version()
