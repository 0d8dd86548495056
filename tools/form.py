"""Count what a reader of the code meets: sizes of files and functions, cycles of imports, types, docstrings, words.

python -m tools.form                  # of this checkout
python -m tools.form OTHER_CHECKOUT   # a second column: of another one, an older state for example
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import networkx

from altbackend.aten.name import words

PACKAGE = "altbackend"
MOST_PARAMETERS = 6
QUESTIONS = ("What", "Whether", "How", "Why", "Where", "Which", "Who", "When")
# Names that the field's terms have replaced. A few stand for something else now (`refine`).
RENAMED = words(
    "halves outline late_symbols hoisted bodies _settle Placed refine rechain NotHere remembered several digits CHEAP "
    "kept held made again crossed pieces found known"
)


@dataclass(frozen=True)
class Module:
    """A file of the package."""

    name: str
    text: str
    tree: ast.Module


def modules(root: Path) -> list[Module]:
    """Return the modules of the package in a checkout."""
    ms = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        text = path.read_text()
        ms.append(Module(".".join(p for p in parts if p != "__init__"), text, ast.parse(text)))
    return ms


def facts(root: Path) -> dict[str, str]:
    """Return the figures of a checkout by their names."""
    ms = modules(root)
    lines = sorted(m.text.count("\n") for m in ms if m.text.strip())
    functions = [n for m in ms for n in ast.walk(m.tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    strings = list(_docstrings(ms))
    words = re.findall(r"\S+", (root / "docs/architecture.md").read_text())
    lengths = [len(s.split()) for path in sorted((root / "docs").rglob("*.md")) for s in _sentences(path.read_text())]
    names = [name for m in ms for n in ast.walk(m.tree) if (name := _name(n))]
    code = "\n".join(m.text for m in ms)
    return {
        "files": str(len(lines)),
        "median, largest file (lines)": f"{statistics.median(lines):.0f}, {lines[-1]}",
        "longest function (lines)": str(max((n.end_lineno or 0) - n.lineno + 1 for n in functions)),
        f"functions of more than {MOST_PARAMETERS} parameters": str(sum(map(_is_wide, functions))),
        "cycles of imports": str(_cycles(ms)),
        "`Any`": str(len(re.findall(r"\bAny\b", code))),
        "`type: ignore`": str(code.count("type: ignore")),
        "docstrings": str(len(strings)),
        "docstrings that begin with a question word": str(sum(s.split()[0] in QUESTIONS for s in strings)),
        "words of architecture.md": str(len(words)),
        "median sentence of docs (words)": f"{statistics.median(lengths):.0f}",
        "sentences of docs of more than 25 words": f"{sum(n > 25 for n in lengths) / len(lengths):.0%}",
        "uses of replaced names": str(sum(name in RENAMED for name in names)),
    }


def _name(n: ast.AST) -> str:
    """Return the identifier that a node of the syntax tree names, or ""."""
    match n:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            return name
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
    return ""


def _is_wide(f: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    a = f.args
    names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len([n for n in names if n not in ("self", "cls")]) > MOST_PARAMETERS


def _docstrings(ms: Sequence[Module]) -> Iterator[str]:
    for m in ms:
        for n in ast.walk(m.tree):
            if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(n)
                if text:
                    yield text


def _cycles(ms: Sequence[Module]) -> int:
    """Return the number of groups of modules that import each other while they load."""
    names = {m.name: m for m in ms}
    graph = networkx.DiGraph()
    for m in ms:
        is_package = any(other.startswith(f"{m.name}.") for other in names)
        graph.add_edges_from((m.name, used) for used in _imported(m, is_package, names) if used != m.name)
    return sum(len(group) > 1 for group in networkx.strongly_connected_components(graph))


def _imported(m: Module, is_package: bool, names: Mapping[str, object]) -> Iterator[str]:
    package = m.name.split(".") if is_package else m.name.split(".")[:-1]
    for n in m.tree.body:  # imports inside functions, or for types alone, run later or never
        if isinstance(n, ast.ImportFrom) and (n.level or (n.module or "").startswith(PACKAGE)):
            base = package[: len(package) - n.level + 1] if n.level else []
            path = ".".join([*base, *filter(None, [n.module])])
            for alias in n.names:
                yield next(x for x in (f"{path}.{alias.name}", path, PACKAGE) if x in names)


def _sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page, without code, tables, headings and the marks of lists."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    prose = [line for line in text.split("\n") if not line.lstrip().startswith(("|", "#"))]
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*0-9.]+ ", "\n".join(prose)):
        for sentence in re.split(r"(?<=[.:;!?])\s+", paragraph.strip()):
            if len(sentence.split()) > 2:
                yield sentence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", type=Path, help="another checkout")
    args = parser.parse_args()
    mine = facts(Path(__file__).parents[1])
    theirs = facts(args.other) if args.other else {}
    rows = [("figure", *(["other"] if theirs else []), "this"), ("---",) * (3 if theirs else 2)]
    rows += [(name, *([theirs[name]] if theirs else []), value) for name, value in mine.items()]
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
