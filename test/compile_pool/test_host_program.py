"""Byte code of host programs: kept, found, made anew when it is not what it should be."""

from __future__ import annotations

import marshal
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from altbackend.compiled import bytecode
from altbackend.config.resolve import resolve
from altbackend.disk_cache import seal
from altbackend.disk_cache.storage import Store, open_store

PROGRAM = """
def bind(number):
    def call(args):
        half = [1 / (x - number) for x in args]
        return half
    return call
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(resolve(None, {"cache_dir": str(tmp_path)}))


def run(store: Store, shown_as: str, *args: int) -> Any:
    space: dict[str, Any] = {}
    exec(bytecode.compiled(PROGRAM, shown_as, store), space)
    return space["bind"](1)(list(args))


def no_compiler(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("compiled again")


def test_a_second_process_does_not_compile_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(store, "<first>", 2, 3) == [1, 0.5]
    monkeypatch.setattr(bytecode, "compile", no_compiler, raising=False)
    assert run(store, "<second>", 2, 3) == [1, 0.5]


def test_tracebacks_name_the_file_that_this_process_calls_it(store: Store) -> None:
    run(store, "<first>", 2)
    with pytest.raises(ZeroDivisionError) as raised:
        run(store, "<second>", 1)
    frames = traceback.extract_tb(raised.value.__traceback__)[2:]  # those of the program
    assert {f.filename for f in frames} == {"<second>"}
    assert {f.lineno for f in frames} == {4}


@pytest.mark.parametrize(
    "content", [b"", b"no byte code", marshal.dumps(3), marshal.dumps(compile("1", "", "eval"))[:-9]]
)
def test_anything_else_under_its_name_is_replaced(store: Store, content: bytes) -> None:
    name = bytecode.name_of(PROGRAM)
    store.write(name, content)
    assert run(store, "<first>", 2) == [1]
    assert store.read(name) != content
    store.path(name).write_bytes(b"damaged")
    assert run(store, "<first>", 2) == [1]
    assert isinstance(marshal.loads(store.read(name) or b""), type(run.__code__))


def test_byte_code_that_somebody_planted_is_not_run_where_a_secret_is_configured(store: Store) -> None:
    name, keyed = bytecode.name_of(PROGRAM), replace(store, secret=b"a secret of 16 bytes or more")
    planted = marshal.dumps(compile("raise AssertionError('planted code was run')", "", "exec"))
    keyed.path(name).parent.mkdir(parents=True)
    keyed.path(name).write_bytes(seal.seal(name, planted, b""))
    assert run(keyed, "<first>", 2) == [1]
    assert keyed.read(name) not in (None, planted)


def test_a_full_disk_costs_the_next_process_a_compilation(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Store, name: str, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "write", full)
    assert run(store, "<first>", 2) == [1]
    assert store.read(bytecode.name_of(PROGRAM)) is None


def test_another_python_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = bytecode.name_of(PROGRAM)
    monkeypatch.setattr(bytecode, "_PYTHON", "cpython-399 00 0")
    assert bytecode.name_of(PROGRAM) != here
