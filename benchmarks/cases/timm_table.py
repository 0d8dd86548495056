"""Architectures of `timm` (optional) that the sweep compiles: small ones of every family, on small images."""

import importlib
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.cases.architectures import spread, weighted_mean
from benchmarks.cases.case import Built, Case, Preset

CLASSES = 10


@dataclass(frozen=True)
class Image:
    """A timm model with its options, and the side of its square images in pixels."""

    model: str
    pixels: int = 64
    options: dict[str, Any] = field(default_factory=dict)

    def case(self) -> Case:
        return Case(self.model, partial(build, self), weighted_mean, requires=("timm",))


def build(image: Image, preset: Preset) -> Built:
    """The model with two images; there is one size, whatever the preset."""
    create = importlib.import_module("timm").create_model
    model: nn.Module = create(image.model, pretrained=False, num_classes=CLASSES, **image.options)
    spread(model)
    return model, (torch.randn(2, 3, image.pixels, image.pixels),), {}


def _sized(model: str, pixels: int = 64, **options: Any) -> Image:
    """A model that must be told its images' size."""
    return Image(model, pixels, {"img_size": pixels, **options})


def _plain(model: str, pixels: int = 64, **options: Any) -> Image:
    return Image(model, pixels, options)


FOUR: dict[str, Any] = {"depths": (1, 1, 1, 1)}
LAYERS: dict[str, Any] = {"layers": (1, 1, 1, 1)}
SMALL: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 4}
IMAGES = (
    _sized("beit_base_patch16_224", **SMALL),
    _sized("botnet26t_256"),
    _plain("eca_halonext26ts", 256),
    _plain("lambda_resnet26t"),
    _plain("gcresnext26ts"),
    _plain("mobileone_s0"),
    _sized("cait_xxs24_224", **SMALL),
    _sized("coat_lite_tiny"),
    _sized("convit_tiny"),
    _plain("convmixer_768_32", 32),
    _plain("convnext_atto", **FOUR, dims=(8, 16, 24, 32)),
    _plain("convnextv2_atto", **FOUR, dims=(8, 16, 24, 32)),
    _plain("crossvit_9_240", 240),
    _plain("cs3darknet_s"),
    _plain("cspnext_tiny"),
    _plain("davit_tiny", **FOUR, embed_dims=(16, 16, 32, 32), num_heads=(1, 2, 4, 4)),
    _sized("deit3_small_patch16_224", **SMALL),
    _plain("densenet121", block_config=(2, 2, 2, 2), growth_rate=8),
    _plain("dla46_c"),
    _plain("dpn48b", small=True, num_init_features=10, k_r=8, groups=2, k_sec=(1, 1, 1, 1)),
    _plain("edgenext_xx_small", **FOUR),
    _plain("efficientformer_l1", 224, **FOUR, embed_dims=(8, 16, 24, 32), num_vit=1),
    _sized("efficientformerv2_s0"),
    _plain("efficientnet_b0"),
    _plain("tf_efficientnetv2_b0"),
    _plain("efficientvit_b0"),
    _sized("efficientvit_m0"),
    _sized("eva02_tiny_patch14_224", 56, **SMALL),
    _plain("fasternet_t0"),
    _plain("fastvit_t8"),
    _plain("focalnet_tiny_srf"),
    _sized("gcvit_xxtiny"),
    _plain("ghostnet_050"),
    _plain("ghostnetv2_100"),
    _plain("hardcorenas_a"),
    _plain("hgnetv2_b0"),
    _sized("hiera_tiny_224", stages=(1, 1, 1, 1), embed_dim=16, num_heads=1),
    _plain("hrnet_w18_small"),
    _plain("inception_next_atto"),
    _plain("inception_v3", 96),
    _plain("iformer_t"),
    _plain("lcnet_050"),
    _sized("levit_128s"),
    _plain("mambaout_femto", **FOUR, dims=(8, 16, 24, 32)),
    _sized("maxvit_pico_rw_256"),
    _sized("coatnet_pico_rw_224"),
    _plain("poolformer_s12"),
    _plain("caformer_s18"),
    _sized("mixer_s32_224"),
    _sized("gmlp_ti16_224"),
    _sized("resmlp_12_224"),
    _plain("mobilenetv3_small_075"),
    _plain("mobilenetv4_conv_small_035"),
    _plain("mobilevit_xxs"),
    _plain("mobilevitv2_050"),
    _sized("mvitv2_tiny"),
    _sized("nest_tiny"),
    _plain("nf_regnet_b0"),
    _plain("dm_nfnet_f0", **FOUR),
    _sized("pit_ti_224"),
    _plain("pvt_v2_b0", **FOUR),
    _plain("rdnet_tiny"),
    _plain("regnetx_002"),
    _plain("regnety_002"),
    _plain("repghostnet_050"),
    _plain("repvit_m0_9"),
    _plain("res2net50_14w_8s", **LAYERS),
    _plain("resnest14d"),
    _plain("resnet18"),
    _plain("seresnet18"),
    _plain("resnetv2_18"),
    _plain("rexnet_100"),
    _plain("selecsls42"),
    _sized("sequencer2d_s", layers=(1, 1, 1, 1), embed_dims=(16, 32, 32, 32), hidden_sizes=(4, 8, 8, 8)),
    _plain("shvit_s1", 192),  # 64 pixels leave one position; batch norms over two numbers amplify roundings
    _plain("skresnet18"),
    _plain("starnet_s050"),
    _sized("swiftformer_xs"),
    _sized("swin_tiny_patch4_window7_224", depths=(2, 2), embed_dim=16, num_heads=(2, 4), window_size=4),
    _sized("swinv2_tiny_window8_256", depths=(2, 2), embed_dim=16, num_heads=(2, 4), window_size=4),
    _plain("tiny_vit_5m_224", **FOUR),
    _sized("tnt_s_patch16_224", depth=2),
    _plain("tresnet_m", **LAYERS),
    _sized("twins_svt_small", **FOUR, embed_dims=(16, 32, 32, 32), num_heads=(1, 2, 4, 4)),
    _plain("vgg11_bn", 32),
    _sized("visformer_tiny"),
    _sized("vit_tiny_patch16_224", **SMALL),
    _sized("vit_relpos_small_patch16_224", **SMALL),
    _sized("samvit_base_patch16_224", **SMALL),
    _sized("volo_d1_224"),
    _plain("ese_vovnet19b_slim"),
    _plain("legacy_xception"),
    _plain("xception41"),
    _sized("xcit_nano_12_p16_224", depth=2),
)
CASES = tuple(i.case() for i in IMAGES)
