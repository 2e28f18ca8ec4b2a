"""--trace, and what the environment asks to be told on standard error."""

import json
import pathlib
import re

from support import MODELS, SPECS, Case, environment, lawson, main, needs_cudnn

SEED = SPECS / "seed.json"
EVENTS = ("HIT", "MISS", "VERDICT", "CREATE_GRAPH", "CACHE_GRAPH", "BUILD_PLANS", "LOAD", "EXECUTE",
          "EVICT")
STAGES = ("validate", "build_operation_graph", "create_execution_plans", "check_support",
          "build_plans", "load")


class Trace(Case):
    def traced(self, code, *arguments, **options):
        """The trace that the tool wrote, held against the Trace Event Format."""
        path = self.folder / "trace.json"
        self.expect(code, *arguments, "--trace", path, **options)
        document = json.loads(path.read_text())
        self.assertEqual([p.name for p in self.folder.iterdir() if "trace" in p.name],
                         ["trace.json"])
        spans = {}
        for event in document["traceEvents"]:
            self.assertIn(event["ph"], "XiM")
            self.assertIsInstance(event["name"], str)
            self.assertIsInstance(event["pid"], int)
            self.assertIsInstance(event["tid"], int)
            if event["ph"] == "M":
                self.assertIn(event["name"], ("process_name", "thread_name"))
                self.assertIsInstance(event["args"]["name"], str)
                continue
            self.assertGreaterEqual(event["ts"], 0)
            self.assertEqual(set(event["args"]), {"engine", "pass", "key", "device"})
            if event["ph"] == "X":
                self.assertGreaterEqual(event["dur"], 0)
                spans.setdefault((event["pid"], event["tid"]), []).append(event)
        for of_thread in spans.values():  # nested, or one after the other
            of_thread.sort(key=lambda e: (e["ts"], -e["dur"]))
            open_until = []
            for event in of_thread:
                end = event["ts"] + event["dur"]
                while open_until and open_until[-1] <= event["ts"] + 1e-3:
                    open_until.pop()
                if open_until:
                    self.assertLessEqual(end, open_until[-1] + 1e-3)
                open_until.append(end)
        return document["traceEvents"]

    def test_run(self):
        events = self.traced(0, "run", SEED, "--engine", "cpu", "--repeat", "3")
        spans = {e["name"] for e in events if e["ph"] == "X"}
        self.assertLessEqual({"compile", "load", "execute"}, spans)
        executed = [e for e in events if e["ph"] == "i" and e["name"] == "execute"]
        self.assertGreaterEqual(len(executed), 3)
        self.assertEqual({e["args"]["engine"] for e in executed}, {"cpu"})
        self.assertTrue(all(e["args"]["key"] for e in executed))
        names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
        self.assertEqual(names, ["lawson"])

    def test_passes(self):
        events = self.traced(0, "run", SPECS / "attention-training.json", "--engine", "cpu")
        executed = {e["args"]["pass"] for e in events if e["name"] == "execute"}
        self.assertEqual(executed, {"forward", "backward"})

    def test_bench(self):
        events = self.traced(0, "bench", SEED, "--engine", "cpu", "--no-limits")
        self.assertIn("compile", {e["name"] for e in events})

    def test_a_failure_leaves_a_trace(self):
        env = environment(CUDA_VISIBLE_DEVICES="")
        self.traced(3, "run", SEED, env=env)
        self.assertTrue((self.folder / "trace.json").exists())

    def test_an_older_trace_is_replaced(self):
        path = self.write("trace.json", "older")
        self.traced(0, "run", SEED, "--engine", "cpu")
        self.assertNotEqual(path.read_text(), "older")

    def test_where_it_cannot_be_written(self):
        for path, words in ((self.folder / "none" / "t.json", "No such file"),
                            (self.folder, "a folder"), ("/dev/null", "expected a file"),
                            ("/proc/t.json", "cannot"), ("", "file")):
            with self.subTest(path=str(path)):
                result = self.expect(2, "run", SEED, "--engine", "cpu", "--trace", path)
                self.assertEqual(result.out, "")
                self.assertIn(words, result.err)
        error = self.expect(2, "run", SEED, "--engine", "cpu", "--json", "--trace",
                            self.folder / "none" / "t.json").json["error"]
        self.assertEqual(error["kind"], "invalid_argument")
        self.assertTrue(pathlib.Path("/dev/null").is_char_device())

    def test_four_verbs_have_it(self):
        self.expect(2, "probe", SEED, "--target", "h200", "--trace", self.folder / "t.json")
        for verb in ("check", "compile", "run", "bench"):
            self.assertIn("--trace FILE", self.expect(0, verb, "--help").out)

    @needs_cudnn
    def test_workers_are_processes_of_their_own(self):
        env = environment(LAWSON_CACHE="off")
        events = self.traced(0, "check", MODELS / "gpt2.json", "--target", "a100,h200", env=env)
        names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        hosts = [pid for pid, name in names.items() if name == "lawson"]
        workers = [pid for pid, name in names.items() if name == "lawson-worker"]
        self.assertEqual(len(hosts), 1)
        self.assertGreaterEqual(len(workers), 1)
        stages = {e["name"] for e in events if e["ph"] == "X" and e["pid"] in workers}
        self.assertLessEqual(set(STAGES[:4]), stages)
        # What a worker did lies within the host's question.
        asked = [e for e in events if e["ph"] == "X" and e["pid"] in hosts and e["name"] == "probe"]
        for event in events:
            if event["ph"] == "X" and event["pid"] in workers:
                self.assertTrue(any(a["ts"] <= event["ts"] + 1 and
                                    event["ts"] + event["dur"] <= a["ts"] + a["dur"] + 1
                                    for a in asked), event)

    @needs_cudnn
    def test_compile(self):
        env = environment(LAWSON_CACHE="off")
        events = self.traced(0, "compile", SEED, "--target", "h200", "-o", self.folder / "b.lawson",
                             env=env)
        spans = [e["name"] for e in events if e["ph"] == "X"]
        self.assertIn("build_plans", spans)
        self.assertIn("compile", spans)


