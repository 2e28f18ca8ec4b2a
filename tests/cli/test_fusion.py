"""Fusions through the tool: judged is not built, undecided is no answer, errors by their category,
plans that another process made, and which engine ran."""

import json

from support import SPECS, Case, environment, graph, lawson, main, needs_cudnn

F32_DOT = graph(
    name="f32-dot",
    inputs=[{"name": "a", "dtype": "f32", "shape": [32, 96]},
            {"name": "b", "dtype": "f32", "shape": [96, 64]}])


def product(left, right, **fields):
    shape = {"shape": [64, 64]}
    return graph(inputs=[{"name": "a", "dtype": left, **shape},
                         {"name": "b", "dtype": right, **shape}], **fields)


def product_of_product():
    shape = {"dtype": "bf16", "shape": [64, 64]}
    return graph(inputs=[{"name": name, **shape} for name in "abc"],
                 ops=[{"op": "matmul", "in": ["a", "b"], "out": "p"},
                      {"op": "matmul", "in": ["p", "c"], "out": "q", "source": "chain.py:7"}],
                 outputs=["q"])


def inner_stride_two():
    spec = product("bf16", "bf16")
    spec["inputs"][0]["strides"] = [128, 2]
    return spec


@needs_cudnn
class Judged(Case):
    def test_what_is_only_judged_is_not_built(self):
        for make in (product_of_product, inner_stride_two):
            with self.subTest(spec=make.__name__):
                spec = self.write("spec.json", make())
                verdict = self.expect(1, "probe", spec, "--target", "h200", "--build",
                                      "--json").json
                self.assertEqual(verdict["verdict"], "unsupported")
                self.assertEqual(verdict["engine"], "cudnn")
                self.assertTrue(verdict["reasons"][0]["code"])
                self.assertTrue(verdict["reasons"][0]["message"])
                refused = self.expect(1, "compile", spec, "--target", "h200", "-o",
                                      self.folder / "none.bundle", "--json").json
                self.assertEqual(refused["plans"], [])
                self.assertTrue(refused["refused"])

    def test_live_only_is_undecided_and_names_the_engine(self):
        for left, right in (("f64", "f64"), ("bf16", "f16")):
            for more in ((), ("--build",)):
                with self.subTest(types=(left, right), more=more):
                    spec = self.write("spec.json", product(left, right))
                    verdict = self.expect(3, "probe", spec, "--target", "h200", "--json",
                                          *more).json
                    self.assertEqual(verdict["verdict"], "undecided")
                    self.assertEqual(verdict["engine"], "cudnn")
                    self.assertIn("cuBLASLt", verdict["reasons"][0]["message"])

    def test_built_has_a_plan_and_is_stable(self):
        spec = self.write("spec.json", F32_DOT)
        verdicts = [self.expect(0, "probe", spec, "--target", "h200", "--build", "--json").json
                    for _ in range(2)]
        for verdict in verdicts:
            self.assertEqual(verdict["engine"], "cudnn")
            self.assertEqual(verdict["strength"], "built")
            self.assertTrue(verdict["evidence"].startswith("deviceless"))
        for field in ("key", "plan_id", "plan_name", "workspace_bytes"):
            self.assertEqual(verdicts[0][field], verdicts[1][field])


