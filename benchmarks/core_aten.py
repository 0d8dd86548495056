"""The outcome of every core ATen operator: a generated kernel, a view, a library call, or other operators.

Arguments are those that the samples of torch's operator databases hand to the operator in eager, forward and backward;
the operator alone is traced as the backend traces, lowered, and looked at. Nothing is run, so that the path of a GPU
can be seen without one.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from altbackend import decomp, fx_passes
from altbackend.compat import aot_autograd
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.ir.loops import Extern
from altbackend.lowering.graph import lower_graph
from altbackend.runtime import philox
from benchmarks.opinfo import Case, Settings, _subject, database, one_line

GENERATED, VIEW, LIBRARY, DECOMPOSED, FAILED = "generated kernel", "view", "library call", "decomposed", "not compiled"
DTYPES = ("float32", "int64", "bool")
MOST = 6  # samples of an operator
aten = torch.ops.aten
Operator = torch._ops.OpOverload
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Made:
    """The outcome of one sample. `parts`: operators it was decomposed into; `library`: calls left, for `reason`."""

    kind: str
    parts: tuple[str, ...] = ()
    library: tuple[str, ...] = ()
    reason: str = ""


def core() -> list[Operator]:
    """Operators with the tag `core`, without those on sizes, which never reach a graph as calls on tensors."""
    found = []
    # `dir(aten)` knows only what somebody has asked for
    registered = torch._C._dispatch_get_all_op_names()
    for name in sorted({n.removeprefix("aten::").split(".")[0] for n in registered if n.startswith("aten::")}):
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            op = getattr(packet, overload)
            if torch.Tag.core in op.tags and not name.startswith("sym_"):
                found.append(op)
    return found


# --- arguments -------------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Keeps the first arguments of every operator that eager calls, as copies without data."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[Operator, list[Arguments]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        seen = self.held.setdefault(func, [])
        plain = all(
            t.layout == torch.strided for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        )
        if len(seen) < MOST and plain:
            seen.append(pytree.tree_map_only(torch.Tensor, _on_meta, (args, kwargs)))
        return func(*args, **kwargs)


def _on_meta(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


@cache
def recorded(name: str) -> dict[Operator, list[Arguments]]:
    """Return the operators that one entry's samples call, forward and backward, in the first dtype that it takes."""
    for dtype in DTYPES:
        recorder = Recorder()
        for direction in ("forward", "backward"):
            with contextlib.suppress(Exception), warnings.catch_warnings():  # not in this dtype, or not differentiable
                warnings.simplefilter("ignore")
                subject = _subject(Case(name, dtype, direction), Settings("cpu", MOST))
                with recorder:
                    subject.eager(subject.samples)
        if recorder.held:
            return recorder.held
    return {}


def sources(op: Operator) -> list[str]:
    """Entries of the databases that may call an operator, the likeliest first."""
    base = op._schema.name.split("::")[1]
    plain = base.removeprefix("_").removesuffix("_backward").removesuffix("_forward")
    wanted = (base, plain, f"nn.functional.{plain}", *BY_HAND_SOURCES.get(base, ()))
    return [n for n in dict.fromkeys(wanted) if n in database()]


# operators whose name is in no entry's
BY_HAND_SOURCES: dict[str, tuple[str, ...]] = {
    "_to_copy": ("to", "float"),
    "_embedding_bag": ("nn.functional.embedding_bag",),
    "_fft_r2c": ("fft.rfft",),
    "_fft_c2r": ("fft.irfft",),
    "_local_scalar_dense": ("item",),
    "_log_softmax": ("log_softmax",),
    "_native_batch_norm_legit": ("nn.functional.batch_norm",),
    "_native_batch_norm_legit_no_training": ("nn.functional.batch_norm",),
    "_pdist_forward": ("nn.functional.pdist",),
    "arange": ("arange",),
    "col2im": ("nn.functional.fold",),
    "constant_pad_nd": ("nn.functional.pad.constant",),
    "convolution": ("nn.functional.conv2d",),
    "convolution_backward": ("nn.functional.conv2d",),
    "elu": ("nn.functional.elu",),
    "embedding_dense_backward": ("nn.functional.embedding",),
    "grid_sampler_2d": ("nn.functional.grid_sample",),
    "index": ("__getitem__",),
    "native_group_norm": ("nn.functional.group_norm",),
    "native_group_norm_backward": ("nn.functional.group_norm",),
    "native_layer_norm_backward": ("nn.functional.layer_norm",),
    "reflection_pad1d": ("nn.functional.pad.reflect",),
    "reflection_pad2d": ("nn.functional.pad.reflect",),
    "reflection_pad3d": ("nn.functional.pad.reflect",),
    "replication_pad2d": ("nn.functional.pad.replicate",),
    "replication_pad3d": ("nn.functional.pad.replicate",),
    "max_pool2d_with_indices": ("nn.functional.max_pool2d",),
    "max_pool2d_with_indices_backward": ("nn.functional.max_pool2d",),
    "max_pool3d_with_indices": ("nn.functional.max_pool3d",),
    "split_with_sizes": ("split_with_sizes", "split"),
    "empty_strided": ("new_empty_strided",),
    "copy": ("copysign",),
}


