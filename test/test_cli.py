"""The command line: doctor's findings and fixes, the options page, and the demo."""

from __future__ import annotations

import importlib.util
import math
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from altbackend.cli import demo, doctor, options_table
from altbackend.cli.main import main
from altbackend.cli.measure import medians, relative_error
from altbackend.cli.source import named_value
from altbackend.compile_pool.cpp import lookup_compiler
from altbackend.config.options import Config
from altbackend.config.resolve import resolve
from altbackend.disk_cache.folders import cache_folder, temporary_folder, unusable_reason
from altbackend.disk_cache.storage import open_store
from altbackend.errors import BadOptionValue
from altbackend.examples.catalogue import EXAMPLES, Example, square_loss
from altbackend.graph_cache import entry_files
from altbackend.report.stats import GraphStats

ROOT = Path(__file__).parents[1]


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


# --- cache ---


def test_kept_graphs_are_counted_checked_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALTBACKEND_CACHE_DIR", str(tmp_path))
    store = open_store(resolve())
    places = [entry_files.EntryPath(store, "family", name) for name in "ab"]
    assert main(["cache", "stats"]) == 0
    assert main(["cache", "explain-miss"]) == 0
    assert [entry_files.write(p, {"code": {}}, {"job": {"kind": p.key}}) for p in places] == ["", ""]
    assert main(["cache", "verify"]) == 0
    assert "4 of 4 files are undamaged" in capsys.readouterr().out
    places[0].file.write_bytes(places[0].file.read_bytes()[:-1])
    assert main(["cache", "verify"]) == 1
    assert f"damaged: {places[0].file}" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert "2 graphs removed" in capsys.readouterr().out
    assert entry_files.entry_paths(store) == []


# --- doctor ---


def test_doctor_is_content_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"PATH": os.environ["PATH"], "ALTBACKEND_CACHE_DIR": str(tmp_path / "cache")}
    assert doctor.run(environ) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("\nready\n")
    assert str(tmp_path / "cache") in printed


def test_doctor_fails_without_a_compiler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run({"PATH": str(tmp_path), "ALTBACKEND_CACHE_DIR": str(tmp_path / "cache")}) == 1
    printed = capsys.readouterr().out
    assert "MISS  C++ compiler" in printed
    assert "-> install" in printed
    assert "not ready: C++ compiler, build and load" in printed


def test_compiler_lookup_prefers_the_option_then_cxx_then_the_usual_names(tmp_path: Path) -> None:
    usual, from_env, from_option = (script(tmp_path / name, "exit 0") for name in ("g++", "env-cxx", "option-cxx"))
    assert lookup_compiler("", {"PATH": str(tmp_path)}) == usual
    assert lookup_compiler("", {"PATH": str(tmp_path), "CXX": from_env}) == from_env
    assert lookup_compiler(from_option, {"PATH": str(tmp_path), "CXX": from_env}) == from_option
    assert lookup_compiler("no-such-compiler", {"PATH": str(tmp_path)}) is None


def test_a_compiler_that_does_not_run(tmp_path: Path) -> None:
    check = doctor.check_compiler("", script(tmp_path / "g++", "exit 3"))
    assert not check.ok
    assert check.fix


@pytest.mark.parametrize("body", ["echo 'no -fopenmp' >&2; exit 1", "exit 0"], ids=["refuses", "writes nothing"])
def test_a_compiler_that_cannot_build(tmp_path: Path, body: str) -> None:
    check = doctor.check_build(script(tmp_path / "g++", body))
    assert not check.ok
    assert check.fix


def test_openmp_runtime_is_looked_for_where_torch_keeps_it(tmp_path: Path) -> None:
    assert not doctor.check_openmp_library(tmp_path / "torch").ok
    (tmp_path / "torch.libs").mkdir()
    (tmp_path / "torch.libs" / "libgomp-a34b3233.so.1").touch()
    assert "libgomp" in doctor.check_openmp_library(tmp_path / "torch").finding


