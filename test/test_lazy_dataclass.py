"""A class through `altbackend.lazy_dataclass` behaves as the same class through `dataclasses`."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from altbackend import lazy_dataclass

PACKAGE = Path(lazy_dataclass.__file__).parent


def variants(decorate: Any) -> dict[str, type]:
    """Return classes of every form that the package uses."""

    @decorate(frozen=True)
    class Point:
        x: int
        y: float = 2.0
        names: list[str] = dataclasses.field(default_factory=list, compare=False, repr=False)

    @decorate(frozen=True)
    class Deep(Point):
        """A subclass with a default that is no constant and a check of its own."""

        kind: object = Point

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("x is negative")

    @decorate
    class Changing:
        x: int
        y: dict[str, int] = dataclasses.field(default_factory=dict)

    @decorate(frozen=True)
    class Written:
        x: int
        y: int = 0

        def __repr__(self) -> str:
            return f"<{self.x}>"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

    @decorate(frozen=True)
    class Compared:
        x: int
        y: int = 0

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Compared) and self.x == other.x

    @decorate(frozen=True, eq=False)
    class Identity:
        x: int
        y: int = 0

    @decorate(eq=False, repr=False)
    class Error(Exception):
        x: int
        y: int = 0

        def __str__(self) -> str:
            return f"{self.x} {self.y}"

    @decorate(frozen=True)
    class Empty:
        pass

    return {c.__name__: c for c in (Point, Deep, Changing, Written, Compared, Identity, Error, Empty)}


OURS, THEIRS = variants(lazy_dataclass.dataclass), variants(dataclasses.dataclass)


def assign(name: str) -> Callable[[Any], object]:
    def run(make: Any) -> object:
        value = make(1)
        setattr(value, name, 5)
        return getattr(value, name)

    return run


def delete(make: Any) -> object:
    value = make(1)
    del value.x
    return hasattr(value, "x")


USES: dict[str, Callable[[Any], object]] = {
    "repr": lambda make: re.sub("0x[0-9a-f]+", "", repr(make(3, y=4)).replace("variants.<locals>.", "")),
    "defaults": lambda make: sorted(k for k in vars(make(1))),
    "default values": lambda make: make(1).y,
    "factories give new values": lambda make: make(1).names is make(1).names,
    "equal": lambda make: (make(1) == make(1), make(1) == make(2), make(1) != make(2), make(1) == 1),
    "hash": lambda make: hash(make(1)) == hash(make(1)),
    "hash value": lambda make: make(1).x != 1 or hash(make(1)) if make.__name__ == "Written" else None,
    "set": lambda make: len({make(1), make(1), make(2)}),
    "assign": assign("x"),
    "assign a new name": assign("other"),
    "delete": delete,
    "too many arguments": lambda make: make(1, 2, 3, 4, 5),
    "unknown argument": lambda make: make(1, z=3),
    "no argument": lambda make: vars(make()),
    "check": lambda make: make(-1).x,
    "replace": lambda make: dataclasses.replace(make(1), x=9).x,
    "asdict": lambda make: sorted(dataclasses.asdict(make(1))),
    "fields": lambda make: [(f.name, f.compare, f.repr) for f in dataclasses.fields(make)],
    "copy": lambda make: copy.deepcopy(make(1)).x,
    "match": lambda make: make.__match_args__,
}


def outcome(use: Callable[[Any], object], cls: type) -> object:
    try:
        return use(cls)
    except Exception as error:
        return type(error).__name__, str(error).replace("variants.<locals>.", "")


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("cls", OURS)
def test_uses_give_what_dataclasses_give(cls: str, use: str) -> None:
    expected = outcome(USES[use], THEIRS[cls])
    for _ in range(2):  # the first call compiles the method, the second meets what was compiled
        assert outcome(USES[use], OURS[cls]) == expected


@pytest.mark.parametrize("name", ["Point", "Deep"])
def test_an_instance_of_a_subclass_is_no_equal(name: str) -> None:
    assert OURS["Point"](1) != OURS["Deep"](1)
    assert OURS[name](1, 2.0, ["a"]) == OURS[name](1, 2.0, ["b"])


@lazy_dataclass.dataclass(frozen=True)
class AtModuleLevel:
    x: int
    inner: AtModuleLevel | None = None


def test_instances_are_pickled() -> None:
    value = AtModuleLevel(1, AtModuleLevel(2))
    assert pickle.loads(pickle.dumps(value)) == value


def test_a_value_that_holds_itself_has_a_repr() -> None:
    value = OURS["Changing"](1)
    value.y["me"] = value
    expected = THEIRS["Changing"](1)
    expected.y["me"] = expected
    assert repr(value) == repr(expected)


def test_methods_are_compiled_when_they_are_called() -> None:
    cls = variants(lazy_dataclass.dataclass)["Point"]
    before = dict(vars(cls))
    value = cls(1)
    assert changed(cls, before) == {"__init__"}
    assert hash(value) == hash(cls(1))
    assert changed(cls, before) == {"__init__", "__hash__"}


def changed(cls: type, before: dict[str, object]) -> set[str]:
    return {name for name, value in vars(cls).items() if before[name] is not value}


def test_the_package_uses_it() -> None:
    """`order=True` alone needs the other one."""
    files = [p for p in PACKAGE.rglob("*.py") if p.name != "lazy_dataclass.py"]
    theirs = [p for p in files if re.search(r"^from dataclasses import .*\bdataclass\b", p.read_text(), re.M)]
    assert [p for p in theirs if "order=True" not in p.read_text()] == []
