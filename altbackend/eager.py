"""Eager operators from a persistent cache: an operator is compiled once for inputs of one form, for all processes.

`compile_with_persistent_cache` compiles one call of an operator and stores the library. `register` lets torch run
operators so, with the original kernel for inputs that the cache cannot take.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from altbackend.lazy_dataclass import dataclass

from .aot.compile import build
from .compat.pt2 import Runner
from .config.options import Config, fingerprint
from .config.resolve import resolve
from .disk_cache.folders import exclusive
from .disk_cache.storage import Store, open_store
from .errors import BadGraph
from .runtime import isa

Form = tuple[Any, ...]  # of one argument, hashable

LONGEST_BUILD = 300.0  # seconds that a process waits for another one's build
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format)
_inside = threading.local()  # .busy: a compiled operator, or a compilation, runs in this thread
_loaded: dict[Form, Runner] = {}
_refused: set[Form] = set()
_libraries: list[torch.library.Library] = []


def compile_with_persistent_cache(
    ns: str,
    op_overload_name: str,
    device_type: str,
    dynamic: bool,
    f: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    dynamic_shapes: Mapping[str, object] | None = None,
    options: Mapping[str, object] | None = None,
    remove_runtime_assertions: bool = False,
    disable_constraint_solver: bool = False,
) -> str:
    """Compile `f(*args, **kwargs)`, the operator `ns::op_overload_name`, and return the path of the stored library.

    The library and the form of its inputs lie in the cache folder; a later call with inputs of that form, in any
    process, finds them. Raise BadGraph for dynamic shapes, another device than the CPU, or an argument of
    a type that no library takes. Raise the errors of `altbackend.aot_compile` too.
    """
    what = f"{ns}::{op_overload_name}"
    if dynamic or dynamic_shapes:
        raise BadGraph(what, "the cache of eager operators holds static shapes only", "pass dynamic=False")
    if device_type != "cpu":
        raise BadGraph(what, f"the device is {device_type}, and libraries are made for the CPU", "pass CPU tensors")
    if remove_runtime_assertions or disable_constraint_solver:
        todo = "leave remove_runtime_assertions and disable_constraint_solver False"
        raise BadGraph(what, "static shapes have no assertions on sizes and no constraints to remove", todo)
    forms = _forms(args, kwargs)
    if isinstance(forms, str):
        raise BadGraph(what, forms, "pass tensors, numbers, strings, dtypes, layouts, devices, or lists of them")
    cfg = resolve(None, options)
    store, name = open_store(cfg), _name(what, forms, cfg)
    _ensure(_Entry(store, name, what, forms), f, args, kwargs, options or {})
    return str(store.path(f"{name}.so"))


def register(ops: Iterable[torch._ops.OpOverload]) -> None:
    """Let torch run CPU operators from the persistent cache, in this process and until it ends.

    Inputs of a form that cannot be compiled, results that are views, and calls inside a compiled operator take the
    original kernel. Raise BadGraph for an operator without a kernel for CPUs.
    """
    for op in ops:
        ns, name = op._schema.name.split("::")
        overload = "" if op._overloadname == "default" else f".{op._overloadname}"
        try:
            original = torch.library.get_kernel(op, "CPU")
        except RuntimeError as cause:
            reason = "it has no kernel of its own for CPUs"
            raise BadGraph(str(op), reason, "register the operators that it calls") from cause
        make_library: Callable[..., Any] = torch.library.Library
        library = make_library(ns, "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            library.impl(name + overload, _Operator(op, original), "CPU", with_keyset=True, allow_override=True)
        _libraries.append(library)


class _Kernel(Protocol):
    @property
    def call_boxed(self) -> Callable[..., object]: ...


class _Operator:
    """The kernel that `register` installs for one operator."""

    def __init__(self, op: torch._ops.OpOverload, original: _Kernel) -> None:
        self.op, self.original = op, original
        self.what = f"{op._schema.name}.{op._overloadname}"
        returns = op._schema.returns
        self.single = len(returns) == 1
        self.is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        self.written = [_written_argument(op, r) for r in returns]
        self.plain = all(str(r.type) == "Tensor" for r in returns)

    def __call__(self, keyset: object, *args: object, **kwargs: object) -> object:
        """Run the operator compiled, or by its original kernel."""
        if getattr(_inside, "busy", False) or self.is_view or not self.plain:
            return self._by_original(keyset, args, kwargs)
        forms = _forms(args, kwargs)
        runner = None if isinstance(forms, str) else _loaded.get((self.what, forms))
        if runner is None:  # the first result is the original's, which also raises eager's errors
            result = self._by_original(keyset, args, kwargs)
            if not isinstance(forms, str) and (self.what, forms) not in _refused:
                self._prepare(forms, args, kwargs)
            return result
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        _inside.busy = True
        try:
            results: Sequence[object] = runner.run(tensors)
        finally:
            _inside.busy = False
        results = [_argument(p, args, kwargs) if p else r for p, r in zip(self.written, results, strict=True)]
        return results[0] if self.single else tuple(results)

    def _by_original(self, keyset: object, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Run the original kernel, with a tensor for each number in the place of a tensor."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        places = zip(self.op._schema.arguments, args, strict=False)
        given = [
            _as_tensor(x, tensors) if str(a.type) == "Tensor" and isinstance(x, (bool, int, float)) else x
            for a, x in places
        ]
        return self.original.call_boxed(keyset, *given, **kwargs)

    def _prepare(self, forms: Form, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Load the library for later calls of this form, compiling it if no process has; note a form without one."""
        key = (self.what, forms)
        cfg = resolve()
        store, name = open_store(cfg), _name(self.what, forms, cfg)
        _inside.busy = True
        try:
            if _forms(args, kwargs) != forms:  # the original has resized a tensor
                _refused.add(key)
                return
            _ensure(_Entry(store, name, self.what, forms), self.op, args, kwargs, {})
            _loaded[key] = Runner(store.path(f"{name}.so"))
        except Exception as cause:  # torch.export raises errors of many types
            logging.getLogger(__name__).info("%s stays with its original kernel: %s", self.what, cause)
            _refused.add(key)
        finally:
            _inside.busy = False


