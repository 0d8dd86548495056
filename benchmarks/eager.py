"""python -m benchmarks.eager: operators of many kinds from the persistent cache of eager operators.

Each operator of the table runs by its original kernel, by `compile_with_persistent_cache` and torch's own runner, and
by `register`; results are compared. The second part prints the time of a look-up, and of a call, beside eager's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils import _pytree as pytree

from altbackend import eager
from altbackend.compat.pt2 import Runner
from benchmarks.options import names

aten = torch.ops.aten
T = torch.Tensor


@dataclass(frozen=True)
class Case:
    """A call: an operator, and how its arguments are made. `out`: names of arguments that it writes."""

    op: torch._ops.OpOverload
    args: Callable[[], Sequence[Any]]
    kwargs: Callable[[], Mapping[str, Any]] = field(default=dict)
    label: str = ""

    @property
    def name(self) -> str:
        """Return the operator's name, with a label for a second call of it."""
        own = str(self.op).removeprefix("aten.").removesuffix(".default")
        return f"{own} ({self.label})" if self.label else own


def _r(*sizes: int) -> T:
    return torch.randn(sizes)


def _i(*sizes: int) -> T:
    return torch.randint(0, 4, sizes)


_X = (6, 8)
_CONVOLUTION: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
_PLACE = {"dtype": torch.int64, "layout": torch.strided, "device": torch.device("cpu"), "pin_memory": False}
CASES = (
    # one tensor, several dtypes and layouts
    Case(aten.gelu.default, lambda: [_r(*_X)]),
    Case(aten.exp.default, lambda: [_r(*_X).t()], label="transposed"),
    Case(aten.sigmoid.default, lambda: [_r(*_X).bfloat16()], label="bfloat16"),
    Case(aten.neg.default, lambda: [_i(*_X)], label="int64"),
    Case(aten.logical_not.default, lambda: [_i(*_X) > 1], label="bool"),
    Case(aten.abs.default, lambda: [torch.randn(_X, dtype=torch.complex64)], label="complex64"),
    # numbers: Scalar arguments, a number in the place of a tensor
    Case(aten.add.Tensor, lambda: [_r(*_X), _r(8)], lambda: {"alpha": 2.5}, "alpha, broadcast"),
    Case(aten.add.Tensor, lambda: [_i(*_X), 1.5], label="number"),
    Case(aten.mul.Scalar, lambda: [_r(*_X), 3]),
    Case(aten.clamp.default, lambda: [_r(*_X), -0.5, 0.5]),
    Case(aten.pow.Tensor_Scalar, lambda: [_r(*_X), 3]),
    Case(aten.leaky_relu.default, lambda: [_r(*_X), 0.1]),
    # several tensors
    Case(aten.where.self, lambda: [_r(*_X) > 0, _r(*_X), _r(8)]),
    Case(aten.atan2.default, lambda: [_r(*_X), _r(*_X)]),
    Case(aten.eq.Tensor, lambda: [_i(*_X), _i(*_X)]),
    Case(aten.addcmul.default, lambda: [_r(*_X), _r(*_X), _r(*_X)], lambda: {"value": 0.5}),
    Case(aten.cat.default, lambda: [[_r(2, 3), _r(4, 3)], 0], label="list"),
    # reductions and scans
    Case(aten.sum.dim_IntList, lambda: [_i(*_X), [1], True], lambda: {"dtype": torch.float32}, "dtype"),
    Case(aten.mean.dim, lambda: [_r(*_X), [0, 1]]),
    Case(aten.amax.default, lambda: [_r(*_X), [-1]]),
    Case(aten.argmax.default, lambda: [_r(*_X), 1]),
    Case(aten.var_mean.correction, lambda: [_r(*_X), [1]], lambda: {"correction": 0}, "two results"),
    Case(aten._softmax.default, lambda: [_r(*_X), -1, False]),
    Case(aten.cumsum.default, lambda: [_r(*_X), 1]),
    Case(aten.sort.default, lambda: [_r(*_X), 1]),
    Case(aten.topk.default, lambda: [_r(*_X), 3, 1]),
    # indices
    Case(aten.index_select.default, lambda: [_r(*_X), 0, _i(5)]),
    Case(aten.gather.default, lambda: [_r(*_X), 0, _i(3, 8)]),
    Case(aten.scatter_add.default, lambda: [_r(*_X), 0, _i(3, 8), _r(3, 8)]),
    Case(aten.embedding.default, lambda: [_r(10, 4), _i(5)]),
    # products, convolutions, pooling, normalisation
    Case(aten.mm.default, lambda: [_r(6, 8), _r(8, 5)]),
    Case(aten.addmm.default, lambda: [_r(5), _r(6, 8), _r(8, 5)]),
    Case(aten.convolution.default, lambda: [_r(1, 3, 8, 8), _r(4, 3, 3, 3), _r(4), *_CONVOLUTION]),
    Case(aten.max_pool2d_with_indices.default, lambda: [_r(1, 3, 8, 8), [2, 2]]),
    Case(aten.native_layer_norm.default, lambda: [_r(*_X), [8], _r(8), _r(8), 1e-5]),
    # dtype, layout, device and memory format as arguments
    Case(aten._to_copy.default, lambda: [_r(*_X)], lambda: {"dtype": torch.float64}, "dtype"),
    Case(aten.full_like.default, lambda: [_r(*_X), 2.0], lambda: dict(_PLACE), "dtype, layout, device"),
    Case(aten.clone.default, lambda: [_r(1, 3, 4, 4)], lambda: {"memory_format": torch.channels_last}, "memory format"),
    # results that the caller gives
    Case(aten.exp.out, lambda: [_r(*_X)], lambda: {"out": torch.empty(_X)}),
    Case(aten.mul.out, lambda: [_r(*_X), _r(8)], lambda: {"out": torch.empty(_X)}),
    Case(aten.add_.Tensor, lambda: [_r(*_X), _r(*_X)], label="in place"),
)


