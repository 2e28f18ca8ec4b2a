"""The command-line tool, as `lawson` and as `python -m lawson`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    """Becomes the tool that came with the package."""
    tool = Path(__file__).parent / "bin/lawson"
    if not tool.exists():
        sys.exit(f"lawson: {tool} is not there; this package was built without the tool")
    os.execv(tool, ["lawson", *sys.argv[1:]])
