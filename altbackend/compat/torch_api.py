"""Differences between torch versions, and torch's private names. No other module knows them."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import sympy
import torch
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.backends import cuda
from torch.compiler._cache import CacheArtifact as CacheArtifact
from torch.compiler._cache import CacheArtifactFactory as CacheArtifactFactory
from torch.compiler._cache import CacheArtifactManager as CacheArtifactManager
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.symbol import SymT, symbol_is_type

from altbackend.lazy_dataclass import dataclass

if TYPE_CHECKING:  # importing AOTAutograd takes longer than a warm start
    from torch._functorch._aot_autograd.schemas import MemoryFormatMeta as MemoryFormatMeta
    from torch._functorch._aot_autograd.schemas import OutputAliasInfo as OutputAliasInfo
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta as ViewAndMutationMeta

Result = TypeVar("Result")


def unannotated(fn: Callable[..., Result]) -> Callable[..., Result]:
    """Return `fn`, a function of torch without annotations, such that a strict type checker accepts calls of it."""
    return fn


def untraced(fn: Callable[..., Result]) -> Callable[..., Result]:
    """Return `fn`, such that Dynamo calls it without tracing it. A call then takes 3 us longer."""
    disable: Callable[..., Callable[..., Result]] = torch._dynamo.disable
    return disable(fn, reason="altbackend: compilers and what they return are not traced")


def unseen(fn: Callable[..., Result]) -> Callable[..., Result]:
    """Return `fn` itself, such that Dynamo neither traces it nor what it calls. A call takes no longer.

    Only for functions of this package: the mark is on the code, which all functions of one definition share.
    """
    skip_frames(fn)
    vars(fn)["_torchdynamo_disable"] = True
    vars(fn)["_torchdynamo_disable_msg"] = "altbackend: compiled graphs are not traced"
    return fn


def skip_frames(fn: Callable[..., object]) -> None:
    """Keep Dynamo from tracing `fn` and what it calls where C++ calls it. Dynamo still traces calls in traced code."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(fn.__code__, frames._FrameExecStrategy(skip, skip))


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., tuple[object, ...]]:
    """Return `function.apply` for calls outside of the transforms of torch.func.

    `apply` itself asks each input whether a transform that has ended wrapped it, which takes 0.5 us an input.
    """
    apply: Callable[..., tuple[object, ...]] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


record_gradients: Callable[[bool], None] = torch._C._set_grad_enabled


def version() -> tuple[int, int]:
    """Return (major, minor) of the running torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def triton_version() -> str:
    """Return the version of Triton, or "". Neither imports Triton nor lists installed packages, which is slow."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return ""
    text = Path(spec.origin).read_text(encoding="utf-8")
    match = re.search(r"""^__version__ = ['"]([^'"]+)['"]""", text, re.MULTILINE)
    return match.group(1) if match else hashlib.sha256(text.encode()).hexdigest()[:12]


def libgomp() -> Path | None:
    """Return the path of torch's OpenMP library. Generated code links to it, so that both use one thread pool."""
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for path in sorted(folder.glob("libgomp*.so*")):
            return path
    return None


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Disable cyclic garbage collection: during a compilation it takes a third of the time and finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def storage_of(x: object) -> int | None:
    """Return a value that equals that of every view of the same storage, fake tensors included; None if not strided."""
    return x.untyped_storage()._cdata if isinstance(x, torch.Tensor) and x.layout == torch.strided else None


@functools.cache
def float8_saturates() -> bool:
    """Return whether large numbers saturate to the largest float8_e4m3fn (torch 2.13) or become NaN (torch 2.11)."""
    return float8_code(1e9, torch.float8_e4m3fn) != 0x7F


def float8_code(number: float, dtype: torch.dtype) -> int:
    """Return the bits of a number as an 8-bit float, as torch rounds it. Works while a graph is traced."""
    with _disable_current_modes():
        return int(torch.tensor(number).to(dtype).view(torch.uint8).item())


def keeps_unread_random() -> bool:
    """Return whether random calls with unused results stay: torch's tracing removes them."""
    return torch._guards.TracingContext.try_get() is None


def real_tensors() -> contextlib.AbstractContextManager[object]:
    """Compute on real tensors while a tracer's fake mode is active, as it is inside a backend."""
    return unset_fake_temporarily()


