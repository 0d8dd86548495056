"""Parameters whose memory frozen code has taken over (option `freezing_discard_parameters`).

A parameter becomes a `DiscardedTensor` in place. It keeps its sizes but has no memory; every use of it is an error.
`Originals` calls the compiled graph with the former tensors. It drops each one once no kernel reads it any more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from weakref import WeakSet

import torch

from ..compat import torch_api
from ..errors import DiscardedParameter
from .boxed import Function

_HOLDER = "_altbackend_originals"
_holders: WeakSet[Originals] = WeakSet()


class DiscardedTensor(torch.Tensor):
    """A parameter or buffer without memory. Every operator on it raises DiscardedParameter."""

    parameter_name: str

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Raise DiscardedParameter with the name of the first discarded tensor among the arguments."""
        leaves = torch.utils._pytree.arg_tree_leaves(*args, **(kwargs or {}))
        first = next(x for x in leaves if isinstance(x, DiscardedTensor))
        raise DiscardedParameter(first.parameter_name, str(func))

    def __repr__(self, **options: object) -> str:  # type: ignore[override]
        """Return the name and the sizes of the parameter."""
        return f"DiscardedTensor({self.parameter_name!r}, size={tuple(self.shape)}, dtype={self.dtype})"


class Originals:
    """The tensors `tensors` for the inputs of these numbers of `call`.

    Dynamo copies the attributes of the callable that it gets, so it gets the method `run`. An original that was
    released is no longer passed: the call then gets the discarded tensor, which nothing reads.
    """

    def __init__(self, call: Function, tensors: Mapping[int, torch.Tensor]) -> None:
        self.call, self.tensors = call, dict(tensors)
        _holders.add(self)
        for t in tensors.values():
            setattr(t, _HOLDER, self)

    def run(self, *args: object) -> object:
        """Call with the originals that are left."""
        given = list(args)
        for k, t in self.tensors.items():
            given[k] = t
        return self.call(*given)

    def release(self, released: Collection[int]) -> None:
        """Drop the originals with these identities. A call in another thread keeps the dictionary that it reads."""
        self.tensors = {k: t for k, t in self.tensors.items() if id(t) not in released}


def are_originals(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether nobody but compiled code is to read or write these tensors."""
    return bool(_holders) and all(hasattr(t, _HOLDER) for t in tensors)


def release(unread: Sequence[torch.Tensor]) -> None:
    """Drop originals that no kernel reads any more, so that their memory is freed."""
    identities = {id(t) for t in unread}
    for holder in {id(h): h for t in unread if (h := getattr(t, _HOLDER, None)) is not None}.values():
        holder.release(identities)


def discard(t: torch.Tensor, name: str) -> torch.Tensor | None:
    """Turn a parameter or buffer into a discarded tensor, for everybody who holds it. Return a tensor of its memory.

    Return None, and change nothing, where torch does not allow it: C++ code holds the tensor too.
    """
    with torch_api.real_tensors():
        stand_in = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")
        other = torch.Tensor._make_subclass(DiscardedTensor, stand_in, t.requires_grad)
        if not torch_api.swap_contents(t, other):
            return None
        is_parameter = isinstance(t, torch.nn.Parameter)
        t.__class__ = DiscardedTensor
        vars(t)["parameter_name"] = name
        if is_parameter:
            vars(t)["_is_param"] = True  # isinstance(t, Parameter) stays true
        other.__class__ = torch.Tensor  # type: ignore[assignment]
        return other.detach()
