"""``fusion``: a marked function becomes one kernel, in every way that JAX calls it, or an error."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect as _inspect
import re
import sys
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Never

import jax
import jax.export
import numpy as np

from lawson import _settings
from lawson._errors import InvalidArgumentError, UnsupportedError
from lawson._inspection import AttentionInspection, Inspection
from lawson.jax import _jax, _runtime
from lawson.jax._attention_inspect import inspect_attention, is_attention
from lawson.jax._fusion_primitive import bind, compiled
from lawson.jax._fusion_program import Program, Settings, traced
from lawson.jax._trace_refusals import refused

_KEPT = 256  # signatures of one fusion

# What `jax.export.export(..., disabled_checks=export_checks)` needs: the targets of Lawson's calls,
# whose attributes are read by all later versions of the library.
export_checks = [
    jax.export.DisabledSafetyCheck.custom_call(target)
    for target in (_runtime.PLAN_TARGET, _runtime.FORWARD_TARGET, _runtime.BACKWARD_TARGET)
]


@dataclasses.dataclass(frozen=True)
class _Traced:
    program: Program
    arrays: tuple[Any, ...]  # that the function closes over: its program's first operands
    out_tree: Any


class Fusion:
    """A marked function. Call it like the function; see ``fusion``."""

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        _settings.marked(function)
        self._function = function
        self._parameters = _parameters(function)
        self._settings = settings
        self._lock = threading.Lock()
        self._traced: collections.OrderedDict[Hashable, _Traced] = collections.OrderedDict()
        functools.update_wrapper(self, _innermost(function), updated=())
        self.__wrapped__ = function
        self.__name__ = name_of(function)

    def __repr__(self) -> str:
        return f"<lawson fusion '{self.__name__}'>"

    def __reduce__(self) -> Any:
        """As a function is pickled: by its name where that is it, else what it was made of."""
        found: Any = sys.modules.get(self.__module__)
        name = getattr(self, "__qualname__", "")
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (Fusion, (self._function, self._settings))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made, operands = self.trace(args, kwargs)
        results = bind(made.program, *operands) if made.program.out_avals else []
        return jax.tree.unflatten(made.out_tree, results)

    def trace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[_Traced, list[Any]]:
        """The program for these arguments, and its operands."""
        leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
        paths = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
        labels = [self._label(path) for path, _ in paths]
        fixed: dict[int, Any] = {}
        operands, avals, names = [], [], []
        for i, (leaf, label, (path, _)) in enumerate(zip(leaves, labels, paths)):
            is_keyword = path[0].idx == 1
            if is_array(leaf) or (not is_keyword and isinstance(leaf, (bool, int, float))):
                operands.append(leaf)
                avals.append(_jax.plain(jax.typeof(leaf)))
                names.append(label)
            elif is_keyword:
                fixed[i] = leaf
            else:
                raise InvalidArgumentError(
                    f"fusion '{self.__name__}': argument {label} is {type(leaf).__name__}, which is "
                    "no array; a setting of the function is given as keyword, or bound with "
                    "functools.partial"
                )
        made = self._program(tree, fixed, avals, names)
        return made, [*made.arrays, *operands]

    def _program(
        self, tree: Any, fixed: dict[int, Any], avals: list[Any], names: list[str]
    ) -> _Traced:
        known = tuple((i, _settings.exact(value)) for i, value in fixed.items())
        key: Hashable = (tree, known, tuple(avals), _jax.trace_context())
        try:
            hash(key)
        except TypeError as error:
            paths = jax.tree_util.tree_flatten_with_path(
                jax.tree.unflatten(tree, range(tree.num_leaves))
            )[0]
            label = next((self._label(paths[i][0]) for i, v in fixed.items() if not _hashes(v)), "")
            raise InvalidArgumentError(
                f"fusion '{self.__name__}': keywords that are no arrays must be hashable: "
                f"'{label}': {error}"
            ) from error
        with self._lock:
            found = self._traced.get(key)
            if found is not None:
                self._traced.move_to_end(key)
                return found
        made = self._trace(tree, fixed, avals, names)
        if any(_jax.is_tracer(a) for a in made.arrays):
            return made  # of an outer trace, which ends
        with self._lock:
            made = self._traced.setdefault(key, made)
            while len(self._traced) > _KEPT:
                self._traced.popitem(last=False)
        return made

    def _trace(
        self, tree: Any, fixed: dict[int, Any], avals: list[Any], names: list[str]
    ) -> _Traced:
        out_tree: Any = None

        def flat(*operands: Any) -> list[Any]:
            nonlocal out_tree
            given = iter(operands)
            count = len(operands) + len(fixed)
            leaves = [fixed[i] if i in fixed else next(given) for i in range(count)]
            args, kwargs = jax.tree.unflatten(tree, leaves)
            try:
                given_back = self._function(*args, **kwargs)
            except Exception as error:
                said = refused(error, self.__name__)
                if said is None:
                    raise
                raise said from None
            results, out_tree = jax.tree.flatten(given_back)
            self._check_results(given_back)
            return results

        jaxpr, arrays = traced(flat, avals)
        labels = [f"captured{i}" for i in range(len(arrays))] + names
        program = Program(jaxpr, self.__name__, labels, self._settings)
        if program.out_avals:
            _ = program.trace  # ops outside of the set are refused where the function is called
        return _Traced(program, tuple(arrays), out_tree)

    def _check_results(self, results: Any) -> None:
        for path, leaf in jax.tree_util.tree_flatten_with_path(results)[0]:
            is_number = isinstance(leaf, (bool, int, float, complex))
            if not is_array(leaf) and not is_number and not hasattr(leaf, "__jax_array__"):
                where = f"result {jax.tree_util.keystr(path)}" if path else "it"
                raise UnsupportedError(
                    f"unsupported: fusion '{self.__name__}': a result is no array: {where} is "
                    f"{_settings.shown(leaf)} ({type(leaf).__name__})\n"
                    "  nearest supported form: results that are arrays, in tuples, lists, dicts, "
                    "and in classes that jax.tree_util knows"
                )

    def _label(self, path: Sequence[Any]) -> str:
        """``x``, ``params.w``: the parameter of the function, and the way to the leaf."""
        group, first, *rest = path
        if group.idx == 0:
            names = self._parameters
            name = names[first.idx] if first.idx < len(names) else f"x{first.idx}"
        else:
            name = str(first.key)
        return re.sub(r"[^\w.]+", ".", name + jax.tree_util.keystr(tuple(rest))).strip(".")[:200]


def fusion(
    function: Callable[..., Any] | None = None,
    *,
    policy: str | None = None,
    tuning: str = "off",
    engines: Sequence[str] | str | None = None,
    target: str | None = None,
    deterministic: bool = False,
    workspace_limit: int | None = None,
    deadline_ms: float = 0.0,
    strict: bool = False,
    definition: bool = False,
    **unknown: Never,
) -> Any:
    """Marks a function: it becomes one kernel, or an error that says why not.

    ``@fusion`` and ``@fusion(engines=["cpu"])`` both work. Positional arguments are pytrees of
    arrays and numbers; keywords that are no arrays are settings of the function, and hashable.
    Like ``jit``, the function is traced once for each signature. Its gradient is Lawson's too: as
    few kernels as the engine takes, under the same policy.

    Args:
      function: of arrays and pytrees of arrays; all of ``docs/jax.md``'s ops.
      policy: "require": one engine builds it, or it is an error. "allow": ``engines`` in order, of
        those that run on the platform. None: LAWSON_POLICY of the environment, else "require".
      tuning: "off", "quick" or "exhaustive": docs/fusion.md.
      engines: names, or one: "cudnn", "cpu", "reference". None: LAWSON_ENGINE of the environment,
        else "cudnn". The CPU is used only when it is named here or there.
      target: a GPU that need not be here ("h200"): the program that is lowered, or exported, has
        the plan for it.
      deterministic: the same bits every time.
      workspace_limit: bytes; None: no limit.
      deadline_ms: for building and tuning; 0: none.
      strict: intermediate results are rounded exactly as written; otherwise an engine may keep more
        bits.
      definition: the lowered call also carries the function as StableHLO, as its called
        computation. For reading; XLA spends time on compiling it.

    Raises:
      UnsupportedError: where it is called: an op outside the set, or what depends on values, with
        the line of code. When it is lowered: it does not fuse, with every reason and the nearest supported form; a platform
        without the engine, with how to name another one.
      UnavailableError: no GPU, or no cuDNN.
      InvalidArgumentError: a value that a setting does not take, an argument that is no array, or
        operands that do not fit, with the line of code.
      TypeError: no function, or a setting that there is none of.
    """
    _settings.known(fusion, unknown)
    settings = Settings(
        policy=_settings.policy(policy),
        tuning=_settings.tuning(tuning),
        engines=_settings.engines(engines),
        target=_settings.target(target),
        deterministic=_settings.flag("deterministic", deterministic),
        workspace_limit=_settings.workspace_limit(workspace_limit),
        deadline_ms=_settings.deadline_ms(deadline_ms),
        strict=_settings.flag("strict", strict),
        definition=_settings.flag("definition", definition),
    )
    if function is None:
        return lambda f: Fusion(f, settings)
    return Fusion(function, settings)


def cudnn_fusion(function: Callable[..., Any] | None = None, **unknown: Never) -> Any:
    """A drop-in for JAX's internal decorator of this name: one cuDNN kernel, or an error.

    ``fusion(function, definition=True)``: the lowered module has the function's StableHLO as the
    called computation, as that decorator's has. (LAWSON_ENGINE of the environment may name another
    engine; nothing else does.)
    """
    if function is None or unknown:
        given = ", ".join(f"{name}=" for name in unknown) or "nothing"
        raise TypeError(
            f"cudnn_fusion takes the function and no settings, here {given}; "
            'lawson.jax.fusion takes settings: @fusion(engines=["cpu"])'
        )
    return fusion(function, definition=True)


def _hashes(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def is_array(leaf: Any) -> bool:
    """An array, a tracer of one, or a number of NumPy's."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic)) or _jax.is_tracer(leaf)


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def name_of(function: Any) -> str:
    """Of a function, of what a ``functools.partial`` binds, or of the class of a callable."""
    function = _innermost(function)
    name = getattr(function, "__name__", None) or type(function).__name__
    return re.sub(r"\W+", "_", str(name)).strip("_") or "fusion"


