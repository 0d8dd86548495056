"""Language models from `transformers` (optional), with random weights and dropout set to 0."""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.case import Built, Preset


@dataclass(frozen=True)
class TextSize:
    """Size of one language model and of its batch of token ids [batch, sequence]."""

    batch: int
    sequence: int
    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocabulary: int
    head: bool  # project to the vocabulary, or stop at the hidden states


def tiny(heads: int = 4) -> TextSize:
    return TextSize(2, 16, 2, 64, heads, 128, 101, head=True)


# On the CPU the models stop at the hidden states: at 4 layers the projection would be most of the time, and it is a
# library's matmul in every backend.
BERT: dict[Preset, TextSize] = {
    "tiny": tiny(),
    "cpu": TextSize(1, 128, 4, 768, 12, 3072, 30522, head=False),
    "gpu": TextSize(16, 512, 12, 768, 12, 3072, 30522, head=True),
    "serve": TextSize(1, 128, 12, 768, 12, 3072, 30522, head=True),
}
GPT2: dict[Preset, TextSize] = {
    "tiny": tiny(),
    "cpu": TextSize(1, 128, 4, 768, 12, 3072, 50257, head=False),
    "gpu": TextSize(8, 1024, 12, 768, 12, 3072, 50257, head=True),
    "serve": TextSize(1, 128, 12, 768, 12, 3072, 50257, head=True),
}
LLAMA: dict[Preset, TextSize] = {
    "tiny": tiny(),
    "cpu": TextSize(1, 128, 2, 1024, 16, 2816, 32000, head=False),
    "gpu": TextSize(4, 1024, 8, 1024, 16, 2816, 32000, head=True),
    "serve": TextSize(1, 128, 8, 1024, 16, 2816, 32000, head=True),
}
T5: dict[Preset, TextSize] = {
    "tiny": tiny(),
    "cpu": TextSize(1, 128, 6, 512, 8, 2048, 32128, head=False),
    "gpu": TextSize(8, 512, 6, 512, 8, 2048, 32128, head=True),
    "serve": TextSize(1, 128, 6, 512, 8, 2048, 32128, head=True),
}


class FirstOutput(nn.Module):
    """The logits of a model with a head, or the last hidden states of one without, as one tensor."""

    def __init__(self, model: nn.Module, head: bool) -> None:
        super().__init__()
        self.model = model
        self.head = head

    def forward(self, **inputs: Tensor) -> Tensor:
        output = self.model(**inputs)
        result: Tensor = output.logits if self.head else output.last_hidden_state
        return result


def bert(preset: Preset) -> Built:
    size = BERT[preset]
    config = _transformers().BertConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.intermediate,
        max_position_embeddings=max(512, size.sequence),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _built(config, size, "AutoModelForMaskedLM", {"input_ids": _tokens(size)})


def gpt2(preset: Preset) -> Built:
    size = GPT2[preset]
    config = _transformers().GPT2Config(
        vocab_size=size.vocabulary,
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        n_inner=size.intermediate,
        n_positions=1024,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return _built(config, size, "AutoModelForCausalLM", {"input_ids": _tokens(size)})


def llama(preset: Preset) -> Built:
    size = LLAMA[preset]
    config = _transformers().LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        intermediate_size=size.intermediate,
        max_position_embeddings=2048,
        attention_dropout=0.0,
        use_cache=False,
    )
    return _built(config, size, "AutoModelForCausalLM", {"input_ids": _tokens(size)})


def t5(preset: Preset) -> Built:
    size = T5[preset]
    config = _transformers().T5Config(
        vocab_size=size.vocabulary,
        d_model=size.hidden,
        d_kv=size.hidden // size.heads,
        d_ff=size.intermediate,
        num_layers=size.layers,
        num_heads=size.heads,
        dropout_rate=0.0,
        use_cache=False,
    )
    inputs = {"input_ids": _tokens(size), "decoder_input_ids": _tokens(size)}
    return _built(config, size, "AutoModelForSeq2SeqLM", inputs)


def _transformers() -> Any:
    return importlib.import_module("transformers")


def _built(config: Any, size: TextSize, auto_with_head: str, inputs: dict[str, Tensor]) -> Built:
    auto = getattr(_transformers(), auto_with_head if size.head else "AutoModel")
    return FirstOutput(auto.from_config(config), size.head), (), inputs


def _tokens(size: TextSize) -> Tensor:
    return torch.randint(1, size.vocabulary, (size.batch, size.sequence))
