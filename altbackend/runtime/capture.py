"""Capture of a call's work on a GPU as one CUDA graph, on a stream of its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..compat.torch_api import no_collection
from .cuda import empty_cuda

Call = Callable[[list[Any]], Sequence[Any]]
Replay = Callable[[], None]


class CudaCapture:
    """Records calls of one device. Replays are ordered one after the other, also over streams."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.last: torch.cuda.Stream | None = None
        self.anchor: torch.cuda.CUDAGraph | None = None

    @functools.cached_property
    def side(self) -> torch.cuda.Stream:
        """The stream that records: a device's default stream cannot."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def pool(self) -> Any:
        """A memory pool whose memory no other pool and no eager code uses."""
        return torch.cuda.graph_pool_handle()

    @functools.cached_property
    def shared(self) -> Any:
        """The pool of graphs that leave nothing in it between calls."""
        pool = self.pool()
        self.anchor = self._smallest(pool)  # torch forgets a pool with its last graph
        return pool

    def busy(self) -> bool:
        """Whether somebody is recording on the current stream already."""
        return torch.cuda.is_current_stream_capturing()

    def empty(self, t: torch.Tensor) -> torch.Tensor:
        """Memory like `t`'s from the general allocator, outside of every pool."""
        return empty_cuda(tuple(t.size()), t.stride(), t.dtype)

    def record(self, call: Call, args: list[Any], pool: Any) -> tuple[Replay, Sequence[Any]]:
        """Record `call(args)` without running it: what runs it, and its results' places in the pool.

        Whatever the call or the driver raises goes through, and nothing stays recorded.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        self.side.wait_stream(current)
        try:
            # a collected tensor or graph would make driver calls that a recording does not allow
            with torch.cuda.stream(self.side), no_collection():
                outputs = _capture(graph, lambda: call(args), pool)
        except BaseException:
            self._smallest(None)
            raise
        current.wait_stream(self.side)
        return functools.partial(self._replay, graph), outputs

    def _smallest(self, pool: Any) -> torch.cuda.CUDAGraph:
        """A graph of next to nothing. Recording it also takes torch's generator out of a recording that failed."""
        graph, t = torch.cuda.CUDAGraph(), torch.empty(1, device=f"cuda:{self.device}")
        with torch.cuda.stream(self.side), no_collection():
            _capture(graph, t.zero_, pool)
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        current = torch.cuda.current_stream(self.device)
        if self.last is not None and self.last != current:
            current.wait_stream(self.last)
        graph.replay()
        self.last = current


def _capture(graph: torch.cuda.CUDAGraph, work: Callable[[], Any], pool: Any) -> Any:
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        done = work()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # an invalid capture: the first error says why
            graph.capture_end()
        raise
    graph.capture_end()
    return done


@functools.cache
def of_device(device: int) -> CudaCapture:
    """The one `CudaCapture` of a device."""
    return CudaCapture(device)
