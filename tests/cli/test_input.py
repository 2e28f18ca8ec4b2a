"""Bad input: exit 2, a message that names file, field and value, soon, and never a crash."""

import json
import os

from support import MODELS, SPECS, Case, attention, graph, lawson, main

SECONDS = 1.0  # of processor time, on any of the documents below


class BadInput(Case):
    def refused(self, path, *words, verb="print", more=()):
        result = self.expect(2, verb, path, *more)
        self.assertEqual(result.out, "")
        for word in words:
            self.assertIn(word, result.err)
        self.assertLess(result.cpu_seconds, SECONDS)
        as_json = self.expect(2, verb, path, *more, "--json").json
        self.assertEqual(set(as_json), {"error"})
        self.assertEqual(set(as_json["error"]), {"kind", "message"})
        self.assertEqual(as_json["error"]["kind"], "invalid_argument")
        for word in words:
            self.assertIn(word, as_json["error"]["message"])
        return result

    def test_unknown_field_names_the_nearest(self):
        self.refused(self.write("a.json", attention(head_dim_kq=8)), "a.json", "head_dim_kq",
                     "did you mean 'head_dim_qk'")
        self.refused(self.write("g.json", graph(output=["c"])), "g.json", "'output'", "'outputs'")

    def test_wrong_type(self):
        self.refused(self.write("a.json", attention(heads="eight")), "a.json", "'heads'", "eight",
                     "integer")
        self.refused(self.write("b.json", attention(heads=2.5)), "'heads'", "2.5")
        self.refused(self.write("c.json", attention(mask=7)), "'mask'", "7", "causal")
        self.refused(self.write("d.json", attention(window=[1])), "'window'", "[left, right]")
        self.refused(self.write("e.json", attention(strides=[1])), "strides")
        self.refused(self.write("f.json", graph(inputs={"a": 1})), "'inputs'", "a list")

    def test_values_out_of_range(self):
        for value in (-1, 0, 2**63, 2**64, -2**63, 10**30):
            self.refused(self.write("a.json", attention(heads=value)), "a.json", "'heads'")
        for value in (-4, 2**63, 2**62, 2**41):
            inputs = [{"name": "a", "dtype": "f32", "shape": [2, value, 8]}]
            ops = [{"op": "neg", "in": ["a"], "out": "c"}]
            self.refused(self.write("g.json", graph(inputs=inputs, ops=ops)), "g.json",
                         "inputs[0].shape[1]")
        huge = [{"name": "a", "dtype": "f32", "shape": [2**40, 2**40]}]
        self.refused(self.write("h.json", graph(inputs=huge)), "h.json", "inputs[0]")
        strided = [{"name": "a", "dtype": "f32", "shape": [2, 4, 8],
                    "strides": [2**46, 2**46, 2**46]}]
        self.refused(self.write("i.json", graph(inputs=strided)), "i.json", "inputs[0]")

    def test_heads_that_do_not_divide(self):
        self.refused(self.write("a.json", attention(heads=6, kv_heads=4)), "'kv_heads'", "4", "6")

    def test_numbers_that_are_none(self):
        text = json.dumps(attention(scale=1.5))
        for number in ("NaN", "Infinity", "1e999", "-1e999"):
            self.refused(self.write("a.json", text.replace("1.5", number)), "a.json")

    def test_not_json(self):
        for name, content in {
            "latin1.json": b'{"lawson": 1, "kind": "attention", "name": "caf\xe9"}',
            "binary.json": bytes(range(256)),
            "cut.json": json.dumps(attention())[:-5].encode(),
            "trailing.json": json.dumps(attention()).encode() + b"}",
            "number.json": b"7",
            "list.json": b"[]",
            "bom16.json": json.dumps(attention()).encode("utf-16"),
        }.items():
            self.refused(self.write(name, content), name)

    def test_a_field_given_twice(self):
        self.refused(self.write("a.json", json.dumps(attention())[:-1] + ', "heads": 4}'),
                     "a.json", "'heads'", "twice")

    def test_control_characters(self):
        for name in ("a\0b", "a\x1b[31m", "a\nb", "a\x7f"):
            self.refused(self.write("a.json", attention(name=name)), "a.json", "'name'", "control")
            inputs = [{"name": name, "dtype": "f32", "shape": [2]}]
            ops = [{"op": "neg", "in": [name], "out": "c"}]
            self.refused(self.write("g.json", graph(inputs=inputs, ops=ops)), "g.json",
                         "inputs[0].name", "control")
            ops = [{"op": "neg", "in": ["a"], "out": [name]}]
            self.refused(self.write("h.json", graph(ops=ops)), "h.json", "ops[0].out", "control")
        result = self.refused(self.write("f.json", attention(**{"a\x1b[31m": 1})), "a?[31m")
        self.assertNotIn("\x1b", result.err)

    def test_empty(self):
        self.refused(self.write("empty.json", b""), "empty.json", "is empty")
        self.refused(self.write("blank.json", b" \n\n"), "blank.json", "is empty")

    def test_missing_file_and_folder(self):
        self.refused(self.folder / "none.json", "none.json", "No such file")
        self.refused(self.folder, str(self.folder), "is a directory")
        for verb, more in (("check", ("--target", "cpu")), ("probe", ("--target", "cpu")),
                           ("explain", ("--target", "cpu")), ("run", ("--engine", "cpu")),
                           ("compile", ("--target", "cpu", "-o", self.folder / "x"))):
            self.refused(self.folder / "none.json", "none.json", verb=verb, more=more)

    def test_unreadable(self):
        path = self.write("secret.json", attention())
        path.chmod(0)
        if os.access(path, os.R_OK):
            self.skipTest("this user may read everything")
        self.refused(path, "secret.json", "Permission denied")

    def test_large_file(self):
        path = self.folder / "large.json"
        with open(path, "wb") as file:
            file.write(b'{"lawson": 1, "name": "')
            file.truncate(100_000_000)
        result = self.refused(path, "large.json", "8388608 bytes")
        self.assertLess(result.peak_bytes, 400 << 20)

    def test_endless_file(self):
        self.refused("/dev/zero", "/dev/zero", "8388608 bytes")

    def test_deep_nesting(self):
        deep = "[" * 1_000_000
        self.refused(self.write("a.json", deep), "a.json")
        self.refused(self.write("b.json", '{"lawson": 1, "kind": ' + deep), "b.json")
        self.refused(self.write("c.json", '{"lawson": 1, "kind": ' + "[" * 200 + "]" * 200 + "}"),
                     "c.json", "nested")
        self.refused(self.write("d.json", '{"a":' * 300_000), "d.json")

    def test_graph_mistakes(self):
        matmul = {"op": "matmul", "in": ["a", "b"], "out": "c"}
        self.refused(self.write("a.json", graph(ops=[{**matmul, "op": "matmull"}])), "ops[0].op",
                     "did you mean 'matmul'")
        self.refused(self.write("b.json", graph(ops=[{**matmul, "in": ["a", "q"]}])), "ops[0]",
                     "'q'")
        self.refused(self.write("c.json", graph(ops=[{**matmul, "in": ["a", "a"]}])), "ops[0]",
                     "inner dims")
        self.refused(self.write("d.json", graph(outputs=["zz"])), "outputs[0]", "'zz'")
        self.refused(self.write("e.json", graph(outputs=[])), "'outputs'")
        self.refused(self.write("f.json", graph(inputs=[{"name": "a", "dtype": "f33",
                                                         "shape": [1]}])), "inputs[0].dtype", "f33")

    def test_every_field_of_a_wrong_kind(self):
        base = attention(batch=1, kv_heads=2, seqlen_kv=8, head_dim_v=8, layout="bshd",
                         mask="none", bias="none", softmax="vanilla", softcap=0.0, dropout=0.0,
                         scale=1.0, deterministic=False, return_stats=False,
                         return_max_logit=False, cuda_graph=False)
        base["pass"] = "forward"
        base["window"] = [-1, -1]
        self.expect(0, "print", self.write("ok.json", base))
        for field in base:
            if field in ("lawson", "kind"):
                continue
            self.refused(self.write("a.json", {**base, field: {"x": [1]}}), "a.json", field)


