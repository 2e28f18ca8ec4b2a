"""What a trace is made of: values, constants, and the emitter that writes ops of a graph document.

A value may be *stored* smaller than it is: ``broadcast_in_dim`` costs nothing until somebody needs
the elements, because pointwise ops and the batch dims of ``matmul`` broadcast by themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

Shape = tuple[int, ...]

_DTYPES: dict[np.dtype, str] = {
    np.dtype(np.float64): "f64",
    np.dtype(np.float32): "f32",
    np.dtype(np.float16): "f16",
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype(ml_dtypes.float8_e4m3fn): "f8e4m3",
    np.dtype(ml_dtypes.float8_e5m2): "f8e5m2",
    np.dtype(ml_dtypes.float8_e8m0fnu): "f8e8m0",
    np.dtype(ml_dtypes.float4_e2m1fn): "f4e2m1",
    np.dtype(np.int64): "i64",
    np.dtype(np.int32): "i32",
    np.dtype(np.int8): "i8",
    np.dtype(np.uint8): "u8",
    np.dtype(ml_dtypes.int4): "i4",
    np.dtype(np.bool_): "bool",
}
_NUMPY = {name: dtype for dtype, name in _DTYPES.items()}
_LIMITS = {"i64": 63, "i32": 31, "i8": 7, "i4": 3}

# Ops that compute each element from the elements at the same place.
_NAMES = """
convert add sub mul div pow min max mod neg abs exp log log1p expm1 sqrt rsqrt reciprocal sin cos tan
tanh erf ceil floor round sign sigmoid relu leaky_relu relu6 elu softplus silu gelu gelu_tanh
compare_eq compare_ne compare_lt compare_le compare_gt compare_ge and or not select clamp
"""
POINTWISE = frozenset(_NAMES.split())


def dtype_name(dtype: Any) -> str | None:
    """Lawson's name of a NumPy or JAX dtype; None where it has none (complex, u32, ...)."""
    try:
        return _DTYPES.get(np.dtype(dtype))
    except TypeError:  # keys, tokens
        return None


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of Lawson's ``name``."""
    return _NUMPY[name]


def is_float(dtype: str) -> bool:
    return dtype.startswith(("f", "bf"))


