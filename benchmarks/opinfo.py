"""One operator of torch's own operator database, compiled and compared with eager.

Samples come from `torch.testing._internal.common_methods_invocations.op_db`. All samples of a case are compiled as one
graph, or one by one where that fails.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import altbackend
from altbackend.ir.loops import Extern
from altbackend.ir.ops import LOW_PRECISION
from altbackend.report import stats

Sample = tuple[Any, tuple[Any, ...], dict[str, Any]]
Run = Callable[[list[Sample]], list[Any]]
SEED = 1234
# A draw of three bits comes out the same with another seed every eighth time.
RESEEDINGS = 8
ROUNDINGS = 4  # that a low-precision result may have beyond twice eager's error
# the sample's input is the divisor: an integer division by zero raises on a CPU and is undefined on a GPU
DIVIDED_BY_INPUT = ("__rmod__",)
# results that eager leaves as memory was: the seed and the offset of a dropout that does not happen
UNWRITTEN = {"torch.ops.aten._efficient_attention_forward": (2, 3)}
NEIGHBOURS = 4  # samples that differ by roundings, on which eager's error is measured again
BROKEN = ("wrong", "error")  # what another backend may share


@dataclass(frozen=True)
class Case:
    """`direction`: "forward" or "backward"; `dtype`: a name in torch."""

    op: str
    dtype: str
    direction: str


@dataclass(frozen=True)
class Settings:
    """`way`: "cpu", "cuda" or "triton": the CPU's samples, kernels for a GPU in Triton's interpreter.

    `cached`: graphs come from the cache folder where it holds them; findings then name no library calls.
    """

    way: str = "cpu"
    samples: int = 16
    cubin: bool = False
    cached: bool = False

    @property
    def device(self) -> str:
        return "cuda" if self.way == "cuda" else "cpu"


@dataclass(frozen=True)
class Finding:
    """The outcome of a case."""

    case: Case
    status: str
    samples: int = 0
    library: tuple[str, ...] = ()
    detail: str = ""

    def __str__(self) -> str:
        c, more = self.case, ", ".join(self.library) if self.status in ("library", "generated") else self.detail
        return f"{self.status:13} {c.op:44} {c.dtype:9} {c.direction:8} {self.samples:3}  {more}"


@functools.cache
def database() -> dict[str, list[Any]]:
    """Operators by name, with variant as `name.variant`; of the two small databases as `hop.name`, `custom_op.name`."""
    invocations: Any = importlib.import_module("torch.testing._internal.common_methods_invocations")  # takes seconds
    # Dynamo does not capture the seeding that it wraps around random operators; `run_all` seeds instead.
    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    found: dict[str, list[Any]] = {}
    for op in invocations.op_db:
        found.setdefault(full_name(op), []).append(op)
    for kind in ("hop", "custom_op"):
        more = importlib.import_module(f"torch.testing._internal.{kind}_db")
        for op in getattr(more, f"{kind}_db"):
            op.name = f"{kind}.{op.name}"
            if not op.dtypes:  # declared for a GPU only, where the operator itself runs on a CPU too
                op.dtypes = op.backward_dtypes = {torch.float32}
            found.setdefault(full_name(op), []).append(op)
    return found


def full_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def cases_of(op: Any, dtype: str, device: str, directions: Sequence[str]) -> list[Case]:
    kind = getattr(torch, dtype)
    out = []
    if "forward" in directions and kind in op.supported_dtypes(device):
        out.append(Case(full_name(op), dtype, "forward"))
    if "backward" in directions and op.supports_autograd and kind in op.supported_backward_dtypes(device):
        out.append(Case(full_name(op), dtype, "backward"))
    return out


def check(case: Case, settings: Settings, only_aot: bool = False) -> Finding:
    """Compile a case and compare it with eager. `only_aot`: with `aot_eager`, which decides whose failure it is."""
    try:
        subject = _subject(case, settings)
    except Exception as cause:
        return Finding(case, "untraced", detail=f"no samples: {one_line(cause)}")
    if not subject.samples:
        return Finding(case, "untraced", detail="eager computes none of the samples")
    found = _examine(subject, "aot_eager" if only_aot else settings.way, settings)
    if found.status in BROKEN and not only_aot:
        other = _examine(subject, "aot_eager", settings)
        if other.status in BROKEN:
            return replace(found, status="aot_eager too", detail=f"{found.detail} | aot_eager: {other.detail}"[:600])
    return found


# --- samples ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    case: Case
    fn: Callable[..., Any]
    samples: list[Sample] = field(default_factory=list)

    def finish(self, result: Any, sample: Sample, rounded: torch.dtype | None = None) -> list[torch.Tensor]:
        """Return the results, or the gradients. `rounded`: the dtype that the cotangents are rounded to."""
        return tensors(result) if self.case.direction == "forward" else gradients(result, sample, rounded)

    def eager(self, samples: list[Sample], rounded: torch.dtype | None = None) -> list[list[torch.Tensor]]:
        held = copied(samples)
        results = run_all(self.fn, held)
        return [self.finish(r, s, rounded) for r, s in zip(results, held, strict=True)]


def _subject(case: Case, settings: Settings) -> Subject:
    """The case with the samples that eager itself computes."""
    dtype = getattr(torch, case.dtype)
    op = next(o for o in database()[case.op] if case in cases_of(o, case.dtype, settings.device, [case.direction]))
    torch.manual_seed(SEED)
    made = op.sample_inputs(settings.device, dtype, requires_grad=case.direction == "backward")
    subject = Subject(case, op.op)
    usable = []
    for sample in chosen(list(made), settings.samples):
        if case.op in DIVIDED_BY_INPUT and not dtype.is_floating_point:
            sample[0].masked_fill_(sample[0] == 0, 1)
        with contextlib.suppress(Exception):
            subject.eager([sample])
            usable.append(sample)
    return replace(subject, samples=usable)


def chosen(every: list[Any], most: int) -> list[Sample]:
    """At most `most` of the SampleInputs: a middle one, shapes that differ, largest, smallest; the last has gaps."""
    if len(every) <= most:
        return [as_sample(s) for s in every]
    by_size = sorted(range(len(every)), key=lambda k: _elements(every[k]))
    live = [k for k in by_size if _elements(every[k])] or by_size
    order = [live[len(live) // 2]]
    order += [k for k in live if len({t.shape for t in tensors(as_sample(every[k]))}) > 1][-1:]
    order += [live[-1], live[0], by_size[0], *by_size[:: max(len(every) // most, 1)], *by_size]
    picked = [as_sample(every[k]) for k in dict.fromkeys(order)][:most]
    with contextlib.suppress(Exception):  # some samples have no form with gaps between their elements
        picked[-1] = as_sample(every[order[0]].noncontiguous())
    return picked


def _elements(s: Any) -> int:
    return sum(t.numel() for t in tensors(as_sample(s)))


def as_sample(s: Any) -> Sample:
    return s.input, s.args, s.kwargs


def tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def copied(samples: list[Sample]) -> list[Sample]:
    """The samples with storage of their own, since operators may write to their arguments."""

    def copy(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.layout != torch.strided:
            return t
        held = t.detach()
        fresh = held.new_empty(0).set_(held.untyped_storage().clone(), t.storage_offset(), t.shape, t.stride())
        return fresh.requires_grad_(t.requires_grad)

    return torch.utils._pytree.tree_map(copy, samples)


def widened(sample: Sample) -> Sample:
    """The sample with floats in float64, and dtypes of 16 bits that are arguments as float64."""

    def widen(t: Any) -> Any:
        if isinstance(t, torch.dtype):
            return torch.float64 if t in LOW_PRECISION else t
        if not isinstance(t, torch.Tensor) or not t.is_floating_point():
            return t
        return t.detach().double().requires_grad_(t.requires_grad)

    return torch.utils._pytree.tree_map(widen, sample)


# --- runs ------------------------------------------------------------------------------------------------------------


def run_all(fn: Callable[..., Any], samples: list[Sample]) -> list[Any]:
    """Results of all samples, in order after one seed."""
    torch.manual_seed(SEED)
    return [fn(x, *args, **kwargs) for x, args, kwargs in samples]


def gradients(result: Any, sample: Sample, rounded: torch.dtype | None = None) -> list[torch.Tensor]:
    """Gradients of a fixed random combination of the results."""
    leaves = [t for t in tensors(list(sample)) if t.requires_grad]
    outs = [t for t in tensors(result) if t.requires_grad]
    if not outs:
        return []
    generator = torch.Generator().manual_seed(SEED + 1)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in outs]
    cast = [
        w.to(rounded if rounded and not t.is_complex() else t.dtype).to(t.device, t.dtype)
        for w, t in zip(weights, outs, strict=True)
    ]
    found = torch.autograd.grad(outs, leaves, cast, allow_unused=True)
    return [g for g in found if g is not None]


def compiled(fn: Callable[..., Any], way: str, folder: str, settings: Settings, steps: list[Any]) -> Run:
    """All samples as one graph, by the way that is asked for. `steps` collects those of the interpreted way."""

    def every(samples: list[Sample]) -> list[Any]:
        return [fn(x, *args, **kwargs) for x, args, kwargs in samples]

    if way == "aot_eager":
        return torch.compile(every, backend="aot_eager", fullgraph=True, dynamic=False)
    if way == "triton":
        path = importlib.import_module("test.triton_run")  # in a checkout only
        capabilities = (90,) if settings.cubin else ()
        return path.compiled(every, capabilities=capabilities, seen=steps, host=True)
    options: dict[str, Any] = {"strict": True, "compile_threads": 1}
    if settings.cached:
        options["cache_graphs"] = True
    else:  # these options make every graph compile
        options |= {"verify_ir": True, "debug_dir": folder}
    return torch.compile(every, backend=altbackend.alt, fullgraph=True, dynamic=False, options=options)


def _examine(subject: Subject, way: str, settings: Settings) -> Finding:
    """All samples together, or one by one where that fails."""
    found = attempt(subject, way, settings)
    if found.status not in ("error", "untraced") or len(subject.samples) == 1:
        return found
    parts = [attempt(replace(subject, samples=[s]), way, settings) for s in subject.samples]
    order = ("wrong", "error", "untraced", "library", "generated", "empty")
    status = min((p.status for p in parts), key=order.index)
    library = tuple(sorted({name for p in parts for name in p.library}))
    detail = "; ".join(f"sample {k}: {p.detail}" for k, p in enumerate(parts) if p.status == status and p.detail)[:600]
    return Finding(subject.case, status, len(parts), library, detail)


def attempt(subject: Subject, way: str, settings: Settings) -> Finding:
    """Compile the subject's samples as one graph, run it, compare."""
    torch._dynamo.reset()
    count = len(subject.samples)
    before = stats.snapshot()
    with tempfile.TemporaryDirectory() as folder:
        steps: list[Any] = []
        run = compiled(subject.fn, way, folder, settings, steps)
        try:
            held = copied(subject.samples)
            torch.manual_seed(SEED)
            results = run(held)
            got = [subject.finish(r, s) for r, s in zip(results, held, strict=True)]
            if settings.device == "cuda":
                torch.cuda.synchronize()
            if settings.cubin and (failed := importlib.import_module("test.triton_run").compile_errors()):
                raise RuntimeError(f"no machine code: {failed[0]}")
        except Exception as cause:
            untraced = is_untraced(cause)
            return Finding(subject.case, "untraced" if untraced else "error", count, (), one_line(cause))
        library = library_calls(Path(folder), steps)
    made = stats.snapshot() - before
    if difference := differs(subject, got):
        return Finding(subject.case, "wrong", count, library, difference)
    if way in ("cpu", "cuda") and not made.graphs:
        return Finding(subject.case, "empty", count, (), "no graph was compiled")
    return Finding(subject.case, "library" if library else "generated", count, library)


