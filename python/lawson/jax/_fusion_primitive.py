"""The primitive of fusions: what JAX's transformations do with it, and what it becomes.

``fusion_p`` carries a ``Program``. ``vmap`` and differentiation bind it again with a program that is
derived from it. Lowering judges and builds the plan for the platform, and emits one call of Lawson's
XLA target with it (several for a gradient that is several kernels). In a program for several devices
that call is under ``custom_partitioning``: ``run_p`` is what one device runs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from lawson import _core, _settings
from lawson._errors import UnsupportedError
from lawson._graph.kernels import Kernel, build
from lawson._graph.shapes import operands_of, results_of, types_of
from lawson._graph.split import Glue, parts
from lawson._graph.values import numpy_dtype
from lawson.jax import _jax, _runtime
from lawson.jax._fusion_partition import Factors, factors_of, shard
from lawson.jax._fusion_program import Program, Settings

# ---- plans -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A graph as kernels, in the order in which they run; ``inputs`` and ``outputs`` are names."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parts: tuple[Kernel | Glue, ...]
    results: tuple[Any, ...]  # avals

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(p for p in self.parts if isinstance(p, Kernel))


def compiled(program: Program, platform: str, target: str | None = None) -> Compiled | None:
    """The kernels of a program; None where it computes nothing.

    ``target``: a device of the platform, in place of the settings'.
    Raises ``UnsupportedError`` (with every reason), ``UnavailableError``.
    """
    document = program.trace.document
    if document is None:
        return None
    return _compiled(program, document, platform, target)


def _compiled(
    program: Program, document: dict[str, Any], platform: str, target: str | None = None
) -> Compiled:
    """The kernels of the program's document, or of a shard of it."""
    # What the environment says is asked again when it changes.
    key = ("compiled", platform, target, _settings.said(), json.dumps(document))
    return program.once(key, lambda: _built(program, document, platform, target))


def _built(
    program: Program, document: dict[str, Any], platform: str, target: str | None
) -> Compiled:
    settings = program.settings
    if target is not None:
        settings = dataclasses.replace(settings, target=target)
    builds = functools.partial(kernel, program, settings, platform)
    made = parts(document, builds) if program.is_derived else [builds(document)]
    types = types_of(document)
    results = tuple(
        jax.ShapeDtypeStruct(types[n].shape, numpy_dtype(types[n].dtype))
        for n in document["outputs"]
    )
    return Compiled(
        program.name,
        tuple(item["name"] for item in document["inputs"]),
        tuple(document["outputs"]),
        tuple(made),
        results,
    )


def kernel(program: Program, settings: Settings, platform: str, document: dict[str, Any]) -> Kernel:
    """The plan of one graph on ``platform``, as the settings say."""
    with _settings.of_fusion(program.name):
        device, engines = place(settings, platform)
    wanted = program.trace.full_f32
    full_f32 = None if wanted is None else f"{wanted}: precision HIGHEST of f32 operands"
    return build(document, program.name, settings, device, engines, full_f32)


def place(settings: Settings, platform: str) -> tuple[_core.Device, list[str] | None]:
    """The device, and the engines that may run on it; None: as the environment says."""
    if settings.target is not None:
        device = _settings.target_on(platform, settings.target)
        if not device.is_present:
            if settings.engines is not None:
                _settings.engines_on(platform, settings.engines, settings.policy)
            return device, None
    else:
        device = _runtime.device_for(platform, settings.engines)
    here = list(_settings.engines_on(platform, settings.engines, settings.policy))
    # With policy "allow" the library's own default goes on to the CPU, where no array of a GPU is.
    return device, here or (["cudnn"] if platform == "cuda" else None)


# ---- what one device runs ----------------------------------------------------------------------

run_p = _jax.Primitive("lawson_fusion_run")
run_p.multiple_results = True
run_p.def_impl(functools.partial(_jax.apply_primitive, run_p))


