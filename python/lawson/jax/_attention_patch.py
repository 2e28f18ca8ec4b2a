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
from collections.abc import Iterator
from typing import Any

import jax
import jax.nn

from lawson import _settings
from lawson._errors import InvalidArgumentError
from lawson.jax._attention import dot_product_attention

# Of the innermost open context: keywords for every call; None: not inside.
_inside: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "lawson_patch", default=None
)
_OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(dot_product_attention).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)
_traced = jax.make_user_context(default_value=None)  # part of the key of jax.jit's caches
_lock = threading.Lock()
_open = 0
_original: Any = None


def _choose(*args: Any, **kwargs: Any) -> Any:
    options = _inside.get()
    if options is None:
        return _original(*args, **kwargs)
    return dot_product_attention(*args, **{**options, **kwargs})


@contextlib.contextmanager
def patch(**options: Any) -> Iterator[None]:
    """Within it, `jax.nn.dot_product_attention` is `lawson.jax.dot_product_attention`.

    What Lawson refuses raises `lawson.UnsupportedError`; nothing goes back to JAX's own. For the
    caller's thread (context) alone, and reentrant: the innermost `options` hold.

    Args:
      options: keywords of `lawson.jax.dot_product_attention` for every call, such as `engine`,
        `deterministic` or `tuning`, where the call does not give them.

    Raises:
      lawson.InvalidArgumentError: an option that it does not have, when the context is entered.
    """
    for name, value in options.items():
        if name not in _OPTIONS:
            raise InvalidArgumentError(
                f"{name}: {_settings.shown(value)} is not allowed; expected keywords of "
                f"lawson.jax.dot_product_attention: {', '.join(_OPTIONS)}"
            )
    global _open, _original
    with _lock:
        if _open == 0:
            _original = jax.nn.dot_product_attention
            jax.nn.dot_product_attention = functools.wraps(_original)(_choose)
        _open += 1
    token = _inside.set(dict(options))
    try:
        with _traced(("lawson", *sorted((name, repr(value)) for name, value in options.items()))):
            yield
    finally:
        _inside.reset(token)
        with _lock:
            _open -= 1
            if _open == 0:
                jax.nn.dot_product_attention = _original
