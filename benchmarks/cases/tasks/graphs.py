"""Layers over the nodes and edges of graphs, and over clouds of points."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.cases.case import Case
from benchmarks.cases.tasks.task import indices, normal, task


def graph_convolution(x: Tensor, source: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Return the mean of the messages that arrive at each node."""
    messages = (x @ weight)[source]
    total = torch.zeros_like(x).index_add_(0, target, messages)
    ones = torch.ones_like(target, dtype=x.dtype)
    degree = x.new_zeros(x.shape[0]).index_add_(0, target, ones)
    return F.relu(total / degree.clamp(min=1).unsqueeze(1))


def graph_attention(x: Tensor, source: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Return messages [nodes, heads · width], weighted by a softmax over the edges into each node."""
    nodes, heads, _ = x.shape
    ends = torch.cat([x[source], x[target]], -1)
    score = F.leaky_relu((ends * weight).sum(-1), 0.2)
    lowest = x.new_full((nodes, heads), -1e9)
    largest = lowest.scatter_reduce(0, target[:, None].expand(-1, heads), score, "amax")
    share = (score - largest[target]).exp()
    total = x.new_zeros(nodes, heads).index_add(0, target, share)
    share = share / (total[target] + 1e-9)
    messages = x[source] * share.unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, target, messages).flatten(1)


def nearest_points(points: Tensor) -> Tensor:
    """Return the covariance of each point's eight neighbours, plus the sum of their distances."""
    distances = torch.cdist(points, points)
    nearest, index = distances.topk(8, largest=False)
    neighbours = points[index]
    centred = neighbours - neighbours.mean(1, keepdim=True)
    covariance = centred.transpose(1, 2) @ centred
    return covariance.flatten(1) + nearest.sum(1, keepdim=True)


def chamfer_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean squared distance from each point to the nearest of the other cloud, both ways."""
    distances = (a[:, :, None] - b[:, None]).pow(2).sum(-1)
    forth = distances.min(2).values.mean()
    back = distances.min(1).values.mean()
    return forth + back


def segment_statistics(x: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows less the mean of their segment, and the maxima of the segments."""
    index = segment[:, None].expand_as(x)
    zeros = x.new_zeros(64, x.shape[1])
    mean = zeros.scatter_reduce(0, index, x, "mean", include_self=False)
    largest = zeros.scatter_reduce(0, index, x, "amax", include_self=False)
    return x - mean[segment], largest


CASES: tuple[Case, ...] = (
    task(
        graph_convolution,
        lambda n: (
            normal(2000 * n, 64),
            indices(2000 * n, 16000 * n),
            indices(2000 * n, 16000 * n),
            normal(64, 64),
        ),
        trains=True,
    ),
    task(
        graph_attention,
        lambda n: (
            normal(2000 * n, 4, 16),
            indices(2000 * n, 16000 * n),
            indices(2000 * n, 16000 * n),
            normal(4, 32),
        ),
        trains=True,
    ),
    task(nearest_points, lambda n: (normal(400 * n, 3),), trains=True),
    task(chamfer_distance, lambda n: (normal(8 * n, 256, 3), normal(8 * n, 300, 3)), trains=True),
    task(segment_statistics, lambda n: (normal(500 * n, 16), indices(64, 500 * n))),
)
