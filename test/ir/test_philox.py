"""Philox: published test vectors, and equal bits from the reference, the C++ kernels and the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.ir import philox
from altbackend.runtime import philox as calls
from test import seeded, triton_run
from test.compare import compiled

pytestmark = pytest.mark.sample(3)

ONES = 0xFFFFFFFF
# The vector of Random123's kat_vectors for philox4x32-10 whose upper counter words are zero: counter, key, result.
KNOWN = [((0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8))]


def in_python(counter: tuple[int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Compute Philox in Python integers, which do not wrap."""
    c, (k0, k1) = [*counter, 0, 0], key
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k0, b & ONES, (a >> 32) ^ c[3] ^ k1, a & ONES]
        k0, k1 = (k0 + 0x9E3779B9) & ONES, (k1 + 0xBB67AE85) & ONES
    return tuple(c)


def signed(low: int, high: int) -> torch.Tensor:
    value = low | high << 32
    return torch.tensor(value - (1 << 64) if value >> 63 else value)


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_known_answers(counter: tuple[int, int], key: tuple[int, int], want: tuple[int, ...]) -> None:
    assert in_python(counter, key) == want
    assert tuple(int(w) for w in philox.words(signed(*key), signed(*counter))) == want


@pytest.mark.parametrize("counter", [(1, 0), (ONES, 0), (0, 1), (0x243F6A88, 0x05A308D3), (ONES, 0x7FFFFFFF)])
@pytest.mark.parametrize("key", [(5, 0), (0, 9), (0xA4093822, 0x299F31D0), (ONES, ONES)])
def test_the_reference_wraps_as_integers_do(counter: tuple[int, int], key: tuple[int, int]) -> None:
    want = in_python(counter, key)
    seed, at = signed(*key), signed(*counter)
    assert tuple(int(w) for w in philox.words(seed, at)) == want
    assert float(philox.radius(seed, at)) == (want[0] >> 8) / 2**24
    assert float(philox.turn(seed, at)) == (want[1] >> 8) / 2**24
    assert int(philox.bits(seed, at)) == int(signed(want[0], want[1]))


def test_four_neighbours_are_the_words_of_a_block() -> None:
    seed, at = torch.tensor(-77), torch.arange(8, 24).view(2, 8)
    u = philox.uniform(seed, at)
    for k in range(4):
        assert torch.equal(u.view(4, 4)[:, k] * 2**24, (philox.words(seed, torch.arange(2, 6))[k] >> 8).float())
    assert torch.equal(philox.uniform(seed, at[1, 3]), u[1, 3])


SIZES = (37, 53)


def all_draws() -> list[torch.Tensor]:
    return [
        torch.rand(SIZES),
        torch.rand(SIZES, dtype=torch.float64),
        torch.rand(SIZES, dtype=torch.bfloat16),
        torch.randint(-5, 1000, SIZES),
        torch.randint(0, 2**31, SIZES),
        torch.empty(SIZES).bernoulli_(0.3),
        torch.randn(SIZES),
        torch.randn(SIZES, dtype=torch.float64),
    ]


EXACT = 6  # the first so many; normal numbers go through each language's own logarithm and cosine


def by_calls() -> list[torch.Tensor]:
    """Return the results of `runtime.philox` for the seeds that the graph of `all_draws` draws."""
    s = calls.philox_seeds(8, torch.device("cpu"))
    f32, f64 = torch.float32, torch.float64
    return [
        calls.philox_uniform(s[0], SIZES, f32),
        calls.philox_uniform(s[1], SIZES, f64),
        calls.philox_uniform(s[2], SIZES, torch.bfloat16),
        calls.philox_integers(s[3], SIZES, -5, 1000, torch.int64),
        calls.philox_integers(s[4], SIZES, 0, 2**31, torch.int64),
        (calls.philox_uniform(s[5], SIZES, f32) < 0.3).float(),
        calls.philox_normal(s[6], SIZES, f32),
        calls.philox_normal(s[7], SIZES, f64),
    ]


FORMS: dict[str, Callable[[], Any]] = {
    "C++": lambda: compiled(all_draws),
    "Triton": lambda: seeded.interpreted(all_draws, kernels=True),
    "loop IR": lambda: seeded.interpreted(all_draws, kernels=False),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_language_gives_the_same_bits(form: str) -> None:
    run = FORMS[form]()
    torch.manual_seed(23)
    got = run()
    torch.manual_seed(23)
    want = by_calls()
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype
        if k < EXACT:
            assert torch.equal(a, b), f"{k}: {int((a != b).sum())} of {a.numel()} differ"
        else:
            torch.testing.assert_close(a, b, atol=2e-6 if a.dtype == torch.float32 else 1e-12, rtol=1e-5)
    assert triton_run.compile_errors() == []


def residual(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.gelu(x), 0.2) + 1


def after_softmax(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.softmax(x, -1), 0.2) * 3


def columns(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.2).sum(0)


def turned(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.2).transpose(-1, -2) + x.new_ones(x.shape[-1], 1)


# function, size, and whether a program of a GPU computes one block for four neighbours
DROPOUTS = {
    "elements": (residual, (40, 30), True),
    "odd elements": (residual, (7, 13, 3), True),
    "rows": (after_softmax, (30, 96), True),
    "odd rows": (after_softmax, (30, 95), False),
    "long rows": (after_softmax, (1, 20000), True),
    "columns": (columns, (512, 64), False),
    "transposed": (turned, (64, 48), None),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", DROPOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_a_gpu_drops_what_that_of_a_cpu_drops(name: str, dtype: torch.dtype) -> None:
    fn, sizes, shared = DROPOUTS[name]
    seen: list[Any] = []
    x = (torch.rand(sizes, generator=torch.Generator().manual_seed(1)) + 1).to(dtype)
    outs = []
    for run in (compiled(fn), seeded.interpreted(fn, kernels=True, seen=seen), seeded.interpreted(fn, kernels=False)):
        torch.manual_seed(2)
        outs.append(run(x))
    for got in outs[1:]:
        torch.testing.assert_close(got, outs[0])
    sources = "".join(step[0].source for step in seen if isinstance(step, tuple))
    assert shared is None or ("philox_uniform_quads(t" in sources) == shared
    assert triton_run.compile_errors() == []
