"""The examples of docs/torch*.md, run from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("torch*.md"))


def test_there_are_pages() -> None:
    assert "torch-attention.md" in PAGES


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
