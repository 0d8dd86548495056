"""Image classifiers from `timm` (optional), with random weights and no dropout.

The usual initial values hide mistakes. A residual branch that ends in a zero scale adds nothing. A batch norm whose
running mean is 0 and variance 1 does nothing. Both are replaced.
"""

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.cases.case import Built, Case, Preset, class_loss


@dataclass(frozen=True)
class ImageSize:
    """A timm model, and its batch of images [batch, 3, pixels, pixels]."""

    model: str
    batch: int
    pixels: int = 224
    options: dict[str, Any] = field(default_factory=dict)


def _sizes(model: str, gpu_batch: int, tiny: ImageSize, **options: Any) -> dict[Preset, ImageSize]:
    return {
        "tiny": ImageSize(tiny.model, tiny.batch, tiny.pixels, {**options, **tiny.options}),
        "cpu": ImageSize(model, 1, options=options),
        "gpu": ImageSize(model, gpu_batch, options=options),
        "serve": ImageSize(model, 1, options=options),
    }


RESNET50 = _sizes(
    "resnet50",
    64,
    ImageSize("resnet50", 2, 64, {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32), "num_classes": 10}),
    zero_init_last=False,
)
VIT_B16 = _sizes(
    "vit_base_patch16_224",
    64,
    ImageSize(
        "vit_base_patch16_224", 2, 64, {"img_size": 64, "depth": 2, "embed_dim": 64, "num_heads": 4, "num_classes": 10}
    ),
)
CONVNEXT_T = _sizes(
    "convnext_tiny",
    64,
    ImageSize("convnext_tiny", 2, 64, {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 48), "num_classes": 10}),
    ls_init_value=0.5,
)
MOBILENETV3_L = _sizes(
    "mobilenetv3_large_100",
    128,
    ImageSize("mobilenetv3_small_050", 2, 64, {"num_classes": 10}),
)
DENSENET121 = _sizes(
    "densenet121",
    64,
    ImageSize("densenet121", 2, 64, {"block_config": (2, 2), "growth_rate": 8, "num_classes": 10}),
)
REGNETY_16 = _sizes("regnety_160", 64, ImageSize("regnety_002", 2, 64, {"num_classes": 10}))
EFFICIENTNET_B0 = _sizes("efficientnet_b0", 64, ImageSize("efficientnet_lite0", 2, 64, {"num_classes": 10}))
SWIN_T = _sizes(
    "swin_tiny_patch4_window7_224",
    64,
    ImageSize(
        "swin_tiny_patch4_window7_224",
        2,
        64,
        {"img_size": 64, "window_size": 4, "depths": (2, 2), "embed_dim": 32, "num_heads": (2, 4), "num_classes": 10},
    ),
)


def classifier(sizes: dict[Preset, ImageSize], preset: Preset) -> Built:
    size = sizes[preset]
    model: nn.Module = importlib.import_module("timm").create_model(size.model, pretrained=False, **size.options)
    _draw_running_statistics(model)
    return model, (torch.randn(size.batch, 3, size.pixels, size.pixels),), {}


def of_timm(model: str) -> Case:
    """Return the case of timm's network `model`: one image of 224 pixels; 64 in the preset "gpu"."""
    return Case(
        f"timm:{model}", lambda preset: classifier(_sizes(model, 64, ImageSize(model, 2, 224)), preset), class_loss
    )


def _draw_running_statistics(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0.0, 0.1)
            module.running_var.uniform_(0.8, 1.25)
