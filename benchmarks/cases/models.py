"""The suite of models, and the norm chain, which the published figures count with them."""

from collections.abc import Callable
from functools import partial

from benchmarks.cases import text, unet, vision
from benchmarks.cases.case import Built, Case, Preset, class_loss
from benchmarks.cases.micro import NORM_CHAIN


def _text(name: str, build: Callable[[Preset], Built]) -> Case:
    return Case(name, build, class_loss, autocast=True, requires=("transformers",))


def _image(name: str, sizes: dict[Preset, vision.ImageSize]) -> Case:
    build = partial(vision.classifier, sizes)
    return Case(name, build, class_loss, autocast=True, requires=("timm",))


CASES: tuple[Case, ...] = (
    NORM_CHAIN,
    _text("bert", text.bert),
    _text("gpt2", text.gpt2),
    _text("llama", text.llama),
    _text("t5", text.t5),
    _image("resnet50", vision.RESNET50),
    _image("vit_b16", vision.VIT_B16),
    _image("convnext_t", vision.CONVNEXT_T),
    _image("mobilenetv3_l", vision.MOBILENETV3_L),
    _image("densenet", vision.DENSENET121),
    _image("regnety_16", vision.REGNETY_16),
    _image("efficientnet", vision.EFFICIENTNET_B0),
    _image("swin_t", vision.SWIN_T),
    Case("unet", unet.unet, class_loss, autocast=True),
)
