"""The pass: the rules of all families, with their serialized patterns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from torch.fx import GraphModule

from altbackend.lazy_dataclass import dataclass

from ...debug.trace import DecisionKind
from ..context import Context
from ..pattern.rules import Rules
from ..pattern.trace import Traced
from ..serialized import attention as attention_patterns
from ..serialized import gelu as gelu_patterns
from . import attention, gelu
from .family import Form, accept, rules_of


@dataclass(frozen=True)
class Family:
    """A family: its forms, and the table of their serialized patterns."""

    forms: tuple[Form, ...]
    patterns: Mapping[str, Callable[[], Traced]]


FAMILIES: Mapping[str, Family] = {
    "attention": Family(attention.FORMS, attention_patterns.PATTERNS),
    "gelu": Family(gelu.FORMS, gelu_patterns.PATTERNS),
}


@functools.cache
def rules(fuse_attention: str) -> tuple[Rules, ...]:
    """Return the sets of rules. `fuse_attention`: the option `attention`."""
    sets = [rules_of(gelu.FORMS, gelu_patterns.PATTERNS)]
    if fuse_attention != "off":
        check = accept if fuse_attention == "on" else attention.is_faster
        sets.insert(0, rules_of(attention.FORMS[::-1], attention_patterns.PATTERNS, check))  # joint forms first
    return tuple(sets)


def run(gm: GraphModule, ctx: Context) -> int:
    """Apply the rules; return the number of rewrites."""
    done = [rewrite for some in rules(ctx.config.attention) for rewrite in some.apply(gm)]
    for rewrite in done:
        ctx.trace.decision(DecisionKind.SIMPLIFY, rewrite.rule, "applied", str(rewrite))
    return len(done)
