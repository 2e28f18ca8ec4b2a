"""Exported, declared, listed and linked functions are the same set.

Exported: `nm -D` of the library. Declared: LAWSON_API in the headers. Listed: the golden file, from
which nothing may disappear. Linked: the C program refers to each.
"""

import argparse
import re
import subprocess
import sys


def nm(tool, path, *options):
    text = subprocess.run([tool, "-D", *options, path], check=True, capture_output=True,
                          text=True).stdout
    return {line.split()[-1] for line in text.splitlines() if line.split()}


def main():
    parser = argparse.ArgumentParser()
    for name in ("nm", "library", "program", "golden"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--headers", required=True, nargs="+")
    args = parser.parse_args()

    exported = nm(args.nm, args.library, "--defined-only")
    declared = set()
    for header in args.headers:
        with open(header, encoding="utf-8") as file:
            declared |= set(re.findall(r"^LAWSON_API[^;(]*?(\w+)\(", file.read(), re.MULTILINE))
    with open(args.golden, encoding="utf-8") as file:
        listed = set(file.read().split())
    linked = {name for name in nm(args.nm, args.program, "--undefined-only")
              if name.startswith("lawson_")}
    failures = 0
    for what, names in (("exported by the library", exported), ("declared in a header", declared),
                        ("linked by abi_test", linked)):
        for name in sorted(listed - names):
            print(f"{name}: in symbols.txt, not {what}")
            failures += 1
        for name in sorted(names - listed):
            print(f"{name}: {what}, not in symbols.txt")
            failures += 1
    print(f"{len(listed)} functions")
    return 1 if failures else 0


sys.exit(main())