class Errors(Case):
    """Exit codes and kinds: 1 is a no, 2 the caller's, 3 the environment's."""

    def refused(self, **changes):
        spec = dict(F32_DOT)
        spec.update(changes)
        path = self.write("spec.json", spec)
        result = self.expect(2, "probe", path, "--target", "h200", "--json")
        self.assertNotIn("verdict", result.json)
        return result.json["error"]["message"]

    def test_bad_input_names_the_field(self):
        dot = F32_DOT["ops"][0]
        for word, changes in (
                ("operand_precision", {"ops": [{**dot, "operand_precision": ["high", "high"]}]}),
                ("algorithm", {"ops": [{**dot, "algorithm": "dot_bf16_bf16_f32"}]}),
                ("matmull", {"ops": [{**dot, "op": "matmull"}]}),
                ("inner dims 96 and 95", {"inputs": [F32_DOT["inputs"][0],
                                                     {**F32_DOT["inputs"][1], "shape": [95, 64]}]}),
                ("f33", {"inputs": [{**F32_DOT["inputs"][0], "dtype": "f33"},
                                    F32_DOT["inputs"][1]]}),
                ("'d'", {"outputs": ["d"]})):
            with self.subTest(word=word):
                self.assertIn(word, self.refused(**changes))

    @needs_cudnn
    def test_a_library_that_is_missing_is_no_answer(self):
        spec = self.write("spec.json", F32_DOT)
        for arguments in (("probe", spec), ("compile", spec, "-o", self.folder / "x.bundle")):
            result = self.expect(3, *arguments, "--target", "h200", "--json",
                                 env=environment(LAWSON_CUDNN="/nowhere/libcudnn.so.9"))
            self.assertIn("/nowhere", result.out + result.err)
            self.assertNotIn('"unsupported"', result.out)

    def test_a_bundle_that_is_damaged_or_another_is_an_error(self):
        spec = self.write("spec.json", F32_DOT)
        other = self.write("other.json", product("f32", "f32", name="other"))
        bundle = self.folder / "plans.bundle"
        self.expect(0, "compile", spec, "--target", "cpu", "-o", bundle)
        run = ("--engine", "cpu", "--repeat", "1", "--plan")
        self.expect(0, "run", spec, *run, bundle)
        self.assertNotEqual(lawson("run", other, *run, bundle).code, 0)
        data = bundle.read_bytes()
        for damaged in (data[:len(data) // 2], data[:60] + b"\xff" * 40 + data[100:], b""):
            result = lawson("run", spec, *run, self.write("damaged.bundle", damaged))
            self.assertIn(result.code, (2, 3), result.err)
            self.assertTrue(result.err)


class Elsewhere(Case):
    """A plan, its key and its id outlive the process that made them."""

    def test_a_plan_of_another_process_runs_here(self):
        spec = self.write("spec.json", json.loads((SPECS / "mm-gelu.json").read_text()))
        bundle = self.folder / "plans.bundle"
        made = self.expect(0, "compile", spec, "--target", "cpu", "-o", bundle, "--json").json
        ran = self.expect(0, "run", spec, "--engine", "cpu", "--plan", bundle, "--verify",
                          "--repeat", "1", "--json").json
        self.assertEqual(ran["engine"], "cpu")
        self.assertTrue(ran["ok"])
        self.assertEqual(ran["graphs"][0]["plan_id"], made["plans"][0]["plan_id"])
        self.assertEqual(ran["graphs"][0]["key"], made["plans"][0]["key"])

    @needs_cudnn
    def test_plans_of_two_processes_are_the_same(self):
        spec = self.write("spec.json", F32_DOT)
        made = [self.expect(0, "compile", spec, "--target", "h200,b200", "-o",
                            self.folder / f"{i}.bundle", "--json").json["plans"] for i in range(2)]
        for first, second in zip(*(sorted(plans, key=lambda p: p["target"]) for plans in made)):
            self.assertEqual(first["target"], second["target"])
            self.assertEqual(first["engine"], "cudnn")
            self.assertEqual(first["plan_id"], second["plan_id"])
            self.assertEqual(first["bytes"], second["bytes"])
        keys = {plan["key"] for plan in made[0]}
        self.assertEqual(len(keys), 2, "a plan per device")

    def test_the_engine_that_ran_is_the_one_that_was_named(self):
        spec = self.write("spec.json", F32_DOT)
        ids = set()
        for engine in ("cpu", "reference"):
            ran = self.expect(0, "run", spec, "--engine", engine, "--repeat", "1", "--json").json
            self.assertEqual(ran["engine"], engine)
            ids.add(ran["graphs"][0]["plan_id"])
        self.assertEqual(len(ids), 2)
        # cuDNN without a GPU runs nowhere else.
        result = self.expect(3, "run", spec, "--engine", "cudnn",
                             env=environment(CUDA_VISIBLE_DEVICES=""))
        self.assertIn("--engine cpu", result.err)

    def test_the_graph_says_its_tensors_and_strides(self):
        spec = dict(F32_DOT)
        spec["inputs"] = [{**F32_DOT["inputs"][0], "strides": [1, 32]}, F32_DOT["inputs"][1]]
        printed = self.expect(0, "print", self.write("spec.json", spec), "--json").json["graphs"][0]
        self.assertEqual([t["name"] for t in printed["inputs"]], ["a", "b"])
        self.assertEqual(printed["inputs"][0]["strides"], [1, 32])
        self.assertEqual(printed["ops"][0]["op"], "matmul")
        self.assertEqual(printed["ops"][0]["dtype"], "f32")


if __name__ == "__main__":
    main()
