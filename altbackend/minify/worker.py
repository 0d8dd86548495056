"""The process that runs trials: each line of JSON names a file, and a line with the verdict answers it."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import torch

from .trial import Verdict, as_row, examine


def serve(requests: Iterable[str], answers: TextIO) -> None:
    """Answer every request {"path", "cache_dir"} by the fields of a Verdict."""
    for text in requests:
        request = json.loads(text)
        torch._dynamo.reset()
        try:
            verdict = examine(Path(request["path"]), request["cache_dir"])
        except Exception as cause:  # a reduced graph that cannot be rebuilt does not count as failing
            verdict = Verdict("invalid", type(cause).__name__, str(cause)[:500])
        answers.write(json.dumps(as_row(verdict)) + "\n")
        answers.flush()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    # Output of libraries must not come between the answers.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, channel)
