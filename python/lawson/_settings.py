"""The settings that every frontend has: checked by one rule, refused in the same words everywhere.

Each check takes the argument's name as the user wrote it, and returns the value as a plain Python
one. A setting is static: numbers of Python and of NumPy, no array of a framework.

Raises:
  InvalidArgumentError: names the argument, the value and what is allowed.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import numbers
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

import numpy as np

from lawson import _core
from lawson._errors import Error, InvalidArgumentError, UnsupportedError

ENGINES = ("cudnn", "cpu", "reference")
HOST_ENGINES = ("cpu", "reference")
POLICIES = ("require", "allow")
TUNINGS = ("off", "quick", "exhaustive")

_SHOWN = 120  # characters of a value in a message
_MOST = (1 << 63) - 1


def refuse(name: str, value: Any, allowed: str) -> NoReturn:
    """`name: value is not allowed; expected ...`: the one form of these messages."""
    raise InvalidArgumentError(f"{name}: {shown(value)} is not allowed; expected {allowed}")


def shown(value: Any) -> str:
    """A value in a message: short, and of an array shape and dtype, so that none is computed."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None and not isinstance(value, np.generic):
        return f"an array ({type(value).__name__}) of shape {tuple(shape)} and dtype {dtype}"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


# ---- of one kind -------------------------------------------------------------------------------


def word(name: str, value: Any, allowed: Sequence[str]) -> str:
    """One of these texts."""
    if not isinstance(value, str) or value not in allowed:
        refuse(name, value, f"one of {', '.join(allowed)}")
    return str(value)


def flag(name: str, value: Any) -> bool:
    """True or False, NumPy's too."""
    if not isinstance(value, (bool, np.bool_)):
        refuse(name, value, "True or False")
    return bool(value)


def is_integer(value: Any) -> bool:
    """A whole number of Python or NumPy; a bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def integer(
    name: str, value: Any, allowed: str, *, least: int | None = None, most: int = _MOST
) -> int:
    """A whole number from `least` to `most`; `allowed` says that in words."""
    if not is_integer(value) or not (least is None or least <= value) or value > most:
        refuse(name, value, allowed)
    return int(value)


def number(
    name: str, value: Any, allowed: str, *, least: float = -math.inf, below: float = math.inf
) -> float:
    """A finite number, from `least` on and below `below`; `allowed` says that in words."""
    is_number = isinstance(value, (numbers.Real, np.generic)) and not isinstance(value, bool)
    if is_number and isinstance(value, np.generic):
        value = value.item()
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        found = float(value) if is_number else math.nan
    except OverflowError:
        found = math.inf
    if not math.isfinite(found) or not least <= found < below:
        refuse(name, value, allowed)
    return found


def window(name: str, value: Any) -> tuple[int, int]:
    """(left, right): how many columns a row sees to each side; -1: all."""
    allowed = "(left, right): two whole numbers from -1 (all) to 2^31 - 1"
    is_array = isinstance(value, np.ndarray) and value.ndim == 1
    if not is_array and not isinstance(value, (tuple, list)):
        refuse(name, value, allowed)
    if len(value) != 2 or not all(is_integer(x) and -1 <= x < 1 << 31 for x in value):
        refuse(name, value, allowed)
    return int(value[0]), int(value[1])


def exact(value: Any) -> Hashable:
    """A setting as a key: of another type or sign of zero it is another one."""
    if isinstance(value, (float, np.floating)):
        return (type(value), float(value).hex())
    if isinstance(value, (complex, np.complexfloating)):
        return (type(value), float(value.real).hex(), float(value.imag).hex())
    if isinstance(value, tuple):
        return (type(value), *map(exact, value))
    if isinstance(value, frozenset):
        return (frozenset, frozenset(map(exact, value)))
    if isinstance(value, slice):
        return (slice, exact(value.start), exact(value.stop), exact(value.step))
    return (type(value), cast(Hashable, value))


# ---- what is marked ----------------------------------------------------------------------------


def known(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuses keywords that ``function`` does not have, with those that it has. Raises TypeError."""
    kinds = inspect.signature(function).parameters.values()
    names = [p.name for p in kinds if p.kind is inspect.Parameter.KEYWORD_ONLY]
    for name in given:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean '{near[0]}='? " if near else ""
        raise TypeError(
            f"{function.__name__}() has no setting '{name}'; {hint}its settings: {', '.join(names)}"
        )


def marked(function: Any, what: str = "fusion") -> None:
    """Refuses what is no function to mark. Raises TypeError, with what to mark."""
    if isinstance(function, (staticmethod, classmethod)):
        kind = type(function).__name__
        raise TypeError(f"{what}: a {kind}; @{kind} goes above @{what}, not below it")
    if isinstance(function, str):
        raise TypeError(
            f"{what}: {function!r} is not callable; settings are keywords: @{what}(engines=...)"
        )
    if not callable(function):
        raise TypeError(f"{what}: {shown(function)} is not callable")


# ---- how a plan is chosen ----------------------------------------------------------------------


def policy(value: Any, name: str = "policy") -> str | None:
    return None if value is None else word(name, value, POLICIES)


def tuning(value: Any, name: str = "tuning") -> str:
    return word(name, value, TUNINGS)


def engine(value: Any, name: str = "engine") -> str | None:
    """The name of an engine; None: as the environment says, or the default."""
    if value is not None and (not isinstance(value, str) or value not in ENGINES):
        refuse(name, value, f"None, or one of {', '.join(ENGINES)}")
    return None if value is None else str(value)


