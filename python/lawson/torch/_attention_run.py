"""One pass of an attention for real tensors: the plan of each form of its operands, and its run.

A `Runner` is one pass of one Setup. Its `Call` finds what runs by device, dtypes, shapes, strides
and alignment, in C++; where they are new, `_describe` makes the spec and the plan, and decides which
operands are copied: those with a last dim that is not dense or an address that no kernel takes, and
all that lie in an unusual order where the engine refuses that order.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lawson import _core, _settings, _torch
from lawson._attention_plan import judge, options_of
from lawson._attention_setup import ARGUMENTS, FLOATS, Setup
from lawson._errors import InvalidArgumentError, UnsupportedError
from lawson.torch._asked import is_elsewhere

# Whose strides a spec says; the others are contiguous.
STRIDED = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
_AXES = {
    letter: axis for axis, letters in enumerate(("bp", "hg", "stmnyza", "de")) for letter in letters
}
_LIKE = {"o": "q", "dq": "q", "dk": "k", "dv": "v"}

_LAWSONS = {**FLOATS, "uint8": "u8"}  # dtypes of results, as specs say them
_ALIGNMENT = 16  # bytes: a spec's promise for each tensor

KEPT = 1024  # Runners, Setups and their like that are kept, the least recently used go

Found = TypeVar("Found")
Form = tuple[tuple[int, ...], tuple[int, ...], str]  # shape, strides, dtype
Check = Callable[[Mapping[str, Sequence[int]]], None]


def type_name(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32."""
    return str(dtype)[6:]


def stride_order(strides: Sequence[int]) -> list[int]:
    """The axes from the outermost in memory to the innermost; the last one stays the last.

    An axis that was expanded (stride 0) is no order: it counts as an outer one.
    """
    axes = range(len(strides) - 1)
    return [*sorted(axes, key=lambda axis: (strides[axis] != 0, -strides[axis])), len(strides) - 1]


