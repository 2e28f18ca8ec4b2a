"""All of JAX beyond its documented interface that fusions use, in one place.

Works with JAX 0.10.2, where a `ClosedJaxpr` wraps a `Jaxpr`, and from 0.11 on, where they are one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import ad_util as _ad_util
from jax._src import config as _config
from jax._src import core as _core
from jax._src import custom_derivatives as _custom_derivatives
from jax._src import dispatch as _dispatch
from jax._src import source_info_util as _source_info
from jax._src.interpreters import mlir as _mlir

Zero: Any = _ad_util.Zero
Primitive = _core.Primitive
apply_primitive = _dispatch.apply_primitive
eval_jaxpr = _core.eval_jaxpr
jaxpr_as_function = _core.jaxpr_as_fun


# Lines of code are those of who calls Lawson.
_source_info.register_exclusion(os.path.dirname(os.path.dirname(__file__)) + os.sep)

# ---- jaxprs ------------------------------------------------------------------------------------


def is_literal(variable: Any) -> bool:
    return isinstance(variable, _core.Literal)


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, (_core.Jaxpr, _core.ClosedJaxpr))


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and its consts, of either kind."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def is_tracer(value: Any) -> bool:
    return isinstance(value, _core.Tracer)


# What of these there is differs between versions of JAX.
_DERIVATIVE_RULES = tuple(
    getattr(_custom_derivatives, name)
    for name in ("custom_jvp_call_p", "custom_jvp_call_jaxpr_p", "custom_vjp_call_p", "remat_opt_p")
    if hasattr(_custom_derivatives, name)
)


def has_derivative_rule(eqn: Any) -> bool:
    """The equation calls a function that has a derivative of its own (custom_jvp, custom_vjp)."""
    return any(eqn.primitive is own for own in _DERIVATIVE_RULES)


def source_line(eqn: Any) -> str:
    """``file.py:12``, where the user's code wrote the equation; "" where that is not known."""
    text = _source_info.summarize(eqn.source_info)
    path, _, rest = text.partition(":")
    line = rest.split(" ")[0].split(":")[0]
    return f"{os.path.basename(path)}:{line}"[-240:] if line.isdigit() else ""


def trace_context() -> Any:
    """What of JAX's configuration a trace depends on (x64, matmul precision, ...); hashable."""
    return _config.trace_context()


def outside_of_meshes() -> contextlib.AbstractContextManager[Any]:
    """Shapes are global to whoever traces in here, also while a shard_map is traced."""
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def at_least_f32(dtype: Any) -> Any:
    """f32, or f64 for f64: what sums are kept in, also where JAX's own promotion is strict."""
    return np.promote_types(dtype, np.float32)


# ---- avals -------------------------------------------------------------------------------------


def plain(aval: Any) -> Any:
    """Shape, dtype and weak type alone."""
    return _core.ShapedArray(tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False)))


def results_like(avals: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Avals of results that vary over the manual mesh axes that some operand varies over."""
    types: list[Any] = [getattr(a, "mat", None) for a in operands]
    varying = [m for m in types if m is not None and m.varying]
    if not varying:
        return [plain(a) for a in avals]
    axes = frozenset().union(*(m.varying for m in varying))
    mat = type(varying[0])(varying=axes)
    sharding = _core.get_cur_mesh_sharding()
    return [plain(a).update(sharding=sharding, manual_axis_type=mat) for a in avals]


def explicit_mesh(avals: Sequence[Any]) -> Any:
    """The mesh of the first aval that is split over explicit axes; None: there is none."""
    for aval in avals:
        sharding = getattr(aval, "sharding", None)
        if sharding is not None and any(entry is not None for entry in sharding.spec):
            return sharding.mesh
    return None


def vary_alike(operands: Sequence[Any]) -> Sequence[Any]:
    """In a shard_map: operands that vary over fewer axes than others are made to vary over all."""
    return list(_core.auto_insert_reshard(*operands))


def zero_tangent(value: Any) -> Any:
    return Zero(jax.typeof(value).to_tangent_aval())


def is_zero(tangent: Any) -> bool:
    return type(tangent) is Zero


# ---- lowering ----------------------------------------------------------------------------------


def device_count(ctx: Any) -> int:
    """How many devices the module is for that is being lowered; 1 where each has its own shapes."""
    axes = ctx.module_context.axis_context
    manual, mesh = getattr(axes, "manual_axes", None), getattr(axes, "mesh", None)
    if mesh is not None and manual is not None and set(manual) == set(mesh.axis_names):
        return 1
    if mesh is not None:
        return int(mesh.size)
    return int(getattr(axes, "num_devices", 1))


def needs_devices(primitive: Any) -> None:
    """Its lowering is told the devices of the program, as custom_partitioning has to be."""
    _dispatch.prim_requires_devices_during_lowering.add(primitive)


def lower_function(ctx: Any, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    return _mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def plain_context(ctx: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """The lowering context of a call with other operands and results."""
    return ctx.replace(avals_in=[plain(a) for a in operands], avals_out=[plain(a) for a in results])


def constant(value: Any, aval: Any) -> Any:
    """A number in all of an array."""
    return _mlir.ir_constant(np.full(aval.shape, value, aval.dtype))


def definition(ctx: Any, operands: Sequence[Any], name: str, jaxpr: Any) -> list[str]:
    """A private function of the module that is `jaxpr`: its name, for `called_computations`."""
    results = _mlir.core_call_lowering(ctx, *operands, name=name, call_jaxpr=jaxpr)
    call = results[0].owner
    symbol = str(call.attributes["callee"].value)
    call.erase()
    return [symbol]