def integer_bounds(dtype: str) -> tuple[int, int]:
    """The smallest and the largest integer of an integer dtype (or bool)."""
    if dtype == "bool":
        return 0, 1
    if dtype == "u8":
        return 0, 255
    return -(1 << _LIMITS[dtype]), (1 << _LIMITS[dtype]) - 1


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor of the graph. ``stored`` broadcasts to ``shape`` by NumPy's rule.

    ``integral``: a float that holds integers only. ``bounds``: of an integer, where known to be
    tighter than its dtype's.
    """

    name: str
    dtype: str
    shape: Shape
    stored: Shape
    integral: bool = False
    bounds: tuple[int, int] | None = None

    def range(self) -> tuple[int, int]:
        return self.bounds or integer_bounds(self.dtype)


@dataclasses.dataclass(frozen=True)
class Const:
    """The same known number everywhere; it becomes an op only where something reads it."""

    value: Any  # a NumPy scalar of `dtype`
    dtype: str
    shape: Shape = ()

    @property
    def number(self) -> float:
        return float(self.value)

    def range(self) -> tuple[int, int]:
        return int(self.value), int(self.value)


Operand = Value | Const


def const(value: Any, dtype: str, shape: Shape = ()) -> Const:
    with np.errstate(all="ignore"):
        return Const(np.asarray(value).astype(numpy_dtype(dtype))[()], dtype, tuple(shape))


def squeezed(shape: Iterable[int]) -> Shape:
    return tuple(n for n in shape if n != 1)


@dataclasses.dataclass(frozen=True)
class Made:
    """How a value came to be."""

    op: str
    operands: tuple[Operand, ...]
    attributes: dict[str, Any]
    source: str


class Emitter:
    """Writes a document op by op. Equal ops are written once; ``source`` is where they come from."""

    def __init__(self) -> None:
        self.inputs: list[dict[str, Any]] = []
        self.ops: list[dict[str, Any]] = []
        self.source = ""
        self._made: dict[str, Made] = {}
        self._written: dict[Any, str] = {}
        self._names: set[str] = set()

    # ---- names -------------------------------------------------------------------------------

    def reserve(self, name: str) -> str:
        """``name``, or one like it that is still free."""
        free, n = name, 1
        while free in self._names:
            n += 1
            free = f"{name}_{n}"
        self._names.add(free)
        return free

    def input(self, name: str, dtype: str, shape: Shape) -> Value:
        name = self.reserve(name)
        self.inputs.append({"name": name, "dtype": dtype, "shape": list(shape)})
        return Value(name, dtype, shape, shape)

    def made(self, value: Operand) -> Made | None:
        return self._made.get(value.name) if isinstance(value, Value) else None

    # ---- ops ---------------------------------------------------------------------------------

    def emit(
        self,
        op: str,
        operands: Sequence[Operand],
        dtype: str,
        stored: Shape,
        shape: Shape | None = None,
        **attributes: Any,
    ) -> Value:
        """One op over the stored operands; constants among them are written as rank-0 tensors.

        The attribute `shape` of an op is `to` here.
        """
        names = [self.constant(x) if isinstance(x, Const) else x.name for x in operands]
        attributes = {  # NumPy's integers are none of JSON's
            k: [int(n) for n in v] if isinstance(v, list) else v for k, v in attributes.items()
        }
        key = (op, tuple(names), dtype, stored, repr(sorted(attributes.items())))
        name = self._written.get(key)
        if name is None:
            name = self.reserve(f"t{len(self.ops) + 1}")
            item = {"op": op, "in": names, "out": name, "dtype": dtype, **attributes}
            if self.source:
                item["source"] = self.source
            self.ops.append(item)
            self._written[key] = name
            self._made[name] = Made(op, tuple(operands), attributes, self.source)
        return Value(name, dtype, stored if shape is None else shape, stored)

    def constant(self, x: Const) -> str:
        """The rank-0 tensor of a constant.

        JSON has no infinities: one of f32 or narrower is a number that rounds to it; of f64, and
        NaN, a logarithm.
        """
        number = x.number
        if np.isfinite(number):
            if not is_float(x.dtype) and int(number) != int(x.value):
                raise OverflowError(f"the integer constant {x.value} is not a float64")
            return self.emit("constant", (), x.dtype, (), value=number).name
        if np.isnan(number):
            minus_one = Const(numpy_dtype(x.dtype).type(-1), x.dtype)
            return self.emit("log", (minus_one,), x.dtype, ()).name
        if x.dtype == "f64":
            log = self.emit("log", (Const(np.float64(0), "f64"),), "f64", ())
            return log.name if number < 0 else self.emit("neg", (log,), "f64", ()).name
        return self.emit("constant", (), x.dtype, (), value=float(np.copysign(1e308, number))).name

    def pointwise(
        self, op: str, operands: Sequence[Operand], dtype: str, **attributes: Any
    ) -> Value:
        """A pointwise op; its result is stored only as large as its operands are."""
        folded = self._folded(operands)
        if folded is not None:
            shape, narrow, matrix = folded
            out = self.emit(op, narrow, dtype, matrix, **attributes)
            return self._stored_as(out, shape, shape)
        shape = np.broadcast_shapes(*(x.shape for x in operands))
        stored = np.broadcast_shapes(*(x.stored for x in operands if isinstance(x, Value)), ())
        return self.emit(op, operands, dtype, stored, shape, **attributes)

    def convert(self, x: Value, dtype: str) -> Value:
        return x if x.dtype == dtype else self.pointwise("convert", (x,), dtype)

    def unfolded(self, x: Operand) -> Value | None:
        """The computed value that ``x`` is a reshape of: kernels go on with the shape of a product,
        and rearrange its elements only on their way out. None where it is no such value."""
        made = self.made(x)
        if made is None or made.op != "reshape" or not isinstance(x, Value) or x.stored != x.shape:
            return None
        (base,) = made.operands
        assert isinstance(base, Value)
        return None if self.is_view(base) else dataclasses.replace(base, shape=base.stored)

    def is_view(self, x: Value) -> bool:
        """An input, or a view of one."""
        made = self.made(x)
        while made is not None and made.op in ("reshape", "transpose", "slice"):
            (x,) = (o for o in made.operands if isinstance(o, Value))
            made = self.made(x)
        return made is None

    def _folded(self, operands: Sequence[Operand]) -> tuple[Shape, list[Operand], Shape] | None:
        """Pointwise operands in the shape that one of them was computed in, where they all can be:
        their common shape, themselves, that shape."""
        bases = [b for b in map(self.unfolded, operands) if b is not None]
        shape = np.broadcast_shapes(*(x.shape for x in operands))
        if not bases or np.prod(shape, dtype=np.int64) != np.prod(bases[0].stored, dtype=np.int64):
            return None
        matrix = bases[0].stored
        same = 0  # trailing dims that are the same in both shapes
        while same < min(len(shape), len(matrix)) and shape[-1 - same] == matrix[-1 - same]:
            same += 1
        narrow: list[Operand] = []
        for x in operands:
            base = self.unfolded(x)
            if isinstance(x, Const) or not x.stored:
                narrow.append(dataclasses.replace(x, shape=()))
            elif base is not None and base.stored == matrix:
                narrow.append(base)
            elif all(n == 1 for n in x.stored[: len(x.stored) - same]):
                short = x.stored[max(len(x.stored) - same, 0) :]
                narrow.append(self._stored_as(x, short, short))
            elif x.stored == shape and self.is_view(x):
                narrow.append(self._stored_as(x, matrix, matrix))
            else:
                return None
        return shape, narrow, matrix

    # ---- views -------------------------------------------------------------------------------

    def whole(self, x: Operand) -> Value:
        """With every element stored."""
        if isinstance(x, Const):
            x = Value(self.constant(x), x.dtype, x.shape, ())
        if x.stored == x.shape:
            return x
        return dataclasses.replace(
            x,
            name=self.emit("broadcast", (x,), x.dtype, x.shape, to=list(x.shape)).name,
            stored=x.shape,
        )

    def aligned(self, x: Value) -> Value:
        """Stored with as many dims as it has."""
        if len(x.stored) == len(x.shape):
            return x
        stored = (1,) * (len(x.shape) - len(x.stored)) + x.stored
        return self._stored_as(x, stored, x.shape)

    def _stored_as(self, x: Value, stored: Shape, shape: Shape) -> Value:
        """Another shape for the stored elements, in the order that they have."""
        if stored == x.stored:
            return dataclasses.replace(x, shape=shape)
        base, made = x, self.made(x)
        while made is not None and made.op == "reshape":
            (base,) = (o for o in made.operands if isinstance(o, Value))
            made = self.made(base)
        name = base.name
        if base.stored != stored:
            name = self.emit("reshape", (base,), x.dtype, stored, to=list(stored)).name
        return dataclasses.replace(x, name=name, stored=stored, shape=shape)

    def reshape(self, x: Operand, shape: Shape) -> Operand:
        if isinstance(x, Const):
            return dataclasses.replace(x, shape=shape)
        if x.shape == shape:
            return x
        if np.prod(x.stored, dtype=np.int64) == 1 and len(x.stored) <= len(shape):
            return dataclasses.replace(x, shape=shape)
        if squeezed(x.shape) == squeezed(shape) and 0 not in shape:
            padded = (1,) * (len(x.shape) - len(x.stored)) + x.stored
            kept = iter([s for s, n in zip(padded, x.shape) if n != 1])
            stored = tuple(next(kept) if n != 1 else 1 for n in shape)
            return self._stored_as(x, stored, shape)
        return self._stored_as(self.whole(x), shape, shape)

    def broadcast_in_dim(self, x: Operand, shape: Shape, dims: Sequence[int]) -> Operand:
        if isinstance(x, Const) or not x.stored:
            return dataclasses.replace(x, shape=shape)
        order = sorted(range(len(dims)), key=lambda i: dims[i])
        if order != list(range(len(dims))):
            turned = self.transpose(x, order)
            return self.broadcast_in_dim(turned, shape, [dims[i] for i in order])
        x = self.aligned(x)
        stored = [1] * len(shape)
        for size, dim in zip(x.stored, dims):
            stored[dim] = size
        first = min(dims, default=0)
        if list(dims) == list(range(first, len(shape))):
            return dataclasses.replace(x, shape=shape)  # NumPy aligns at the end
        return self._stored_as(x, tuple(stored), shape)

    def transpose(self, x: Operand, perm: Sequence[int]) -> Operand:
        """Rearranged at the inputs, where kernels read in any order: behind a computation they
        rearrange nothing."""
        perm = tuple(int(i) for i in perm)
        shape = tuple(x.shape[i] for i in perm)
        if isinstance(x, Const) or not x.stored:
            return dataclasses.replace(x, shape=shape)
        x = self.aligned(x)
        turned = self._turned(x, perm)
        return dataclasses.replace(x, name=turned.name, stored=turned.stored, shape=shape)

    def _turned(self, x: Value, perm: Shape) -> Value:
        stored = tuple(x.stored[i] for i in perm)
        order = [i for i in perm if x.stored[i] != 1]
        if order == sorted(order):
            return self._stored_as(x, stored, stored)
        made = self.made(x)
        if made is not None and made.op == "transpose":
            (base,) = made.operands
            assert isinstance(base, Value)
            inner = made.attributes["perm"]
            return self._turned(
                dataclasses.replace(base, shape=base.stored), tuple(inner[i] for i in perm)
            )
        if made is not None and made.op == "broadcast":
            turned = self._turned_operand(made.operands[0], perm, len(perm))
            return self.emit("broadcast", (turned,), x.dtype, stored, to=list(stored))
        source, rank = self.source, len(perm)
        if made is not None and made.op in POINTWISE:
            operands = [self._turned_operand(o, perm, rank) for o in made.operands]
            self.source = made.source
            turned = self.emit(made.op, operands, x.dtype, stored, **made.attributes)
            self.source = source
            return turned
        return self.emit("transpose", (x,), x.dtype, stored, perm=list(perm))

    def _turned_operand(self, x: Operand, perm: Shape, rank: int) -> Operand:
        if isinstance(x, Const) or not x.stored:
            return x
        padded = (1,) * (rank - len(x.stored)) + x.stored
        return self._turned(self._stored_as(x, padded, padded), perm)

    def slice(self, x: Operand, start: Shape, limit: Shape, stride: Shape) -> Operand:
        shape = tuple(-(-(l - s) // k) if l > s else 0 for s, l, k in zip(start, limit, stride))
        if isinstance(x, Const) or not x.stored:
            return dataclasses.replace(x, shape=shape)
        if shape == x.shape:
            return x
        x = self.aligned(x)
        at = [
            (0, n, 1) if n == 1 and size != 0 else (s, l, k)
            for n, size, s, l, k in zip(x.stored, shape, start, limit, stride)
        ]
        stored = tuple(-(-(l - s) // k) if l > s else 0 for s, l, k in at)
        if stored == x.stored:
            return dataclasses.replace(x, shape=shape)
        out = self.emit(
            "slice",
            (x,),
            x.dtype,
            stored,
            shape,
            start=[a[0] for a in at],
            limit=[a[1] for a in at],
            stride=[a[2] for a in at],
        )
        return dataclasses.replace(out, integral=x.integral, bounds=x.bounds)

    def concat(self, parts: Sequence[Operand], axis: int) -> Operand:
        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].shape)
        shape[axis] = sum(p.shape[axis] for p in parts)
        out = self.emit(
            "concat", [self.whole(p) for p in parts], parts[0].dtype, tuple(shape), axis=axis
        )
        bounds = [p.range() for p in parts] if not is_float(out.dtype) else []
        return dataclasses.replace(
            out, bounds=(min(b[0] for b in bounds), max(b[1] for b in bounds)) if bounds else None
        )

    def document(self, name: str, outputs: Sequence[str], strict: bool) -> dict[str, Any]:
        """The graph document; ops that no output needs are left out."""
        needed, ops = set(outputs), []
        for op in reversed(self.ops):
            if op["out"] in needed:
                needed.update(op["in"])
                ops.append({("shape" if k == "to" else k): v for k, v in op.items()})
        document: dict[str, Any] = {"lawson": 1, "kind": "graph", "name": name}
        if strict:
            document["strict"] = True
        document.update(inputs=self.inputs, ops=ops[::-1], outputs=list(outputs))
        return document
