"""Print the C++ around the lines of a program: its namespace, the plan of its arena, and its table."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir import expr as ex
from .cpp_values import dtype_text, int64, ints
from .launch_plan import LaunchPlan, segment_head


def program_text(planned: LaunchPlan, name: str, body: Sequence[str], reuse_memory: bool, pointers: bool) -> str:
    """Return the namespace `name` with the functions of a program, and `<name>_table`, which refers to them.

    `pointers`: the functions of segments belong to a loaded graph, and the frame of a call points at them. Graphs whose
    kernels differ may share the text, and so its library.
    """
    locations, p = planned.locations, planned.program
    symbols = [f"  const int64_t {s} = S[{k}]; (void){s};" for k, s in enumerate(locations.layout)]
    sizes = f"{len(locations.slots)}, {len(locations.symbols)}, {locations.layout_symbols}, {len(p.inputs)}"
    functions = f"{name}::plan_memory, {name}::run_once"
    lines = [
        f"namespace {name} {{",
        *([] if pointers else [f"{segment_head(n)};" for n in range(len(planned.segments))]),
        "",
        "static void plan_memory(const int64_t* S, Layout& layout) {",
        "  (void)S;",
        *symbols,
        f"  layout.reuse = {str(reuse_memory).lower()};",
        *_blocks(planned),
        *_windows(planned),
        "}",
        "",
        "static void run_once(Frame& frame) {",
        *(_own_segments(len(planned.segments)) if pointers else []),
        *body,
        "}",
        f"}}  // namespace {name}",
        f"static const ProgramTable {name}_table{{{sizes}, {len(p.outputs)}, {functions}}};",
        "",
    ]
    return "\n".join(lines)


def _own_segments(count: int) -> list[str]:
    """Return the lines that name the segments of the graph that is called."""
    frame = "static_cast<GraphFrame&>(frame)"
    return [f"  Segment* const segment{n} = {frame}.segments[{n}];" for n in range(count)]


def _blocks(planned: LaunchPlan) -> list[str]:
    locations = planned.locations
    lines = []
    for b, (first, last) in locations.arena.items():
        if b in locations.shares:
            continue
        buffer = planned.program.buffers[b]
        names = [b, *(c for c, root in locations.shares.items() if root == b)]
        slots = ", ".join(str(locations.slots[c]) for c in names)
        nbytes = int64(ex.mul(buffer.extent, buffer.dtype.itemsize))
        lines.append(f"  layout.block({{{slots}}}, {nbytes}, {first}, {last});  // {', '.join(names)}")
    return lines


def _windows(planned: LaunchPlan) -> list[str]:
    lines = []
    for v in planned.locations.windows:
        dtype = dtype_text(v.dtype or planned.program.buffers[v.buffer].dtype)
        geometry = f"{ints(v.sizes)}, {ints(v.strides)}, {int64(v.offset)}"
        lines.append(f"  layout.window({planned.locations.slots[v.buffer]}, {dtype}, {geometry});  // {v.buffer}")
    return lines
