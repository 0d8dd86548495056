"""Archives: graphs that one folder has compiled are found in another, all of them or none."""

from __future__ import annotations

import io
import json
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from altbackend.cli.main import main
from altbackend.compile_pool import children, cpp, cuda
from altbackend.compiled.artifact import Code
from altbackend.config.options import Config
from altbackend.config.resolve import resolve
from altbackend.debug.trace import DecisionKind, Trace
from altbackend.disk_cache import seal
from altbackend.disk_cache.storage import Store, open_store
from altbackend.errors import BadBundle
from altbackend.graph_cache import archive, entry_files, lookup

T = torch.Tensor
SECRET, OTHER = b"a secret of 16 bytes or more", b"another secret of enough bytes"
MUTATIONS = 300
pytestmark = [pytest.mark.timeout(300), pytest.mark.sample(2)]  # compiles a few graphs in every test


def softmax_of(x: T) -> T:
    return torch.softmax(x * 2, -1) + x.sum(0)


def normed(x: T) -> T:
    return nn.functional.layer_norm(x, (16,)).relu()


def trained(x: T) -> T:
    return (torch.tanh(x) * x).sum()


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    record = Trace.decision

    def decision(self: Trace, kind: DecisionKind, subject: str, verdict: str, reason: str) -> None:
        record(self, kind, subject, verdict, reason)
        if kind == "cache":
            seen.append(verdict)

    monkeypatch.setattr(Trace, "decision", decision)
    return seen


def compute(folder: Path, **options: Any) -> list[T]:
    """Results of three compiled functions, one with a backward: four graphs."""
    torch.manual_seed(0)
    out = []
    for fn in (softmax_of, normed, trained):
        torch._dynamo.reset()
        given = {"strict": True, "cache_graphs": True, "warm_start": False, "cache_dir": str(folder), **options}
        x = torch.randn(8, 16, requires_grad=fn is trained)
        out.append(torch.compile(fn, backend="alt", options=given)(x))
        if fn is trained:
            out[-1].backward()
            assert x.grad is not None
            out.append(x.grad)
    return [t.detach() for t in out]


GRAPHS = 4


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a folder the one that commands work on."""

    def use(name: str) -> Path:
        monkeypatch.setenv("ALTBACKEND_CACHE_DIR", str(tmp_path / name))
        return tmp_path / name

    return use


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: Any) -> str:
        raise AssertionError("something was compiled")

    monkeypatch.setattr(cpp, "failure", refuse)


@pytest.fixture
def exported(home: Callable[[str], Path], tmp_path: Path) -> tuple[Path, list[T]]:
    """A bundle of four graphs, whose folder is gone, and what they compute."""
    results = compute(home("first"))
    assert main(["cache", "export", str(tmp_path / "graphs.zip")]) == 0
    shutil.rmtree(tmp_path / "first")
    return tmp_path / "graphs.zip", results


def test_an_imported_bundle_is_hit_by_every_graph_and_nothing_is_compiled(
    exported: tuple[Path, list[T]],
    home: Callable[[str], Path],
    verdicts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, results = exported
    second = home("elsewhere/second")
    assert main(["cache", "import", str(file)]) == 0
    assert f"{GRAPHS} graphs" in capsys.readouterr().out
    verdicts.clear()
    no_compiler(monkeypatch)
    assert all(map(torch.equal, compute(second), results))
    assert verdicts == ["hit"] * GRAPHS
    assert main(["cache", "verify"]) == 0


def test_with_one_option_changed_nothing_is_hit_and_the_option_is_named(
    exported: tuple[Path, list[T]],
    home: Callable[[str], Path],
    verdicts: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    second = home("second")
    assert main(["cache", "import", str(exported[0])]) == 0
    assert main(["cache", "explain-miss"]) == 0
    assert "options" not in capsys.readouterr().out
    verdicts.clear()
    compute(second, inline_limit=399)
    assert verdicts == ["miss"] * GRAPHS
    assert main(["cache", "explain-miss"]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = [line for line in lines if line.endswith(": options inline_limit: 400 cached, 399 now")]
    assert len(named) == GRAPHS


def test_a_second_import_and_export_change_nothing(
    exported: tuple[Path, list[T]], home: Callable[[str], Path], tmp_path: Path
) -> None:
    home("second")
    for _ in range(2):
        assert main(["cache", "import", str(exported[0])]) == 0
    assert main(["cache", "export", str(tmp_path / "again.zip")]) == 0
    with zipfile.ZipFile(exported[0]) as a, zipfile.ZipFile(tmp_path / "again.zip") as b:
        assert {n: a.read(n) for n in a.namelist() if n != archive.LIST} == {
            n: b.read(n) for n in b.namelist() if n != archive.LIST
        }
        assert sum(n.endswith(".so") for n in a.namelist()) == GRAPHS


def test_what_is_damaged_stays_at_home(home: Callable[[str], Path], tmp_path: Path) -> None:
    first = home("first")
    compute(first)
    (entry, *_) = sorted(first.rglob("*.graph"))
    entry.write_bytes(entry.read_bytes()[:-1])
    (library, *_) = sorted(first.rglob("*.so"))
    library.unlink()
    contents = archive.write(open_store(resolve()), tmp_path / "graphs.zip")
    assert contents.graphs == GRAPHS - 1
    assert (
        archive.unpack(Store(tmp_path / "second"), io.BytesIO((tmp_path / "graphs.zip").read_bytes()), "it") == contents
    )


# --- bundles that are none -------------------------------------------------------------------------------------------


def changed(file: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """The bundle with some members changed, as an archive that is whole."""
    with zipfile.ZipFile(file) as a:
        members = {n: a.read(n) for n in a.namelist()}
    change(members)
    with zipfile.ZipFile(file, "w") as a:
        for name, content in members.items():
            a.writestr(name, content)
    return file


def listed(members: dict[str, bytes], **fields: Any) -> None:
    members[archive.LIST] = json.dumps(json.loads(members[archive.LIST]) | fields).encode()


def swap(members: dict[str, bytes]) -> None:
    """Two files, whole ones, under each other's names."""
    a, b, *_ = (n for n in members if n.endswith(".so"))
    members[a], members[b] = members[b], members[a]