def swap_contents(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Exchange what two tensor objects hold, whoever refers to them. Return whether torch allowed it.

    `torch.utils.swap_tensors` does the same, but refuses tensors with weak references, which Dynamo's guards are.
    """
    try:
        torch._C._swap_tensor_impl(a, b)
    except RuntimeError:
        return False
    return True


def has_symbolic_geometry(t: torch.Tensor) -> bool:
    """Return whether a traced tensor has a symbolic size or stride."""
    return bool(t._has_symbolic_sizes_strides)


def size_range(shape_env: ShapeEnv, symbol: sympy.Symbol) -> object:
    """Return the least and the greatest value of a size, as tracing knows them."""
    return shape_env.bound_sympy(symbol)


def size_conditions(shape_env: ShapeEnv) -> list[sympy.Basic]:
    """Return the conditions on sizes that tracing has found or assumed, as boolean sympy expressions."""
    deferred = [check.expr for checks in shape_env.deferred_runtime_asserts.values() for check in checks]
    return [guard.expr for guard in shape_env.guards] + deferred


def size_assumptions(shape_env: ShapeEnv) -> tuple[str, ...]:
    """Return a snapshot of all that `shape_env` has concluded. A graph is valid only if it holds."""
    replaced = [f"{s} = {e}" for s, e in shape_env.replacements.items()]
    ranges = [f"{s} in {r}" for s, r in shape_env.var_to_range.items()]
    return (*map(str, size_conditions(shape_env)), *replaced, *ranges)


def gpu_in_use() -> bool:
    """Return whether this process has begun to use a GPU."""
    return bool(unannotated(torch.cuda.is_initialized)())


def cuda_capability(device: torch.device) -> int:
    """Return the compute capability as one number, 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


class Attention(NamedTuple):
    """Fake operands and settings of a call of `scaled_dot_product_attention`. `grouped`: heads share keys."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    grouped: bool


def fuses_attention(call: Attention) -> bool:
    """Return whether torch computes an attention by a fused kernel, not by products and a softmax in float32."""
    query, key, value, mask = call[:4]
    if query.device.type == "cuda":
        params = cuda.SDPAParams(*call)
        kernels = (cuda.can_use_flash_attention, cuda.can_use_efficient_attention, cuda.can_use_cudnn_attention)
        return any(can_use(params) for can_use in kernels)
    taken = query.dim() == key.dim() == value.dim() == 4 and not call.dropout
    if mask is not None:
        taken = taken and mask.dim() in (2, 4) and not mask.requires_grad
    rows = (x.stride(-1) == 1 for x in (query, key, value))
    return taken and all(map(symbolic_shapes.statically_known_true, rows)) and query.shape[-1] == value.shape[-1]


def allows_tf32() -> bool:
    """Return whether float32 matmuls on a GPU may round their operands to TF32."""
    return torch.get_float32_matmul_precision() != "highest"


def allows_tf32_convolutions() -> bool:
    """Return whether float32 convolutions on a GPU may round their operands to TF32."""
    return bool(torch.backends.cudnn.allow_tf32)


def cuda_properties(device: torch.device) -> dict[str, int]:
    """Return the numbers of a GPU on which schedules depend, by the names of `schedule.device.Gpu`.

    `registers` and `threads_per_sm` count for one multiprocessor; `shared_memory` and `l2` are bytes.
    """
    properties = torch.cuda.get_device_properties(device)
    return {
        "sms": properties.multi_processor_count,
        "registers": getattr(properties, "regs_per_multiprocessor", 65536),
        "threads_per_sm": properties.max_threads_per_multi_processor,
        # the least since compute capability 8.0
        "shared_memory": int(getattr(properties, "shared_memory_per_block_optin", 99 << 10)),
        "l2": getattr(properties, "L2_cache_size", 40 << 20),
        "capability": cuda_capability(device),
    }


def cpu_properties() -> dict[str, int]:
    """Return the numbers of the CPU on which schedules depend, by the names of `schedule.device.Cpu`.

    `vector_lanes`: float32 numbers in one vector. `l1`, `l2`: bytes of one core's data caches; torch before 2.13 may
    not report them, and typical sizes stand in.
    """
    lanes = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
    capabilities: dict[str, int] = getattr(torch.cpu, "get_capabilities", dict)()
    return {
        "vector_lanes": lanes,
        "l1": int(capabilities.get("l1d_cache_size", 0)) or 32 << 10,
        "l2": int(capabilities.get("l2_cache_size", 0)) or 1 << 20,
    }


def exact_byte_products() -> bool:
    """Return whether the library adds products of bytes in 32 bits on this processor.

    x86 processors without such instructions add pairs of products in 16 bits, which overflow.
    """
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return supported is not None and bool(supported())


@functools.cache
def multiplies_unsigned_bytes() -> bool:
    """Return whether the CPU's product of integers takes a left operand of uint8, too."""
    with real_tensors():
        try:
            torch._int_mm(torch.zeros(1, 8, dtype=torch.uint8), torch.zeros(8, 8, dtype=torch.int8))
        except RuntimeError:
            return False
    return True


def has_avx512() -> bool:
    """Return whether torch's kernels use vectors of 512 bits on this processor."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def fast_byte_weights() -> bool:
    """Return whether ATen has a vectorised product of bfloat16 with weights of int8 on this processor."""
    return has_avx512()


def cuda_name(device: torch.device) -> str:
    """Return the product name of a GPU."""
    return torch.cuda.get_device_name(device)


def cuda_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which `device` is the current one."""
    guard: contextlib.AbstractContextManager[object] = torch.cuda.device(device)
    return guard


def opaque_class(value: object) -> str | None:
    """Return the class of a traced object that is neither tensor nor number, such as a device mesh; None for others."""
    return str(value.script_class_name) if isinstance(value, FakeScriptObject) else None


def is_fake(t: torch.Tensor) -> bool:
    """Return whether a tensor is a fake tensor of a tracer."""
    return isinstance(t, FakeTensor)


def traced_metadata() -> ViewAndMutationMeta | None:
    """Return AOTAutograd's metadata of the graph that is being compiled, or None."""
    return getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)


