"""Generated code and graphs in torch's own logs: `TORCH_LOGS="output_code,fusion"` and `TORCH_TRACE=dir`."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch._logging

# torch installs log handlers on the loggers of its own packages only, and an artifact logger reaches a handler
# through its parents. The parent's name is below "torch", so that TORCH_LOGS prints these logs.
PARENT = "torch.altbackend"
ARTIFACTS = (
    "output_code",
    "kernel_code",
    "post_grad_graphs",
    "ir_pre_fusion",
    "ir_post_fusion",
    "fusion",
    "schedule",
    "perf_hints",
)


def artifact_logger(artifact: str) -> logging.Logger | None:
    """Return torch's logger for one of `ARTIFACTS` if the user asked for it with TORCH_LOGS, else None."""
    try:
        logger: logging.Logger = torch._logging.getArtifactLogger(PARENT, artifact)  # type: ignore[attr-defined]
    except ValueError:  # this torch does not know the name
        return None
    return logger if logger.isEnabledFor(logging.DEBUG) else None


def structured_enabled() -> bool:
    """Return whether torch's structured trace (TORCH_TRACE, tlparse) is written to a folder.

    Before its first event torch has a handler even without a folder; that handler records nothing.
    """
    handlers = logging.getLogger("torch.__trace").handlers
    return any(getattr(handler, "root_dir", None) is not None for handler in handlers)


def structured_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text artifact to torch's structured trace. The caller must have checked `structured_enabled`."""
    torch._logging.trace_structured(  # type: ignore[attr-defined]
        "artifact",
        metadata_fn=lambda: {"name": f"altbackend_{name}", "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )
