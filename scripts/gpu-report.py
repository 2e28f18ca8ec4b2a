"""What one run of scripts/gpu-test found, as gpu-test.json and as a short table.

Tests may leave facts (agreement counts, times) as JSON objects in $LAWSON_RESULTS/*.json; all of
them but their lists is taken over under the file's name.
"""

import argparse
import collections
import datetime
import json
import pathlib
import platform
import subprocess
import sys
import xml.etree.ElementTree


def first_line(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[0]
    except (OSError, IndexError):
        return None


def load(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def summary(fact):
    """A fact without its lists of single cases, which stay in its own file."""
    if not isinstance(fact, dict):
        return fact
    return {key: summary(value) for key, value in fact.items() if not isinstance(value, list)}


def without_paths(value):
    """A result is for others: where things lie on the machine that made it is not."""
    if isinstance(value, dict):
        return {k: without_paths(v) for k, v in value.items()
                if not (isinstance(v, str) and v.startswith("/"))}
    return [without_paths(v) for v in value] if isinstance(value, list) else value


def named(case):
    """The name and status of a test of ctest's, or of pytest's, which has no such attribute."""
    if case.get("status") is not None:
        status = {"run": "passed", "fail": "failed"}.get(case.get("status"), "skipped")
        return case.get("name"), status
    tags = {child.tag for child in case}
    status = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
    return f"gpu.python: {case.get('classname')}.{case.get('name')}", status


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--build-seconds", type=int)
    parser.add_argument("--test-seconds", type=int)
    args = parser.parse_args()

    suites = collections.defaultdict(collections.Counter)
    failed = []
    cases = []
    for results in sorted(args.out.glob("*.xml")):
        cases += xml.etree.ElementTree.parse(results).getroot().iter("testcase")
    for case in cases:
        name, status = named(case)
        # Here is a GPU: what says that there is none has shown nothing.
        if status == "skipped" and name.startswith("gpu."):
            status = "failed"
        suites[name.split(": ")[0].split(".")[0]][status] += 1
        if status == "failed":
            failed.append(name)
    # ctest writes its log before its results, and neither where it was not asked.
    if not cases or (args.out / "ctest.log").exists() > (args.out / "ctest.xml").exists():
        suites["ctest"]["failed"] += 1

    facts = {p.stem: summary(load(p)) for p in sorted((args.out / "facts").glob("*.json"))}
    name, driver = (part.strip() for part in args.gpu.split(",", 1))
    total = sum(suites.values(), collections.Counter())
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "gpu": name,
        "driver": driver,
        "compiler": first_line("g++", "--version"),
        "python": platform.python_version(),
        "lawson": without_paths(load(args.out / "info.json")),
        "build_seconds": args.build_seconds,
        "test_seconds": args.test_seconds,
        "passed": total["passed"],
        "failed": total["failed"],
        "skipped": total["skipped"],
        "failures": failed,
        "suites": {key: dict(value) for key, value in sorted(suites.items())},
        "facts": facts,
    }
    (args.out / "gpu-test.json").write_text(json.dumps(report, indent=2) + "\n")

    print(f"\n{name}, driver {driver}; built in {args.build_seconds} s, tested in {args.test_seconds} s")
    width = max(len(key) for key in suites)
    for key, count in sorted(suites.items()):
        print(f"{key:{width}} {count['passed']:6} passed {count['failed']:4} failed"
              f" {count['skipped']:4} skipped")
    for key, fact in facts.items():
        for part, value in fact.items() if isinstance(fact, dict) else [("", fact)]:
            print(f"{key} {part}: {json.dumps(value)}")
    skips = f", {total['skipped']} skipped" if total["skipped"] else ""
    print(f"{total['passed']} passed, {total['failed']} failed{skips}")
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
