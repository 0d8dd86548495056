"""The suite of small cases: one pattern of memory traffic each, so that a result can be explained."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cases.case import Built, Case, Preset
from benchmarks.cases.optimizers import OPTIMIZER_CASES

ROWS_COLUMNS: dict[Preset, tuple[int, int]] = {
    "tiny": (24, 40),
    "cpu": (2048, 768),
    "gpu": (16384, 4096),
    "serve": (16, 4096),
}
SQUARE: dict[Preset, int] = {"tiny": 24, "cpu": 1024, "gpu": 8192, "serve": 512}
VOCABULARY: dict[Preset, int] = {"tiny": 50, "cpu": 30522, "gpu": 30522, "serve": 30522}
Shape = Callable[[Preset], tuple[int, ...]]


class Function(nn.Module):
    """A plain function of tensors as a module without parameters."""

    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(*inputs)


def rows_columns(preset: Preset) -> tuple[int, ...]:
    return ROWS_COLUMNS[preset]


def square(preset: Preset) -> tuple[int, ...]:
    return SQUARE[preset], SQUARE[preset]


def columns(preset: Preset) -> tuple[int, ...]:
    return ROWS_COLUMNS[preset][1:]


def cube(preset: Preset) -> tuple[int, ...]:
    """As many elements as rows_columns, in three dimensions, the first of 8."""
    rows, width = ROWS_COLUMNS[preset]
    return 8, rows // 8, width


def heads(preset: Preset) -> tuple[int, ...]:
    """[batch, sequence, heads, 8], as many elements as rows_columns."""
    rows, width = ROWS_COLUMNS[preset]
    return 4, rows // 4, width // 8, 8


def small_rows(preset: Preset) -> tuple[int, ...]:
    rows, width = ROWS_COLUMNS[preset]
    return rows * width // 8, 8


def few_rows(preset: Preset) -> tuple[int, ...]:
    rows, width = ROWS_COLUMNS[preset]
    return 3, rows * width // 3


class NormChain(nn.Module):
    """`depth` times: x = x + softmax(gelu(h) * sigmoid(h)) with h = LayerNorm(x), over rows of `width`."""

    def __init__(self, width: int, depth: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        for norm in self.norms:
            assert isinstance(norm, nn.LayerNorm)
            nn.init.normal_(norm.weight, 1.0, 0.2)
            nn.init.normal_(norm.bias, 0.0, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            h = norm(x)
            x = x + torch.softmax(F.gelu(h) * torch.sigmoid(h), dim=-1)
        return x


class Embed(nn.Module):
    """Token embedding + position embedding, then LayerNorm: the entry of a language model."""

    def __init__(self, vocabulary: int, positions: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[-1], device=ids.device)
        result: Tensor = self.norm(self.tokens(ids) + self.positions(at))
        return result


def norm_chain(preset: Preset) -> Built:
    rows, width = ROWS_COLUMNS[preset]
    return NormChain(width), (torch.randn(rows, width),), {}


def embedding(preset: Preset) -> Built:
    rows, width = ROWS_COLUMNS[preset]
    ids = torch.randint(0, VOCABULARY[preset], (4, rows // 4))
    return Embed(VOCABULARY[preset], rows // 4, width), (ids,), {}


def layer_norm(preset: Preset) -> Built:
    rows, width = ROWS_COLUMNS[preset]
    return nn.LayerNorm(width), (torch.randn(rows, width),), {}


def cross_entropy(preset: Preset) -> Built:
    rows, classes = ROWS_COLUMNS[preset][0] // 4, VOCABULARY[preset]
    logits, labels = torch.randn(rows, classes), torch.randint(0, classes, (rows,))
    return Function(F.cross_entropy), (logits, labels), {}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def gelu_bias_residual(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.gelu(x + bias) + residual


def gelu_softmax_columns(x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(F.gelu(x) * y, dim=-1).sum(dim=0)


def pointwise_chain(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(x * y + 0.5) - torch.exp(-x.abs()) * y
    return x


def pointwise_branches(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three outputs of the same two inputs: one pass over memory if they become one kernel."""
    s = torch.sigmoid(x)
    return s * y, torch.where(x > y, s, y), torch.clamp(x - y, -1.0, 1.0)


def concat_slice(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    joined = torch.cat([x.sin(), y.cos()], dim=-1)
    half = x.shape[-1] // 2
    return joined[:, half:-half] * 2.0, joined[:, ::2] + 1.0


def rotate_halves(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The rotary embedding of the rows of x."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine


def _function(name: str, function: Callable[..., Tensor | tuple[Tensor, ...]], *shapes: Shape) -> Case:
    def build(preset: Preset) -> Built:
        return Function(function), tuple(torch.randn(shape(preset)) for shape in shapes), {}

    return Case(name, build, input_gradients=True)


NORM_CHAIN = Case("norm_chain", norm_chain, input_gradients=True)

CASES: tuple[Case, ...] = (
    NORM_CHAIN,
    _function("softmax_rows", partial(torch.softmax, dim=-1), rows_columns),
    _function("softmax_columns", partial(torch.softmax, dim=0), rows_columns),
    _function("gelu_bias_residual", gelu_bias_residual, rows_columns, columns, rows_columns),
    _function("gelu_softmax_columns", gelu_softmax_columns, square, square),
    _function("transpose_copy", lambda x: x.t().contiguous() * 2.0, rows_columns),
    _function("transpose_add", lambda x, y: x + y.t(), square, square),
    _function("permute_heads", lambda x: x.permute(0, 2, 1, 3).contiguous().relu(), heads),
    _function("sum_rows", lambda x: x.exp().sum(dim=-1), rows_columns),
    _function("sum_columns", lambda x: x.exp().sum(dim=0), rows_columns),
    _function("sum_full", lambda x: x.exp().sum(), rows_columns),
    _function("sum_middle", lambda x: x.exp().sum(dim=1), cube),
    _function("sum_outer_inner", lambda x: x.exp().sum(dim=(0, 2)), cube),
    _function("sum_small_rows", lambda x: x.exp().sum(dim=-1), small_rows),
    _function("sum_few_rows", lambda x: x.exp().sum(dim=-1), few_rows),
    _function("max_rows", lambda x: x.abs().amax(dim=-1), rows_columns),
    _function("variance_rows", lambda x: torch.var_mean(x, dim=-1), rows_columns),
    Case("embedding", embedding),
    _function("rms_norm", rms_norm, rows_columns, columns),
    Case("layer_norm", layer_norm, input_gradients=True),
    Case("layer_norm_training", layer_norm, mode="training", input_gradients=True),
    Case("cross_entropy", cross_entropy, input_gradients=True),
    Case("cross_entropy_training", cross_entropy, mode="training", input_gradients=True),
    _function("pointwise_chain", pointwise_chain, rows_columns, rows_columns),
    _function("pointwise_branches", pointwise_branches, rows_columns, rows_columns),
    _function("concat_slice", concat_slice, rows_columns, rows_columns),
    _function("rotate_halves", rotate_halves, rows_columns, columns, columns),
    *OPTIMIZER_CASES,
)
