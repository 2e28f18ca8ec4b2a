"""Lawson's operations on torch's tensors. Use the package `lawson.torch`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lawson._core import Fusion, Options

def connect() -> None:
    """
    Finds torch's DLPack exchange table. Raises UnavailableError, with torch's version
    and the least needed, where it has none.
    """

def is_watched() -> bool:
    """
    Whether modes of dispatch or of functions, functorch's transforms, torch.jit.trace or
    forward mode look at calls, or transform them: then they go as operators.
    """

def quick(find: Callable[..., Any]) -> Callable[..., Any]:
    """
    A function of (query, key, value, *static) for a module to keep. It asks `find`, with
    whether torch is deterministic and *static, what such calls run: with `run`, a Call,
    and `is_single`, whether its first result stands alone; or None. The results; or what
    `find` gave, where autograd has to record the call; or NotImplemented: `find` has
    none, tensors are no plain ones, or a mode, a transform, a trace or autocast is active.
    """

class Prepared:
    """A loaded plan bound to descriptions of tensors, for Call's `describe`."""

    @staticmethod
    def attention(
        spec: str,
        pass_: str,
        names: Sequence[str | None],
        outs: Sequence[str],
        results: Sequence[tuple[Sequence[int], Sequence[int], str] | int],
        device: str,
        options: Options | None = None,
        values: Mapping[str, float] = {},
        copies: Sequence[int] = [],
    ) -> Prepared:
        """
        Of an attention spec. `names`: which tensor each operand is, as q, k, stats, ...;
        None: none of the plan's. `outs`: which the outputs are. `results`, for each of
        `outs`: (shape, strides, dtype) of a tensor to make, or the index of the operand
        that is written in place. `device`: "cpu", "cuda:N". `values`: "scale" and
        "sequences". `copies`: operands whose contiguous copies are read.
        """

    @staticmethod
    def fusion(
        fusion: Fusion,
        operands: Sequence[int],
        results: Sequence[tuple[Sequence[int], Sequence[int], str] | int],
        values: Mapping[str, float] = {},
        copies: Sequence[int] = [],
    ) -> Prepared:
        """
        Of a fusion. `operands`: which operand each input of the graph is, those by value
        left out. `results`: as above, for each of the graph's outputs. `values`: of the
        inputs by value, by name.
        """

    @property
    def plan_id(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def workspace_size(self) -> int:
        """Bytes."""

    @property
    def device(self) -> str:
        """Empty before the first call."""

    @property
    def loaded(self) -> Fusion:
        """The loaded plan, and how it was chosen."""

class Call:
    """
    One operation for tensors of any shape: what runs is found by the operands' device, dtypes,
    shapes, strides and alignment, and is asked of `describe` (with the tuple of operands) where
    it is not kept. Called with tensors or None, it returns the tuple of outputs, which require
    no gradient.
    """

    def __init__(
        self, describe: Callable[[tuple[Tensor | None, ...]], Prepared], capacity: int = 1024
    ) -> None: ...
    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor, ...]: ...
    def prepared(self) -> list[Prepared]:
        """What is kept, the most recently used first."""

    def clear(self) -> None:
        """Forgets what is kept."""

    @property
    def capacity(self) -> int:
        """How many are kept at most."""

    @property
    def describe(self) -> Callable[[tuple[Tensor | None, ...]], Prepared]: ...
