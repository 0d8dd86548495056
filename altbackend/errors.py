"""All errors and warnings that a user can meet.

An error is a dataclass. Its fields are the facts, `message` is the template that states them, and `action` says what to
do next. Errors travel between worker processes, so each one pickles by its fields.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import fields
from typing import ClassVar

from altbackend.lazy_dataclass import dataclass

# Field values are text by the time they are formatted; a compiler's output can be longer than useful.
MAX_COMPILER_LINES = 20


@dataclass(eq=False, repr=False)
class AltError(RuntimeError):
    """Base of all errors raised by altbackend.

    Subclasses set `message` (what happened) and `action` (what to do). Both are `str.format` templates over the
    fields and the properties of the class.
    """

    message: ClassVar[str] = "altbackend failed"
    action: ClassVar[str] = ""
    reproduce = ""  # the command that reproduces the error

    def __post_init__(self) -> None:
        super().__init__(self.text())

    def text(self) -> str:
        """Return the full message: what happened, what to do, and how to reproduce it."""
        facts = _Facts(self)
        stated = self.message.format_map(facts)
        todo = self.action.format_map(facts)
        text = f"{stated}\n  What to do: {todo}" if todo else stated
        return f"{text}\n  Reproduce: {self.reproduce}" if self.reproduce else text

    @property
    def headline(self) -> str:
        """Return what happened, on one line."""
        return self.message.format_map(_Facts(self)).partition("\n")[0]

    def __str__(self) -> str:
        return self.text()

    def __reduce__(self) -> tuple[Callable[..., AltError], tuple[object, ...]]:
        return type(self), tuple(getattr(self, item.name) for item in fields(self))


class _Facts(dict[str, object]):
    """Looks up template names as attributes of the error."""

    def __init__(self, error: AltError) -> None:
        super().__init__()
        self.error = error

    def __missing__(self, name: str) -> object:
        return getattr(self.error, name)


def user_location(node: object) -> str:
    """Return `file:line, in function: code` of the user's line behind an FX node, or "" if none is recorded."""
    meta = getattr(node, "meta", None)
    stack = meta.get("stack_trace") if isinstance(meta, dict) else None
    if not isinstance(stack, str):
        return ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*([^\n]*)', stack)
    if not frames:
        return ""
    file, line, function, code = frames[-1]
    return f"{file}:{line}, in {function}: {code.strip()}"


# --- options ---------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class UnknownOption(AltError):
    """An option name that neither this backend nor TorchInductor has."""

    name: str
    nearest: tuple[str, ...] = ()

    message: ClassVar[str] = "unknown option {name!r}{hint}"
    action: ClassVar[str] = "`python -m altbackend config` lists every option"

    @property
    def hint(self) -> str:
        return f"; did you mean {' or '.join(map(repr, self.nearest))}?" if self.nearest else ""


@dataclass(eq=False, repr=False)
class BadOptionValue(AltError):
    """An option value of the wrong type, outside its range, or not available on this system."""

    name: str
    value: object
    expected: str
    source: str = "options"

    message: ClassVar[str] = "option {name!r} from {source} cannot be {value!r}: {expected}"
    action: ClassVar[str] = "change or remove it; `python -m altbackend config` shows what each option takes"

    def __post_init__(self) -> None:
        if not isinstance(self.value, (str, int, float, bool, type(None))):
            self.value = repr(self.value)  # a callable or tensor may not pickle
        super().__post_init__()


@dataclass(eq=False, repr=False)
class UnknownMode(AltError):
    """A `mode=` that torch.compile does not define for this backend."""

    mode: str
    modes: tuple[str, ...]

    message: ClassVar[str] = "unknown mode {mode!r}; the modes are {listed}"
    action: ClassVar[str] = "choose one of them, or give single settings with options={{...}}"

    @property
    def listed(self) -> str:
        return ", ".join(self.modes)


