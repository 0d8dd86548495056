"""The process that runs trials: a line of JSON names a file, a line answers with the verdict."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .trial import Verdict, as_row, examine


def serve(questions: Iterable[str], answers: Any) -> None:
    """Answers every question: {"path", "cache_dir"} by the fields of a Verdict."""
    for text in questions:
        question = json.loads(text)
        torch._dynamo.reset()
        try:
            verdict = examine(Path(question["path"]), question["cache_dir"])
        except Exception as cause:  # a reduced graph that cannot be rebuilt is of no interest
            verdict = Verdict("invalid", type(cause).__name__, str(cause)[:500])
        answers.write(json.dumps(as_row(verdict)) + "\n")
        answers.flush()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    # What libraries print must not come between the answers.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, channel)
