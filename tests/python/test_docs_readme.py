"""The code that README.md and docs/python.md show, each block by itself, as somebody pastes it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from new_process import in_new_process

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str) -> Iterator[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield block.group(1)


PYTHON = [
    (p, i, b) for p in ("README.md", "docs/python.md") for i, b in enumerate(blocks(p, "python"))
]


@pytest.mark.parametrize(
    ("page", "index", "code"), PYTHON, ids=lambda v: str(v)[:20].split("\n")[0]
)
def test_python(
    page: str, index: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in re.findall(r"^import (jax|torch)$", code, re.MULTILINE):
        pytest.importorskip(name)
    monkeypatch.setenv("LAWSON_ENGINE", "cpu")
    for name in ("plans.lawson", "trace.json"):
        code = code.replace(f'"{name}"', repr(str(tmp_path / name)))
    in_new_process(code, cwd=ROOT)


def test_there_is_one_for_each_framework() -> None:
    shown = "".join(blocks("README.md", "python"))
    assert "import jax\n" in shown and "import torch\n" in shown
    assert len(PYTHON) == 5


@pytest.mark.parametrize(("language", "flags"), [("c", ["-std=c11"]), ("cpp", ["-std=c++20"])])
def test_c_and_cpp_compile(language: str, flags: list[str]) -> None:
    compiler = shutil.which("cc" if language == "c" else "c++")
    if compiler is None:
        pytest.skip("no compiler")
    (code,) = blocks("README.md", language)
    done = subprocess.run(
        [compiler, *flags, "-x", "c" if language == "c" else "c++", "-fsyntax-only", "-Wall",
         "-Wextra", "-Werror", f"-I{ROOT / 'include'}", "-"],
        input=code, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
