"""The interpreter, which tests use as an oracle: it runs a loop program on torch tensors.

Each node is one dense evaluation over all points of its loops; nothing is fused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import expr as ex
from . import value as va
from .expr import Atom, Index
from .host_functions import FUNCTIONS
from .loops import Extern, HostNumber, Loop, Program, Reduction, Scan, Scatter, View, loop_vars, names_in
from .ops import OPS
from .value import Value

Env = Mapping[Atom, torch.Tensor]


class State:
    """The state of one run: the storage of every buffer as a flat tensor, and the values of the symbols."""

    def __init__(self, program: Program, symbols: Mapping[str, int]) -> None:
        self.program = program
        self.flat: dict[str, torch.Tensor] = {}
        self.symbols = dict(symbols)

    def size(self, e: Index) -> int:
        return int(evaluate_index(e, {}, self))

    def bind_sizes(self, inputs: Sequence[Any]) -> None:
        """Set the symbols that are sizes of input tensors."""
        for name, x in zip(self.program.inputs, inputs, strict=True):
            for n, size in (
                zip(self.program.buffers[name].sizes, x.shape, strict=True) if name in self.program.buffers else ()
            ):
                if isinstance(n, ex.Expr) and len(n.syms) == 1 and ex.show(n) == next(iter(n.syms)).key:
                    self.symbols.setdefault(ex.show(n), int(size))

    def number(self, text: str, more: Mapping[str, object] | None = None) -> Any:
        """Return the value of the Python expression `text` over the symbols and the names in `more`."""
        return eval(text, {"math": math, **FUNCTIONS}, {**self.symbols, **(more or {})})

    def compute_numbers(self) -> None:
        """Compute the program's numbers whose operands have values."""
        numbers = {n.name for n in self.program.numbers}
        unbacked = {s for node in self.program.nodes if isinstance(node, Extern) for s in node.defines}
        for n in self.program.numbers:
            if n.name not in self.symbols and not names_in(n.text) & (unbacked | numbers) - self.symbols.keys():
                self.symbols[n.name] = self.number(n.text)

    def allocate(self, name: str) -> torch.Tensor:
        b = self.program.buffers[name]
        self.flat[name] = torch.empty(max(self.size(b.extent), 0), dtype=b.dtype)
        return self.flat[name]

    def view(self, v: View) -> torch.Tensor:
        flat = self.flat[v.buffer]
        if v.dtype is not None and v.dtype != flat.dtype:
            flat = flat.view(v.dtype)
        begin = flat.storage_offset() + self.size(v.offset)  # an input may be a view of something larger
        return flat.as_strided([self.size(s) for s in v.sizes], [self.size(s) for s in v.strides], begin)


def run(
    program: Program, inputs: Sequence[torch.Tensor | int], constants: Mapping[str, object] | None = None
) -> list[Any]:
    """Run `program` on `inputs` (tensors, or ints for symbols) and return its outputs; mutated inputs are written.

    `constants`: the tensor of each buffer of kind "const".
    """
    symbols = {n: x for n, x in zip(program.inputs, inputs, strict=True) if not isinstance(x, torch.Tensor)}
    state = State(program, symbols)
    state.bind_sizes(inputs)
    state.compute_numbers()
    named_constants = [(n, x) for n, x in (constants or {}).items() if n in program.buffers]
    for name, x in [*zip(program.inputs, inputs, strict=True), *named_constants]:
        if isinstance(x, torch.Tensor):
            extent = state.size(program.buffers[name].extent)
            state.flat[name] = x.as_strided((extent,), (1,), x.storage_offset())
    for node in program.nodes:
        if isinstance(node, Extern):
            _run_extern(node, state)
        else:
            _run_loop(node, state)
    return [_output(o, state) for o in program.outputs]


def _output(o: object, state: State) -> Any:
    if isinstance(o, View):
        return state.view(o)
    if isinstance(o, HostNumber):
        return state.number(o)
    return state.size(o) if isinstance(o, (int, ex.Expr)) and not isinstance(o, bool) else o


def _run_loop(node: Loop, state: State) -> None:
    sizes = [state.size(ex.size_of(d)) for d in loop_vars(node)]
    env: dict[Atom, torch.Tensor] = {}
    for k, d in enumerate(loop_vars(node)):
        shape = [1] * len(sizes)
        shape[k] = sizes[k]
        env[d] = torch.arange(sizes[k]).view(shape)
    out = state.flat[node.out] if node.out in state.flat else state.allocate(node.out)
    value = evaluate(node.value, env, state)
    value = torch.as_tensor(value).expand(sizes)
    if isinstance(node, Reduction):
        rank = len(node.dims)
        env = {d: env[d].view(env[d].shape[:rank]) for d in node.dims}
        value = _reduce(node, value, sizes[:rank])
        sizes = sizes[:rank]
    elif isinstance(node, Scan):
        value = _scan(node.op, value, len(node.dims))
    at = torch.as_tensor(evaluate_index(node.index, env, state)).expand(sizes)
    if isinstance(node, Scatter) and node.mode != "set":
        reduce = {"add": "sum", "prod": "prod", "max": "amax", "min": "amin"}[node.mode]
        out.scatter_reduce_(0, at.reshape(-1), value.reshape(-1).to(out.dtype), reduce)
    else:
        out[at.reshape(-1)] = value.reshape(-1).to(out.dtype)


