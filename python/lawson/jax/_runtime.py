"""The FFI library of XLA's side: found, registered, checked; and what its handlers are given.

The handlers run one plan each (`python/src/jax`). An XLA program carries, as attributes of its
custom call, the graph, the id of the plan that it was compiled with, and as a rule the plan itself:
what runs is that plan, or the program ends with an error that names both.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lawson import _core, _settings
from lawson._errors import UnavailableError

try:
    import jax
    from jax import ffi
except ImportError as error:
    raise ImportError("lawson.jax needs JAX 0.10.2 or later: pip install 'lawson[jax]'") from error

PLAN_TARGET = "lawson_plan"
FORWARD_TARGET = "lawson_attention_forward"
BACKWARD_TARGET = "lawson_attention_backward"
_PROBE_TARGET = "lawson_ffi_probe"
_TARGETS = {
    PLAN_TARGET: "plan",
    FORWARD_TARGET: "attention_forward",
    BACKWARD_TARGET: "attention_backward",
}
# JAX's name of a platform, and the name in the library's symbols.
_PLATFORMS = {"cpu": "cpu", "CUDA": "cuda"}


def _load() -> ctypes.CDLL:
    path = Path(__file__).parent.parent / "liblawson_jax.so"
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UnavailableError(f"the XLA FFI library does not load: {error}") from error


def _built_for(library: ctypes.CDLL) -> tuple[int, int]:
    major, minor = divmod(int(library.lawson_jax_ffi_version()), 1000)
    return major, minor


def offered_version() -> tuple[int, int] | None:
    """The FFI API (major, minor) of the installed jaxlib, from its headers; None: it has none."""
    found = importlib.util.find_spec("jaxlib")
    if found is None or found.origin is None:
        return None
    header = Path(found.origin).parent / "include/xla/ffi/api/c_api.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        return None
    numbers = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = (int(number.group(1)) if number else None for number in numbers)
    return None if major is None or minor is None else (major, minor)


def version_error(built: tuple[int, int], offered: tuple[int, int] | None) -> str | None:
    """Why handlers of API `built` do not run on `offered`; None: they do, or only a call can tell.

    XLA takes handlers of its own major version that are not newer than itself.
    """
    if offered is None or (built[0] == offered[0] and built[1] <= offered[1]):
        return None
    return _version_text(built, offered)


def _version_text(built: tuple[int, int], offered: tuple[int, int] | None) -> str:
    offers = "an unknown version" if offered is None else "{}.{}".format(*offered)
    return (
        f"liblawson_jax.so is built for XLA FFI {built[0]}.{built[1]}, this jaxlib offers {offers}"
    )


def _register(library: ctypes.CDLL) -> None:
    for platform, symbol in _PLATFORMS.items():
        for target, name in _TARGETS.items():
            stages = {
                stage: ffi.pycapsule(getattr(library, f"lawson_jax_{symbol}_{name}_{stage}"))
                for stage in ("instantiate", "initialize", "execute")
            }
            ffi.register_ffi_target(target, stages, platform=platform)
        ffi.register_ffi_target(
            _PROBE_TARGET, ffi.pycapsule(library.lawson_jax_probe), platform=platform
        )


_library = _load()
_mismatch = version_error(_built_for(_library), offered_version())
if _mismatch is not None:
    raise UnavailableError(_mismatch)
_register(_library)

_checked: set[str] = set()
_checking = threading.Lock()


def check_platform(platform: str) -> None:
    """Makes sure, once, that this runtime calls handlers of the library on `platform`.

    With one element, since XLA says only at the first call that it did not take them. Not at
    import: it starts JAX's backends, whose choice is the user's until then.

    Raises:
      UnavailableError: "built for FFI a.b, this jaxlib offers c.d", and what XLA says.
    """
    with _checking:
        if platform in _checked:
            return
        device = jax.local_devices(backend=platform)[0]
        call = ffi.ffi_call(_PROBE_TARGET, jax.ShapeDtypeStruct((1,), np.uint8))
        try:
            # Possibly from within a trace, of which this is no part.
            with jax.ensure_compile_time_eval():
                element = jax.device_put(np.zeros(1, np.uint8), device)
                jax.block_until_ready(jax.jit(call)(element))
        except jax.errors.JaxRuntimeError as error:
            text = _version_text(_built_for(_library), offered_version())
            raise UnavailableError(f"{text}: {error}") from error
        _checked.add(platform)


def device_for(platform: str, engines: Sequence[str] | None = None) -> _core.Device:
    """The device that a program lowered for JAX's `platform` is compiled for.

    Args:
      platform: of the lowering, "cuda" or "cpu".
      engines: those that the user named; None: LAWSON_ENGINE's.

    Raises:
      UnsupportedError: another platform, or the CPU without an engine of the host being named.
      UnavailableError: no GPU, or a jaxlib that does not call the library's handlers.
    """
    platform = "cuda" if platform == "gpu" else platform
    device = _settings.device_on(platform, engines)
    check_platform(platform)
    return device


def _options(options: _core.Options) -> dict[str, Any]:
    return {
        "workspace_limit": np.int64(options.workspace_limit),
        "deterministic": bool(options.deterministic),
        "dynamic_shapes": bool(options.dynamic_shapes),
        "deadline_ms": float(options.deadline_ms),
        "tuning": options.tuning,
    }


def _common(
    plan: _core.Plan,
    options: _core.Options | None,
    values: Mapping[str, float] | None,
    embed: bool,
) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "plan_id": plan.id,
        "key": plan.key,
        "engine": plan.engine,
    }
    if options is not None:
        attributes["options"] = _options(options)
    if embed:
        attributes["plan"] = np.frombuffer(plan.serialize(), np.uint8)
    if values:
        attributes["values"] = {name: float(value) for name, value in values.items()}
    return attributes


def plan_attributes(
    plan: _core.Plan,
    graph: _core.Graph,
    *,
    options: _core.Options | None = None,
    values: Mapping[str, float] | None = None,
    embed: bool = True,
) -> dict[str, Any]:
    """Attributes of a call of `PLAN_TARGET`.

    Its operands are the inputs of `graph` in the order of `graph.tensors()`, those by value left
    out, its results the outputs, and then the workspace (`workspace_aval`).

    Args:
      plan: what was compiled for the graph.
      graph: as it was given to compile or fuse.
      options: those that the plan was compiled with.
      values: of the inputs that are by value (f32, f64, i32, i64), by name.
      embed: whether the program carries the plan, so that it runs from a cache or an export in
        another process without building.
    """
    return {"graph": graph.json(), **_common(plan, options, values, embed)}


def attention_attributes(
    plan: _core.Plan,
    spec: str,
    operands: Sequence[str],
    results: Sequence[str],
    *,
    options: _core.Options | None = None,
    scale: float | None = None,
    sequences: int | None = None,
    embed: bool = True,
) -> dict[str, Any]:
    """Attributes of a call of `FORWARD_TARGET` or `BACKWARD_TARGET`.

    Args:
      plan: `_core.attention_plan` of the spec and pass.
      spec: JSON text of kind "attention".
      operands: what each operand is ("q", "cu_seqlens_kv", ...: docs/attention.md), in order.
      results: the same of the results; after them comes the workspace (`workspace_aval`).
      options: those that the plan was compiled with.
      scale: in place of the spec's; selects no plan.
      sequences: of a ragged batch, in place of the spec's batch; selects no plan in its bucket.
      embed: whether the program carries the plan.
    """
    values: dict[str, float] = {}
    if scale is not None:
        values["scale"] = scale
    if sequences is not None:
        values["sequences"] = sequences
    return {
        "spec": spec,
        "names": ",".join(operands),
        "outs": ",".join(results),
        **_common(plan, options, values, embed),
    }


def workspace_aval(plan: _core.Plan) -> jax.ShapeDtypeStruct:
    """The last result of every call: u8, of the plan's workspace size, 1 at least."""
    return jax.ShapeDtypeStruct((max(1, plan.workspace_size),), np.uint8)
