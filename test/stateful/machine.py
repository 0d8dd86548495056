"""Programs with state as hypothesis state machines: a compiled model beside an eager twin that gets the same writes.

    python -m test.stateful.machine --runs 20000 --seed 0
    python -m test.stateful.machine --runs 200 --ways auto --disabled-passes "oneDNN epilogues,binary folding"
    python -m test.stateful.machine --runs 500 --device cuda --ways auto,counters,graphs

A run is a sequence of rules: calls in every mode, backward passes, optimizer steps, writes through each door of
`modules.WRITES`, copies, moves and swaps. After each call results, gradients and buffers equal the twin's, which then
takes over the compiled model's bits, so that rounding does not add up. All runs of a process share compiled code.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import nn

from altbackend.config.resolve import variable_of
from altbackend.runtime import page_guard
from test import triton_run
from test.small_layers import call_onednn
from test.stateful import modules
from test.stateful.modules import CPU_WRITES, MODULES, OPTIMIZERS, UNSEEN_WRITES, WRITES, Place

T = torch.Tensor
MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": torch.enable_grad,
}
WAYS: dict[str, tuple[dict[str, Any], bool]] = {  # options, and whether the kernel guards memory
    "auto": ({"freezing": "auto"}, True),
    "refused": ({"freezing": "auto"}, False),
    "frozen": ({"freezing": True}, True),
    "counters": ({"freezing": True}, False),
    "never": ({"freezing": False}, True),
    "graphs": ({"freezing": True, "cudagraphs": True}, False),
    "interpreted": ({}, True),  # a GPU's kernels and host program, run without a GPU
}
CPU_WAYS = ("auto", "refused", "frozen", "counters", "never")
RARE = 30
places = st.builds(Place, st.integers(0, 40), st.integers(0, 99))


@functools.cache
def compiled(way: str) -> Callable[[nn.Module, T], T]:
    """A function that calls a module, compiled; one for all modules and runs."""
    options, _ = WAYS[way]

    def call(m: nn.Module, x: T) -> T:
        return m(x)

    call.__code__ = call.__code__.replace(co_name=f"call_{way}")  # code of its own, and so guards of its own
    if way == "interpreted":
        return triton_run.compiled(call, capabilities=(), host=True)
    return torch.compile(call, backend="alt", options={**options, "strict": True}, dynamic=False)


def no_limits() -> None:
    """Compile again for every state; a graph that Dynamo gives up must not run in eager unseen."""
    torch._dynamo.config.recompile_limit = 10_000
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    torch._dynamo.config.fail_on_recompile_limit_hit = True


@contextlib.contextmanager
def guarding(way: str) -> Iterator[None]:
    """The kernel guards memory, or refuses."""
    if WAYS[way][1]:
        yield
    else:
        with patch.object(page_guard, "pages", lambda: "refused by a test"):
            yield


def same(got: T, want: T, what: str) -> None:
    """Equal to rounding of float32, relative to the whole."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    assert got.stride() == want.stride(), f"{what}: strides {got.stride()}, not {want.stride()}"
    error, scale = (got - want).norm(), want.norm()
    assert error <= 2e-5 * scale + 1e-6, f"{what}: off by {float(error / (scale + 1e-12)):.2e}"


