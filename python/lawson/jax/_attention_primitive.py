"""The primitives of attention, one for each pass, and what they become.

`forward` and `backward` bind a primitive that carries its Setup. Outside of any partitioning that
primitive lowers to `calls[...]`, whose lowering judges and compiles the plan for the arrays of one
device, and emits a call of Lawson's XLA target with that plan. Between the two is
`_attention_partition`, so that a sharded call is judged with the shapes of a shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, mlir

from lawson import _core, _settings
from lawson._attention_plan import judge, options_of
from lawson._attention_setup import Setup
from lawson._errors import UnsupportedError
from lawson.jax import _jax, _runtime

PASSES = ("forward", "backward")
NO_DERIVATIVE = (
    "second-order derivatives and forward-mode differentiation (jax.jvp, jax.jacfwd, jax.hessian) "
    "are not supported; attention has first-order reverse-mode gradients: jax.grad, jax.vjp, "
    "jax.jacrev"
)


def result_shapes(
    setup: Setup, which: str, avals: Sequence[Any]
) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape and dtype of each result."""
    names = setup.operand_names(which)
    shapes = {name: aval.shape for name, aval in zip(names, avals, strict=True)}
    types = {name: np.dtype(aval.dtype).name for name, aval in zip(names, avals, strict=True)}
    sizes = setup.sizes(shapes)
    results = (setup.result(name, sizes, types, shapes) for name in setup.result_names(which))
    return [(shape, jnp.dtype(dtype)) for shape, dtype in results]


def spec_of(setup: Setup, avals: Sequence[Any]) -> str:
    """The spec of a call with operands of these shapes and dtypes, of either pass."""
    pairs = list(zip(setup.names, avals, strict=False))
    return setup.spec(
        {name: aval.shape for name, aval in pairs},
        {name: np.dtype(aval.dtype).name for name, aval in pairs},
    )


def device_of(target: str | None, platform: str) -> _core.Device:
    """Attention on host arrays runs on the host; elsewhere a GPU is needed, or a target named."""
    if target is None:
        return _runtime.device_for(platform, ("cpu",))
    return _settings.target_on(platform, target, "attention: ")


def _abstract(*avals: Any, setup: Setup, which: str) -> list[Any]:
    varying = avals[0].manual_axis_type
    mesh = _jax.explicit_mesh(avals)
    if mesh is not None and varying.empty:
        return _explicit(setup, which, mesh, avals)
    for name, aval in zip(setup.operand_names(which), avals, strict=True):
        if aval.manual_axis_type != varying:
            raise TypeError(
                f"{name} varies over {aval.manual_axis_type}, q over {varying}: inside shard_map "
                "all operands of attention vary over the same axes"
            )
    results = []
    for shape, dtype in result_shapes(setup, which, avals):
        if varying.empty:
            results.append(jax.core.ShapedArray(shape, dtype))
        else:
            mesh = avals[0].sharding.mesh
            results.append(
                jax.core.ShapedArray(
                    shape,
                    dtype,
                    sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
                    manual_axis_type=varying,
                )
            )
    return results


def _explicit(setup: Setup, which: str, mesh: Any, avals: Sequence[Any]) -> list[Any]:
    """On explicit mesh axes shardings are part of types: the results' follow the operands'."""
    from lawson.jax import _attention_partition

    made = [jax.core.ShapedArray(*result) for result in result_shapes(setup, which, avals)]
    shardings = _attention_partition.explicit(setup, which, mesh, avals, made)
    return [aval.update(sharding=s) for aval, s in zip(made, shardings, strict=True)]


def _refuse_derivative(which: str) -> Callable[..., Any]:
    def rule(primals: Any, tangents: Any, **params: Any) -> Any:
        del primals, tangents, params
        raise UnsupportedError(f"attention ({which} pass): {NO_DERIVATIVE}")

    return rule


def _impl(*operands: Any, primitive: Primitive, setup: Setup) -> Any:
    return _jitted(primitive, setup, _settings.said())(*operands)


