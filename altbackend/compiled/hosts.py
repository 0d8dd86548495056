"""Host programs in C++ beside those in Python: built before the first call, or in the background after some calls."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import warnings
from collections.abc import Callable, Sequence

import torch

from altbackend.lazy_dataclass import dataclass

from ..compile_pool import background, libraries
from ..config.options import Config
from ..debug.trace import DecisionKind, Trace
from ..disk_cache.storage import open_store
from ..errors import AltError, FallbackWarning
from ..runtime import cuda
from ..runtime.boxed import Args, BoxedCall, Values
from ..runtime.cpp_host import CppHost, bound
from ..runtime.host import Library
from ..runtime.successor import Successor
from .artifact import Code, HostText

MIN_STEPS = 4  # fewer launches and library calls take less time than handing tensors to C++
CALLS_BEFORE_BUILD = 3  # a graph that is called less often is not worth a compiler run


@dataclass(frozen=True)
class HostLoader:
    """Loads the host program of one graph in C++. `open`: returns its call, from the path of its library."""

    text: str
    cfg: Config
    open: Callable[[str], BoxedCall]

    def stored(self) -> BoxedCall | None:
        """Return the call of the program if its library was built before."""
        file = open_store(self.cfg).find(libraries.host_name(self.text))
        if file is None:
            return None
        with contextlib.suppress(OSError, AttributeError):  # a damaged file, or a folder mounted noexec
            return self.open(str(file.path))
        return None

    def build(self, low_priority: bool) -> BoxedCall | None:
        """Build the library, or find it, and return the call of the program. Raise AltError or OSError."""
        call = self.stored()
        if call is None:
            libraries.build_host(self.text, self.cfg, low_priority)
            call = self.stored()
        return call


def on_cpu(code: Code, python: BoxedCall, library: Library | None, cfg: Config, trace: Trace) -> BoxedCall:
    """Return the call of a graph on a CPU by the host program that the option `host` asks for."""
    text = code.host

    def open_(path: str) -> BoxedCall:
        assert text is not None
        segments = [_address(library, f"segment{n}") for n in range(text.segments)]
        host = CppHost(path, text.form, library, segments, code.constants, cfg.threads)
        return bound(host, text.form, python)

    return python if text is None else _chosen(text, open_, python, cfg, trace)


def on_gpu(
    code: Code, python: BoxedCall, kernels: Sequence[Callable[..., None]], cfg: Config, trace: Trace
) -> BoxedCall:
    """Return the call of a graph on a GPU by the host program that the option `host` asks for.

    `kernels`: the launches of `runtime.cuda.load`, in order. A program that a CUDA graph replays stays in Python.
    """
    text, device = code.host, code.device.index or 0

    def open_(path: str) -> BoxedCall:
        assert text is not None
        host = CppHost(path, text.form, kernels, [], code.constants, 0)
        flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        host.use_gpu(cuda.launch_address(), [vars(k)["kernel"] for k in kernels], flag, device)
        return bound(host, text.form, python, device)

    return python if text is None or cfg.cudagraphs else _chosen(text, open_, python, cfg, trace)


def _address(library: Library | None, name: str) -> int:
    assert library is not None
    return ctypes.cast(getattr(library.dll, name), ctypes.c_void_p).value or 0


def _chosen(
    text: HostText, open_: Callable[[str], BoxedCall], python: BoxedCall, cfg: Config, trace: Trace
) -> BoxedCall:
    if cfg.host == "python" or (cfg.host == "auto" and text.steps < MIN_STEPS):
        return python
    loader = HostLoader(text.text, cfg, open_)
    if (call := loader.stored()) is not None:
        trace.decision(DecisionKind.HOST, trace.graph_name, "cpp", "found in the cache folder")
        return call
    if cfg.host == "auto":
        return _switching(loader, python)
    try:
        return loader.build(low_priority=False) or python
    except (AltError, OSError) as cause:
        warnings.warn(
            f"{trace.graph_name} runs with its host program in Python: {cause}", FallbackWarning, stacklevel=2
        )
        return python


def _switching(loader: HostLoader, python: BoxedCall) -> BoxedCall:
    """Return a call in Python that asks for the C++ program after some calls, and takes it once it is built."""
    calls = 0

    def counted(args: Args) -> Values:
        nonlocal calls
        calls += 1
        if calls == CALLS_BEFORE_BUILD:
            successor.current = python
            _builder.submit(loader, use)
        return python(args)

    def use(call: BoxedCall) -> None:
        successor.become(call)
        release = vars(python).get("release")
        if release is not None:  # the memory of intermediates, which the C++ program allocates itself
            release()

    successor = Successor(counted)
    return successor.call()


class _Builder:
    """Builds host programs in the background, one after the other, so that builds of kernels never wait for them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all tasks; a fork has no thread that serves them."""
        self.tasks: background.Tasks[tuple[HostLoader, Callable[[BoxedCall], None]]] = background.Tasks()
        self.lock, self.waiting, self.idle = threading.Lock(), 0, threading.Event()
        self.idle.set()
        self.started = False

    def submit(self, loader: HostLoader, use: Callable[[BoxedCall], None]) -> None:
        """Build a program and hand it to `use`. A build that fails leaves the program in Python."""
        with self.lock:
            self.waiting += 1
            self.idle.clear()
            if not self.started:
                self.started = True
                self.tasks.serve(self._run, "altbackend-host")
        self.tasks.put((loader, use))

    def _run(self, work: list[tuple[HostLoader, Callable[[BoxedCall], None]]]) -> None:
        _build(work)
        with self.lock:
            self.waiting -= 1
            if not self.waiting:
                self.idle.set()


def _build(work: list[tuple[HostLoader, Callable[[BoxedCall], None]]]) -> None:
    loader, use = work.pop()
    if background.is_ending():
        return
    with contextlib.suppress(AltError, OSError):
        if (call := loader.build(low_priority=True)) is not None:
            use(call)


_builder = _Builder()
os.register_at_fork(after_in_child=_builder.reset)


def wait_until_built(seconds: float) -> bool:
    """Wait for the programs that are being built in the background; return whether all are done."""
    return _builder.idle.wait(seconds)
