"""A process of a group of one: programs over `torch.distributed`, compiled strictly, equal eager's. Prints "equal"."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

T = torch.Tensor


def compiled(fn: Any) -> Any:
    return torch.compile(fn, backend="alt", options={"strict": True})


def local(x: T) -> T:
    return x.to_local() if isinstance(x, DTensor) else x


def replicas() -> None:
    """A model in several buckets, each a graph of its own, in inference and in training."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(5)])
    x = torch.randn(4, 512)
    want = model(x)
    expected = torch.autograd.grad(want.sum(), list(model.parameters()))
    parallel = DistributedDataParallel(model, bucket_cap_mb=1.2)
    for context in (torch.no_grad, torch.inference_mode):
        torch._dynamo.reset()
        run = compiled(parallel)
        with context():
            for _ in range(2):
                torch.testing.assert_close(run(x), want)
    torch._dynamo.reset()
    compiled(parallel)(x).sum().backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)


def sharded() -> None:
    """Tensors over a mesh, which is an input of some of their graphs."""
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])
    w = distribute_tensor(torch.randn(4, 6), mesh, [Replicate()])
    programs: list[tuple[Callable[..., T], tuple[T, ...]]] = [
        (lambda x, w: torch.relu(x @ w) + 1, (x, w)),
        (lambda x: x.redistribute(mesh, [Replicate()]).to_local() * 2, (x,)),
        (lambda x: DTensor.from_local(x, mesh, [Shard(0)], run_check=False).sin(), (torch.randn(8, 4),)),
        (lambda x, w: (x.sum(), (x * w.sum()).cos()), (x, w)),
    ]
    for fn, inputs in programs:
        for grad in (False, True):
            torch._dynamo.reset()
            leaves = [t.detach().requires_grad_(grad) for t in inputs]
            got, want = compiled(fn)(*leaves), fn(*leaves)
            results, references = ([r] if isinstance(r, T) else list(r) for r in (got, want))
            for a, b in zip(results, references, strict=True):
                assert type(a) is type(b)
                torch.testing.assert_close(local(a), local(b))
            if grad:
                pairs = (torch.autograd.grad(sum(local(r).sum() for r in rs), leaves) for rs in (results, references))
                for a, b in zip(*pairs, strict=True):
                    torch.testing.assert_close(local(a), local(b))


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    replicas()
    sharded()
    dist.destroy_process_group()
    print("equal")
