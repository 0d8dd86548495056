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
    `refresh_all()` (public as `altbackend.refresh`) drops the results of every compiled graph. `in_place`: new results
    take the storage of the old ones, whose addresses a CUDA graph holds.
    """

    def __init__(
        self,
        main: Callable[[list[Any]], Sequence[Any]],
        prologue: Callable[..., Sequence[Any]],
        kept: tuple[int, ...],
        watched: tuple[int, ...],
        in_place: bool = False,
    ) -> None:
        self._boxed_call = True  # of the instance: what wraps a call copies its attributes
        self.main, self.prologue, self.kept, self.watched = main, prologue, kept, watched
        self.in_place = in_place
        self.stored: Sequence[Any] = ()
        self.state: tuple[Any, Sequence[Any]] = (None, ())
        _alive.add(self)

    def refresh(self) -> None:
        """Forget the results; the next call computes them anew."""
        self.state = (None, ())

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        folded = self.folded(args)
        inner = [args[k] for k in self.kept]
        args.clear()
        inner += folded
        return self.main(inner)

    def folded(self, args: list[Any]) -> Sequence[Any]:
        """The prologue's results for these inputs, computed if they are not stored."""
        sources = [args[k] for k in self.watched]
        try:
            key = [x for t in sources for x in (t.data_ptr(), t._version)]
        except RuntimeError:  # an inference tensor
            key = None
        held, folded = self.state
        if key is None or held != key:
            with torch.no_grad():
                folded = self.prologue(*sources)
                if self.in_place:
                    folded = self.stored = _in_place(self.stored, folded, sources)
            self.state = (key, folded)
        return folded


def _in_place(old: Sequence[Any], new: Sequence[Any], sources: Sequence[torch.Tensor]) -> Sequence[Any]:
    """`new`, moved into the storage of `old` where that is no parameter's own and has the same geometry."""
    shared = {t.untyped_storage().data_ptr() for t in sources}

    def stays(a: torch.Tensor, b: torch.Tensor) -> bool:
        apart = not {a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr()} & shared
        return apart and (a.size(), a.stride(), a.dtype) == (b.size(), b.stride(), b.dtype)

    if len(old) != len(new):
        return new
    return [a.copy_(b) if stays(a, b) else b for a, b in zip(old, new, strict=True)]
