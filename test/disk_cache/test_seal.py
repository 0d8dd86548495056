"""Seals: whatever was changed in a file, or put under another name, is not taken for what was written."""

from __future__ import annotations

import ctypes
import json
import random
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from altbackend.compile_pool import cpp, cuda
from altbackend.config.options import Config
from altbackend.config.resolve import resolve
from altbackend.disk_cache import seal
from altbackend.disk_cache.storage import Store, open_store
from altbackend.errors import BadOptionValue, CompilerFailed

SECRET, OTHER = b"a secret of 16 bytes or more", b"another secret of enough bytes"
MUTATIONS = 3500  # of a library and of a kernel each; test_entry.py changes 3,000 entries of graphs and 1,000 values
SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer(void) { return 42; }\n'


def mutated(content: bytes, other: bytes, dice: random.Random) -> bytes:
    at, length = dice.randrange(len(content)), dice.choice((1, 1, 2, 16, 4096))
    match dice.randrange(8):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + dice.randbytes(length) + content[at + length :]
        case 2:
            return content[:at] + content[at + length :]
        case 3:
            return content[:at] + bytes([content[at] ^ (1 << dice.randrange(8))]) + content[at + 1 :]
        case 4:
            return content[:at] + dice.randbytes(length) + content[at:]
        case 5:  # the seal alone
            at = len(content) - 1 - dice.randrange(seal.BYTES)
            return content[:at] + bytes([content[at] ^ (1 << dice.randrange(8))]) + content[at + 1 :]
        case 6:
            return dice.choice(
                (b"", bytes(len(content)), content + content, content[: -seal.BYTES], content[-seal.BYTES :])
            )
        case _:  # two files that were written at once
            at = dice.randrange(min(len(content), len(other)))
            return dice.choice((other, content[:at] + other[at:], other[:at] + content[at:]))


def survivors(store: Store, names: Iterable[str], secret: bytes) -> int:
    """Return how many changed files of the store were accepted; mutations without effect do not count."""
    name, other = names
    content, stranger = store.path(name).read_bytes(), store.path(other).read_bytes()
    assert seal.is_valid(name, content, secret)
    dice, found, tried = random.Random(name), 0, 0
    while tried < MUTATIONS:
        changed = mutated(content, stranger, dice)
        if changed != content:
            tried += 1
            found += seal.is_valid(name, changed, secret)
            if tried % 50 == 0:  # the same through the file
                store.path(name).write_bytes(changed)
                found += store.read(name) is not None
    store.path(name).write_bytes(content)
    assert store.read(name) == content[: -seal.BYTES]
    return found


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["plain", "keyed"])
def test_a_library_that_was_changed_anywhere_is_none(tmp_path: Path, secret: bytes) -> None:
    cfg = _config(tmp_path, secret)
    sources = (SOURCE, SOURCE.replace("42", "43"))
    for source in sources:
        cpp.load(source, cfg)
    assert survivors(open_store(cfg), (cpp.name_of(s, cfg) for s in sources), secret) == 0


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["plain", "keyed"])
def test_a_kernel_that_was_changed_anywhere_is_none(tmp_path: Path, secret: bytes) -> None:
    pytest.importorskip("triton")
    cfg = _config(tmp_path, secret)
    text = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel(x):\n    tl.store(x, {})\n"
    jobs = [cuda.Job(text.format(n), (("x", "*fp32"),), (), (0,), 4, 1, 90, "one") for n in range(2)]
    made = [cuda.submit(job, cfg).result(timeout=100) for job in jobs]
    store = open_store(cfg)
    assert survivors(store, map(cuda.name_of, jobs), secret) == 0
    assert cuda._read(store.read(cuda.name_of(jobs[0])), 4) == made[0]


def _config(folder: Path, secret: bytes) -> Config:
    file = folder / "secret"
    file.write_bytes(secret)
    key_file = str(file) if secret else ""
    return resolve(None, {"cache_dir": str(folder / "kept"), "cache_key_file": key_file, "compile_threads": 1})


# --- what is loaded --------------------------------------------------------------------------------------------------


