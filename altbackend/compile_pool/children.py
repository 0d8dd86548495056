"""Child processes that compile or measure: started by exec, each in its own group, killed with their parent.

A child is never a fork that goes on running the user's code. It inherits no descriptors but its own pipes, and Ctrl-C
at a terminal does not reach its group. Killing it also kills the processes that it started (g++'s cc1plus, Triton's
ptxas).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import background

EXIT_S = 0.5  # time for which interpreter exit waits for all killed children together
JOIN_S = 10.0  # most that it then waits for the threads that used them, which a busy machine may run late
MOST_SAID = 2000  # bytes of a child's last error output


class ChildFailed(Exception):
    """Raised if a child ended, or did not answer in time (`late`)."""

    def __init__(self, reason: str, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.timed_out = timed_out


class Child:
    """A process that answers lines by lines (`ask`), or that runs once (`run`).

    A pipe whose writing end only this process holds keeps the child from outliving this process. When it closes,
    the kernel kills the child's group, busy or not, so nothing has to be done at exit. `more`: environment
    variables besides this process's. Raise OSError if the process cannot be started.
    """

    def __init__(self, command: Sequence[str], more: Mapping[str, str] | None = None) -> None:
        if background.is_ending():
            raise OSError("the interpreter is ending")
        self.command, self.owner = list(command), os.getpid()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 it is closed with the child
        read_end, self._lifeline = os.pipe()
        try:
            self.process = subprocess.Popen(
                self.command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environ() | dict(more or {}),
                start_new_session=True,
                pass_fds=(read_end,),
            )
        except BaseException:
            self._errors.close()
            os.close(self._lifeline)
            raise
        else:
            _children.add(self)
            _kill_group_when_closed(read_end, self.process.pid)
        finally:
            os.close(read_end)

    def ask(self, line: str, seconds: float) -> str:
        """Return the line by which the child answers `line`. Raise ChildFailed and end the child if it does not."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        writer, reader = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(writer, False)
        unsent, answer, end = line.encode() + b"\n", b"", time.monotonic() + seconds
        try:
            while not answer.endswith(b"\n"):
                ready = _ready(reader, writer if unsent else None, end - time.monotonic())
                if not ready:
                    raise ChildFailed(f"no answer within {seconds:g} s", timed_out=True)
                if writer in ready:
                    unsent = unsent[os.write(writer, unsent) :]
                if reader in ready:
                    part = os.read(reader, 1 << 16)
                    if not part:
                        raise ChildFailed("it ended")
                    answer += part
        except (OSError, ChildFailed) as cause:
            status = self.end()
            timed_out = isinstance(cause, ChildFailed) and cause.timed_out
            reason = str(cause) if timed_out else f"it ended with status {status}"
            raise ChildFailed(f"{reason} {self.last_words}".rstrip(), timed_out) from None
        except BaseException:  # Ctrl-C: the outstanding answer would be taken for that of the next question
            self.end()
            raise
        return answer[:-1].decode(errors="replace")

    @property
    def is_own(self) -> bool:
        """Return whether this process has started the child; a fork has not."""
        return self.owner == os.getpid()

    @property
    def alive(self) -> bool:
        return self.is_own and self.process.poll() is None

    def end(self) -> int:
        """Kill the child with all processes that it has started. Return its exit status. May be called again."""
        if self.is_own:
            # kill before waiting: afterwards its number, and its group's, may belong to another process
            if self.process.returncode is None:
                with contextlib.suppress(OSError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.close()
        return int(self.process.returncode or 0)

    def close(self) -> None:
        """Close this process's ends of the child's pipes, and save the child's last error output."""
        if self in _children:
            _children.discard(self)
            self.last_words = self._last_words()
            os.close(self._lifeline)
            for pipe in (self.process.stdin, self.process.stdout, self._errors):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()

    last_words = ""

    def _last_words(self) -> str:
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), MOST_SAID, max(size - MOST_SAID, 0)).decode(errors="replace").strip()


def run(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Return exit status and output of a command.

    Raise OSError, or ChildFailed after `seconds`, with no process left.
    """
    return _outcome(Child(command), seconds)


class Batch:
    """Commands that are useful only together, run by several threads.

    Once the batch ends, none runs and none starts.
    """

    def __init__(self) -> None:
        self._lock, self._running, self._ended = threading.Lock(), set[Child](), False

    def run(self, command: Sequence[str], seconds: float, more: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Run a command like `run`, with `more` in its environment. Raise ChildFailed also if the batch has ended."""
        with self._lock:
            if self._ended:
                raise ChildFailed("it was not started, since another command of its batch failed")
            child = Child(command, more)
            self._running.add(child)
        try:
            return _outcome(child, seconds)
        finally:
            with self._lock:
                self._running.discard(child)

    def end(self) -> None:
        """Kill the running commands; the threads that wait for them return."""
        with self._lock:
            self._ended = True
            for child in self._running:
                with contextlib.suppress(OSError):
                    if child.process.returncode is None:
                        os.killpg(child.process.pid, signal.SIGKILL)


def _outcome(child: Child, seconds: float) -> tuple[int, str]:
    try:
        output, _ = child.process.communicate(timeout=seconds)
        child.close()
        return child.process.returncode, (output.decode(errors="replace") + child.last_words).strip()
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"no result after {seconds:g} s", timed_out=True) from None
    finally:
        child.end()


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package with this interpreter, in `environ()`."""
    return [sys.executable, "-m", module, *arguments]


def environ() -> dict[str, str]:
    """Return this process's environment, extended so that Python finds this process's copy of the package."""
    package = str(Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])}


def _kill_group_when_closed(pipe: int, group: int) -> None:
    """Have the kernel send SIGKILL to a process group when a pipe's other end closes (Linux, `man 2 fcntl`).

    On other systems a child ends when it has finished its work and finds its input closed.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return
    with contextlib.suppress(OSError):  # a sandbox may not support these signals
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -group)
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def _ready(reader: int, writer: int | None, seconds: float) -> set[int]:
    """Return the descriptors that are readable, writable, or closed at the other end."""
    poll = select.poll()  # select() takes no descriptor above 1023
    poll.register(reader, select.POLLIN)
    if writer is not None:
        poll.register(writer, select.POLLOUT)
    return {descriptor for descriptor, _ in poll.poll(max(seconds, 0) * 1e3)}


# --- the ends of this process ----------------------------------------------------------------------------------------

_children: set[Child] = set()


def _at_exit() -> None:
    background.begin_exit()
    own = [child for child in list(_children) if child.is_own]
    for child in own:
        with contextlib.suppress(OSError):
            os.killpg(child.process.pid, signal.SIGKILL)
    end = time.monotonic() + EXIT_S
    for child in own:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(end - time.monotonic(), 0))
    if background.join(JOIN_S):
        for child in own:
            child.close()


def _after_fork() -> None:
    """Close copies of the pipes after a fork of the user's process; the children are not the fork's."""
    for child in list(_children):
        child.process.returncode = 0  # the fork must not wait for it, or warn of it
        child.close()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