def engines(value: Any, name: str = "engines") -> tuple[str, ...] | None:
    """A name or a list of names, in order; None: as the environment says, or the default."""
    if value is None:
        return None
    listed = (value,) if isinstance(value, str) else value
    if not isinstance(listed, Sequence):
        refuse(name, value, f"None, a name or a list of names: {', '.join(ENGINES)}")
    if len(listed) == 0:
        raise InvalidArgumentError(f"{name}: an empty list; None is for the default")
    return tuple(word(name, item, ENGINES) for item in listed)


def target(value: Any, name: str = "target") -> str | None:
    """The name of a device; a GPU of the target library need not be here."""
    if value is None:
        return None
    if not isinstance(value, str):
        refuse(name, value, "None, or the name of a GPU, as in lawson.targets()")
    try:
        _core.Device(value)
    except Error as error:
        raise type(error)(f"{name}: {error}") from error
    return str(value)


def workspace_limit(value: Any, name: str = "workspace_limit") -> int | None:
    """Bytes; None: no limit."""
    if value is None:
        return None
    return integer(name, value, "None (no limit), or a number of bytes from 0 to 2^63 - 1", least=0)


def deadline_ms(value: Any, name: str = "deadline_ms") -> float:
    return number(name, value, "milliseconds, 0 (none) or more", least=0)


# ---- engines by name ---------------------------------------------------------------------------


@contextlib.contextmanager
def of_fusion(name: str) -> Iterator[None]:
    """Within it, errors say which fusion they are about."""
    try:
        yield
    except Error as error:
        if f"fusion '{name}'" in str(error):
            raise
        raise type(error)(f"fusion '{name}': {error}") from None


# What os.environ is over, and a quarter of its time for a look that every call takes.
_environ: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_SAID = tuple(os.environ.encodekey(name) for name in ("LAWSON_ENGINE", "LAWSON_POLICY"))


def said() -> tuple[Any, Any]:
    """What the environment says about engines."""
    return _environ.get(_SAID[0]), _environ.get(_SAID[1])


def named_engines(given: Sequence[str] | None) -> tuple[str, ...]:
    """The engines `given`, else those of LAWSON_ENGINE; empty: none is named."""
    if given is not None:
        return tuple(given)
    said = os.environ.get("LAWSON_ENGINE", "")
    if not said:
        return ()
    return tuple(word("LAWSON_ENGINE", name.strip(), ENGINES) for name in said.split(","))


def named_policy(given: str | None) -> str:
    """The policy `given`, else that of LAWSON_POLICY, else "require"."""
    if given is not None:
        return given
    said = os.environ.get("LAWSON_POLICY", "")
    return word("LAWSON_POLICY", said, POLICIES) if said else "require"


def engines_on(
    platform: str,
    given: Sequence[str] | None,
    policy_given: str | None = None,
    name: str = "engines",
) -> tuple[str, ...]:
    """Those of `named_engines` that run on a platform, in order; empty: none is named at all.

    A list may name engines of several platforms: `cudnn,cpu` is cudnn on a GPU and cpu on the host.
    Of those of one platform, policy "require" takes one; with "allow" the first that supports it
    runs.

    Args:
      platform: "cpu" or "cuda".
      given: the engines that the user named in the call, checked; None: LAWSON_ENGINE's.
      policy_given: the policy of the call, checked; None: LAWSON_POLICY's.
      name: of the argument `given`.

    Raises:
      InvalidArgumentError: what the environment names is none; several engines under "require".
      UnsupportedError: engines are named, and none of them runs there.
    """
    named, chosen = named_engines(given), named_policy(policy_given)
    whose = "LAWSON_ENGINE" if given is None else name
    here = tuple(name for name in named if (name in HOST_ENGINES) == (platform == "cpu"))
    if named and not here:
        raise UnsupportedError(
            f"platform '{platform}': {whose} names {', '.join(named)}, of which none runs there"
        )
    if len(here) > 1 and chosen == "require":
        raise InvalidArgumentError(
            f"{whose}: {', '.join(here)} are {len(here)} engines of platform '{platform}'; policy "
            "'require' takes one, and with policy 'allow' (LAWSON_POLICY) they are taken in order"
        )
    return here


def device_on(
    platform: str, given: Sequence[str] | None = None, ordinal: int | None = None
) -> _core.Device:
    """The device of this machine that a framework's platform is.

    Args:
      platform: "cuda" or "cpu".
      given: the engines that the user named in the call; None: LAWSON_ENGINE's.
      ordinal: of the GPU; None: the first. GPUs of one kind share their plans.

    Raises:
      UnsupportedError: another platform, or the CPU without an engine of the host being named.
      UnavailableError: no GPU.
    """
    if platform == "cuda":
        return _core.Device("cuda" if ordinal is None else f"cuda:{ordinal}")
    if platform != "cpu":
        raise UnsupportedError(
            f"platform '{platform}': Lawson has no engine for it; it runs on cuda, and on cpu when "
            "the engine is named: engines=['cpu'], or LAWSON_ENGINE=cpu in the environment"
        )
    named = named_engines(given)
    if not any(name in HOST_ENGINES for name in named):
        wanted = f"the engines named are {', '.join(named)}" if named else "no engine is named"
        raise UnsupportedError(
            f"platform 'cpu': {wanted}, and the default engine, cudnn, needs a GPU. To run on the "
            "CPU name its engine: engines=['cpu'], or LAWSON_ENGINE=cpu in the environment"
        )
    return _core.Device("cpu")


def platform_of(target: str) -> str:
    """Of a device by name: "cpu", or "cuda"."""
    return "cpu" if _core.Device(target).name == _core.Device("cpu").name else "cuda"


def target_on(platform: str, name: str, what: str = "") -> _core.Device:
    """The device of that name, which `platform` has to be of. Raises UnsupportedError."""
    if platform_of(name) != platform:
        raise UnsupportedError(
            f"{what}target '{name}' is none of platform '{platform}'; inspect() tells what it "
            "would run"
        )
    return _core.Device(name)