def is_untraced(cause: BaseException) -> bool:
    """Return whether Dynamo, not a backend, refused."""
    kind = type(cause).__module__ + "." + type(cause).__name__
    return "torch._dynamo" in kind and "BackendCompilerFailed" not in kind


def library_calls(folder: Path, steps: Sequence[Any]) -> tuple[str, ...]:
    found = {str(s.target).removesuffix(".default") for s in steps if isinstance(s, Extern)}
    for text in folder.glob("*/*kernels.txt"):
        for line in text.read_text().splitlines():
            if line.startswith("library call: "):
                found.add(line.removeprefix("library call: ").removesuffix(".default"))
    return tuple(sorted(found))


# --- comparison ------------------------------------------------------------------------------------------------------


def differs(subject: Subject, got: list[list[torch.Tensor]]) -> str:
    """Return how the results differ from eager's, or ''. What eager itself gives anew each time has statistics only."""
    for k, (mine, eager) in enumerate(zip(got, subject.eager(subject.samples), strict=True)):
        if "empty" in subject.case.op:  # whatever memory holds
            mine, eager = ([torch.zeros_like(t) for t in ts] for ts in (mine, eager))
        if subject.case.direction == "forward":
            for n in UNWRITTEN.get(subject.case.op, ()):
                mine[n], eager[n] = torch.zeros_like(mine[n]), torch.zeros_like(eager[n])
        sample = subject.samples[k]
        exact = functools.partial(_exact, subject, sample, eager)
        text = compare(mine, eager, exact, functools.partial(usual_error, subject, sample))
        if text and not (is_random(subject) and not alike(mine, eager)):
            return f"sample {k}: {text}"
    return ""


