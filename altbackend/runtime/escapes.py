"""Sees Python code take a tensor's memory through a door behind which torch counts no writes.

Needed where the kernel cannot guard memory and the user asks for frozen results all the same (`freezing=True`). `see`
puts a notice on those doors of `torch.Tensor`. Memory counts as handed out until nothing but its tensors holds it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_DOORS = ("numpy", "__array__", "__dlpack__", "untyped_storage", "share_memory_")
_use_count: Callable[[int], int] = torch._C._storage_Use_Count

_storage: Callable[[torch.Tensor], Any] = torch.Tensor.untyped_storage  # before `see` puts a notice there
_lock = threading.Lock()
_seen = False
_holders: dict[int, int] = {}  # address of a watched storage -> how many held it when it was first watched
_out: set[int] = set()  # watched storages that were handed out
events = 0  # memory handed out, and steps of optimizers, which may write parameters without counting


def watch(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Note from now on who takes these tensors' memory; the storages' numbers, for `handed_out`."""
    _install()
    numbers = []
    for t in tensors:
        storage = _storage(t)
        number = int(storage._cdata)
        numbers.append(number)
        if number not in _holders:
            weakref.finalize(storage, _forget, number).atexit = False
            del storage  # it would count as a holder
            _holders[number] = _use_count(number)
    return tuple(numbers)


def handed_out(numbers: Sequence[int]) -> bool:
    """Whether memory of one of these storages is in the hands of Python code that may write it unseen."""
    for number in _out.intersection(numbers) if _out else ():
        if _use_count(number) > _holders[number]:
            return True
        _out.discard(number)
    return False


def _forget(number: int) -> None:
    _holders.pop(number, None)
    _out.discard(number)


def _note(t: torch.Tensor) -> None:
    global events
    if _holders and t.layout == torch.strided and torch._guards.TracingContext.try_get() is None:
        number = int(_storage(t)._cdata)
        if number in _holders:
            _out.add(number)
            events += 1


def _install() -> None:
    """Put the notices up, once a process."""
    global _seen
    with _lock:
        if _seen:
            return
        _seen = True
    for name in _DOORS:
        setattr(torch.Tensor, name, _noticed(getattr(torch.Tensor, name)))
    data: Any = torch.Tensor.data

    def get(t: torch.Tensor) -> Any:
        _note(t)
        return data.__get__(t)

    def set_(t: torch.Tensor, value: Any) -> None:
        _note(t)
        data.__set__(t, value)

    torch.Tensor.data = property(get, set_)  # type: ignore[assignment]
    register_optimizer_step_post_hook(_stepped)


def _stepped(*_: Any) -> None:
    global events
    events += 1


def _noticed(door: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(door)
    def through(t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _note(t)
        return door(t, *args, **kwargs)

    return through
