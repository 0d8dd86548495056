"""Spectra of sound, and filters over it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.cases.case import Case
from benchmarks.cases.tasks.task import normal, task


def log_mel_spectrum(x: Tensor, window: Tensor, mel: Tensor) -> Tensor:
    """Return the logarithmic energies of 80 bands, cut off 80 dB below the loudest, as speech recognisers take them."""
    spectrum = torch.stft(x, 400, 160, window=window, return_complex=True)
    power = spectrum.abs().pow(2)
    bands = (mel.t() @ power).clamp(min=1e-10).log10()
    loudest = bands.amax((-2, -1), keepdim=True)
    return (torch.maximum(bands, loudest - 8) + 4) / 4


def zero_phase_filter(x: Tensor, response: Tensor) -> Tensor:
    """Return the signal with its magnitudes filtered and its phases as they were."""
    spectrum = torch.fft.rfft(x)
    magnitude = spectrum.abs() * torch.fft.rfft(response).abs()
    phase = torch.exp(1j * spectrum.angle())
    return torch.fft.irfft(magnitude * phase, n=x.shape[-1])


def fourier_mixing(x: Tensor) -> Tensor:
    """Return tokens mixed by a Fourier transform in place of attention."""
    mixed = torch.fft.fft2(x, dim=(-1, -2)).real
    return F.layer_norm(mixed + x, (x.shape[-1],))


def sinc_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Return the signal behind windowed sinc filters with learned cut-offs."""
    time = torch.arange(-125, 126, device=x.device, dtype=x.dtype) / 16000.0
    cutoff = weight[:, 0, :1].abs() * 100 + 50
    angle = 2 * math.pi * cutoff * time
    sinc = torch.sin(angle) / (angle + 1e-6)
    window = torch.hann_window(251, device=x.device, dtype=x.dtype)
    kernel = (sinc * window)[:, None] * weight
    y = F.conv1d(x, kernel, stride=4)
    return torch.log1p(y.abs())


CASES: tuple[Case, ...] = (
    task(log_mel_spectrum, lambda n: (normal(4 * n, 16000), torch.hann_window(400), normal(201, 80).abs())),
    task(zero_phase_filter, lambda n: (normal(8 * n, 2048), normal(2048))),
    task(fourier_mixing, lambda n: (normal(8 * n, 1024, 16),)),
    task(sinc_convolution, lambda n: (normal(4 * n, 1, 8000), normal(64, 1, 251)), trains=True),
)