def _exact(subject: Subject, sample: Sample, eager: list[torch.Tensor]) -> list[torch.Tensor]:
    rounded = getattr(torch, subject.case.dtype)
    return subject.eager([widened(sample)], rounded)[0]


def neighbour(sample: Sample, seed: int) -> Sample:
    """The sample with every float moved by up to four roundings of its dtype."""
    (held,) = copied([sample])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for t in tensors(list(held)):
            if t.is_floating_point():
                moved = torch.rand(t.shape, generator=generator, dtype=torch.float64).to(t.device) * 8 - 4
                t.copy_(t.double() * (1 + moved * torch.finfo(t.dtype).eps))
    return held


def usual_error(subject: Subject, sample: Sample, k: int) -> float:
    """Eager's largest error in result `k` over neighbours of the sample; 0 where it has none.

    Where terms cancel, a single sample says little: the same operations may by chance round to the exact result.
    """
    errors = [0.0]
    for seed in range(NEIGHBOURS):
        with contextlib.suppress(Exception):
            near = neighbour(sample, seed)
            got, truth = subject.eager([near])[0][k].double(), _exact(subject, near, [])[k]
            live = got.isfinite() & truth.isfinite()
            errors.append(float((got - truth)[live].abs().max()))
    return max(errors)


def is_random(subject: Subject) -> bool:
    """Return whether eager gives other results with other seeds, or from whatever memory holds."""
    first = [tensors(r) for r in run_all(subject.fn, copied(subject.samples))]
    return any(_differs(first, _reseeded(subject, seed)) for seed in range(SEED + 2, SEED + 2 + RESEEDINGS))