def _parameters(function: Any) -> tuple[str, ...]:
    kinds = (_inspect.Parameter.POSITIONAL_ONLY, _inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = _inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in kinds)


# ---- inspection --------------------------------------------------------------------------------


def inspect(
    function: Callable[..., Any], *, platform: str | None = None, target: str | None = None
) -> Callable[..., Any]:
    """``inspect(f)(*args)``: what runs for these arguments (arrays, or ``jax.ShapeDtypeStruct``).

    Of a fusion: its ``Inspection``, the very plan that a call runs. Of any other function, such as
    ``jax.grad`` of one that calls fusions: a tuple of one ``Inspection`` for each fusion, and one
    ``AttentionInspection`` for each pass of an attention, in the order of the program.

    Args:
      function: a fusion, or a function that calls fusions or attention.
      platform: "cuda" or "cpu"; None: that of the target, or where JAX would run it.
      target: what it would run on another device, such as "h200", which need not be here; in place
        of the targets that fusions and attentions name. None: those, or the platform's own.

    Raises what lowering raises.
    """

    if platform is not None and not isinstance(platform, str):
        _settings.refuse("platform", platform, "None, 'cuda' or 'cpu'")
    target = _settings.target(target)

    @functools.wraps(_innermost(function), updated=())
    def inspected(*args: Any, **kwargs: Any) -> Any:
        usual = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
        found: list[Inspection | AttentionInspection] = []
        jaxpr = jax.make_jaxpr(functools.partial(function, **kwargs))(*args)
        for eqn in calls_in(jaxpr):
            own = target or target_of(eqn)
            where = platform or (usual if own is None else _settings.platform_of(own))
            if is_attention(eqn):
                found.append(inspect_attention(eqn, where, own))
                continue
            program = eqn.params["program"]
            code = compiled(program, where, own)
            kernels = () if code is None else code.kernels
            found.append(Inspection(program.name, where, kernels))
        return found[0] if isinstance(function, Fusion) and found else tuple(found)

    return inspected


def target_of(eqn: Any) -> str | None:
    """What the fusion or attention of an equation names."""
    attention = eqn.params.get("setup")
    settings = eqn.params["program"].settings if attention is None else attention.choice
    return settings.target  # type: ignore[no-any-return]


def calls_in(jaxpr: Any) -> Iterator[Any]:
    """The equations of every fusion and attention in a jaxpr and in what it calls."""
    for eqn in _jax.open_jaxpr(jaxpr)[0].eqns:
        if isinstance(eqn.params.get("program"), Program) or is_attention(eqn):
            yield eqn
            continue
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if _jax.is_jaxpr(item):
                    yield from calls_in(item)
