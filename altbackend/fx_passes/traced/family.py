"""Families of rules: search functions, their replacements, and the examples with which they are traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field

import torch

from altbackend.lazy_dataclass import dataclass

from ..pattern.match import Match
from ..pattern.register import traced_pattern
from ..pattern.replacement import Check, Replacement
from ..pattern.rules import Rules
from ..pattern.trace import Traced, TraceFn, fwd_only

Examples = Callable[[], list[torch.Tensor]]


def accept(match: Match) -> bool:
    """Accept every match."""
    return True


@dataclass(frozen=True)
class Form:
    """One rule: `search` becomes `replace`. `examples` make the inputs of its trace, and of its test."""

    name: str
    search: Callable[..., torch.Tensor]
    replace: Callable[..., object]
    examples: Examples
    trace: TraceFn = fwd_only
    scalars: Mapping[str, float] = field(default_factory=dict)
    check: Check = accept

    def traced(self) -> Traced:
        """Trace the search function and return its pattern."""
        return traced_pattern(self.search, self.examples(), self.trace, self.scalars)


def rules_of(forms: tuple[Form, ...], patterns: Mapping[str, Callable[[], Traced]], check: Check = accept) -> Rules:
    """Return the rules of a family with their serialized patterns. `check`: a condition beside those of the forms."""
    rules = Rules(name="traced")
    for form in forms:
        name, pattern, first = form.search.__name__, patterns[form.name](), _both(form.check, check)
        rules.add(Replacement(name, form.search, form.replace, form.trace, pattern, scalars=form.scalars, first=first))
    return rules


def _both(first: Check, second: Check) -> Check:
    return lambda match: bool(first(match)) and bool(second(match))
