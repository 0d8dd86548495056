"""Folder order is dependency order, and the other rules about imports."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "altbackend"

# A room imports from itself and from the tiers above it in this list, nothing else. A new room goes where it fits.
TIERS: tuple[frozenset[str], ...] = tuple(
    frozenset(tier.split())
    for tier in (
        "lazy_dataclass",
        "errors",
        "config integrations",
        "report.stats disk_cache",
        "debug compat",
        "ir aten",
        "runtime",
        "decomp_qparams",
        "decomp",
        "lowering fx_passes repro",
        "fx",
        "partition",
        "schedule",
        "codegen",
        "compile_pool",
        "compiled",
        "graph_cache",
        "autotune",
        "compiled.subgraphs",
        "pipeline",
        "aot",
        "eager",
        "backend entry_point",
        "minify",
        "report",
        "examples",
        "cli",
        "__main__",
    )
)
RANK = {room: rank for rank, tier in enumerate(TIERS) for room in tier}
# What generated code imports at run time must not pull in the compiler.
RUNTIME_MAY_IMPORT = {"lazy_dataclass", "errors", "config", "compat", "report.stats", "ir", "runtime"}
# Third parties that need not be installed, so that their imports may stand inside a function.
OPTIONAL = {"triton", "torchvision", "timm", "transformers", "matplotlib", "redis"}
# AOTAutograd's cache contract names a type of that package; only the adapter to it may import it.
INDUCTOR_ADAPTER = {"altbackend/cache/aot_autograd.py": "torch._inductor.output_code"}


@dataclass(frozen=True)
class Import:
    """One imported module: its full name, where, and whether inside a function."""

    module: str
    file: str
    line: int
    in_function: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path, text: str | None = None) -> list[Import]:
    """Every import of a file, `from a import b` as both `a` and `a.b` where `a.b` is a module of ours."""
    tree = parsed(path) if text is None else ast.parse(text)
    file = path.relative_to(ROOT).as_posix()
    return [
        Import(module, file, node.lineno, inside)
        for node, inside in _import_nodes(tree, False)
        for module in _modules(node, path)
    ]


def _import_nodes(node: ast.AST, inside: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, inside
        function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _import_nodes(child, inside or function)


def _modules(node: ast.Import | ast.ImportFrom, path: Path) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
        return
    base = node.module or ""
    if node.level:
        package = path.relative_to(ROOT).with_suffix("").parts[: -node.level]
        base = ".".join([*package, base] if base else package)
    for name in node.names:
        full = f"{base}.{name.name}"
        yield full if is_ours(full) else base


def is_ours(module: str) -> bool:
    """Return whether a dotted name is a file or folder of the package."""
    path = ROOT.joinpath(*module.split("."))
    return module.split(".")[0] == "altbackend" and (path.is_dir() or path.with_suffix(".py").is_file())


def room(module: str) -> str:
    """The room of a module name: `altbackend.ir.expr` is in `ir`, and `altbackend` itself in ``."""
    inner = module.removeprefix("altbackend").removeprefix(".")
    return inner if inner in RANK else inner.split(".")[0]


def room_of_file(path: Path) -> str:
    """The room of a file of the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return room(".".join(("altbackend", *(part for part in parts if part != "__init__"))))


FILES = sorted(PACKAGE.rglob("*.py"))
INNER = [path for path in FILES if path != PACKAGE / "__init__.py"]


def by_name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def violations(importer: str, imports_: list[Import]) -> list[str]:
    """Imports of our own modules that go against the order of tiers."""
    return [
        f"{item}: {importer} comes before {target}"
        for item in imports_
        if item.module.split(".")[0] == "altbackend"
        for target in [room(item.module)]
        if target and target != importer and RANK[target] >= RANK[importer]
    ]


@pytest.mark.parametrize("path", INNER, ids=by_name)
def test_every_room_has_a_tier(path: Path) -> None:
    assert room_of_file(path) in RANK, "a new room: give it a place in TIERS"


@pytest.mark.parametrize("path", INNER, ids=by_name)
def test_folder_order_is_dependency_order(path: Path) -> None:
    assert violations(room_of_file(path), imports(path)) == []


@pytest.mark.parametrize("path", sorted((PACKAGE / "runtime").rglob("*.py")), ids=by_name)
def test_runtime_imports_no_compiler(path: Path) -> None:
    own = [item for item in imports(path) if item.module.startswith("altbackend.")]
    assert [str(item) for item in own if room(item.module) not in RUNTIME_MAY_IMPORT] == []


@pytest.mark.parametrize("path", FILES, ids=by_name)
def test_no_import_hides_in_a_function(path: Path) -> None:
    hidden = [item for item in imports(path) if item.in_function and item.module.split(".")[0] not in OPTIONAL]
    assert [str(item) for item in hidden] == []


@pytest.mark.parametrize("path", FILES, ids=by_name)
def test_nothing_imports_torch_inductor(path: Path) -> None:
    imports_ = [item for item in imports(path) if (item.module + ".").startswith("torch._inductor.")]
    assert [str(item) for item in imports_ if INDUCTOR_ADAPTER.get(item.file) != item.module] == []


@pytest.mark.parametrize("path", FILES, ids=by_name)
def test_imports_by_name_only_in_the_lazy_package(path: Path) -> None:
    called = {
        name
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        for name in [getattr(node.func, "attr", getattr(node.func, "id", ""))]
    }
    allowed = {"import_module"} if path == PACKAGE / "__init__.py" else set()
    assert called & {"import_module", "__import__"} <= allowed


@pytest.mark.parametrize("path", FILES, ids=by_name)
def test_nothing_registers_the_backend(path: Path) -> None:
    """torch registers it through the entry point; a second registration makes torch.compile fail."""
    named = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(parsed(path))}
    assert "register_backend" not in named


# --- the checks themselves ---


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import altbackend.codegen", ["altbackend.codegen"]),
        ("from altbackend import codegen, errors", ["altbackend.codegen", "altbackend.errors"]),
        ("from altbackend.errors import AltError", ["altbackend.errors"]),
        ("from . import lowering", ["altbackend.lowering"]),
        ("from .errors import AltError", ["altbackend.errors"]),
        ("import torch._inductor.ir as ir", ["torch._inductor.ir"]),
    ],
)
def test_import_forms_are_seen(source: str, modules: list[str]) -> None:
    assert [item.module for item in imports(PACKAGE / "ir.py", source)] == modules


def test_an_upward_import_is_seen() -> None:
    upward = imports(
        PACKAGE / "ir" / "x.py", "from altbackend.codegen import cpp\nfrom altbackend.errors import AltError"
    )
    assert len(violations("ir", upward)) == 1


def test_siblings_of_a_tier_do_not_import_each_other() -> None:
    assert len(violations("lowering", imports(PACKAGE / "lowering" / "x.py", "import altbackend.fx_passes"))) == 1


def test_a_hidden_import_is_seen() -> None:
    source = "import os\ndef f():\n    if True:\n        import re\nclass C:\n    import json\n"
    assert [(item.module, item.in_function) for item in imports(PACKAGE / "x.py", source)] == [
        ("os", False),
        ("re", True),
        ("json", False),
    ]