def stored(case: Case) -> str:
    """Run a call by the library of `compile_with_persistent_cache`; return how it differs from eager, or ""."""
    args, kwargs = _made(case)
    copies = _cloned((args, kwargs))
    ns, name = str(case.op).split(".", 1)
    try:
        path = eager.compile_with_persistent_cache(ns, name, "cpu", False, case.op, args, kwargs)
    except Exception as cause:  # torch.export raises errors of many types
        return f"{type(cause).__name__}: {str(cause).splitlines()[0]}"
    want = pytree.tree_leaves(case.op(*copies[0], **copies[1]))
    got = Runner(Path(path)).run([x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, T)])
    return difference(got, want)


def registered(case: Case) -> str:
    """Run a call three times after `register`; return how one differs from eager, or that none was compiled, or ""."""
    args, kwargs = _made(case)
    first = _cloned((args, kwargs))
    want = pytree.tree_leaves(case.op(*first[0], **first[1]))
    before = set(eager._loaded)
    eager.register([case.op])
    for _ in range(3):
        given = _cloned((args, kwargs))
        results = case.op(*given[0], **given[1])
        if reason := difference(pytree.tree_leaves(results), want):
            return reason
        written = kwargs.get("out")
        if written is not None and results is not given[1]["out"]:
            return "the result is not the tensor of out="
    return "" if set(eager._loaded) - before else "it stays with the original kernel"


def difference(got: Sequence[Any], want: Sequence[Any]) -> str:
    """Return the first difference in dtype, sizes, strides or values, or ""."""
    if len(got) != len(want):
        return f"{len(got)} results instead of {len(want)}"
    for a, b in zip(got, want, strict=True):
        if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
            return f"{a.dtype}{list(a.shape)} by {a.stride()} instead of {b.dtype}{list(b.shape)} by {b.stride()}"
        try:
            torch.testing.assert_close(a, b, equal_nan=True)
        except AssertionError as cause:
            return str(cause).splitlines()[0]
    return ""


def _made(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    return tuple(case.args()), dict(case.kwargs())


def _cloned(tree: Any) -> Any:
    return pytree.tree_map_only(T, lambda t: t.clone(memory_format=torch.preserve_format), tree)


# --- time


def look_ups(rounds: int) -> None:
    """Print the microseconds of a look-up and of a call, beside eager's."""
    some: dict[str, tuple[Case, Callable[[], Any]]] = {}
    for case in CASES:
        if case.name in ("gelu", "add.Tensor (alpha, broadcast)", "native_layer_norm"):
            args, kwargs = _made(case)
            some[case.name] = (case, lambda c=case, a=args, k=kwargs: c.op(*a, **k))  # type: ignore[misc]
    print("\n| operator | look-up, us | call, us | eager's call, us |\n|---|---|---|---|")
    for name, (case, call) in some.items():
        args, kwargs = _made(case)
        what = f"{case.op._schema.name}.{case.op._overloadname}"
        look = _microseconds(partial(_look_up, what, args, kwargs), rounds)
        ours = _microseconds(call, rounds)
        eager._inside.busy = True  # the registered kernel then calls the original
        theirs = _microseconds(call, rounds)
        eager._inside.busy = False
        print(f"| {name} | {look:.1f} | {ours:.1f} | {theirs:.1f} |")


def _look_up(what: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Runner:
    forms = eager._forms(args, kwargs)
    assert not isinstance(forms, str)
    return eager._loaded[what, forms]


def _microseconds(f: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return median(times) * 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of operators and the times; return 1 if an operator is wrong or not compiled."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.eager", description="Operators from the persistent cache.")
    p.add_argument("--cases", type=names, default=[], metavar="A,B", help="only these operators")
    p.add_argument("--rounds", type=int, default=2000, help="calls of each timing")
    options = p.parse_args(argv)
    chosen = [c for c in CASES if not options.cases or c.name in options.cases]
    print("| operator | stored | registered |\n|---|---|---|")
    right = 0
    for case in chosen:
        outcomes = [f(case) for f in (stored, registered)]
        right += not any(outcomes)
        print(f"| {case.name} | {outcomes[0] or 'equal'} | {outcomes[1] or 'equal'} |", flush=True)
    print(f"\n{right} of {len(chosen)} operators run compiled and give eager's results.")
    if not options.cases:
        look_ups(options.rounds)
    return int(right < len(chosen))


if __name__ == "__main__":
    raise SystemExit(main())
