"""Random bad calls of libraries and damaged packages: each must be an error with a message, and none may crash.

    python -m test.aot.fuzz_calls --calls 2500 --seed 0

The kinds: calls through torch's runner, calls of the C interface with a damaged tensor, weights that do not fit, and
packages that are cut off or changed. Calls that fit must give eager's results.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import altbackend
from altbackend.aot import manifest
from altbackend.compat.pt2 import Runner
from altbackend.errors import AltError

from .models import Dim, Mlp, batched, module
from .test_calls import CTensor, _described, _random_tensor

DTYPES = [torch.float32, torch.float32, torch.int64, torch.float16, torch.bool, torch.complex64]


@dataclass(frozen=True)
class Subjects:
    """The callees: a runner of two inputs, the C interface of another library with a model, and a package."""

    runner: Runner
    dll: Any
    model: ctypes.c_void_p
    package: Path


def subjects(folder: Path) -> Subjects:
    """Compile all subjects."""
    two = module(lambda x, i: (x * 2, i + 1))
    shapes = ({0: Dim("n", min=2, max=9)}, None)
    program = torch.export.export(two, (torch.randn(4, 3), torch.arange(6).view(2, 3)), dynamic_shapes=shapes)
    dll: Any = ctypes.CDLL(altbackend.aot_compile(batched()))
    dll.altbackend_last_error.restype = ctypes.c_char_p
    model = ctypes.c_void_p()
    assert dll.altbackend_create(b"cpu", ctypes.byref(model)) == 0
    package = folder / "mlp.pt2"
    altbackend.aot_package(package, batched(), programs=False)
    return Subjects(Runner(Path(altbackend.aot_compile(program))), dll, model, package)


def run_call(s: Subjects, rng: random.Random) -> bool:
    """Call through torch's runner; return whether the call was refused."""
    x = _random_tensor(rng, DTYPES, ([2, 4, 9, 1, 0, 12], [3, 3, 3, 2]))
    i = _random_tensor(rng, [torch.int64, torch.int64, torch.int32], ([2, 2, 3], [3, 3, 1]))
    inputs = [x, i] if rng.random() < 0.9 else rng.choice([[x], [i], [], [x, i, i], [x.to("meta"), i]])
    fits = len(inputs) == 2 and inputs[0].device.type == "cpu" and _fits(x, i)
    try:
        got = s.runner.run(inputs)
    except RuntimeError as cause:
        error = str(cause).strip()
    else:
        error = ""
    if error:
        assert not fits, error
        return True
    assert fits, f"a bad call ran: {[(t.dtype, t.shape, t.stride()) for t in inputs]}"
    torch.testing.assert_close(got, [x * 2, i + 1])
    return False


def _fits(x: torch.Tensor, i: torch.Tensor) -> bool:
    if (x.dtype, i.dtype) != (torch.float32, torch.int64) or not x.dim() == i.dim() == 2:
        return False
    sizes = 2 <= x.shape[0] <= 9 and x.shape[1] == 3 and tuple(i.shape) == (2, 3)
    return sizes and x.is_contiguous() and i.is_contiguous()


