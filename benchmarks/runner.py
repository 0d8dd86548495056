"""Starts the fresh processes and collects their answers."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.records import Failure, Measurement, Request, Row, read_answer, write_json

ROOT = Path(__file__).resolve().parent.parent
CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "ALTBACKEND_CACHE_DIR")
LOG_CHARACTERS = 4000


def run_row(request: Request, rounds: int, warm: bool, timeout_seconds: float) -> Row:
    """Each round: an empty cache folder, a cold process, and if `warm` a second one with the same folder."""
    cold: list[Measurement] = []
    again: list[Measurement] = []
    for _ in range(rounds):
        with cache_folder() as cache:
            for label, answers in (("cold", cold), ("warm", again))[: 2 if warm else 1]:
                answer = run_process(request, cache, timeout_seconds)
                if isinstance(answer, Failure):
                    failure = Failure(f"{label}: {answer.summary}", answer.log)
                    return Row(request.case, request.backend, request.mode, tuple(cold), tuple(again), failure)
                answers.append(answer)
    return Row(request.case, request.backend, request.mode, tuple(cold), tuple(again))


@contextlib.contextmanager
def cache_folder() -> Iterator[Path]:
    """A new empty folder for every compiler cache, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="altbackend-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def run_process(request: Request, cache: Path, timeout_seconds: float) -> Measurement | Failure:
    """Answer one request in a fresh process. A crash, an exception or a timeout is a Failure."""
    with tempfile.TemporaryDirectory(prefix="altbackend-bench-io-", ignore_cleanup_errors=True) as folder:
        asked, answered, log = (Path(folder) / name for name in ("request.json", "answer.json", "log.txt"))
        write_json(asked, request)
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker", str(asked), str(answered)],
                cwd=ROOT,
                env=environment(cache),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                return Failure(f"timed out after {timeout_seconds:g} s", _tail(log))
            finally:
                _end_group(process)
        try:
            return read_answer(answered)
        except (OSError, ValueError):
            return Failure(_death(status, _tail(log)), _tail(log))


def environment(cache: Path) -> dict[str, str]:
    """This process's environment, offline, with each compiler's cache in its own folder under `cache`."""
    caches = {name: str(cache / name.lower()) for name in CACHE_VARIABLES}
    return {**os.environ, **caches, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and the compile workers it may have left; they share its session, and nothing else does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_CHARACTERS:]


def _death(status: int, log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return f"{how}: {lines[-1]}" if lines else how
