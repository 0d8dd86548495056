"""Shells and programs in which a test may mount file systems, without being root."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

NAMESPACE = ["unshare", "--mount", "--map-root-user", "sh", "-ec"]  # ends at the first command that fails
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000


def namespaces() -> bool:
    """Return whether this machine has such shells."""
    try:
        completed = subprocess.run([*NAMESPACE, "mount -t tmpfs none /mnt"], capture_output=True, timeout=60)
    except OSError:
        return False
    return completed.returncode == 0


def enter() -> None:
    """Give this process, which has one thread, mounts of its own, as `unshare --mount --map-root-user` does.

    Raise OSError.
    """
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS | CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def mount(options: str, *more: str) -> None:
    """Mount a file system in memory on the cache folder, or with `more` change the one that is there."""
    folder = os.environ["ALTBACKEND_CACHE_DIR"]
    what = more or ("-t", "tmpfs", "none")
    subprocess.run(["mount", "-o", options, *what, folder], check=True)