class BadModel(Case):
    def refused(self, path, *words):
        result = self.expect(2, "check", path, "--target", "cpu")
        for word in words:
            self.assertIn(word, result.err)
        self.assertLess(result.cpu_seconds, SECONDS)

    def model(self, **changes):
        config = json.loads((MODELS / "llama-3.1-8b.json").read_text())
        config.update(changes)
        return self.write("config.json", config)

    def test_absurd_fields(self):
        self.refused(self.model(num_attention_heads=0), "config.json", "num_attention_heads", "0")
        self.refused(self.model(num_key_value_heads=5), "config.json", "num_key_value_heads", "5")
        self.refused(self.model(hidden_size="wide"), "config.json", "hidden_size", "wide")
        self.refused(self.model(num_hidden_layers=-2), "config.json", "num_hidden_layers", "-2")
        self.refused(self.model(hidden_size=2**63), "config.json", "hidden_size")

    def test_not_a_model(self):
        self.refused(self.write("empty.json", {}), "empty.json")
        self.refused(self.write("list.json", "[1, 2]"), "list.json")
        self.refused(self.write("deep.json", "[" * 100_000), "deep.json")

    def test_a_folder_is_its_config(self):
        self.model()
        result = self.expect(0, "check", self.folder, "--target", "cpu", "--pass", "decode",
                             "--json")
        self.assertTrue(result.json["workloads"])