class Told(Case):
    def told(self, *arguments, code=0, **variables):
        return self.expect(code, *arguments, env=environment(**variables)).err

    def test_nothing_is_told_unasked(self):
        self.assertEqual(self.told("run", SEED, "--engine", "cpu"), "")

    def rows(self, err):
        """The summary's table, and the stages' times."""
        lines = err.splitlines()
        start = next(i for i, line in enumerate(lines) if "cache summary" in line)
        head = lines[start + 1].split()
        self.assertEqual(head, ["thread", "dev", "engine", "pass", *EVENTS])
        rows, stages = [], {}
        for line in lines[start + 2:]:
            words = line.split()
            if len(words) == len(head):
                rows.append(dict(zip(head, words)))
            elif words[0] in STAGES:
                stages[words[0]] = words[1:]
        self.assertEqual(tuple(stages), STAGES)
        return rows, stages

    def test_summary(self):
        err = self.told("run", SEED, "--engine", "cpu", "--repeat", "3", LAWSON_CACHE_DEBUG="1")
        self.assertRegex(err.splitlines()[0], r"^lawson: cache summary: rank=0 pid=\d+$")
        rows, stages = self.rows(err)
        executed = [row for row in rows if row["engine"] == "cpu" and row["EXECUTE"] != "0"]
        self.assertEqual(len(executed), 1, err)
        self.assertEqual(executed[0]["EXECUTE"], "4")  # one warms up
        self.assertEqual(executed[0]["dev"], "dev=-")
        self.assertEqual(stages["load"][0], "1")

    def test_a_line_per_event(self):
        err = self.told("run", SEED, "--engine", "cpu", "--repeat", "3", LAWSON_CACHE_DEBUG="2")
        lines = re.findall(r"(?m)^lawson: rank=0 pid=\d+ thread=\d+ dev=- ([A-Z_]+) engine=cpu "
                           r"pass=fusion key=(\S+)$", err)
        self.assertEqual([event for event, _ in lines].count("EXECUTE"), 4, err)
        rows, _ = self.rows(err)
        for event in EVENTS:  # the lines and the summary tell the same
            self.assertEqual(sum(int(row[event]) for row in rows if row["engine"] == "cpu"),
                             [e for e, _ in lines].count(event), event)

    def test_ranks(self):
        run = ("run", SEED, "--engine", "cpu")
        self.assertEqual(self.told(*run, LAWSON_CACHE_DEBUG="2:1,2", RANK="0"), "")
        self.assertIn("rank=2 ", self.told(*run, LAWSON_CACHE_DEBUG="1:1,2", SLURM_PROCID="2"))

    def test_one_warning(self):
        for name, value in (("LAWSON_CACHE_DEBUG", "9"), ("NVTE_FUSED_ATTN_CACHE_DEBUG", "1:x"),
                            ("LAWSON_DEBUG", "on"), ("NVTE_DEBUG_LEVEL", "-")):
            err = self.told("run", SEED, "--engine", "cpu", **{name: value})
            self.assertEqual(len(err.splitlines()), 1, err)
            self.assertTrue(err.startswith(f"lawson: {name}='{value}' is ignored; expected "), err)
            self.assertEqual(self.told("print", SEED, **{name: value}), err)

    def test_the_engine_chosen(self):
        run = ("run", SEED, "--engine", "cpu")
        line = r"^lawson: '[^']+' \(fusion\) on cpu: engine=cpu plan=\S+ key=\S+$"
        first = self.told(*run, LAWSON_DEBUG="1").splitlines()
        self.assertEqual(len(first), 1, first)
        self.assertRegex(first[0], line)
        second = self.told(*run, NVTE_DEBUG="1", NVTE_DEBUG_LEVEL="2").splitlines()
        self.assertRegex(second[0], line)
        self.assertTrue(any(text.startswith("lawson:   not reference: ") for text in second), second)

    @needs_cudnn
    def test_workers_count_for_their_host(self):
        err = self.told("probe", SEED, "--target", "h200", LAWSON_CACHE_DEBUG="1",
                        LAWSON_CACHE="off")
        rows, stages = self.rows(err)
        self.assertEqual(err.count("cache summary"), 1)
        judged = [row for row in rows if row["engine"] == "cudnn" and row["pass"] == "fusion"]
        self.assertEqual([row["VERDICT"] for row in judged], ["1"], err)
        self.assertEqual([row["CREATE_GRAPH"] for row in judged], ["1"], err)
        for stage in STAGES[:4]:  # of this graph, and of the one that a worker begins with
            self.assertEqual(stages[stage][0], "2", err)


if __name__ == "__main__":
    main()
