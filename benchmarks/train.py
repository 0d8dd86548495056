"""python -m benchmarks.train: the loss of a small GPT over a few hundred steps, eager and compiled, on this text.

A character-level model learns the repository's own Markdown. Dropout is on; AdamW's step is compiled too. The compiled
runs draw eager's random numbers (`fallback_random`), so that their losses follow eager's, or the backend's own. Some
runs checkpoint every block or lower the memory budget. Compilations after the second step are counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import altbackend
from benchmarks.lines import picture_of_lines

ROOT = Path(__file__).parents[1]
WARM_UP = 2  # steps after which nothing may be compiled


@dataclass(frozen=True)
class Size:
    """The sizes of the model and of a batch."""

    layers: int = 4
    width: int = 64
    heads: int = 4
    length: int = 64
    batch: int = 16
    dropout: float = 0.1


@dataclass(frozen=True)
class Run:
    """One way to train: whether blocks are checkpointed, and the backend's options; None for eager."""

    checkpointed: bool = False
    options: Mapping[str, Any] | None = None


RUNS: Mapping[str, Run] = {
    "eager": Run(),
    "alt": Run(options={"fallback_random": True}),
    "alt, checkpointed": Run(True, {"fallback_random": True}),
    "alt, budget 0.3": Run(options={"fallback_random": True, "activation_memory_budget": 0.3}),
    "alt, own numbers": Run(options={}),
    "alt, own numbers, checkpointed": Run(True, {}),
}


class Block(nn.Module):
    """A pre-norm block of causal attention and a GELU MLP, with dropout, on [N, T, width]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.dropout = size.heads, size.dropout
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, width)
        x = x + F.dropout(self.out(mixed), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class Model(nn.Module):
    """Characters [N, T] (int64) and the next ones to the mean cross-entropy."""

    def __init__(self, size: Size, vocabulary: int, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed, self.dropout = checkpointed, size.dropout
        self.tokens, self.places = nn.Embedding(vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, vocabulary)

    def forward(self, now: Tensor, following: Tensor) -> Tensor:
        places = torch.arange(now.shape[1], device=now.device)
        x = F.dropout(self.tokens(now) + self.places(places), self.dropout)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def text_of_the_repository() -> str:
    """Return the Markdown of the repository, one file after the other."""
    return "\n".join(
        path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md"))
    )


def batches(size: Size, steps: int, device: str) -> tuple[int, Iterator[tuple[Tensor, Tensor]]]:
    """Return the number of characters, and the batches of all steps, which a fixed seed chooses."""
    text = text_of_the_repository()
    letters = {c: k for k, c in enumerate(sorted(set(text)))}
    data = torch.tensor([letters[c] for c in text], device=device)
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, len(data) - size.length - 1, (steps, size.batch), generator=generator)

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for row in starts:
            cut = torch.stack([data[k : k + size.length + 1] for k in row.tolist()])
            yield cut[:, :-1], cut[:, 1:]

    return len(letters), pairs()


@dataclass
class Trained:
    """The results of one run: the loss of each step, the seconds of a late step, compilations after the warm-up."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    late_compilations: int = 0


def train(run: Run, size: Size, steps: int, device: str) -> Trained:
    """Train from a fixed seed."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    vocabulary, pairs = batches(size, steps, device)
    model = Model(size, vocabulary, run.checkpointed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    forward: Callable[..., Tensor] = model
    update: Callable[[], Any] = optimizer.step
    if run.options is not None:
        options: Any = {"strict": True, **run.options}
        forward = torch.compile(model, backend=altbackend.alt, options=options)
        update = torch.compile(optimizer.step, backend=altbackend.alt)
    out, times, compiled = Trained(), list[float](), 0
    torch.manual_seed(2)
    for k, (now, following) in enumerate(pairs):
        start = time.perf_counter()
        loss = forward(now, following)
        torch.autograd.backward(loss)
        update()
        optimizer.zero_grad()
        out.losses.append(loss.item())
        times.append(time.perf_counter() - start)
        if k + 1 == WARM_UP:
            compiled = graphs_compiled()
    out.seconds = sorted(times[WARM_UP:])[(len(times) - WARM_UP) // 2] if len(times) > WARM_UP else 0.0
    out.late_compilations = graphs_compiled() - compiled
    return out


def graphs_compiled() -> int:
    """Return how many graphs Dynamo has compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def table(trained: Mapping[str, Trained], every: int) -> str:
    """Return the mean losses of every so many steps, and each run's largest distance from eager's."""
    steps = len(next(iter(trained.values())).losses)
    head = ["run", *(f"..{k + every}" for k in range(0, steps, every)), "from eager", "ms", "late compilations"]
    rows = [head]
    for name, t in trained.items():
        means = [_mean(t.losses[k : k + every]) for k in range(0, steps, every)]
        far = max(abs(a - b) for a, b in zip(t.losses, trained["eager"].losses, strict=True))
        rows.append(
            [name, *(f"{m:.3f}" for m in means), f"{far:.1e}", f"{t.seconds * 1e3:.0f}", str(t.late_compilations)]
        )
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.train")
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--device", default="cpu")
    p.add_argument("--runs", nargs="*", choices=[*RUNS], default=[*RUNS], help="which runs; eager always runs")
    p.add_argument("--out", default="", help="an SVG of the losses to write")
    args = p.parse_args()
    trained: dict[str, Trained] = {}
    for name in dict.fromkeys(["eager", *args.runs]):
        trained[name] = train(RUNS[name], Size(), args.steps, args.device)
        print(f"{name}: {trained[name].losses[-1]:.4f}", flush=True)
    print(table(trained, max(1, args.steps // 6)))
    if args.out:
        lines = {name: [(k + 1.0, x) for k, x in enumerate(t.losses)] for name, t in trained.items()}
        Path(args.out).write_text(picture_of_lines(lines, "step", "loss"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
