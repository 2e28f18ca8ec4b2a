"""Adds up JUnit files: count-results.py DIR SUITE=SECONDS...

Prints a line per suite, the names of failed tests, and one closing line of counts;
exits 1 when something failed or nothing ran.
"""

import pathlib
import sys
import xml.etree.ElementTree


def main(folder, suites):
    total_passed = total_failed = total_skipped = 0
    failures = []
    print(f"\n{'suite':10} {'passed':>8} {'failed':>8} {'skipped':>8} {'seconds':>8}")
    for suite in suites:
        name, seconds = suite.split("=")
        tree = xml.etree.ElementTree.parse(pathlib.Path(folder) / f"{name}.xml").getroot()
        tests = int(tree.get("tests", 0))
        failed = int(tree.get("failures", 0)) + int(tree.get("errors", 0))
        skipped = int(tree.get("skipped", 0)) + int(tree.get("disabled", 0))
        passed = tests - failed - skipped
        print(f"{name:10} {passed:8} {failed:8} {skipped:8} {seconds:>8}")
        cases = [case.get("name") for case in tree.iter("testcase") if case.get("status") == "fail"]
        failures += [f"{name}: {case}" for case in cases or ["did not build or run"][:failed]]
        total_passed += passed
        total_failed += failed
        total_skipped += skipped
    for failure in failures:
        print(f"FAILED {failure}")
    skips = f", {total_skipped} skipped" if total_skipped else ""
    print(f"{total_passed} passed, {total_failed} failed{skips}")
    return 0 if total_passed and not total_failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