def guards_layouts() -> bool:
    """Return whether Dynamo recompiles when a parameter's strides change."""
    return version() >= (2, 13)


def take_donated_buffers(forward: torch.fx.GraphModule) -> tuple[int, ...]:
    """Return the inputs of a backward that AOTAutograd lists as donated, and empty its list.

    With a list that is not empty, AOTAutograd refuses a second backward (`retain_graph=True`). Generated programs need
    no such rule: they ask at every call whether something else refers to a tensor. Must be called while the forward is
    compiled. Tensors that share memory, and those that the autograd context keeps as attributes, are left out.
    """
    meta = traced_metadata()
    listed = tuple(getattr(meta, "bw_donated_idxs", None) or ())
    if meta is None:
        return ()
    meta.bw_donated_idxs = []
    if not listed:
        return ()
    results = forward.graph.output_node().args[0]
    assert isinstance(results, (tuple, list)), "a forward returns several values"
    saved = results[meta.tensors_saved_for_backwards_slice]
    checked_count = len(saved) - (meta.num_tensors_saved_with_no_vc_check or 0)
    storages = [_storage_number(n.meta.get("val")) if isinstance(n, torch.fx.Node) else None for n in saved]
    first, users = meta.num_symints_saved_for_bw or 0, Counter(storages)
    alone = [storage is not None and users[storage] == 1 for storage in storages[:checked_count]]
    return tuple(k for k in listed if k - first < checked_count and alone[k - first])


def _storage_number(value: object) -> int | None:
    """Return a number that tensors share exactly if they share memory; None for what has no strided memory."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def lifted(gm: torch.fx.GraphModule) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a captured graph by name. AOTAutograd passes them before the inputs."""
    return dict(gm.named_parameters(remove_duplicate=False)) | dict(gm.named_buffers(remove_duplicate=False))


def static_inputs(gm: torch.fx.GraphModule) -> frozenset[int]:
    """Return the indices of a captured graph's inputs whose address does not change.

    These are its lifted parameters and buffers, which come first, other parameters and buffers, and inputs that the
    user marks as static.
    """
    first = len(lifted(gm))
    placeholders = enumerate(gm.graph.find_nodes(op="placeholder"), first)
    marked = {k for k, n in placeholders if (n.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")}
    return frozenset(range(first)) | marked


def view_steps(info: object) -> list[tuple[str, tuple[object, ...], int]] | None:
    """Return the view operators between a result and its base: (operator, arguments, part) for each step.

    `part` is the index among several results, or -1 for a single one. Return None if the steps are unknown or have
    symbolic sizes.
    """
    sequence = getattr(getattr(info, "view_meta_sequence", None), "sequence", None)
    if sequence is None or any(step.has_symbolic_inputs for step in sequence):
        return None
    steps = []
    for step in sequence:
        fields = step.as_tuple()  # symbolic; of several results the number; views stay views; how it is inverted; ...
        has_part = type(fields[1]) is int
        name = type(step).__name__.removesuffix("_ViewMeta")
        steps.append((name, tuple(fields[4 if has_part else 3 :]), fields[1] if has_part else -1))
    return steps


def compiled_autograd() -> bool:
    """Return whether compiled autograd is on in this process, or by Dynamo's setting."""
    module: object = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False)) or bool(torch._dynamo.config.compiled_autograd)


