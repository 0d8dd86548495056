"""Dataclasses whose methods are compiled when they are first called.

`dataclasses.dataclass` compiles six methods for every frozen class, about 0.5 ms a class. The compiler has 300 such
classes, and a process calls few of their methods: that was more than half of the time of importing the compiler.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    # A type checker sees `dataclasses` itself, and refuses assignments to fields of frozen classes.
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True, repr=True):
        """Return `cls` as a dataclass, with the methods, results and errors of `dataclasses.dataclass`."""
        if cls is None:
            return functools.partial(dataclass, frozen=frozen, eq=eq, repr=repr)
        # a class that writes `__eq__` alone gets `__hash__ = None` from Python, and one of its fields from dataclasses
        written = {name for name, value in vars(cls).items() if value is not None}
        cls = dataclasses.dataclass(init=False, eq=False, repr=False)(cls)
        methods = {"__init__": _compiled_later(cls, "__init__", functools.partial(_init_source, frozen=frozen))}
        if repr:
            methods["__repr__"] = _repr
        if eq:
            methods["__eq__"] = _compiled_later(cls, "__eq__", _eq_source)
            methods["__hash__"] = _compiled_later(cls, "__hash__", _hash_source) if frozen else None
        if frozen:
            methods |= {"__setattr__": _refuse_assignment, "__delattr__": _refuse_deletion}
        for name in methods.keys() - written:
            setattr(cls, name, methods[name])
        return cls


Source = Callable[[type, dict[str, Any]], str]


def _compiled_later(cls: type, name: str, source: Source) -> Callable[..., object]:
    """Return a method that compiles `source` at its first call and takes its own place in `cls`.

    `source(cls, scope)` returns the text of the method and puts the values that it names into `scope`.
    """

    def first_call(*args: object, **kwargs: object) -> object:
        scope: dict[str, Any] = {}
        exec(source(cls, scope), scope)
        method = scope[name]
        method.__qualname__ = f"{cls.__qualname__}.{name}"  # errors of a call name the class
        setattr(cls, name, method)
        return method(*args, **kwargs)

    return first_call


def _init_source(cls: type, scope: dict[str, Any], frozen: bool) -> str:
    scope.update(given_set=object.__setattr__, given_missing=MISSING)
    parameters, body = ["self"], []
    for f in dataclasses.fields(cls):
        value = f.name
        if f.default_factory is not MISSING:
            scope[f"new_{f.name}"] = f.default_factory
            value = f"new_{f.name}() if {f.name} is given_missing else {f.name}"
            parameters.append(f"{f.name}=given_missing")
        elif f.default is not MISSING:
            scope[f"default_{f.name}"] = f.default
            parameters.append(f"{f.name}=default_{f.name}")
        else:
            parameters.append(f.name)
        body.append(f"given_set(self, {f.name!r}, {value})" if frozen else f"self.{f.name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    return _function(f"__init__({', '.join(parameters)})", body or ["pass"])


def _eq_source(cls: type, scope: dict[str, Any]) -> str:
    compared = [f.name for f in dataclasses.fields(cls) if f.compare]
    return _function(
        "__eq__(self, other)",
        [
            "if other.__class__ is not self.__class__: return NotImplemented",
            f"return {_values('self', compared)} == {_values('other', compared)}",
        ],
    )


def _hash_source(cls: type, scope: dict[str, Any]) -> str:
    hashed = [f.name for f in dataclasses.fields(cls) if (f.compare if f.hash is None else f.hash)]
    return _function("__hash__(self)", [f"return hash({_values('self', hashed)})"])


def _function(header: str, body: list[str]) -> str:
    return "\n    ".join([f"def {header}:", *body])


def _values(owner: str, names: list[str]) -> str:
    """Return the source of a tuple of the fields `names` of `owner`."""
    return f"({''.join(f'{owner}.{name}, ' for name in names)})"


@reprlib.recursive_repr()
def _repr(self: object) -> str:
    shown = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)  # type: ignore[arg-type]
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refuse_assignment(self: object, name: str, value: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_deletion(self: object, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")