@functools.lru_cache(maxsize=4096)
def _jitted(primitive: Primitive, setup: Setup, said: Any) -> Callable[..., Any]:
    del said  # of the environment: lowered once for each
    return jax.jit(lambda *operands: primitive.bind(*operands, setup=setup))


def _make(name: str, which: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(functools.partial(_abstract, which=which))
    primitive.def_impl(functools.partial(_impl, primitive=primitive))
    ad.primitive_jvps[primitive] = _refuse_derivative(which)
    _jax.needs_devices(primitive)
    return primitive


# What users' programs hold, and what one device runs.
primitives = {which: _make(f"lawson_attention_{which}", which) for which in PASSES}
calls = {which: _make(f"lawson_attention_{which}_call", which) for which in PASSES}


def forward(setup: Setup, *operands: Any) -> list[Any]:
    """Results in the order of `setup.forward_results()`."""
    return list(primitives["forward"].bind(*operands, setup=setup))


def backward(setup: Setup, *operands: Any) -> list[Any]:
    """Results in the order of `setup.backward_results()`, from `setup.backward_operands()`."""
    return list(primitives["backward"].bind(*operands, setup=setup))


def varying_alike(operands: Sequence[Any]) -> list[Any]:
    """The operands, inside shard_map all varying over the axes that any of them varies over.

    The transpose of this cast sums the gradient of a replicated operand over those axes.
    """
    over = [frozenset(jax.typeof(x).manual_axis_type.varying) for x in operands]
    every = frozenset().union(*over)
    return [
        jax.lax.pcast(x, tuple(sorted(every - mine)), to="varying") if every - mine else x
        for x, mine in zip(operands, over, strict=True)
    ]


def _lower(ctx: Any, *operands: Any, setup: Setup, which: str, platform: str) -> Sequence[Any]:
    device = device_of(setup.choice.target, platform)
    spec = spec_of(setup, ctx.avals_in)
    options = options_of(setup, platform, spec, device)
    if setup.training:
        judge(spec, device, options)  # both passes; before either runs
    plan = _core.attention_plan(spec, which, device, options)
    names = setup.operand_names(which)
    outs = setup.result_names(which)
    avals, values = list(ctx.avals_in), list(operands)
    for at, name in enumerate(names):
        if name in ("seed", "offset"):  # i64, which JAX has only with jax_enable_x64
            avals[at] = jax.core.ShapedArray((), np.dtype(np.int64))
            word = mlir.ir.RankedTensorType.get([], mlir.ir.IntegerType.get_signless(64))
            values[at] = stablehlo.bitcast_convert(word, values[at])
    aliases = {names.index(name): outs.index(name) for name in outs if name in names}
    workspace = _runtime.workspace_aval(plan)
    lower = jax.ffi.ffi_lowering(_runtime_target(which), operand_output_aliases=aliases)
    results = lower(
        ctx.replace(
            avals_in=avals,
            avals_out=[*ctx.avals_out, jax.core.ShapedArray(workspace.shape, workspace.dtype)],
        ),
        *values,
        **_runtime.attention_attributes(plan, spec, names, outs, options=options),
    )
    return list(results)[:-1]


def _runtime_target(which: str) -> str:
    return _runtime.FORWARD_TARGET if which == "forward" else _runtime.BACKWARD_TARGET


def _refuse_platform(ctx: Any, *operands: Any, setup: Setup, which: str) -> Any:
    del operands, setup
    platforms = ", ".join(ctx.module_context.platforms)
    raise UnsupportedError(
        f"attention ({which} pass): Lawson has engines for the platforms cuda and cpu, and this is "
        f"compiled for {platforms}"
    )


def register() -> None:
    """Gives the primitives their lowerings."""
    from lawson.jax import _attention_partition

    for which in PASSES:
        mlir.register_lowering(
            primitives[which],
            mlir.lower_fun(
                functools.partial(_attention_partition.split, which=which), multiple_results=True
            ),
        )
        mlir.register_lowering(calls[which], functools.partial(_refuse_platform, which=which))
        for platform in ("cuda", "cpu"):
            mlir.register_lowering(
                calls[which],
                functools.partial(_lower, which=which, platform=platform),
                platform=platform,
            )
