# ruff: noqa: PLC0415
"""The work of separate processes: Triton's interpreter, and its compiler.

Triton decides when it is imported whether it interprets, for its own library functions too. So neither the tests nor
torch import it: one process interprets kernels, another compiles them. Nothing here needs a GPU. Imports of
triton stand inside functions for that reason.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}  # bytes a program may have, by compute capability
Array = tuple[Any, str]  # bytes of a tensor as numpy uint8, and its dtype's name


def pack(x: torch.Tensor) -> Array:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().copy(), str(x.dtype).removeprefix("torch.")


def unpack(a: Array) -> torch.Tensor:
    dtype = getattr(torch, a[1])
    return torch.from_numpy(a[0].copy()).view(dtype) if a[0].size else torch.empty(0, dtype=dtype)


def start(interpret: bool) -> None:
    """First thing in a worker."""
    torch.set_num_threads(1)
    if not interpret:
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="altbackend-triton-")
        return
    np.seterr(all="ignore")
    _complete_interpreter()


_modules: dict[str, Any] = {}


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Of this process's kernels, removed when it ends."""
    return tempfile.TemporaryDirectory(prefix="altbackend-kernel-", ignore_cleanup_errors=True)


def _module(source: str) -> Any:
    """Triton reads a function's text from its file."""
    key = hashlib.sha256(source.encode()).hexdigest()[:16]
    if key not in _modules:
        path = Path(_folder().name) / f"kernel_{key}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        _modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_modules[key])
    return _modules[key]


def launch(
    source: str, pointers: list[Array], symbols: list[int], constexprs: dict[str, int], grid: int
) -> list[Array]:
    """The pointers' contents after the kernel ran in the interpreter."""
    tensors = [unpack(a) for a in pointers]
    _memory[:] = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
    if grid:
        _module(source).kernel[(grid,)](*tensors, *symbols, **constexprs)
    return [pack(t) for t in tensors]


_memory: list[tuple[int, int]] = []  # first byte and end of each tensor of the kernel that runs


def _check_bounds(pointers: Any, mask: Any, itemsize: int) -> None:
    """Raise IndexError if a kernel loads or stores outside its tensors where its mask holds."""
    at = pointers[np.broadcast_to(mask, pointers.shape)].astype(np.int64)
    inside = np.zeros(at.shape, dtype=bool)
    for first, end in _memory:
        inside |= (at >= first) & (at + itemsize <= end)
    if not inside.all():
        outside = at[~inside]
        nearest = min(_memory, key=lambda m: abs(int(outside[0]) - m[0]))
        raise IndexError(f"a kernel reaches byte {outside[0] - nearest[0]} of a tensor of {nearest[1] - nearest[0]}")