def add(name: str) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        members[name] = seal.seal(name, b"#!/bin/sh", b"")
        listed(members, files=[*json.loads(members[archive.LIST])["files"], name])

    return change


def damage(suffix: str) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        name = next(n for n in members if n.endswith(suffix))
        members[name] = members[name][:100] + b"x" + members[name][101:]

    return change


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(lambda m: m.pop(archive.LIST), "it is not a bundle", id="no list"),
        pytest.param(lambda m: m.update({archive.LIST: b"{"}), "damaged", id="a list that is no JSON"),
        pytest.param(lambda m: m.update({archive.LIST: b"[]"}), "its format is not", id="a list of another kind"),
        pytest.param(lambda m: listed(m, format="altbackend-bundle-0"), "its format is not", id="another format"),
        pytest.param(lambda m: listed(m, files=3), "its list cannot be read", id="no files"),
        pytest.param(lambda m: listed(m, files=[3]), "its list cannot be read", id="numbers for files"),
        pytest.param(lambda m: m.update({archive.LIST: b"[" * 100_000}), "damaged", id="a list without an end"),
        pytest.param(lambda m: listed(m, files=[]), "does not hold the files that it lists", id="other files"),
        pytest.param(lambda m: m.pop(next(iter(m))), "does not hold the files that it lists", id="a file is missing"),
        pytest.param(damage(".so"), ".so is damaged", id="a library"),
        pytest.param(damage(".graph"), ".graph is damaged", id="an entry"),
        pytest.param(swap, "is damaged", id="two files swapped"),
        pytest.param(add("../escape.so"), "is not the name of a compiled file", id="a path upwards"),
        pytest.param(add("/tmp/escape.so"), "is not the name of a compiled file", id="a path of the root"),
        pytest.param(add("cpp/aa/../../../x.so"), "is not the name of a compiled file", id="a path through"),
        pytest.param(add("autotune/aa/x.json"), "is not the name of a compiled file", id="another kind"),
    ],
)
def test_a_bad_bundle_is_named_and_nothing_imported(
    exported: tuple[Path, list[T]],
    home: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, bytes]], None],
    named: str,
) -> None:
    second = home("second")
    assert main(["cache", "import", str(changed(exported[0], change))]) == 1
    printed = capsys.readouterr().out
    assert f"nothing was imported from {exported[0]}" in printed
    assert named in printed
    assert [p for p in second.rglob("*") if p.is_file()] == []
    assert not (second.parent / "escape.so").exists()


