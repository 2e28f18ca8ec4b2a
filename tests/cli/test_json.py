"""--json: one document with stable field names; the exit codes; the table for people."""

import json
import re

from support import MODELS, SPECS, Case, attention, main, needs_cudnn, refused

VERDICT = {"verdict", "strength", "evidence", "engine", "key", "target", "reasons", "rewrites"}


class Schema(Case):
    def check_verdict(self, verdict, target):
        self.assertLessEqual(VERDICT, set(verdict))
        self.assertIn(verdict["verdict"], ("supported", "unsupported", "undecided"))
        self.assertIn(verdict["strength"], ("judged", "built", "verified"))
        self.assertIn(verdict["evidence"], ("live", "deviceless-measured-target",
                                            "deviceless-published-target"))
        self.assertEqual(verdict["target"], target)
        self.assertTrue(verdict["key"])
        if verdict["verdict"] == "supported":
            self.assertEqual(verdict["reasons"], [])
        else:
            self.assertTrue(verdict["reasons"])
        for reason in verdict["reasons"]:
            self.assertRegex(reason["code"], r"^[a-z0-9_]+$")
            self.assertTrue(reason["message"])
        if verdict["engine"] == "cudnn":
            self.assertRegex(verdict["cudnn_version"], r"^9\.\d+\.\d+$")