def _run_abstract(*avals: Any, code: Compiled) -> list[Any]:
    return _jax.results_like([_jax.plain(r) for r in code.results], avals)


run_p.def_abstract_eval(_run_abstract)


def _lower_run(ctx: Any, *operands: Any, code: Compiled) -> list[Any]:
    values: dict[str, Any] = dict(zip(code.inputs, operands))
    for part in code.parts:
        inputs = [item["name"] for item in part.document["inputs"]]
        given = [values[n] for n in inputs]
        results = _call(ctx, part, given) if isinstance(part, Kernel) else _glue(ctx, part, given)
        values.update(zip(part.document["outputs"], results))
    return [values[n] for n in code.outputs]


def _glue(ctx: Any, part: Glue, operands: Sequence[Any]) -> list[Any]:
    """XLA's ops of what lies between two kernels."""
    document = part.document
    types = types_of(document)

    def function(*arrays: Any) -> list[Any]:
        values = dict(zip([item["name"] for item in document["inputs"]], arrays))
        for op in document["ops"]:
            (x,), (out,) = (values[n] for n in operands_of(op)), results_of(op)
            if op["op"] == "convert":
                values[out] = jax.lax.convert_element_type(x, numpy_dtype(op["dtype"]))
            elif op["op"] == "transpose":
                values[out] = jax.lax.transpose(x, op["perm"])
            else:
                values[out] = jax.lax.reshape(x, types[out].shape)
        return [values[n] for n in document["outputs"]]

    avals = [
        [jax.ShapeDtypeStruct(types[n].shape, numpy_dtype(types[n].dtype)) for n in names]
        for names in ([item["name"] for item in document["inputs"]], document["outputs"])
    ]
    return list(_jax.lower_function(_jax.plain_context(ctx, *avals), function, operands))


def _call(ctx: Any, item: Kernel, operands: Sequence[Any], **more: Any) -> list[Any]:
    types = types_of(item.document)
    avals = [
        [jax.ShapeDtypeStruct(types[n].shape, numpy_dtype(types[n].dtype)) for n in names]
        for names in (item.inputs, item.outputs)
    ]
    inner = _jax.plain_context(ctx, avals[0], [*avals[1], _runtime.workspace_aval(item.plan)])
    attributes = _runtime.plan_attributes(item.plan, item.graph, options=item.options)
    lower = jax.ffi.ffi_lowering(_runtime.PLAN_TARGET, has_side_effect=False, **more)
    return list(lower(inner, *operands, **attributes))[:-1]


for _platform in ("cpu", "cuda"):
    mlir.register_lowering(run_p, _lower_run, platform=_platform)


# ---- the primitive -----------------------------------------------------------------------------

fusion_p = _jax.Primitive("lawson_fusion")
fusion_p.multiple_results = True


def _impl(*operands: Any, program: Program) -> list[Any]:
    """An eager call: lowered once for what the environment says of engines."""
    call = program.once(
        ("eager", _settings.said()),
        lambda: jax.jit(lambda *xs: fusion_p.bind(*xs, program=program)),
    )
    return list(call(*operands))


fusion_p.def_impl(_impl)
_jax.needs_devices(fusion_p)


def _abstract(*avals: Any, program: Program) -> list[Any]:
    results = _jax.results_like(program.out_avals, avals)
    mesh = _jax.explicit_mesh(avals)
    return results if mesh is None else _typed(program, mesh, avals, results)


def _typed(program: Program, mesh: Any, avals: Sequence[Any], results: list[Any]) -> list[Any]:
    """On a mesh whose axes are explicit: the shardings of the results, which are part of their
    types, follow those of the operands."""
    trace = program.trace
    document = trace.document
    specs: dict[int, tuple[str, ...]] = {}
    if document is not None:
        factors = factors_of(document)
        given = [avals[i] for i in trace.operands]
        specs = _specs(mesh, factors, [i["name"] for i in document["inputs"]], given)
    out = []
    for output, aval in zip(trace.outputs, results):
        spec = PartitionSpec(*(None,) * aval.ndim)
        if output.kind == "argument":
            spec = avals[output.index].sharding.spec
        elif output.kind == "graph" and document is not None:
            spec = _spec(factors, specs, document["outputs"][output.index])
        out.append(aval.update(sharding=NamedSharding(mesh, spec)))
    return out