def _reseeded(subject: Subject, seed: int) -> list[list[torch.Tensor]]:
    torch.manual_seed(seed)
    return [tensors(subject.fn(x, *args, **kwargs)) for x, args, kwargs in copied(subject.samples)]


def _differs(first: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    pairs = zip(itertools.chain(*other), itertools.chain(*first), strict=True)
    return any(a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)


def alike(mine: list[torch.Tensor], eager: list[torch.Tensor]) -> str:
    """'' when shapes and dtypes agree and means are within six standard errors, as random results' are."""
    for k, (a, b) in enumerate(zip(mine, eager, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"result {k}: {a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
        if a.numel() < 64 or a.is_complex() or not (a.double().isfinite().all() and b.double().isfinite().all()):
            continue
        x, y = a.double(), b.double()
        spread = float((x.std() + y.std()) / a.numel() ** 0.5)
        if abs(float(x.mean() - y.mean())) > 6 * spread:
            return f"result {k}: mean {float(x.mean()):.3g} instead of {float(y.mean()):.3g}"
    return ""


def compare(
    mine: list[torch.Tensor],
    eager: list[torch.Tensor],
    exact: Callable[[], list[torch.Tensor]],
    usual: Callable[[int], float] = lambda k: 0.0,
) -> str:
    """'' when equal to eager within dtype tolerances, or as near to the float64 result as eager is.

    Low precision is judged by the float64 result alone, where there is one. `usual`: eager's error in a result as
    `usual_error` measures it, asked for where this sample's is too small.
    """
    if len(mine) != len(eager):
        return f"{len(mine)} results instead of {len(eager)}"
    for k, (a, b) in enumerate(zip(mine, eager, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            return f"result {k}: {a.dtype}{list(a.shape)} on {a.device} instead of {b.dtype}{list(b.shape)}"
        if b.layout == torch.strided and b.dtype in LOW_PRECISION and (text := _far(a, b, exact, usual, k)) is not None:
            if text:
                return f"result {k}: {text}"
            continue
        try:
            torch.testing.assert_close(a, b, equal_nan=True)
        except AssertionError as difference:
            if not b.is_floating_point() or _far(a, b, exact, usual, k) != "":
                return f"result {k}: {one_line(difference)}"
    return ""


def _far(
    a: torch.Tensor,
    b: torch.Tensor,
    exact: Callable[[], list[torch.Tensor]],
    usual: Callable[[int], float],
    k: int,
) -> str | None:
    """'' when `a` is no further from the float64 result than eager's `b` twice over and some roundings.

    None where there is no such result.
    """
    if torch.equal(a, b):
        return ""
    try:
        truth = exact()[k]
    except Exception:
        return None
    if truth.shape != a.shape or not truth.is_floating_point():
        return None
    special = ~(a.isfinite() & truth.isfinite())
    if bool((special & ~_same(a, b) & ~_same(a, truth.to(a.dtype))).any()):  # where eager overflows, this may not
        return "a NaN or an infinity that is neither eager's nor the float64 result's"
    live = a.isfinite() & truth.isfinite()
    both = live & b.isfinite()
    scale = float(truth[live].abs().max()) if bool(live.any()) else 0.0
    mine = float((a.double() - truth)[live].abs().max()) if scale else 0.0
    theirs = float((b.double() - truth)[both].abs().max()) if bool(both.any()) else 0.0
    roundings = ROUNDINGS * torch.finfo(a.dtype).eps * scale
    if mine <= 2 * theirs + roundings or mine <= 2 * (theirs := max(theirs, usual(k))) + roundings:
        return ""
    return f"error {mine:.3g} of {scale:.3g}, eager's is {theirs:.3g}"


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def one_line(cause: BaseException) -> str:
    inner = getattr(cause, "inner_exception", None)
    if isinstance(inner, BaseException):
        return one_line(inner)
    lines = [" ".join(line.split()) for line in str(cause).splitlines() if line.strip()]
    text = " ".join(lines)
    if len(text) > 300 and lines:
        text = f"{text[:150]} ... {lines[-1][:150]}"
    return f"{type(cause).__name__}: {text}"


def select(names: Iterable[str], wanted: str) -> Iterator[str]:
    """Names that match the list `A,B*` of names and prefixes; all of them for an empty one."""
    patterns = [w for w in wanted.split(",") if w]
    for n in names:
        if not patterns or any(n.startswith(w[:-1]) if w.endswith("*") else n == w for w in patterns):
            yield n
