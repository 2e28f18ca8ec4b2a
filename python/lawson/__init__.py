"""Does this computation run as one fused GPU kernel? Then exactly that.

    >>> import lawson
    >>> print(lawson.check("config.json", targets=["h200", "b200"]))
    >>> verdict = lawson.probe("spec.json", target="h200")
    >>> verdict.supported, verdict.reasons

`lawson.jax` has fusions and attention for JAX. Everything here takes a spec (docs/spec.md) as a
path, a dict or JSON text, may be called by several threads at once, and lets other Python threads
run while it works.
"""

from __future__ import annotations

from lawson import _core
from lawson._api import Plans, compile, explain, info, load, probe, save, stats, targets, trace
from lawson._check import Check, Workload, check
from lawson._core import (
    AttentionConfig,
    Device,
    Graph,
    Options,
    Plan,
    Spec,
    TensorInfo,
    Verdict,
    configure,
)
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

__version__: str = _core.version()

__all__ = [
    "AttentionConfig",
    "CancelledError",
    "Check",
    "CudaError",
    "CudnnError",
    "Device",
    "Error",
    "Graph",
    "IOError_",
    "InternalError",
    "InvalidArgumentError",
    "Options",
    "OutOfMemoryError",
    "Plan",
    "Plans",
    "Spec",
    "TensorInfo",
    "UnavailableError",
    "UnsupportedError",
    "Verdict",
    "Workload",
    "__version__",
    "check",
    "compile",
    "configure",
    "explain",
    "info",
    "load",
    "probe",
    "save",
    "stats",
    "targets",
    "trace",
]
