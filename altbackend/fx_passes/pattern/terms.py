"""Terms: what a pattern consists of. Terms combine with Python's operators: `(X * 1) + Y`.

A term that stands twice in a pattern matches one node that is used twice. An argument that is no term is a constant
and matches equal constants.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import torch

from altbackend.lazy_dataclass import dataclass

aten = torch.ops.aten


class Term:
    """The base of all terms; its operators build calls of ATen operators."""

    def __add__(self, other: object) -> Call:
        return call((aten.add.Tensor, aten.add.Scalar), self, other)

    def __sub__(self, other: object) -> Call:
        return call((aten.sub.Tensor, aten.sub.Scalar), self, other)

    def __mul__(self, other: object) -> Call:
        return call((aten.mul.Tensor, aten.mul.Scalar), self, other)

    def __truediv__(self, other: object) -> Call:
        return call((aten.div.Tensor, aten.div.Scalar), self, other)

    def __matmul__(self, other: object) -> Call:
        return call((aten.mm.default, aten.bmm.default), self, other)

    def __neg__(self) -> Call:
        return call(aten.neg.default, self)

    def __or__(self, other: Term) -> OneOf:
        return OneOf((self, other))

    def __getitem__(self, index: int) -> Call:
        return call(operator.getitem, self, index)


@dataclass(frozen=True)
class Arg(Term):
    """An argument of the pattern: any node or number. Equal names must match the same one."""

    name: str


@dataclass(frozen=True)
class Anything(Term):
    """Matches every argument and binds none."""


@dataclass(frozen=True)
class Like(Term):
    """A constant of a traced pattern that depends on shapes or dtypes; the second trace decides whether it agrees.

    `kind`: the name of its type: "int", "dtype", "sizes", "device" or "format".
    """

    kind: str


@dataclass(frozen=True, eq=False)
class OneOf(Term):
    """Alternatives, tried in order."""

    options: tuple[Term, ...]


@dataclass(frozen=True, eq=False)
class Call(Term):
    """A call of one of `targets`. The arguments are positional; omitted ones have the defaults of the schema.

    `shared`: the node may have users outside the match; it then stays in the graph.
    """

    targets: tuple[Callable[..., object], ...]
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...] = ()
    shared: bool = False

    @property
    def commutes(self) -> bool:
        """Return whether the first two arguments may be exchanged."""
        return self.targets[0] in COMMUTATIVE and len(self.args) > 1


Targets = Callable[..., object] | tuple[Callable[..., object], ...]


def call(targets: Targets, *args: object, shared: bool = False, **kwargs: object) -> Call:
    """Return the term of a call of an operator, or of one of `targets`."""
    alternatives = targets if isinstance(targets, tuple) else (targets,)
    return Call(alternatives, args, tuple(sorted(kwargs.items())), shared)


COMMUTATIVE: frozenset[object] = frozenset(
    {aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default, aten.eq.Tensor, aten.ne.Tensor}
    | {aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor}
    | {aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default}
)


def walk(term: object) -> Iterator[Term]:
    """Yield all terms inside an argument, itself first; a term that stands twice is yielded twice."""
    if isinstance(term, Term):
        yield term
    match term:
        case Call(_, args, kwargs):
            yield from walk((*args, *(value for _, value in kwargs)))
        case OneOf(options):
            yield from walk(options)
        case tuple() | list():
            for inner in term:
                yield from walk(inner)


def roots(term: Term) -> tuple[Callable[..., object], ...]:
    """Return the operators at which a term can start."""
    match term:
        case Call(targets):
            return targets
        case OneOf(options):
            return tuple(target for option in options for target in roots(option))
    raise ValueError(f"a pattern must start at a call, not at {term}")
