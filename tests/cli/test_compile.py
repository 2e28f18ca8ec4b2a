"""compile: bundles that grow, an earlier call's plans that are kept, work that ends early."""

import json
import os
import pathlib
import signal
import subprocess
import time

from support import BIN, MODELS, SPECS, Case, attention, environment, main, needs_cudnn, refused

SEED = SPECS / "seed.json"
GELU = SPECS / "mm-gelu.json"


class Bundles(Case):
    def setUp(self):
        super().setUp()
        self.bundle = self.folder / "a.lawson"

    def compile(self, code, *arguments, **options):
        return self.expect(code, "compile", *arguments, "--target", "cpu", "-o", self.bundle, "--json",
                           **options).json

    def statuses(self, answer):
        return sorted(plan["status"] for plan in answer["plans"])

    def test_what_the_bundle_has_is_kept(self):
        first = self.compile(0, SEED)
        self.assertEqual(self.statuses(first), ["compiled"])
        self.assertEqual(first["bundle_bytes"], self.bundle.stat().st_size)
        before = self.bundle.read_bytes()
        second = self.compile(0, SEED)
        self.assertEqual(self.statuses(second), ["kept"])
        self.assertEqual(self.bundle.read_bytes(), before)
        for field in ("plan_id", "key", "engine", "plan_name", "workspace_bytes", "bytes"):
            self.assertEqual(first["plans"][0][field], second["plans"][0][field], field)

        more = self.compile(0, GELU, SEED)
        self.assertEqual({plan["spec"]: plan["status"] for plan in more["plans"]},
                         {str(SEED): "kept", str(GELU): "compiled"})
        for spec in (SEED, GELU):
            self.expect(0, "run", spec, "--engine", "cpu", "--plan", self.bundle)
        # A plan that is not asked for stays, unless one starts anew.
        self.compile(0, GELU)
        self.expect(0, "run", SEED, "--engine", "cpu", "--plan", self.bundle)
        self.assertEqual(self.statuses(self.compile(0, GELU, "--fresh")), ["compiled"])
        self.expect(2, "run", SEED, "--engine", "cpu", "--plan", self.bundle)

    def test_every_workload_of_a_model_once(self):
        answer = self.expect(0, "compile", MODELS / "gpt2.json", MODELS / "gpt2.json", "--seqlen",
                             "64", "--context", "64", "--target", "cpu", "-o", self.bundle,
                             "--jobs", "2", "--json").json
        keys = [plan["key"] for plan in answer["plans"]]
        self.assertGreater(len(keys), 3)
        self.assertEqual(len(keys), len(set(keys)))
        self.assertTrue(any("prefill" in plan["spec"] for plan in answer["plans"]))

    def test_a_refusal_loses_nothing(self):
        no = self.write("no.json", refused())
        answer = self.compile(1, no, SEED, GELU)
        self.assertEqual(self.statuses(answer), ["compiled", "compiled"])
        self.assertEqual(answer["refused"][0]["status"], "unsupported")
        self.assertTrue(answer["refused"][0]["reasons"][0]["message"])
        self.assertEqual(answer["errors"], [])
        answer = self.compile(1, no, SEED, GELU)
        self.assertEqual(self.statuses(answer), ["kept", "kept"])

    def test_bad_input_is_found_before_anything_is_built(self):
        bad = self.write("bad.json", attention(heads=-1))
        self.compile(2, SEED, bad)
        self.assertFalse(self.bundle.exists())

    def test_a_file_that_is_no_bundle_stays(self):
        for text in (b"something of the user's", b"LAWSONB1" + bytes(80), b""):
            self.bundle.write_bytes(text)
            error = self.compile(2, SEED)["error"]
            self.assertIn("--fresh", error["message"])
            self.assertIn("a.lawson", error["message"])
            self.assertEqual(self.bundle.read_bytes(), text)
        self.compile(0, SEED, "--fresh")
        self.expect(0, "run", SEED, "--engine", "cpu", "--plan", self.bundle)
        error = self.expect(2, "compile", SEED, "--target", "cpu", "-o", self.folder, "--json").json
        self.assertNotIn("--fresh", error["error"]["message"])

    def test_a_damaged_plan_is_built_again(self):
        self.compile(0, SEED)
        data = bytearray(self.bundle.read_bytes())
        data[-1] ^= 1
        self.bundle.write_bytes(data)
        result = self.expect(0, "compile", SEED, "--target", "cpu", "-o", self.bundle, "--json")
        self.assertEqual(self.statuses(result.json), ["compiled"])
        self.assertIn("checksum", result.err)
        self.expect(0, "run", SEED, "--engine", "cpu", "--plan", self.bundle)

    def test_a_place_that_cannot_be_written(self):
        for path in ("/proc/none/x", self.folder / "none" / "x"):
            for more in ((), ("--fresh",)):
                error = self.expect(2, "compile", SEED, "--target", "cpu", "-o", path, "--json",
                                    *more).json["error"]
                self.assertIn(str(path), error["message"])
                self.assertIn("cannot be written", error["message"])
                self.assertEqual(error["kind"], "invalid_argument")
        self.expect(2, "compile", SEED, "--target", "cpu", "-o", self.folder, "--fresh")
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_a_link_stays_and_what_it_points_to_is_written(self):
        (self.folder / "there").mkdir()
        target = self.folder / "there" / "real.lawson"
        self.bundle.symlink_to("middle")
        (self.folder / "middle").symlink_to("there/real.lawson")
        for specs, more, plans in (([SEED], (), 1), ([GELU], (), 2), ([GELU], ("--fresh",), 1)):
            self.compile(0, *specs, *more)
            self.assertEqual(os.readlink(self.bundle), "middle")
            self.assertTrue(target.is_file() and not target.is_symlink())
            read = self.expect(0, "run", specs[0], "--engine", "cpu", "--plan", target, "--json")
            self.assertEqual(read.code, 0)
            self.assertEqual([p.name for p in target.parent.iterdir()], ["real.lawson"])
            if plans == 2:
                self.expect(0, "run", SEED, "--engine", "cpu", "--plan", self.bundle)
        loop = self.folder / "loop"
        loop.symlink_to("loop")
        error = self.expect(2, "compile", SEED, "--target", "cpu", "-o", loop, "--fresh", "--json")
        self.assertIn(f"{loop}: cannot be written (", error.json["error"]["message"])
        self.assertTrue(loop.is_symlink())

    def test_a_bundle_that_is_not_there(self):
        error = self.expect(2, "run", SEED, "--engine", "cpu", "--plan", self.bundle, "--json")
        self.assertEqual(error.json["error"]["kind"], "invalid_argument")
        self.assertIn("a.lawson", error.json["error"]["message"])

    def test_told_of_what_a_bundle_served(self):
        self.compile(0, SEED)
        env = environment(LAWSON_BUNDLE_PATH=self.bundle, LAWSON_CACHE_DEBUG="1")
        result = self.expect(0, "compile", SEED, "--target", "cpu", "-o", self.folder / "b.lawson",
                             env=env)
        self.assertEqual(result.err.count("cache summary"), 1, result.err)

    def test_on_a_pipe_nothing_is_cut(self):
        spec = self.write("a" * 120 + ".json", SEED.read_text())
        arguments = ("compile", spec, "--target", "cpu", "-o", self.bundle)
        plan = self.expect(0, *arguments, "--json").json["plans"][0]
        out = self.expect(0, *arguments, env=environment(COLUMNS=None)).out
        self.assertIn(str(spec), out)
        self.assertIn(plan["plan_name"], out)
        narrow = self.expect(0, *arguments, env=environment(COLUMNS="100")).out
        self.assertNotIn(plan["plan_name"], narrow)

    def test_bundles_in_the_environment_that_are_none(self):
        env = environment(LAWSON_BUNDLE_PATH=f"/none/x.lawson:{self.folder}")
        result = self.expect(0, "run", SEED, "--engine", "cpu", env=env)
        self.assertEqual(result.err.count("LAWSON_BUNDLE_PATH"), 1, result.err)
        self.assertIn("/none/x.lawson", result.err)


