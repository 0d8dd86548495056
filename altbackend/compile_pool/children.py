"""Processes that compile or measure: started by exec, each in a group of its own, ended with their parent.

A child is never a fork that goes on running the user's code. It inherits no descriptor but its own pipes, Ctrl-C at a
terminal does not reach its group, and its end takes what it has started with it (g++'s cc1plus, Triton's ptxas).
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

EXIT_S = 0.5  # that the end of the interpreter waits for killed children, all of them together
MOST_SAID = 2000  # bytes of a child's last words


class ChildFailed(Exception):
    """A child ended, or did not answer in time (`late`)."""

    def __init__(self, reason: str, late: bool = False) -> None:
        super().__init__(reason)
        self.late = late


class Child:
    """A process that answers lines by lines (`ask`), or that runs once (`run`).

    What keeps it from outliving this process, however that ends, is a pipe whose writing end only this process has:
    when it closes, the kernel kills the child's group, busy or not. Nothing has to be done at exit, and nobody has to
    look for a parent that is gone. `more`: its environment beyond this process's. Raises OSError where the process
    cannot be started.
    """

    def __init__(self, command: Sequence[str], more: Mapping[str, str] | None = None) -> None:
        if _ending.is_set():
            raise OSError("the interpreter is ending")
        self.command, self.owner = list(command), os.getpid()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 it is closed with the child
        held, self._lifeline = os.pipe()
        try:
            self.process = subprocess.Popen(
                self.command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environ() | dict(more or {}),
                start_new_session=True,
                pass_fds=(held,),
            )
        except BaseException:
            self._errors.close()
            os.close(self._lifeline)
            raise
        else:
            _children.add(self)
            _kill_group_when_closed(held, self.process.pid)
        finally:
            os.close(held)

    def ask(self, line: str, seconds: float) -> str:
        """The line by which the child answers `line`, without its end. Raises ChildFailed; the child is then ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        writer, reader = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(writer, False)
        unsent, answer, end = line.encode() + b"\n", b"", time.monotonic() + seconds
        try:
            while not answer.endswith(b"\n"):
                ready = _ready(reader, writer if unsent else None, end - time.monotonic())
                if not ready:
                    raise ChildFailed(f"no answer within {seconds:g} s", late=True)
                if writer in ready:
                    unsent = unsent[os.write(writer, unsent) :]
                if reader in ready:
                    part = os.read(reader, 1 << 16)
                    if not part:
                        raise ChildFailed("it ended")
                    answer += part
        except (OSError, ChildFailed) as cause:
            status = self.end()
            late = isinstance(cause, ChildFailed) and cause.late
            reason = str(cause) if late else f"it ended with status {status}"
            raise ChildFailed(f"{reason} {self.last_words}".rstrip(), late) from None
        except BaseException:  # Ctrl-C: the answer that is still to come would be taken for that of the next question
            self.end()
            raise
        return answer[:-1].decode(errors="replace")

    @property
    def mine(self) -> bool:
        """Whether this process has started it; a fork has not."""
        return self.owner == os.getpid()

    @property
    def alive(self) -> bool:
        return self.mine and self.process.poll() is None

    def end(self) -> int:
        """Kill the child with all that it has started; its exit status. May be called again."""
        if self.mine:
            # before it is waited for, since its number, and with it the group's, may be another's afterwards
            if self.process.returncode is None:
                with contextlib.suppress(OSError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.let_go()
        return int(self.process.returncode or 0)

    def let_go(self) -> None:
        """Close this process's ends of the child's pipes, and keep the child's last words."""
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
    """Exit status and output of a command. Raises OSError, or ChildFailed after `seconds`; nothing of it runs on."""
    return _outcome(Child(command), seconds)


class Batch:
    """Commands that are of use together only, run by several threads; once it has ended none runs, and none starts."""

    def __init__(self) -> None:
        self._lock, self._running, self._ended = threading.Lock(), set[Child](), False

    def run(self, command: Sequence[str], seconds: float, more: Mapping[str, str] | None = None) -> tuple[int, str]:
        """As `run`, with `more` in the environment; raises ChildFailed also where the batch has ended before."""
        with self._lock:
            if self._ended:
                raise ChildFailed("it was not started, since others like it failed")
            child = Child(command, more)
            self._running.add(child)
        try:
            return _outcome(child, seconds)
        finally:
            with self._lock:
                self._running.discard(child)

    def end(self) -> None:
        """Kill what runs; the threads that wait for it let go of it."""
        with self._lock:
            self._ended = True
            for child in self._running:
                with contextlib.suppress(OSError):
                    if child.process.returncode is None:
                        os.killpg(child.process.pid, signal.SIGKILL)


def _outcome(child: Child, seconds: float) -> tuple[int, str]:
    try:
        said, _ = child.process.communicate(timeout=seconds)
        child.let_go()
        return child.process.returncode, (said.decode(errors="replace") + child.last_words).strip()
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"no result after {seconds:g} s", late=True) from None
    finally:
        child.end()


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package as a program of this interpreter, in `environ()`."""
    return [sys.executable, "-m", module, *arguments]


def environ() -> dict[str, str]:
    """This process's environment, in which Python finds this process's copy of the package."""
    package = str(Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])}


def _kill_group_when_closed(pipe: int, group: int) -> None:
    """Have the kernel send SIGKILL to a process group when a pipe's other end closes; Linux can (`man 2 fcntl`).

    Elsewhere a child ends when it has finished what it does and finds its input closed.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return
    with contextlib.suppress(OSError):  # a sandbox that knows no such signals
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -group)
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def _ready(reader: int, writer: int | None, seconds: float) -> set[int]:
    """Those of the descriptors that have something to read or room to write, or whose other end is closed."""
    poll = select.poll()  # select() takes no descriptor from 1024 on
    poll.register(reader, select.POLLIN)
    if writer is not None:
        poll.register(writer, select.POLLOUT)
    return {descriptor for descriptor, _ in poll.poll(max(seconds, 0) * 1e3)}


# --- the ends of this process ----------------------------------------------------------------------------------------

_children: set[Child] = set()
_ending = threading.Event()


def _at_exit() -> None:
    _ending.set()
    held = [child for child in list(_children) if child.mine]
    for child in held:
        with contextlib.suppress(OSError):
            os.killpg(child.process.pid, signal.SIGKILL)
    end = time.monotonic() + EXIT_S
    for child in held:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(end - time.monotonic(), 0))


def _after_fork() -> None:
    """A fork of the user's process has copies of all pipes; the children are not its own."""
    for child in list(_children):
        child.process.returncode = 0  # it is not this process's to wait for, or to warn of
        child.let_go()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
