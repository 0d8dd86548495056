"""Single operators at the sizes at which people time them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.cases.case import Case
from benchmarks.cases.programs.program import Program, case, of

PRODUCTS: tuple[Case, ...] = (
    case("product square", (2048,), (384,), lambda n: of(lambda _, a, b: a @ b, (n, n), (n, n))),
    case(
        "product of odd sizes",
        (2050, 1477, 2961),
        (205, 147, 296),
        lambda m, k, n: of(lambda _, a, b: a @ b, (m, k), (k, n)),
    ),
    case("product tall", (16384, 16), (2048, 16), lambda m, n: of(lambda _, a, b: a @ b, (m, n), (n, m // 4))),
    case("product deep", (256, 131072), (64, 8192), lambda m, k: of(lambda _, a, b: a @ b, (m, k), (k, m))),
    case("product by a vector", (2048, 65536), (256, 8192), lambda m, k: of(lambda _, a, b: a @ b, (m, k), (k, 1))),
    case(
        "product of transposes",
        (1024, 4096, 2048),
        (128, 256, 192),
        lambda m, k, n: of(lambda _, a, b: a.T @ b.T, (k, m), (n, k)),
    ),
    case(
        "batched product",
        (64, 256, 512, 192),
        (8, 64, 96, 48),
        lambda b, m, k, n: of(lambda _, x, y: torch.bmm(x, y), (b, m, k), (b, k, n)),
    ),
    case(
        "product of four dimensions",
        (16, 64, 128),
        (2, 16, 32),
        lambda b, n, k: of(lambda _, x, y: torch.einsum("bijl,lk->bijk", x, y), (b, n, n, k), (k, 2 * k)),
    ),
    case("diagonal product", (4096,), (512,), lambda n: of(lambda _, d, b: torch.diag(d) @ b, (n,), (n, n))),
    case(
        "product of triangles",
        (4096,),
        (384,),
        lambda n: of(lambda _, a, b: torch.tril(torch.tril(a) @ torch.tril(b)), (n, n), (n, n)),
    ),
    case("symmetric product", (3000,), (300,), lambda n: of(lambda _, a: (a + a.T) @ (a + a.T), (n, n))),
)

WIDE = (512, 65536), (64, 4096)
POINTWISE: tuple[Case, ...] = tuple(
    case(f"pointwise {name}", *WIDE, lambda m, n, fn=fn: of(lambda _, x: fn(x), (m, n)))
    for name, fn in {
        "relu": F.relu,
        "gelu": F.gelu,
        "selu": F.selu,
        "hardsigmoid": F.hardsigmoid,
        "softplus": F.softplus,
        "softsign": F.softsign,
        "mish": F.mish,
        "tanh": torch.tanh,
        "hardtanh": F.hardtanh,
        "gelu by hand": lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x.pow(3)))),
        "softmax": lambda x: torch.softmax(x, 1),
        "log softmax": lambda x: torch.log_softmax(x, 1),
    }.items()
)

IMAGES = (32, 64, 256), (2, 16, 32)
NORMS: tuple[Case, ...] = (
    case("norm batch", *IMAGES, lambda n, c, s: (nn.BatchNorm2d(c), (torch.randn(n, c, s, s),))),
    case("norm instance", *IMAGES, lambda n, c, s: (nn.InstanceNorm2d(c), (torch.randn(n, c, s, s),))),
    case("norm group", *IMAGES, lambda n, c, s: (nn.GroupNorm(8, c), (torch.randn(n, c, s, s),))),
    case(
        "norm layer of images",
        (16, 64, 256),
        (2, 16, 32),
        lambda n, c, s: (nn.LayerNorm((c, s, s)), (torch.randn(n, c, s, s),)),
    ),
    case(
        "norm rms over channels",
        *IMAGES,
        lambda n, c, s: of(lambda _, x: x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt(), (n, c, s, s)),
    ),
    case("norm Frobenius", *IMAGES, lambda n, c, s: of(lambda _, x: x / torch.norm(x, p="fro"), (n, c, s, s))),
    case(
        "norm L1 of rows",
        (2048, 32768),
        (64, 2048),
        lambda m, n: of(lambda _, x: x / x.abs().sum(1, keepdim=True), (m, n)),
    ),
    case(
        "norm L2 of rows",
        (2048, 32768),
        (64, 2048),
        lambda m, n: of(lambda _, x: x / x.norm(p=2, dim=1, keepdim=True), (m, n)),
    ),
)

POOLS: tuple[Case, ...] = (
    case(
        "pool max 1-d",
        (64, 128, 8192),
        (4, 32, 512),
        lambda n, c, s: (nn.MaxPool1d(8, 1, 4, 3), (torch.randn(n, c, s),)),
    ),
    case(
        "pool max 2-d", (32, 64, 256), (2, 16, 64), lambda n, c, s: (nn.MaxPool2d(4, 1, 1), (torch.randn(n, c, s, s),))
    ),
    case(
        "pool max 3-d",
        (8, 32, 64),
        (1, 8, 24),
        lambda n, c, s: (nn.MaxPool3d(3, 2, 1, 3), (torch.randn(n, c, s, s, s),)),
    ),
    case(
        "pool average 1-d",
        (64, 128, 16384),
        (4, 32, 512),
        lambda n, c, s: (nn.AvgPool1d(8, 1, 4), (torch.randn(n, c, s),)),
    ),
    case(
        "pool average 2-d", (16, 64, 512), (2, 16, 64), lambda n, c, s: (nn.AvgPool2d(11), (torch.randn(n, c, s, s),))
    ),
    case(
        "pool average 3-d",
        (8, 32, 96),
        (1, 8, 24),
        lambda n, c, s: (nn.AvgPool3d(3, 2, 1), (torch.randn(n, c, s, s, s),)),
    ),
)

VOLUME = (32, 1024, 1023), (4, 96, 95)
REDUCTIONS: tuple[Case, ...] = (
    *(
        case(
            f"reduce {name} over dimension {dim}",
            *VOLUME,
            lambda b, m, n, fn=fn, dim=dim: of(lambda _, x: fn(x, dim), (b, m, n)),
            "inference" if name.startswith("arg") else None,
        )
        for dim in (1, 2)
        for name, fn in {
            "sum": lambda x, d: x.sum(d, keepdim=True),
            "mean": torch.mean,
            "max": torch.amax,
            "argmin": torch.argmin,
            "argmax": torch.argmax,
            "logsumexp": torch.logsumexp,
        }.items()
    ),
    case("reduce product", (16, 256, 257), (4, 64, 65), lambda b, m, n: of(lambda _, x: torch.prod(x, 1), (b, m, n))),
    case("scan sum", (4096, 8192), (64, 1024), lambda m, n: of(lambda _, x: torch.cumsum(x, 1), (m, n))),
    case("scan product", (4096, 8192), (64, 1024), lambda m, n: of(lambda _, x: torch.cumprod(x, 1), (m, n))),
    case("scan reversed", (4096, 8192), (64, 1024), lambda m, n: of(lambda _, x: x.flip(1).cumsum(1).flip(1), (m, n))),
    case(
        "scan exclusive",
        (4096, 8192),
        (64, 1024),
        lambda m, n: of(lambda _, x: torch.cat((torch.zeros_like(x[:, :1]), x), 1)[:, :-1].cumsum(1), (m, n)),
    ),
    case("scan masked", (4096, 8192), (64, 1024), lambda m, n: of(lambda _, x: torch.cumsum(x * (x > 0), 1), (m, n))),
)

PAIR = (32768, 1024), (256, 128)
LOSSES: tuple[Case, ...] = (
    case("loss mse", *PAIR, lambda m, n: of(lambda _, x, y: F.mse_loss(x, y), (m, n), (m, n))),
    case("loss huber", *PAIR, lambda m, n: of(lambda _, x, y: F.smooth_l1_loss(x, y), (m, n), (m, n))),
    case(
        "loss cosine", *PAIR, lambda m, n: of(lambda _, x, y: (1 - F.cosine_similarity(x, y, 1)).mean(), (m, n), (m, n))
    ),
    case(
        "loss divergence",
        *PAIR,
        lambda m, n: of(
            lambda _, x, y: F.kl_div(x.softmax(-1).log(), y.softmax(-1), reduction="batchmean"), (m, n), (m, n)
        ),
    ),
    case(
        "loss triplet",
        *PAIR,
        lambda m, n: of(lambda _, a, p, q: F.triplet_margin_loss(a, p, q), (m, n), (m, n), (m, n)),
    ),
    case(
        "loss hinge",
        *PAIR,
        lambda m, n: of(lambda _, x, y: torch.clamp(1 - x * y.sign(), min=0).mean(), (m, n), (m, n)),
    ),
    case(
        "loss cross entropy",
        (16384, 4096),
        (256, 128),
        lambda m, n: (Program(lambda _, x, y: F.cross_entropy(x, y)), (torch.randn(m, n), torch.randint(n, (m,)))),
    ),
    case(
        "attention",
        (16, 16, 512, 64),
        (1, 4, 64, 32),
        lambda b, h, n, d: of(lambda _, q, k, v: F.scaled_dot_product_attention(q, k, v), *[(b, h, n, d)] * 3),
    ),
)

CASES = (*PRODUCTS, *POINTWISE, *NORMS, *POOLS, *REDUCTIONS, *LOSSES)
