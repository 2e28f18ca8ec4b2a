"""The examples of docs/jax.md and docs/jax-attention.md, run from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["jax.md", "jax-attention.md"]


@pytest.mark.parametrize("page", PAGES)
def test_examples(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAWSON_ENGINE", "cpu")
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert blocks
    names: dict[str, Any] = {"__name__": "__docs__"}
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        code = compile("\n" * line + block.group(1), str(DOCS / page), "exec")
        exec(code, names)  # noqa: S102


def test_the_refusal_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAWSON_ENGINE", "cpu")
    import jax.numpy as jnp

    import lawson
    from lawson.jax import fusion

    def ranked(x: Any) -> Any:
        return jnp.sort(x * 2)

    with pytest.raises(lawson.UnsupportedError) as caught:
        fusion(ranked)(jnp.ones(3))
    shown = (DOCS / "jax.md").read_text(encoding="utf-8")
    told = re.sub(r"at \w+\.py:\d+", "at model.py:6", str(caught.value))
    assert told in shown
