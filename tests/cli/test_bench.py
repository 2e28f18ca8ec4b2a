"""bench and --tuning: rows say what ran, choices are stored and reused, limits are measured."""

import json
import os
import stat

from support import SPECS, Case, attention, environment, graph, lawson, main, refused


class Tuned(Case):
    def env(self, **changes):
        return environment(LAWSON_CACHE_DIR=self.folder / "cache", **changes)

    def files(self):
        return sorted((self.folder / "cache").rglob("*.tuned"))


class Bench(Tuned):
    def test_rows(self):
        specs = [SPECS / "seed.json", self.write("a.json", attention(seqlen_q=64, mask="causal",
                                                                     **{"pass": "training"}))]
        result = self.expect(0, "bench", *specs, "--engine", "cpu", "--rounds", "3", "--json",
                             env=self.env()).json
        self.assertEqual((result["engine"], result["target"]), ("cpu", "cpu"))
        limits = result["limits"]
        self.assertEqual(limits["product"]["what"], "1024 x 1024 x 1024 f32")
        self.assertIn("memcpy", limits["copy"]["what"])
        self.assertGreater(limits["flops_per_second"], 0)
        self.assertGreater(limits["bytes_per_second"], 0)
        self.assertEqual(len(result["rows"]), 3)  # training: forward and backward
        for row in result["rows"]:
            self.assertEqual(row["engine"], "cpu")
            self.assertEqual(len(row["plan_id"]), 32)
            self.assertTrue(row["plan_name"].startswith("cpu-"))
            self.assertEqual(row["rounds"], 3)
            self.assertGreaterEqual(row["buffer_sets"], 2)
            times = row["milliseconds"]
            self.assertLessEqual(times["min"], times["median"])
            self.assertLessEqual(times["median"], times["max"])
            self.assertAlmostEqual(row["flops_per_second"] * times["median"] * 1e-3 / row["flops"], 1)
            self.assertIn(row["limit"]["by"], ("products", "memory"))
            self.assertGreater(row["limit"]["fraction"], 0)
            self.assertNotIn("tuning", row)
        forward, backward = result["rows"][1:]
        # 2 heads of 64 x 64 scores, the half of them, 8 + 8 deep.
        self.assertEqual(forward["flops"], 2 * 2 * 64 * 64 * 16 / 2)
        self.assertEqual(backward["flops"], 2.5 * forward["flops"])

    def test_the_plan_is_the_verdicts(self):
        verdict = self.expect(0, "probe", SPECS / "seed.json", "--engine", "cpu", "--build",
                              "--json").json
        result = self.expect(0, "bench", SPECS / "seed.json", "--engine", "cpu", "--rounds", "1",
                             "--no-limits", "--json").json
        self.assertNotIn("limits", result)
        self.assertEqual(result["rows"][0]["plan_id"], verdict["plan_id"])
        self.assertEqual(result["rows"][0]["key"], verdict["key"])

    def test_text(self):
        text = self.expect(0, "bench", SPECS / "seed.json", "--engine", "cpu", "--rounds", "2",
                           "--tuning", "quick", env=self.env()).out
        for word in ("limits:", "1024 x 1024 x 1024 f32", "median", "GFLOP/s", "of the limit",
                     "cpu-matmul", "tuning quick"):
            self.assertIn(word, text)

    def test_what_does_not_run_is_a_row_and_the_exit_code(self):
        spec = self.write("no.json", refused())
        result = self.expect(1, "bench", SPECS / "seed.json", spec, "--engine", "cpu", "--rounds",
                             "1", "--no-limits", "--json").json
        self.assertIn("milliseconds", result["rows"][0])
        self.assertEqual(result["rows"][1]["error"]["kind"], "unsupported")
        self.assertIn("softmax", result["rows"][1]["error"]["message"])
        result = self.expect(3, "bench", SPECS / "seed.json",
                             env=environment(CUDA_VISIBLE_DEVICES=""))
        self.assertIn("--engine cpu", result.err)

    def test_bad_input(self):
        seed = SPECS / "seed.json"
        for option, value in (("--rounds", "0"), ("--rounds", "x"), ("--tuning", "best"),
                              ("--deadline", "-1"), ("--seed", "-1"), ("--engine", "abacus")):
            with self.subTest(option=option, value=value):
                result = self.expect(2, "bench", seed, f"{option}={value}")
                self.assertIn(option, result.err)
                self.assertIn(value, result.err)


