"""Packages: read by torch's loader and by ours, checked before anything is loaded, weights shared between models."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export.pt2_archive._package import load_pt2

import altbackend
from altbackend.aot import manifest
from altbackend.aot.load import aot_load, check_package
from altbackend.cli.main import main
from altbackend.errors import BadGraph, BadPackage

from . import fuzz_calls
from .models import Dim, Mlp, batched


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of one model with its program and a file of weights."""
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    assert altbackend.aot_package(path, batched(), options={"aot_constants": "file"}) == str(path)
    return path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models that share their weights."""
    path = tmp_path_factory.mktemp("pair") / "pair.pt2"
    m = Mlp()
    both = {"any": torch.export.export(m, (torch.randn(4, 16),), dynamic_shapes=({0: Dim("n")},))}
    both["one"] = torch.export.export(m, (torch.randn(1, 16),))
    altbackend.aot_package(path, both, share_weights=True, programs=False)
    return path


_OTHER_PROCESS = """
import sys, torch
loader = torch._C._aoti.AOTIModelPackageLoader(sys.argv[1], "model", False, 1, -1)
x = torch.arange(48.0).view(3, 16) / 48
(y,) = loader.boxed_run([x])
print(",".join(f"{v:.6f}" for v in y.flatten().tolist()))
assert "altbackend" not in sys.modules
print(sorted(loader.get_constant_fqns()))
"""


def test_torchs_own_loader_runs_a_package_in_another_process(package: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _OTHER_PROCESS, str(package)], capture_output=True, text=True, check=True
    )
    values, names = run.stdout.splitlines()
    x = torch.arange(48.0).view(3, 16) / 48
    actual = torch.tensor([float(v) for v in values.split(",")]).view(3, 8)
    torch.testing.assert_close(actual, Mlp()(x), rtol=1e-4, atol=1e-4)
    assert names == str(sorted(dict(Mlp().named_parameters())))


def test_our_loader(package: Path) -> None:
    assert check_package(package) == []
    model, x = aot_load(package), torch.randn(6, 16)
    torch.testing.assert_close(model(x), Mlp()(x))
    with pytest.raises(BadPackage, match="no model 'other'; it has model"):
        aot_load(package, "other")


def test_two_models_share_weights_in_the_package_and_in_memory(pair: Path) -> None:
    one, several = aot_load(pair, "one"), aot_load(pair, "any")
    x = torch.randn(3, 16)
    torch.testing.assert_close(several(x), Mlp()(x))
    torch.testing.assert_close(one(x[:1]), Mlp()(x[:1]))
    assert {t.data_ptr() for t in one.shared_weights} == {t.data_ptr() for t in several.shared_weights} != set()
    with zipfile.ZipFile(pair) as archive:
        stored = [n for n in archive.namelist() if "data/weights/" in n]
    assert len(stored) == len(Mlp().state_dict())
    theirs = load_pt2(str(pair), load_weights_from_disk=True)
    torch.testing.assert_close(theirs.aoti_runners["any"](x), Mlp()(x))


def test_a_model_that_is_no_exported_program(tmp_path: Path) -> None:
    with pytest.raises(BadGraph, match=r"torch\.export"):
        altbackend.aot_package(tmp_path / "x.pt2", {"model": Mlp()})  # type: ignore[dict-item]


# --- packages that do not fit ----------------------------------------------------------------------------------------


def _changed(package: Path, path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Return a copy of a package whose manifest is changed."""
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(path, "w") as new:
        for item in old.infolist():
            content = old.read(item)
            if item.filename.endswith(manifest.NAME):
                facts = json.loads(content)
                change(facts)
                content = json.dumps(facts).encode()
            new.writestr(item.filename, content)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m["models"]["model"].update(features=[*m["models"]["model"]["features"], "avx9000"]),
            "this CPU has no avx9000",
        ),
        (lambda m: m["models"]["model"].update(machine="vax"), "it was compiled for vax"),
        (lambda m: m["torch"].update(least="9.0"), r"needs torch 9\.0"),
    ],
)
def test_a_package_for_another_machine_is_refused_or_compiled_again(
    package: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = _changed(package, tmp_path / "p.pt2", change)
    (problem,) = check_package(path)
    assert problem.todo
    with pytest.raises(BadPackage, match=message):
        aot_load(path)
    x = torch.randn(2, 16)
    torch.testing.assert_close(aot_load(path, recompile=True)(x), Mlp()(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format=99), "its format is 99"),
        (lambda m: m.pop("models"), "manifest is damaged"),
        (lambda m: m["models"]["model"].pop("files"), "manifest is damaged"),
        (lambda m: m.update(models=[]), "manifest is damaged"),
        (lambda m: m["models"]["model"]["files"].update({"more.so": [1, "0"]}), r"file more\.so is missing"),
        (lambda m: m["models"]["model"]["files"].update({"model.wrapper.so": [1, "0"]}), "wrapper.so is damaged"),
    ],
)
def test_wrong_manifests(
    package: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(BadPackage, match=message):
        aot_load(_changed(package, tmp_path / "p.pt2", change))


def test_damaged_packages_are_refused(package: Path, tmp_path: Path) -> None:
    """Truncated packages and packages with another byte in a library are refused, never loaded."""
    whole, path, rng = package.read_bytes(), tmp_path / "p.pt2", random.Random(0)
    for _ in range(30):
        path.write_bytes(whole[: rng.randrange(len(whole))])
        with pytest.raises(BadPackage):
            aot_load(path)
    with zipfile.ZipFile(package) as archive:
        library = next(i for i in archive.infolist() if i.filename.endswith(".so"))
    begin = whole.index(b"\x7fELF", library.header_offset)
    for _ in range(20):
        at = begin + rng.randrange(library.file_size)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(BadPackage, match="damaged"):
            aot_load(path)


def test_files_that_are_no_packages(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no library")
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("a/data/aotinductor/model/x.so", "")
    for name, message in (("none", "no such file"), ("text", "no library of altbackend"), ("zip", "another compiler")):
        with pytest.raises(BadPackage, match=message):
            aot_load(tmp_path / name)


# --- the command line ------------------------------------------------------------------------------------------------

_SOURCE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)

    def forward(self, x, i):
        return self.linear(x).relu()[i], x.shape[0]
"""


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "net.py", tmp_path / "net.pt2"
    source.write_text(_SOURCE)
    given = ["--inputs", "b5x3,2:int64", "-o", str(out), "--option", "aot_isa=generic"]
    assert main(["aot", "compile", f"{source}:Net", *given]) == 0
    assert main(["aot", "inspect", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "input 0 x: torch.float32" in shown
    assert "generic; weights embedded" in shown
    assert "linear.weight: torch.float32 [4, 3]" in shown
    assert main(["aot", "compare", str(out)]) == 0
    assert "equal within" in capsys.readouterr().out
    assert main(["aot", "compare", str(out), "--inputs", "5x4,2:int64"]) == 2
    assert "dimension 1 of input 0 (x) is 4" in capsys.readouterr().err
    assert main(["aot", "inspect", str(source)]) == 2


# --- a program without Python ----------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_server_without_python(tmp_path: Path) -> None:
    root = Path(altbackend.__file__).parents[1]
    server, library = tmp_path / "server", altbackend.aot_compile(batched(10))
    source = root / "examples/aot_cpp/plain_server.cpp"
    command = ["g++", "-std=c++17", str(source), f"-I{root}/altbackend/include", "-o", str(server), "-ldl"]
    subprocess.run(command, check=True)
    environment = {"LD_LIBRARY_PATH": str(Path(torch.__file__).parent / "lib")}
    good = subprocess.run([server, library, "4", "16"], env=environment, capture_output=True, text=True, check=True)
    expected = Mlp()(torch.ones(4, 16)).double().sum().item()
    assert "2 dimensions, 32 elements" in good.stdout
    assert float(good.stdout.split()[-1]) == pytest.approx(expected, rel=1e-4)
    bad = subprocess.run([server, library, "11", "16"], env=environment, capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert "dimension 0 of input 0 (x) is 11; the library was compiled for sizes from 1 to 10" in bad.stderr


def test_damaged_packages_are_errors_that_say_so(package: Path, tmp_path: Path) -> None:
    """Some damages make the names in the archive unreadable, or let its files seem encrypted."""
    here = tmp_path / "model.pt2"
    here.write_bytes(package.read_bytes())
    rng, refused = random.Random(1), 0
    for _ in range(60):
        refused += fuzz_calls.packages(here, rng)
    assert refused > 50
    content = here.read_bytes()
    at = content.index(b"alt/manifest.json")  # the name in front of the file, which zipfile reads as UTF-8
    (tmp_path / "name.pt2").write_bytes(content[:at] + b"\xf6" + content[at + 1 :])
    with pytest.raises(BadPackage, match="no readable package"):
        altbackend.aot_load(tmp_path / "name.pt2")
