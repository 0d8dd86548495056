"""The block of a library's weights: the place of each tensor, and its bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from altbackend.lazy_dataclass import dataclass

from ..errors import Unsupported

ALIGN = 64  # bytes
HEADER = 64  # bytes before the weights in a file of their own
MAGIC = b"ALTW0001"
AFTER_CODE = 1 << 16  # alignment in bytes of weights that follow code: the largest page of a supported system


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor in a block: `offset` and `size` in bytes of its elements, gaps of its strides included."""

    tensor: torch.Tensor
    offset: int
    size: int


@dataclass(frozen=True)
class Block:
    """Tensors in one block of memory. `digest`: 40 hex digits of the content."""

    tensors: tuple[PlacedTensor, ...]
    size: int
    digest: str

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the block in order."""
        yield from _chunks(self.tensors, self.size)

    def with_header(self) -> Iterator[bytes]:
        """Yield the bytes of a file of weights: the header, then the block."""
        yield (MAGIC + self.digest.encode()).ljust(HEADER, b"\0")
        yield from self.chunks()

    def write(self, path: Path) -> None:
        """Write a file of weights."""
        with path.open("wb") as file:
            file.writelines(self.with_header())


def place(tensors: Sequence[torch.Tensor]) -> Block:
    """Return the block of tensors; equal views of one storage lie in it once. Raise Unsupported for a layout."""
    placed: list[PlacedTensor] = []
    offsets: dict[tuple[object, ...], int] = {}
    end = 0
    for t in tensors:
        if t.layout != torch.strided or t.device.type not in ("cpu", "cuda"):
            raise Unsupported(
                f"a weight {tuple(t.shape)} on {t.device}", "its layout or device cannot lie in a library"
            )
        size = extent(t) * t.element_size()
        key = (t.untyped_storage().data_ptr(), t.storage_offset(), t.dtype, tuple(t.shape), t.stride())
        offset = offsets.get(key)
        if offset is None or size == 0:
            offset = offsets[key] = end
            end += -(-size // ALIGN) * ALIGN
        placed.append(PlacedTensor(t, offset, size))
    digest = hashlib.sha256()
    for chunk in _chunks(placed, end):
        digest.update(chunk)
    return Block(tuple(placed), end, digest.hexdigest()[:40])


def extent(t: torch.Tensor) -> int:
    """Return the number of elements from a tensor's first to its last, gaps included."""
    if 0 in t.shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def _chunks(tensors: Sequence[PlacedTensor], total: int) -> Iterator[bytes]:
    at = 0
    for p in sorted(tensors, key=lambda p: p.offset):
        if p.offset < at:
            continue
        yield b"\0" * (p.offset - at)
        yield _content(p.tensor)
        at = p.offset + p.size
    yield b"\0" * (total - at)


def _content(t: torch.Tensor) -> bytes:
    n = extent(t)
    if n == 0:
        return b""
    plain = t.detach().resolve_neg().resolve_conj()
    flat = plain.as_strided((n,), (1,), plain.storage_offset()).contiguous().view(torch.uint8)
    return flat.cpu().numpy().tobytes()
