"""run: verified numbers on the CPU, and the folder that --save writes and --load reads."""

import json
import math
import struct

from support import (SPECS, Case, attention, decode, environment, graph, main, read_npy, refused,
                     write_npy)


class Run(Case):
    def test_every_example_is_verified(self):
        for spec in sorted(SPECS.glob("*.json")):
            with self.subTest(spec=spec.name):
                result = self.expect(0, "run", spec, "--engine", "cpu", "--verify", "--repeat",
                                     "1", "--json").json
                self.assertTrue(result["ok"])
                self.assertEqual(result["engine"], "cpu")
                document = json.loads(spec.read_text())
                wanted = 2 if document.get("pass") == "training" else 1
                wanted *= 3 if "context_parallel" in document else 1  # the distinct steps of a ring
                self.assertEqual(len(result["graphs"]), wanted)
                for part in result["graphs"]:
                    self.assertTrue(part["plan_id"])
                    self.assertTrue(part["verify"]["outputs"])
                    self.assertLessEqual(part["milliseconds"]["min"],
                                         part["milliseconds"]["median"])

    def test_reference_engine(self):
        self.expect(0, "run", SPECS / "seed.json", "--engine", "reference", "--verify")

    def test_text(self):
        text = self.expect(0, "run", SPECS / "seed.json", "--engine", "cpu", "--verify").out
        self.assertIn("median", text)
        self.assertIn("within the oracle's bound", text)

    def test_engine_from_the_environment(self):
        result = self.expect(0, "run", SPECS / "seed.json", "--json",
                             env=environment(LAWSON_ENGINE="cpu")).json
        self.assertEqual(result["engine"], "cpu")
        result = self.expect(2, "run", SPECS / "seed.json", env=environment(LAWSON_ENGINE="gpu"))
        self.assertIn("LAWSON_ENGINE=gpu: expected cudnn, cpu or reference", result.err)

    def test_no_device_names_the_way_out(self):
        result = self.expect(3, "run", SPECS / "seed.json", env=environment(CUDA_VISIBLE_DEVICES=""))
        self.assertIn("--engine cpu", result.err)
        error = self.expect(3, "run", SPECS / "seed.json", "--json",
                            env=environment(CUDA_VISIBLE_DEVICES="")).json["error"]
        self.assertEqual(error["kind"], "unavailable")

    def test_what_has_no_graph_is_refused(self):
        spec = self.write("a.json", refused())
        self.assertIn("softmax", self.expect(1, "run", spec, "--engine", "cpu").err)