fusion_p.def_abstract_eval(_abstract)


def bind(program: Program, *operands: Any) -> list[Any]:
    """The results of a program for its flat arguments."""
    return list(fusion_p.bind(*_jax.vary_alike(operands), program=program))


def _lower(ctx: Any, *operands: Any, program: Program, platform: str) -> list[Any]:
    trace = program.trace
    code = compiled(program, platform)
    results: list[Any] = []
    if code is not None:
        used = [operands[i] for i in trace.operands]
        inner = _jax.plain_context(ctx, [program.in_avals[i] for i in trace.operands], code.results)
        if _jax.device_count(ctx) > 1:
            function = _partitioned(program, code, platform)
            results = list(_jax.lower_function(inner, function, used))
        elif program.settings.definition and len(code.kernels) == 1:
            plain = _jax.plain_context(ctx, program.in_avals, program.out_avals)
            defined = _jax.definition(plain, operands, program.name, program.jaxpr)
            results = _call(inner, code.kernels[0], used, called_computations=defined)
        else:
            results = _lower_run(inner, *used, code=code)
    out = []
    for output, aval in zip(trace.outputs, program.out_avals):
        if output.kind == "graph":
            out.append(results[output.index])
        elif output.kind == "argument":
            out.append(operands[output.index])
        else:
            assert output.constant is not None
            out.append(_jax.constant(output.constant.value, aval))
    return out


def _lower_elsewhere(ctx: Any, *operands: Any, program: Program) -> list[Any]:
    platforms = getattr(ctx.module_context, "platforms", None) or ("?",)
    with _settings.of_fusion(program.name):  # the error that says what is there
        _runtime.device_for(platforms[0], program.settings.engines)
    raise UnsupportedError(
        f"fusion '{program.name}': platform '{platforms[0]}': Lawson has no engine for it"
    )


for _platform in ("cpu", "cuda"):
    mlir.register_lowering(
        fusion_p, functools.partial(_lower, platform=_platform), platform=_platform
    )
mlir.register_lowering(fusion_p, _lower_elsewhere)


# ---- transformations ---------------------------------------------------------------------------


def _batch(args: Sequence[Any], dims: Sequence[Any], *, program: Program) -> Any:
    own = [None if d is None else int(d) for d in dims]
    size = next(a.shape[d] for a, d in zip(args, own) if d is not None)
    results = bind(program.batched(size, tuple(own)), *args)
    return results, [0 if d else None for d in program.depends(tuple(own))]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, program: Program) -> Any:
    results = bind(program, *primals)
    wrt = tuple(i for i, t in enumerate(tangents) if not _jax.is_zero(t))
    out: list[Any] = [_jax.zero_tangent(r) for r in results]
    if wrt and program.float_results:
        given = [tangents[i] for i in wrt]
        derived = bind(program.tangent(wrt), *primals, *given)
        for i, t in zip(program.float_results, derived):
            out[i] = t
    return results, out


def _transpose(cotangents: Sequence[Any], *args: Any, program: Program) -> list[Any]:
    count = len(args) - program.linear
    primals, linear = args[:count], args[count:]
    if any(ad.is_undefined_primal(p) for p in primals):
        raise UnsupportedError(
            f"unsupported: fusion '{program.name}': the transpose of a fusion itself "
            "(jax.linear_transpose)\n  nearest supported form: jax.vjp of it"
        )
    of = tuple(i for i, c in enumerate(cotangents) if not _jax.is_zero(c))
    found = [_jax.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in linear]
    if of:
        given = [cotangents[i] for i in of]
        back = bind(program.transposed(of), *primals, *given)
        found = [None if z is None else b for z, b in zip(found, back)]
    return [None] * count + found


