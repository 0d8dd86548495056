"""Every error says what happened and what to do, and survives a trip between processes."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch

from altbackend import errors
from altbackend.errors import (
    AltError,
    BadBundle,
    BadCall,
    BadGraph,
    BadOptionValue,
    BadPackage,
    CacheFolderUnusable,
    CompilerFailed,
    CompilerMissing,
    DiscardedParameter,
    InternalError,
    NoRoom,
    PassChangedResults,
    SharedStoreUnusable,
    UnknownMode,
    UnknownOption,
    Unsupported,
    internal_error,
    user_location,
)

EXAMPLES: list[AltError] = [
    UnknownOption("max_fused_node", ("max_fused_nodes",)),
    BadOptionValue("threads", -1, "it takes int, at least 0", "ALTBACKEND_THREADS"),
    BadOptionValue("pre_grad_custom_pass", [3], "it must be a callable or a list of callables"),
    UnknownMode("fast", ("default", "max-autotune")),
    CompilerMissing(("g++", "clang++"), "linux"),
    CompilerFailed("g++ -O3 k.cpp", "k.cpp:3: error: no {braces} here", "/tmp/k.cpp"),
    Unsupported("aten.foo", "complex input", "model.py:3"),
    InternalError("lowering", "aten.add", "model.py:3", "/tmp/folder"),
    CacheFolderUnusable("/noexec", "it is mounted noexec"),
    NoRoom("/tmp and /cache", 32),
    PassChangedResults("simplify", "graph0_inference", "result 0: relative difference 1, more than 0.0001"),
    BadBundle("kernels.zip", "it is damaged"),
    DiscardedParameter("fc.weight", "aten.mm.default"),
    BadGraph("the output add", "it is no tuple", "let the graph return a tuple"),
    BadPackage("model.pt2", "its manifest is damaged", "package the model again"),
    BadCall("model.so", "dimension 0 of input 0 (x) is 9"),
    SharedStoreUnusable("redis://host:6379", "it does not answer"),
]


def test_the_examples_cover_the_catalogue() -> None:
    declared = {
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, AltError) and cls is not AltError
    }
    assert {type(error) for error in EXAMPLES} == declared


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_says_what_happened_and_what_to_do(error: AltError) -> None:
    stated, _, todo = str(error).partition("\n  What to do: ")
    assert stated
    assert todo
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_survives_pickling(error: AltError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)


def test_braces_in_a_fact_are_not_a_template() -> None:
    assert "no {braces} here" in str(EXAMPLES[5])


def test_compiler_output_is_cut() -> None:
    output = "\n".join(f"error {i}" for i in range(100))
    text = str(CompilerFailed("g++", output, "k.cpp"))
    assert "error 19" in text
    assert "error 20" not in text
    assert "80 more lines" in text


@pytest.mark.parametrize(("platform", "command"), [("linux", "apt-get"), ("darwin", "xcode-select"), ("win32", "LLVM")])
def test_compiler_missing_names_the_platforms_installer(platform: str, command: str) -> None:
    assert command in str(CompilerMissing(("g++",), platform))


def test_unknown_option_without_a_near_name() -> None:
    assert "did you mean" not in str(UnknownOption("zzz"))


class _Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cosh() + 1


def _traced_node() -> torch.fx.Node:
    seen: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        seen.append(gm)
        return gm

    torch.compile(_Model(), backend=keep)(torch.ones(3))
    node_: torch.fx.Node = next(node for node in seen[0].graph.nodes if "cosh" in str(node.target))
    return node_


def test_unsupported_finds_the_users_line() -> None:
    node = _traced_node()
    location = user_location(node)
    assert location.endswith("in forward: return x.cosh() + 1")
    assert location.startswith(__file__)
    assert location in str(Unsupported(node, "no lowering"))


def test_internal_error_names_line_operation_and_folder() -> None:
    node = _traced_node()
    try:
        raise KeyError("lost")
    except KeyError as cause:
        text = str(internal_error("lowering", node, cause, "/tmp/folder"))
    assert "cosh" in text
    assert "x.cosh() + 1" in text
    assert "KeyError" in text
    assert "/tmp/folder" in text


def test_location_of_a_node_without_one_is_empty() -> None:
    assert user_location("aten.add") == ""
    assert user_location(torch.fx.Graph().placeholder("x")) == ""
