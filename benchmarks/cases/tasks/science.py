"""Physics, geometry, statistics and arithmetic of bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.cases.architectures import weighted_mean
from benchmarks.cases.case import Case
from benchmarks.cases.tasks.task import indices, normal, task

FREQUENCIES = 6  # more would amplify the rounding of a position: the highest is 2^(FREQUENCIES - 1)


def radiance_field(origin: Tensor, direction: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the colours of rays through a neural radiance field (Mildenhall et al., 2020)."""
    depth = torch.linspace(0.1, 4, 16, device=origin.device, dtype=origin.dtype)
    points = origin[:, None] + direction[:, None] * depth[:, None]
    frequency = 2.0 ** torch.arange(FREQUENCIES, device=origin.device)
    angle = (points[..., None] * frequency).flatten(-2)
    encoded = torch.cat([points, angle.sin(), angle.cos()], -1).to(first.dtype)
    y = F.relu(encoded @ first) @ second
    density = F.softplus(y[..., 0])
    colour = y[..., 1:].sigmoid()
    opacity = 1 - torch.exp(-density * 0.25)
    clear = torch.cat([torch.ones_like(opacity[:, :1]), 1 - opacity + 1e-10], 1)
    transmitted = torch.cumprod(clear, 1)[:, :-1]
    return ((opacity * transmitted)[..., None] * colour).sum(1)


