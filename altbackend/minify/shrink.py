"""Delta debugging over an FX graph: the smallest part found that still fails in the same way.

Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE TSE 28(2), 2002: try complements of
ever smaller chunks. A graph offers more than a list does: a prefix of it is a graph, and any value can be an input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch.fx import GraphModule, Node

from ..config.options import resolve
from ..repro.rebuild import Rebuilt, rebuild
from ..repro.text import text_of
from .cut import Part, calls, can_be_input, graph_of, operands_like, whole
from .judge import Judge, same_failure
from .trial import Verdict

Fails = Callable[[Part], bool]
Item = TypeVar("Item")
MOST_ROUNDS = 4


@dataclass(frozen=True)
class Shrunk:
    """What `minify` found: the smaller file, the calls in it and in the given one, the failure, the trials taken."""

    path: Path
    calls: int
    calls_before: int
    verdict: Verdict
    trials: int


class NoFailure(Exception):
    """The file that was given does not fail."""


def minify(path: Path, modules: Sequence[str], seconds: float, most_trials: int) -> Shrunk:
    """Write a smaller file beside `path`, as `NAME_min.py`, that fails as it does. Raises NoFailure.

    `modules` are imported by the files that are tried and by the result. A trial may take `seconds`.
    """
    rebuilt = rebuild(path)
    gm, everything = rebuilt.gm, whole(rebuilt.gm)
    modules = (*dict.fromkeys((*rebuilt.modules, *modules)),)
    target = path.with_name(f"{path.stem}_min.py")
    with Judge(seconds) as judge:
        verdict = judge.of_text(_text(rebuilt, everything, modules, target))
        if verdict.kind in ("ok", "invalid"):
            raise NoFailure(str(verdict))

        def fails(part: Part) -> bool:
            if judge.trials >= most_trials:
                return False
            try:
                text = _text(rebuilt, part, modules, target)
            except Exception:  # a part that cannot be written is none
                return False
            return same_failure(judge.of_text(text), verdict)

        part = smallest(gm, everything, fails)
        target.write_text(_text(rebuilt, part, modules, target), encoding="utf-8")
        return Shrunk(target, len(calls(gm, part)), len(calls(gm, everything)), verdict, judge.trials)


def _text(rebuilt: Rebuilt, part: Part, modules: Sequence[str], target: Path) -> str:
    gm, job = graph_of(rebuilt.gm, part, rebuilt.job)
    # options of the file only: those of this process's environment are no part of it
    cfg = replace(resolve(options=rebuilt.options, environ={}), repro="never")
    return text_of(gm, cfg, job, rebuilt.title, str(target), modules)


def smallest(gm: GraphModule, part: Part, fails: Fails) -> Part:
    """The smallest part found that still fails; `part` does."""
    part = shortest_prefix(gm, part, fails)
    for _ in range(MOST_ROUNDS):
        before = len(calls(gm, part))
        part = fewest_roots(part, fails)
        part = most_given(gm, part, fails)
        part = most_passed(gm, part, fails)
        if len(calls(gm, part)) == before:
            break
    return part


def shortest_prefix(gm: GraphModule, part: Part, fails: Fails) -> Part:
    """The calls up to the first one with which the graph fails, by bisection; `part` where no prefix fails."""
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
    """The calls of a prefix that no other of its calls uses, and those that change something."""
    inside = set(nodes)
    ends = [n for n in nodes if n.is_impure() or (can_be_input(n) and not (inside & n.users.keys()))]
    return tuple(n.name for n in ends)


def fewest_roots(part: Part, fails: Fails) -> Part:
    roots = part.roots
    kept = without_chunks(roots, lambda left: bool(left) and fails(replace(part, roots=tuple(left))))
    return replace(part, roots=tuple(kept))


def without_chunks(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """What remains of `items` when chunks that are not needed for failing are left out, large chunks first."""
    kept, size = list(items), (len(items) + 1) // 2
    while size and len(kept) > 1:
        start = 0
        while start < len(kept):
            left = kept[:start] + kept[start + size :]
            if left and fails(left):
                kept = left
            else:
                start += size
        size //= 2
    return kept


def most_given(gm: GraphModule, part: Part, fails: Fails) -> Part:
    """Calls become inputs in chunks, large ones first, and what only they needed goes."""
    size = max(len(calls(gm, part)) // 2, 1)
    while size:
        order = [n.name for n in calls(gm, part) if can_be_input(n) and n.name not in part.roots]
        for start in range(0, len(order), size):
            present = {n.name for n in calls(gm, part)}
            chunk = [name for name in order[start : start + size] if name in present]
            if chunk and fails(trial := part.giving(chunk)):
                part = trial
        size //= 2
    return part


def most_passed(gm: GraphModule, part: Part, fails: Fails) -> Part:
    """Calls give way to an operand of the same geometry, one after another, the last first."""
    for n in reversed(calls(gm, part)):
        for operand in operands_like(n):
            trial: Any = part.passing(n.name, operand.name)
            if not n.is_impure() and calls(gm, trial) and fails(trial):
                part = trial
                break
    return part
