"""The location of repro files: the debug folder, or a bounded number of files in a temporary folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from ..debug.trace import DecisionKind, Trace
from ..disk_cache.folders import make_folder, temporary_folder, unusable_reason, write_atomically
from .text import NotWritable, text_of

MOST_FILES = 32  # files in the temporary folder; the oldest are removed


def save(gm: torch.fx.GraphModule, trace: Trace, job: Mapping[str, object], title: str) -> Path | None:
    """Write the program that compiles `gm` again. Return its path, or None with a recorded decision if that fails.

    Nothing is written under `repro="never"`. Never raises, since the caller already has a failure to report.
    """
    if trace.cfg.repro == "never":
        return None
    try:
        return _save(gm, trace, job, title)
    except (NotWritable, OSError) as cause:
        reason = str(cause)
    except Exception as cause:
        reason = f"{type(cause).__name__}: {cause}"
    trace.decision(DecisionKind.REPRO, trace.graph_name, "not written", reason)
    return None


def _save(gm: torch.fx.GraphModule, trace: Trace, job: Mapping[str, object], title: str) -> Path:
    if trace.folder:
        path = trace.folder.absolute() / "repro.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(gm, trace.cfg, job, title, str(path)), encoding="utf-8")
        return path
    text = text_of(gm, trace.cfg, job, title, "FILE")
    folder = _temporary() / "repro"
    path = folder / f"{trace.graph_name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    write_atomically(path, text_of(gm, trace.cfg, job, title, str(path)).encode())
    _remove_oldest(folder)
    return path


def _temporary() -> Path:
    """Return this user's temporary folder; a new one if another user could have written to it."""
    folder = temporary_folder()
    return Path(tempfile.mkdtemp(prefix="altbackend-")) if folder.is_symlink() or unusable_reason(folder) else folder


def _remove_oldest(folder: Path) -> None:
    make_folder(folder)
    files = [(entry.stat().st_mtime, entry.path) for entry in os.scandir(folder) if entry.name.endswith(".py")]
    for _, path in sorted(files)[:-MOST_FILES]:
        with contextlib.suppress(OSError):  # another process has removed it
            os.unlink(path)
