"""Detection of Python code that takes a tensor's memory by a method after which torch counts no writes.

It is needed where the kernel cannot guard memory and the user asks for frozen results anyway (`freezing=True`). `watch`
wraps those methods of `torch.Tensor`. Memory counts as exposed while anything but its tensors refers to it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .boxed import Function

_METHODS = ("numpy", "__array__", "__dlpack__", "untyped_storage", "share_memory_")
_use_count: Callable[[int], int] = torch._C._storage_Use_Count

# The original method, before `_install` wraps it: reading a storage here is no escape.
storage_of: Callable[[torch.Tensor], torch.UntypedStorage] = torch.Tensor.untyped_storage
_lock = threading.Lock()
_installed = False
_holders: dict[int, int] = {}  # address of a watched storage -> its references when it was first watched
_exposed: set[int] = set()  # watched storages that Python code has taken
events = 0  # counts storages taken, and steps of optimizers, which may write parameters without a version count


def watch(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Watch from now on who takes these tensors' memory. Return the storages' numbers for `is_exposed`."""
    _install()
    numbers = []
    for t in tensors:
        storage = storage_of(t)
        number = int(storage._cdata)
        numbers.append(number)
        if number not in _holders:
            weakref.finalize(storage, _forget, number).atexit = False
            del storage  # this reference would count
            _holders[number] = _use_count(number)
    return tuple(numbers)


def is_exposed(numbers: Sequence[int]) -> bool:
    """Return whether Python code holds memory of one of these storages, which it may write without a version count."""
    for number in _exposed.intersection(numbers) if _exposed else ():
        if _use_count(number) > _holders[number]:
            return True
        _exposed.discard(number)
    return False


def _forget(number: int) -> None:
    _holders.pop(number, None)
    _exposed.discard(number)


def _note(t: torch.Tensor) -> None:
    global events
    if _holders and t.layout == torch.strided and torch._guards.TracingContext.try_get() is None:
        number = int(storage_of(t)._cdata)
        if number in _holders:
            _exposed.add(number)
            events += 1


def _install() -> None:
    """Wrap the methods, once per process."""
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
    for name in _METHODS:
        setattr(torch.Tensor, name, _watched_method(getattr(torch.Tensor, name)))
    data: Any = torch.Tensor.data

    def get(t: torch.Tensor) -> object:
        _note(t)
        return data.__get__(t)

    def set_(t: torch.Tensor, value: object) -> None:
        _note(t)
        data.__set__(t, value)

    type.__setattr__(torch.Tensor, "data", property(get, set_))
    register_optimizer_step_post_hook(_stepped)


def _stepped(*_: object) -> None:
    global events
    events += 1


def _watched_method(method: Function) -> Function:
    @functools.wraps(method)
    def call(t: torch.Tensor, *args: object, **kwargs: object) -> object:
        _note(t)
        return method(t, *args, **kwargs)

    return call