def _is_number_for_tensor(argument: torch._C.Argument, x: object) -> bool:
    return isinstance(x, (bool, int, float)) and str(argument.type) == "Tensor"


def _as_tensor(x: float, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a number as a tensor of one element that gives the result's dtype which the number itself gives."""
    for t in others:
        dtype = torch.result_type(t, x)
        if t.dim() and dtype == t.dtype:  # in the widest dtype of its category: the tensor with dimensions decides
            wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
            return torch.tensor(x, dtype=dtype if dtype == torch.bool else wide)
        return torch.tensor(x, dtype=dtype)
    return torch.tensor(x)


def _written_argument(op: torch._ops.OpOverload, result: torch._C.Argument) -> str:
    """Return the number and name of the argument that a result is, as for `out=`; "" for a new tensor."""
    if result.alias_info is None or not result.alias_info.is_write:
        return ""
    for number, a in enumerate(op._schema.arguments):
        if a.alias_info is not None and a.alias_info.before_set == result.alias_info.before_set:
            return f"{number}:{a.name}"
    return ""


def _argument(place: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    number, _, name = place.partition(":")
    return kwargs[name] if name in kwargs else args[int(number)]


# --- the store -------------------------------------------------------------------------------------------------------


def _forms(args: Sequence[object], kwargs: Mapping[str, object]) -> Form | str:
    """Return the form of every argument; a reason if one cannot be compiled."""
    try:
        return tuple([_form(x) for x in args]), tuple([(k, _form(x)) for k, x in kwargs.items()])
    except _NoForm as cause:
        return str(cause)


class _NoForm(Exception):
    """An argument that no library takes."""


def _form(x: Any) -> object:
    kind = type(x)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        if not x.is_cpu or x.layout is not torch.strided or x.is_neg() or x.is_conj():
            raise _NoForm(f"a tensor on {x.device} in the layout {x.layout}, negated or conjugated")
        return x.dtype, x.shape, x.stride()
    if kind is list or kind is tuple:
        return kind, tuple([_form(y) for y in x])
    if isinstance(x, _PLAIN) and not isinstance(x, torch.Tensor):
        return kind, repr(x)  # 1, 1.0 and True are equal, -0.0 and 0.0 too
    raise _NoForm(f"an argument is a {kind.__name__}")


def _name(what: str, forms: Form, cfg: Config) -> str:
    """Return the name in the store, without its ending, by all that determines a library."""
    target = isa.detect() if cfg.aot_isa == "auto" else cfg.aot_isa
    text = "\0".join([what, repr(forms), torch.__version__, fingerprint(cfg), target])
    digest = hashlib.sha256(text.encode()).hexdigest()[:40]
    return f"eager/cpu/{what.replace('::', '/')}/{digest}"


@dataclass(frozen=True)
class _Entry:
    """A library in the store, and what is stored beside it: the operator and the form of its inputs."""

    store: Store
    name: str
    what: str
    forms: Form

    @property
    def is_stored(self) -> bool:
        """Return whether the store has the library and its metadata."""
        return all(self.store.find(f"{self.name}{ending}") is not None for ending in (".json", ".so"))

    def metadata(self) -> str:
        """Return the metadata as JSON."""
        args, kwargs = self.forms
        inputs = {**{str(k): _shown(form) for k, form in enumerate(args)}, **{k: _shown(form) for k, form in kwargs}}
        facts = {"operator": self.what, "device": "cpu", "dynamic": False, "torch": torch.__version__, "inputs": inputs}
        return json.dumps(facts, indent=1)


def _shown(form: Form) -> object:
    if len(form) == 3:
        return {"dtype": str(form[0]), "device": "cpu", "sizes": list(form[1]), "strides": list(form[2])}
    kind, value = form
    return {"type": kind.__name__, "value": value if isinstance(value, str) else [_shown(x) for x in value]}


def _ensure(
    entry: _Entry,
    f: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    options: Mapping[str, object],
) -> None:
    """Store the library and its metadata unless they are there; of several processes, one compiles."""
    if entry.is_stored:
        return
    with exclusive(entry.store.path(f"{entry.name}.lock"), LONGEST_BUILD):
        if entry.is_stored:
            return
        call = _Call(f, args, kwargs)
        program = torch.export.export(call, tuple(call.tensors), strict=False)
        library = build(program, (), {}, {**options, "aot_constants": "embedded"})
        entry.store.write(f"{entry.name}.so", library.path.read_bytes())
        entry.store.write(f"{entry.name}.json", entry.metadata().encode())


class _Call(torch.nn.Module):
    """One call of a function: it takes the tensors among the arguments and returns a tuple.

    All other arguments are fixed; export takes no dtype, layout or device.
    """

    def __init__(self, f: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        super().__init__()
        self.f = f
        self.leaves, self.tree = pytree.tree_flatten((tuple(args), dict(kwargs)))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the arguments, in order."""
        return [x for x in self.leaves if isinstance(x, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> object:
        """Call the function."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        result = self.f(*args, **kwargs)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)
