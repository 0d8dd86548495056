"""The cases, by suite and by name."""

from benchmarks.cases import micro, models, programs, tasks, timm_table, transformers_table
from benchmarks.cases.case import Built, Case, Mode, Preset, class_loss, mean_square

SUITES: dict[str, tuple[Case, ...]] = {
    "micro": micro.CASES,
    "models": models.CASES,
    "programs": programs.CASES,
    "tasks": tasks.CASES,
}
# What `benchmarks.sweep` checks; too many to time.
SWEEPS: dict[str, tuple[Case, ...]] = {"transformers": transformers_table.CASES, "timm": timm_table.CASES}


def find(name: str) -> Case:
    """The case called `name`, of any suite or sweep; LookupError where there is none."""
    for cases in (*SUITES.values(), *SWEEPS.values()):
        for case in cases:
            if case.name == name:
                return case
    raise LookupError(f"no case is called {name!r}")


def choose(suite: str, names: list[str]) -> tuple[Case, ...]:
    """The cases of a suite in its order, or only those named; LookupError for a name that is not in the suite."""
    known = {case.name: case for case in SUITES[suite]}
    for name in names:
        if name not in known:
            raise LookupError(f"suite {suite!r} has no case {name!r}; it has: {', '.join(known)}")
    return tuple(case for case in SUITES[suite] if not names or case.name in names)


__all__ = ["SUITES", "SWEEPS", "Built", "Case", "Mode", "Preset", "choose", "class_loss", "find", "mean_square"]
