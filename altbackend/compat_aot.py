"""AOTAutograd's private names. Apart from `compat`, since importing them takes longer than binding a kept graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config as functorch
from torch._dynamo.backends.common import aot_autograd as build
from torch._functorch.partitioners import _extract_fwd_bwd_modules, min_cut_rematerialization_partition
from torch.fx._lazy_graph_module import _use_lazy_graph_module


def joint_partition() -> Callable[..., Any]:
    """torch's min-cut split of the joint graph."""
    return min_cut_rematerialization_partition


def wants_equal_calls_once() -> bool:
    """Whether torch's settings let equal calls of a joint graph be made once."""
    return bool(functorch.cse)


def extract_halves(
    joint: torch.fx.GraphModule, tensors: list[torch.fx.Node], numbers: list[torch.fx.Node], num_fwd_outputs: int
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """(forward, backward) of a joint graph, with results and inputs in the order that AOTAutograd's runtime expects.

    `tensors`, `numbers` (of sizes): values of the forward that are saved; the lists are left as they are.
    """
    with _use_lazy_graph_module(True):  # nobody calls the halves: their Python text is only made where it is shown
        return _extract_fwd_bwd_modules(joint, list(tensors), list(numbers), num_fwd_outputs=num_fwd_outputs)


def partition_settings() -> str:
    """The setting of torch that asks for what only its own partitioner does, "" without one."""
    wanted = {
        "activation_memory_budget": 1.0,
        "enable_activation_offloading": False,
        "_sync_decision_cross_ranks": False,
    }
    found = [name for name, usual in wanted.items() if getattr(functorch, name, usual) != usual]
    return f"torch._functorch.config.{found[0]} is set" if found else ""


def aot_autograd(**kwargs: Any) -> Callable[..., Any]:
    return build(**kwargs)


@contextlib.contextmanager
def functorch_settings() -> Iterator[None]:
    """AOTAutograd settings that hold while it traces: effect tokens stay out of the graph's signature."""
    with functorch.patch(unlift_effect_tokens=True):
        yield
