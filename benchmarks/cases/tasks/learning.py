"""Reinforcement learning, and losses of contrast, alignment and likelihood."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.cases.case import Case
from benchmarks.cases.tasks.task import flags, indices, normal, task


def generalised_advantage(reward: Tensor, value: Tensor, done: Tensor) -> Tensor:
    """Return normalised generalised advantage estimates of 31 steps (Schulman et al., 2016)."""
    advantage = reward.new_zeros(reward.shape[0])
    steps = []
    for t in reversed(range(31)):
        goes_on = 1.0 - done[:, t].to(reward.dtype)
        difference = reward[:, t] + 0.99 * value[:, t + 1] * goes_on - value[:, t]
        advantage = difference + 0.99 * 0.95 * goes_on * advantage
        steps.append(advantage)
    advantages = torch.stack(steps[::-1], 1)
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def clipped_policy_loss(logits: Tensor, old_logits: Tensor, action: Tensor, advantage: Tensor) -> Tensor:
    """Return the loss of proximal policy optimisation with a bonus for entropy."""
    log_share = logits.log_softmax(-1).gather(1, action[:, None])[:, 0]
    old_log_share = old_logits.log_softmax(-1).gather(1, action[:, None])[:, 0].detach()
    ratio = (log_share - old_log_share).exp()
    gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return -(gain + 0.01 * entropy).mean()


def contrast_of_pairs(a: Tensor, b: Tensor) -> Tensor:
    """Return the contrastive loss of pairs of images and texts, both ways."""
    a = F.normalize(a)
    b = F.normalize(b)
    logits = a @ b.t() * 14.3
    partner = torch.arange(a.shape[0], device=a.device)
    return (F.cross_entropy(logits, partner) + F.cross_entropy(logits.t(), partner)) / 2


def contrast_of_classes(x: Tensor, label: Tensor) -> Tensor:
    """Return the supervised contrastive loss: rows of one class attract each other."""
    x = F.normalize(x)
    logits = x @ x.t() / 0.1
    itself = torch.eye(x.shape[0], dtype=torch.bool, device=x.device)
    same = (label[:, None] == label[None]) & ~itself
    total = logits.masked_fill(itself, -1e9).logsumexp(1, keepdim=True)
    likelihood = ((logits - total) * same).sum(1) / same.sum(1).clamp(min=1)
    return -likelihood.mean()


def categorical_values(logits: Tensor, next_logits: Tensor, reward: Tensor) -> Tensor:
    """Return the loss of a distribution over 51 values of a state (Bellemare et al., 2017)."""
    values = torch.linspace(-10, 10, 51, device=logits.device, dtype=logits.dtype)
    moved = (reward[:, None] + 0.99 * values).clamp(-10, 10)
    place = (moved + 10) / 0.4
    lower = place.floor()
    upper = place.ceil()
    share = next_logits.softmax(-1)
    target = torch.zeros_like(share)
    target = target.scatter_add(1, lower.long().clamp(0, 50), share * (1 - (place - lower)))
    target = target.scatter_add(1, upper.long().clamp(0, 50), share * (place - lower))
    return -(target * logits.log_softmax(-1)).sum(1).mean()


def time_warping(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean cost of aligning the first 12 steps of one sequence with all of another."""
    distances = (a[:, :, None] - b[:, None, :]).abs()
    row = distances[:, 0].cumsum(1)
    for i in range(1, 12):
        previous = torch.minimum(row, F.pad(row, (1, 0))[:, :-1])
        row = distances[:, i] + previous
    return row[:, -1].mean()


def normalising_flow(x: Tensor) -> Tensor:
    """Return the logarithm of densities behind four affine couplings."""
    volume = x.new_zeros(x.shape[0])
    for k in range(4):
        even, odd = x[:, ::2], x[:, 1::2]
        scale = torch.tanh(even * (k + 1))
        odd = odd * scale.exp() + even
        volume = volume + scale.sum(1)
        x = torch.stack([odd, even], -1).flatten(1)
    return -0.5 * x.pow(2).sum(1) + volume


CASES: tuple[Case, ...] = (
    task(generalised_advantage, lambda n: (normal(64 * n, 128), normal(64 * n, 128), flags(0.05, 64 * n, 128))),
    task(
        clipped_policy_loss,
        lambda n: (normal(256 * n, 18), normal(256 * n, 18), indices(18, 256 * n), normal(256 * n)),
        trains=True,
    ),
    task(contrast_of_pairs, lambda n: (normal(256 * n, 128), normal(256 * n, 128)), trains=True),
    task(contrast_of_classes, lambda n: (normal(128 * n, 64), indices(10, 128 * n)), trains=True),
    task(categorical_values, lambda n: (normal(256 * n, 51), normal(256 * n, 51), normal(256 * n)), trains=True),
    task(time_warping, lambda n: (normal(64 * n, 100), normal(64 * n, 100)), trains=True),
    task(normalising_flow, lambda n: (normal(256 * n, 64),), trains=True),
)
