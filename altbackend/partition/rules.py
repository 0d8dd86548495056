"""The rules that a user sets for the cut: which values are never recomputed, and how much memory may be saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch.fx import GraphModule

from altbackend.lazy_dataclass import dataclass

from ..compat import aot_autograd
from ..config.options import Config
from ..errors import BadOptionValue
from .cost import Speed
from .placement import is_collective
from .roofline import speed_of

BUDGET = "activation_memory_budget"


@dataclass(frozen=True)
class Bans:
    """Kinds of values that are never recomputed.

    `far_apart`: sums with much older values. `long_chains`: a value of every hundred pointwise ones.
    `read_by_calls`: values that library calls of the backward read. `calls`: results of library calls. `totals`: small
    results of large operands.
    """

    far_apart: bool = True
    long_chains: bool = True
    read_by_calls: bool = True
    calls: bool = True
    totals: bool = True


LIFTED = Bans(far_apart=False, long_chains=False, read_by_calls=False, calls=False)


@dataclass(frozen=True)
class Rules:
    """The bans, the budget (1: the memory of the fastest step, 0: the least that recomputation reaches), the speed.

    `greedy`: choose values within the budget greedily, also in a small graph.
    """

    bans: Bans = Bans()
    budget: float = 1.0
    speed: Speed = Speed()
    greedy: bool = False

    @property
    def prices_calls(self) -> bool:
        """Return whether the cut compares the time of library calls with that of saving their results."""
        return self.budget < 1 or not self.bans.calls


DEFAULT = Rules()


def rules_of(cfg: Config, joint: GraphModule) -> Rules:
    """Return the rules for a joint graph that the options, torch's settings and the user's code give.

    A ban holds unless an option or a setting lifts it. Raises BadOptionValue if a budget is outside [0, 1].
    """
    rules = with_regions(_set_rules(cfg), joint)
    # with collectives, all processes must choose alike, also on machines that have been measured apart
    measured = rules.prices_calls and not any(map(is_collective, joint.graph.nodes))
    return replace(rules, speed=speed_of(_device(joint), cfg)) if measured else rules


def _device(joint: GraphModule) -> torch.device:
    values = [n.meta.get("val") for n in joint.graph.find_nodes(op="placeholder")]
    devices = [x.device for x in values if isinstance(x, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _set_rules(cfg: Config) -> Rules:
    torchs = aot_autograd.recomputation_settings()

    def banned(name: str) -> bool:
        return bool(getattr(cfg, name)) and bool(torchs.get(name, True))

    bans = Bans(
        banned("ban_recompute_used_far_apart"),
        banned("ban_recompute_long_fusible_chains"),
        banned("ban_recompute_materialized_backward"),
        banned("ban_recompute_not_in_allowlist"),
        banned("ban_recompute_reductions"),
    )
    if cfg.aggressive_recomputation or torchs.get("aggressive_recomputation"):
        bans = replace(LIFTED, totals=bans.totals)
    theirs = checked(torchs.get(BUDGET, 1.0), f"torch._functorch.config.{BUDGET}")
    budget = cfg.activation_memory_budget if cfg.activation_memory_budget != 1 else theirs
    return Rules(bans, budget, greedy=torchs.get(f"{BUDGET}_solver") == "greedy")


def checked(budget: object, source: str) -> float:
    """Return a budget as a number. Raises BadOptionValue unless it is a number from 0 to 1."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 <= budget <= 1:
        raise BadOptionValue(BUDGET, budget, "it takes a number from 0 to 1", source)
    return float(budget)


def with_regions(rules: Rules, joint: GraphModule) -> Rules:
    """Return the rules with the budget that the user's code sets around the forward; it overrides the options.

    Raises BadOptionValue if the graph's regions set several budgets, or one outside [0, 1].
    """
    graphs = [joint, *(m for m in joint.modules() if isinstance(m, GraphModule) and m is not joint)]
    budgets = list(dict.fromkeys(_budgets(graphs)))
    if not budgets:
        return rules
    source = "the region that sets a memory budget"
    if len(budgets) > 1:
        raise BadOptionValue(
            BUDGET, budgets, "one graph takes one budget; put a graph break between the regions", source
        )
    return replace(rules, budget=checked(budgets[0], source))


def _budgets(graphs: Iterable[GraphModule]) -> Iterable[object]:
    for gm in graphs:
        for n in gm.graph.nodes:
            budget = aot_autograd.region_budget(n)
            if budget is not None:
                yield budget
