"""Print one C++ function for many kernels that are alike; it finds their pointers and sizes in tables.

The threads share the points of all parts. A thread goes through the parts of which it has points, and runs the same
loop on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from .ast import Function
from .print_cpp import CTYPES, CppLines, block, open_parallel, team

BLOCK = 64  # points that are not divided between threads


def function(f: Function, identifier: str, torch_threads: bool = False) -> str:
    """Return the C++ text of a kernel over parts, as `print_cpp.function` does; its caller decides about threads.

    `slots` has the pointers' numbers in `p`, part by part; `ends` the sums of the parts' lengths so far.
    """
    w = CppLines()
    tables = "void* const* p, const int32_t* slots, const int64_t* ends, const int64_t parts"
    w.open(f"static void {identifier}({tables}, const int threads)")
    open_parallel(w, torch_threads)
    w.add(f"const alt::Share all = alt::share_blocks(ends[parts - 1], {BLOCK}, thread, {team(torch_threads)});")
    w.open("for (int64_t part = alt::first_after(ends, parts, all.begin); part < parts; ++part)")
    w.add("const int64_t first = part > 0 ? ends[part - 1] : 0, n = ends[part] - first;")
    w.add("if (first >= all.end) break;")
    w.add("const int64_t begin = all.begin > first ? all.begin - first : 0, end = alt::min64(all.end - first, n);")
    for k, q in enumerate(f.params):
        const = "" if q.written else "const "
        slot = f"slots[part * {len(f.params)} + {k}]"
        restrict = "" if q.shared else " __restrict"
        w.add(f"{const}{CTYPES[q.dtype]}*{restrict} const {q.name} = ({const}{CTYPES[q.dtype]}*)p[{slot}];")
    block(w, f.body)
    w.close()
    w.close(");" if torch_threads else "")
    w.close()
    return "\n".join(w.body) + "\n"


def call(label: str, number: int, points: Sequence[int], slots: Sequence[int], is_parallel: bool) -> str:
    """Return the tables of launch `number` and its call. `is_parallel`: the work is worth several threads."""
    w = CppLines()
    w.depth = 1
    w.add(f"static const int32_t slots{number}[] = {{{', '.join(map(str, slots))}}};")
    w.add(f"static const int64_t ends{number}[] = {{{', '.join(map(str, accumulate(points)))}}};")
    w.add(f"{label}(p, slots{number}, ends{number}, {len(points)}, {'threads' if is_parallel else '1'});")
    return "\n".join(w.body)
