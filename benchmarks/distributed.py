"""torchrun --standalone --nproc-per-node 2 -m benchmarks.distributed: training steps on several GPUs over NCCL.

Each row is a way to distribute a stack of feed-forward layers (DDP, FSDP2, tensor parallel) and a backend. The
gradients of the first step are compared with those of eager in one process. Times are the median of a step on the
slowest rank. `overlap` is the share of rank 0's communication during which kernels compute, by torch's profiler. With
`--trace FOLDER`, rank 0 writes that profile.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.overlap import share_of

T = torch.Tensor


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: T) -> T:
        y: T = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return y


def replicated(model: nn.Sequential, device: torch.device) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def sharded(model: nn.Sequential, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: nn.Sequential, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


# how the model is distributed, and whether each rank has a part of the batch
WAYS: dict[str, tuple[Callable[[nn.Sequential, torch.device], nn.Module], bool]] = {
    "ddp": (replicated, True),
    "fsdp2": (sharded, True),
    "tensor parallel": (tensor_parallel, False),
}


def measured(way: str, backend: str, reference: nn.Sequential, batch: T, chosen: argparse.Namespace) -> str:
    """Return the row of one way and backend. Raises AssertionError if gradients differ."""
    torch._dynamo.reset()
    distribute, is_divided = WAYS[way]
    model = copy.deepcopy(reference)
    distributed = distribute(model, batch.device)
    run: Callable[[T], T] = distributed if backend == "eager" else torch.compile(distributed, backend=backend)
    own = batch.chunk(dist.get_world_size())[dist.get_rank()] if is_divided else batch

    def step() -> float:
        start = time.perf_counter()
        for p in model.parameters():
            p.grad = None
        run(own).square().mean().backward()
        synchronise(batch.device)
        return time.perf_counter() - start

    first = step()
    compare(model, reference, batch)
    times = [step() for _ in range(chosen.steps)]
    overlap = None
    if dist.get_rank() == 0:
        profile = profiled(step)
        overlap = share_of(profile.events(), batch.device.type == "cuda")
        if chosen.trace:
            profile.export_chrome_trace(str(Path(chosen.trace) / f"{way.replace(' ', '_')}-{backend}.json"))
    else:
        step()  # the ranks' collectives must match
    slowest = torch.tensor(median(times), device=batch.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    percent = "-" if overlap is None else f"{overlap:.0%}"
    return f"{way:16} {backend:10} {slowest.item() * 1e3:9.2f} {first:9.2f} {percent:>8}"


def profiled(step: Callable[[], float]) -> torch.profiler.profile:
    """Return the profile of one step."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities[: 1 + torch.cuda.is_available()]) as profile:
        step()
    return profile


def compare(model: nn.Module, reference: nn.Module, batch: T) -> None:
    """Compare gradients with those of one process over the whole batch."""
    alone = copy.deepcopy(reference)
    alone(batch).square().mean().backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        grad = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        torch.testing.assert_close(grad, theirs.grad, rtol=1e-2, atol=1e-4)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["eager", "alt", "inductor"])
    parser.add_argument("--ways", nargs="+", choices=sorted(WAYS), default=list(WAYS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trace", help="folder for profiles")
    chosen = parser.parse_args()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if chosen.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    reference = nn.Sequential(*[Layer(chosen.width) for _ in range(chosen.layers)]).to(device)
    batch = torch.randn(chosen.rows, chosen.width, device=device)
    if dist.get_rank() == 0:
        print(f"{'way':16} {'backend':10} {'step ms':>9} {'first s':>9} {'overlap':>8}", flush=True)
    for way in chosen.ways:
        for backend in chosen.backends:
            row = measured(way, backend, reference, batch, chosen)
            if dist.get_rank() == 0:
                print(row, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