def _reduce(node: Reduction, value: torch.Tensor, parallel_sizes: list[int]) -> torch.Tensor:
    flat = value.reshape(*parallel_sizes, -1)
    match node.op:
        case "sum":
            return flat.sum(-1, dtype=flat.dtype)
        case "prod":
            return flat.prod(-1, dtype=flat.dtype)
        case "max":
            return flat.amax(-1)
        case "min":
            return flat.amin(-1)
        case "any":
            return flat.any(-1)
        case "all":
            return flat.all(-1)
        case _:
            raise NotImplementedError(f"reduction {node.op}")


def _scan(op: str, value: torch.Tensor, dim: int) -> torch.Tensor:
    match op:
        case "sum":
            return value.cumsum(dim, dtype=value.dtype)
        case "prod":
            return value.cumprod(dim, dtype=value.dtype)
        case "max":
            return value.cummax(dim).values
        case "min":
            return value.cummin(dim).values
        case "logaddexp":
            return value.logcumsumexp(dim)
        case _:
            raise NotImplementedError(f"scan {op}")


def _run_extern(node: Extern, state: State) -> None:
    result = node.target(*_concrete(node.args, state), **{k: _concrete(v, state) for k, v in node.kwargs})
    results = torch.utils._pytree.tree_leaves(result) if node.multi else (result,)
    state.symbols |= {n: r for n, r in zip(node.outs, results, strict=False) if n in node.defines}
    named_results = dict(zip(node.outs, results, strict=False))
    for symbol, text in node.binds:
        state.symbols[symbol] = state.number(text, {k: r for k, r in named_results.items() if k})
    state.compute_numbers()
    for condition, message in node.requires:
        if not state.number(condition):
            raise RuntimeError(message)
    for name, r in zip(node.outs, results, strict=False):
        if name is None or not isinstance(r, torch.Tensor):
            continue
        b = state.program.buffers[name]
        flat = state.allocate(name)
        flat.as_strided([state.size(s) for s in b.sizes], [state.size(s) for s in b.strides]).copy_(r)


def _concrete(x: object, state: State) -> Any:
    if isinstance(x, View):
        return state.view(x)
    if isinstance(x, HostNumber):
        return state.number(x)
    if isinstance(x, ex.Expr):
        return state.size(x)
    if isinstance(x, tuple):
        return tuple(_concrete(y, state) for y in x)
    return [_concrete(y, state) for y in x] if isinstance(x, list) else x


def evaluate_index(e: Index, env: Env, state: State) -> torch.Tensor | int:
    """Return the value of an index expression: an int or an int64 tensor."""
    if isinstance(e, int):
        return e
    total: torch.Tensor | int = e.const
    for m, c in e.terms:
        term: torch.Tensor | int = c
        for a in m:
            term = term * _atom(a, env, state)
        total = total + term
    return total


def _atom(a: Atom, env: Env, state: State) -> torch.Tensor | int:
    match a:
        case ex.Var():
            return env[a]
        case ex.Sym():
            return state.symbols[a.name]
        case ex.Lookup():
            return evaluate(a.value, env, state)
    x, y = (evaluate_index(b, env, state) for b in a.operands)
    match a:
        case ex.FloorDiv():
            return x // y
        case ex.Mod():
            return x % y
        case _:
            pick = torch.maximum if isinstance(a, ex.Maximum) else torch.minimum
            return pick(torch.as_tensor(x), torch.as_tensor(y))


def evaluate(root: Value, env: Env, state: State) -> torch.Tensor:
    """Return the value of a scalar tree at every point of the grid that `env` spans.

    Indices of loads are clamped to the buffer, since a masked load may be out of range; its result is then masked out.
    """
    memo: dict[Value, torch.Tensor] = {}
    for v in va.walk(root):
        memo[v] = _evaluate_one(v, [memo[a] for a in v.args], env, state)
    return memo[root]


def _evaluate_one(v: Value, args: list[torch.Tensor], env: Env, state: State) -> torch.Tensor:
    match v.op:
        case "const":
            return torch.tensor(v.attr, dtype=v.dtype)
        case "load":
            flat = state.flat[v.attr[0]]
            at = torch.as_tensor(evaluate_index(v.attr[1], env, state))
            if flat.numel() == 0:
                return torch.zeros(at.shape, dtype=flat.dtype)
            return flat[at.clamp(0, flat.numel() - 1)]
        case "index":
            return torch.as_tensor(evaluate_index(v.attr, env, state))
        case "cast":
            return args[0].to(v.dtype)
        case "masked":
            condition, value, other = args
            return torch.where(condition, value, other)
        case "wrap_index":
            size = state.size(v.attr)
            return torch.where(args[0] < 0, args[0] + size, args[0])
        case "nonzero":
            return args[0]
        case _:
            return OPS[v.op].ref(*args)
