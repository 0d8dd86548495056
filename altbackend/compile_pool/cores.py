"""The number of processes that may compile side by side."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

MOST_WORKERS = 8


def workers(requested: int, environ: Mapping[str, str] | None = None) -> int:
    """Return `requested`, else one worker per usable core, shared with the host's other ranks, at most 8."""
    if requested:
        return requested
    ranks = (os.environ if environ is None else environ).get("LOCAL_WORLD_SIZE", "1")
    share = usable() // int(ranks) if ranks.isdigit() and int(ranks) else usable()
    return max(1, min(MOST_WORKERS, share))


def usable(root: Path = Path("/")) -> int:
    """Return the cores of this process: those that its affinity allows, or fewer if its control groups grant less time.

    `root` is the root of the file system that describes the groups.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(int(share) for share in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU seconds per second that each control group around this process grants (versions 1 and 2)."""
    mount = root / "sys/fs/cgroup"
    for group in _groups(root):
        for folder in (mount, mount / "cpu", mount / "cpu,cpuacct"):
            with contextlib.suppress(OSError, ValueError):
                quota, period = (folder / group / "cpu.max").read_text().split()
                yield int(quota) / int(period)  # "max" is not a number: no limit
            with contextlib.suppress(OSError, ValueError):
                quota, period = ((folder / group / f"cpu.cfs_{x}_us").read_text() for x in ("quota", "period"))
                if int(quota) > 0:
                    yield int(quota) / int(period)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the control groups of this process and their parents, relative to the mount."""
    yield Path()  # inside a container the mount shows the container's own group as its root
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            path = Path(line.split(":", 2)[-1].strip("/"))
            yield path
            yield from path.parents