class Tuning(Tuned):
    def compile(self, *more, env=None):
        return self.expect(0, "run", SPECS / "seed.json", "--engine", "cpu", "--repeat", "1",
                           "--tuning", "exhaustive", "--json", *more, env=env or self.env())

    def bench(self, *more, code=0, env=None):
        result = self.expect(code, "bench", SPECS / "seed.json", "--engine", "cpu", "--rounds", "1",
                             "--no-limits", "--tuning", "exhaustive", "--json", *more,
                             env=env or self.env())
        return result, result.json["rows"][0]

    def test_the_choice_is_stored_and_reused(self):
        _, first = self.bench()
        report = first["tuning"]
        self.assertEqual(report["tuning"], "exhaustive")
        self.assertFalse(report["stored"])
        standings = [c["standing"] for c in report["candidates"]]
        self.assertEqual(standings.count("chosen"), 1)
        self.assertEqual(len(self.files()), 1)
        self.assertEqual(stat.S_IMODE(os.stat(self.files()[0].parent).st_mode), 0o700)

        result, second = self.bench()
        self.assertTrue(second["tuning"]["stored"])
        self.assertEqual(second["plan_id"], first["plan_id"])
        self.assertEqual(result.err, "")
        ran = self.compile().json["graphs"][0]
        self.assertEqual(ran["plan_id"], first["plan_id"])
        _, again = self.bench("--retune")
        self.assertFalse(again["tuning"]["stored"])

        verdict = self.expect(0, "probe", SPECS / "seed.json", "--engine", "cpu", "--build",
                              "--tuning", "exhaustive", "--json", env=self.env()).json
        self.assertIn("tuned (exhaustive)", verdict["choice"])

    def test_a_damaged_file_is_one_warning(self):
        self.bench()
        path = self.files()[0]
        path.write_bytes(path.read_bytes()[:-5])
        result, row = self.bench()
        self.assertFalse(row["tuning"]["stored"])
        self.assertEqual(result.err.count("warning"), 1)
        self.assertIn(path.name, result.err)
        result, row = self.bench()
        self.assertTrue(row["tuning"]["stored"])
        self.assertEqual(result.err, "")

    def test_modes_of_the_cache(self):
        self.bench(env=self.env(LAWSON_CACHE="off"))
        self.bench(env=self.env(LAWSON_CACHE="ro"))
        self.assertEqual(self.files(), [])
        result = lawson("run", SPECS / "seed.json", "--engine", "cpu", "--tuning", "quick",
                        env=self.env(LAWSON_CACHE="maybe"))
        self.assertEqual(result.code, 2)
        for word in ("LAWSON_CACHE", "maybe", "off, ro or rw"):
            self.assertIn(word, result.err)

    def test_a_deadline_is_kept_and_said(self):
        _, row = self.bench("--deadline", "1")
        choice = row["tuning"]["choice"]
        if len(row["tuning"]["candidates"]) > 1 and row["tuning"]["deadline_passed"]:
            self.assertIn("deadline of 1 ms", choice)
            self.assertEqual(self.files(), [])

    def test_a_bundle_of_a_tuned_plan_runs(self):
        """Also where clean-ups changed the graph: plans are of what they left."""
        spec = self.write("twice.json", graph(
            inputs=[{"name": "x", "dtype": "f32", "shape": [4, 8]}],
            ops=[{"op": "transpose", "in": ["x"], "out": "t", "perm": [1, 0]},
                 {"op": "transpose", "in": ["t"], "out": "u", "perm": [1, 0]},
                 {"op": "relu", "in": ["u"], "out": "y"}],
            outputs=["y"]))
        bundle = self.folder / "tuned.bundle"
        self.expect(0, "compile", spec, "--target", "cpu", "--engine", "cpu", "--tuning", "quick",
                    "-o", bundle, env=self.env())
        result = self.expect(0, "run", spec, "--engine", "cpu", "--plan", bundle, "--verify",
                             "--json").json
        self.assertTrue(result["ok"])


if __name__ == "__main__":
    main()
