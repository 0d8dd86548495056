"""A graph over several devices: its compiled parts run one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from altbackend.lazy_dataclass import dataclass

from .boxed import BoxedCall, boxed


@dataclass(frozen=True)
class Step:
    """A part of the graph. `call` takes a list of the values `inputs`, which it empties, and returns `outputs`.

    `dropped`: values that no later step reads.
    """

    call: BoxedCall
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dropped: tuple[str, ...] = ()


class MultiDevice:
    """Runs the steps of a graph. `inputs` names its inputs; `results` holds names, or constants in 1-tuples."""

    def __init__(self, inputs: Sequence[str], steps: Sequence[Step], results: Sequence[str | tuple[object]]) -> None:
        boxed(self)
        self.inputs, self.steps, self.results = tuple(inputs), tuple(steps), tuple(results)

    def __call__(self, args: list[object]) -> tuple[object, ...]:
        """Run all steps. Kernels of different devices overlap as far as the copies between them allow."""
        values = dict(zip(self.inputs, args, strict=True))
        args.clear()
        for step in self.steps:
            taken = [values[name] for name in step.inputs]
            for name in step.dropped:
                values.pop(name, None)
            values.update(zip(step.outputs, step.call(taken), strict=True))
        return tuple(values[r] if isinstance(r, str) else r[0] for r in self.results)


def with_drops(steps: Sequence[Step], results: Sequence[str | tuple[object]]) -> list[Step]:
    """Return the steps with `dropped` set: the last step that reads a value drops it, unless it is a result."""
    needed, out = {r for r in results if isinstance(r, str)}, []
    for step in reversed(steps):
        last = tuple(name for name in dict.fromkeys(step.inputs) if name not in needed)
        needed.update(step.inputs)
        out.append(Step(step.call, step.inputs, step.outputs, last))
    return out[::-1]
