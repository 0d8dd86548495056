"""Calls that another callable comes to serve: a graph whose kernels are built by now, or whose C++ program is."""

from __future__ import annotations

from collections.abc import Callable

from .boxed import Args, BoxedCall, Values, boxed

Use = Callable[[BoxedCall], None]


class Successor:
    """The callable that serves a call: `first` until `become` names another one."""

    def __init__(self, first: BoxedCall) -> None:
        self.current, self._uses = first, list[Use]()
        self._named = False

    def become(self, call: BoxedCall) -> None:
        """Serve the call by `call` from now on. Must be called once."""
        self.current, self._named = call, True
        uses, self._uses = self._uses, []
        for use in uses:
            follow(call, use)

    def call(self) -> BoxedCall:
        """Return the call."""

        @boxed
        def run(args: Args) -> Values:
            return self.current(args)

        vars(run)["successor"] = self
        return run

    def tell(self, use: Use) -> None:
        """Give `use` the callable that serves the call, once it is named."""
        self._uses.append(use)
        if self._named and use in self._uses:  # another thread may have named it meanwhile
            self._uses.remove(use)
            follow(self.current, use)


def follow(call: BoxedCall, use: Use) -> None:
    """Give `use` each callable that serves `call`, from now on.

    A caller that calls the last one passes no function that only forwards the call.
    """
    use(call)
    successor = getattr(call, "successor", None)
    if isinstance(successor, Successor):
        successor.tell(use)
