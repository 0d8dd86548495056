"""The kernels of an attention call on a GPU."""

from __future__ import annotations

from ...compat import torch_api
from ...ir.attention import Attention
from ...ir.loops import Program
from ...ir.ops import LOW_PRECISION
from ...schedule.attention import backward_tiles, forward_tiles, splits_of
from ...schedule.device import Gpu, ScheduleContext
from .print_triton import TritonKernel
from .templates.attention_backward import by_keys, by_queries
from .templates.attention_forward import forward
from .templates.attention_split import split_forward


def emit(p: Program, form: Attention, ctx: ScheduleContext) -> list[tuple[TritonKernel, tuple[str, ...]]]:
    """Return the kernels of a call in order, each with the buffers of its parameters."""
    device = ctx.device
    assert isinstance(device, Gpu)
    low = p.buffers[form.query.buffer].dtype in LOW_PRECISION
    fast, tf32 = ctx.fast_math and low, torch_api.allows_tf32()
    exact = not low and not tf32
    if form.backward is None:
        tiles = forward_tiles(p, form, device, exact)
        splits = splits_of(form, tiles, device)
        if splits > 1:
            return [split_forward(p, form, tiles, fast, tf32, splits)]
        return [forward(p, form, tiles, fast, tf32)]
    by_query, by_key, by_value = form.out[:3]
    kernels = []
    if by_key is not None or by_value is not None:
        kernels.append(by_keys(p, form, backward_tiles(p, form, device, exact, by_keys=True), fast, tf32))
    if by_query is not None or form.backward.captured:
        kernels.append(by_queries(p, form, backward_tiles(p, form, device, exact, by_keys=False), fast, tf32))
    return kernels
