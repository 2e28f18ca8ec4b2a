"""Attention on DTensors: split over the batch and the heads, beside the whole."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

_PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

rank, world, file, *shape = sys.argv[1:]
rank, world = int(rank), int(world)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
import lawson
from lawson.torch import attention, scaled_dot_product_attention
from lawson.torch import _attention_run

mesh = init_device_mesh("cpu", tuple(int(n) for n in shape))
torch.manual_seed(0)
q, k, v = torch.randn(4, 8, 9, 16), torch.randn(4, 4, 9, 16), torch.randn(4, 4, 9, 16)
bias, sink = torch.randn(1, 8, 9, 9), torch.randn(8)
R, B, H = Replicate(), Shard(0), Shard(1)
seen = []
known = _attention_run.Runner.__call__

def watch(self, *tensors):
    seen.append(tuple(tensors[0].shape))
    return known(self, *tensors)

_attention_run.Runner.__call__ = watch
placements = [[B], [H], [R]] if mesh.ndim == 1 else [[B, H], [H, H], [R, B]]
for given in placements:
    def put(x, batch, head):
        axes = [batch if p is B else head if p is H else None for p in given]
        own = [R if axis is None else Shard(axis) for axis in axes]
        return distribute_tensor(x.clone(), mesh, own).requires_grad_()

    whole = [x.clone().requires_grad_() for x in (q, k, v, bias, sink)]
    split = [put(q, 0, 1), put(k, 0, 1), put(v, 0, 1), put(bias, None, 1), put(sink, None, 0)]
    def call(q, k, v, bias, sink):
        return scaled_dot_product_attention(
            q, k, v, bias, sink=sink, enable_gqa=True, return_lse=True
        )
    del seen[:]
    o, lse = call(*split)
    local = list(seen)
    expected, expected_lse = call(*whole)
    b = 4 // (mesh.shape[0] if given[0] is B else mesh.shape[-1] if given[-1] is B else 1)
    h = 8
    for n, p in zip(mesh.shape, given):
        h //= n if p is H else 1
    assert local == [(b, h, 9, 16)], (given, local)
    assert list(o.placements) == given, (o.placements, given)
    torch.testing.assert_close(o.full_tensor(), expected)
    torch.testing.assert_close(lse.full_tensor(), expected_lse)
    (o.pow(2).sum() + lse.sin().sum()).full_tensor().backward()
    (expected.pow(2).sum() + expected_lse.sin().sum()).backward()
    for one, other in zip(split, whole):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-5)

# Each shard has a dropout mask of its own; replicas have the same one.
x = torch.ones(world * 2, 1, 16, 16)
for p, same in ((Shard(0), False), (Replicate(), True)):
    torch.manual_seed(1)
    d = distribute_tensor(x, mesh, [p] * mesh.ndim)
    kept = scaled_dot_product_attention(d, d, d, dropout_p=0.5).to_local()
    every = [torch.empty_like(kept) for _ in range(world)]
    dist.all_gather(every, kept.contiguous())
    assert all(torch.equal(every[0], e) == same for e in every[1:]), p

# A split sequence is gathered; heads whose groups a split would tear are gathered too.
s = distribute_tensor(q, mesh, [Shard(2)] * mesh.ndim)
kd, vd = (distribute_tensor(y, mesh, [R] * mesh.ndim) for y in (k, v))
torch.testing.assert_close(
    scaled_dot_product_attention(s, kd, vd, enable_gqa=True).full_tensor(),
    scaled_dot_product_attention(q, k, v, enable_gqa=True),
)
torn = distribute_tensor(torch.randn(1, 6, 9, 16), mesh, [H] * mesh.ndim)
few = distribute_tensor(torch.randn(1, 3, 9, 16), mesh, [R] * mesh.ndim)
torch.testing.assert_close(
    scaled_dot_product_attention(torn, few, few, enable_gqa=True).full_tensor(),
    scaled_dot_product_attention(
        torn.full_tensor(), few.full_tensor(), few.full_tensor(), enable_gqa=True
    ),
)
dist.barrier()  # a rank that leaves closes its connections, and others may still read
print("well")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["2", "2x2"])
def test_split_over_batch_and_heads(shape: tuple[int, ...], tmp_path: Path) -> None:
    world = 1
    for n in shape:
        world *= n
    environment = {
        **os.environ,
        "LAWSON_CACHE": "off",
        "LAWSON_ENGINE": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    outputs = [(tmp_path / f"rank{rank}").open("w+") for rank in range(world)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(rank), str(world), str(tmp_path / "store")]
            + [str(n) for n in shape],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        for rank, output in enumerate(outputs)
    ]
    end = time.monotonic() + 400
    try:  # where one fails, the others wait for it
        while any(rank.poll() is None for rank in ranks) and not any(r.poll() for r in ranks):
            assert time.monotonic() < end, "a rank hangs"
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
        told = []
        for output in outputs:
            output.seek(0)
            told.append(output.read())
            output.close()
    for rank, text in zip(ranks, told, strict=True):
        assert rank.wait() == 0 and "well" in text.split(), "\n".join(told)[-8000:]