class OnCpu(Schema):
    def test_probe(self):
        verdict = self.expect(0, "probe", SPECS / "seed.json", "--target", "cpu", "--json").json
        self.check_verdict(verdict, "cpu")
        self.assertEqual(verdict["engine"], "cpu")
        self.assertTrue(verdict["spec"].endswith("seed.json"))

    def test_probe_of_several_is_a_list(self):
        verdicts = self.expect(0, "probe", SPECS / "seed.json", SPECS / "mm-gelu.json", "--target",
                               "cpu", "--json").json
        self.assertEqual([v["spec"].rsplit("/", 1)[1] for v in verdicts],
                         ["seed.json", "mm-gelu.json"])

    def test_probe_verified(self):
        verdict = self.expect(0, "probe", SPECS / "seed.json", "--target", "cpu", "--verify",
                              "--json").json
        self.assertEqual(verdict["strength"], "verified")

    def test_probe_from_standard_input(self):
        text = (SPECS / "seed.json").read_bytes()
        verdict = self.expect(0, "probe", "-", "--target", "cpu", "--json", stdin=text).json
        self.assertEqual(verdict["verdict"], "supported")

    def test_no_engine_was_asked(self):
        out = self.expect(1, "probe", self.write("a.json", refused()), "--target", "cpu").out
        self.assertTrue(out.startswith("unsupported  test  on cpu · cpu · judged, live\n"), out)

    def test_no_is_1(self):
        spec = self.write("a.json", refused())
        verdict = self.expect(1, "probe", spec, "--target", "cpu", "--json").json
        self.check_verdict(verdict, "cpu")
        self.assertEqual(verdict["verdict"], "unsupported")
        self.assertIn("softmax", verdict["reasons"][0]["message"])
        text = self.expect(1, "probe", spec, "--target", "cpu").out
        self.assertIn("unsupported", text)
        self.assertIn("softmax", text)

    def test_explain(self):
        spec = self.write("a.json", refused())
        answer = self.expect(1, "explain", spec, "--target", "cpu", "--json").json
        self.check_verdict(answer["verdict"], "cpu")
        self.assertLessEqual({"verdict", "conditions", "neighbours", "probed"}, set(answer))
        for neighbour in answer["neighbours"]:
            self.assertLessEqual({"change", "field", "kind", "verdict"}, set(neighbour))

    def test_steps_of_context_parallelism(self):
        ring = SPECS / "attention-ring.json"
        verdict = self.expect(0, "probe", ring, "--target", "cpu", "--json").json
        self.check_verdict(verdict, "cpu")
        names = ["ring step 0 of rank 0", "ring step 1 of rank 0", "ring step 1 of rank 1"]
        self.assertEqual([step["name"] for step in verdict["steps"]], names)
        self.assertEqual([(s["rank"], s["step"]) for s in verdict["steps"]],
                         [(0, 0), (0, 1), (1, 1)])
        for step in verdict["steps"]:
            self.check_verdict(step, "cpu")
            self.assertEqual([p["name"] for p in step["parts"]], ["forward", "backward"])
        keys = {verdict["key"], *(step["key"] for step in verdict["steps"])}
        self.assertEqual(len(keys), 4)
        text = self.expect(0, "probe", ring, "--target", "cpu").out
        self.assertIn("3 distinct steps", text)
        for name in names:
            self.assertIn("✓ " + name, text)
        plans = self.expect(0, "compile", ring, "--target", "cpu", "-o", self.folder / "a.bundle",
                            "--json").json["plans"]
        parts = [part for step in verdict["steps"] for part in step["parts"]]
        self.assertEqual([p["plan_id"] for p in plans], [p["plan_id"] for p in parts])

    def test_a_split_that_cannot_be_made(self):
        split = {"strategy": "all_gather", "size": 2}
        spec = self.write("a.json", attention(seqlen_q=10, mask="causal", context_parallel=split))
        answer = self.expect(1, "explain", spec, "--target", "cpu", "--json").json
        fields = {reason["field"] for reason in answer["verdict"]["reasons"]}
        self.assertEqual(fields, {"seqlen_q", "seqlen_kv"})
        changes = [n["change"] for n in answer["neighbours"]]
        self.assertIn("context_parallel all_gather -> all_to_all", changes)
        self.assertNotIn("context_parallel all_gather -> ring", changes)
        table = self.expect(0, "check", spec, "--target", "cpu").out
        self.assertIn("all_gather over 2", table)
        self.assertIn("needs a multiple of 4", table)

    def test_check(self):
        answer = self.expect(0, "check", MODELS / "gpt2.json", "--target", "cpu", "--json").json
        self.assertLessEqual({"model", "model_type", "layers", "targets", "workloads"}, set(answer))
        self.assertEqual(answer["targets"], ["cpu"])
        for workload in answer["workloads"]:
            self.assertLessEqual({"name", "group", "layers", "note", "spec", "verdicts",
                                  "neighbours"}, set(workload))
            self.assertEqual(workload["spec"]["lawson"], 1)
            self.check_verdict(workload["verdicts"]["cpu"], "cpu")

    def test_check_of_several_models_and_specs(self):
        answer = self.expect(0, "check", MODELS / "gpt2.json", SPECS / "seed.json", "--target",
                             "cpu", "--pass", "decode", "--json").json
        self.assertEqual(len(answer), 2)
        self.assertEqual(answer[1]["workloads"][0]["name"], "seed")

    def test_check_options_reach_the_workloads(self):
        answer = self.expect(0, "check", MODELS / "llama-3.1-8b.json", "--target", "cpu", "--batch",
                             "3", "--seqlen", "256", "--context", "512", "--pass",
                             "prefill,decode", "--dtype", "f16", "--json").json
        specs = {w["name"]: w["spec"] for w in answer["workloads"]}
        attention_specs = [s for s in specs.values() if s["kind"] == "attention"]
        self.assertEqual({s["batch"] for s in attention_specs}, {3})
        self.assertEqual({s["dtype"] for s in attention_specs}, {"f16"})
        self.assertFalse([n for n in specs if "training" in n])
        lengths = {(s["seqlen_q"], s.get("seqlen_kv", s["seqlen_q"])) for s in attention_specs}
        self.assertEqual(lengths, {(256, 256), (1, 512)})

    def test_require(self):
        spec = self.write("a.json", refused())
        self.expect(0, "check", spec, "--target", "cpu")
        self.expect(1, "check", spec, "--target", "cpu", "--require")
        self.expect(0, "check", SPECS / "seed.json", "--target", "cpu", "--require")

    def test_table(self):
        text = self.expect(0, "check", MODELS / "gpt2.json", "--target", "cpu").out
        self.assertIn("gpt2", text)
        self.assertRegex(text, r"Fuses: cpu \d+/\d+")
        self.assertNotIn("\033", text)
        self.assertLessEqual(max(map(len, text.splitlines())), 100)

    def test_compile_and_run_the_plan(self):
        bundle = self.folder / "a.bundle"
        answer = self.expect(0, "compile", SPECS / "seed.json", SPECS / "attention-training.json",
                             "--target", "cpu", "-o", bundle, "--json").json
        self.assertEqual(answer["bundle"], str(bundle))
        self.assertEqual(len(answer["plans"]), 3)
        self.assertEqual((answer["refused"], answer["errors"]), ([], []))
        for plan in answer["plans"]:
            self.assertLessEqual({"spec", "graph", "target", "plan_id", "key", "engine",
                                  "plan_name", "workspace_bytes", "bytes", "seconds"}, set(plan))
        ran = self.expect(0, "run", SPECS / "attention-training.json", "--engine", "cpu", "--plan",
                          bundle, "--verify", "--json").json
        self.assertEqual([g["plan_id"] for g in ran["graphs"]],
                         [p["plan_id"] for p in answer["plans"][1:]])
        refused = self.expect(2, "run", SPECS / "mm-gelu.json", "--engine", "cpu", "--plan", bundle)
        self.assertIn("has no plan of graph", refused.err)

    def test_compile_keeps_what_fuses(self):
        spec = self.write("no.json", refused())
        bundle = self.folder / "a.bundle"
        answer = self.expect(1, "compile", spec, SPECS / "seed.json", "--target", "cpu", "-o",
                             bundle, "--json").json
        self.assertEqual(len(answer["plans"]), 1)
        self.assertIn("softmax", answer["refused"][0]["reasons"][0]["message"])
        self.expect(0, "run", SPECS / "seed.json", "--engine", "cpu", "--plan", bundle)
        only_no = self.folder / "b.bundle"
        self.expect(1, "compile", spec, "--target", "cpu", "-o", only_no)
        self.assertFalse(only_no.exists())

    def test_bad_bundles(self):
        bundle = self.folder / "a.bundle"
        self.expect(0, "compile", SPECS / "seed.json", "--target", "cpu", "-o", bundle)
        good = bundle.read_bytes()
        for bad in (b"", good[:-1], good[:100], good + b"x", b"\0" * 64,
                    good[:60] + bytes([good[60] ^ 1]) + good[61:]):
            bundle.write_bytes(bad)
            result = self.expect(2, "run", SPECS / "seed.json", "--engine", "cpu", "--plan", bundle)
            self.assertIn("a.bundle", result.err)

    def test_print(self):
        answer = self.expect(0, "print", SPECS / "attention-training.json", "--json").json
        self.assertEqual(set(answer), {"name", "spec", "graphs"})
        self.assertEqual(len(answer["graphs"]), 2)
        text = self.expect(0, "print", SPECS / "seed.json").out
        self.assertIn("matmul(x16, y)", text)
        dot = self.expect(0, "print", SPECS / "seed.json", "--dot").out
        self.assertTrue(dot.startswith("digraph"))
        # A printed graph is a spec.
        seed = self.expect(0, "print", SPECS / "seed.json", "--json").json["graphs"][0]
        again = self.write("again.json", seed)
        self.assertEqual(self.expect(0, "print", again).out, text)

    def test_every_example_prints_and_reads_back(self):
        for spec in sorted(SPECS.glob("*.json")):
            with self.subTest(spec=spec.name):
                document = self.expect(0, "print", spec, "--json").json
                self.expect(0, "print", self.write("back.json", document["spec"]))

    def test_targets_and_info(self):
        targets = self.expect(0, "targets", "--json").json
        self.assertIn("cpu", [t["name"] for t in targets["targets"]])
        info = self.expect(0, "info", "--json").json
        self.assertLessEqual({"version", "library", "libexec", "environment"}, set(info))
        self.assertIn(info["version"], self.expect(0, "info").out)


