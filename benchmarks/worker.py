"""The fresh process: `python -m benchmarks.worker REQUEST.json ANSWER.json`."""

import sys
import traceback
from pathlib import Path

from benchmarks.records import Failure, read_request, write_json


def summary(error: BaseException) -> str:
    """One line: the type and the last line of what was raised first, without torch's advice around it."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, BaseException):
        return summary(inner)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def main(request_path: str, answer_path: str) -> int:
    """Answer one request; exit status 1 with a Failure as the answer if anything was raised."""
    try:
        from benchmarks.measure import measure  # noqa: PLC0415 - imports torch, which may itself be what fails

        write_json(Path(answer_path), measure(read_request(Path(request_path))))
    except Exception as error:
        traceback.print_exc()
        write_json(Path(answer_path), Failure(summary(error), traceback.format_exc()[-4000:]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
