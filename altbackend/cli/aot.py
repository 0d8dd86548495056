"""`python -m altbackend aot`: compile a function to a package, show a package, compare one with eager."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.export import ExportedProgram

from altbackend.aot import manifest
from altbackend.aot.compare import first_difference
from altbackend.aot.compile import aot_compile
from altbackend.aot.load import aot_load, check_package, describe
from altbackend.aot.package import PROGRAMS, aot_package
from altbackend.config.resolve import resolve
from altbackend.disk_cache.json_object import JsonObject
from altbackend.errors import AltError, BadPackage
from altbackend.fx_passes.check import differences

_modules = itertools.count()
UNKNOWN = "none in a library that is compiled now; compile the package again"
LIBRARIES = {".so": "shared", ".o": "object"}


def compile_file(source: str, inputs: str, output: str, options: Sequence[str]) -> int:
    """Compile `FILE.py:name`, a module, a class of one or a function, for the inputs, and write a package or library.

    `output`: `.so` and `.o` are libraries, all others packages.
    `inputs`: shapes as `2x3`, with a dtype as `2x3:int64`, separated by commas; `b2x3` makes that size dynamic.
    """
    file, _, name = source.rpartition(":")
    target = getattr(_loaded(Path(file)), name)
    module = target() if isinstance(target, type) else target
    if not isinstance(module, torch.nn.Module):
        module = _Function(module)
    tensors, dynamic = _inputs(inputs)
    shapes = dynamic if any(dynamic) else None
    program = torch.export.export(module.eval(), tensors, dynamic_shapes=shapes)
    given = _typed(dict(item.split("=", 1) for item in options))
    if Path(output).suffix in LIBRARIES:
        given = {"aot_format": LIBRARIES[Path(output).suffix], **given, "aot_output_path": output}
        print(aot_compile(program, options=given))
    else:
        print(aot_package(output, program, options=given))
    return 0


def inspect(path: str) -> int:
    """Print what a package or a library holds: its models, inputs, outputs, weights and files."""
    file = Path(path)
    if not zipfile.is_zipfile(file):
        _show("library", describe(file))
        return 0
    content = manifest.read(file)
    versions = content["torch"]
    print(f"{path}: format {content['format']}, built with torch {versions['built']}, needs {versions['least']}")
    for name, facts in content["models"].items():
        files = ", ".join(f"{n} ({size} bytes)" for n, (size, _) in facts["files"].items())
        print(
            f"model {name}: {facts['device']}, {facts['machine']}, {facts['isa']}; weights {facts['storage']}; {files}"
        )
        _show(name, facts["description"])
    problems = check_package(file)
    print("\n".join(map(str, problems)) or "runs on this machine")
    return 1 if problems else 0


def compare(path: str, inputs: str) -> int:
    """Run each model of a package beside its ExportedProgram in eager; return 1 if results differ.

    Then also print the first operator, or the weight, at which they differ.
    """
    status = 0
    for name, facts in manifest.read(Path(path))["models"].items():
        program = _program(path, name)
        tensors, _ = _inputs(inputs) if inputs else (_example(facts["description"]), ())
        model = aot_load(path, name)
        torch.manual_seed(0)
        # the library first: its error names the input that does not fit
        actual = torch.utils._pytree.tree_leaves(model(*_cloned(tensors)))
        torch.manual_seed(0)
        with torch.no_grad():
            expected = torch.utils._pytree.tree_leaves(program.module()(*_cloned(tensors)))
        same = True
        for k, (want, got) in enumerate(zip(expected, actual, strict=True)):
            reason = differences([got], [want]).removeprefix("result 0: ")
            print(f"model {name}, output {k}: {'DIFFERENT: ' + reason if reason else _distance(want, got)}")
            same &= not reason
        if not same:
            cause = first_difference(program, model, tensors)
            print(f"model {name}, first difference: {cause or UNKNOWN}")
            status = 1
    return status


def _distance(want: torch.Tensor, got: torch.Tensor) -> str:
    if not isinstance(want, torch.Tensor) or not want.numel():
        return "equal"
    kind = torch.complex128 if want.is_complex() else torch.float64
    error = (want.to(kind) - got.to(kind)).abs().nan_to_num(0).max().item()
    return f"equal within rounding, largest difference {error:.2e}"


def _program(path: str, name: str) -> ExportedProgram:
    with zipfile.ZipFile(path) as archive:
        stored = next((n for n in archive.namelist() if n.endswith(f"{PROGRAMS}{name}.pt2")), None)
        if stored is None:
            raise BadPackage(path, f"it has no ExportedProgram of {name}", "package it with programs=True")
        with archive.open(stored) as file:
            return torch.export.load(file)


def _cloned(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t.clone() for t in tensors]


def _example(description: JsonObject) -> tuple[torch.Tensor, ...]:
    """Return random inputs; a dynamic size takes the least value that its range has, or 2."""
    ranges = description["ranges"]
    out = []
    for name, dtype, sizes, _ in description["inputs"]:
        try:
            shape = [min(max(2, ranges[n][0]), ranges[n][1]) if n in ranges else int(n) for n in sizes]
        except ValueError as cause:
            raise BadPackage(name, f"its size {sizes} depends on others", "pass --inputs") from cause
        out.append(_random(shape, getattr(torch, dtype.removeprefix("torch."))))
    return tuple(out)


def _show(name: str, facts: JsonObject) -> None:
    for number, (label, dtype, sizes, strides) in enumerate(facts["inputs"]):
        print(f"  input {number} {label}: {dtype} ({', '.join(sizes)}) by ({', '.join(strides)})")
    for leaf in facts["leaves"]:
        if "input" not in leaf:
            print(f"  fixed argument {leaf['name']}: {leaf.get('text', repr(leaf.get('value')))}")
    for symbol, (least, most) in facts["ranges"].items():
        print(f"  {symbol}: {least} to {most if most < 2**62 else 'any size'}")
    print(f"  outputs: {', '.join(facts['outputs'])}")
    print(f"  {facts['kernels']} kernels, {facts['library_calls']} library calls, {len(facts['weights'])} weights")
    for weight, (dtype, shape) in facts["weights"].items():
        print(f"    {weight}: {dtype} {json.dumps(shape)}")
    assert name


# --- the command's arguments -----------------------------------------------------------------------------------------


class _Function(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: object) -> object:
        """Call the function."""
        return self.function(*args)


def _loaded(file: Path) -> object:
    spec = importlib.util.spec_from_file_location(f"altbackend_aot_{next(_modules)}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise BadPackage(str(file), "it is no Python file", "name it as FILE.py:function")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _inputs(text: str) -> tuple[tuple[torch.Tensor, ...], tuple[dict[int, object], ...]]:
    """Return random tensors of the shapes in `text`, and which of their dimensions are dynamic."""
    tensors, dynamic = [], []
    for item in text.split(","):
        shape_text, _, dtype = item.strip().partition(":")
        sizes, named = [], dict[int, object]()
        for k, part in enumerate(p for p in shape_text.split("x") if p):
            size_text = part.lstrip("abcdefghijklmnopqrstuvwyz")
            if not size_text.isdigit():
                raise BadPackage(item, "it is no shape", "write shapes as 2x3, b2x3 or 2x3:int64")
            sizes.append(int(size_text))
            if size_text != part:
                named[k] = torch.export.Dim.DYNAMIC
        tensors.append(_random(sizes, getattr(torch, dtype or "float32")))
        dynamic.append(named)
    return tuple(tensors), tuple(dynamic)


def _random(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(tuple(sizes)) > 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tuple(sizes)).to(dtype)
    return torch.randint(0, 2, tuple(sizes), dtype=dtype)


def _typed(given: dict[str, str]) -> dict[str, object]:
    """Return options from text, in the types of the options."""
    defaults = resolve(None, {}, {})
    default_values = {k: getattr(defaults, k, None) for k in given}
    return {
        k: type(d)(json.loads(v)) if isinstance(d, (bool, int)) else v
        for (k, v), d in zip(given.items(), default_values.values(), strict=True)
    }


def run(action: str, args: argparse.Namespace) -> int:
    """Run one action of the command; an error of ours is printed, not raised."""
    try:
        match action:
            case "compile":
                return compile_file(args.source, args.inputs, args.output, args.option)
            case "inspect":
                return inspect(args.file)
            case _:
                return compare(args.file, args.inputs)
    except AltError as error:
        print(error, file=sys.stderr)
        return 2
