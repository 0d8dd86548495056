"""The text of programs, and the buffers and symbols of nodes."""

from __future__ import annotations

import expecttest

from altbackend.ir.loops import reads, show_program, writes
from test.ir.programs import irregular, softmax, symbolic


class TestPrinting(expecttest.TestCase):
    def test_softmax(self) -> None:
        self.assertExpectedInline(
            show_program(softmax()),
            """\
input x: float32[3, 4] : (4, 1)
buffer top: float32[3] : (1)
  top[d0] = max(x[4*d0 + d1], over d1:4)  for d0:3
    # softmax = _softmax.default
buffer e: float32[3, 4] : (4, 1)
  e[4*d0 + d1] = exp(sub(x[4*d0 + d1], top[d0]))  for d0:3, d1:4
buffer total: float32[3] : (1)
  total[d0] = sum(e[4*d0 + d1], over d1:4)  for d0:3
buffer y: float32[3, 4] : (4, 1)
  y[4*d0 + d1] = truediv(e[4*d0 + d1], total[d0])  for d0:3, d1:4
buffer z: float32[3, 3] : (3, 1)
  z = call aten.mm.default(y[(3, 4) : (4, 1)], y[(4, 3) : (1, 4)])
return z[(3, 3) : (3, 1)], y[(4, 3) : (1, 4)], 7, None
""",
        )

    def test_irregular(self) -> None:
        self.assertExpectedInline(
            show_program(irregular()),
            """\
input x: float32[3, 4] : (4, 1)
input at: int64[4] : (1)
input bins: float32[4] : (1)
buffer padded: float32[3, 4] : (4, 1)
  padded[4*d0 + d1] = masked(lt(index(d1 + 1), 4), x[4*d0 + d1 + 1], -1.0)  for d0:3, d1:4
buffer taken: float32[3, 4] : (4, 1)
  taken[4*d0 + d1] = x[4*d0 + [wrap(at[d1], 4)]]  for d0:3, d1:4
buffer running: float32[3, 4] : (4, 1)
  running[4*d0 + d1] = scan_sum(x[4*d0 + d1], along d1:4)  for d0:3
  bins[[wrap(at[d1], 4)]] add= x[4*d0 + d1]  for d0:3, d1:4
return padded[(3, 4) : (4, 1)], taken[(3, 4) : (4, 1)], running[(3, 4) : (4, 1)]
""",
        )

    def test_symbolic(self) -> None:
        self.assertExpectedInline(
            show_program(symbolic()),
            """\
input n
input x: float32[n, 4] : (4, 1)
buffer s: float32[4] : (1)
  s[d1] = sum(x[4*d0 + d1], over d0:n)  for d1:4
return s[(4) : (1)], 4*n
""",
        )


def test_reads_and_writes() -> None:
    padded, taken, running, scatter = irregular().nodes
    assert [reads(n) for n in (padded, taken, running)] == [("x",), ("at", "x"), ("x",)]
    assert set(reads(scatter)) == {"x", "at", "bins"}, "a scatter reads what it updates, and where"
    assert writes(scatter) == ("bins",)
    product = softmax().nodes[-1]
    assert (reads(product), writes(product)) == (("y",), ("z",))
