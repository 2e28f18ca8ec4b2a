"""The store on the disk: what is in it, whether it is sound, what may leave, bundles out and in."""

import os
import time
import unittest

from support import SPECS, Case, attention, environment, main, needs_cudnn

SEED = SPECS / "seed.json"
DAY = 24 * 3600


class Cache(Case):
    """Each test has a store of its own, with three plans of the CPU engine."""

    def setUp(self):
        super().setUp()
        self.root = self.folder / "cache"
        self.env = environment(LAWSON_CACHE_DIR=self.root)
        self.store = self.root / "store"
        specs = [self.write(f"{n}.json", attention(heads=n)) for n in (1, 2, 3)]
        self.bundle = self.folder / "plans.lawson"
        self.expect(0, "compile", *specs, "--target", "cpu", "-o", self.bundle,
                    env=environment(LAWSON_CACHE="off"))

    def cache(self, code, *arguments, **changes):
        env = dict(self.env, **{k: str(v) for k, v in changes.items()})
        return self.expect(code, "cache", *arguments, env=env)

    def fill(self):
        self.cache(0, "import", self.bundle)
        return sorted(self.store.glob("*.plan"))

    def entries(self):
        return self.cache(0, "list", "--json").json["entries"]

    def test_empty(self):
        self.assertEqual(self.entries(), [])
        self.assertIn("0 entries", self.cache(0, "list").out)
        self.cache(0, "verify")
        self.cache(0, "prune", "--all")
        self.assertIn("no plan", self.cache(1, "export", self.folder / "x").out)
        self.assertFalse((self.folder / "x").exists())
        self.assertFalse(self.root.exists())

    def test_import_list_export(self):
        files = self.fill()
        self.assertEqual(len(files), 3)
        self.assertEqual(self.store.stat().st_mode & 0o777, 0o700)
        listed = self.cache(0, "list", "--json").json
        self.assertEqual(listed["folder"], str(self.store))
        self.assertEqual(listed["bytes"], sum(f.stat().st_size for f in files))
        for entry in listed["entries"]:
            self.assertEqual((entry["kind"], entry["engine"], entry["target"], entry["current"]),
                             ("plan", "cpu", "cpu", True))
            self.assertEqual(len(entry["key"]), 32)
            self.assertIn(self.store / entry["file"], files)
            self.assertLess(abs(time.time() - entry["last_use"]), 300)
        text = self.cache(0, "list").out
        for word in ("KIND", "plan", "cpu", "3 entries", str(self.store)):
            self.assertIn(word.lower(), text.lower())

        again = self.folder / "again.lawson"
        self.assertEqual(self.cache(0, "export", again, "--json").json["plans"], 3)
        other = self.folder / "other"
        self.assertEqual(self.cache(0, "import", again, "--json", LAWSON_CACHE_DIR=other).json["plans"], 3)
        self.assertEqual([f.read_bytes() for f in sorted((other / "store").iterdir())],
                         [f.read_bytes() for f in files])
        self.cache(2, "import", self.folder / "1.json")
        self.cache(2, "import", self.folder / "missing")

    def test_exported_plans_run(self):
        self.fill()
        again = self.folder / "again.lawson"
        self.cache(0, "export", again)
        self.expect(0, "run", self.folder / "2.json", "--engine", "cpu", "--plan", again, "--verify",
                    env=self.env)

    def test_verify_names_what_is_bad(self):
        files = self.fill()
        self.assertIn("sound", self.cache(0, "verify").out)
        data = bytearray(files[1].read_bytes())
        data[-1] ^= 1
        files[1].write_bytes(data)
        files[2].write_bytes(b"")
        answer = self.cache(1, "verify")
        for path in files[1:]:
            self.assertIn(path.name, answer.out)
        self.assertNotIn(files[0].name, answer.out)
        bad = self.cache(1, "verify", "--json").json["bad"]
        self.assertEqual({entry["file"] for entry in bad}, {path.name for path in files[1:]})
        self.assertTrue(all(entry["defect"] for entry in bad))
        # The damage that the head shows is listed, and nothing of it is exported.
        self.assertIn("unreadable", self.cache(0, "list").out)
        self.assertEqual(self.cache(0, "export", self.folder / "x", "--json").json["plans"], 1)
        removing = self.cache(1, "verify", "--remove").out
        self.assertEqual(removing.count("(removed)"), 2, removing)
        self.assertIn(f"{self.store}: 1 entry", removing)
        self.assertEqual(sorted(self.store.glob("*.plan")), files[:1])
        self.cache(0, "verify")

    def test_prune(self):
        files = self.fill()
        for days, path in zip((1, 20, 40), files):
            os.utime(path, (time.time() - days * DAY,) * 2)
        self.assertEqual([entry["file"] for entry in self.entries()], [path.name for path in files])
        self.assertIn("20 d ago", self.cache(0, "list").out)
        self.assertEqual(self.cache(0, "prune", "--older-than", "60d", "--json").json["removed"], 0)
        self.assertEqual(self.cache(0, "prune", "--older-than", "30d", "--json").json["removed"], 1)
        self.assertFalse(files[2].exists())
        stays, leaves = (path.stat().st_size for path in files[:2])
        self.assertEqual(self.cache(0, "prune", "--to-size", stays, "--json").json,
                         {"folder": str(self.store), "removed": 1, "removed_bytes": leaves,
                          "kept": 1, "kept_bytes": stays})
        self.assertTrue(files[0].exists())
        self.assertEqual(self.cache(0, "prune", "--to-size", "1GiB", "--json").json["removed"], 0)
        self.assertIn("1 removed", self.cache(0, "prune", "--all").out)
        self.assertEqual(self.entries(), [])

    def test_modes(self):
        self.fill()
        self.assertEqual(len(self.cache(0, "list", "--json", LAWSON_CACHE="ro").json["entries"]), 3)
        self.cache(0, "verify", LAWSON_CACHE="ro")
        self.cache(0, "export", self.folder / "x", LAWSON_CACHE="ro")
        for arguments in (("prune", "--all"), ("verify", "--remove"), ("import", self.bundle)):
            self.assertIn("read-only", self.cache(3, *arguments, LAWSON_CACHE="ro").err)
        self.assertIn("LAWSON_CACHE", self.cache(3, "list", LAWSON_CACHE="off").err)
        wrong = "LAWSON_CACHE: 'yes' is not allowed; expected off, ro or rw"
        self.assertIn(wrong, self.cache(2, "list", LAWSON_CACHE="yes").err)
        env = dict(self.env, LAWSON_CACHE="yes")
        for arguments in (("check", SEED, "--target", "cpu"), ("probe", SEED, "--target", "cpu"),
                          ("explain", SEED, "--target", "cpu"), ("run", SEED, "--engine", "cpu"),
                          ("bench", SEED, "--engine", "cpu"), ("print", SEED), ("targets",), ("info",),
                          ("compile", SEED, "--target", "cpu", "-o", self.folder / "y")):
            self.assertIn(wrong, self.expect(2, *arguments, env=env).err)

    def test_usage(self):
        for arguments, words in (
                ((), ("list", "verify", "prune", "export", "import")),
                (("frob",), ("'frob'", "list", "import")),
                (("prune",), ("--to-size", "--older-than", "--all")),
                (("prune", "--to-size", "much"), ("--to-size", "much")),
                (("prune", "--to-size", "-1"), ("--to-size", "'-1' is not a size")),
                (("prune", "--older-than", "3 weeks"), ("--older-than", "weeks")),
                (("prune", "--older-than", "3"), ("--older-than",)),
                (("export",), ("bundle", "required")),
                (("import",), ("bundle", "required")),
                (("list", "more"), ("more",))):
            with self.subTest(arguments=arguments):
                error = self.cache(2, *arguments).err
                for word in words:
                    self.assertIn(word.lower(), error.lower())
        for verb in ("list", "verify", "prune", "export", "import"):
            self.assertIn(f"Example:\n  lawson cache {verb}", self.cache(0, verb, "--help").out)
        self.assertIn("Example:", self.cache(0, "--help").out)

    def test_info(self):
        self.fill()
        store = self.expect(0, "info", "--json", env=self.env).json["store"]
        self.assertEqual((store["folder"], store["mode"], store["entries"]),
                         (str(self.store), "rw", 3))
        self.assertEqual(store["bytes"], sum(f.stat().st_size for f in self.store.iterdir()))
        off = self.expect(0, "info", "--json", env=dict(self.env, LAWSON_CACHE="off")).json["store"]
        self.assertEqual(off, {"mode": "off"})

    @unittest.skipIf(os.geteuid() != 0, "only root can give files to another user")
    def test_a_folder_of_another_user(self):
        self.fill()
        os.chown(self.store, 65534, 65534)
        self.assertIn("another user", self.cache(3, "list").err)
        self.assertIn("another user", self.expect(0, "info", "--json", env=self.env).json["store"]["error"])

    @needs_cudnn
    def test_the_store_is_used(self):
        spec = self.write("gpu.json", attention(dtype="bf16", heads=2, seqlen_q=128, head_dim_qk=64))
        probe = ("probe", spec, "--target", "h200", "--json")

        def build(name):  # a bundle that is there would be asked first
            return self.expect(0, "compile", spec, "--target", "h200", "-o", self.folder / name,
                               env=self.env)

        build("a.lawson")
        verdict = self.expect(0, *probe, env=self.env).json
        kinds = {entry["kind"]: entry for entry in self.entries()}
        self.assertEqual(set(kinds), {"plan", "verdict"})
        self.assertEqual(kinds["plan"]["target"], "h200")
        before = {path.name: path.stat().st_ino for path in self.store.iterdir()}
        build("b.lawson")
        self.assertEqual(self.expect(0, *probe, env=self.env).json, verdict)
        self.assertEqual({path.name: path.stat().st_ino for path in self.store.iterdir()}, before)
        # A damaged store: the same answers, one warning of each process, and whole again.
        for path in self.store.iterdir():
            path.write_bytes(path.read_bytes()[:-1])
        for answer in (build("c.lawson"), self.expect(0, *probe, env=self.env)):
            self.assertEqual(answer.err.count("warning"), 1, answer.err)
        self.assertEqual(self.expect(0, *probe, env=self.env).json, verdict)
        self.cache(0, "verify")


if __name__ == "__main__":
    main()
