"""Plans that were compiled on a machine without a GPU, run on this one.

    gpu-carried.py LAWSON KIT OUT SCRATCH

For each KIT/plans/NAME.bundle: executes that file on the GPU, holds the numbers against the reference
engine, and compares every output bit for bit with the plan that this machine compiles itself.
Writes OUT/carried.xml (JUnit), which scripts/gpu-report.py counts.
"""

import pathlib
import subprocess
import sys
import xml.sax.saxutils


def lawson(binary, *arguments):
    run = subprocess.run([binary, *map(str, arguments)], capture_output=True, text=True)
    if run.returncode != 0:
        raise RuntimeError(f"lawson {' '.join(map(str, arguments))}: exit {run.returncode}\n"
                           f"{run.stdout}{run.stderr}")


def differing(left, right):
    """Names of the saved arrays that are not the same bytes."""
    names = sorted(path.name for path in left.glob("*.npy"))
    if not names:
        raise RuntimeError(f"{left} holds no arrays")
    return [name for name in names if (left / name).read_bytes() != (right / name).read_bytes()]


def carried(binary, bundle, spec, scratch):
    own = scratch / "own.bundle"
    lawson(binary, "run", spec, "--engine", "cudnn", "--plan", bundle, "--verify",
           "--save", scratch / "carried")
    lawson(binary, "compile", spec, "--target", "h200", "-o", own)
    lawson(binary, "run", spec, "--engine", "cudnn", "--plan", own, "--save", scratch / "own")
    differ = differing(scratch / "carried", scratch / "own")
    if differ:
        raise RuntimeError(f"not the same bits: {', '.join(differ)}")


def main(binary, kit, out, work):
    root = pathlib.Path(__file__).resolve().parent.parent
    cases = []
    for bundle in sorted((pathlib.Path(kit) / "plans").glob("*.bundle")):
        scratch = pathlib.Path(work) / bundle.stem
        scratch.mkdir(parents=True, exist_ok=True)
        name = xml.sax.saxutils.quoteattr(f"carried plan: {bundle.stem}")
        try:
            carried(binary, bundle, root / "examples" / "specs" / f"{bundle.stem}.json", scratch)
            cases.append(f'<testcase name={name} status="run"/>')
        except (OSError, RuntimeError) as error:
            print(f"{bundle.name}: {error}", file=sys.stderr)
            cases.append(f'<testcase name={name} status="fail"/>')
    text = "\n".join(['<testsuite name="carried">', *cases, "</testsuite>"])
    (pathlib.Path(out) / "carried.xml").write_text(text + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