# --- building kernels ------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class CompilerMissing(AltError):
    """No C++ compiler was found. `tried` holds the names looked up; `platform` is `sys.platform`."""

    tried: tuple[str, ...]
    platform: str = "linux"

    message: ClassVar[str] = "no C++ compiler found (looked for {listed})"
    action: ClassVar[str] = "{install}; or point options={{'cxx': '/path/to/compiler'}} or ALTBACKEND_CXX at one"

    @property
    def listed(self) -> str:
        return ", ".join(self.tried)

    @property
    def install(self) -> str:
        return install_compiler(self.platform)


def install_compiler(platform: str) -> str:
    """Return instructions to install a C++ compiler on a `sys.platform`."""
    match platform:
        case "darwin":
            return "install the Xcode command line tools with `xcode-select --install`"
        case "win32":
            return "install LLVM (clang++) or the Visual Studio C++ build tools and put them on PATH"
        case _:
            return "install g++ (`apt-get install g++`, `dnf install gcc-c++` or `conda install gxx`)"


@dataclass(eq=False, repr=False)
class CompilerFailed(AltError):
    """The C++ or Triton compiler rejected generated code, or did not finish.

    `command` is the full command line, `output` the compiler's output, `source` the path of the generated file.
    """

    command: str
    output: str
    source: str

    message: ClassVar[str] = "compiling generated code failed\n  source:  {source}\n  command: {command}\n{excerpt}"
    action: ClassVar[str] = (
        "run the command above to see it all; if `python -m altbackend doctor` finds the compiler healthy, "
        "this is a defect of altbackend: report it with the source file"
    )

    @property
    def excerpt(self) -> str:
        lines = self.output.strip().splitlines()
        left_out = len(lines) - MAX_COMPILER_LINES
        more = [f"    ... {left_out} more lines"] if left_out > 0 else []
        if lines and lines[0].startswith("Traceback"):  # the message of a traceback stands at its end
            return "\n".join([*more, *(f"    {line}" for line in lines[-MAX_COMPILER_LINES:])])
        return "\n".join([*(f"    {line}" for line in lines[:MAX_COMPILER_LINES]), *more])


# --- graphs ----------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Unsupported(AltError):
    """An operation in the graph that altbackend does not compile.

    `what` names the operation; an FX node is accepted, and gives `location` if that is empty. `reason` says why the
    operation is not supported; `todo` is a workaround.
    """

    what: object
    reason: str
    location: str = ""
    todo: str = "leave that operation out of the compiled region (torch.compiler.disable), or report it"

    message: ClassVar[str] = "cannot compile {what}: {reason}{location_note}"
    action: ClassVar[str] = "{todo}"

    def __post_init__(self) -> None:
        self.location = self.location or user_location(self.what)
        self.what = _node_text(self.what)
        super().__post_init__()

    @property
    def location_note(self) -> str:
        return f" ({self.location})" if self.location else ""


def _node_text(what: object) -> str:
    target = getattr(what, "target", None)
    return str(what) if target is None else f"{target} ({what})"


@dataclass(eq=False, repr=False)
class InternalError(AltError):
    """A defect of altbackend. It names the user's line, the operation and the location of further information."""

    stage: str
    what: str
    location: str = ""
    folder: str = ""

    message: ClassVar[str] = "internal error while {stage} {what}{location_note}"
    action: ClassVar[str] = "{evidence}; model code can go on with torch.compile(..., backend='aot_eager')"

    @property
    def location_note(self) -> str:
        return f" ({self.location})" if self.location else ""

    @property
    def evidence(self) -> str:
        if self.folder:
            return f"report it with the folder {self.folder}"
        return "run again with ALTBACKEND_DEBUG=<folder> and report it with that folder"


def internal_error(stage: str, node: object, cause: BaseException, folder: str = "") -> InternalError:
    """Return an `InternalError` for `cause`, raised while `stage` handled the FX node or name `node`."""
    last = traceback.extract_tb(cause.__traceback__)[-1:]
    raised_at = f" at {last[0].filename}:{last[0].lineno}" if last else ""
    what = f"{_node_text(node)}: {type(cause).__name__}: {cause}{raised_at}"
    return InternalError(stage, what, user_location(node), folder)


