"""Mark the inputs of a program whose memory it may take over after their last use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..aten.collective import is_start
from ..ir.loops import Extern, Program, View, reads, writes


def with_donated(p: Program, inputs: Iterable[int]) -> Program:
    """Return the program with the inputs of these numbers marked as donated.

    Three kinds of inputs are left out. A result, or the result of a call, may be a view of the input; a node writes it;
    or a collective reads it after its call has returned.
    """
    excluded = {o.buffer for o in p.outputs if isinstance(o, View)}
    for n in p.nodes:
        excluded.update(writes(n))
        if isinstance(n, Extern):
            excluded.update(n.aliases)
            excluded.update(reads(n) if is_start(n.target) else ())
    names = (p.inputs[k] for k in inputs)
    donated = {b for b in names if b in p.buffers and b not in excluded and not p.buffers[b].negative}
    if not donated:
        return p
    buffers = {b: replace(buffer, donated=True) if b in donated else buffer for b, buffer in p.buffers.items()}
    return replace(p, buffers=buffers)