def _with_bounds(access: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
    """Return a load or store of the interpreter that checks its positions. `mask_at`: the place of the mask."""

    def checked(self: Any, pointers: Any, *rest: Any, **hints: Any) -> Any:
        size = pointers.get_element_ty().primitive_bitwidth
        _check_bounds(pointers.data, rest[mask_at].data, max(size // 8, 1))
        return access(self, pointers, *rest, **hints)

    return checked


_by_points: dict[str, tuple[Any, Callable[..., Any]]] = {}  # the interpreter's own functions, by name


def launch_by_points(*job: Any) -> list[Array]:
    """Return what `launch` does, with the interpreter's own reductions and scans, which go from point to point."""
    with contextlib.ExitStack() as stack:
        for name, (kind, function) in _by_points.items():
            stack.enter_context(patch.object(kind, name, function))
        return launch(*job)


def compile_cubin(
    source: str, signature: dict[str, str], constexprs: dict[str, int], warps: int, stages: int, capability: int
) -> int:
    """Bytes of the kernel's machine code. Pointers are taken to be aligned, as the launcher finds them.

    Raises RuntimeError where the kernel takes more shared memory than a program of the device may have.
    """
    made = _compile(source, signature, constexprs, warps, stages, capability)
    if made.metadata.shared > SHARED_MEMORY[capability]:
        raise RuntimeError(f"{made.metadata.shared} bytes of shared memory, the limit is {SHARED_MEMORY[capability]}")
    return len(made.asm["cubin"])


def memory(*job: Any) -> tuple[int, int]:
    """Bytes of shared and of global memory that each program of a kernel wants for itself."""
    made = _compile(*job)
    return int(made.metadata.shared), int(made.metadata.global_scratch_size)


def access_axes(*job: Any) -> set[int]:
    """The tile axes along which neighbouring threads access memory, of all accesses to tiles with two axes."""
    text = _compile(*job).asm["ttgir"]
    layouts = dict(re.findall(r"^#(\w+) = #ttg\.blocked<\{.*order = \[(\d)", text, re.MULTILINE))
    accessed = re.findall(r"tt\.(?:load|store) .*: tensor<\d\d+x\d\d+x!tt\.ptr<\w+>, #(\w+)>", text)
    return {int(layouts[name]) for name in accessed}


def _compile(
    source: str, signature: dict[str, str], constexprs: dict[str, int], warps: int, stages: int, capability: int
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    aligned = {(k,): [["tt.divisibility", 16]] for k, t in enumerate(signature.values()) if t.startswith("*")}
    return triton.compile(
        ASTSource(_module(source).kernel, signature, constexprs, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages},
    )


# --- what the interpreter lacks --------------------------------------------------------------------------------------

_TORCH_NAMES = {
    "div_rn": "true_divide",
    "sqrt_rn": "sqrt",
    "nearbyint": "round",
    "cyl_bessel_i0": "i0",
}
_LIBDEVICE = (
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "ceil",
    "copysign",
    "cos",
    "cosh",
    "cyl_bessel_i0",
    "cyl_bessel_i1",
    "div_rn",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "fmod",
    "hypot",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "nearbyint",
    "nextafter",
    "pow",
    "rsqrt",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "sqrt_rn",
    "tan",
    "tanh",
    "trunc",
)


def _complete_interpreter() -> None:
    """libdevice by torch's functions, and reductions by the project's combiners, which it would do point by point.

    Each call of a function would replace the language's functions, which the call of the kernel has replaced.
    """
    import triton.language
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    for name in _LIBDEVICE:
        reference = getattr(torch, _TORCH_NAMES.get(name, name), None) or torch.special.i1
        setattr(libdevice, name, _elementwise(reference))
    libdevice.fmod = _elementwise(_fmod)
    triton.language.inline_asm_elementwise = _inline_asm
    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = _with_bounds(builder.create_masked_load, 0)
    builder.create_masked_store = _with_bounds(builder.create_masked_store, 1)
    interpreter.InterpreterBuilder.create_splat = _splat
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.create_add = _add
    interpreter.InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    interpreter.InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)
    _patch_combiners(interpreter.ReduceOps, "apply_impl", _REDUCE)
    _patch_combiners(interpreter.ScanOps, "apply_impl", _ACCUMULATE)
    for kind, name, way in (
        (interpreter.ReduceOps, "generic_reduce", _reduce),
        (interpreter.ScanOps, "generic_scan", _scan),
    ):
        _by_points[name] = (kind, getattr(kind, name))
        setattr(kind, name, way)
    interpreter._patch_builtin = _patched_builtins(interpreter._patch_attr)
    interpreter._patch_lang = _patched_once(interpreter._patch_lang, interpreter._LangPatchScope)


def _with_index(patch_lang_tensor: Callable[..., None]) -> Callable[..., None]:
    """Bounds of a loop as numbers: Triton 3.6 asks numpy for more than new versions of it do."""

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    return patch_tensor


_ASM: dict[str, Callable[..., torch.Tensor]] = {
    "ex2.approx.ftz.f32 $0, $1;": torch.exp2,
    "rcp.approx.ftz.f32 $0, $1;": torch.reciprocal,
}


def _inline_asm(asm: str, constraints: str, args: list[Any], **_: Any) -> Any:
    return _elementwise(_ASM[str(getattr(asm, "value", asm))])(*args)


def _splat(self: Any, kind: Any, x: Any) -> Any:
    """A scalar spread to a block. The interpreter's own takes a comparison's bool for the dtype that was compared."""
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(np.full(kind.shape, x.data.reshape(-1)[0], dtype=x.data.dtype), x.dtype.scalar)


def _add(self: Any, a: Any, b: Any) -> Any:
    """a + b. numpy's sum of two bools is their or; that of a GPU has one bit."""
    return self.binary_op(a, b, np.logical_xor if a.data.dtype == np.bool_ else np.add)


def _dot(self: Any, a: Any, b: Any, total: Any, *precision: Any) -> Any:
    """total + a @ b. The interpreter's own multiplies the bits of bfloat16 as if they were integers."""
    from triton.runtime.interpreter import TensorHandle

    left, right = (_as_float32(x) for x in (a, b))
    return TensorHandle(np.matmul(left, right) + total.data, total.dtype.scalar)


def _as_float32(x: Any) -> Any:
    if x.data.dtype == np.uint16:
        return (x.data.astype(np.uint32) << 16).view(np.float32)
    return x.data.astype(np.float32)


def _fmod(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """C's; torch's vectors have NaN where the quotient overflows."""
    return torch.from_numpy(np.fmod(a.numpy(), b.numpy()))


def _elementwise(reference: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def call(*args: Any) -> Any:
        arrays = [torch.from_numpy(np.array(a.handle.data)) for a in args]
        out = reference(*arrays)
        result = (out.to(torch.int32) if out.dtype == torch.bool else out).numpy()
        scalar = tl.int32 if out.dtype == torch.bool else args[0].dtype.scalar
        shape = args[0].type.get_block_shapes() if result.ndim and result.shape == args[0].shape else result.shape
        kind = tl.block_type(scalar, list(shape)) if args[0].type.is_block() or result.size > 1 else scalar
        return tl.tensor(TensorHandle(result, scalar), kind)

    return call


_REDUCE: dict[str, Callable[..., Any]] = {
    "largest": np.max,
    "smallest": np.min,
    "product": np.prod,
    "parity": np.bitwise_xor.reduce,
    "log_add_exp": np.logaddexp.reduce,
}
_ACCUMULATE: dict[str, Callable[..., Any]] = {
    "largest": np.maximum.accumulate,
    "smallest": np.minimum.accumulate,
    "product": np.multiply.accumulate,
    "log_add_exp": np.logaddexp.accumulate,
}


def _combined(ops: Any, values: Any, axis: int) -> Iterator[list[Any]]:
    """Yield what is combined so far of each value, from the first element along the axis to the last.

    All elements beside each other are combined at once, each in the order in which the interpreter takes its points.
    """
    arrays, dtypes = [v.handle.data for v in values], [v.dtype for v in values]
    total = [np.take(a, 0, axis) for a in arrays]
    yield total
    for k in range(1, arrays[0].shape[axis]):
        item = [np.take(a, k, axis) for a in arrays]
        tensors = [ops.to_tensor(x, dtype) for part in (total, item) for x, dtype in zip(part, dtypes, strict=True)]
        result = ops.combine_fn.fn(*tensors)
        outs = result if isinstance(result, tuple) else (result,)
        data = [getattr(getattr(out, "handle", None), "data", out) for out in outs]
        total = [np.asarray(d).astype(t.dtype).reshape(t.shape) for d, t in zip(data, total, strict=True)]
        yield total


def _reduce(self: Any, values: Any) -> list[Any]:
    flat, axis = self.unravel(values, self.axis)
    *_, total = _combined(self, flat, axis)
    if self.keep_dims:
        ranks = tuple(range(values[0].handle.data.ndim)) if self.axis is None else axis
        total = [np.expand_dims(t, ranks) for t in total]
    return [self.to_tensor(t, v.dtype) for t, v in zip(total, values, strict=True)]


def _scan(self: Any, values: Any) -> list[Any]:
    steps = list(_combined(self, values, self.axis))
    results = (np.stack(along, self.axis) for along in zip(*steps, strict=True))
    return [self.to_tensor(r, v.dtype) for r, v in zip(results, values, strict=True)]


def _patched_builtins(patch_attr: Callable[..., None]) -> Callable[..., None]:
    """Return the interpreter's function that replaces a module's built-in functions, whose names it looks up once."""
    import triton.language as tl

    @functools.cache
    def names(module: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(module) if tl.core.is_builtin(member)]

    def replace(module: Any, builder: Any, scope: Any) -> None:
        for name in names(module):
            member = getattr(module, name)
            if tl.core.is_builtin(member):  # what an outer call has replaced is none
                patch_attr(module, name, member, builder, scope)

    return replace


def _patched_once(patch_lang: Callable[[Any], Any], scope_type: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return the interpreter's function that replaces what a function sees, once for all calls within a kernel."""
    seen: set[int] = set()  # the globals of functions that have run in this kernel

    def replace(fn: Any) -> Any:
        if id(fn.__globals__) in seen:
            return scope_type()
        scope = patch_lang(fn)
        if not seen:
            restore = scope.restore

            def end() -> None:
                seen.clear()
                restore()

            scope.restore = end
        seen.add(id(fn.__globals__))
        return scope

    return replace


def _turned(ops: Any, data: Any) -> Any:
    """The elements from last to first where a scan runs backwards."""
    return np.flip(data, ops.axis) if getattr(ops, "reverse", False) else data


def _patch_combiners(ops: Any, method: str, table: dict[str, Callable[..., Any]]) -> None:
    original = getattr(ops, method)

    def apply(self: Any, values: Any) -> Any:
        way = table.get(getattr(getattr(self.combine_fn, "fn", None), "__name__", ""))
        if way is None:
            return original(self, values)
        keep = {"keepdims": self.keep_dims} if hasattr(self, "keep_dims") else {}
        (x,) = values
        data = way(_turned(self, x.handle.data), axis=self.axis, **keep).astype(x.handle.data.dtype)
        return [self.to_tensor(_turned(self, data), x.dtype)]

    setattr(ops, method, apply)