# --- folders ---------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class PassChangedResults(AltError):
    """A graph pass changes results beyond rounding, which the option `check_passes` has found."""

    pass_name: str
    graph: str
    difference: str

    message = "the pass `{pass_name}` changes the results of {graph}: {difference}"
    action = (
        "if it is a pass of your own, correct it; otherwise report this as a bug, with the graph that "
        "options={{'repro': 'always'}} writes"
    )


@dataclass(eq=False, repr=False)
class CacheFolderUnusable(AltError):
    """The cache folder cannot be written, or code in it cannot be run."""

    folder: str
    reason: str

    message: ClassVar[str] = "the cache folder {folder} cannot be used: {reason}"
    action: ClassVar[str] = (
        "set ALTBACKEND_CACHE_DIR or options={{'cache_dir': ...}} to a folder you own on a file system "
        "that is not mounted noexec"
    )


@dataclass(eq=False, repr=False)
class NoRoom(AltError):
    """Neither the temporary folder nor the cache folder has room for a build."""

    folders: str
    mib: int

    message: ClassVar[str] = "no room to build kernels: {folders} have less than {mib} MiB or no inodes left"
    action: ClassVar[str] = "make room there, or set the environment variable TMPDIR to a folder with more room"


@dataclass(eq=False, repr=False)
class SharedStoreUnusable(AltError):
    """The server of option `cache_url` does not answer, or refuses a command."""

    url: str
    reason: str

    message: ClassVar[str] = "the shared store {url} is left alone for a while: {reason}"
    action: ClassVar[str] = (
        "nothing if the server comes back, since graphs are cached in the cache folder meanwhile; otherwise unset "
        "ALTBACKEND_CACHE_URL"
    )


@dataclass(eq=False, repr=False)
class BadBundle(AltError):
    """A file given to `cache import` is not a valid bundle with a trusted seal."""

    file: str
    reason: str

    message: ClassVar[str] = "nothing was imported from {file}: {reason}"
    action: ClassVar[str] = (
        "make it again with `python -m altbackend cache export FILE`, under the same ALTBACKEND_CACHE_KEY_FILE"
    )


class AltWarning(UserWarning):
    """Base of all warnings given by altbackend."""


class CacheFolderWarning(AltWarning):
    """The cache folder is not usable; compiled code goes to a temporary folder."""


class SharedStoreWarning(AltWarning):
    """The shared store does not answer; compilation goes on without it."""


class DebugFolderWarning(AltWarning):
    """The debug folder cannot be written; compilation goes on without it."""


class FallbackWarning(AltWarning):
    """A graph runs with library calls only, because it could not be compiled."""


# --- ahead of time ------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class DiscardedParameter(AltError):
    """A use of a parameter whose memory a compiled graph has taken over (`freezing_discard_parameters`)."""

    parameter: str
    operator: str

    message: ClassVar[str] = (
        "{operator} reads parameter {parameter!r}, which a compiled graph has frozen: its memory was given up "
        "because of the option freezing_discard_parameters"
    )
    action: ClassVar[str] = (
        "load the weights again with load_state_dict(..., assign=True), compile for all shapes at once with "
        "dynamic=True and without graph breaks between uses of a parameter, or leave the option out"
    )


@dataclass(eq=False, repr=False)
class BadGraph(AltError):
    """A program that cannot become a library: its form, or its example inputs."""

    what: str
    reason: str
    todo: str

    message: ClassVar[str] = "cannot compile {what} ahead of time: {reason}"
    action: ClassVar[str] = "{todo}"


@dataclass(eq=False, repr=False)
class BadPackage(AltError):
    """A package or library that cannot be used here. `path` names it; `reason` says what does not fit."""

    path: str
    reason: str
    todo: str

    message: ClassVar[str] = "{path}: {reason}"
    action: ClassVar[str] = "{todo}"


@dataclass(eq=False, repr=False)
class BadCall(AltError):
    """A call of a loaded library with arguments that it was not compiled for, or that failed in it."""

    path: str
    reason: str

    message: ClassVar[str] = "{path}: {reason}"
    action: ClassVar[str] = "`python -m altbackend aot inspect FILE` shows what the library takes"
