"""The speed of a device: what it multiplies and what it moves in a second, measured once per machine.

The figures are rounded and kept in the cache folder, so that all processes choose the same values to save.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import time
from collections.abc import Callable

import torch

from ..compat import torch_api
from ..config.options import Config
from ..disk_cache.storage import open_store
from .cost import Speed

SIDE = {"cpu": 512, "cuda": 4096}  # side of the matrices that are multiplied
MOVED = {"cpu": 1 << 25, "cuda": 1 << 29}  # bytes of the tensor that is copied
REPEATS = 5


def speed_of(device: torch.device, cfg: Config) -> Speed:
    """Return the measured speed of a device; a fixed one if the option `deterministic` forbids to measure."""
    if cfg.deterministic or device.type not in SIDE:
        return Speed()
    store = open_store(cfg)
    name = f"roofline/{hashlib.sha256(_identity(device).encode()).hexdigest()[:24]}.json"
    with contextlib.suppress(ValueError, TypeError):
        return Speed(**json.loads(store.read(name) or b"null"))
    speed = _measured(device.type, device.index)
    with contextlib.suppress(OSError):  # a full disk costs the next process a measurement
        store.write(name, json.dumps(vars(speed)).encode())
    return speed


def _identity(device: torch.device) -> str:
    on_gpu = device.type == "cuda"
    machine = (
        torch.cuda.get_device_name(device) if on_gpu else f"{torch_api.cpu_properties()} {torch.get_num_threads()}"
    )
    return f"{torch.__version__} {device.type} {machine}"


@functools.cache
def _measured(kind: str, index: int | None) -> Speed:
    device = torch.device(kind if index is None else f"{kind}:{index}")
    with torch_api.real_tensors(), torch.no_grad(), torch.random.fork_rng([]):
        source = torch.zeros(MOVED[kind], dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        moving = _seconds(lambda: target.copy_(source), device) / (2 * MOVED[kind])
        flops = {dtype: _seconds_per_flop(dtype, device) for dtype in (torch.float32, torch.bfloat16)}
    wide, half = (float(f"{flops[dtype] / moving:.1g}") for dtype in (torch.float32, torch.bfloat16))
    return Speed(wide, half)


def _seconds_per_flop(dtype: torch.dtype, device: torch.device) -> float:
    side = SIDE[device.type]
    a = torch.ones(side, side, dtype=dtype, device=device)
    return _seconds(lambda: a @ a, device) / (2 * side**3)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of a call, with the device's work."""
    times = []
    for _ in range(REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
