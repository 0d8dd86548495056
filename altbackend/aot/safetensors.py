"""Weights in a safetensors file as tensors over the mapped file: nothing is copied or read before it is used.

The format: 8 bytes with the length of a JSON header, the header (name -> dtype, shape, begin and end), the data.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from ..disk_cache.json_object import JsonObject
from ..errors import BadPackage

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
LONGEST_HEADER = 100_000_000  # bytes, the format's own limit
_REPAIR = "write the file again, or pass another one"


def load(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name. They share the pages of the file; writes to them stay in this process.

    Raise BadPackage for a file that does not follow the format.
    """
    name = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = _header(name, file.read(8), size, file)
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as cause:
        raise BadPackage(name, f"it cannot be read: {cause}", "check the path and its permissions") from cause
    begin = 8 + header[0]
    return {
        key: _tensor(name, key, facts, memory, begin, size) for key, facts in header[1].items() if key != "__metadata__"
    }


def _header(path: str, length: bytes, size: int, file: BinaryIO) -> tuple[int, JsonObject]:
    count = int.from_bytes(length, "little")
    if len(length) < 8 or count > min(size - 8, LONGEST_HEADER):
        raise BadPackage(path, f"it has {size} bytes, too few for its header of {count}", _REPAIR)
    try:
        header = json.loads(file.read(count))
    except ValueError as cause:
        raise BadPackage(path, f"its header is no JSON: {cause}", _REPAIR) from cause
    if not isinstance(header, dict):
        raise BadPackage(path, "its header is no JSON object", _REPAIR)
    return count, header


def _tensor(path: str, key: str, facts: JsonObject, memory: mmap.mmap, begin: int, size: int) -> torch.Tensor:
    try:
        dtype, shape, (first, last) = DTYPES[facts["dtype"]], [int(n) for n in facts["shape"]], facts["data_offsets"]
    except (KeyError, TypeError, ValueError) as cause:
        raise BadPackage(path, f"the entry of {key} is damaged or of an unknown dtype: {cause}", _REPAIR) from cause
    count = 1
    for n in shape:
        count *= n
    if min([0, *shape]) < 0 or not 0 <= first <= last <= size - begin or last - first != count * dtype.itemsize:
        raise BadPackage(path, f"{key} does not lie in the file as its header says", _REPAIR)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if (begin + first) % dtype.itemsize:  # torch takes no unaligned memory, so this one is copied
        raw = torch.frombuffer(memory, dtype=torch.uint8, count=last - first, offset=begin + first)
        return raw.clone().view(dtype).view(shape)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin + first).view(shape)
