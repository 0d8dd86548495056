"""Print the text of a library besides its kernels: host programs, and the tables that `aot/model.h` declares."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch.utils import _pytree as pytree

from altbackend.lazy_dataclass import dataclass

from ..codegen.host.cpp_values import DTYPES, quoted
from ..errors import BadGraph
from ..runtime import isa
from .capture import Captured
from .machine_code import NONE, MachineCode
from .programs import Programs, Source
from .weights import Block

_HEADERS = ("checks.h", "dispatcher.h", "model.h", "numbers.h")
LITERAL_TYPE = 3
APPENDED = 1 << 20  # fewest bytes of weights that follow the code


@dataclass(frozen=True)
class Content:
    """The contents of a library besides code. `storage`: the option `aot_constants`. `target`: the instruction set.

    The library embeds the literals, with embedded weights before them, and after them the machine code for GPUs.
    """

    captured: Captured
    programs: Programs
    weights: Block
    literals: Block
    storage: str
    target: str
    code: MachineCode = NONE
    is_object: bool = False  # an object file, which has no place after its code

    @property
    def before_code(self) -> int:
        """Return the bytes of the embedded block that come before the machine code."""
        return self.before_literals + self.literals.size

    @property
    def before_literals(self) -> int:
        """Return the bytes of the embedded block that come before the literals."""
        return self.weights.size if self.storage == "embedded" and not self.appended else 0

    @property
    def appended(self) -> bool:
        """Return whether embedded weights follow the code in the library's file: linking would copy them often."""
        return self.storage == "embedded" and self.weights.size >= APPENDED and not self.is_object


def model_text(content: Content) -> str:
    """Return the translation unit of the host programs and tables."""
    captured, programs = content.captured, content.programs
    declarations = dict.fromkeys((*programs.main.declarations, *(programs.fold.declarations if programs.fold else ())))
    hosts = [programs.main.host, *([_unoptimised(programs.fold.host)] if programs.fold else [])]
    lines = [
        *(f"#include <altbackend/aot/{h}>" for h in _HEADERS),
        "",
        *declarations,
        "",
        'extern "C" __attribute__((visibility("hidden"))) const unsigned char alt_block[];',
        "",
        "namespace alt::aot {",
        "",
        *hosts,
        *_constants(content),
        *_names("input_names", [leaf.name for leaf in captured.inputs]),
        *_names("output_names", [f"output{k}" for k in range(len(programs.main.outputs))]),
        *_names("features", isa.required_features(content.target)),
        *_sources("main_sources", programs.main_sources),
        *_sources("fold_sources", programs.fold_sources),
        *_gpu(content),
        "",
        *_model(content),
        "}  // namespace alt::aot",
        "",
    ]
    return "\n".join(lines)


def _unoptimised(host: str) -> str:
    """Return a host program that runs once for each set of weights: its compilation takes longer than its runs."""
    return f'#pragma GCC push_options\n#pragma GCC optimize("O0")\n{host}\n#pragma GCC pop_options'


def specs(captured: Captured) -> tuple[str, str]:
    """Return the trees of arguments and results as text. Raise BadGraph for a type that has none."""
    try:
        return pytree.treespec_dumps(captured.in_spec), pytree.treespec_dumps(captured.out_spec)
    except NotImplementedError as cause:
        todo = "return tensors in tuples, lists or dicts, or register the type with a serialized_type_name"
        raise BadGraph("the tree of arguments or results", str(cause), todo) from cause


def block_text(path: str) -> str:
    """Return assembler that embeds a file of weights, in memory that a process may write without changing the file."""
    lines = ['.section .data.alt_block,"aw"', ".balign 64", ".globl alt_block", ".hidden alt_block", "alt_block:"]
    return "\n".join([*lines, f'.incbin "{path}"', ".byte 0", '.section .note.GNU-stack,"",%progbits', ""])


def describe(captured: Captured, programs: Programs) -> dict[str, object]:
    """Return what a loader and a person need to know of a library, as JSON values."""
    return {
        "leaves": [
            {"name": leaf.name, "input": leaf.number} if leaf.number is not None else _plain(leaf.name, leaf.value)
            for leaf in captured.leaves
        ],
        "inputs": [[leaf.name, *(x if isinstance(x, str) else list(x) for x in leaf.form)] for leaf in captured.inputs],
        "outputs": list(programs.main.outputs),
        "device": programs.device.type,
        "ranges": {s: list(r) for s, r in captured.ranges.items()},
        "weights": {w.name: [str(w.tensor.dtype), list(w.tensor.shape)] for w in captured.weights},
        "same": _tied(captured),
        "kernels": programs.main.launches + (programs.fold.launches if programs.fold else 0),
        "library_calls": programs.main.library_calls + (programs.fold.library_calls if programs.fold else 0),
    }


