"""What both frontends are built from: of no framework, and one rule for every setting."""

from __future__ import annotations

import pytest

import lawson
from lawson import _settings
from new_process import in_new_process


def test_what_frontends_share_imports_no_framework() -> None:
    code = """
import importlib, pkgutil, sys
import lawson
import lawson._graph
names = [m.name for p in (lawson, lawson._graph)
         for m in pkgutil.iter_modules(p.__path__, p.__name__ + ".")]
others = ("lawson.jax", "lawson.torch", "lawson._torch", "lawson.lib", "lawson.__main__")
shared = [n for n in names if not n.startswith(others)]
for name in shared:
    importlib.import_module(name)
print(*(n for n in ("jax", "torch") if n in sys.modules), "lawson._settings" in shared)
"""
    assert in_new_process(code).split() == ["True"]


def test_values_are_shown_short() -> None:
    with pytest.raises(lawson.InvalidArgumentError) as caught:
        _settings.word("tuning", "x" * 1000, _settings.TUNINGS)
    told = str(caught.value)
    assert told.startswith("tuning: 'xxx") and "...' is" not in told and "... is not" in told
    assert len(told) < 200


@pytest.mark.parametrize(
    ("given", "policy", "platform", "expected"),
    [
        (("cudnn", "cpu"), "require", "cpu", ("cpu",)),
        (("cudnn", "cpu"), "require", "cuda", ("cudnn",)),
        (("cpu", "reference"), "allow", "cpu", ("cpu", "reference")),
        ((), "require", "cpu", ()),
    ],
)
def test_engines_on_a_platform(
    given: tuple[str, ...], policy: str, platform: str, expected: tuple[str, ...]
) -> None:
    assert _settings.engines_on(platform, given, policy) == expected


def test_engines_that_are_none_there() -> None:
    with pytest.raises(lawson.UnsupportedError, match="'cuda': engines names cpu, of which none"):
        _settings.engines_on("cuda", ("cpu",), "allow")
    with pytest.raises(
        lawson.InvalidArgumentError, match="cpu, reference are 2 engines .*'require'"
    ):
        _settings.engines_on("cpu", ("cpu", "reference"), "require")
