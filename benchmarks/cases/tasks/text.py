"""Text: attention and recurrences by hand, choices of the next token, and losses of sequences."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.cases.case import Case
from benchmarks.cases.tasks.task import flags, indices, normal, task


def rotary_grouped_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention with rotary positions, four heads of the query for each of the key."""
    query = _rotated(query)
    key = _rotated(key).repeat_interleave(4, 1)
    value = value.repeat_interleave(4, 1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _rotated(x: Tensor) -> Tensor:
    """Return neighbouring pairs of features turned by angles that grow with the position."""
    length, width = x.shape[-2:]
    position = torch.arange(length, device=x.device).float()
    frequency = 10000 ** (-torch.arange(0, width, 2, device=x.device).float() / width)
    angle = torch.outer(position, frequency)
    cosine, sine = angle.cos(), angle.sin()
    even, odd = x[..., ::2], x[..., 1::2]
    turned = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
    return turned.flatten(-2).to(x.dtype)


def nucleus_sampling(logits: Tensor) -> Tensor:
    """Return the distribution of the most likely tokens that have nine tenths of the probability."""
    share = logits.softmax(-1)
    ordered, index = share.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered = torch.where(before > 0.9, 0.0, ordered)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    return torch.zeros_like(share).scatter(-1, index, ordered)


def repetition_penalty(logits: Tensor, previous: Tensor) -> Tensor:
    """Return the distribution of the 50 most likely tokens, those of the text so far less likely."""
    score = logits.gather(1, previous)
    score = torch.where(score < 0, score * 1.2, score / 1.2)
    logits = logits.scatter(1, previous, score)
    best, _ = logits.topk(50)
    return logits.masked_fill(logits < best[:, -1:], -float("inf")).softmax(-1)


def beam_step(logits: Tensor, finished: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of the four best extensions of four beams, their beams and their tokens."""
    vocabulary = logits.shape[-1]
    score = logits.log_softmax(-1).masked_fill(finished[:, None], -1e9)
    best, index = score.flatten(1).topk(4)
    return best, index // vocabulary, index % vocabulary


def connectionist_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the connectionist temporal classification loss of 20 labels in 50 steps."""
    steps = torch.full((logits.shape[1],), 50, device=logits.device)
    labels = torch.full((logits.shape[1],), 20, device=logits.device)
    return F.ctc_loss(logits.log_softmax(-1), target + 1, steps, labels)


def selective_scan(x: Tensor, step: Tensor, a: Tensor, c: Tensor) -> Tensor:
    """Return 16 steps of a state space model whose decay depends on the input."""
    step = F.softplus(step)
    decay = torch.exp(-step[..., None] * a.abs())
    state = x.new_zeros(x.shape[0], *a.shape)
    results = []
    for t in range(16):
        state = decay[:, t] * state + (step[:, t] * x[:, t])[..., None]
        results.append((state * c.t()).sum(-1))
    return torch.stack(results, 1)


def linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention to 16 features, with a feature map in place of the softmax, by cumulative sums."""
    query = F.elu(query) + 1
    key = F.elu(key) + 1
    memory = torch.einsum("btd,bte->btde", key, value[..., :16]).cumsum(1)
    total = key.cumsum(1)
    scale = torch.einsum("btd,btd->bt", query, total)[..., None] + 1e-6
    return torch.einsum("btd,btde->bte", query, memory) / scale


def mixture_of_experts(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Return the two best experts' results for each token, plus the loss that balances the experts."""
    experts = gate.shape[1]
    share = (x @ gate).softmax(-1)
    best, index = share.topk(2)
    best = best / best.sum(-1, keepdim=True)
    chosen = F.one_hot(index, experts).to(x.dtype)
    combination = (chosen * best[..., None]).sum(1)
    y = torch.einsum("td,edh->teh", x, weight)
    balance = (share.mean(0) * chosen.sum(1).mean(0)).sum()
    return torch.einsum("te,teh->th", combination, F.gelu(y)) + balance


def bag_of_words(tokens: Tensor, table: Tensor) -> Tensor:
    """Return means, maxima and deviations of the embeddings of a text, without its padding."""
    x = F.embedding(tokens, table)
    words = (tokens != 0).unsqueeze(-1)
    mean = (x * words).sum(1) / words.sum(1).clamp(min=1)
    largest = x.masked_fill(~words, -1e4).amax(1)
    return torch.cat([mean, largest, x.std(1)], -1)


def lstm_by_hand(x: Tensor, of_input: Tensor, of_state: Tensor, bias: Tensor) -> Tensor:
    """Return the state of an LSTM after 12 steps."""
    state = x.new_zeros(x.shape[0], of_state.shape[0])
    cell = state
    for t in range(12):
        gates = x[:, t] @ of_input + state @ of_state + bias
        enter, forget, new, leave = gates.chunk(4, 1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        state = leave.sigmoid() * cell.tanh()
    return state


def last_of_padded(x: Tensor, length: Tensor) -> Tensor:
    """Return the last row of each padded sequence, plus the logarithm of the sum of exponentials of all its rows."""
    valid = torch.arange(x.shape[1], device=x.device)[None] < length[:, None]
    last = x[torch.arange(x.shape[0], device=x.device), length.clamp(min=1) - 1]
    total = x.masked_fill(~valid[..., None], float("-inf")).logsumexp(1)
    return last + torch.where(torch.isfinite(total), total, 0.0)


def relative_attention(query: Tensor, key: Tensor, position: Tensor) -> Tensor:
    """Return attention weights with scores of relative positions, shifted as in Transformer-XL (Dai et al., 2019)."""
    length = query.shape[1]
    content = query @ key.transpose(1, 2)
    relative = query @ F.pad(position, (0, 0, 1, 0)).t()
    shifted = F.pad(relative, (1, 0)).view(-1, length + 1, length)[:, 1:]
    return (content + shifted).softmax(-1)


CASES: tuple[Case, ...] = (
    task(
        rotary_grouped_attention,
        lambda n: (normal(4 * n, 8, 128, 32), normal(4 * n, 2, 128, 32), normal(4 * n, 2, 128, 32)),
        trains=True,
    ),
    task(nucleus_sampling, lambda n: (normal(16 * n, 1000),)),
    task(repetition_penalty, lambda n: (normal(16 * n, 1000), indices(1000, 16 * n, 50))),
    task(beam_step, lambda n: (normal(16 * n, 4, 100), flags(0.3, 16 * n, 100))),
    task(connectionist_loss, lambda n: (normal(50, 8 * n, 30), indices(29, 8 * n, 20)), trains=True),
    task(
        selective_scan,
        lambda n: (normal(4 * n, 64, 128), normal(4 * n, 64, 128), normal(128, 16), normal(16, 128)),
        trains=True,
    ),
    task(
        linear_attention,
        lambda n: (normal(4 * n, 128, 64), normal(4 * n, 128, 64), normal(4 * n, 128, 64)),
        trains=True,
    ),
    task(mixture_of_experts, lambda n: (normal(128 * n, 64), normal(64, 8), normal(8, 64, 64)), trains=True),
    task(bag_of_words, lambda n: (indices(500, 64 * n, 20), normal(500, 64)), trains=True),
    task(lstm_by_hand, lambda n: (normal(16 * n, 40, 64), normal(64, 256), normal(64, 256), normal(256)), trains=True),
    task(last_of_padded, lambda n: (normal(64 * n, 20, 16), indices(20, 64 * n)), trains=True),
    task(relative_attention, lambda n: (normal(4 * n, 64, 32), normal(4 * n, 64, 32), normal(63, 32)), trains=True),
)
