"""What the library raises: one class for each status of its C ABI, with the ABI's message.

"Unsupported" is an answer (the computation is understood and cannot be had); everything else says
that an input is wrong or that something is broken. The builtin bases let code that knows nothing of
Lawson catch what it expects.
"""

from __future__ import annotations

from typing import ClassVar


class Error(Exception):
    """Base of all that the library raises. `status` is the C ABI's word for it."""

    status: ClassVar[str] = "internal"


class UnsupportedError(Error, NotImplementedError):
    """It does not fuse on this device; the message has every reason."""

    status = "unsupported"


class InvalidArgumentError(Error, ValueError):
    """The caller's input; the message names field, value and what is allowed."""

    status = "invalid argument"


class UnavailableError(Error, RuntimeError):
    """The environment lacks a library, a device, or a file of Lawson's."""

    status = "unavailable"


class OutOfMemoryError(Error, MemoryError):
    """The host's or the device's memory is too small."""

    status = "out of memory"


class CudaError(Error, RuntimeError):
    """A fault of CUDA's driver or runtime."""

    status = "CUDA error"


class CudnnError(Error, RuntimeError):
    """A fault of cuDNN that is no refusal."""

    status = "cuDNN error"


class IOError_(Error, OSError):
    """A file could not be read or written."""

    status = "I/O error"


class CancelledError(Error, RuntimeError):
    """A deadline passed, or the process is ending."""

    status = "cancelled"


class InternalError(Error, RuntimeError):
    """A defect of Lawson's."""

    status = "internal error"


BY_STATUS: dict[int, type[Error]] = {
    1: UnsupportedError,
    2: InvalidArgumentError,
    3: UnavailableError,
    4: OutOfMemoryError,
    5: CudaError,
    6: CudnnError,
    7: IOError_,
    8: CancelledError,
    9: InternalError,
}