def strides_in_order(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Of a dense tensor whose axes lie in this order."""
    strides = [0] * len(shape)
    step: Any = 1
    for axis in reversed(order):
        strides[axis] = step
        step = step * max(1, shape[axis]) if isinstance(shape[axis], int) else step * shape[axis]
    return strides


def result_forms(
    setup: Setup,
    which: str,
    sizes: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    strides: Mapping[str, Sequence[int]],
    types: Mapping[str, str],
) -> list[Form]:
    """Shape, strides and dtype of each result: dense, in the stride order of what it belongs to."""
    found = []
    for name in setup.result_names(which):
        shape, dtype = setup.result(name, sizes, types, shapes)
        like = _LIKE.get(name)
        order = range(len(shape)) if like is None else stride_order(strides[like])
        found.append((shape, tuple(strides_in_order(shape, list(order))), dtype))
    return found


def logical_strides(
    dims: str, shape: Sequence[int], strides: Sequence[int]
) -> tuple[int, int, int, int] | None:
    """In `[b, h, s, d]` order; None: as the layout says."""
    plain = strides_in_order(shape, range(len(shape)))
    if all(n == 1 or a == b for n, a, b in zip(shape, strides, plain, strict=True)):
        return None
    found = [0, 0, 0, 0]
    found[0] = max(n * s for n, s in zip(shape, plain, strict=True))  # of a ragged tensor's one b
    for letter, n, given, usual in zip(dims, shape, strides, plain, strict=True):
        found[_AXES[letter]] = usual if n == 1 else given
    return found[0], found[1], found[2], found[3]


class Nothing(Exception):
    """The results have no elements, so nothing runs."""


class Runner:
    """One pass of a Setup on real tensors: `runner(*operands)` gives the results, in order.

    Args:
      setup: the call.
      which: "forward" or "backward".
      check: of the operands' shapes, before a plan is made for them.
      labels: what messages call the operands.
    """

    def __init__(
        self,
        setup: Setup,
        which: str,
        check: Check | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.setup = setup
        self.which = which
        self.names = setup.operand_names(which)
        self.outs = setup.result_names(which)
        self._check = check
        self._labels = labels or {}
        # The tokens of no sequence are 0, and no plan writes them: such results are made before.
        self._zeroed = tuple(
            name
            for name in self.outs
            if name not in self.names and set(setup.dims(name)) & {"m", "n"}
        )
        describe: Any = self._describe  # no operand is None
        self._call = _torch.Call(describe)
        self.run = self._with_zeroed if self._zeroed else self._call  # what has elements

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        try:
            return self.run(*tensors)
        except Nothing:
            return tuple(x.zero_() for x in self._make(self.outs, tensors))
        except InvalidArgumentError:
            self._refuse_unreadable(tensors)
            raise

    def _label(self, name: str) -> str:
        argument = ARGUMENTS.get(name, name)
        return self._labels.get(argument, argument)

    def _refuse_unreadable(self, tensors: Sequence[Tensor]) -> None:
        """By their names, operands that the core knows only by their positions."""
        first = tensors[0]
        for name, x in zip(self.names, tensors, strict=False):
            if x.layout is not torch.strided or x.is_quantized:
                kind = "a quantized tensor" if x.is_quantized else f"a tensor of layout {x.layout}"
                raise InvalidArgumentError(
                    f"{self._label(name)}: {kind} is not allowed; expected a dense one"
                ) from None
            if x.device != first.device:
                raise InvalidArgumentError(
                    f"{self._label(name)}: on {x.device}, and {self._label(self.names[0])} is on "
                    f"{first.device}; expected one device"
                ) from None

    def _with_zeroed(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self._call(*tensors, *(x.zero_() for x in self._make(self._zeroed, tensors)))

    def _make(self, names: Iterable[str], tensors: Sequence[Tensor]) -> list[Tensor]:
        shapes, sizes = self._sizes(tensors)
        forms = dict(zip(self.outs, self._forms(tensors, shapes, sizes), strict=True))
        return [
            torch.empty_strided(
                shape, strides, dtype=getattr(torch, dtype), device=tensors[0].device
            )
            for shape, strides, dtype in (forms[name] for name in names)
        ]

    def _sizes(
        self, tensors: Sequence[Tensor]
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
        shapes = {n: tuple(x.shape) for n, x in zip(self.names, tensors, strict=False)}
        for name, x in zip(self.names, tensors, strict=False):
            type_ = type_name(x.dtype)
            if name in ("q", "k", "v", "bias", "k_new", "v_new") and type_ not in FLOATS:
                raise InvalidArgumentError(
                    f"{self._label(name)}: dtype {type_} is not allowed; expected one of "
                    f"{', '.join(FLOATS)}"
                )
        sizes = self.setup.sizes(shapes, self._labels)
        if self._check is not None:
            self._check(shapes)
        return shapes, sizes

    def _forms(
        self, tensors: Sequence[Tensor], shapes: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> list[Form]:
        strides = {n: x.stride() for n, x in zip(self.names, tensors, strict=False)}
        types = {n: type_name(x.dtype) for n, x in zip(self.names, tensors, strict=False)}
        return result_forms(self.setup, self.which, sizes, shapes, strides, types)

    def _describe(self, tensors: Sequence[Tensor]) -> _torch.Prepared:
        operands = tensors[: len(self.names)]
        shapes, sizes = self._sizes(operands)
        if 0 in (sizes[letter] for letter in self.setup.dims("o")):
            raise Nothing
        forms = self._forms(operands, shapes, sizes)
        given = (*self.names, *self._zeroed)
        results = [
            given.index(name) if name in given else (shape, strides, _LAWSONS[dtype])
            for name, (shape, strides, dtype) in zip(self.outs, forms, strict=True)
        ]
        where = operands[0].device
        name = "cpu" if where.type == "cpu" else f"cuda:{where.index}"

        def prepare(
            spec: str, device: _core.Device, options: _core.Options, copies: Sequence[int]
        ) -> _torch.Prepared:
            if self.setup.training and self.which == "forward":
                judge(spec, device, options)  # both passes; before either runs
            return _torch.Prepared.attention(
                spec,
                self.which,
                [*self.names, *(None for _ in self._zeroed)],
                self.outs,
                results,
                name,
                options,
                copies=copies,
            )

        misplaced = {at for at, x in enumerate(operands) if x.data_ptr() % _ALIGNMENT}
        return choose(self.setup, self.which, operands, forms, shapes, prepare, misplaced)


def choose(
    setup: Setup,
    which: str,
    operands: Sequence[Tensor],
    forms: Sequence[Form],
    shapes: Mapping[str, Sequence[int]],
    make: Callable[[str, _core.Device, _core.Options, Sequence[int]], Found],
    misplaced: Collection[int] = (),
    target: str | None = None,
) -> Found:
    """What `make` gives for the spec of a pass, its device and options, and the operands to copy.

    Copied is what no engine takes as it is; and where `make` is refused, all that lies in another
    order than the layout says, as no engine refuses that one for its order.

    Args:
      operands: of which the descriptions are read; they may be fake.
      forms: of the results (`result_forms`).
      shapes: of the operands, by name.
      misplaced: operands at addresses that no engine takes.
      target: a device that is asked about; None: that of the operands.
    """
    names = setup.operand_names(which)
    in_place = [name for name in setup.result_names(which) if name in names]
    copies = {at for at, x in enumerate(operands) if not _is_dense(names[at], x)} | {*misplaced}
    for at in sorted(copies):
        if names[at] in in_place:
            raise InvalidArgumentError(
                f"{names[at]}: strides {tuple(operands[at].stride())}"
                f"{' at such an address' if at in misplaced else ''}; a cache that is appended to "
                f"is dense in its last dim, and at a multiple of {_ALIGNMENT} bytes"
            )

    def attempt(copied: Collection[int]) -> Found:
        spec = _spec(setup, which, operands, forms, shapes, copied)
        if target is not None:
            device, platform = _core.Device(target), _settings.platform_of(target)
        else:
            device, platform = device_of(operands[0].device), operands[0].device.type
            if platform == "cpu":
                host_engine(setup.choice.engine)  # refused where none is named
        return make(spec, device, options_of(setup, platform, spec, device), sorted(copied))

    try:
        return attempt(copies)
    except UnsupportedError:
        unusual = {
            at
            for at, (name, x) in enumerate(zip(names, operands, strict=True))
            if name in STRIDED and name not in in_place and _strides(setup, name, x)
        }
        if unusual <= copies:
            raise
        with contextlib.suppress(UnsupportedError):
            return attempt(copies | unusual)
        raise


def _spec(
    setup: Setup,
    which: str,
    operands: Sequence[Tensor],
    forms: Sequence[Form],
    shapes: Mapping[str, Sequence[int]],
    copied: Collection[int],
) -> str:
    names = setup.operand_names(which)
    strides = {}
    for at, (name, x) in enumerate(zip(names, operands, strict=True)):
        if name in STRIDED and at not in copied:
            strides[name] = _strides(setup, name, x)
    for name, (shape, given, _) in zip(setup.result_names(which), forms, strict=True):
        if name in STRIDED and name not in names:
            strides[name] = logical_strides(setup.dims(name), shape, given)
    if setup.training and which == "forward":  # as the backward will have them
        strides["do"] = strides["o"]
        for name in ("q", "k", "v"):
            x = operands[names.index(name)]
            dense = strides_in_order(x.shape, stride_order(x.stride()))
            strides[f"d{name}"] = logical_strides(setup.dims(name), x.shape, dense)
    types = {n: type_name(x.dtype) for n, x in zip(names, operands, strict=True)}
    return setup.spec(shapes, types, {n: found for n, found in strides.items() if found})


def device_of(device: torch.device) -> _core.Device:
    """Lawson's device for torch's. UnsupportedError: there is no engine for it."""
    if device.type == "cuda":
        return _core.Device("cuda" if device.index is None else f"cuda:{device.index}")
    if device.type == "cpu":
        return _core.Device("cpu")
    raise UnsupportedError(
        f"device '{device}': Lawson has no engine for it; it runs on cuda, and on cpu when the "
        'engine is named: engine="cpu", or LAWSON_ENGINE=cpu in the environment'
    )


def _strides(setup: Setup, name: str, x: Tensor) -> tuple[int, int, int, int] | None:
    return logical_strides(setup.dims(name), x.shape, x.stride())


def _is_dense(name: str, x: Tensor) -> bool:
    if name in STRIDED:
        return x.stride(-1) == 1 or x.size(-1) == 1
    return x.is_contiguous()


def check_caches(named: Mapping[str, Tensor]) -> None:
    """Refuses caches k and v that a call could not write new tokens into."""
    written = {name: named[name] for name in ("k", "v")}
    for name, x in written.items():
        for other in ("v", "q", "k_new", "v_new") if name == "k" else ("q", "k_new", "v_new"):
            if _share_memory(x, named[other]):
                raise InvalidArgumentError(
                    f"{other}: its memory is part of {name}'s, which a call with k_new writes to; "
                    "expected memory of its own"
                )
    if torch.is_inference_mode_enabled():
        return
    for name, x in written.items():
        if x.is_inference():
            raise InvalidArgumentError(
                f"{name}: made in torch.inference_mode(), outside of which torch lets nobody write "
                "to it; append to it inside, or make it outside"
            )


def _share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether an element of one is one of the other's; exact for tensors of the same strides."""
    if not x.numel() or not y.numel():
        return False
    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return False
    apart = int(y.storage_offset() - x.storage_offset())
    ends = [sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in (x, y)]
    if apart > ends[0] or -apart > ends[1]:
        return False
    if x.stride() != y.stride():
        return True
    sizes = (max(pair) for pair in zip(x.shape, y.shape, strict=True))
    return _is_step(apart, sorted(zip(x.stride(), sizes, strict=True), reverse=True))


def _is_step(apart: int, axes: Sequence[tuple[int, int]]) -> bool:
    """Whether so many elements lie between two places of such strides and sizes."""
    if not axes:
        return apart == 0
    (stride, size), rest = axes[0], axes[1:]
    if stride == 0:
        return _is_step(apart, rest)
    reach = sum(s * (n - 1) for s, n in rest)
    first, last = -((reach - apart) // stride), (apart + reach) // stride
    return any(
        _is_step(apart - steps * stride, rest)
        for steps in range(max(first, 1 - size), min(last, size - 1) + 1)
    )


def host_engine(given: str | None) -> str | None:
    """The engine for tensors of the host, which has to be named, or several in the order of policy
    "allow", joined by commas.

    Raises UnsupportedError, which says how to name one.
    """
    if is_elsewhere():
        return given
    return _host_engine(given, os.environ.get("LAWSON_ENGINE"), os.environ.get("LAWSON_POLICY"))


host_engine._dynamo_marked_constant = True  # type: ignore[attr-defined]  # assume_constant_result


@functools.lru_cache(maxsize=64)
def _host_engine(given: str | None, said: str | None, policy: str | None) -> str | None:
    del said, policy  # of the environment, which these functions read
    named = _settings.engines_on("cpu", None if given is None else tuple(given.split(",")))
    if not named:
        raise UnsupportedError(
            "attention: these tensors are the host's, no engine is named, and the default engine, "
            'cudnn, needs a GPU. To run on the CPU name its engine: engine="cpu", or '
            "LAWSON_ENGINE=cpu in the environment"
        )
    return ",".join(named)


@functools.lru_cache(maxsize=KEPT)
def runner_of(text: str, which: str) -> Runner:
    """The Runner of a `Setup.text()` and pass."""
    return Runner(setup_of(text), which)


@functools.lru_cache(maxsize=KEPT)
def setup_of(text: str) -> Setup:
    """`Setup.of_text`, remembered."""
    return Setup.of_text(text)