@pytest.mark.parametrize(
    ("version", "ok", "required"),
    [("2.10.1", False, True), ("2.11.0+cpu", True, False), ("2.15.0", True, False), ("2.16.0a0", False, False)],
)
def test_torch_versions(version: str, ok: bool, required: bool) -> None:
    check = doctor.check_torch(version)
    assert (check.ok, check.required) == (ok, required)


def test_doctor_reads_the_options(tmp_path: Path) -> None:
    bad, cfg = doctor.check_options({"ALTBACKEND_THREADS": "many"})
    assert (bad.ok, bad.required, cfg) == (False, True, Config())
    assert "ALTBACKEND_THREADS" in bad.finding
    unread, _ = doctor.check_options({"ALTBACKEND_THREAD": "1"})
    assert (unread.ok, unread.required) == (False, False)
    assert "ALTBACKEND_THREAD" in unread.finding
    good, cfg = doctor.check_options({"ALTBACKEND_THREADS": "2"})
    assert (good.ok, cfg.threads) == (True, 2)


# --- folders ---


def test_cache_folder_order(tmp_path: Path) -> None:
    assert cache_folder(Config(cache_dir="/a"), {"XDG_CACHE_HOME": "/x"}) == Path("/a")
    assert cache_folder(Config(), {"XDG_CACHE_HOME": "/x"}) == Path("/x/altbackend")
    assert cache_folder(Config(), {}) == Path.home() / ".cache" / "altbackend"
    assert temporary_folder().name.startswith("altbackend-")


def test_an_empty_home_is_not_the_root_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", "/"):
        monkeypatch.setenv("HOME", name)
        folder = cache_folder(Config(), {})
        assert (folder == Path("/.cache/altbackend")) == (name == "/")
        assert folder.is_absolute()


def test_a_usable_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    assert unusable_reason(tmp_path / "a" / "b") == ""
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written" in unusable_reason(tmp_path / "file")


def test_noexec_is_noticed() -> None:
    mounts = Path("/proc/mounts")
    lines = [line.split() for line in mounts.read_text().splitlines()] if mounts.exists() else []
    noexec = [Path(m[1]) for m in lines if m[2] == "tmpfs" and {"noexec", "rw"} <= set(m[3].split(","))]
    places = [path for path in noexec if os.access(path, os.W_OK)]
    if not places:
        pytest.skip("no writable file system is mounted noexec here")
    assert "noexec" in unusable_reason(places[0])


# --- config ---


def test_options_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert page == options_table.markdown_page(), "run: python -m altbackend config --markdown > docs/options.md"


def test_config_prints_what_holds_now(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ALTBACKEND_THREADS", "7")
    assert main(["config"]) == 0
    printed = capsys.readouterr().out
    assert "threads = 0; now 7\n" in printed
    assert "fuse = True\n" in printed


# --- demo ---


def tiny(model: Callable[[], nn.Module]) -> Example:
    return Example("tiny", model, lambda: torch.randn(4, 8), lambda: torch.randn(4, 8), square_loss)


def off_by(amount: float) -> Callable[[nn.Module], Any]:
    """A "compiler" whose results differ from eager's by `amount`."""
    return lambda module: lambda x: module(x) + amount


@pytest.mark.parametrize("mode", demo.MODES)
def test_a_row_measures_agreement(mode: demo.Mode) -> None:
    def row(amount: float) -> demo.Row:
        return demo.measure(tiny(lambda: nn.Linear(8, 8)), mode, off_by(amount), torch.device("cpu"), 0.0)

    assert row(0.0).error == 0.0
    assert 0.0 < row(0.0).rounding < 1e-5
    assert row(0.0).agrees
    assert not row(0.1).agrees


def test_training_starts_both_from_the_same_weights() -> None:
    row = demo.measure(
        tiny(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))),
        "training",
        off_by(0.0),
        torch.device("cpu"),
        0.0,
    )
    assert row.error == 0.0


def test_demo_runs_a_model_in_both_modes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--backend", "aot_eager", "--model", "norm-chain", "--seconds", "0"]) == 0
    printed = capsys.readouterr().out
    assert "[2/2] norm chain, training" in printed
    assert len([line for line in printed.splitlines() if line.startswith("norm chain  ")]) == 2


