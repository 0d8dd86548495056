"""Architectures of `transformers` (optional), each in its smallest form: random weights, no dropout, one output.

An architecture is a model class and what its configuration has beyond `SMALL`; the tables are beside this file.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.case import Built, Case, Preset

BATCH, SEQUENCE, VOCABULARY = 2, 16, 101
# What a configuration takes of this is what its class knows.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "embedding_size": 16,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "head_dim": 8,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "apply_spec_augment": False,
    "use_cache": False,
}
ABSENT = object()  # as a value: the configuration is not given this name of `SMALL`
HIDDEN, LOGITS = "last_hidden_state", "logits"
Inputs = Callable[[Any], dict[str, Tensor]]


@dataclass(frozen=True)
class Architecture:
    """`kind`: "encoder", "decoder", "encoder-decoder", "vision", "speech", "state space", "mixture of experts" or
    "several". `model`: a class of transformers. `config`: what its configuration gets; `output`: what is returned.
    """

    name: str
    kind: str
    model: str
    inputs: Inputs
    config: dict[str, Any] = field(default_factory=dict)
    output: str = LOGITS

    def case(self) -> Case:
        return Case(self.name, partial(build, self), weighted_mean, requires=("transformers",))


def rows(kind: str, inputs: Inputs, output: str, table: dict[str, tuple[str, dict[str, Any]]]) -> list[Architecture]:
    """A table of name -> (model class, configuration) for architectures with the same inputs and output."""
    return [Architecture(name, kind, model, inputs, config, output) for name, (model, config) in table.items()]


class OneOutput(nn.Module):
    """The model's output of one name, as a tensor."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self.name = name

    def forward(self, **inputs: Tensor) -> Tensor:
        result: Tensor = getattr(self.model(**inputs), self.name)
        return result


def weighted_mean(output: Tensor) -> Tensor:
    """1 + mean(output · w), w_i = cos i.

    Unlike a mean of squares it has a gradient behind a normalisation; the 1 is there because the terms nearly cancel,
    which would make a relative error of the loss say nothing.
    """
    flat = output.float().flatten()
    return 1 + (flat * torch.arange(flat.numel(), device=flat.device).cos()).mean()


def build(a: Architecture, preset: Preset) -> Built:
    """The model with its inputs; there is one size, whatever the preset."""
    cls: Any = getattr(importlib.import_module("transformers"), a.model)
    config = configuration(cls.config_class, a.config)
    module = OneOutput(cls(config), a.output)
    spread(module)
    return module, (), a.inputs(config)


def configuration(cls: Any, more: dict[str, Any]) -> Any:
    """A configuration of class `cls` from `SMALL` and `more`, without dropout."""
    usual = cls()
    chosen = {k: v for k, v in SMALL.items() if hasattr(usual, k)} | more
    config = cls(**{k: v for k, v in chosen.items() if v is not ABSENT})
    for part in [config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))]:
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def spread(module: nn.Module) -> None:
    """Undo initial values that hide mistakes: scales of (nearly) 0, running statistics of 0 and 1; and all dropout."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is not None:
            part.running_mean.normal_(0.0, 0.1)
            part.running_var.uniform_(0.8, 1.25)  # type: ignore[union-attr]
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point() and float(parameter.abs().max()) < 1e-3:
                parameter.normal_(0.0, 0.2)


# --- inputs ----------------------------------------------------------------------------------------------------------


def tokens(config: Any) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, VOCABULARY, (BATCH, SEQUENCE))}


def padded_tokens(config: Any) -> dict[str, Tensor]:
    """Tokens whose last row ends in padding."""
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    mask[-1, -5:] = 0
    return {**tokens(config), "attention_mask": mask}


def two_texts(config: Any) -> dict[str, Tensor]:
    return {**tokens(config), "decoder_input_ids": torch.randint(3, VOCABULARY, (BATCH, SEQUENCE // 2))}


def image(config: Any, pixels: int = 32, channels: int = 3) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, channels, pixels, pixels)}


def images(pixels: int) -> Inputs:
    return partial(image, pixels=pixels)


def text_and_image(config: Any) -> dict[str, Tensor]:
    return {**padded_tokens(config), **image(config)}


def waveform(config: Any) -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 800)}


def spectrogram(frames: int, bins: int, name: str = "input_features", bins_first: bool = False) -> Inputs:
    """Features [batch, frames, bins], or [batch, bins, frames]."""
    shape = (BATCH, bins, frames) if bins_first else (BATCH, frames, bins)
    return lambda config: {name: torch.randn(*shape)}


def heard_and_said(features: Inputs) -> Inputs:
    return lambda config: {**features(config), "decoder_input_ids": torch.randint(3, VOCABULARY, (BATCH, 8))}