batching.primitive_batchers[fusion_p] = _batch
ad.primitive_jvps[fusion_p] = _jvp
ad.primitive_transposes[fusion_p] = _transpose


# ---- several devices ---------------------------------------------------------------------------


def _partitioned(program: Program, code: Compiled, platform: str) -> Any:
    document = program.trace.document
    assert document is not None
    factors = factors_of(document)

    def one_device(*operands: Any) -> list[Any]:
        return list(run_p.bind(*operands, code=code))

    one_device.__name__ = program.name
    function = custom_partitioning(one_device)

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        names = (*code.inputs, *code.outputs)
        specs = _specs(mesh, factors, names, [*operands, *results])
        split = {f: _count(mesh, axes) for f, axes in specs.items()}
        local = shard(document, factors, split)
        part = _compiled(program, local, platform)
        shardings = [
            [NamedSharding(mesh, _spec(factors, specs, n)) for n in names]
            for names in (code.inputs, code.outputs)
        ]

        def one_of_them(*operands: Any) -> list[Any]:
            results = list(run_p.bind(*operands, code=part))
            for i, name in enumerate(code.outputs):
                summed = sorted(factors.partial.get(name, ()) & specs.keys())
                if summed:
                    results[i] = jax.lax.psum(results[i], [a for f in summed for a in specs[f]])
            return results

        return mesh, one_of_them, shardings[1], tuple(shardings[0])

    def infer(mesh: Any, operands: Any, results: Any) -> Any:
        # GSPMD ends the process when this raises; partition gives the reason.
        try:
            specs = _specs(mesh, factors, code.inputs, operands)
            return [NamedSharding(mesh, _spec(factors, specs, n)) for n in code.outputs]
        except Exception:
            return [NamedSharding(mesh, PartitionSpec()) for _ in code.outputs]

    function.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=_rule(factors, code),
    )
    return function


def _rule(factors: Factors, code: Compiled) -> SdyShardingRule:
    """The factors as Shardy's rule: what cannot be split has a factor of its own."""
    alone: list[str] = []

    def mapping(name: str) -> ArrayMapping:
        labels = []
        for factor in factors.of(name):
            if factor is None:
                alone.append(f"whole{len(alone)}")
            labels.append(alone[-1] if factor is None else f"f{factor}")
        return ArrayMapping(*labels)

    operands = tuple(mapping(n) for n in code.inputs)
    results = tuple(mapping(n) for n in code.outputs)
    return SdyShardingRule(operands, results, need_replication_factors=tuple(alone))


def _specs(
    mesh: Any, factors: Factors, names: Sequence[str], tensors: Sequence[Any]
) -> dict[int, tuple[str, ...]]:
    """The mesh axes that split each factor: those of the first tensor that says so."""
    chosen: dict[int, tuple[str, ...]] = {}
    taken: set[str] = set()
    for name, info in zip(names, tensors):
        spec = tuple(getattr(info.sharding, "spec", None) or ())
        for factor, axes in zip(factors.of(name), spec):
            if factor is None or axes is None or factor in chosen:
                continue
            axes = axes if isinstance(axes, tuple) else (axes,)
            if axes and not taken & set(axes) and factors.sizes[factor] % _count(mesh, axes) == 0:
                chosen[factor] = axes
                taken.update(axes)
    return chosen


def _count(mesh: Any, axes: Sequence[str]) -> int:
    count = 1
    for axis in axes:
        count *= mesh.shape[axis]
    return count


def _spec(factors: Factors, specs: Mapping[int, tuple[str, ...]], name: str) -> PartitionSpec:
    return PartitionSpec(*(None if f is None else specs.get(f) for f in factors.of(name)))