def hooks_on_saved_tensors() -> str:
    """Return a reason if autograd would run hooks on the tensors that a forward saves; "" otherwise."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return "hooks on saved tensors are set" if hooks else ""


def conditions(numbers: Sequence[torch.SymInt]) -> str:
    """Return Python text of all conditions on `numbers`, the sizes given to a graph; "" if there are none."""
    if not numbers:
        return ""
    env = numbers[0].node.shape_env
    return env.produce_guards_expression(placeholders=numbers, guards=env.get_pruned_guards(numbers)) or ""


def conditions_on_floats() -> frozenset[str]:
    """Return the conditions on symbolic floats that tracing the current graph has met or assumed, as text."""
    context = torch._guards.TracingContext.try_get()
    env = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    if env is None:
        return frozenset()
    return frozenset(str(c) for c in size_conditions(env) if any(symbol_is_type(s, SymT.FLOAT) for s in c.free_symbols))


def conditions_hold(text: str, numbers: Sequence[torch.SymInt]) -> bool:
    """Return whether the conditions hold for other sizes. If they do, they are assumed of them from now on."""
    if not text:
        return True
    env = numbers[0].node.shape_env
    values = [n.node.hint for n in numbers]
    return bool(env.evaluate_guards_expression(text, values)) and bool(env.evaluate_guards_expression(text, numbers))


def mark_dynamic(t: object, dims: set[int]) -> None:
    """Tell Dynamo which dimensions of a result vary, in case it enters another compiled graph."""
    name = "_dynamo_propagated_dynamic_indices" if version() >= (2, 13) else "_dynamo_weak_dynamic_indices"
    setattr(t, name, getattr(t, name, set()) | dims)


def defined_symbols(node: torch.fx.Node) -> dict[sympy.Symbol, tuple[object, ...]]:
    """Return the unbacked symbols that a call defines, each with its path in the call's result."""
    bindings = node.meta.get("unbacked_bindings")
    if not bindings:
        return {}
    env = shape_env_of(node)
    return dict(symbolic_shapes.resolve_unbacked_bindings(env, bindings) or {})


def shape_env_of(node: torch.fx.Node) -> ShapeEnv | None:
    """Return the shape environment of a node's value or arguments, or None if all sizes are plain."""
    for n in (node, *node.all_input_nodes):
        for x in torch.utils._pytree.tree_leaves(n.meta.get("val")):
            if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                env: ShapeEnv | None = x.node.shape_env
                return env
            if isinstance(x, FakeTensor) and x.fake_mode.shape_env is not None:
                return x.fake_mode.shape_env
    return None


def traced_value(shape_env: ShapeEnv, symbol: sympy.Symbol) -> int:
    """Return the value that an integer symbol of the user's program had in the call that was traced."""
    values = shape_env.backed_var_to_val if hasattr(shape_env, "backed_var_to_val") else shape_env.var_to_val
    return int(values[symbol])


def path_steps(path: Sequence[Any]) -> list[tuple[str, int | str]]:
    """Return a path to a symbol as steps: ("item", k), ("size", ""), ("stride", ""), ("//", d), ..."""
    steps: list[tuple[str, int | str]] = []
    for key in path:
        match type(key).__name__:
            case "SequenceKey":
                steps.append(("item", key.idx))
            case "CallMethodKey":
                steps.append((str(key.name), ""))
            case "DivideByKey":
                steps.append(("//", key.divisor))
            case "ConvertIntKey":
                steps.append(("int", ""))
            case other:
                steps.append((other, ""))
    return steps


@dataclass(frozen=True)
class UnbackedFacts:
    """The assumptions on one unbacked symbol: its range, an equal expression, and conditions on it."""

    least: int | None
    greatest: int | None
    equals: sympy.Expr
    conditions: tuple[sympy.Expr, ...]


def unbacked_facts(shape_env: ShapeEnv | None, symbol: sympy.Symbol) -> UnbackedFacts:
    """Return what tracing has assumed of an unbacked symbol. `equals` is the symbol itself if nothing else is known."""
    assert shape_env is not None, "a symbol has a shape environment"
    value_range = shape_env.var_to_range.get(symbol)
    least = int(value_range.lower) if value_range is not None and value_range.lower.is_Integer else None
    greatest = int(value_range.upper) if value_range is not None and value_range.upper.is_Integer else None
    natural = sys.maxsize - 1
    checks = [c.expr for cs in shape_env.deferred_runtime_asserts.values() for c in cs]
    renamings = shape_env.unbacked_renamings
    return UnbackedFacts(
        least if least is not None and least > -natural else None,
        greatest if greatest is not None and greatest < natural else None,
        shape_env.replace(symbol),
        tuple(c.xreplace(renamings) for c in checks if symbol in c.xreplace(renamings).free_symbols),
    )
