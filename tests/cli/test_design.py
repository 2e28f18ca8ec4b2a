"""docs/design.md's drawing of dependencies is what the CMake files say."""

import re

from support import SOURCE, Case, main


def drawn_edges(page):
    """Lines `from -> to, to` of the block that is marked as the dependency drawing."""
    block = re.search(r"```dependencies\n(.*?)```", page, re.S).group(1)
    edges = {}
    for line in block.splitlines():
        if not line.strip():
            continue
        name, arrow, targets = re.fullmatch(r"\s*([a-z]+)\s*(->)?\s*([a-z, ]*?)\s*", line).groups()
        edges[name] = set(filter(None, re.split(r",\s*", targets)))
        assert bool(arrow) == bool(edges[name]), line
    return edges


def built_edges():
    """LINKS and PRIVATE of every lawson_folder below src/, folders only."""
    edges = {}
    for path in sorted((SOURCE / "src").rglob("CMakeLists.txt")):
        text = re.sub(r"#.*", "", path.read_text())
        for call in re.findall(r"lawson_folder\(\s*([^()]*(?:\([^()]*\)[^()]*)*)\)", text):
            name = call.split()[0]
            links = re.search(r"\bLINKS\b(.*)", call, re.S)
            # $<TARGET_NAME_IF_EXISTS:lawson_cudnn> is an edge of the builds that have it.
            found = set(re.findall(r"\blawson_([a-z]+)\b", links.group(1) if links else ""))
            edges[name] = found - {"deps", "options"}
    return edges


class Drawing(Case):
    def test_drawing_is_true(self):
        page = (SOURCE / "docs" / "design.md").read_text()
        drawn, built = drawn_edges(page), built_edges()
        self.assertGreaterEqual(len(built), 8)
        for name in sorted(set(drawn) | set(built)):
            self.assertEqual(drawn.get(name), built.get(name), f"edges of {name}")

    def test_no_cycles(self):
        edges = built_edges()
        def reach(name, path):
            self.assertNotIn(name, path)
            for target in edges.get(name, ()):
                reach(target, path + [name])
        for name in edges:
            reach(name, [])


if __name__ == "__main__":
    main()
