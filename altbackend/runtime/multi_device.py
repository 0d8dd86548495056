"""Compiled parts of a graph over several devices, run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Step:
    """`call` takes a list of the values named by `inputs`, which it empties, and returns those named by `outputs`.

    `dropped`: values that nothing needs after it.
    """

    call: Callable[[list[Any]], Sequence[Any]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dropped: tuple[str, ...] = ()


class Several:
    """`inputs`: names of the graph's inputs. `results`: names of what it returns, or constants in a tuple of one."""

    def __init__(self, inputs: Sequence[str], steps: Sequence[Step], results: Sequence[str | tuple[Any]]) -> None:
        self._boxed_call = True  # of the instance: what wraps a call copies its attributes
        self.inputs, self.steps, self.results = tuple(inputs), tuple(steps), tuple(results)

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        """Run all steps. Kernels of different devices overlap as far as the copies between them allow."""
        values = dict(zip(self.inputs, args, strict=True))
        args.clear()
        for step in self.steps:
            taken = [values[name] for name in step.inputs]
            for name in step.dropped:
                values.pop(name, None)
            values.update(zip(step.outputs, step.call(taken), strict=True))
        return tuple(values[r] if isinstance(r, str) else r[0] for r in self.results)


def with_drops(steps: Sequence[Step], results: Sequence[str | tuple[Any]]) -> list[Step]:
    """Every value is dropped by the last step that takes it, unless it is a result."""
    kept, out = {r for r in results if isinstance(r, str)}, []
    for step in reversed(steps):
        last = tuple(name for name in dict.fromkeys(step.inputs) if name not in kept)
        kept.update(step.inputs)
        out.append(Step(step.call, step.inputs, step.outputs, last))
    return out[::-1]
