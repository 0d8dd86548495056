"""Images: warps, overlaps of boxes, measures of likeness, augmentation, and layers written by hand."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.cases.architectures import weighted_mean
from benchmarks.cases.case import Case
from benchmarks.cases.tasks.task import indices, normal, task


def flow_warp(image: Tensor, flow: Tensor) -> Tensor:
    """Return the images sampled at positions that a flow moves."""
    height, width = image.shape[-2:]
    rows = torch.linspace(-1, 1, height, device=image.device, dtype=image.dtype)
    columns = torch.linspace(-1, 1, width, device=image.device, dtype=image.dtype)
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    grid = torch.stack([x, y], -1) + flow.permute(0, 2, 3, 1) * 0.1
    return F.grid_sample(image, grid, align_corners=True, padding_mode="border")


def correlation_volume(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of features at 25 displacements, as networks for optical flow take them."""
    height, width = a.shape[-2:]
    padded = F.pad(b, (4, 4, 4, 4))
    shifts = range(0, 9, 2)
    products = [(a * padded[:, :, i : i + height, j : j + width]).mean(1) for i in shifts for j in shifts]
    return torch.stack(products, 1)


def box_overlaps(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return intersection over union of all pairs of boxes, and the best partner of each box."""
    a = _corners(a)
    b = _corners(b)
    low = torch.max(a[:, None, :2], b[None, :, :2])
    high = torch.min(a[:, None, 2:], b[None, :, 2:])
    intersection = (high - low).clamp(min=0).prod(-1)
    union = _areas(a)[:, None] + _areas(b)[None] - intersection
    overlap = intersection / union
    return overlap, overlap.max(1).indices


def _corners(boxes: Tensor) -> Tensor:
    """Return boxes (corner, extent) as two corners."""
    corner, extent = boxes[:, :2], boxes[:, 2:].abs()
    return torch.cat([corner, corner + extent], 1)


def _areas(boxes: Tensor) -> Tensor:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def structural_similarity(x: Tensor) -> Tensor:
    """Return the mean structural similarity of images and their mirror images."""
    y = x.flip(-1) * 0.9
    channels = x.shape[1]
    kernel = x.new_ones(channels, 1, 11, 11) / 121

    def local_mean(t: Tensor) -> Tensor:
        return F.conv2d(t, kernel, padding=5, groups=channels)

    mean_x = local_mean(x)
    mean_y = local_mean(y)
    variance_x = local_mean(x * x) - mean_x * mean_x
    variance_y = local_mean(y * y) - mean_y * mean_y
    covariance = local_mean(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + 1e-4) / (mean_x * mean_x + mean_y * mean_y + 1e-4)
    structure = (2 * covariance + 9e-4) / (variance_x + variance_y + 9e-4)
    return (luminance * structure).mean()


def augmentation(x: Tensor) -> Tensor:
    """Return images resized, darkened, with more contrast, normalised and clamped."""
    x = F.interpolate(x, scale_factor=0.75, mode="bilinear", align_corners=False)
    x = torch.where(x > 0.2, x, x * 0.5)
    weights = torch.tensor([0.299, 0.587, 0.114], device=x.device, dtype=x.dtype)
    grey = (x * weights.view(1, 3, 1, 1)).sum(1, keepdim=True)
    x = (x - grey) * 1.2 + grey
    mean = x.mean((2, 3), keepdim=True)
    deviation = x.std((2, 3), keepdim=True)
    return ((x - mean) / (deviation + 1e-5)).clamp(-2, 2)


def unfolded_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Return windows times a matrix, a softmax over the first 72 results, and the sum of the windows."""
    windows = F.unfold(x, 3, padding=1)
    y = weight @ windows
    shares = F.softmax(y[:, :72], 1)
    return F.fold(shares, x.shape[-2:], 3, padding=1)


def pixel_shuffle_upsampling(x: Tensor) -> Tensor:
    """Return images of twice the side: shuffled channels beside a bicubic interpolation."""
    shuffled = F.pixel_shuffle(x, 2)
    smooth = F.interpolate(x[:, :16], scale_factor=2, mode="bicubic")
    return F.leaky_relu(shuffled + smooth, 0.1)


def blurred_pool(x: Tensor) -> Tensor:
    """Return images of half the side behind a binomial filter."""
    channels = x.shape[1]
    row = torch.tensor([1.0, 2.0, 1.0], device=x.device, dtype=x.dtype)
    kernel = (row[:, None] * row) / 16
    padded = F.pad(x, (1, 1, 1, 1), mode="reflect")
    return F.conv2d(padded, kernel.expand(channels, 1, 3, 3), stride=2, groups=channels)


def dice_and_focal_loss(x: Tensor, target: Tensor) -> Tensor:
    """Return a loss of segmentation: the dice loss of the classes and the focal loss of the pixels."""
    share = x.softmax(1)
    wanted = F.one_hot(target, 20).permute(0, 3, 1, 2).to(x.dtype)
    common = (share * wanted).sum((2, 3))
    total = share.sum((2, 3)) + wanted.sum((2, 3))
    dice = 1 - (2 * common + 1) / (total + 1)
    entropy = F.cross_entropy(x, target, reduction="none")
    focal = (1 - (-entropy).exp()) ** 2 * entropy
    return dice.mean() + focal.mean()


def vector_quantisation(x: Tensor, codebook: Tensor, weight: Tensor) -> Tensor:
    """Return the mean of quantised features and their commitment loss, with a straight-through gradient."""
    z = x.permute(0, 2, 3, 1).reshape(-1, codebook.shape[1]) @ weight
    distances = z.pow(2).sum(1, keepdim=True) + codebook.pow(2).sum(1) - 2 * z @ codebook.t()
    quantised = F.embedding(distances.argmin(1), codebook)
    loss = F.mse_loss(quantised, z.detach()) + 0.25 * F.mse_loss(quantised.detach(), z)
    passed = z + (quantised - z).detach()
    return passed.mean() + loss


def total_variation(x: Tensor) -> Tensor:
    """Return the mean absolute differences along each dimension, and the root of the mean squared diagonal ones."""
    channels, rows, columns = (x.diff(dim=i).abs().mean() for i in (1, 2, 3))
    diagonal = x[:, 1:, 1:, 1:] - x[:, :-1, :-1, :-1]
    return channels + rows + columns + diagonal.pow(2).mean().sqrt()


def masked_patches(x: Tensor, weight: Tensor, position: Tensor) -> Tensor:
    """Return the sequence of patches, of which all but 16 in an order by value are zeros."""
    tokens = F.conv2d(x, weight, stride=8).flatten(2).transpose(1, 2) + position
    images, length, width = tokens.shape
    order = tokens[:, :, 0].argsort(1)
    visible = tokens.gather(1, order[:, :16, None].expand(-1, -1, width))
    hidden = x.new_zeros(images, length - 16, width)
    sequence = torch.cat([visible, hidden], 1)
    return sequence.gather(1, order.argsort(1)[..., None].expand(-1, -1, width))


def channel_and_pixel_gates(x: Tensor) -> Tensor:
    """Return images times a gate for each channel and a gate for each pixel, with a residual."""
    channel = (x.mean((2, 3)) + x.amax((2, 3))).sigmoid()[..., None, None]
    pixel = torch.cat([x.mean(1, True), x.amax(1, True)], 1).mean(1, True).sigmoid()
    return x * channel * pixel + x


CASES: tuple[Case, ...] = (
    task(flow_warp, lambda n: (normal(2 * n, 16, 64, 64), normal(2 * n, 2, 64, 64)), trains=True),
    task(correlation_volume, lambda n: (normal(2 * n, 32, 40, 40), normal(2 * n, 32, 40, 40))),
    task(box_overlaps, lambda n: (normal(300 * n, 4), normal(200 * n, 4))),
    # The similarity of noise is near 0, where a square has nearly no gradient.
    task(structural_similarity, lambda n: (normal(2 * n, 12, 64, 64),), trains=True, loss=weighted_mean),
    task(augmentation, lambda n: (normal(2 * n, 3, 128, 128),)),
    task(unfolded_convolution, lambda n: (normal(2 * n, 8, 32, 32), normal(128, 72)), trains=True),
    task(pixel_shuffle_upsampling, lambda n: (normal(2 * n, 64, 32, 32),), trains=True),
    task(blurred_pool, lambda n: (normal(2 * n, 16, 48, 48),), trains=True),
    task(dice_and_focal_loss, lambda n: (normal(2 * n, 20, 64, 64), indices(20, 2 * n, 64, 64)), trains=True),
    task(vector_quantisation, lambda n: (normal(2 * n, 32, 32, 32), normal(8, 32), normal(32, 32)), trains=True),
    task(total_variation, lambda n: (normal(4 * n, 16, 16, 16),), trains=True),
    task(masked_patches, lambda n: (normal(4 * n, 3, 64, 64), normal(64, 3, 8, 8), normal(1, 64, 64)), trains=True),
    task(channel_and_pixel_gates, lambda n: (normal(32 * n, 8, 24, 24),), trains=True),
)
