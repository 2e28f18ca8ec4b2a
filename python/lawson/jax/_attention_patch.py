"""A context in which `jax.nn.dot_product_attention` is Lawson's.

Libraries that reach it as `jax.nn.dot_product_attention` when they are called (Flax, Haiku, most
model code) then run Lawson, with the signature and meaning that they know. A name that was imported
before (`from jax.nn import dot_product_attention`) is JAX's own function and stays so.

The function is exchanged once for the process while any context is open, and decides at each call
by the caller's context: another thread, and an asyncio task that was started outside, go on with
JAX's own. What is traced inside and outside is kept apart, so `jax.jit` of the same function traces
it again on the other side instead of using what it had.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.nn

from lawson import _settings
from lawson._errors import InvalidArgumentError
from lawson.jax._attention import dot_product_attention
from lawson.jax._attention_arguments import number

# Of the innermost open context: keywords for every call; None: not inside.
_inside: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "lawson_patch", default=None
)
_OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(dot_product_attention).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)


class _Same:
    """An option that has no value to compare, such as an array, as a key: equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def _key(value: Any) -> Hashable:
    key = _settings.exact(value)
    try:
        hash(key)
    except TypeError:
        return _Same(value)
    return key


_traced = jax.make_user_context(default_value=None)  # part of the key of jax.jit's caches
_lock = threading.Lock()
_open = 0
_original: Any = None
_exchanged: Any = None


def _choose(original: Any, *args: Any, **kwargs: Any) -> Any:
    options = _inside.get()
    if options is None:
        return original(*args, **kwargs)
    return dot_product_attention(*args, **{**options, **kwargs})


def _check(options: dict[str, Any]) -> None:
    """Refuses values that no call takes."""
    checks: dict[str, Callable[[str, Any], Any]] = {
        "engine": lambda name, x: _settings.engine(x, name),
        "target": lambda name, x: _settings.target(x, name),
        "workspace_limit": lambda name, x: _settings.workspace_limit(x, name),
        "tuning": lambda name, x: _settings.tuning(x, name),
        "deterministic": _settings.flag,
        "is_causal": _settings.flag,
        "return_residual": _settings.flag,
        "softcap": lambda name, x: number(name, x, "softcap"),
        "dropout_rate": lambda name, x: number(name, x, "rate"),
        "scale": lambda name, x: None if x is None else number(name, x, "scale"),
    }
    for name, value in options.items():
        if name in checks:
            checks[name](name, value)


@contextlib.contextmanager
def patch(**options: Any) -> Iterator[None]:
    """Within it, `jax.nn.dot_product_attention` is `lawson.jax.dot_product_attention`.

    What Lawson refuses raises `lawson.UnsupportedError`; nothing goes back to JAX's own. For the
    caller's thread (context) alone, and reentrant: the innermost `options` hold.

    Args:
      options: keywords of `lawson.jax.dot_product_attention` for every call, such as `engine`,
        `deterministic` or `tuning`, where the call does not give them.

    Raises:
      lawson.InvalidArgumentError: an option that it does not have, or a value that no call takes,
        when the context is entered.
    """
    for name, value in options.items():
        if name not in _OPTIONS:
            raise InvalidArgumentError(
                f"{name}: {_settings.shown(value)} is not allowed; expected keywords of "
                f"lawson.jax.dot_product_attention: {', '.join(_OPTIONS)}"
            )
    _check(options)
    global _open, _original, _exchanged
    with _lock:
        if _open == 0:
            _original = jax.nn.dot_product_attention
            _exchanged = functools.wraps(_original)(functools.partial(_choose, _original))
            jax.nn.dot_product_attention = _exchanged
        _open += 1
    token = _inside.set(dict(options))
    try:
        with _traced(("lawson", *((name, _key(options[name])) for name in sorted(options)))):
            yield
    finally:
        _inside.reset(token)
        with _lock:
            _open -= 1
            # Somebody may have put another function there since, which goes on as it likes.
            if _open == 0 and jax.nn.dot_product_attention is _exchanged:
                jax.nn.dot_product_attention = _original
