"""What the documents show of the tool is what it prints: each `$ lawson ...` in them is run."""

import os
import re
import shlex
import unittest

from support import SOURCE, WITH_CUDNN, Case, environment, lawson, main

NUMBER = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")


def examples(page):
    """(command, lines that it is said to print) of every code block with a `$ `."""
    for block in re.findall(r"(?ms)^```\w*\n(.*?)^```$", page):
        parts = re.split(r"(?m)^\$ ", block)
        for part in parts[1:]:
            command, *lines = part.rstrip("\n").split("\n")
            yield command, lines


def comparable(lines):
    """Without what differs from machine to machine and run to run."""
    text = "\n".join(lines)
    text = re.sub(r"\b[0-9a-f]{32}\b", "ID", text)
    text = re.sub(r"\bpid=\d+", "pid=N", text)
    text = re.sub(r"-(generic|v[234])\b", "-ISA", text)
    if " ms" in text:
        text = NUMBER.sub("N", text)
    return [re.sub(r" +", " ", line).rstrip() for line in text.split("\n")]


class Documents(Case):
    def shown(self, name, stream):
        """Runs them all; `...` stands for what is left out at the beginning or end."""
        found = list(examples((SOURCE / name).read_text()))
        self.assertTrue(found)
        for command, lines in found:
            needs_cudnn = "--target" in command or "cudnn" in "\n".join(lines)
            if needs_cudnn and not WITH_CUDNN:
                continue
            if "--target" in command and os.path.exists("/dev/nvidiactl"):
                continue  # what is live is judged otherwise
            with self.subTest(document=name, command=command):
                words = shlex.split(command)
                tool = words.index("lawson")
                variables = dict(word.split("=", 1) for word in words[:tool])
                result = lawson(*words[tool + 1:], env=environment(COLUMNS=None, **variables),
                                cwd=SOURCE)
                expected = [line for line in lines if line != "..."]
                printed = getattr(result, stream).splitlines()
                if lines[-1] == "...":
                    printed = printed[:len(expected)]
                self.assertEqual(comparable(printed), comparable(expected), result.err)

    def test_readme(self):
        self.shown("README.md", "out")

    def test_diagnostics(self):
        self.shown("docs/diagnostics.md", "err")


if __name__ == "__main__":
    main()
