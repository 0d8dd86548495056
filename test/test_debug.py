"""The trace of one compilation: timings, folder, ladder, torch's own logs."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from altbackend.config.options import Config
from altbackend.debug.torch_logs import ARTIFACTS, artifact_logger
from altbackend.debug.trace import SINKS, Decision, DecisionKind, Trace
from altbackend.errors import DebugFolderWarning


def never() -> str:
    raise AssertionError("nobody asked for this text")


def test_silent_trace_makes_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace("graph_0", Config())
    for kind in SINKS:
        trace.artifact("x.txt", never, kind)
    trace.decision(DecisionKind.FUSION, "a, b", "no", "different index")
    trace.finish()
    assert capsys.readouterr().err == ""
    assert trace.decisions == [Decision(DecisionKind.FUSION, "a, b", "no", "different index")]


def test_stages_nest_and_add_up() -> None:
    trace = Trace("graph_0", Config())
    with trace.stage("codegen"):
        for _ in range(3):
            with trace.stage("print"):
                pass
    with trace.stage("build"):
        pass
    assert list(trace.timings) == ["codegen", "codegen/print", "build"]
    assert trace.timings["codegen"] >= trace.timings["codegen/print"] > 0
    assert trace.seconds() == trace.timings["codegen"] + trace.timings["build"]


def test_a_stage_that_fails_is_timed_and_closed() -> None:
    trace = Trace("graph_0", Config())
    with pytest.raises(ValueError, match="lost"), trace.stage("lower"):
        raise ValueError("lost")
    with trace.stage("schedule"):
        pass
    assert list(trace.timings) == ["lower", "schedule"]
    assert trace.timings["lower"] > 0


def test_folder(tmp_path: Path) -> None:
    trace = Trace("graph 0/forward", Config(debug_dir=str(tmp_path / "new")))
    with trace.stage("lower"):
        trace.artifact("lowered_ir.txt", lambda: "loops")
    trace.artifact("kernel.cpp", lambda: "int x;", "kernel_code")
    trace.decision(DecisionKind.FUSION, "a, b", "yes", "same rows")
    trace.finish()
    folder = tmp_path / "new" / "graph_0_forward"
    assert trace.folder == folder
    assert sorted(path.name for path in folder.iterdir()) == [
        "00_lowered_ir.txt",
        "01_kernel.cpp",
        "decisions.txt",
        "timings.txt",
    ]
    assert (folder / "00_lowered_ir.txt").read_text() == "loops"
    assert (folder / "decisions.txt").read_text() == "fusion: a, b: yes (same rows)\n"
    assert [line.split()[0] for line in (folder / "timings.txt").read_text().splitlines()] == ["lower", "total"]


@pytest.mark.parametrize("name", ["..", "../../escape", ""])
def test_a_name_never_leaves_the_folder(tmp_path: Path, name: str) -> None:
    trace = Trace(name, Config(debug_dir=str(tmp_path)))
    trace.artifact(name, lambda: "text")
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 1
    assert tmp_path in written[0].resolve().parents[1:2]


def test_unusable_folder_warns_once_and_goes_on(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    trace = Trace("graph_0", Config(debug_dir=str(blocked)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace.artifact("a.txt", lambda: "text")
        trace.artifact("b.txt", never)
        trace.finish()
    assert [entry.category for entry in caught] == [DebugFolderWarning]


@pytest.mark.parametrize("rung", range(6))
def test_ladder(rung: int, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace("graph_0", Config(log=rung))
    with trace.stage("lower"):
        trace.artifact("ir", lambda: "IR-TEXT", "ir_pre_fusion")
        trace.artifact("graph", lambda: "GRAPH-TEXT", "graph")
        trace.artifact("source", lambda: "SOURCE-TEXT", "output_code")
    trace.decision(DecisionKind.FUSION, "a, b", "no", "REASON-TEXT")
    trace.finish()
    printed = capsys.readouterr().err
    words = {"compiled in": 1, "REASON-TEXT": 2, "GRAPH-TEXT": 3, "SOURCE-TEXT": 4, "IR-TEXT": 5}
    assert {word: word in printed for word in words} == {word: rung >= least for word, least in words.items()}


def test_torch_knows_every_artifact_name() -> None:
    import torch._logging._internal as internal  # noqa: PLC0415

    assert set(ARTIFACTS) <= internal.log_registry.artifact_names
    assert {sink.torch_log for sink in SINKS.values()} - {""} <= set(ARTIFACTS)


def test_a_torch_without_the_name_is_no_error() -> None:
    assert artifact_logger("no_such_artifact") is None


SCRIPT = """
from altbackend.config.options import Config
from altbackend.debug.trace import DecisionKind, Trace, SINKS
trace = Trace("graph_0", Config())
for kind in SINKS:
    trace.artifact(f"{kind}.txt", lambda: f"TEXT<{kind}>", kind)
trace.decision(DecisionKind.FUSION, "a", "no", "REASON<fusion>")
trace.decision("perf_hint", "a", "no", "REASON<perf_hint>")
trace.decision("schedule", "a", "no", "REASON<schedule>")
"""


def _printed(**variables: str) -> str:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH_", "ALTBACKEND_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ | variables, capture_output=True, text=True, check=True, timeout=100
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("output_code", ["TEXT<output_code>"]),
        ("kernel_code", ["TEXT<kernel_code>"]),
        (
            "post_grad_graphs,ir_pre_fusion,ir_post_fusion",
            ["TEXT<graph>", "TEXT<ir_pre_fusion>", "TEXT<ir_post_fusion>"],
        ),
        ("fusion,schedule,perf_hints", ["TEXT<schedule>", "REASON<fusion>", "REASON<perf_hint>", "REASON<schedule>"]),
    ],
)
def test_torch_logs_print_what_was_asked_and_nothing_else(setting: str, expected: list[str]) -> None:
    printed = _printed(TORCH_LOGS=setting)
    assert {piece: printed.count(piece) for piece in expected} == dict.fromkeys(expected, 1)
    assert printed.count("TEXT<") + printed.count("REASON<") == len(expected)


def test_torch_logs_say_nothing_unasked() -> None:
    assert "TEXT<" not in _printed()


def test_torch_trace_gets_the_artifacts(tmp_path: Path) -> None:
    _printed(TORCH_TRACE=str(tmp_path))
    recorded = "".join(path.read_text() for path in tmp_path.iterdir())
    assert '"altbackend_graph_0_output_code.txt"' in recorded
    assert "TEXT<output_code>" in recorded
