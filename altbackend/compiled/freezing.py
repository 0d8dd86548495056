"""Option `freezing`: what it comes to for a captured graph, and what guards the results that are kept."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..compat import torch_api
from ..config.options import Config
from ..runtime import page_guard
from ..runtime.frozen import Watch, by_pages, by_pages_or_versions


def decided(cfg: Config, inputs: Sequence[Any]) -> tuple[Config, str]:
    """`cfg` with `auto` decided for a graph with these inputs, of which parameters are real tensors; and the reason."""
    if cfg.freezing != "auto":
        return cfg, "as the option says"
    reason = _why_not(inputs)
    return replace(cfg, freezing=False if reason else "guarded"), reason or "the kernel guards the parameters' memory"


def _why_not(inputs: Sequence[Any]) -> str:
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    if any(t.device.type != "cpu" for t in tensors):
        return "memory of a device cannot be guarded"
    held = page_guard.pages()
    if isinstance(held, str):
        return held
    real = [
        t
        for t in tensors
        if isinstance(t, torch.nn.Parameter)
        and not torch_api.is_fake(t)
        and type(t.data) is torch.Tensor  # no subclass
    ]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return ""  # a graph for training keeps nothing, one for inference finds out when it is run
    return page_guard.why_not_private(page_guard.spans_of(t for t in real if t.layout == torch.strided))


def watch_of(cfg: Config, library: Callable[[], ctypes.CDLL]) -> Watch:
    """What guards parameters. `library` builds the compiled check, or has it built already."""
    return by_pages_or_versions(library) if cfg.freezing is True else by_pages(library)
