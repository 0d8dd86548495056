"""Print the checks of a library's inputs as C++, and the symbols that their sizes give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...errors import Unsupported
from ...ir import expr as ex
from ...ir.expr import Index
from ...ir.loops import Program
from ..cpp import print_cpp
from ..lines import Lines
from .cpp_values import dtype_text, ints, quoted

Named = Mapping[str, tuple[int, str]]
Ranges = Mapping[str, tuple[int, int]]


def bind(p: Program, w: Lines, named: Named, ranges: Ranges) -> list[str]:
    """Print the checks and the symbols; return the symbols. `named`: inputs of the caller, with number and name.

    Raise Unsupported for a size that no single dimension gives.
    """
    tensors = [b for b in p.inputs if b in named]
    for b in tensors:
        if b not in p.buffers:
            raise Unsupported(b, "an input of an ahead-of-time library that is no tensor")
        number, name = named[b]
        buffer = p.buffers[b]
        w.add(f"const Input in_{b}{{t_{b}.get(), {number}, {quoted(name)}}};")
        on_gpu = ", frame.device" if buffer.device.type == "cuda" else ""
        w.add(f"check_input(in_{b}, {dtype_text(buffer.dtype)}, {len(buffer.sizes)}{on_gpu});")
    meanings = dict(_bind_symbols(p, w, tensors, ranges))
    missing = {a.key for b in tensors for n in p.buffers[b].sizes for a in ex.syms_of(n)} - set(meanings)
    if missing:
        raise Unsupported(", ".join(sorted(missing)), "a size that no dimension of an input gives by itself")
    for b in tensors:
        buffer = p.buffers[b]
        why = ", ".join(quoted(_meaning(n, meanings, named)) for n in buffer.sizes)
        w.add(f"check_geometry(in_{b}, {ints(buffer.sizes)}, {ints(buffer.strides)}, {{{why}}});")
    return list(meanings)


def _bind_symbols(p: Program, w: Lines, tensors: list[str], ranges: Ranges) -> Iterator[tuple[str, tuple[str, int]]]:
    """Print each symbol at the first dimension that gives it; yield it with that dimension. Plain dimensions first."""
    bound: set[str] = set()
    dimensions = [(b, d, n) for b in tensors for d, n in enumerate(p.buffers[b].sizes) if not isinstance(n, int)]
    for plain in (True, False):
        for b, d, n in dimensions:
            form = _linear(n)
            if form is None or form[0] in bound or plain != (form[1:] == (1, 0)):
                continue
            symbol, scale, shift = form
            least, greatest = ranges.get(symbol, (0, ex.UNBOUNDED))
            limits = f"{least}LL, {greatest}LL"
            if plain:
                w.add(f"const int64_t {symbol} = size_in_range(in_{b}, {d}, {limits});")
            else:
                w.add(f"const int64_t {symbol} = symbol_in_size(in_{b}, {d}, {scale}, {shift}, {limits});")
            bound.add(symbol)
            yield symbol, (b, d)


def _linear(n: Index) -> tuple[str, int, int] | None:
    """Return (symbol, scale, shift) of a size `scale * symbol + shift`, scale > 0; None for another size."""
    if isinstance(n, int) or len(n.terms) != 1:
        return None
    ((atoms, scale),) = n.terms
    if len(atoms) != 1 or not isinstance(atoms[0], ex.Sym) or scale < 1:
        return None
    return atoms[0].key, scale, n.const


def _meaning(n: Index, bound: Mapping[str, tuple[str, int]], named: Named) -> str:
    """Return how a size follows from dimensions of inputs, for messages; "" for a constant."""
    if isinstance(n, int):
        return ""
    dims = [bound[a.key] for a in sorted(ex.syms_of(n), key=lambda a: a.key)]
    places = " and ".join(f"dimension {d} of input {named[b][0]} ({named[b][1]})" for b, d in dims)
    symbol = print_cpp.index(n)
    return f"{symbol}, by {places}"