def c_call(s: Subjects, rng: random.Random) -> bool:
    """Call the C interface with a damaged tensor, count or pointer."""
    x = torch.randn(3, 16)
    given, _sizes = _described(x)
    negative, wrong = (ctypes.c_int64 * 2)(-rng.randint(1, 99), 16), (ctypes.c_int64 * 2)(16, rng.randint(0, 15))
    strides = (ctypes.c_int64 * 2)(rng.randint(17, 99), rng.choice([-1, 2, 3]))
    counts, pointers = [1, 1], [s.model, ctypes.byref(given), ctypes.byref(CTensor())]
    damages: list[Callable[[], object]] = [
        lambda: setattr(given, "dtype", rng.choice([-1, 20, 99, 1, 2, 4, 12])),
        lambda: setattr(given, "rank", rng.choice([-1, 0, 1, 65, 1 << 30])),
        lambda: setattr(given, "data", None),
        lambda: setattr(given, "sizes", rng.choice([negative, wrong, None])),
        lambda: setattr(given, "strides", strides),
        lambda: counts.__setitem__(rng.randrange(2), rng.choice([0, 2, 7])),
        lambda: pointers.__setitem__(rng.randrange(3), None),
    ]
    for damage in rng.sample(damages, rng.choice([1, 1, 2])):
        damage()
    room = (CTensor * 8)()  # a count may be too large
    many = (CTensor * 8)(*[given] * 8)
    inputs = pointers[1] and many
    outputs = pointers[2] and room
    assert s.dll.altbackend_run(pointers[0], inputs, counts[0], outputs, counts[1]) == 1, "a bad call ran"
    assert s.dll.altbackend_last_error()
    return True


def weights(s: Subjects, rng: random.Random) -> bool:
    """Update weights by a wrong name, size, dtype or layout."""
    names = list(Mlp().state_dict())
    name, t = rng.choice(names), Mlp().state_dict()[rng.choice(names)]
    value, _sizes = _described(t.repeat(*[2] * t.dim()), rng.choice([0, 1, 4]))
    called = rng.choice([name, name.upper(), "", "other"])
    text = (ctypes.c_char_p * 1)(rng.choice([called.encode(), None]) if called != name else called.encode())
    assert s.dll.altbackend_update(s.model, text, ctypes.byref(value), 1, rng.randrange(2), 0) == 1
    assert s.dll.altbackend_last_error()
    return True


def packages(package: Path, rng: random.Random) -> bool:
    """Load a package that is cut off, has changed bytes, or has another manifest; return whether it was refused."""
    content = bytearray(package.read_bytes())
    damaged = package.with_name("damaged.pt2")
    kind = rng.choice(["cut", "bytes", "manifest"])
    if kind == "cut":
        del content[rng.randrange(len(content)) :]
    if kind == "bytes":
        start = rng.randrange(len(content) - 64)
        content[start : start + 64] = rng.randbytes(64)
    damaged.write_bytes(content)
    if kind == "manifest":
        _with_manifest(package, damaged, rng)
    try:
        model = altbackend.aot_load(damaged)
    except AltError as cause:
        return bool(str(cause))
    # the bytes that were changed mean nothing, such as a date in the archive
    x = torch.randn(3, 16)
    torch.testing.assert_close(model(x), Mlp()(x).detach(), rtol=1e-4, atol=1e-5)
    return False


def _with_manifest(package: Path, damaged: Path, rng: random.Random) -> None:
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(damaged, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith(manifest.NAME):
                cut = rng.randrange(len(data))
                data = rng.choice([data[:cut], b"", b"[]", data.replace(b'"files"', b'"other"'), b'{"format": 99}'])
            new.writestr(zipfile.ZipInfo(name), data)


KINDS: dict[str, tuple[Callable[[Subjects, random.Random], bool], int]] = {  # and how often each is drawn
    "runner": (run_call, 8),
    "C interface": (c_call, 8),
    "weights": (weights, 3),
    "packages": (lambda s, rng: packages(s.package, rng), 1),
}


def run(calls: int, seed: int) -> Counter[str]:
    """Make so many calls; return the number of refused and of accepted ones by kind."""
    rng, done = random.Random(seed), Counter[str]()
    names, shares = list(KINDS), [share for _, share in KINDS.values()]
    with tempfile.TemporaryDirectory() as folder:
        s = subjects(Path(folder))
        for _ in range(calls):
            (name,) = rng.choices(names, shares)
            refused = KINDS[name][0](s, rng)
            done[f"{name}: {'refused' if refused else 'accepted'}"] += 1
        s.dll.altbackend_destroy(s.model)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, count in sorted(run(options.calls, options.seed).items()):
        print(f"{name}: {count}")


if __name__ == "__main__":
    main()
