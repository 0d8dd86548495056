"""The sweep of models: its tables, what counts as a failure, and whose failure it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import measure, sweep, sweep_page
from benchmarks.cases import SUITES, SWEEPS, Case, Mode
from benchmarks.cases.architectures import ABSENT, SMALL, configuration, spread, weighted_mean
from benchmarks.records import Request
from benchmarks.sweep import Key
from benchmarks.workers import ANSWER, Ended, Worker

OK = {"status": "ok", "detail": "", "seconds": 1.0, "output_error": 1e-7, "gradient_error": 2e-7}
OK |= {"graphs": 1, "graph_breaks": 0, "kernels": 3, "library_calls": 2}


def test_the_tables_are_as_wide_as_promised_and_names_are_unique() -> None:
    assert len(SWEEPS["transformers"]) >= 45
    assert len(SWEEPS["timm"]) >= 60
    every = [c.name for cases in SWEEPS.values() for c in cases]
    timed = {c.name for cases in SUITES.values() for c in cases}
    assert len(set(every)) == len(every)
    assert not timed & set(every)


class Noisy(nn.Module):
    """A layer whose answer depends on how it runs where `wrong` is set, or which raises."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "raises":
            raise RuntimeError("the model itself fails")
        if self.way == "wrong when compiled" and torch.compiler.is_compiling():
            x = x + 1
        if self.way == "nothing to compile":
            torch._dynamo.graph_break()
            return x
        return self.layer(x).relu()


@pytest.mark.parametrize(
    ("way", "status"),
    [("fine", "ok"), ("raises", "not built"), ("wrong when compiled", "differs"), ("nothing to compile", "empty")],
)
def test_one_model(way: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("noisy", lambda preset: (Noisy(way), (torch.randn(5, 4),), {}), weighted_mean)
    monkeypatch.setattr(sweep, "find", lambda name: case)
    monkeypatch.setattr(measure, "find", lambda name: case)
    mode: Mode = "inference" if status == "empty" else "training"
    found = sweep.examine(Request("noisy", "alt", mode, "tiny", task="check"))
    assert found["status"] == status, found
    if status == "ok":
        assert found["graphs"] == 1
        assert found["kernels"] > 0
        assert found["gradient_error"] < 1e-5


@pytest.mark.parametrize(("aot", "status"), [("ok", "crash"), ("error", "aot_eager too"), ("differs", "aot_eager too")])
def test_a_failure_that_aot_eager_shares_is_named_so(aot: str, status: str) -> None:
    class Fake:
        def ask(self, request: dict[str, Any], seconds: float) -> Any:
            if request["backend"] == "alt":
                return Ended(False, "exit status -11")
            return {"status": aot, "detail": "its own words"}

    args = sweep.parser().parse_args([])
    found = sweep._finding(Fake(), Key("timm", "resnet18", "training"), args)  # type: ignore[arg-type]
    assert found["status"] == status
    assert ("its own words" in found["detail"]) == (aot != "ok")


def test_resume_and_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "found.jsonl", tmp_path / "page.md"
    rows = [
        {"suite": "timm", "case": "resnet18", "mode": "training", **OK, "status": "differs"},
        {"suite": "timm", "case": "vgg11_bn", "mode": "training", **OK},
    ]
    out.write_text("".join(json.dumps(r) + "\n" for r in rows))
    asked: list[str] = []

    def answer(worker: Worker, key: Key, args: Any) -> dict[str, Any]:
        asked.append(key.case)
        return OK

    monkeypatch.setattr(sweep, "_finding", answer)
    line = ["--cases", "resnet18,vgg11_bn,repvit_m0_9", "--modes", "training", "--out", str(out), "--resume"]
    assert sweep.main(line) == 0
    assert asked == ["repvit_m0_9"]
    assert sweep.main([*line, "--retry", "--page", str(page)]) == 0
    assert asked == ["repvit_m0_9", "resnet18"]
    assert sweep.held(out)[Key("timm", "resnet18", "training")]["status"] == "ok"  # the last one counts
    assert "- timm, training: 3 of 3 ok" in page.read_text()
    assert "3 ok" not in capsys.readouterr().out


def test_the_page_says_what_failed() -> None:
    bad = {"status": "aot_eager too", "detail": "TypeError: a | b", "seconds": 2.0}
    text = sweep_page.page([(Key("timm", "m", "training"), bad), (Key("timm", "k", "training"), OK)])
    assert "| m | training | aot_eager too |  |  |  |  |  |  | TypeError: a \\| b |" in text
    assert text.index("| k |") < text.index("| m |")
    assert "1 of 2 ok" in text


def test_a_worker_answers_dies_and_starts_again() -> None:
    script = (
        "import json, os, sys\n"
        "for line in sys.stdin:\n"
        "    if json.loads(line) == 'die': print('last words', file=sys.stderr, flush=True); os._exit(3)\n"
        f"    print('noise'); print({ANSWER!r} + json.dumps(dict(heard=json.loads(line))), flush=True)\n"
    )
    worker = Worker([sys.executable, "-c", script])
    try:
        assert worker.ask("a", 30) == {"heard": "a"}
        assert worker.ask("die", 30) == Ended(False, "exit status 3 last words")
        assert worker.ask("b", 30) == {"heard": "b"}
    finally:
        worker.stop()


def test_a_small_configuration_takes_what_its_class_knows_and_drops_out_nothing() -> None:
    class Config:
        def __init__(self, hidden_size: int = 768, vocab_size: int = 30000, ffn: int = 3072, resid_drop: float = 0.1):
            self.hidden_size, self.vocab_size, self.ffn, self.resid_drop = hidden_size, vocab_size, ffn, resid_drop

    made = configuration(Config, {"ffn": 7, "vocab_size": ABSENT})
    assert (made.hidden_size, made.vocab_size, made.ffn, made.resid_drop) == (SMALL["hidden_size"], 30000, 7, 0.0)


def test_values_that_hide_mistakes_are_replaced() -> None:
    model: Any = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    nn.init.zeros_(model[2].weight)
    spread(model)
    assert model[1].p == 0.0
    assert float(model[2].weight.detach().abs().max()) > 1e-3
    assert float(model[0].running_mean.abs().max()) > 0
