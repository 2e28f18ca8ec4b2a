"""The inspection that is under way, if one is: what operators tell it, and the device it asks about."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@dataclasses.dataclass(frozen=True)
class _Asked:
    target: str | None
    found: list[Any] = dataclasses.field(default_factory=list)


_lock = threading.RLock()  # a function that is inspected may inspect another one
_asked: _Asked | None = None  # autograd's threads add to it


@contextmanager
def recording(target: str | None) -> Iterator[list[Any]]:
    """Within it, what operators tell is in the list. ``target``: of what they tell; None: the device
    that the tensors are on."""
    global _asked
    with _lock:
        outer, _asked = _asked, _Asked(target)
        try:
            yield _asked.found
        finally:
            _asked = outer


def record(tell: Callable[[str | None], Any]) -> None:
    """For operators' descriptions (``register_fake``): ``tell`` says what would run, on a target or
    where the tensors are, and is called only while something is inspected."""
    if _asked is not None:
        _asked.found.append(tell(_asked.target))


def is_elsewhere() -> bool:
    """Whether another device than that of the tensors is asked about."""
    return _asked is not None and _asked.target is not None
