"""Option `freezing`: its value for a captured graph, and the guard of the results that the weight prologue caches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..compat import torch_api
from ..config.options import Config
from ..errors import BadOptionValue
from ..runtime import page_guard
from ..runtime.frozen import Watch, by_pages, by_pages_or_versions


def decide_freezing(cfg: Config, inputs: Sequence[object]) -> tuple[Config, str]:
    """Return `cfg` with `freezing="auto"` decided for a graph with these inputs, and the reason.

    Parameters must be real.
    """
    if cfg.freezing_discard_parameters:
        if cfg.freezing is False:
            reason = "only frozen graphs discard parameters, and `freezing` is False"
            raise BadOptionValue("freezing_discard_parameters", True, reason)
        return replace(cfg, freezing=True), "parameters are discarded, so nobody else writes them"
    if cfg.freezing != "auto":
        return cfg, "as the option says"
    reason = _refusal(inputs)
    return replace(cfg, freezing=False if reason else "guarded"), reason or "the kernel guards the parameters' memory"


def _refusal(inputs: Sequence[object]) -> str:
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    if any(t.device.type != "cpu" for t in tensors):
        return "memory of a device cannot be guarded"
    page_source = page_guard.pages()
    if isinstance(page_source, str):
        return page_source
    real = [
        t
        for t in tensors
        if isinstance(t, torch.nn.Parameter)
        and not torch_api.is_fake(t)
        and type(t.data) is torch.Tensor  # no subclass
    ]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return ""  # a training graph caches nothing; an inference graph is checked when it runs
    return page_guard.why_not_private(page_guard.spans_of(t for t in real if t.layout == torch.strided))


def watch_of(cfg: Config, library: Callable[[], ctypes.CDLL]) -> Watch:
    """Return the guard of the parameters. `library` returns the compiled check, building it if needed."""
    return by_pages_or_versions(library) if cfg.freezing is True else by_pages(library)
