"""What is missing is an environment error (exit 3), never "unsupported"; and the host stays clean."""

import os
import pathlib
import shutil
import subprocess
import time
import unittest

from support import (BIN, MODELS, SANITIZED, SPECS, WITH_CUDNN, Case, environment, lawson, main, needs_cudnn)

SEED = SPECS / "seed.json"


def has_gpu():
    return os.path.exists("/dev/nvidiactl")


@needs_cudnn
class Missing(Case):
    def unavailable(self, *words, **variables):
        env = environment(**variables)
        for arguments in (("probe", SEED, "--target", "b200"),
                          ("explain", SEED, "--target", "a100"),
                          ("check", MODELS / "gpt2.json", "--target", "a100,b200"),
                          ("compile", SEED, "--target", "b200", "-o", self.folder / "x.bundle")):
            with self.subTest(verb=arguments[0]):
                result = self.expect(3, *arguments, env=env)
                self.assertNotIn("unsupported", result.out + result.err)
                for word in words:
                    self.assertIn(word, result.err)
                error = self.expect(3, *arguments, "--json", env=env).json["error"]
                self.assertEqual(error["kind"], "unavailable")
        self.assertFalse((self.folder / "x.bundle").exists())

    def test_cudnn(self):
        self.unavailable("LAWSON_CUDNN", "/nonexistent", LAWSON_CUDNN="/nonexistent")

    def test_cudnn_option(self):
        result = self.expect(3, "probe", SEED, "--target", "b200", "--cudnn", "/nonexistent")
        self.assertIn("/nonexistent", result.err)

    def test_nvrtc(self):
        self.unavailable("LAWSON_NVRTC", "/nonexistent", LAWSON_NVRTC="/nonexistent")

    def test_worker_and_no_driver_library(self):
        empty = self.folder / "libexec"
        empty.mkdir()
        self.unavailable(str(empty), LAWSON_LIBEXEC=empty)

    def test_no_driver_library_alone(self):
        libexec = pathlib.Path(BIN).resolve().parent.parent / "libexec" / "lawson"
        part = self.folder / "libexec"
        part.mkdir()
        shutil.copy(libexec / "lawson-worker", part / "lawson-worker")
        self.unavailable("nodriver", LAWSON_LIBEXEC=part)

    def test_other_builds_are_asked_in_a_process_of_their_own(self):
        found = self.expect(0, "info").out
        path = next(word for word in found.split() if "libcudnn.so.9" in word)
        answer = self.expect(1, "explain", SEED, "--target", "v100", "--cudnn", path, "--cudnn",
                             path, "--cudnn", "/nonexistent", "--json").json
        others = [n for n in answer["neighbours"] if n["kind"] == "cudnn"]
        self.assertEqual(len(others), 2)
        self.assertEqual(others[0]["verdict"]["verdict"], "unsupported")
        self.assertIn(path, others[0]["change"])
        self.assertEqual(others[1]["verdict"]["error"]["kind"], "unavailable")
        self.expect(2, "probe", SEED, "--target", "b200", "--cudnn", path, "--cudnn", path)

    def test_the_cpu_engine_needs_none_of_it(self):
        env = environment(LAWSON_CUDNN="/nonexistent", LAWSON_NVRTC="/nonexistent",
                          LAWSON_LIBEXEC="/nonexistent")
        self.expect(0, "run", SEED, "--engine", "cpu", "--verify", env=env)
        self.expect(0, "probe", SEED, "--target", "cpu", env=env)
        self.expect(0, "print", SEED, env=env)

    def test_info_and_targets_say_what_is_missing(self):
        env = environment(LAWSON_CUDNN="/nonexistent")
        self.assertIn("/nonexistent", self.expect(0, "info", env=env).out)
        self.assertIn("h200", self.expect(0, "targets", env=env).out)


class Host(Case):
    @needs_cudnn
    @unittest.skipIf(has_gpu(), "with a GPU the host itself judges")
    def test_never_maps_what_belongs_to_the_workers(self):
        process = subprocess.Popen([BIN, "check", str(MODELS / "llama-3.1-8b.json"), "--target",
                                    "a100,b200", "--pass", "decode"], env=environment(),
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seen = set()
        looks = 0
        while process.poll() is None:
            try:
                maps = pathlib.Path(f"/proc/{process.pid}/maps").read_text()
            except OSError:
                break
            looks += 1
            seen |= {line.split()[-1] for line in maps.splitlines() if ".so" in line}
            time.sleep(0.005)
        self.assertEqual(process.wait(), 0)
        self.assertGreater(looks, 10)
        self.assertTrue([path for path in seen if "liblawson.so" in path])
        for path in seen:
            for part in ("nodriver", "libcudnn", "libnvrtc", "libcuda.so"):
                self.assertNotIn(part, path)

    @unittest.skipIf(SANITIZED, "sanitizers take memory of their own")
    def test_memory_of_the_tool_itself(self):
        if self.expect(0, "info", "--json").json["gpus"]:
            self.skipTest("the driver of this machine's GPU takes memory of its own")
        target = "v100,a100,l40s,h100-sxm,b200" if WITH_CUDNN else "cpu"
        result = self.expect(0, "check", MODELS / "gpt-oss-20b.json", MODELS / "gemma-2-9b.json",
                             "--target", target, "--pass", "decode,training")
        self.assertLessEqual(result.peak_bytes, 60 << 20)

    def test_broken_output_is_reported(self):
        with open("/dev/full", "w") as full:
            code = subprocess.run([BIN, "print", str(SEED)], stdout=full, stderr=subprocess.PIPE,
                                  env=environment()).returncode
        self.assertEqual(code, 3)

    def test_colours_only_on_a_terminal(self):
        self.assertNotIn("\033", lawson("print", SEED).out)
        self.assertNotIn("\033", lawson("targets").out)


if __name__ == "__main__":
    main()
