"""What diagnostics a process of its own gives: its environment, its end, a profiler, a fork."""

import json
import os
import subprocess
import unittest

PROCESS = os.environ["DIAG_PROCESS"]
PROFILER = os.environ.get("DIAG_PROFILER")
OURS = ("LAWSON_", "NVTE_", "NVTX_", "RANK", "LOCAL_RANK", "OMPI_", "SLURM_")


def run(*what, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    environment.update(variables)
    done = subprocess.run([PROCESS, *what], env=environment, capture_output=True, text=True,
                          timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


class Process(unittest.TestCase):
    def test_silent_by_default(self):
        self.assertEqual(run("history", "choice"), (0, "", ""))

    def test_summary_at_exit(self):
        code, out, err = run("history", LAWSON_CACHE_DEBUG="1")
        self.assertEqual((code, out), (0, ""))
        lines = err.splitlines()
        self.assertRegex(lines[0], r"^lawson: cache summary: rank=0 pid=\d+$")
        head = lines[1].split()
        row = dict(zip(head, lines[3].split()))
        self.assertEqual([row[k] for k in ("thread", "dev", "engine", "pass")],
                         ["1", "dev=0", "cudnn", "forward"])
        self.assertEqual([row[k] for k in ("HIT", "MISS", "CREATE_GRAPH", "EXECUTE")],
                         ["1", "1", "1", "0"])
        stages = {line.split()[0]: line.split()[1] for line in lines[-6:]}
        self.assertEqual(stages["build_plans"], "1")
        self.assertEqual(stages["validate"], "0")

    def test_devices_of_one_thread(self):
        _, _, err = run("history", "two-devices", LAWSON_CACHE_DEBUG="1")
        self.assertRegex(err, r"(?m)^ +1 +dev=0 +all ")
        self.assertRegex(err, r"(?m)^ +2 +dev=mixed +all ")

    def test_a_line_per_event(self):
        _, _, err = run("two-devices", LAWSON_CACHE_DEBUG="2")
        events = [line for line in err.splitlines() if " key=" in line]
        self.assertEqual(len(events), 6, err)
        self.assertRegex(events[0], r"^lawson: rank=0 pid=\d+ thread=1 dev=0 MISS engine=cudnn "
                                    r"pass=forward key=k1$")
        self.assertIn(" dev=1 HIT ", events[5])
        self.assertIn("cache summary", err)

    def test_ranks(self):
        for value, rank, speaks in (("1", "0", True), ("1", "1", False), ("1:all", "5", True),
                                    ("1:0,3", "3", True), ("1:0,3", "4", False)):
            _, _, err = run("history", LAWSON_CACHE_DEBUG=value, RANK=rank)
            self.assertEqual(f"rank={rank} " in err, speaks, (value, rank, err))
            self.assertEqual(bool(err), speaks)
        _, _, err = run("history", NVTE_FUSED_ATTN_CACHE_DEBUG="1:2", SLURM_PROCID="2")
        self.assertIn("rank=2 ", err)

    def test_one_warning(self):
        code, _, err = run("history", "history", "choice", LAWSON_CACHE_DEBUG="loud")
        self.assertEqual(code, 0)
        self.assertEqual(len(err.splitlines()), 1, err)
        self.assertIn("LAWSON_CACHE_DEBUG='loud' is ignored; expected LEVEL", err)

    def test_choice(self):
        _, _, err = run("choice", LAWSON_DEBUG="1")
        self.assertEqual(err, "lawson: 'g' (forward) on h200: engine=cudnn plan=eng1 key=k1\n")
        _, _, err = run("choice", NVTE_DEBUG="1", NVTE_DEBUG_LEVEL="2")
        self.assertEqual(err.splitlines()[1:], ["lawson:   not cpu: it is a GPU"])

    def test_a_worker_tells_its_host_alone(self):
        _, out, err = run("worker", LAWSON_CACHE_DEBUG="2", LAWSON_DEBUG="1",
                          NVTX_INJECTION64_PATH=PROFILER or "")
        self.assertEqual(err, "")
        told = json.loads(out)
        self.assertEqual([item["name"] for item in told],
                         ["miss", "create_graph", "build_plans", "acquire", "hit"])
        self.assertEqual([item["duration"] >= 0 for item in told],
                         [False, False, True, True, False])

    def test_fork(self):
        self.assertEqual(run("fork"), (0, "forked\n", ""))

    def test_events_of_a_thread_that_ends(self):
        _, out, _ = run("late")
        counts = json.loads(out)
        self.assertEqual(counts["totals"]["evict"], 1)
        self.assertEqual(counts["totals"]["hit"], 1)

    @unittest.skipIf(PROFILER is None, "this build found no NVTX headers")
    def test_profiler(self):
        code, out, _ = run("history", NVTX_INJECTION64_PATH=PROFILER)
        self.assertEqual(code, 0)
        self.assertEqual(out.splitlines(), ["domain lawson", "push 1 acquire",
                                            "push 1 build_plans", "pop 1", "pop 1"])

    def test_a_profiler_that_is_not_there(self):
        code, out, _ = run("history", NVTX_INJECTION64_PATH="/nonexistent.so")
        self.assertEqual((code, out), (0, ""))


if __name__ == "__main__":
    unittest.main()
