"""A program on real tensors: its kernels, each through ``lawson._torch.Call``, and their results.

A marked program is one kernel, built for the strides that its tensors have. A derived one is as few
as the engine takes; between two of them PyTorch changes dtypes and shapes, and nothing else.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, cast

import torch

from lawson import _core, _settings, _torch
from lawson._errors import InvalidArgumentError, UnsupportedError
from lawson._graph.kernels import Kernel, Settings, build
from lawson._graph.shapes import operands_of, results_of, types_of
from lawson._graph.split import Glue, parts
from lawson._inspection import Inspection
from lawson._settings import said
from lawson.torch._fusion_program import Program, dense_strides
from lawson.torch._trace_dtypes import torch_dtype

_ALIGNMENT = 16  # bytes: a graph's promise for each tensor
LOWER = "torch.set_float32_matmul_precision('high')"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Strides in elements, and what the address is a multiple of."""

    stride: tuple[int, ...]
    alignment: int = _ALIGNMENT

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        address = tensor.data_ptr()
        alignment = _ALIGNMENT
        while address % alignment:
            alignment //= 2
        return Layout(tuple(tensor.stride()), max(alignment, tensor.element_size()))


def place(settings: Settings, device: torch.device) -> tuple[_core.Device, list[str] | None]:
    """Lawson's device for tensors there, and the engines that may run on it; None: the default.

    Raises ``UnsupportedError`` where no engine is named that runs there.
    """
    platform = device.type
    if settings.target is not None:
        found = _settings.target_on(platform, settings.target)
        if not found.is_present:
            return found, None
    else:
        found = _settings.device_on(platform, settings.engines, device.index)
    here = list(_settings.engines_on(platform, settings.engines, settings.policy))
    return found, here or (["cudnn"] if platform == "cuda" else None)


def laid_out(
    document: dict[str, Any],
    inputs: Sequence[Layout | None],
    outputs: Sequence[tuple[int, ...] | None],
) -> dict[str, Any]:
    """A document with the strides that tensors have; None: contiguous."""
    types = types_of(document)

    def described(item: dict[str, Any], layout: Layout | None) -> dict[str, Any]:
        if layout is None:
            return item
        more: dict[str, Any] = {}
        if layout.stride != dense_strides(item["shape"]):
            more["strides"] = list(layout.stride)
        if layout.alignment != _ALIGNMENT:
            more["alignment"] = layout.alignment
        return {**item, **more}

    def result(name: str, stride: tuple[int, ...] | None) -> Any:
        plain = stride is None or stride == dense_strides(types[name].shape)
        return name if plain else {"name": name, "strides": list(stride or ())}

    given = [described(i, s) for i, s in zip(document["inputs"], inputs, strict=True)]
    made = [result(n, s) for n, s in zip(document["outputs"], outputs, strict=True)]
    return {**document, "inputs": given, "outputs": made}


def named(error: InvalidArgumentError, fusion: str, labels: Sequence[str]) -> InvalidArgumentError:
    """What is said about ``operand 1`` of a call, said about the fusion's argument."""
    found = re.match(r"operand (\d+)\b", str(error))
    if found is None or int(found[1]) >= len(labels):
        return error
    rest = str(error)[found.end() :]
    return type(error)(f"fusion '{fusion}': argument '{labels[int(found[1])]}'{rest}")


class Part:
    """One kernel of a program, for tensors of any strides."""

    def __init__(
        self,
        program: Program,
        document: dict[str, Any],
        plain: Kernel | None,
        target: str | None = None,
    ) -> None:
        self.program = program
        self.target = target
        self.document = document
        self.inputs = [item["name"] for item in document["inputs"]]
        self.outputs = list(document["outputs"])
        types = types_of(document)
        self.shapes = [types[n].shape for n in self.outputs]
        self.dtypes = [types[n].dtype for n in self.outputs]
        # Of the marked program's results, as PyTorch has them; between parts contiguous.
        self.strides = result_strides(program) if plain is None else [None] * len(self.outputs)
        self._plain = plain
        self.is_constant = not self.inputs
        self.call = _torch.Call(self.describe)

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.is_constant:  # a call finds the device by an operand
            return self.call(torch.empty(1, device=self.program.device))
        try:
            return self.call(*tensors)
        except InvalidArgumentError as error:
            raise named(error, self.program.name, self.inputs) from None

    def kernel(self, layouts: Sequence[Layout | None]) -> Kernel:
        """The plan for operands that lie like this."""
        return kernel(self.program, laid_out(self.document, layouts, self.strides), self.target)

    def describe(self, tensors: Sequence[Any]) -> _torch.Prepared:
        layouts = [] if self.is_constant else [Layout.of(t) for t in tensors]
        copies: list[int] = []
        if self._plain is None:
            made = self.kernel(layouts)
        else:
            made, copies = self._derived(self._plain, layouts, tensors)
        if made.fusion is None:
            raise UnsupportedError(
                f"unsupported: fusion '{self.program.name}': target "
                f"'{self.program.settings.target}' is not in this machine; inspect() has its plan"
            )
        strides = [
            dense_strides(shape) if s is None else s
            for shape, s in zip(self.shapes, self.strides, strict=True)
        ]
        results = list(zip(self.shapes, strides, self.dtypes, strict=True))
        return _torch.Prepared.fusion(
            made.fusion, list(range(len(self.inputs))), results, copies=copies
        )

    def _derived(
        self, plain: Kernel, layouts: Sequence[Layout], tensors: Sequence[Any]
    ) -> tuple[Kernel, list[int]]:
        """The plan for operands of a derived program, and which of them are copied: a cotangent
        that was expanded, and what no plan takes as it lies."""
        shapes = [tuple(t.shape) for t, _ in zip(tensors, layouts, strict=False)]
        usual = [Layout(dense_strides(shape)) for shape in shapes]
        unusual = [i for i, (x, y) in enumerate(zip(layouts, usual, strict=True)) if x != y]
        copies = [i for i in unusual if 0 in layouts[i].stride]
        if unusual == copies:
            return plain, copies
        given = [usual[i] if i in copies else x for i, x in enumerate(layouts)]
        try:
            return self.kernel(given), copies
        except UnsupportedError:
            return plain, unusual