class SaveAndLoad(Case):
    def test_steps_have_no_one_folder(self):
        for option in ("--save", "--load"):
            result = self.expect(2, "run", SPECS / "attention-ring.json", "--engine", "cpu", option,
                                 self.folder)
            self.assertIn(f"{option} is for", result.err)

    def saved(self, spec, *more):
        folder = self.folder / "saved"
        self.expect(0, "run", spec, "--engine", "cpu", "--repeat", "1", "--save", folder, *more)
        return folder, json.loads((folder / "manifest.json").read_text())

    def test_files_match_the_manifest(self):
        folder, manifest = self.saved(SPECS / "attention-training.json", "--seed", "5")
        self.assertEqual(manifest["engine"], "cpu")
        self.assertEqual(manifest["seed"], 5)
        self.assertEqual(manifest["spec"]["name"], "attention-training")
        names = {t["name"]: t for t in manifest["tensors"]}
        self.assertEqual(set(names), {"q", "k", "v", "scale", "o", "stats", "do", "dq", "dk", "dv"})
        for tensor in manifest["tensors"]:
            descr, shape, raw = read_npy(folder / tensor["file"])
            self.assertEqual(list(shape), tensor["shape"])
            self.assertEqual(descr, tensor["npy_type"])
            size = int(descr[2])
            self.assertEqual(len(raw), math.prod(shape) * size)
        # sbhd in memory, [b, h, s, d] in the files; bf16 travels as uint16.
        self.assertEqual(names["q"]["shape"], [2, 4, 96, 128])
        self.assertEqual((names["q"]["dtype"], names["q"]["npy_type"]), ("bf16", "<u2"))
        self.assertEqual(names["o"]["role"], "output")
        self.assertEqual(names["do"]["role"], "input")

    def test_numbers_can_be_checked_by_other_tools(self):
        """The softmax of one row, computed here from the saved files."""
        spec = self.write("a.json", attention(seqlen_q=5, seqlen_kv=7, layout="bshd", heads=3,
                                              return_stats=True))
        folder, _ = self.saved(spec)
        def load(name):
            descr, shape, raw = read_npy(folder / f"{name}.npy")
            return decode(descr, raw), shape
        q, (_, heads, sq, d) = load("q")
        k, (_, _, skv, _) = load("k")
        v, _ = load("v")
        o, _ = load("o")
        stats, _ = load("stats")
        (scale,), _ = load("scale")
        self.assertAlmostEqual(scale, 1 / math.sqrt(d), places=6)
        for h in range(heads):
            for i in range(sq):
                row = q[(h * sq + i) * d:][:d]
                scores = [scale * sum(x * y for x, y in zip(row, k[(h * skv + j) * d:][:d]))
                          for j in range(skv)]
                weights = [math.exp(s) for s in scores]
                self.assertAlmostEqual(stats[h * sq + i], math.log(sum(weights)), places=4)
                for c in range(d):
                    want = sum(w * v[(h * skv + j) * d + c] for j, w in enumerate(weights))
                    self.assertAlmostEqual(o[(h * sq + i) * d + c], want / sum(weights), places=4)

    def test_round_trip_gives_the_same_outputs(self):
        for name in ("seed", "attention-training", "attention-padding", "swiglu"):
            with self.subTest(spec=name):
                first, manifest = self.saved(SPECS / f"{name}.json", "--seed", "7")
                again = self.folder / "again"
                self.expect(0, "run", SPECS / f"{name}.json", "--engine", "cpu", "--seed", "99",
                            "--repeat", "1", "--load", first, "--save", again, "--verify")
                for tensor in manifest["tensors"]:
                    self.assertEqual((first / tensor["file"]).read_bytes(),
                                     (again / tensor["file"]).read_bytes(), tensor["name"])

    def test_seeds_differ_and_repeat(self):
        one, _ = self.saved(SPECS / "seed.json", "--seed", "1")
        bytes_one = (one / "x.npy").read_bytes()
        two, _ = self.saved(SPECS / "seed.json", "--seed", "2")
        self.assertNotEqual(bytes_one, (two / "x.npy").read_bytes())
        three, _ = self.saved(SPECS / "seed.json", "--seed", "1")
        self.assertEqual(bytes_one, (three / "x.npy").read_bytes())

    def test_given_inputs_are_used(self):
        spec = self.write("a.json", graph())
        folder = self.folder / "in"
        folder.mkdir()
        ones = struct.pack("<64f", *[1.0] * 64)
        write_npy(folder / "a.npy", "<f4", [2, 4, 8], ones)
        write_npy(folder / "b.npy", "<f4", [2, 8, 4], ones)
        out = self.folder / "out"
        self.expect(0, "run", spec, "--engine", "cpu", "--load", folder, "--save", out)
        descr, shape, raw = read_npy(out / "c.npy")
        self.assertEqual((descr, shape), ("<f4", (2, 4, 4)))
        self.assertEqual(decode(descr, raw), [8.0] * 32)

    def test_bad_folders_are_named(self):
        spec = self.write("a.json", graph())
        folder = self.folder / "in"
        def refused(*words):
            result = self.expect(2, "run", spec, "--engine", "cpu", "--load", folder)
            for word in words:
                self.assertIn(word, result.err)
        refused("is not a folder")
        folder.mkdir()
        refused("a.npy", "No such file")
        zeros = bytes(4 * 64)
        write_npy(folder / "b.npy", "<f4", [2, 8, 4], zeros)
        write_npy(folder / "a.npy", "<f4", [2, 8, 4], zeros)
        refused("a.npy", "[2, 8, 4]", "[2, 4, 8]")
        write_npy(folder / "a.npy", "<f8", [2, 4, 8], zeros * 2)
        refused("a.npy", "<f8", "<f4")
        write_npy(folder / "a.npy", "<f4", [2, 4, 8], zeros[:-1])
        refused("a.npy", "256 bytes")
        write_npy(folder / "a.npy", "<f4", [2, 4, 2**62], zeros)
        refused("a.npy")
        # 2^40 bytes: no memory is taken for them.
        write_npy(folder / "a.npy", "<f4", [2, 4, 2**35], zeros)
        refused("a.npy", "1099511627776 bytes")
        (folder / "a.npy").write_bytes(b"not numpy's")
        refused("a.npy", "is not a .npy file")
        (folder / "a.npy").write_bytes(b"\x93NUMPY\x01\x00\xff\xff")
        refused("a.npy", "header")
        write_npy(folder / "a.npy", "<f4", [2, 4, 8], zeros)
        (folder / "manifest.json").write_text("[]")
        refused("manifest.json")
        (folder / "manifest.json").write_text(json.dumps({"tensors": [{"name": "a",
                                                                       "dtype": "f16"}]}))
        refused("manifest.json", "'a'", "f16", "f32")

    def test_names_stay_inside_the_folder(self):
        inputs = [{"name": "../a/b", "dtype": "f32", "shape": [4]}]
        spec = self.write("a.json", graph(inputs=inputs,
                                          ops=[{"op": "neg", "in": ["../a/b"], "out": "c"}]))
        folder, manifest = self.saved(spec)
        for tensor in manifest["tensors"]:
            self.assertNotIn("/", tensor["file"])
            self.assertTrue((folder / tensor["file"]).is_file())

    def test_folder_that_cannot_be_made(self):
        blocked = self.write("file", "x")
        result = self.expect(2, "run", SPECS / "seed.json", "--engine", "cpu", "--save",
                             blocked / "sub")
        self.assertIn("--save", result.err)


if __name__ == "__main__":
    main()
