"""What JAX's arrays are as the arguments of `attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lawson import _attention_arguments as shared
from lawson import _settings
from lawson._attention_setup import FLOATS, Setup
from lawson._errors import InvalidArgumentError


class Labels(dict[str, str]):
    """What the user calls the arguments of `attention`; those that are not in it by their names."""

    def __missing__(self, name: str) -> str:
        return name


def array(name: str, value: Any) -> Any:
    """An array of JAX's. Nothing that has no numbers is one."""
    try:
        if value is not None:
            return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError):
        pass
    _settings.refuse(name, value, "an array")


def integers(name: str, value: Any) -> Any:
    """i32; what is beyond its range becomes the nearest, not what the low bits are."""
    if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.integer):
        value = np.clip(value, -(1 << 31), (1 << 31) - 1)
    value = array(name, value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise InvalidArgumentError(
            f"{name}: dtype {value.dtype.name} is not allowed; expected integers, int32"
        )
    limits = np.iinfo(value.dtype)
    if limits.max > (1 << 31) - 1:
        value = jnp.clip(value, max(limits.min, -(1 << 31)), (1 << 31) - 1)
    return value.astype(jnp.int32)


def number(name: str, value: Any, kind: str) -> float:
    """A number that is known when the call is traced, also as an array of one."""
    if isinstance(value, jax.core.Tracer):
        raise InvalidArgumentError(
            f"{name}: {_settings.shown(value)} is not known when the program is made; expected "
            f"{shared.RANGES[kind].allowed}, which is no array of the program"
        )
    is_array = isinstance(value, (jax.Array, np.ndarray))
    if is_array and value.ndim == 0 and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = value.item()
    return shared.number(name, value, kind)


def output_dtype(given: Any, own: Any) -> str | None:
    if given is None:
        return None
    allowed = f"None, or one of {', '.join(FLOATS)}"
    try:
        name = jnp.dtype(given).name
    except (TypeError, ValueError):
        _settings.refuse("output_dtype", given, allowed)
    if name not in FLOATS:
        _settings.refuse("output_dtype", name, allowed)
    if jax.dtypes.canonicalize_dtype(name).name != name:
        _settings.refuse("output_dtype", name, f"{allowed}; float64 needs jax_enable_x64")
    return None if name == own.name else name


def prng_key(name: str, given: Any) -> Any:
    """One key, of either form that JAX has."""
    allowed = "None, or one key: jax.random.key(seed)"
    key = array(name, given)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        try:
            key = jax.random.wrap_key_data(key)
        except TypeError:
            _settings.refuse(name, given, allowed)
    if key.ndim != 0:
        raise InvalidArgumentError(f"{name}: {key.shape} keys are not allowed; expected {allowed}")
    return key


class Operands(shared.Operands):
    array = staticmethod(array)

    @staticmethod
    def dtype(x: Any) -> str:
        return str(x.dtype.name)

    @staticmethod
    def cast(x: Any, dtype: str) -> Any:
        return x.astype(dtype)

    @staticmethod
    def integers(name: str, value: Any, least: int, most: int) -> Any:
        return jnp.clip(integers(name, value), least, most)

    @staticmethod
    def unstacked(x: Any, axis: int, count: int) -> Sequence[Any]:
        return [jax.lax.index_in_dim(x, i, axis, keepdims=False) for i in range(count)]

    def filled(self, size: int, value: int) -> Any:
        return jnp.full((size,), value, jnp.int32)

    def add_dropout(self, rate: float, key: Any, mask: Any, returned: bool) -> None:
        """The mask, or the seed and offset that the key makes."""
        if key is not None:
            key = prng_key(self.label("dropout_key"), key)
        if rate > 0 and (key is None) == (mask is None):
            self.fail(
                "dropout_rate",
                f"{rate} needs dropout_key (jax.random.key) or dropout_mask, and one of them",
            )
        if self.add_dropout_mask(rate, mask, returned):
            bits = jax.random.bits(key, (4,), jnp.uint32)
            self.named["seed"], self.named["offset"] = bits[:2], bits[2:]

    def sizes(self, setup: Setup) -> dict[str, int]:
        """The sizes of the call's dims, which agree."""
        return setup.sizes({name: self.named[name].shape for name in setup.names}, self.labels)
