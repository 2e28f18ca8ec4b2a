"""Every C block of the pages is quoted, word for word, from a program that is compiled and run."""

import argparse
import re
import sys


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pages", required=True, nargs="+")
    parser.add_argument("--sources", required=True, nargs="+")
    args = parser.parse_args()
    sources = ""
    for path in args.sources:
        with open(path, encoding="utf-8") as file:
            sources += file.read()
    bad = count = 0
    for path in args.pages:
        with open(path, encoding="utf-8") as file:
            page = file.read()
        for block in re.findall(r"^```c(?:pp)?\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
            count += 1
            if block not in sources:
                bad += 1
                print(f"{path}: not in any source:\n{block}")
    print(f"{count} snippets")
    return 1 if bad or count == 0 else 0


sys.exit(main())
