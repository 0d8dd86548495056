"""Python programs in processes of their own, without 3 s of a core for importing torch and the compiler each time.

A server that has imported them, and has done nothing else, forks for each program. The program finds its arguments,
environment, folder and `__main__` as `python -c` or `python -m` would give them, and it ends as those do. What Python
or torch read from the environment when they start is the server's: programs that set such variables, look at what is
imported, or must hash in another order than their siblings start an interpreter (`subprocess`) instead.

    python -m test.fresh SOCKET MODULE...  # the server, which imports the modules
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TORCH = ("torch", "torch._dynamo", "torch._functorch.aot_autograd")
COMPILER = ("altbackend.backend", "altbackend.pipeline")
START_S = 100.0
PR_SET_PDEATHSIG = 1


def time_no_guards() -> None:
    """Keep Dynamo from flushing the processor's caches for each graph, 25 ms, to log how long its guards take.

    It has found before that the guards pass.
    """
    guards: Any = importlib.import_module("torch._dynamo.guards")
    guards.profile_guard_manager = lambda *_: 0.0


class Fresh:
    """A running program; `words` are what follows `python` on a command line: -c or -m, a text or name, arguments.

    `torch_only`: the server has not imported altbackend, so that the program may have another copy of it.
    """

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | Path = ROOT,
        torch_only: bool = False,
    ) -> None:
        self.words, self.returncode = list(words), None
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 `kill` closes them
        self._talk = _connected(_server(torch_only))
        request = {"words": self.words, "env": dict(os.environ if env is None else env), "cwd": str(cwd)}
        text = json.dumps(request).encode() + b"\n"
        socket.send_fds(self._talk, [text[:1]], [f.fileno() for f in self._files])
        self._talk.sendall(text[1:])

    returncode: int | None

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return what the program has printed and its errors, after its end. Raise TimeoutExpired, and end it."""
        self._talk.settimeout(timeout)
        try:
            with self._talk.makefile() as answer:
                self.returncode = int(answer.readline())
            for file in self._files:
                file.seek(0)
            out, errors = (file.read().decode(errors="replace") for file in self._files)
        except TimeoutError:
            raise subprocess.TimeoutExpired(self.words, timeout) from None
        finally:
            self.kill()
        return out, errors

    def kill(self) -> None:
        """End the program, if it runs."""
        self._talk.close()
        for file in self._files:
            file.close()


def run(words: Sequence[str], timeout: float = 100, **more: Any) -> subprocess.CompletedProcess[str]:
    """Return the outcome of a program; `more` as for `Fresh`. Raise TimeoutExpired."""
    program = Fresh(words, **more)
    out, errors = program.communicate(timeout)
    assert program.returncode is not None
    return subprocess.CompletedProcess(program.words, program.returncode, out, errors)


@functools.cache
def _server(torch_only: bool) -> str:
    """Return the socket of this process's server, which starts with the first program."""
    if torch_only:
        path = tempfile.mkdtemp(prefix="altbackend-fresh-") + "/torch"
        command = [sys.executable, "-m", "test.fresh", path, *TORCH]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        server = subprocess.Popen(command, env=env, cwd=ROOT, stdin=subprocess.PIPE)  # ends when this pipe does
        atexit.register(server.wait)
        atexit.register(server.stdin.close)
    else:
        path = _server(True).removesuffix("torch") + "compiler"
        atexit.register(Fresh(["-m", "test.fresh", path, *COMPILER], torch_only=True).kill)
    _connected(path).close()
    return path


def _connected(path: str) -> socket.socket:
    end = time.monotonic() + START_S
    while True:
        talk = socket.socket(socket.AF_UNIX)
        try:
            talk.connect(path)
            return talk
        except (FileNotFoundError, ConnectionRefusedError):
            talk.close()
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


# --- the server ------------------------------------------------------------------------------------------------------


class Served:
    """The programs that run, by process, and the connections over which their ends are told."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener, self.running = listener, dict[int, socket.socket]()
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        woken, self.waker = socket.socketpair()
        for end in (woken, self.waker):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        self.selector.register(woken, selectors.EVENT_READ, "ended")
        with contextlib.suppress(PermissionError):  # /dev/null cannot be waited for, and needs not be
            self.selector.register(sys.stdin, selectors.EVENT_READ, "stdin")

    def next_program(self) -> dict[str, Any] | None:
        """Serve until standard input ends (None), or, in a fork, return what it is to run."""
        while True:
            for key, _ in self.selector.select():
                if key.data == "stdin":
                    signal.set_wakeup_fd(-1)
                    return None
                if key.data == "ended":
                    with contextlib.suppress(BlockingIOError):
                        key.fileobj.recv(1000)
                    self._tell_ends()
                elif key.fileobj is self.listener:
                    if (request := self._begin(self.listener.accept()[0])) is not None:
                        return request
                elif isinstance(key.data, int):  # the client has gone
                    self._drop(key.data)

    def _begin(self, talk: socket.socket) -> dict[str, Any] | None:
        """Fork for the program that a client asks for; return it in the fork."""
        text, files, _, _ = socket.recv_fds(talk, 1, 2)
        if not text:
            talk.close()
            return None
        request: dict[str, Any] = json.loads(text + talk.makefile("rb").readline())
        if pid := os.fork():
            self.running[pid] = talk
            self.selector.register(talk, selectors.EVENT_READ, pid)
            for file in files:
                os.close(file)
            return None
        os.setsid()
        with contextlib.suppress(AttributeError):  # only Linux has it
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no program outlives its server
        self._leave(talk)
        for number, file in enumerate(files, 1):
            os.dup2(file, number)
            os.close(file)
        return request

    def _leave(self, talk: socket.socket) -> None:
        """Close in a fork what belongs to the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for held in (talk, self.listener, self.waker, *self.running.values()):
            held.close()
        self.selector.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)

    def _tell_ends(self) -> None:
        for pid, status in _ended():
            if (talk := self.running.pop(pid, None)) is not None:
                self.selector.unregister(talk)
                with contextlib.suppress(OSError):
                    talk.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                talk.close()

    def _drop(self, pid: int) -> None:
        if (talk := self.running.pop(pid, None)) is not None:
            self.selector.unregister(talk)
            talk.close()
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)


def _ended() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def _run(request: Mapping[str, Any], path: Sequence[str]) -> None:
    """Run a program in this process, with `path` behind the folders that its environment names."""
    (kind, what, *arguments), env = request["words"], request["env"]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(request["cwd"])
    tempfile.tempdir = None  # which the environment may name
    sys.argv = [kind, *arguments]
    sys.path[:] = [os.getcwd(), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *path]
    importlib.invalidate_caches()
    if "OMP_NUM_THREADS" in env:
        sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    assert kind == "-c", kind
    main_ = types.ModuleType("__main__")
    sys.modules["__main__"] = main_
    exec(compile(what, "<string>", "exec"), main_.__dict__)


def main() -> None:
    path, *modules = sys.argv[1:]
    own = {os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    others = [p for p in sys.path if p not in own]
    for name in modules:
        importlib.import_module(name)
    time_no_guards()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path + ".new")
        listener.listen(64)
        os.rename(path + ".new", path)
        request = Served(listener).next_program()
    if request is not None:
        _run(request, others)
    else:
        shutil.rmtree(Path(path).parent, ignore_errors=True)


if __name__ == "__main__":
    main()