def test_another_compression_is_refused(exported: tuple[Path, list[T]], tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.zip", "w", zipfile.ZIP_BZIP2) as b, zipfile.ZipFile(exported[0]) as a:
        for name in a.namelist():
            b.writestr(name, a.read(name))
    with (tmp_path / "other.zip").open("rb") as f, pytest.raises(BadBundle, match="compression method"):
        archive.unpack(Store(tmp_path / "second"), f, "it")


def test_bundles_that_were_changed_anywhere(exported: tuple[Path, list[T]], tmp_path: Path) -> None:
    """Whatever the archive's reader says of them, files that differ are never written."""
    whole, dice, refused = exported[0].read_bytes(), random.Random(0), 0
    good = Store(tmp_path / "good")
    archive.unpack(good, io.BytesIO(whole), "it")
    kept = {p.relative_to(good.folder): p.read_bytes() for p in good.folder.rglob("*.*") if "locks" not in p.parts}
    for n in range(MUTATIONS):
        at = dice.randrange(len(whole))
        parts = (whole[:at], dice.randbytes(dice.choice((1, 4, 100))), whole[at + dice.choice((0, 1, 50)) :])
        mutated = b"".join(parts) if n % 4 else whole[:at]
        target = Store(tmp_path / "target")
        try:
            archive.unpack(target, io.BytesIO(mutated), "it")
        except BadBundle:
            refused += 1
            assert not target.folder.exists()
        else:  # a change in what the archive says of times and the like
            for path in (p for p in target.folder.rglob("*.*") if "locks" not in p.parts):
                assert kept[path.relative_to(target.folder)] == path.read_bytes()
            shutil.rmtree(target.folder)
    assert refused > MUTATIONS // 2


def test_a_file_that_is_not_there_and_a_name_that_is_not_given(
    home: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home("first")
    assert main(["cache", "import", str(tmp_path / "nothing.zip")]) == 1
    assert "nothing.zip" in capsys.readouterr().out
    assert main(["cache", "export", str(tmp_path / "no" / "folder.zip")]) == 1
    (tmp_path / "text.zip").write_text("not a zip")
    assert main(["cache", "import", str(tmp_path / "text.zip")]) == 1
    assert "it is damaged" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["cache", "import"])


def test_a_bundle_of_other_versions_says_so(
    exported: tuple[Path, list[T]], home: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    home("second")
    changed(exported[0], lambda m: listed(m, versions={"torch": "2.0.0"}))
    assert main(["cache", "import", str(exported[0])]) == 0
    assert "note: made with torch 2.0.0" in capsys.readouterr().out


# --- secrets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "wanted", "named"),
    [
        (SECRET, SECRET, ""),
        (b"", SECRET, "sealed without a secret"),
        (SECRET, b"", "sealed with a secret, and the option cache_key_file names none"),
        (SECRET, OTHER, "sealed with another secret"),
    ],
)
def test_a_bundle_is_imported_only_with_its_secret(
    home: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verdicts: list[str],
    made: bytes,
    wanted: bytes,
    named: str,
) -> None:
    def use(secret: bytes) -> str:
        file = tmp_path / f"secret-{secret[:3].decode()}"
        file.write_bytes(secret + b"\n")
        monkeypatch.setenv("ALTBACKEND_CACHE_KEY_FILE", str(file) if secret else "")
        return str(file) if secret else ""

    use(made)
    results = compute(home("first"))
    assert main(["cache", "export", str(tmp_path / "graphs.zip")]) == 0
    second, key_file = home("second"), use(wanted)
    assert main(["cache", "import", str(tmp_path / "graphs.zip")]) == (1 if named else 0)
    assert named in capsys.readouterr().out
    verdicts.clear()
    assert all(map(torch.equal, compute(second, cache_key_file=key_file), results))
    assert verdicts == ["miss" if named else "hit"] * GRAPHS


def test_an_entry_planted_in_the_folder_runs_nothing_where_a_secret_is_configured(
    home: Callable[[str], Path], tmp_path: Path, verdicts: list[str]
) -> None:
    """Entries are code: whoever can write them could run anything, but for the secret."""
    (tmp_path / "secret").write_bytes(SECRET)
    first = home("first")
    results = compute(first)
    for path in entry_files.entry_paths(open_store(resolve())):
        stored = entry_files.read(path)
        assert stored is not None
        stored["code"]["python"] += f"\nopen({str(tmp_path / 'planted')!r}, 'w').close()\n"
        assert entry_files.write(path, stored, {}) == ""
    verdicts.clear()
    assert all(map(torch.equal, compute(first, cache_key_file=str(tmp_path / "secret")), results))
    assert verdicts == ["miss"] * GRAPHS
    assert not (tmp_path / "planted").exists()
    assert all(map(torch.equal, compute(first, cache_key_file=str(tmp_path / "secret")), results))
    assert verdicts == ["miss"] * GRAPHS + ["hit"] * GRAPHS


# --- a GPU's kernels -------------------------------------------------------------------------------------------------


def test_kernels_of_a_gpu_travel_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    cfg = resolve(None, {"cache_dir": str(tmp_path / "first"), "compile_threads": 1})
    text = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel(x):\n    tl.store(x, {})\n"
    jobs = [cuda.Job(text.format(n), (("x", "*fp32"),), (), (0,), 4, 1, 90, "one") for n in range(2)]
    made = [cuda.submit(job, cfg).result(timeout=100) for job in jobs]
    code = Code(torch.device("cuda", 0), "", 2, 0, jobs=(*jobs, jobs[0]))
    path = entry_files.EntryPath(open_store(cfg), "f" * 16, "a" * 64)
    assert entry_files.write(path, {"code": {}, "lines": "", "binaries": lookup.binaries(code, cfg)}, {}) == ""
    contents = archive.write(open_store(cfg), tmp_path / "graphs.zip")
    assert sum(name.endswith(".cubin") for name in contents.names) == 2
    moved = Config(cache_dir=str(tmp_path / "second"), compile_threads=1)
    with (tmp_path / "graphs.zip").open("rb") as f:
        archive.unpack(open_store(moved), f, "it")

    def refuse(self: children.Child, line: str, seconds: float) -> str:
        raise AssertionError("a kernel was compiled")

    monkeypatch.setattr(children.Child, "ask", refuse)
    assert [cuda.submit(job, moved).result(timeout=100) for job in jobs] == made