def given(*shapes: tuple[int, ...], **kwargs: Any) -> Arguments:
    return tuple(torch.empty(s, device="meta") for s in shapes), kwargs


def with_more(shape: tuple[int, ...], *more: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Arguments:
    return (torch.empty(shape, dtype=dtype, device="meta"), *more), kwargs


@cache
def by_hand() -> Mapping[str, Arguments]:
    """Arguments of operators that eager itself does not call."""
    x, i = (4, 6), torch.int64
    some = torch.empty(2, 3, 8, 8, device="meta")
    indices = torch.empty(4, 3, dtype=torch.int64, device="meta")
    return {
        "bitwise_and.Scalar": with_more(x, 5, dtype=i),
        "bitwise_or.Scalar": with_more(x, 5, dtype=i),
        "bitwise_xor.Scalar": with_more(x, 5, dtype=i),
        "add.Scalar": with_more(x, 2.0),
        "sub.Scalar": with_more(x, 2.0),
        "mul.Scalar": with_more(x, 2.0),
        "div.Scalar": with_more(x, 2.0),
        "div.Scalar_mode": with_more(x, 2.0, rounding_mode="floor"),
        "copy.default": given(x, x),
        "fill.Scalar": with_more(x, 2.0),
        "native_dropout.default": with_more(x, 0.5, True),
        "select_scatter.default": ((*given(x, (6,))[0], 0, 1), {}),
        "slice_scatter.default": ((*given(x, (2, 6))[0], 0, 1, 3), {}),
        "remainder.Scalar": with_more(x, 2.0),
        "scalar_tensor.default": ((2.0,), {}),
        "upsample_nearest2d.vec": ((some, None, [2.0, 2.0]), {}),
        "upsample_bilinear2d.vec": ((some, None, False, [2.0, 2.0]), {}),
        "repeat.default": with_more(x, [2, 1, 3]),
        "rand.default": (([4, 6],), {}),
        "randn.default": (([4, 6],), {}),
        "randperm.default": ((8,), {}),
        "full.default": (([4, 6], 2.0), {}),
        "any.dims": with_more(x, [0, 1], dtype=torch.bool),
        "squeeze.dims": with_more((1, 4, 1), [0, 2]),
        "var.dim": with_more(x, [1]),
        "_adaptive_avg_pool3d.default": with_more((2, 3, 4, 4, 4), [2, 2, 2]),
        "_cdist_forward.default": ((*given((4, 3), (5, 3))[0], 2.0, None), {}),
        "_native_batch_norm_legit.no_stats": ((some, None, None, True, 0.1, 1e-5), {}),
        "view.default": with_more(x, [6, 4]),
        "alias.default": with_more(x),
        "prod.default": with_more(x),
        "argmax.default": with_more(x, 1),
        "atan2.out": (given(x, x)[0], {"out": torch.empty(x, device="meta")}),
        "_native_batch_norm_legit_no_training.default": ((some, *given((3,), (3,), (3,), (3,))[0], 0.1, 1e-5), {}),
        "adaptive_avg_pool1d.default": with_more((2, 3, 8), [4]),
        "avg_pool1d.default": with_more((2, 3, 8), [2]),
        "clamp.default": with_more(x, -1.0, 1.0),
        "col2im.default": with_more((2, 12, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
        "div.Tensor": given(x, (6,)),
        "div.Tensor_mode": given(x, (6,), rounding_mode="floor"),
        "max.dim": with_more(x, 1),
        "min.dim": with_more(x, 1),
        "pow.Tensor_Scalar": with_more(x, 2.5),
        "pow.Scalar": ((2.0, *given(x)[0]), {}),
        "scatter_reduce.two": ((*given(x)[0], 1, indices, *given((4, 3))[0], "amax"), {}),
        **{f"{name}.Scalar": with_more(x, 2.0) for name in ("eq", "ne", "lt", "le", "gt", "ge", "fmod")},
        "empty.memory_format": (([4, 6],), {}),
        "arange.start_step": ((0, 10, 2), {}),
        "where.self": ((torch.empty(x, dtype=torch.bool, device="meta"), *given(x, x)[0]), {}),
    }


# --- one operator ----------------------------------------------------------------------------------------------------


def look(op: Operator, arguments: Arguments) -> tuple[Made, Made]:
    """A call of `op` on CPU tensors like `arguments`, traced and lowered: for a CPU, and for a GPU."""
    seen: list[tuple[Made, Made]] = []
    leaves, spec = pytree.tree_flatten(arguments)
    leaves = [torch.device("cpu") if isinstance(x, torch.device) else x for x in leaves]

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        targets = [n.target for n in gm.graph.nodes if n.op == "call_function" and isinstance(n.target, Operator)]
        cfg = resolve(options={"strict": True})
        gm = fx_passes.finish(fx_passes.post_grad(gm, cfg, Trace("core", cfg)), cfg)
        seen.append((_made(op, gm, targets, on_gpu=False), _made(op, gm, targets, on_gpu=True)))
        return gm

    try:
        with FakeTensorMode(shape_env=ShapeEnv()), aot_autograd.functorch_settings():
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
            fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in tensors]
            aot_autograd.aot_autograd(
                fw_compiler=keep,
                inference_compiler=keep,
                decompositions=decomp.table(),
                keep_inference_input_mutations=True,
            )(_graph(op, leaves, spec), fakes)
    except Exception as cause:
        return (Made(FAILED, reason=one_line(cause)),) * 2
    return seen[0]


def _graph(op: Operator, leaves: Iterable[Any], spec: Any) -> torch.fx.GraphModule:
    """A graph of one call, whose tensors are its inputs."""
    graph = torch.fx.Graph()
    held = [graph.placeholder(f"x{k}") if isinstance(x, torch.Tensor) else x for k, x in enumerate(leaves)]
    args, kwargs = pytree.tree_unflatten(held, spec)
    call = graph.call_function(op, tuple(args), kwargs)
    returned = len(op._schema.returns)
    if returned > 1:
        graph.output(tuple(graph.call_function(operator.getitem, (call, k)) for k in range(returned)))
    else:
        graph.output(call if isinstance(op._schema.returns[0].type, torch.ListType) else (call,))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _made(op: Operator, gm: torch.fx.GraphModule, targets: list[Operator], on_gpu: bool) -> Made:
    reasons: list[str] = []
    program, _ = lower_graph(gm, resolve(), lambda kind, subject, verdict, reason: reasons.append(reason), on_gpu)
    calls = [n.target for n in program.nodes if isinstance(n, Extern)]
    library = tuple(sorted({_name(c) for c in calls if c is not philox.philox_seeds}))
    parts = () if op in targets else tuple(sorted({_name(t) for t in targets}))
    computes = any(not isinstance(n, Extern) for n in program.nodes)
    kind = DECOMPOSED if parts else LIBRARY if library else GENERATED if computes else VIEW
    return Made(kind, parts, library, "; ".join(dict.fromkeys(reasons)) if library else "")


def _name(target: Any) -> str:
    if isinstance(target, Operator):
        return str(target).removeprefix("aten.").removesuffix(".default")
    return getattr(target, "__name__", type(target).__name__)


def examined(op: Operator) -> tuple[str, list[tuple[Made, Made]]]:
    """(where the arguments are from, what became of each sample); no samples where nothing calls the operator."""
    for name in sources(op):
        if found := recorded(name).get(op):
            return name, [look(op, a) for a in found]
    if (a := by_hand().get(str(op).removeprefix("aten."))) is not None:
        return "by hand", [look(op, a)]
    return "", []
