"""Enum values and struct layouts, as the C program prints them, are those of the golden file: an
ABI that is in use only grows. LAWSON_UPDATE_GOLDEN=1 rewrites the file: read the difference."""

import argparse
import os
import re
import subprocess
import sys


def main():
    parser = argparse.ArgumentParser()
    for name in ("program", "golden"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--headers", required=True, nargs="+")
    args = parser.parse_args()
    printed = subprocess.run([args.program, "--layout"], check=True, capture_output=True,
                             text=True).stdout
    if os.environ.get("LAWSON_UPDATE_GOLDEN"):
        with open(args.golden, "w", encoding="utf-8") as file:
            file.write(printed)
        return 0
    with open(args.golden, encoding="utf-8") as file:
        golden = file.read()
    if printed != golden:
        lines, known = printed.splitlines(), golden.splitlines()
        for line in known:
            if line not in lines:
                print("was: ", line)
        for line in lines:
            if line not in known:
                print("now: ", line)
        return 1
    # Nothing of the headers is missing from the program's table.
    header = ""
    for path in args.headers:
        with open(path, encoding="utf-8") as file:
            header += file.read()
    names = re.findall(r"^\s+(LAWSON_\w+) = \d+", header, re.MULTILINE)
    names += re.findall(r"^typedef struct (lawson_\w+) \{", header, re.MULTILINE)
    missing = [name for name in names if not re.search(rf"^{name}\b", golden, re.MULTILINE)]
    for name in missing:
        print("not in layout.txt:", name)
    return 1 if missing or len(names) < 10 else 0


sys.exit(main())
