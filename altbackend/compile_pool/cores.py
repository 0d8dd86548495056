"""How many processes may compile side by side."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

MOST_WORKERS = 8


def workers(wanted: int, environ: Mapping[str, str] | None = None) -> int:
    """`wanted`, else one per core that this process may use, shared with the other ranks of the host, at most 8."""
    if wanted:
        return wanted
    ranks = (os.environ if environ is None else environ).get("LOCAL_WORLD_SIZE", "1")
    share = usable() // int(ranks) if ranks.isdigit() and int(ranks) else usable()
    return max(1, min(MOST_WORKERS, share))


def usable(root: Path = Path("/")) -> int:
    """Cores of this process: those that its affinity allows, or fewer where its control groups grant less time.

    `root`: of the file system that describes the groups.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(int(share) for share in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """CPU seconds a second that each control group around this process grants, of either version of the interface."""
    mount = root / "sys/fs/cgroup"
    for group in _groups(root):
        for folder in (mount, mount / "cpu", mount / "cpu,cpuacct"):
            with contextlib.suppress(OSError, ValueError):
                quota, period = (folder / group / "cpu.max").read_text().split()
                yield int(quota) / int(period)  # "max" is no number: no limit
            with contextlib.suppress(OSError, ValueError):
                quota, period = ((folder / group / f"cpu.cfs_{x}_us").read_text() for x in ("quota", "period"))
                if int(quota) > 0:
                    yield int(quota) / int(period)


def _groups(root: Path) -> Iterator[Path]:
    """Control groups of this process, each with those around it, relative to the mount."""
    yield Path()  # inside a container the mount shows the container's own group as its root
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            path = Path(line.split(":", 2)[-1].strip("/"))
            yield path
            yield from path.parents
