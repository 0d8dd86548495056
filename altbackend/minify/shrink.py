"""Delta debugging over an FX graph: it searches for the smallest part that still fails in the same way.

Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE TSE 28(2), 2002: try complements of
ever smaller chunks. A graph allows more than a list: each prefix is a graph, and any value can become an input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch.fx import GraphModule, Node

from altbackend.lazy_dataclass import dataclass

from ..config.resolve import resolve
from ..repro.rebuild import Rebuilt, rebuild
from ..repro.text import text_of
from .cut import Part, calls, can_be_input, entire, graph_of, operands_like
from .judge import Judge, same_failure
from .trial import Verdict

Fails = Callable[[Part], bool]
Item = TypeVar("Item")
MOST_ROUNDS = 4


@dataclass(frozen=True)
class Shrunk:
    """The result of `minify`: the smaller file, its number of calls, the original number, the failure, the trials
    used.
    """

    path: Path
    calls: int
    calls_before: int
    verdict: Verdict
    trials: int


class NoFailure(Exception):
    """Raised for a file that does not fail."""


def minify(path: Path, modules: Sequence[str], seconds: float, most_trials: int) -> Shrunk:
    """Write a smaller file beside `path`, as `NAME_min.py`, that fails in the same way. Raise NoFailure.

    `modules` are imported by the trial files and by the result. A trial may take `seconds`.
    """
    rebuilt = rebuild(path)
    gm, original = rebuilt.gm, entire(rebuilt.gm)
    modules = (*dict.fromkeys((*rebuilt.modules, *modules)),)
    target = path.with_name(f"{path.stem}_min.py")
    with Judge(seconds) as judge:
        verdict = judge.of_text(_text(rebuilt, original, modules, target))
        if verdict.kind in ("ok", "invalid"):
            raise NoFailure(str(verdict))

        def fails(part: Part) -> bool:
            if judge.trials >= most_trials:
                return False
            try:
                text = _text(rebuilt, part, modules, target)
            except Exception:  # a part that cannot be written does not count as failing
                return False
            return same_failure(judge.of_text(text), verdict)

        part = smallest(gm, original, fails)
        target.write_text(_text(rebuilt, part, modules, target), encoding="utf-8")
        return Shrunk(target, len(calls(gm, part)), len(calls(gm, original)), verdict, judge.trials)


def _text(rebuilt: Rebuilt, part: Part, modules: Sequence[str], target: Path) -> str:
    gm, job = graph_of(rebuilt.gm, part, rebuilt.job)
    # options of the file alone, without this process's environment
    cfg = replace(resolve(options=rebuilt.options, environ={}), repro="never")
    return text_of(gm, cfg, job, rebuilt.title, str(target), modules)


def smallest(gm: GraphModule, part: Part, fails: Fails) -> Part:
    """Return the smallest part found that still fails; `part` must fail."""
    part = shortest_prefix(gm, part, fails)
    for _ in range(MOST_ROUNDS):
        before = len(calls(gm, part))
        part = remove_roots(part, fails)
        part = turn_calls_into_inputs(gm, part, fails)
        part = bypass_calls(gm, part, fails)
        if len(calls(gm, part)) == before:
            break
    return part


def shortest_prefix(gm: GraphModule, part: Part, fails: Fails) -> Part:
    """Return the calls up to the first one with which the graph fails, by bisection; `part` if no prefix fails."""
    order = calls(gm, part)
    low, high, best = 0, len(order) - 1, part
    while low < high:
        middle = (low + high) // 2
        trial = Part(_ends(order[: middle + 1]))
        if trial.roots and fails(trial):
            high, best = middle, trial
        else:
            low = middle + 1
    last = order[high] if order else None
    if last is not None and can_be_input(last) and best.roots != (last.name,) and fails(alone := Part((last.name,))):
        return alone
    return best


def _ends(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return the calls of a prefix that none of its other calls uses, and those with side effects."""
    inside = set(nodes)
    ends = [n for n in nodes if n.is_impure() or (can_be_input(n) and not (inside & n.users.keys()))]
    return tuple(n.name for n in ends)


def remove_roots(part: Part, fails: Fails) -> Part:
    roots = part.roots
    roots_left = without_chunks(
        roots, lambda candidates: bool(candidates) and fails(replace(part, roots=tuple(candidates)))
    )
    return replace(part, roots=tuple(roots_left))


def without_chunks(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """Return the items that remain after leaving out chunks that failing does not need, large chunks first."""
    remaining, size = list(items), (len(items) + 1) // 2
    while size and len(remaining) > 1:
        start = 0
        while start < len(remaining):
            candidate = remaining[:start] + remaining[start + size :]
            if candidate and fails(candidate):
                remaining = candidate
            else:
                start += size
        size //= 2
    return remaining


def turn_calls_into_inputs(gm: GraphModule, part: Part, fails: Fails) -> Part:
    """Turn calls into inputs in chunks, large ones first; calls that only they needed are removed."""
    size = max(len(calls(gm, part)) // 2, 1)
    while size:
        order = [n.name for n in calls(gm, part) if can_be_input(n) and n.name not in part.roots]
        for start in range(0, len(order), size):
            present = {n.name for n in calls(gm, part)}
            chunk = [name for name in order[start : start + size] if name in present]
            if chunk and fails(trial := part.with_inputs(chunk)):
                part = trial
        size //= 2
    return part


def bypass_calls(gm: GraphModule, part: Part, fails: Fails) -> Part:
    """Replace calls by an operand of the same geometry, one after another, the last call first."""
    for n in reversed(calls(gm, part)):
        for operand in operands_like(n):
            trial: Part = part.bypassing(n.name, operand.name)
            if not n.is_impure() and calls(gm, trial) and fails(trial):
                part = trial
                break
    return part
