"""Programs run as eager does, compiled anew, after a reset of Dynamo, and in another process from the cache.

A program's calls each make their own inputs. What a call shows is noted down: values, dtypes, geometry and gradients.
So is which results share memory with inputs and with each other, and all memory behind the inputs afterwards. The first
process compiles and so fills a cache folder. A child then runs the same programs once more from it.

    python -m test.ways MODULE:LIST FOLDER FILE THREADS [NAME...]  # what the child runs; it writes its notes to FILE
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from altbackend.debug.trace import Trace
from test import fresh
from test.compare import as_list

Inputs = Callable[[], list[Any]]
Noted = list[dict[str, Any]]


@dataclass(frozen=True)
class Program:
    """`calls` make the inputs of one call each. `grad`: results are differentiated by all inputs that need it."""

    name: str
    fn: Callable[..., Any]
    calls: tuple[Inputs, ...]
    grad: bool = False
    dynamic: bool | None = False
    options: Mapping[str, Any] = field(default_factory=dict)


def notes(program: Program, fn: Callable[..., Any]) -> Noted:
    """Return the outcome of each call of a program, `fn` being the program or a compiled form of it."""
    return [_call(program, fn, make()) for make in program.calls]


def _call(program: Program, fn: Callable[..., Any], inputs: list[Any]) -> dict[str, Any]:
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    before = [x._version for x in tensors if not x.is_inference()]
    try:
        results = [r for r in as_list(fn(*inputs)) if r is not None]
        found = [r for r in results if isinstance(r, torch.Tensor)]
        out = {
            "results": [_plain(r) for r in found],
            "numbers": [r for r in results if not isinstance(r, torch.Tensor)],
            "geometry": [_geometry(r) for r in found],
            "gradients wanted": [r.requires_grad for r in found],
            "shared": _shared(found, tensors),
            "memory": [_memory(x) for x in tensors],
            "written": [
                x._version > v for x, v in zip((x for x in tensors if not x.is_inference()), before, strict=True)
            ],
        }
        if program.grad:
            out["gradients"] = _gradients(found, tensors)
    except Exception as cause:  # an error is something that a call shows
        return {"error": type(cause).__name__, "text": str(cause)[:400]}
    return out


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.detach().resolve_conj().resolve_neg().clone()


def _geometry(x: torch.Tensor) -> tuple[Any, ...]:
    """dtype, sizes, strides of dimensions that have more than one point."""
    live = [s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1] if x.numel() else []
    return str(x.dtype), tuple(x.shape), live


def _shared(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[tuple[str, str, int]]:
    """Return which results share storage with inputs and earlier results, and their distance in bytes."""
    named = [(f"input {k}", x) for k, x in enumerate(inputs)] + [(f"result {k}", x) for k, x in enumerate(results)]
    value_ = [(name, x.untyped_storage().data_ptr(), x.data_ptr()) for name, x in named if x.numel()]
    return [
        (b, a, at - first)
        for k, (b, storage, at) in enumerate(value_)
        for a, other, first in value_[:k]
        if storage == other and b.startswith("result")
    ]


def _memory(x: torch.Tensor) -> torch.Tensor:
    """All elements of the storage behind a tensor."""
    held = x.detach().untyped_storage()
    count = held.nbytes() // x.dtype.itemsize
    return torch.empty(0, dtype=x.dtype).set_(held, 0, (count,), (1,)).clone()


def _gradients(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Any]:
    live = [r for r in results if r.requires_grad]
    leaves = [_root(x) for x in inputs if x.requires_grad]
    if not live or not leaves:
        return []
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in live]
    grads = torch.autograd.grad(live, leaves, weights, allow_unused=True)
    return [None if g is None else _plain(g) for g in grads]


def _root(x: torch.Tensor) -> torch.Tensor:
    """The leaf that a test has noted on an input, else the input."""
    return getattr(x, "leaf", x)


# --- comparison ------------------------------------------------------------------------------------------------------


def disagreement(got: Noted, want: Noted) -> str:
    """Return how two runs of a program differ, or "". An error counts as equal to any other error."""
    wrong = []
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        if "error" in g and "error" in w:
            continue
        if "error" in g or "error" in w:
            wrong.append(f"call {k}: {g.get('error', 'no error')} ({g.get('text', '')}), wanted {w.get('error')}")
            continue
        wrong += [f"call {k}: {name}: {text}" for name in w if (text := _differ(g[name], w[name]))]
    return "\n".join(wrong)


def _differ(got: Any, want: Any) -> str:
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        try:
            torch.testing.assert_close(got, want, equal_nan=True)
        except AssertionError as cause:
            return f"{str(cause).splitlines()[0]} {_short(got)} for {_short(want)}"
        return ""
    if isinstance(want, list) and isinstance(got, list) and len(got) == len(want):
        return "; ".join(
            f"{k}: {text}" for k, (g, w) in enumerate(zip(got, want, strict=True)) if (text := _differ(g, w))
        )
    return "" if got == want else f"{got} for {want}"


def _short(x: torch.Tensor) -> str:
    return str(x.flatten()[:12].tolist())


# --- ways ------------------------------------------------------------------------------------------------------------


def compiled(program: Program, folder: Path) -> Callable[..., Any]:
    torch._dynamo.reset()
    options = {"strict": True, "repro": "never", "cache_graphs": True, "cache_dir": str(folder), **program.options}
    return torch.compile(program.fn, backend="alt", dynamic=program.dynamic, options=options)


class Verdicts:
    """The verdicts on warm starts of graphs while the context is active, or on decisions of other `kinds`."""

    def __init__(self, *kinds: str) -> None:
        self.found: list[tuple[str, str]] = []
        self.kinds = kinds or ("warm start",)

    def __enter__(self) -> Verdicts:
        record: Any = Trace.decision
        self.record: Any = record

        def decision(trace: Trace, kind: str, subject: str, verdict: str, reason: str) -> None:
            record(trace, kind, subject, verdict, reason)
            if kind in self.kinds:
                self.found.append((verdict, reason))

        Trace.decision = decision  # type: ignore[assignment, method-assign]
        return self

    def __exit__(self, *rest: object) -> None:
        Trace.decision = self.record  # type: ignore[method-assign]


WAYS = ("cold", "after a reset", "in another process")


@dataclass(frozen=True)
class Everywhere:
    """The outcomes of programs by way and name, and the verdicts on their graphs in the other process."""

    noted: Mapping[str, Mapping[str, Noted]]
    verdicts: Mapping[str, Sequence[tuple[str, str]]]

    def wrong(self, program: Program) -> str:
        """Return how the ways differ from eager."""
        want = notes(program, program.fn)
        found = {way: disagreement(self.noted[way][program.name], want) for way in WAYS}
        return "\n".join(f"{way}: {text}" for way, text in found.items() if text)


def everywhere(where: str, folder: Path, names: Sequence[str] = ()) -> Everywhere:
    """All ways of the programs of a list, `module:name` or `module:function(numbers)`, with `folder` as their cache.

    `names`: those of the programs that run; all where it is empty.
    """
    noted: dict[str, dict[str, Noted]] = {way: {} for way in WAYS}
    for program in programs_of(where, names):
        for way in WAYS[:2]:
            noted[way][program.name] = notes(program, compiled(program, folder))
    file = folder / "noted.pt"
    words = ["-m", "test.ways", where, str(folder), str(file), str(torch.get_num_threads()), *names]
    done = fresh.run(words, timeout=300)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    found = torch.load(file, weights_only=True)
    noted[WAYS[2]] = {name: value_ for name, (value_, _) in found.items()}
    return Everywhere(noted, {name: verdicts for name, (_, verdicts) in found.items()})


def once(where: str, request: pytest.FixtureRequest) -> Everywhere:
    """`everywhere` for all workers of a test run: the first one computes it, and the others read its file.

    Only the programs of cases that run are compiled.
    """
    base = request.getfixturevalue("tmp_path_factory").getbasetemp()
    cases = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    programs: list[Any] = [case.callspec.params["program"] for case in cases if "program" in case.fixturenames]
    names = [program.name for program in programs]
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / where.replace(":", "-")
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        file = folder / "everywhere.pickle"
        if not file.exists():
            (folder / "kept").mkdir()
            found = everywhere(where, folder / "kept", names)
            file.write_bytes(pickle.dumps(found))
            return found
        shared: Everywhere = pickle.loads(file.read_bytes())
        return shared


def programs_of(where: str, names: Sequence[str] = ()) -> list[Program]:
    module, _, name = where.partition(":")
    value_: Any = importlib.import_module(module)
    found = getattr(value_, name.partition("(")[0])
    programs = found(*map(int, name.partition("(")[2].rstrip(")").split(","))) if "(" in name else found
    return [program for program in programs if not names or program.name in names]


def main() -> None:
    where, folder, file, threads, *names = sys.argv[1:]
    torch.set_num_threads(int(threads))  # which graphs' keys hold
    out = {}
    for program in programs_of(where, names):
        with Verdicts() as seen:
            noted = notes(program, compiled(program, Path(folder)))
        out[program.name] = (noted, seen.found)
    torch.save(out, file)


if __name__ == "__main__":
    main()
