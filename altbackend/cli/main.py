"""The commands of `python -m altbackend` and their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from altbackend import __version__
from altbackend.cli import aot, cache, demo, doctor, memory_curve, minify, options_table, passes, patterns

CACHE_ACTIONS = {
    "stats": "count the compiled graphs and their files",
    "explain-miss": "say why the graphs that were compiled last were not found",
    "verify": "read every file; exit status 1 if one is damaged",
    "clear": "remove all compiled code",
    "export": "write all graphs into one file",
    "import": "add the graphs of such a file",
}


def main(argv: Sequence[str]) -> int:
    """Run one command. Return the process's exit status."""
    args = parser().parse_args(argv)
    match args.command:
        case "demo":
            return demo.run(args.backend, args.model, args.device, args.seconds)
        case "doctor":
            return doctor.run()
        case "aot":
            return aot.run(args.action, args)
        case "cache":
            return cache.run(args.action, getattr(args, "file", ""))
        case "memory-curve":
            return memory_curve.run(args.source, args.points, args.steps, args.device, args.output)
        case "minify":
            return minify.run(args.file, args.modules, args.seconds, args.trials)
        case "passes":
            return passes.run()
        case "patterns":
            return patterns.run(args.write)
        case _:
            return options_table.run(args.markdown)


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of `python -m altbackend`."""
    top = argparse.ArgumentParser(prog="python -m altbackend", description="A small, readable torch.compile backend.")
    top.add_argument("--version", action="version", version=f"altbackend {__version__}")
    commands = top.add_subparsers(dest="command", required=True)

    shown = commands.add_parser("demo", help="compile a few models; compare speed and results with eager")
    shown.add_argument("--backend", default="alt", help="the backend to show (default: alt)")
    shown.add_argument("--model", action="append", choices=sorted(demo.MODELS), help="only this one; may be repeated")
    shown.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    shown.add_argument("--seconds", type=float, default=2.0, help="measuring time per row (default: 2)")

    commands.add_parser("doctor", help="check the compiler, OpenMP, Triton, CUDA and the cache folder")

    graphs = commands.add_parser("cache", help="count, check, carry or remove compiled graphs")
    actions = graphs.add_subparsers(dest="action", required=True)
    for action, says in CACHE_ACTIONS.items():
        added = actions.add_parser(action, help=says)
        if action in ("export", "import"):
            added.add_argument("file", metavar="FILE")

    _add_aot(commands.add_parser("aot", help="make, show or compare packages for programs without Python"))

    drawn = commands.add_parser("memory-curve", help="memory and time of a training step against the memory budget")
    drawn.add_argument("source", metavar="FILE.py:FUNCTION", help="a function that returns (module, inputs)")
    drawn.add_argument("--points", type=int, default=10, help="budgets from 1 to 0 (default: 10)")
    drawn.add_argument("--steps", type=int, default=5, help="timed steps at each budget (default: 5)")
    drawn.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    drawn.add_argument("-o", dest="output", default="memory-curve.png", metavar="OUT.png", help="the picture to write")

    shrunk = commands.add_parser("minify", help="shrink a file that compiles a graph and fails")
    shrunk.add_argument("file", metavar="FILE", help="a file that option `repro` had written")
    shrunk.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this first, for operators of your own; may be repeated",
    )
    shrunk.add_argument("--seconds", type=float, default=120.0, help="time of one trial (default: 120)")
    shrunk.add_argument("--trials", type=int, default=500, help="most trials (default: 500)")

    commands.add_parser("passes", help="print the graph passes in the order in which they run")

    traced = commands.add_parser("patterns", help="print the patterns that are traced from functions")
    traced.add_argument("--write", action="store_true", help="trace them again and write fx_passes/serialized/")

    listed = commands.add_parser("config", help="print every option")
    listed.add_argument("--markdown", action="store_true", help="the text of docs/options.md")
    return top


def _add_aot(command: argparse.ArgumentParser) -> None:
    """Add the actions of the command `aot`."""
    actions = command.add_subparsers(dest="action", required=True)
    compile_parser = actions.add_parser("compile", help="compile a module or function of a file into a package")
    compile_parser.add_argument(
        "source", metavar="FILE.py:NAME", help="a module, a class without arguments, or a function"
    )
    compile_parser.add_argument(
        "--inputs", required=True, help="shapes: 2x3,4x5:int64; a letter makes a size dynamic: b2x3"
    )
    compile_parser.add_argument(
        "-o", dest="output", required=True, metavar="OUT", help="the package (.pt2) or library (.so, .o) to write"
    )
    compile_parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the backend"
    )
    inspect_parser = actions.add_parser(
        "inspect", help="print models, inputs, weights; exit status 1 if it cannot run here"
    )
    inspect_parser.add_argument("file", metavar="FILE")
    compare_parser = actions.add_parser("compare", help="run a package beside eager; exit status 1 if results differ")
    compare_parser.add_argument("file", metavar="FILE")
    compare_parser.add_argument("--inputs", default="", help="shapes, as for compile; by default those of the package")
