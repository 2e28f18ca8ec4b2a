"""A marked computation, and those that are derived from it: batched, differentiated, transposed.

A ``Program`` is the one parameter of the primitive. It is what JAX says the function is (a jaxpr
without consts); its graph is made when it is first needed. Derived programs are made once.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from lawson._graph import kernels
from lawson._graph.gradient import gradient_trace
from lawson._graph.tidy import tidied
from lawson._graph.walk import Trace
from lawson.jax import _jax
from lawson.jax._trace import trace

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Settings(kernels.Settings):
    """The arguments of ``fusion``, checked."""

    definition: bool = False


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a program is the derivative of: of ``forward``'s results ``of``, by the arguments
    ``wrt``."""

    forward: Program
    wrt: tuple[int, ...]
    of: tuple[int, ...]


class Program:
    """A function of flat arrays. Compared by identity; safe to share between threads.

    ``linear``: in so many of its last arguments it is linear, and can be transposed.
    ``tangent_of``, ``gradient_of``: the program that it is the tangent or the gradient of.
    """

    def __init__(
        self,
        jaxpr: Any,
        name: str,
        labels: Sequence[str],
        settings: Settings,
        *,
        linear: int = 0,
        tangent_of: Origin | None = None,
        gradient_of: Origin | None = None,
        is_derived: bool = False,
    ) -> None:
        self.jaxpr = jaxpr
        self.name = name
        self.labels = tuple(labels)
        self.settings = settings
        self.linear = linear
        self.tangent_of = tangent_of
        self.gradient_of = gradient_of
        self.is_derived = is_derived
        self._lock = threading.RLock()
        self._once: dict[Hashable, Any] = {}

    def __repr__(self) -> str:
        return self.name

    @property
    def in_avals(self) -> list[Any]:
        return [_jax.plain(a) for a in self.jaxpr.in_avals]

    @property
    def out_avals(self) -> list[Any]:
        return [_jax.plain(a) for a in self.jaxpr.out_avals]

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """``make()``, the first time that it is asked for under this key."""
        with self._lock:
            if key not in self._once:
                self._once[key] = make()
            return cast(T, self._once[key])

    def call(self, *args: Any) -> list[Any]:
        """The function as JAX defines it, for tracing."""
        return list(_jax.jaxpr_as_function(self.jaxpr)(*args))

    # ---- the graph ---------------------------------------------------------------------------

    @property
    def trace(self) -> Trace:
        """Its graph. Raises ``UnsupportedError`` where an op is outside the set."""
        return self.once("trace", self._trace)

    def _trace(self) -> Trace:
        if self.gradient_of is not None:
            origin = self.gradient_of
            forward, count = origin.forward.trace, len(origin.forward.labels)
            derived = gradient_trace(forward, count, origin.wrt, origin.of, self.name)
            if derived is not None:
                return derived
        found = trace(self.jaxpr, self.name, self.labels, strict=self.settings.strict)
        if self.is_derived and found.document is not None:
            found = dataclasses.replace(found, document=tidied(found.document))
        return found

    # ---- derived programs --------------------------------------------------------------------

    def batched(self, size: int, dims: tuple[int | None, ...]) -> Program:
        """Over a further dim, at ``dims[i]`` of argument i; first in every result that depends on
        an argument that has it (``depends``)."""
        return self.once(("batched", size, dims), lambda: self._batched(size, dims))

    def _batched(self, size: int, dims: tuple[int | None, ...]) -> Program:
        def larger(aval: Any, dim: int | None) -> Any:
            shape = list(aval.shape)
            if dim is not None:
                shape.insert(dim, size)
            return _jax.plain(jax.ShapeDtypeStruct(tuple(shape), aval.dtype)).update(
                weak_type=aval.weak_type
            )

        out_axes = [0 if d else None for d in self.depends(dims)]
        function = jax.vmap(self.call, in_axes=dims, out_axes=out_axes, axis_size=size)
        avals = [larger(a, d) for a, d in zip(self.in_avals, dims)]
        origin = self.gradient_of
        if origin is not None:
            first = len(origin.forward.labels)
            # A gradient by what is not batched is per element all the same, and the graph of the
            # batched forward would add them up.
            mapped = [d for i, d in enumerate(dims) if i >= first or i in origin.wrt]
            if all(d == 0 for d in mapped) and all(self.depends(dims)):
                forward = origin.forward.batched(size, dims[:first])
                origin = dataclasses.replace(origin, forward=forward)
            else:
                origin = None
        return self._derived(function, avals, self.labels, linear=self.linear, gradient_of=origin)

    def depends(self, dims: tuple[int | None, ...]) -> list[bool]:
        """Of each result: whether it depends on an argument whose entry is not None."""
        inner, _ = _jax.open_jaxpr(self.jaxpr)
        batched = {v for v, d in zip(inner.invars, dims) if d is not None}
        for eqn in inner.eqns:
            if any(not _jax.is_literal(v) and v in batched for v in eqn.invars):
                batched.update(eqn.outvars)
        return [not _jax.is_literal(v) and v in batched for v in inner.outvars]

    def tangent(self, wrt: tuple[int, ...]) -> Program:
        """From arguments and tangents of the arguments ``wrt`` to tangents of the float results."""
        return self.once(("tangent", wrt), lambda: self._tangent(wrt))

    def _tangent(self, wrt: tuple[int, ...]) -> Program:
        count = len(self.labels)

        def function(*args: Any) -> list[Any]:
            primals, tangents = args[:count], args[count:]
            _, out = jax.jvp(self._of(primals, wrt), tuple(primals[i] for i in wrt), tangents)
            return [out[i] for i in self.float_results]

        avals = [*self.in_avals, *(self.in_avals[i] for i in wrt)]
        labels = [*self.labels, *(f"t_{self.labels[i]}" for i in wrt)]
        return self._derived(
            function,
            avals,
            labels,
            linear=len(wrt),
            suffix="jvp",
            tangent_of=Origin(self, wrt, tuple(self.float_results)),
        )

    def transposed(self, of: tuple[int, ...]) -> Program:
        """Of a linear program: from its other arguments and the cotangents of its results ``of`` to
        cotangents of the linear arguments."""
        return self.once(("transposed", of), lambda: self._transposed(of))

    def _transposed(self, of: tuple[int, ...]) -> Program:
        count = len(self.labels) - self.linear
        origin = self.tangent_of
        labels = list(self.labels[:count])
        cotangents = [self.out_avals[i] for i in of]
        if origin is not None:  # the tangent of `forward`: go back through `forward` itself
            forward, wrt = origin.forward, origin.wrt
            results = tuple(origin.of[i] for i in of)
            origin = dataclasses.replace(origin, of=results)

            def function(*args: Any) -> Any:
                primals, given = args[:count], args[count:]
                _, back = jax.vjp(
                    lambda *xs: [forward._of(primals, wrt)(*xs)[i] for i in results],
                    *(primals[i] for i in wrt),
                )
                return list(back(list(given)))

        else:
            linear = self.in_avals[count:]

            def function(*args: Any) -> Any:
                fixed, given = args[:count], args[count:]
                _, back = jax.vjp(
                    lambda *xs: [self.call(*fixed, *xs)[i] for i in of],
                    *(jnp.zeros(a.shape, a.dtype) for a in linear),
                )
                return list(back(list(given)))

        labels += [f"d_result{i}" for i in of]
        return self._derived(
            function,
            [*self.in_avals[:count], *cotangents],
            labels,
            suffix="backward",
            gradient_of=origin,
        )

    @property
    def float_results(self) -> list[int]:
        return [i for i, a in enumerate(self.out_avals) if jnp.issubdtype(a.dtype, jnp.floating)]

    def _of(self, primals: Sequence[Any], wrt: Sequence[int]) -> Callable[..., Any]:
        def function(*changed: Any) -> list[Any]:
            args = list(primals)
            for i, x in zip(wrt, changed):
                args[i] = x
            return self.call(*args)

        return function

    def _derived(
        self,
        function: Callable[..., Any],
        avals: Sequence[Any],
        labels: Sequence[str],
        *,
        linear: int = 0,
        suffix: str = "",
        tangent_of: Origin | None = None,
        gradient_of: Origin | None = None,
    ) -> Program:
        stem = self.name.removesuffix(".jvp") if suffix == "backward" else self.name
        name = f"{stem}.{suffix}" if suffix else stem
        jaxpr, _ = traced(function, avals)
        return Program(
            jaxpr,
            name,
            labels,
            self.settings,
            linear=linear,
            tangent_of=tangent_of,
            gradient_of=gradient_of,
            is_derived=self.is_derived or bool(suffix),
        )


def traced(function: Callable[..., Any], avals: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The jaxpr of a function of flat arrays, and the arrays that it closes over.

    These are the jaxpr's first arguments; single numbers of NumPy's stay inside.
    """
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    with _jax.outside_of_meshes():
        jaxpr = jax.make_jaxpr(function)(*specs)
    inner, consts = _jax.open_jaxpr(jaxpr)
    lifted = [c for c in consts if not (isinstance(c, (np.ndarray, np.generic)) and c.size == 1)]
    if not lifted:
        return jaxpr, []
    kinds = [any(c is x for x in lifted) for c in consts]

    def with_arrays(*args: Any) -> list[Any]:
        arrays = iter(args[: len(lifted)])
        values = [next(arrays) if is_lifted else c for c, is_lifted in zip(consts, kinds)]
        return list(_jax.eval_jaxpr(inner, values, *args[len(lifted) :]))

    known = [_jax.plain(jax.typeof(c)) for c in lifted]
    again, more = traced(with_arrays, [*known, *avals])
    assert not more
    return again, lifted