def _tied(captured: Captured) -> dict[str, str]:
    """Return name -> the first name of the same tensor, for weights that have several names."""
    first: dict[object, str] = {}
    out = {}
    for w in captured.weights:
        t = w.tensor
        key = (t.untyped_storage().data_ptr(), t.storage_offset(), t.dtype, tuple(t.shape), t.stride())
        if t.numel() and first.setdefault(key, w.name) != w.name:
            out[w.name] = first[key]
    return out


def _plain(name: str, value: object) -> dict[str, object]:
    simple = value is None or isinstance(value, (bool, int, float, str))
    return {"name": name, "value": value} if simple else {"name": name, "text": repr(value)}


# --- tables ----------------------------------------------------------------------------------------------------------


def _constants(content: Content) -> list[str]:
    weights, first = content.captured.weights, content.before_literals
    rows = [(w.name, p, p.offset, w.kind, w.written) for w, p in zip(weights, content.weights.tensors, strict=True)]
    rows += [(f"literal{k}", p, first + p.offset, LITERAL_TYPE, False) for k, p in enumerate(content.literals.tensors)]
    arrays, table = [], []
    for k, (name, p, offset, kind, written) in enumerate(rows):
        t = p.tensor
        for what, xs in (("sizes", t.shape), ("strides", t.stride())):
            arrays.append(f"static const int64_t {what}{k}[] = {{{', '.join(map(str, xs)) or '0'}}};")
        flags = f"{str(written).lower()}, {str(t.device.type == 'cuda').lower()}"
        facts = f"{t.dim()}, sizes{k}, strides{k}, {offset}, {p.size}, {kind}, {flags}"
        table.append(f"    {{{quoted(name)}, Dtype::{DTYPES[t.dtype]}, {facts}}},")
    end = '    {"", Dtype::uint8, 0, nullptr, nullptr, 0, 0, 0, false, false},'
    return [*arrays, "static const Constant constants[] = {", *table, end, "};"]


def _names(table: str, names: Sequence[str]) -> list[str]:
    return [f"static const char* const {table}[] = {{{', '.join([*map(quoted, names), 'nullptr'])}}};"]


def _sources(table: str, sources: Sequence[Source]) -> list[str]:
    rows = [f"{{From::{kind}, {number}}}" for kind, number in sources] or ["{From::constant, 0}"]
    return [f"static const Source {table}[] = {{{', '.join(rows)}}};"]


def _model(content: Content) -> list[str]:
    captured, programs, weights = content.captured, content.programs, content.weights
    description = json.dumps(describe(captured, programs), sort_keys=True)
    in_spec, out_spec = specs(captured)
    file = f"{quoted(weights_name(weights))}, {quoted(weights.digest)}, {weights.size}"
    return [
        "const Model model{",
        f"    {quoted(content.target)}, features,",
        f"    constants, {len(captured.weights)}, {len(programs.literals)},",
        f"    Storage::{'appended' if content.appended else content.storage}, alt_block, {file},",
        f"    input_names, {len(captured.inputs)}, output_names, {len(programs.main.outputs)},",
        f"    {quoted(in_spec)},",
        f"    {quoted(out_spec)},",
        f"    {quoted(description)},",
        f"    &main_program_table, main_sources, {'&fold_table' if programs.fold else 'nullptr'}, fold_sources,",
        f"    {'&gpu_model' if programs.device.type == 'cuda' else 'nullptr'},",
        "};",
    ]


def _gpu(content: Content) -> list[str]:
    """Return the tables of a GPU's kernels: places in the block, and one row for each launch."""
    code, jobs = content.code, content.programs.jobs
    if content.programs.device.type != "cuda":
        return []
    number = {job: n for n, job in enumerate(code.places)}
    lines = []
    for n, places in enumerate(code.places.values()):
        rows = ", ".join(f"{{{content.before_code + offset}, {shared}}}" for offset, shared in places)
        lines.append(f"static const Image images{n}[] = {{{rows}}};")
    for name in ("main", "fold"):
        rows = ", ".join(f"{{{quoted(j.name)}, {32 * j.warps}, images{number[j]}}}" for j in jobs[name])
        lines.append(f"static const KernelImages {name}_kernels[] = {{{rows or '{}'}}};")
    rows = ", ".join(f"{{{a.capability}, {str(a.ptx).lower()}}}" for a in code.architectures)
    shown = quoted(", ".join(map(str, code.architectures)))
    programs = ", ".join(f"{{{name}_kernels, {len(jobs[name])}}}" for name in ("main", "fold"))
    return [
        *lines,
        f"static const Architecture architectures[] = {{{rows}}};",
        f"static const GpuModel gpu_model{{architectures, {len(code.architectures)}, {shown}, {programs}}};",
    ]


def weights_name(weights: Block) -> str:
    """Return the name of the file of weights beside a library."""
    return f"{weights.digest[:16]}.weights"
