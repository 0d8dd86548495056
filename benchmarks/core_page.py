"""The page benchmarks/results/coverage.md: what becomes of every core ATen operator.

`python -m benchmarks.coverage --page FILE` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.core_aten import DECOMPOSED, FAILED, GENERATED, LIBRARY, VIEW, Made, Operator, core, examined

SOME = "generated, some library"
NONE = "no sample"
CLASSES = (GENERATED, VIEW, DECOMPOSED, SOME, LIBRARY, FAILED, NONE)
MEANING = {
    GENERATED: "loops that the compiler prints itself, in every sample",
    VIEW: "index arithmetic: no kernel, no copy",
    DECOMPOSED: "only other operators are left after tracing, and none of them is a library call",
    SOME: "most samples are generated; the remark says when a library call is left",
    LIBRARY: "a kernel of torch, on purpose (matrix products, convolutions, FFT) or for want of a lowering",
    FAILED: "tracing or lowering raised",
    NONE: "nothing that eager does calls it, and no arguments are written by hand",
}
HEAD = """# Operators

Written by `python -m benchmarks.coverage --page benchmarks/results/coverage.md` (torch {torch}): every ATen operator
with the tag `core`, traced and lowered by itself with up to six calls that the samples of torch's operator
database make in eager, forward and backward. "GPU" is the same graph lowered for Triton. Operators on sizes
(`sym_size`, ...) are left out:
they never reach a graph as calls on tensors.

{meaning}

{counts}
"""


@dataclass(frozen=True)
class Row:
    operator: str
    cpu: str
    gpu: str
    source: str
    remark: str

    def __str__(self) -> str:
        cells = (f"`{self.operator}`", self.cpu, self.gpu, self.source, self.remark.replace("|", "\\|"))
        return f"| {' | '.join(cells)} |"


def row(op: Operator) -> Row:
    source, both = examined(op)
    cpu, gpu = [c for c, _ in both], [g for _, g in both]
    parts = dict.fromkeys(p for m in cpu for p in m.parts)
    library = dict.fromkeys(name for m in (*cpu, *gpu) for name in m.library if _class(cpu) != LIBRARY)
    reasons = dict.fromkeys(m.reason for m in (*cpu, *gpu) if m.reason)
    remarks = [", ".join(f"`{p}`" for p in sorted(parts))] if parts else []
    if library:
        remarks.append("library call " + ", ".join(f"`{name}`" for name in sorted(library)))
    remarks += sorted(reasons)
    return Row(str(op).removeprefix("aten."), _class(cpu), _class(gpu), source, ": ".join(remarks))


def _class(made: Sequence[Made]) -> str:
    """One class for all samples of an operator."""
    kinds = {m.kind for m in made}
    if not kinds or FAILED in kinds:
        return FAILED if kinds else NONE
    if not any(m.library for m in made):
        return DECOMPOSED if DECOMPOSED in kinds else VIEW if kinds == {VIEW} else GENERATED
    return LIBRARY if all(m.library for m in made) else SOME


def page() -> str:
    """The whole page; takes a minute."""
    rows = [row(op) for op in core()]
    table = ["| operator | CPU | GPU | arguments | remark |", "|---|---|---|---|---|", *map(str, rows)]
    meaning = "\n".join(f"- **{name}**: {MEANING[name]}" for name in CLASSES)
    head = HEAD.format(torch=torch.__version__.split("+")[0], meaning=meaning, counts=counts(rows))
    return head + "\n" + "\n".join(table) + "\n"


def counts(rows: Sequence[Row]) -> str:
    lines = ["| | " + " | ".join(CLASSES) + " | without a library call |", "|---|" + "---|" * (len(CLASSES) + 1)]
    for device in ("cpu", "gpu"):
        found = [getattr(r, device) for r in rows]
        free = sum(c in (GENERATED, VIEW, DECOMPOSED) for c in found)
        share = f"{free} of {len(rows)} ({100 * free / len(rows):.0f}%)"
        lines.append(f"| {device.upper()} | {' | '.join(str(found.count(c)) for c in CLASSES)} | {share} |")
    return "\n".join(lines)


def read(text: str) -> dict[str, str]:
    """The rows of a written page by operator."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return {line.split("`")[1]: line for line in lines}