@needs_cudnn
class OnTargets(Schema):
    def test_seed_fuses_from_sm80_up(self):
        verdicts = self.expect(1, "probe", SPECS / "seed.json", "--target", "v100,t4,a100,l40s",
                               "--target", "h200,b200", "--json").json
        for verdict in verdicts:
            self.check_verdict(verdict, verdict["target"])
            fuses = verdict["target"] not in ("v100", "t4")
            self.assertEqual(verdict["verdict"], "supported" if fuses else "unsupported")
        for verdict, capability in zip(verdicts, ("7.0", "7.5")):
            self.assertIn(capability, verdict["reasons"][0]["message"])

    def test_undecided_is_3(self):
        verdict = self.expect(3, "probe", SPECS / "mm-f64.json", "--target", "h100-sxm", "--json").json
        self.check_verdict(verdict, "h100-sxm")
        self.assertEqual(verdict["verdict"], "undecided")

    def test_check_names_a_probed_neighbour_of_every_no(self):
        answer = self.expect(0, "check", MODELS / "gemma-2-9b.json", "--target", "v100,a100,h200",
                             "--pass", "training", "--json").json
        refusals = 0
        for workload in answer["workloads"]:
            for target, verdict in workload["verdicts"].items():
                self.check_verdict(verdict, target)
                if verdict["verdict"] != "unsupported":
                    continue
                refusals += 1
                neighbours = workload["neighbours"][target]
                self.assertTrue(neighbours, (workload["name"], target))
                for neighbour in neighbours:
                    self.assertEqual(neighbour["verdict"]["verdict"], "supported")
        self.assertGreater(refusals, 0)

    def test_unknown_target_is_named(self):
        result = self.expect(2, "probe", SPECS / "seed.json", "--target", "h2000")
        self.assertIn("h2000", result.err)
        self.assertIn("h200", result.err)

    def test_compile_without_the_device(self):
        bundle = self.folder / "seed.bundle"
        answer = self.expect(0, "compile", SPECS / "seed.json", "--target", "h200", "-o", bundle,
                             "--json").json
        self.assertEqual(answer["plans"][0]["engine"], "cudnn")
        self.assertGreater(bundle.stat().st_size, 1000)
        text = self.expect(1, "compile", SPECS / "seed.json", "--target", "h200,v100", "-o",
                           bundle).out
        self.assertIn("unsupported", text)
        self.assertIn("1 plan in", text)

    def test_table_fits_the_screen(self):
        text = self.expect(0, "check", MODELS / "llama-3.1-8b.json", "--target",
                           "v100,a100,l40s,h200,b200", "--pass", "decode").out
        self.assertLessEqual(max(map(len, text.splitlines())), 100)
        self.assertTrue(re.search(r"no¹", text))
        self.assertIn("Why not", text)


class Documents(Case):
    def test_spec_page_names_every_field(self):
        """docs/spec.md describes each field that the examples and the defaults use."""
        from support import SOURCE
        page = (SOURCE / "docs" / "spec.md").read_text()
        fields = set()
        for spec in SPECS.glob("*.json"):
            fields |= set(json.loads(spec.read_text()))
            fields |= set(self.expect(0, "print", spec, "--json").json["spec"])
        for field in fields:
            self.assertIn(f"`{field}`", page)


if __name__ == "__main__":
    main()