class Usage(Case):
    def refused(self, arguments, *words):
        result = self.expect(2, *arguments)
        for word in words:
            self.assertIn(word, result.err)
        error = self.expect(2, *arguments, "--json").json["error"]
        self.assertIn(error["kind"], ("usage", "invalid_argument"))

    def test_command_line(self):
        seed = SPECS / "seed.json"
        self.refused(["fly"], "fly")
        self.refused(["probe"], "spec")
        self.refused(["probe", seed, "--speed", "1"], "--speed")
        self.refused(["check", seed, "--target", "cpu", "--batch", "many"], "--batch", "many")
        self.refused(["check", seed, "--target", "cpu", "--batch", "-3"], "--batch", "-3")
        self.refused(["check", MODELS / "gpt2.json", "--target", "cpu", "--pass", "sideways"],
                     "pass", "sideways", "decode")
        self.refused(["check", MODELS / "gpt2.json", "--target", "cpu", "--dtype", "f7"], "dtype",
                     "f7")
        self.refused(["run", seed, "--engine", "abacus"], "--engine", "abacus", "cpu")
        self.refused(["run", seed, "--engine", "cpu", "--target", "h200"], "--target", "h200")
        self.refused(["run", seed, "--engine", "cpu", "--repeat", "0"], "--repeat", "0")
        for seed_value in ("-1", str(2**64), "1.5", "x"):
            self.refused(["run", seed, "--engine", "cpu", f"--seed={seed_value}"], "--seed",
                         seed_value)
        self.refused(["probe", seed, "--target", "cpu", "--engine", "abacus"], "abacus")
        self.refused(["compile", seed, "--target", "cpu"], "--output")
        self.refused(["compile", seed, "--target", "cpu", "--engine", "abacus", "-o",
                      self.folder / "x"], "abacus")

    def test_a_models_config_is_no_spec(self):
        model = MODELS / "gpt2.json"
        for arguments in (["print", model], ["run", model, "--engine", "cpu"],
                          ["probe", model, "--target", "cpu"], ["explain", model, "--target", "cpu"]):
            self.refused(arguments, "gpt2.json", "'lawson'", "`lawson check`")

    def test_sizes_and_times(self):
        self.refused(["cache", "prune", "--to-size", "12parsecs"],
                     "'12parsecs' is not a size, as 500000, 500MB or 2GiB")
        self.refused(["cache", "prune", "--older-than", "3fortnights"],
                     "'3fortnights' is not a time, as 90s, 30min, 12h or 30d")

    def test_no_verb(self):
        result = self.expect(2)
        self.assertIn("check", result.err)

    def test_help_has_examples(self):
        self.assertEqual(lawson("--help").code, 0)
        self.assertIn("0.", self.expect(0, "--version").out)
        for verb in ("targets", "check", "probe", "explain", "compile", "run", "bench", "print", "info"):
            text = self.expect(0, verb, "--help").out
            self.assertIn(f"lawson {verb}", text)
            self.assertIn("Example", text)
            self.assertIn("--json", text)
            self.assertEqual("--cudnn" in text, verb != "print")
        for verb in ("probe", "explain", "run", "print"):
            self.assertIn("- for standard", self.expect(0, verb, "--help").out)
        self.assertIn("GPUs to compile for", self.expect(0, "compile", "--help").out)
        self.assertNotIn("--cudnn", self.expect(0, "cache", "list", "--help").out)


if __name__ == "__main__":
    main()
