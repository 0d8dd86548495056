"""Patterns as Python text, which loads without tracing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .terms import Arg, Call, Like, Term
from .trace import Traced


def text_of(name: str, pattern: Traced) -> str:
    """Return a function `name` that builds a pattern, as text."""
    lines: list[str] = []
    names: dict[Term, str] = {}
    outputs = [_write(term, names, lines) for term in pattern.outputs]
    body = "".join(f"    {line}\n" for line in lines)
    return (
        f"def {name}() -> Traced:\n"
        f'    """Return the pattern {name}."""\n{body}'
        f"    names = {pattern.names!r}\n"
        f"    outputs = ({', '.join(outputs)},)\n"
        f"    return Traced(names, outputs, {pattern.positions!r}, {pattern.with_gradients!r})\n"
    )


def _write(term: object, names: dict[Term, str], lines: list[str]) -> str:
    """Return the expression of a term; lines before it define the calls that it contains, each once."""
    match term:
        case Arg(name):
            return f"Arg({name!r})"
        case Like(kind):
            return f"Like({kind!r})"
        case Call((target,), args):
            if term not in names:
                inner = ", ".join(_write(arg, names, lines) for arg in args)
                names[term] = f"n{len(names)}"
                lines.append(f"{names[term]} = call({_target(target)}, {inner})")
            return names[term]
        case tuple() | list():
            inner = "".join(f"{_write(item, names, lines)}, " for item in term)
            return f"({inner.rstrip()})"
        case torch.dtype() | torch.memory_format() | torch.layout():
            return str(term)
        case None | bool() | int() | float() | str():
            return repr(term)
    raise ValueError(f"a pattern with {term!r} has no text form")


def _target(target: Callable[..., object]) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)  # aten.add.Tensor
    return f"{target.__module__.removeprefix('_')}.{target.__name__}"


HEADER = '''"""Patterns of `{source}`. `python -m altbackend patterns --write` writes this file."""

# fmt: off
from __future__ import annotations

from collections.abc import Callable

import torch

from ..pattern.terms import Arg, Like, call
from ..pattern.trace import Traced

aten = torch.ops.aten


'''


def module_of(source: str, patterns: Mapping[str, Traced]) -> str:
    """Return the text of a module with patterns, by name in the table `PATTERNS`."""
    functions = "\n\n".join(text_of(name, pattern) for name, pattern in patterns.items())
    rows = "".join(f'    "{name}": {name},\n' for name in patterns)
    table = f"\n\nPATTERNS: dict[str, Callable[[], Traced]] = {{\n{rows}}}\n"
    return HEADER.format(source=source) + functions + table
