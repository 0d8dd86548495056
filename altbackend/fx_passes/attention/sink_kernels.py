"""Attention whose softmax has one more column without a value, by the fused kernels of the device.

The kernels return the logarithm `lse` of the sum of exponentials of each row. With a sink, it is

    total = log(exp(lse) + exp(sink)),  result = attention * exp(lse - total)

Their gradients compute weights exp(score - lse) and subtract the row sums of gradient * result. With `total` and the
new result in place of the old ones, they are the gradients with a sink. That of the sink is

    -exp(sink - total) * sum(gradient * result)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from altbackend.lazy_dataclass import dataclass

T = torch.Tensor
aten = torch.ops.aten
_BIAS_COLUMNS = 16  # torch pads the rows of a bias to as many elements
_ROWS = 32  # the memory-efficient kernel pads logarithms to as many rows


def attention_with_sink(query: T, key: T, value: T, sink: T, options: tuple[T | None, bool, float]) -> T:
    """Return softmax([query key^T * scale + mask, sink])[..., :-1] value.

    The operands have four dimensions: (batch, heads, positions, features). `sink`: (batch, heads, positions, 1).
    `options`: the mask, whether it is causal in place of a mask, and the scale.
    """
    mask, causal, scale = options
    apply: Callable[..., T] = _WithSink.apply
    return apply(query, key, value, sink, mask, causal, scale)


class _WithSink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: T, key: T, value: T, sink: T, *options: Any) -> T:
        call = _Call(query, key, value, *options)
        attention, lse, more = call.forward()
        total = torch.logaddexp(lse, sink.squeeze(-1).to(lse.dtype))
        result = (attention * torch.exp(lse - total).unsqueeze(-1)).to(attention.dtype)
        tensors = [x if isinstance(x, torch.Tensor) else None for x in more]
        ctx.numbers = [None if isinstance(x, torch.Tensor) else x for x in more]
        ctx.options = options[1:]
        ctx.save_for_backward(query, key, value, sink, options[0], result, total, *tensors)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> tuple[T | None, ...]:
        query, key, value, sink, mask, result, total, *tensors = ctx.saved_tensors
        more = [number if x is None else x for x, number in zip(tensors, ctx.numbers, strict=True)]
        gradient = gradients[0].contiguous()
        call = _Call(query, key, value, mask, *ctx.options)
        of_operands = call.backward(gradient, result, total, more)
        rows = (gradient.to(total.dtype) * result).sum(-1, keepdim=True)
        of_sink = -torch.exp(sink.to(total.dtype) - total.unsqueeze(-1)) * rows
        return (*of_operands, of_sink.to(sink.dtype), None, None, None)


@dataclass(frozen=True)
class _Call:
    """One attention without a sink, and its fused kernel."""

    query: T
    key: T
    value: T
    mask: T | None
    causal: bool
    scale: float

    def forward(self) -> tuple[T, T, tuple[Any, ...]]:
        """Return the attention, the logarithms (batch, heads, positions), and what the gradient needs too."""
        q, k, v, scale = self.query, self.key, self.value, self.scale
        if q.device.type == "cpu":
            flash_cpu = aten._scaled_dot_product_flash_attention_for_cpu.default
            result, lse = flash_cpu(q, k, v, 0.0, self.causal, attn_mask=self.mask, scale=scale)
            return result, lse, ()
        if self._is_flash():
            result, lse, *more, _ = aten._scaled_dot_product_flash_attention.default(
                q, k, v, 0.0, self.causal, False, scale=scale
            )
            return result, lse, tuple(more)
        result, lse, *more = aten._scaled_dot_product_efficient_attention.default(
            q, k, v, self._bias(), True, 0.0, self.causal, scale=scale
        )
        return result, lse[..., : q.shape[-2]], tuple(more)

    def backward(self, gradient: T, result: T, lse: T, more: list[Any]) -> tuple[T, T, T]:
        """Return the gradients of query, keys and values."""
        operands, scale = (gradient, self.query, self.key, self.value), self.scale
        if gradient.device.type == "cpu":
            flash_cpu = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            of_cpu: tuple[T, T, T] = flash_cpu(
                *operands, result, lse, 0.0, self.causal, attn_mask=self.mask, scale=scale
            )
            return of_cpu
        if self._is_flash():
            *cumulated, seed, offset = more
            flash = aten._scaled_dot_product_flash_attention_backward.default
            of_flash: tuple[T, T, T] = flash(
                *operands, result, lse, *cumulated, 0.0, self.causal, seed, offset, scale=scale
            )
            return of_flash
        padded = F.pad(lse, (0, -lse.shape[-1] % _ROWS), value=math.inf)  # rows that give no weight
        given = (0.0, [True, True, True, False], self.causal)
        of_query, of_key, of_value, _ = aten._scaled_dot_product_efficient_attention_backward.default(
            *operands, self._bias(), result, padded, *more, *given, scale=scale
        )
        return of_query, of_key, of_value

    def _is_flash(self) -> bool:
        equal = isinstance(self.value.shape[-1], int) and self.query.shape[-1] == self.value.shape[-1]
        is_half = self.query.dtype in (torch.float16, torch.bfloat16)
        return equal and self.mask is None and is_half and _has_flash(self.query.device)

    def _bias(self) -> T | None:
        """Return the mask for each head, with rows that begin at multiples of 32 bytes in memory of its own."""
        if self.mask is None:
            return None
        keys = self.key.shape[-2]
        padded = F.pad(self.mask.expand(*self.mask.shape[:-1], keys), (0, -keys % _BIAS_COLUMNS))
        padded = padded.clone(memory_format=torch.contiguous_format)
        return padded[..., :keys].expand(*self.query.shape[:-1], keys)


def _has_flash(device: torch.device) -> bool:
    """Return whether a GPU has FlashAttention, which needs compute capability 8.0; True without a GPU, for tracing."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)
