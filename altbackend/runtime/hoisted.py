"""Results that depend only on parameters: computed at the first call, again when a parameter changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch

_alive: WeakSet[Hoisted] = WeakSet()


def refresh_all() -> None:
    """Compute everything that depends only on parameters anew at the next call of each compiled graph.

    Needed after a write that torch does not count: `parameter.data.copy_(...)` and the like.
    """
    for each in list(_alive):
        each.refresh()


class Hoisted:
    """Calls `main` on the inputs numbered `kept` followed by the prologue's results.

    A parameter counts as changed when its storage address or its version counter differs. Inference tensors
    have no counter: with one among them the prologue runs at every call. Writes through `.data` change neither;
    `refresh_all()` (public as `altbackend.refresh`) drops the results of every compiled graph.
    """

    _boxed_call = True

    def __init__(
        self,
        main: Callable[[list[Any]], Sequence[Any]],
        prologue: Callable[..., Sequence[Any]],
        kept: tuple[int, ...],
        watched: tuple[int, ...],
    ) -> None:
        self.main, self.prologue, self.kept, self.watched = main, prologue, kept, watched
        self.state: tuple[Any, Sequence[Any]] = (None, ())
        _alive.add(self)

    def refresh(self) -> None:
        """Forget the results; the next call computes them anew."""
        self.state = (None, ())

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        sources = [args[k] for k in self.watched]
        try:
            key = [x for t in sources for x in (t.data_ptr(), t._version)]
        except RuntimeError:  # an inference tensor
            key = None
        held, folded = self.state
        if key is None or held != key:
            with torch.no_grad():
                folded = self.prologue(*sources)
            self.state = (key, folded)
        inner = [args[k] for k in self.kept]
        args.clear()
        inner += folded
        return self.main(inner)