def kernel(program: Program, document: dict[str, Any], target: str | None) -> Kernel:
    """The plan of one graph where the program's tensors are, as its settings say; or for a target
    that is asked about, wherever they are."""
    settings, where = program.settings, program.device
    if target is not None:
        settings = dataclasses.replace(settings, target=target)
        where = torch.device(_settings.platform_of(target))
    with _settings.of_fusion(program.name):
        device, engines = place(settings, where)
    wanted = program.trace.full_f32
    full_f32 = None if wanted is None else f"{wanted}: f32 operands, with all of their bits"
    return build(document, program.name, settings, device, engines, full_f32, LOWER)


def result_strides(program: Program) -> list[tuple[int, ...] | None]:
    """Of each output of the graph, as PyTorch has them."""
    assert program.trace.document is not None
    found: list[tuple[int, ...] | None] = [None] * len(program.trace.document["outputs"])
    for output, spec in zip(program.trace.outputs, program.results, strict=True):
        if output.kind == "graph" and found[output.index] is None:
            found[output.index] = spec.stride
    return found


class Code:
    """The kernels of a program's core, in the order in which they run.

    ``single``: the one kernel, where it takes the program's arguments in their order.
    ``target``: a device that is asked about; what runs has None.
    """

    def __init__(self, program: Program, target: str | None = None) -> None:
        self.program = program
        document = program.trace.document
        assert document is not None
        self.parts: list[Part | Glue] = [Part(program, document, None, target)]
        if program.is_derived:
            made = parts(document, lambda part: kernel(program, part, target))
            self.parts = [
                p if isinstance(p, Glue) else Part(program, p.document, p, target) for p in made
            ]
        only = self.parts[0] if len(self.parts) == 1 else None
        in_order = program.trace.operands == tuple(range(len(program.specs)))
        self.single: Part | None = only if isinstance(only, Part) and in_order else None

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """The program's results for all of its arguments, captured tensors last."""
        single, trace = self.single, self.program.trace
        if single is not None:
            return single(*tensors)
        assert trace.document is not None
        names = [item["name"] for item in trace.document["inputs"]]
        values = dict(zip(names, (tensors[i] for i in trace.operands), strict=True))
        for part in self.parts:
            if isinstance(part, Part):
                found = part(*(values[n] for n in part.inputs))
                values.update(zip(part.outputs, found, strict=True))
            else:
                _glue(part, values)
        return [values[n] for n in trace.document["outputs"]]

    def kernels(self) -> list[Kernel]:
        """The plans for tensors that lie as the program's specs say."""
        found = []
        for part in self.parts:
            if isinstance(part, Part):
                plain = part._plain
                found.append(part.kernel(self._layouts(part)) if plain is None else plain)
        return found

    def _layouts(self, part: Part) -> list[Layout]:
        specs = [self.program.specs[i] for i in self.program.trace.operands]
        return [Layout(s.stride) for s in specs]


def _glue(part: Glue, values: dict[str, torch.Tensor]) -> None:
    """PyTorch's ops of what lies between two kernels."""
    types = types_of(part.document)
    for op in part.document["ops"]:
        (x,), (out,) = (values[n] for n in operands_of(op)), results_of(op)
        if op["op"] == "convert":
            values[out] = x.to(torch_dtype(op["dtype"]))
        elif op["op"] == "transpose":
            values[out] = x.permute(op["perm"]).contiguous()
        else:
            values[out] = x.reshape(types[out].shape)


def code_of(program: Program) -> Code:
    """The kernels of a core; made again when the environment says something else."""
    now = said()
    found = program.codes.get(now)
    if found is None:
        found = program.once(("code", now), lambda: Code(program))
        program.codes[now] = found
    return cast(Code, found)


def inspected_program(program: Program, target: str | None) -> Inspection:
    """The kernels of a program, on a target or where its tensors are. Raises what running it
    raises."""
    core, target = program.core, target or program.settings.target
    if core is None:
        kernels: tuple[Kernel, ...] = ()
    elif target is None:
        kernels = tuple(code_of(core).kernels())
    else:
        kernels = tuple(core.once(("told", target, said()), lambda: Code(core, target).kernels()))
    where = program.device.type if target is None else _settings.platform_of(target)
    return Inspection(program.name, where, kernels)