def wave_equation(u: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
    """Return a wave and its velocity after four steps on a torus."""
    for _ in range(4):
        neighbours = u.roll(1, -1) + u.roll(-1, -1) + u.roll(1, -2) + u.roll(-1, -2)
        velocity = velocity + 0.1 * (neighbours - 4 * u)
        u = u + 0.1 * velocity
    return u, velocity


def spectral_convolution(x: Tensor) -> Tensor:
    """Return images whose low frequencies are scaled and whose others are dropped, with a residual."""
    spectrum = torch.fft.rfft2(x)
    low = torch.zeros_like(spectrum)
    low[:, :, :8, :8] = spectrum[:, :, :8, :8] * 0.5
    return F.gelu(torch.fft.irfft2(low, s=x.shape[-2:]) + x)


def lennard_jones(position: Tensor) -> tuple[Tensor, Tensor]:
    """Return the energy of particles, cut off at a distance of 3, and the forces on them."""
    offset = position[:, None] - position[None]
    identity = torch.eye(position.shape[0], device=position.device, dtype=position.dtype)
    square = offset.pow(2).sum(-1) + identity
    attraction = square.pow(-3)
    repulsion = attraction * attraction
    energy = torch.where(square < 9.0, 4 * (repulsion - attraction), 0.0)
    force = (24 * (2 * repulsion - attraction) / square)[..., None] * offset
    return energy.sum() / 2, force.sum(1)


def quaternion_rotation(quaternion: Tensor, vector: Tensor) -> Tensor:
    """Return vectors rotated by quaternions."""
    quaternion = F.normalize(quaternion)
    real, imaginary = quaternion[:, :1], quaternion[:, 1:]
    twice = 2 * torch.linalg.cross(imaginary, vector)
    return vector + real * twice + torch.linalg.cross(imaginary, twice)


def gaussian_likelihood(x: Tensor) -> Tensor:
    """Return logarithmic likelihoods under Gaussians whose covariances are products of the samples."""
    identity = torch.eye(x.shape[-1], device=x.device, dtype=x.dtype)
    covariance = x @ x.transpose(1, 2) + 3 * identity
    factor = torch.linalg.cholesky(covariance)
    whitened = torch.linalg.solve_triangular(factor, x, upper=False)
    return -0.5 * whitened.pow(2).sum((1, 2)) - factor.diagonal(dim1=1, dim2=2).log().sum(1)


def optimal_transport(cost: Tensor) -> Tensor:
    """Return transport plans after six iterations of Sinkhorn's algorithm."""
    kernel = (-cost.abs() / 0.5).exp()
    rows = cost.new_ones(cost.shape[0], cost.shape[1], 1)
    columns = rows
    for _ in range(6):
        columns = 1 / (kernel.transpose(1, 2) @ rows)
        rows = 1 / (kernel @ columns)
    return rows * kernel * columns.transpose(1, 2)


def histogram(x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many values lie between sorted edges, and their mean distance from the edge above."""
    ordered = edges.sort().values
    bucket = torch.bucketize(x, ordered)
    counts = torch.bincount(bucket, minlength=edges.shape[0] + 1)
    above = F.pad(ordered, (0, 1))[bucket]
    return counts, (x - above).abs().mean()


def robust_statistics(x: Tensor) -> Tensor:
    """Return rows with outliers replaced by the median and the rest clamped to the middle eight tenths."""
    median = x.median(1, keepdim=True).values
    deviation = (x - median).abs().median(1, keepdim=True).values
    levels = torch.tensor([0.1, 0.9], device=x.device, dtype=x.dtype)
    low, high = torch.quantile(x, levels, dim=1)
    score = 0.6745 * (x - median) / (deviation + 1e-6)  # Iglewicz and Hoaglin, 1993
    replaced = torch.where(score.abs() > 3.5, median, x)
    return replaced.clamp(low[:, None], high[:, None])


def complex_rotation(a: Tensor, b: Tensor) -> Tensor:
    """Return complex numbers, normalised and turned by phases, as pairs of real ones."""
    z = torch.complex(a, b)
    power = z * z.conj() / (z.abs() + 1)
    turned = power * torch.polar(a.abs(), b)
    return torch.view_as_real(turned).flatten(1)


def bit_arithmetic(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return entries of a table times the low bits that are set in their index, and how many numbers match a rule."""
    mixed = ((x >> 3) ^ (x << 2)) & 0xFF
    ones = (mixed & 1) + ((mixed >> 1) & 1) + ((mixed >> 2) & 1) + ((mixed >> 3) & 1)
    matches = (x // 7 % 5 == 2).sum(1)
    return table[mixed] * ones, matches


def kalman_filter(observations: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state and its covariance after four observations of 32 values."""
    identity = torch.eye(32, device=weight.device, dtype=weight.dtype)
    transition = weight[:32, :32] * 0.05
    covariance = identity * 0.1
    state = observations[:, :32]
    for t in range(4):
        predicted = transition @ covariance @ transition.t() + 0.01
        gain = torch.linalg.solve(predicted + identity, predicted).t()
        innovation = observations[:, 32 * t : 32 * t + 32] - state
        state = state @ transition.t() + innovation @ gain.t()
        covariance = predicted - gain @ predicted
    return state, covariance


def rigid_alignment(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared deviation of clouds of points after the best rotation (Kabsch, 1976), and its sign."""
    a = a - a.mean(1, True)
    b = b - b.mean(1, True)
    left, singular, right = torch.linalg.svd(a.transpose(1, 2) @ b)
    sign = torch.linalg.det(left @ right).sign()
    overlap = singular[:, :2].sum(1) + singular[:, 2] * sign
    return a.pow(2).sum((1, 2)) + b.pow(2).sum((1, 2)) - 2 * overlap, sign


CASES: tuple[Case, ...] = (
    task(
        radiance_field,
        lambda n: (
            normal(1024 * n, 3),
            normal(1024 * n, 3),
            normal(3 + 6 * FREQUENCIES, 64),
            normal(64, 4),
        ),
        trains=True,
    ),
    task(wave_equation, lambda n: (normal(n, 128, 128), normal(n, 128, 128))),
    task(spectral_convolution, lambda n: (normal(2 * n, 32, 32, 32),), trains=True),
    task(lennard_jones, lambda n: (normal(400 * n, 3),)),
    # A rotation preserves squares, so that their mean would have no gradient by the quaternion.
    task(quaternion_rotation, lambda n: (normal(100 * n, 4), normal(100 * n, 3)), trains=True, loss=weighted_mean),
    task(gaussian_likelihood, lambda n: (normal(64 * n, 6, 6),), trains=True),
    task(optimal_transport, lambda n: (normal(16 * n, 64, 64),)),
    task(histogram, lambda n: (normal(50000 * n), normal(64))),
    task(robust_statistics, lambda n: (normal(64 * n, 512),)),
    task(complex_rotation, lambda n: (normal(32 * n, 256), normal(32 * n, 256))),
    task(bit_arithmetic, lambda n: (indices(256, 64 * n, 1024), normal(256))),
    task(kalman_filter, lambda n: (normal(8 * n, 512), normal(512, 512))),
    task(rigid_alignment, lambda n: (normal(16 * n, 64, 3), normal(16 * n, 64, 3))),
)
