"""What the CLI tests share: calling the tool, writing specs, reading .npy files without NumPy."""

import json
import os
import pathlib
import resource
import struct
import subprocess
import tempfile
import unittest

SOURCE = pathlib.Path(os.environ["LAWSON_SOURCE"])
BIN = os.environ["LAWSON_BIN"]
WITH_CUDNN = os.environ.get("LAWSON_WITH_CUDNN", "OFF").upper() in ("ON", "1", "TRUE", "YES")
SANITIZED = bool(os.environ.get("LAWSON_SANITIZED"))
SPECS = SOURCE / "examples" / "specs"
MODELS = SOURCE / "examples" / "models"

needs_cudnn = unittest.skipUnless(WITH_CUDNN, "built without the cuDNN engine")


class Result:
    def __init__(self, code, out, err, cpu_seconds, peak_bytes):
        self.code = code
        self.out = out
        self.err = err
        self.cpu_seconds = cpu_seconds
        self.peak_bytes = peak_bytes

    @property
    def json(self):
        return json.loads(self.out)


def environment(**changes):
    """This process's environment without LAWSON_ variables, with the changes; None removes.

    Without a change that names a folder for the store there is none: a test writes to nobody's own.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LAWSON_")}
    if "LAWSON_CACHE_DIR" not in changes:
        kept["LAWSON_CACHE"] = "off"
    for name, value in changes.items():
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = str(value)
    return kept


def lawson(*arguments, stdin=None, env=None, cwd=None, timeout=300):
    """Runs the tool; its own processor time and peak memory are measured, children's not."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [BIN, *map(str, arguments)],
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=out, stderr=err, env=env or environment(), cwd=cwd)
        if stdin is not None:
            try:
                process.stdin.write(stdin)
                process.stdin.close()
            except BrokenPipeError:
                pass
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        return Result(process.returncode, out.read().decode(), err.read().decode(),
                      usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def attention(**fields):
    spec = {"lawson": 1, "kind": "attention", "name": "test", "dtype": "f32", "heads": 2,
            "seqlen_q": 8, "head_dim_qk": 8}
    spec.update(fields)
    return {k: v for k, v in spec.items() if v is not None}


def refused():
    """Valid, and without a graph: refused because of its softmax, on every device."""
    return attention(softmax="off_by_one", context_parallel={"strategy": "ring", "size": 2})


def graph(**fields):
    spec = {"lawson": 1, "kind": "graph", "name": "test",
            "inputs": [{"name": "a", "dtype": "f32", "shape": [2, 4, 8]},
                       {"name": "b", "dtype": "f32", "shape": [2, 8, 4]}],
            "ops": [{"op": "matmul", "in": ["a", "b"], "out": "c"}],
            "outputs": ["c"]}
    spec.update(fields)
    return {k: v for k, v in spec.items() if v is not None}


class Case(unittest.TestCase):
    """A test with a scratch folder; a failing check shows what the tool said."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def write(self, name, content):
        path = self.folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content)
        else:
            path.write_text(json.dumps(content))
        return path

    def expect(self, code, *arguments, **options):
        result = lawson(*arguments, **options)
        self.assertEqual(result.code, code,
                         f"lawson {' '.join(map(str, arguments))}\n{result.out}\n{result.err}")
        return result


def read_npy(path):
    """(type string, shape, raw bytes) of a .npy file of format 1.0."""
    data = path.read_bytes()
    assert data[:8] == b"\x93NUMPY\x01\x00", path
    (size,) = struct.unpack("<H", data[8:10])
    assert (10 + size) % 64 == 0, path
    header = eval(data[10:10 + size].decode(), {"__builtins__": {}})  # a dict literal
    assert header["fortran_order"] is False
    return header["descr"], header["shape"], data[10 + size:]


def write_npy(path, descr, shape, raw):
    header = repr({"descr": descr, "fortran_order": False, "shape": tuple(shape)})
    header += " " * (63 - (10 + len(header)) % 64) + "\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + raw)


def decode(descr, raw):
    """Floats of an array; '<u2' is read as bfloat16."""
    if descr == "<u2":
        values = struct.unpack(f"<{len(raw) // 2}H", raw)
        return [struct.unpack("<f", struct.pack("<I", v << 16))[0] for v in values]
    letter = {"<f8": "d", "<f4": "f", "<f2": "e", "<i4": "i", "|i1": "b", "|u1": "B"}[descr]
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(letter)}{letter}", raw))


def main():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    unittest.main(verbosity=2)
