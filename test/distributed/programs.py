"""Programs of two processes over gloo, compiled strictly; their gradients equal those of one process in eager.

`python -m test.distributed.programs RANK WORLD FILE NAME...` prints the name of each program that is equal.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

T = torch.Tensor
WIDTH, BATCH = 192, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: T) -> T:
        y: T = x + self.down(torch.relu(self.up(x)))
        return y


def net(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Net() for _ in range(layers)])


def batch() -> T:
    torch.manual_seed(1)
    return torch.randn(BATCH, WIDTH)


def own_part(x: T) -> T:
    """Return a copy of this rank's rows: views at different offsets would be different graphs."""
    return x.chunk(dist.get_world_size())[dist.get_rank()].clone()


def compiled(fn: Any, **flags: Any) -> Any:
    return torch.compile(fn, backend="alt", options={"strict": True}, **flags)


def expected(model: nn.Module) -> list[T]:
    """Return the gradients of the mean loss over the whole batch, in one process."""
    reference = copy.deepcopy(model)
    reference(batch()).square().mean().backward()
    return [p.grad for p in reference.parameters() if p.grad is not None]


def whole(x: T | None) -> T:
    assert x is not None
    return x.full_tensor() if isinstance(x, DTensor) else x


def equal(model: nn.Module, grads: list[T], scale: float = 1.0) -> None:
    for p, g in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(whole(p.grad) * scale, g, rtol=1e-4, atol=1e-6)


def replicas() -> None:
    """Two steps of replicas whose gradients travel in several buckets; each bucket is a graph of its own."""
    model = net()
    grads = expected(model)
    parallel = DistributedDataParallel(model, bucket_cap_mb=1.1)
    run = compiled(parallel)
    for _ in range(2):
        model.zero_grad()
        run(own_part(batch())).square().mean().backward()
        equal(model, grads)


def sharded() -> None:
    """Two steps with the parameters in shards."""
    model = net()
    grads = expected(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    run = compiled(model)
    for _ in range(2):
        model.zero_grad()
        run(own_part(batch())).square().mean().backward()
        equal(model, grads)


def tensor_parallel() -> None:
    """Layers whose columns, then rows, are divided among the ranks."""
    model = net()
    grads = expected(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    run = compiled(model, fullgraph=True)
    for _ in range(2):
        model.zero_grad()
        run(batch()).square().mean().backward()
        equal(model, grads)


def collectives() -> None:
    """Every functional collective, with work between start and wait, on results and in place."""
    group = dist.group.WORLD
    assert group is not None
    world = dist.get_world_size()

    def sums(x: T) -> T:
        total = funcol.all_reduce(x * 2, "sum", group)
        other = x.sin() + 1
        return total + other

    def pieces(x: T) -> tuple[T, T]:
        gathered = funcol.all_gather_tensor(x + 1, 0, group)
        piece = funcol.reduce_scatter_tensor(gathered * 2, "sum", 0, group)
        return gathered, piece.cos()

    def several(x: T) -> list[T]:
        return [y + 1 for y in funcol.all_reduce_coalesced([x, x * 3], "avg" if x.is_cuda else "sum", group)]

    def exchanged(x: T) -> T:
        halves = [len(x) // world] * world
        y: T = funcol.all_to_all_single(x.relu(), halves, halves, group)
        return y * 2

    def from_first(x: T) -> T:
        y: T = funcol.broadcast(x + 1, 0, group)
        return y - 1

    def in_place(x: T) -> T:
        x = x * 2
        dist.all_reduce(x)
        return x + 1

    def gathered_in_place(x: T) -> T:
        out = x.new_empty(world * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.exp())
        part = torch.empty_like(x)
        dist.reduce_scatter_tensor(part, out * 2)
        return part + 1

    for fn in (sums, pieces, several, exchanged, from_first, in_place, gathered_in_place):
        torch._dynamo.reset()
        run = compiled(fn, fullgraph=True)
        for rows in (4, 6) if fn is sums else (4,):
            x = torch.randn(rows, 3) + dist.get_rank()
            got, want = run(x.clone()), fn(x.clone())
            for a, b in zip(listed(got), listed(want), strict=True):
                torch.testing.assert_close(a, b)


def listed(x: Any) -> list[T]:
    return [x] if isinstance(x, T) else list(x)


PROGRAMS: dict[str, Callable[[], None]] = {
    "replicas": replicas,
    "sharded": sharded,
    "tensor_parallel": tensor_parallel,
    "collectives": collectives,
}


def main() -> None:
    rank, world, file, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=int(rank), world_size=int(world))
    for name in names:
        torch._dynamo.reset()
        PROGRAMS[name]()
        print(name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