class Programs(RuleBasedStateMachine):
    """`model` is called compiled, `twin` in eager; `way` and `device` are set by subclasses."""

    way = "auto"
    device = "cpu"
    compared = 0  # calls of all runs

    def __init__(self) -> None:
        super().__init__()
        self.optimizers: tuple[Any, Any] | None = None
        self.last: T | None = None

    @initialize(kind=st.sampled_from(MODULES), number=st.integers(0, 999))
    def begin(self, kind: type[nn.Module], number: int) -> None:
        torch.manual_seed(number)
        self.kind = kind
        self.model = kind().eval().to(self.device)
        self.twin = copy.deepcopy(self.model)

    # --- calls ---

    @rule(mode=st.sampled_from(sorted(MODES)), train=st.booleans(), batch=st.sampled_from((2, 3)))
    def forward(self, mode: str, train: bool, batch: int) -> None:
        self.model.train(train)
        self.twin.train(train)
        x = self.sample(batch)
        with MODES[mode]():
            self.last = self.called(x)

    @rule(autocast=st.booleans())
    def evaluate_twice(self, autocast: bool) -> None:
        """The second call may use what the first has kept."""
        self.model.eval()
        self.twin.eval()
        for _ in range(2):
            x = self.sample(2)
            with torch.no_grad(), torch.autocast(self.device, enabled=autocast):
                if autocast:  # products in bfloat16 are rounded otherwise
                    compiled(self.way)(self.model, x)
                else:
                    self.last = self.called(x)

    @rule(train=st.booleans(), times=st.sampled_from((1, 2)), clear=st.booleans())
    def backward(self, train: bool, times: int, clear: bool) -> None:
        self.model.train(train)
        self.twin.train(train)
        if clear:
            self.model.zero_grad()
            self.twin.zero_grad()
        x = self.sample(3)
        got, want = self.both(x)
        if not want.requires_grad:
            return
        for k in range(times):
            got.square().mean().backward(retain_graph=k + 1 < times)
            want.square().mean().backward(retain_graph=k + 1 < times)
        for (name, p), q in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), f"gradient of {name}"
            if p.grad is not None and q.grad is not None:
                assert (p.grad - q.grad).norm() <= 1e-4 * q.grad.norm() + 1e-6, f"gradient of {name}"
                q.grad.copy_(p.grad)

    @rule()
    def threads(self) -> None:
        if self.way == "interpreted":
            return  # Triton's interpreter is one for all threads
        self.model.eval()
        self.twin.eval()
        xs = [self.sample(2) for _ in range(3)]
        results: list[T | None] = [None] * 3

        call = compiled(self.way)  # here, since torch looks a backend up without a lock

        def run(k: int) -> None:
            no_limits()  # settings are a thread's own
            with torch.no_grad():
                results[k] = call(self.model, xs[k])

        started = [threading.Thread(target=run, args=(k,)) for k in range(3)]
        with guarding(self.way):
            for t in started:
                t.start()
            for t in started:
                t.join()
        with torch.no_grad():
            for k, x in enumerate(xs):
                got = results[k]
                assert got is not None, "a thread failed"
                same(got, self.twin(x), f"thread {k}")

    @rule(chance=st.integers(0, RARE))
    def reset(self, chance: int) -> None:
        """Dynamo forgets its graphs; they come back from the cache folder."""
        if chance == RARE:
            torch._dynamo.reset()

    @rule(chance=st.integers(0, RARE), door=st.sampled_from(("data.mul_", "data[-1] =", "numpy")), place=places)
    def fork(self, chance: int, door: str, place: Place) -> None:
        """The parent writes; a child then writes its own copy of the parameters and calls before the parent does."""
        if chance < RARE - 2 or self.device != "cpu" or any(p.is_shared() for p in self.model.parameters()):
            return  # rarely, and not where the child's parameters are the parent's
        if self.way == "interpreted":
            return  # CUDA does not work in a forked child
        self.evaluate_twice(False)  # a guard that the child inherits
        has_written, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                os.read(has_written, 1)
                torch.set_num_threads(1)  # OpenMP's threads are the parent's
                for m in (self.model, self.twin):
                    next(m.parameters()).data.mul_(1.25)
                self.evaluate_twice(False)
                status = 0
            os._exit(status)
        for m in (self.model, self.twin):
            p = place.of(m)
            WRITES[door](p, place.value(p))
        os.write(write_end, b".")
        assert os.waitpid(child, 0)[1] == 0, "a forked child disagrees"
        os.close(has_written)
        os.close(write_end)
        self.evaluate_twice(False)

    # --- writes ---

    @rule(writes=st.lists(st.tuples(st.sampled_from(sorted(WRITES)), places), min_size=1, max_size=2))
    def write(self, writes: list[tuple[str, Place]]) -> None:
        """Through some doors, each followed by calls."""
        for which, place in writes:
            if which in UNSEEN_WRITES and not self.sees_every_write():
                continue
            if self.device != "cpu" and which in CPU_WRITES:
                continue
            for m in (self.model, self.twin):
                p = place.of(m)
                # torch refuses to swap tensors that are referred to twice
                with contextlib.suppress(RuntimeError) if which == "swap_tensors" else contextlib.nullcontext():
                    WRITES[which](p, place.value(p))
            if which == "swap_tensors":
                self.mirror()
            self.evaluate_twice(False)

    @rule(kind=st.sampled_from(sorted(OPTIMIZERS)))
    def optimizer(self, kind: str) -> None:
        if (kind, self.device) == ("adagrad fused", "cuda"):
            return  # torch has it for CPUs only
        make = OPTIMIZERS[kind]
        self.optimizers = make(list(self.model.parameters())), make(list(self.twin.parameters()))

    @rule()
    def step(self) -> None:
        if self.optimizers is None:
            return
        for each in self.optimizers:
            each.step()
        self.mirror()

    @rule(assign=st.booleans())
    def reload(self, assign: bool) -> None:
        for m in (self.model, self.twin):
            modules.reloaded(m, assign)
        self.optimizers = None

    @rule(number=st.integers(0, 9))
    def swap_module(self, number: int) -> None:
        for m in (self.model, self.twin):
            modules.renewed(m, number)
        self.optimizers = None

    @rule()
    def average(self) -> None:
        """An average is kept of the model, as programs that train diffusion models do, and becomes the model."""
        pairs = []
        for m in (self.model, self.twin):
            average = copy.deepcopy(m)
            for p, q in zip(average.parameters(), m.parameters(), strict=True):
                p.data.mul_(0.9).add_(q.data, alpha=0.2)
            pairs.append(average)
        self.model, self.twin = pairs
        self.optimizers = None

    @rule(place=places, wanted=st.booleans())
    def require(self, place: Place, wanted: bool) -> None:
        for m in (self.model, self.twin):
            parameters = list(m.parameters())
            parameters[place.number % len(parameters)].requires_grad_(wanted)

    @rule(channels_last=st.booleans())
    def lay_out(self, channels_last: bool) -> None:
        wanted = torch.channels_last if channels_last else torch.contiguous_format
        for m in (self.model, self.twin):
            for c in m.modules():
                if isinstance(c, nn.Conv2d):
                    c.to(memory_format=wanted)  # type: ignore[call-overload]

    @rule()
    def share(self) -> None:
        """Another process writes memory that it shares with this one."""
        if self.device != "cpu":
            return
        self.model.share_memory()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                next(self.model.parameters()).data.mul_(1.5)
            os._exit(0)
        os.waitpid(child, 0)
        next(self.twin.parameters()).data.mul_(1.5)

    @rule()
    def scribble(self) -> None:
        """The user writes into a result, which must be in no later one."""
        if self.last is None or self.last.requires_grad:
            return
        with torch.inference_mode(self.last.is_inference()):
            self.last.fill_(1e6)

    # --- both ---

    def sees_every_write(self) -> bool:
        """Return whether the kernel guards the parameters; it guards no memory that processes share."""
        shared = any(p.is_shared() for p in self.model.parameters())
        return self.way not in ("counters", "graphs") and not (self.way == "frozen" and shared)

    def sample(self, batch: int) -> T:
        drawn: T = self.kind.sample(batch)  # type: ignore[attr-defined]
        return drawn.to(self.device)

    def both(self, x: T) -> tuple[T, T]:
        with guarding(self.way):
            got = compiled(self.way)(self.model, x)
        want = self.twin(x)
        same(got.detach(), want.detach(), "result")
        type(self).compared += 1
        for (name, b), c in zip(self.model.named_buffers(), self.twin.buffers(), strict=True):
            if b.is_floating_point():
                same(b, c, f"buffer {name}")
                c.data.copy_(b)
            else:
                assert torch.equal(b, c), f"buffer {name}"
        return got, want

    def called(self, x: T) -> T:
        return self.both(x)[0]

    def mirror(self) -> None:
        """The twin takes the model's bits: both are right, one rounded otherwise."""
        with torch.no_grad():
            pairs_ = zip(self.model.state_dict().values(), self.twin.state_dict().values(), strict=True)
            for p, q in pairs_:
                q.copy_(p)


