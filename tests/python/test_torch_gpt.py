"""examples/torch/train_gpt.py: 20 steps on the CPU, and the same losses as without Lawson."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/torch/train_gpt.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt_torch", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt_torch"] = module
    spec.loader.exec_module(module)
    return module


def test_twenty_steps_are_those_of_the_unfused_model(
    example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAWSON_ENGINE", "cpu")
    losses = example.main(["--check", "--plans", "--steps", "20", "--kv-heads", "2"])
    out = capsys.readouterr().out
    assert len(losses) == 20
    # Bytes at random have ln 256 = 5.5 nats.
    assert 5.3 < losses[0] < 5.7 and losses[-1] < 4.5
    assert "largest relative difference" in out
    names = [line.split()[0] for line in out.splitlines() if " engine cpu " in line]
    for name in ("attention", "Up.forward", "Down.forward"):
        forward = f"{name}.forward" if name == "attention" else name
        assert (names.count(forward), names.count(f"{name}.backward")) == (2, 2), out


def test_other_losses_end_the_program(example: ModuleType) -> None:
    example.compare([1.0, 2.0], [1.0, 2.00001], 1e-4)
    with pytest.raises(SystemExit, match="not those of the unfused one"):
        example.compare([1.0, 2.0], [1.0, 2.001], 1e-4)
