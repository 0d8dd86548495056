"""Register patterns that are given as Python functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from .replacement import Check, Replacement
from .rules import Rules
from .serial import text_of
from .trace import Traced, TraceFn, terms_of


def register_replacement(
    search_fn: Callable[..., object],
    replace_fn: Callable[..., object],
    example_inputs: Sequence[object],
    trace_fn: TraceFn,
    pass_dicts: Rules | Iterable[Rules],
    extra_check: Check = lambda match: True,
    scalar_workaround: Mapping[str, float] | None = None,
    exclusive_arg_names: Sequence[str] = (),
    search_fn_pattern: Traced | None = None,
    skip_duplicates: bool = False,
) -> bool:
    """Add a rule that replaces what `search_fn` computes by what `replace_fn` computes; return whether it was added.

    `example_inputs`: tensors, one for each parameter of `search_fn` that `scalar_workaround` does not name.
    `trace_fn`: `fwd_only`, or `joint_fwd_bwd` for graphs with a backward. `pass_dicts`: the sets of rules that get it.
    `extra_check` takes a match. `scalar_workaround`: parameters that are numbers, each with a number that occurs in
    the search function only as this parameter. `exclusive_arg_names`: arguments without users outside the match.
    `search_fn_pattern`: the search function as terms, which spares its trace. `skip_duplicates`: do not add a pattern
    that a set has already. Raise ValueError for names that are no parameters.
    """
    scalars = dict(scalar_workaround or {})
    _check(search_fn, [*scalars, *exclusive_arg_names], len(example_inputs) + len(scalars))
    pattern = search_fn_pattern or traced_pattern(search_fn, example_inputs, trace_fn, scalars)
    if not pattern.outputs:
        raise ValueError(f"{search_fn.__name__} computes nothing that a pattern can start at")
    rule = Replacement(
        search_fn.__name__, search_fn, replace_fn, trace_fn, pattern, extra_check, tuple(exclusive_arg_names), scalars
    )
    added = False
    for rules in [pass_dicts] if isinstance(pass_dicts, Rules) else pass_dicts:
        if skip_duplicates and any(_equal(pattern, other) for other in rules):
            continue
        rules.add(rule)
        added = True
    return added


def traced_pattern(
    search_fn: Callable[..., object], example_inputs: Sequence[object], trace_fn: TraceFn, scalars: Mapping[str, float]
) -> Traced:
    """Trace a search function and return it as terms."""
    names = parameters(search_fn)
    given = iter(example_inputs)
    args = [scalars[name] if name in scalars else next(given) for name in names]
    traced = terms_of(trace_fn(search_fn, args), names, scalars, loose=True)
    differentiable = [name for name, x in zip(names, args, strict=True) if getattr(x, "requires_grad", False)]
    return replace(traced, with_gradients=tuple(differentiable))


def parameters(fn: Callable[..., object]) -> tuple[str, ...]:
    """Return the names of a function's parameters."""
    return tuple(inspect.signature(fn).parameters)


def _check(fn: Callable[..., object], named: Sequence[str], given: int) -> None:
    names = parameters(fn)
    for name in named:
        if name not in names:
            raise ValueError(f"{fn.__name__} has no parameter {name!r}; it has {', '.join(names)}")
    if given != len(names):
        raise ValueError(f"{fn.__name__} takes {len(names)} arguments; {given} are given as examples and numbers")


def _equal(pattern: Traced, rule: object) -> bool:
    return isinstance(rule, Replacement) and text_of("p", rule.pattern) == text_of("p", pattern)