def answer(cfg: Config) -> int:
    found = cpp.load(SOURCE, cfg).dll.answer
    found.restype = ctypes.c_int
    return int(found())


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", b"\0" * 5000, "cut", "flipped", "another", "unsealed"], ids=repr)
def test_a_damaged_library_is_built_anew_and_never_loaded(tmp_path: Path, damage: bytes | str) -> None:
    cfg = _config(tmp_path, b"")
    other = cpp.load(SOURCE.replace("42", "13"), cfg).path
    assert answer(cfg) == 42
    path = open_store(cfg).path(cpp.name_of(SOURCE, cfg))
    intact = path.read_bytes()
    contents: dict[bytes | str, bytes | str] = {
        "cut": intact[: len(intact) // 2],
        "flipped": bytes([intact[0] ^ 1]) + intact[1:],
        "another": Path(other).read_bytes(),
        "unsealed": intact[: -seal.BYTES],
    }
    content = contents.get(damage, damage)
    assert isinstance(content, bytes)
    fresh = tmp_path / "fresh"  # the same file would be the library that is loaded already
    shutil.copytree(cfg.cache_dir, fresh)
    moved = replace(cfg, cache_dir=str(fresh))
    open_store(moved).path(cpp.name_of(SOURCE, cfg)).write_bytes(content)
    assert answer(moved) == 42
    assert open_store(moved).read(cpp.name_of(SOURCE, cfg)) == intact[: -seal.BYTES]


def test_only_what_was_sealed_with_the_secret_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A malicious library in the folder is a miss for whoever has configured a secret."""
    plain, keyed = (replace(_config(tmp_path, s), cache_dir=str(tmp_path / "kept")) for s in (b"", SECRET))
    plain = replace(plain, cache_key_file="")
    (tmp_path / "other").write_bytes(OTHER)
    other = replace(keyed, cache_key_file=str(tmp_path / "other"))
    for builder, readers in ((plain, (keyed, other)), (keyed, (plain, other))):
        cpp.load(SOURCE, builder)
        for reader in readers:
            assert open_store(builder).read(cpp.name_of(SOURCE, plain)) is not None
            assert open_store(reader).read(cpp.name_of(SOURCE, plain)) is None
    path = open_store(keyed).path(cpp.name_of(SOURCE, keyed))
    malicious = seal.seal(cpp.name_of(SOURCE, keyed), b"code of somebody else", b"")
    path.write_bytes(malicious)
    assert answer(keyed) == 42
    assert path.read_bytes() != malicious


@pytest.mark.parametrize(("content", "named"), [(None, "cannot be read"), (b"short\n", "at least 16 bytes")])
def test_a_secret_that_cannot_be_used_is_an_error(tmp_path: Path, content: bytes | None, named: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadOptionValue, match=named):
        cpp.load(SOURCE, resolve(None, {"cache_dir": str(tmp_path), "cache_key_file": str(file)}))


def test_a_secret_is_not_shown() -> None:
    assert "secret" not in repr(Store(Path(), SECRET))


def test_a_seal_tells_names_from_contents() -> None:
    pairs = [("a", b"bc"), ("ab", b"c"), ("a", b"\0bc"), ("", b"abc"), ("a\0b", b"c"), ("abc", b"")]
    for secret in (b"", SECRET):
        seals = {seal.seal(name, content, secret)[-seal.BYTES :] for name, content in pairs}
        assert len(seals) == len(pairs)
        for name, content in pairs:
            sealed = seal.seal(name, content, secret)
            assert seal.is_keyed(sealed) == bool(secret)
            assert [n for n, _ in pairs if seal.is_valid(n, sealed, secret)] == [name] * [n for n, _ in pairs].count(
                name
            )


def test_machine_code_of_another_form_is_a_miss() -> None:
    headers: tuple[object, ...] = ([], {}, {"shared": 0}, {"name": "x"}, {"shared": "many", "name": ""})
    for header in headers:
        assert cuda._read(json.dumps(header).encode() + b"\ncode", 4) is None
    assert cuda._read(json.dumps({"shared": 0, "name": "x"}).encode(), 4) is None
    assert cuda._read(b"\xff", 4) is None
    assert cuda._read(None, 4) is None


def test_an_error_keeps_its_source_where_its_command_says(tmp_path: Path) -> None:
    with pytest.raises(CompilerFailed) as caught:
        cpp.load("int x = no_such_thing;", resolve(None, {"cache_dir": str(tmp_path)}))
    assert Path(caught.value.source).read_text() == "int x = no_such_thing;"
    assert caught.value.source in caught.value.command
