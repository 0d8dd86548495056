"""Gets verdicts from a worker process, and replaces the process if a trial has killed it or takes too long."""

from __future__ import annotations

import difflib
import json
import re
import tempfile
from pathlib import Path

from ..compile_pool.children import Child, ChildFailed, python
from .trial import Verdict

SIMILAR = 0.6  # share of equal text from which two messages are the same failure


class Judge:
    """Returns verdicts on files, each within `seconds`. Use it as a context manager."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.trials = 0
        self._folder = tempfile.TemporaryDirectory(prefix="altbackend-minify-", ignore_cleanup_errors=True)
        self._child: Child | None = None

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.end()
        self._folder.cleanup()

    def of_text(self, text: str) -> Verdict:
        """Return the verdict on a file with this text."""
        path = Path(self._folder.name) / f"trial{self.trials}.py"
        path.write_text(text, encoding="utf-8")
        return self.of_file(path)

    def of_file(self, path: Path) -> Verdict:
        """Return the verdict on a file. A process that ends is a crash; one without an answer in time is a hang."""
        self.trials += 1
        if self._child is None or not self._child.alive:
            self._child = Child(python("altbackend.minify.worker"))
        request = json.dumps({"path": str(path.absolute()), "cache_dir": f"{self._folder.name}/cache"})
        try:
            return Verdict(**json.loads(self._child.ask(request, self.seconds)))
        except ChildFailed as cause:
            return Verdict("hang" if cause.timed_out else "crash", "", str(cause).partition("\n")[0][:200])


def same_failure(a: Verdict, b: Verdict) -> bool:
    """Return whether two verdicts describe one defect: the same kind, and for errors one type and similar words."""
    if a.kind != b.kind or a.name != b.name:
        return False
    if a.kind != "error":
        return True
    # names of nodes and numbers differ between graphs
    first, second = (re.sub(r"\d+", "0", v.message) for v in (a, b))
    return difflib.SequenceMatcher(None, first, second, autojunk=False).ratio() >= SIMILAR
