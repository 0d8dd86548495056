"""The types of a graph pass: its phase, its row in the table, and the context that it takes."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch.fx import GraphModule, Node

from altbackend.lazy_dataclass import dataclass

from ..compat import torch_api
from ..config.options import Config
from ..debug.trace import DecisionKind, Trace
from .constants import constant_nodes


class Phase(Enum):
    """A point of the compilation at which passes run."""

    CAPTURED = "captured graph, before AOTAutograd"
    BEFORE_JOINT = "joint or inference graph, first"
    JOINT = "joint graph, before it is split"
    AFTER_JOINT = "joint or inference graph, last"
    POST_GRAD = "forward, backward or inference graph"
    INFERENCE = "inference graph; on a CPU, with parameters"
    LAST = "forward, backward or inference graph, last"


@dataclass(frozen=True)
class Context:
    """The argument of every pass. `static`: positions of parameters. `device`: "cpu" or "gpu".

    `attributes`: targets of `get_attr` nodes that are parameters, in a graph that holds its parameters.
    """

    config: Config
    trace: Trace
    static: tuple[int, ...] = ()
    device: str = "cpu"
    attributes: frozenset[str] = frozenset()

    @property
    def mode(self) -> str:
        """Return the option `numerics`: "fast" or "eager"."""
        return self.config.numerics

    def product_may_replace_convolution(self, dtype: torch.dtype) -> bool:
        """Return whether torch's settings let a product round its operands just as a convolution does.

        torch has a setting for each. By default, convolutions of float32 on a GPU round to TF32 and products do not.
        """
        same_setting = torch_api.allows_tf32() == torch_api.allows_tf32_convolutions()
        return self.device != "gpu" or dtype != torch.float32 or same_setting

    @property
    def freezes(self) -> bool:
        """Return whether the results of calls on parameters are computed once, not in every call."""
        return self.config.keeps_constants

    def constant_nodes(self, gm: GraphModule) -> set[Node]:
        """Return the parameters and the pure calls on only parameters."""
        return constant_nodes(gm, self.static, self.attributes)


def always(ctx: Context) -> bool:
    """Return True: the condition of a pass that no option turns off."""
    return True


@dataclass(frozen=True)
class Pass:
    """A row of the table of passes.

    `run` changes the graph in place and returns the number of its rewrites. The pass runs on `devices`, for the `modes`
    of the option `numerics`, unless `when` is false for the options. `decision` is its entry in the decision log:
    (kind, subject, verdict, reason), where `{}` is the number of rewrites. A pass without `decision` writes its own
    entries. `preserves`: results must keep dtype, shape and storage, which `verify_ir` checks.
    """

    name: str
    phase: Phase
    devices: tuple[str, ...]
    modes: tuple[str, ...]
    run: Callable[[GraphModule, Context], int]
    when: Callable[[Context], bool] = always
    decision: tuple[DecisionKind, str, str, str] | None = None
    preserves: bool = True
    draws: bool = False

    def applies(self, ctx: Context) -> bool:
        """Return whether the pass runs in a compilation."""
        return ctx.device in self.devices and ctx.mode in self.modes and self.when(ctx)
