"""Shells in which a test may mount file systems, without being root."""

from __future__ import annotations

import subprocess

NAMESPACE = ["unshare", "--mount", "--map-root-user", "sh", "-ec"]  # ends at the first command that fails


def namespaces() -> bool:
    """Return whether this machine has such shells."""
    try:
        completed = subprocess.run([*NAMESPACE, "mount -t tmpfs none /mnt"], capture_output=True, timeout=60)
    except OSError:
        return False
    return completed.returncode == 0
