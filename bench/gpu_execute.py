"""What one call of a small attention costs on the host: Lawson's and torch's, in turns.

    python3 bench/gpu_execute.py BUILD/bin/lawson-bench-execute [--json FILE]

torch calls F.scaled_dot_product_attention with its cuDNN backend, without gradients, for the
config of lawson-bench-execute. Needs a GPU and torch. How fast it was is for the reader.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import attention
from torch.nn import functional as F

CALLS = 200  # fewer than the driver's queue holds
ROUNDS = 31


def torch_microseconds() -> dict[str, float]:
    """Median microseconds of one call, by backend."""
    shape = (1, 128, 2, 64)  # [b, s, h, d], as lawson-bench-execute's
    q, k, v = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(3)
    )
    found = {}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        backend = getattr(attention.SDPBackend, name)
        times = []
        with torch.no_grad(), attention.sdpa_kernel(backend):
            for _ in range(ROUNDS):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(CALLS):
                    F.scaled_dot_product_attention(q, k, v, is_causal=True)
                times.append((time.perf_counter() - begin) / CALLS * 1e6)
        torch.cuda.synchronize()
        found[name.lower()] = statistics.median(times[1:])
    return found


def main() -> None:
    """Prints a table of both, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=Path, help="lawson-bench-execute")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    before = torch_microseconds()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "execute.json"
        subprocess.run([arguments.program, "--json", result], check=True, stdout=subprocess.DEVNULL)
        ours = json.loads(result.read_text())
    after = torch_microseconds()
    document = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "torch_us": {"before": before, "after": after},
        "lawson": ours,
    }
    print(json.dumps(document, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
