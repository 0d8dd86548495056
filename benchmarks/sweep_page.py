"""The sweep's findings as a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.cases import SWEEPS

HEAD = """# Models compiled and compared with eager

Written by `python -m benchmarks.sweep --page benchmarks/results/sweep.md` (torch {torch}). Each model is as small
as its configuration allows, with random weights and no dropout, in float32, called twice, and compiled with
`options={{"strict": True}}`: a graph that is not compiled would be a failure. "ok": the relative error of outputs,
buffers and all gradients is at most 1e-4, or the results are no further from float64 than eager's, or no further from
eager's than eager's own when its parameters move by roundings (which the last column then says). Graphs and graph
breaks are Dynamo's; kernels and library calls are of all graphs together.

{counts}
"""
TITLES = {"transformers": "transformers", "timm": "timm"}
COLUMNS = ("model", "mode", "result", "outputs", "gradients", "graphs", "breaks", "kernels", "library calls", "remark")


def figures(f: dict[str, Any]) -> tuple[str, ...]:
    """Errors, graphs, graph breaks, kernels and library calls as text."""
    gradients = "" if f.get("gradient_error") is None else f"{f['gradient_error']:.0e}"
    counts = [str(f[k]) for k in ("graphs", "graph_breaks", "kernels", "library_calls")]
    return f"{f['output_error']:.0e}", gradients, *counts


def page(found: Sequence[tuple[Any, dict[str, Any]]]) -> str:
    """All findings, (key, finding), as Markdown."""
    parts = [HEAD.format(torch=torch.__version__.split("+")[0], counts=counts(found))]
    for suite, title in TITLES.items():
        rows = sorted(((k, f) for k, f in found if k.suite == suite), key=lambda kf: (kf[0].case, kf[0].mode))
        if rows:
            parts.append(f"## {title}\n\n{table(rows)}\n")
    return "\n".join(parts)


def counts(found: Sequence[tuple[Any, dict[str, Any]]]) -> str:
    lines = []
    for suite in TITLES:
        for mode in ("training", "inference"):
            these = [f for k, f in found if (k.suite, k.mode) == (suite, mode)]
            if not these:
                continue
            good, missing = sum(f["status"] == "ok" for f in these), len(SWEEPS[suite]) - len(these)
            rest = f"; {missing} models of the table have not been run in this mode" if missing > 0 else ""
            lines.append(f"- {suite}, {mode}: {good} of {len(these)} ok{rest}")
    return "\n".join(lines)


def table(rows: Sequence[tuple[Any, dict[str, Any]]]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for key, f in rows:
        numbers = figures(f) if "graphs" in f else ("",) * 6
        remark = f["detail"][:240].replace("|", "\\|").replace("\n", " ")
        lines.append("| " + " | ".join((key.case, key.mode, f["status"], *numbers, remark)) + " |")
    return "\n".join(lines)