def test_demo_fails_where_results_are_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "EXAMPLES", {"tiny": tiny(lambda: nn.Linear(8, 8))})
    monkeypatch.setattr(demo, "backend_named", lambda name: off_by(0.1))
    assert demo.run("wrong", None, "cpu", 0.0) == 1
    assert "further from eager than rounding explains: tiny, inference; tiny, training" in capsys.readouterr().out


def test_table_lines_up() -> None:
    row = demo.Row("m", "inference", 0.002, 0.001, 0.0, 0.0, 1.0, GraphStats(1, 12, 3, 0.5))
    lines = demo.table([row, row]).splitlines()
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[2].split() == [
        "m",
        "inference",
        "2.00",
        "1.00",
        "2.00x",
        "0.0e+00",
        "0.0e+00",
        "12",
        "3",
        "0.50",
        "1.00",
    ]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_eager_models_with_gradients(name: str) -> None:
    example = EXAMPLES[name]
    torch.manual_seed(0)
    model = example.model()
    example.loss(model(example.training())).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_resnet50_is_resnet50() -> None:
    parameters = sum(p.numel() for p in EXAMPLES["resnet50"].model().parameters())
    assert parameters == 25_557_032


# --- measuring ---


@pytest.mark.parametrize(
    ("result", "reference", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([0.5], [0.0], 0.5),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([math.inf], [-math.inf], math.inf),
        ([math.inf], [math.nan], math.inf),
        ([math.inf], [math.inf], 0.0),
        ([], [], 0.0),
    ],
)
def test_relative_error(result: list[float], reference: list[float], error: float) -> None:
    assert relative_error([torch.tensor(result)], [torch.tensor(reference)]) == error


def test_relative_error_of_unlike_results_is_infinite() -> None:
    one = torch.ones(2)
    others: list[list[Tensor]] = [[], [one, one], [torch.ones(1, 2)], [one.double()]]
    assert [relative_error(other, [one]) for other in others] == [math.inf] * 4


def test_medians_take_turns() -> None:
    order: list[str] = []

    def call(name: str) -> Callable[[], list[Tensor]]:
        return lambda: order.append(name) or []  # type: ignore[func-returns-value]

    medians(call("a"), call("b"), torch.device("cpu"), 0.0)
    assert order == ["a", "b"] * 3


# --- the package ---


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=100
    )
    return done.stdout.strip()


def test_importing_the_package_imports_no_part_of_it() -> None:
    code = "import sys, altbackend; print([m for m in sys.modules if m.startswith(('altbackend.', 'torch'))])"
    assert run_python(code) == "[]"


def test_the_package_names_what_it_has() -> None:
    assert run_python("import altbackend; print(dir(altbackend))") == (
        "['__version__', 'alt', 'aot_compile', 'aot_load', 'aot_package', 'check_package', 'refresh']"
    )
    assert run_python("import altbackend; print(hasattr(altbackend, 'nothing'))") == "False"


def test_version_flag() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "altbackend", "--version"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=100,
    )
    assert printed.stdout.strip() == run_python("import altbackend; print('altbackend', altbackend.__version__)")


def test_memory_curve_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.py"
    file.write_text(
        "import torch\n"
        "def made():\n"
        "    layers = [m for _ in range(3) for m in (torch.nn.Linear(16, 16), torch.nn.Tanh())]\n"
        "    return torch.nn.Sequential(*layers), (torch.ones(64, 16),)\n"
    )
    picture = tmp_path / "curve.png"
    assert main(["memory-curve", f"{file}:made", "--points", "2", "--steps", "1", "-o", str(picture)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith(("0.", "1."))]
    assert [line[0] for line in lines] == ["1.00", "0.00"]
    assert float(lines[1][4]) < 1e-5
    assert picture.exists() == (importlib.util.find_spec("matplotlib") is not None)


@pytest.mark.parametrize(
    ("source", "says"), [("nowhere.py:f", "no Python file"), (f"{__file__}:nobody", "has no nobody")]
)
def test_a_source_that_is_not_there(source: str, says: str) -> None:
    with pytest.raises(BadOptionValue, match=says):
        named_value(source)