def machine(way: str, device: str) -> type[Programs]:
    return type(f"Programs_{way}", (Programs,), {"way": way, "device": device})


def run(way: str, runs: int, steps: int, number: int, shrink: bool = True, device: str = "cpu") -> int:
    """Run so many programs of one way; return the number of calls that agreed.

    Raises what the first program that differs raises, shrunk.
    """
    no_limits()
    options = settings(
        max_examples=runs,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,  # the first ends the run
        phases=(Phase.generate,) if not shrink else (Phase.generate, Phase.shrink),
    )
    machine_type = machine(way, device)
    run_state_machine_as_test(seed(number)(machine_type), settings=options)
    return machine_type.compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="programs of each way")
    parser.add_argument("--steps", type=int, default=14, help="most rules of a program")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", default=",".join(CPU_WAYS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--disabled-passes", default="", metavar="A,B", help="graph passes to leave out")
    options = parser.parse_args()
    if options.disabled_passes:
        os.environ[variable_of("disabled_passes")] = options.disabled_passes
    call_onednn()  # weights of small layers are packed too
    torch.backends.cudnn.allow_tf32 = False  # eager's convolutions are then as exact as ours
    for way in options.ways.split(","):
        calls = run(way, options.runs, options.steps, options.seed, not options.no_shrink, options.device)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        agree = f"{way}: {options.runs} programs of seed {options.seed} agree with eager in {calls} calls"
        print(f"{agree}; {graphs} graphs so far", flush=True)


if __name__ == "__main__":
    main()
