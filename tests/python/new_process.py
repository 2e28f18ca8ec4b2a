"""Python code in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def in_new_process(code: str, *arguments: str, cwd: Path | None = None) -> str:
    """What it prints; it has to end well."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, "LAWSON_CACHE": "off"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
