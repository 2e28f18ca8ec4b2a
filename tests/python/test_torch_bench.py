"""bench/gpu_torch.py, which needs a GPU, in small on the host: that it runs, and checks what it times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench/gpu_torch.py"


def test_every_section_runs(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(BENCH), "--cpu", "--rounds", "2", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["device"] == "cpu" and found["versions"]["torch"]
    assert set(found["host"]["without gradient"]) == {"lawson", "torch cudnn", "torch"}
    assert {p["engine"] for p in found["host"]["plans"]} == {"cpu"}
    assert {p["name"] for row in found["attention"] for p in row["plans"]} == {
        "attention.forward", "attention.backward"
    }  # fmt: skip
    assert len(found["fusions"]) == 3 and len(found["graph"]["plans"]) == 1
    names = [p["name"] for p in found["gpt"]["plans, lawson, fused MLP"]]
    assert names.count("lambda") == 2 and names.count("lambda.backward") == 2
    assert found["gpt"]["first losses"].keys() == found["gpt"]["peak bytes"].keys()