@needs_cudnn
class Deviceless(Case):
    def setUp(self):
        super().setUp()
        self.bundle = self.folder / "a.lawson"
        self.specs = [self.write(f"{i}.json", attention(dtype="bf16", head_dim_qk=64, heads=i + 1,
                                                        seqlen_q=128, **{"pass": "forward"}))
                      for i in range(24)]

    def start(self, *specs):
        return subprocess.Popen([BIN, "compile", *specs, "--target", "h200", "-o", self.bundle,
                                 "--jobs", "2", "--json"], env=environment(), text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def workers(self, process):
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        found = children.read_text().split()
        for task in pathlib.Path(f"/proc/{process.pid}/task").iterdir():
            found += (task / "children").read_text().split()
        return set(map(int, found))

    def wait_for(self, what):
        until = time.monotonic() + 120
        while time.monotonic() < until:
            if found := what():
                return found
            time.sleep(0.05)
        self.fail("waited in vain")

    def test_an_interrupt_keeps_what_was_built(self):
        for end in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=end.name):
                self.bundle.unlink(missing_ok=True)
                process = self.start(*self.specs)
                self.wait_for(lambda p=process: self.workers(p))
                time.sleep(1.5)
                process.send_signal(end)
                out, err = process.communicate(timeout=120)
                self.assertEqual(process.returncode, -end, err)
                self.assertIn("finishing", err)
                answer = json.loads(out)
                self.assertTrue(answer["interrupted"], err)
                self.assertEqual(len(answer["plans"]) + len(answer["interrupted"]), len(self.specs))
                built = {plan["key"] for plan in answer["plans"]}
                again = self.expect(0, "compile", *self.specs, "--target", "h200", "-o", self.bundle,
                                    "--json").json
                self.assertEqual(len(again["plans"]), len(self.specs))
                self.assertEqual({p["key"] for p in again["plans"] if p["status"] == "kept"}, built)

    def test_a_worker_that_dies_costs_one_plan(self):
        process = self.start(*self.specs)
        workers = self.wait_for(lambda: self.workers(process))
        time.sleep(1)
        os.kill(next(iter(workers)), signal.SIGKILL)
        out, err = process.communicate(timeout=120)
        answer = json.loads(out)
        self.assertLessEqual(len(answer["errors"]), 1)
        self.assertEqual(process.returncode, 3 if answer["errors"] else 0, err)
        self.assertGreaterEqual(len(answer["plans"]), len(self.specs) - 1)

    def test_a_bundle_for_another_device_is_told_once(self):
        self.expect(0, "compile", self.specs[0], "--target", "h200", "-o", self.bundle)
        env = environment(LAWSON_BUNDLE_PATH=self.bundle)
        result = self.expect(0, "probe", self.specs[0], self.specs[1], "--target", "b200", "--build",
                             env=env)
        self.assertEqual(result.err.count("LAWSON_BUNDLE_PATH"), 1, result.err)
        self.assertRegex(result.err, "its plans are for cudnn .* on h200; here is cudnn .* on b200")
        result = self.expect(0, "probe", self.specs[0], "--target", "h200", "--build", env=env)
        self.assertEqual(result.err, "")


if __name__ == "__main__":
    main()
