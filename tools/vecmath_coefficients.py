"""Compute the polynomial coefficients of `altbackend/runtime/include/altbackend/*.h`.

Every table in the header is a minimax polynomial found here by the Remez exchange algorithm (E. Remez, 1934)
on a dense Chebyshev grid, in 60-digit arithmetic. Run it to print all tables with their largest weighted error,
as a power of two:

    python tools/vecmath_coefficients.py [name ...]
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass

import mpmath as mp  # type: ignore[import-untyped]

mp.mp.dps = 60
Fn = Callable[[mp.mpf], mp.mpf]
GRID_POINTS = 1200
LN2 = mp.log(2)
SQRT_2 = mp.sqrt(2)


@dataclass(frozen=True)
class Fit:
    """Minimise max |(target(x) - p(x)) * weight(x)| over `interval` for a polynomial p of `degree`."""

    name: str
    target: Fn
    weight: Fn
    interval: tuple[float | mp.mpf, float | mp.mpf]
    degree: int
    dtype: str


def chebyshev_grid(low: mp.mpf, high: mp.mpf, count: int) -> list[mp.mpf]:
    middle, half = (low + high) / 2, (high - low) / 2
    return [middle - half * mp.cos(mp.pi * (2 * i + 1) / (2 * count)) for i in range(count)]


def horner(coefficients: list[mp.mpf], x: mp.mpf) -> mp.mpf:
    total = mp.mpf(0)
    for c in reversed(coefficients):
        total = total * x + c
    return total


def extrema(error: list[mp.mpf], count: int) -> list[int]:
    """Indices of `count` points of alternating sign with the largest |error| of their sign run."""
    runs: list[int] = []
    for i, e in enumerate(error):
        if runs and (error[runs[-1]] > 0) == (e > 0):
            if abs(e) > abs(error[runs[-1]]):
                runs[-1] = i
        else:
            runs.append(i)
    while len(runs) > count:
        runs.pop(0 if abs(error[runs[0]]) < abs(error[runs[-1]]) else -1)
    return runs


def remez(fit: Fit) -> tuple[list[mp.mpf], mp.mpf]:
    """The minimax coefficients, lowest power first, and the largest weighted error on the grid."""
    xs = chebyshev_grid(mp.mpf(fit.interval[0]), mp.mpf(fit.interval[1]), GRID_POINTS)
    target, weight = [fit.target(x) for x in xs], [fit.weight(x) for x in xs]
    count = fit.degree + 2
    points = [round((GRID_POINTS - 1) * (1 - mp.cos(mp.pi * i / (count - 1))) / 2) for i in range(count)]
    coefficients: list[mp.mpf] = []
    worst = mp.inf
    for _ in range(25):
        rows = [[xs[p] ** k for k in range(fit.degree + 1)] + [(-1) ** i / weight[p]] for i, p in enumerate(points)]
        solution = mp.lu_solve(mp.matrix(rows), mp.matrix([target[p] for p in points]))
        coefficients, level = list(solution[: fit.degree + 1]), abs(solution[fit.degree + 1])
        error = [(t - horner(coefficients, x)) * w for x, t, w in zip(xs, target, weight, strict=True)]
        worst = max(abs(e) for e in error)
        if worst <= level * mp.mpf("1.002"):
            break
        extremal_points = extrema(error, count)
        if len(extremal_points) < count:
            break
        points = extremal_points
    return coefficients, worst


def literal(value: mp.mpf, dtype: str) -> str:
    if dtype == "double":
        return float(value).hex()
    rounded: float = struct.unpack("f", struct.pack("f", float(value)))[0]
    return rounded.hex() + "f"


def report(fit: Fit) -> None:
    coefficients, worst = remez(fit)
    print(f"{fit.name} ({fit.dtype}): degree {fit.degree}, error 2^{float(mp.log(worst, 2)):.1f}")
    print("  " + ", ".join(literal(c, fit.dtype) for c in coefficients))


def log_quotient(z: mp.mpf) -> mp.mpf:
    """(log((1+s)/(1-s)) - 2s) / s in z = s^2."""
    s = mp.sqrt(z)
    return (mp.log((1 + s) / (1 - s)) - 2 * s) / s


def even(function: Fn) -> Fn:
    return lambda z: function(mp.sqrt(z))


def exp_fit(name: str, degree: int, dtype: str) -> Fit:
    half = LN2 / 2 * mp.mpf("1.001")
    return Fit(name, lambda r: (mp.expm1(r) - r) / r**2, lambda r: r**2 / mp.exp(r), (-half, half), degree, dtype)


def sin_fit(name: str, degree: int, dtype: str) -> Fit:
    end = (mp.pi / 4 * mp.mpf("1.001")) ** 2
    return Fit(name, even(lambda x: (mp.sin(x) - x) / x**3), even(lambda x: x**3 / mp.sin(x)), (0, end), degree, dtype)


def cos_fit(name: str, degree: int, dtype: str) -> Fit:
    end = (mp.pi / 4 * mp.mpf("1.001")) ** 2
    return Fit(
        name,
        even(lambda x: (mp.cos(x) - 1 + x**2 / 2) / x**4),
        even(lambda x: x**4 / mp.cos(x)),
        (0, end),
        degree,
        dtype,
    )


def erfcx_of_t(t: mp.mpf) -> mp.mpf:
    """exp(x^2) erfc(x) for t = (x - 3.75) / (x + 3.75)."""
    x = mp.mpf("3.75") * (1 + t) / (1 - t)
    return mp.exp(x * x) * mp.erfc(x)


def bessel_near(name: str, order: int, degree: int) -> Fit:
    """exp(-x) I_n(x) / x^n in t = x/4 - 1 for 0 <= x <= 8."""

    def target(t: mp.mpf) -> mp.mpf:
        x = 4 * (t + 1)
        return mp.exp(-x) * mp.besseli(order, x) / x**order

    return Fit(
        f"{name} near: exp(-x) I(x) / x^{order} in x/4 - 1", target, lambda t: 1 / target(t), (-1, 1), degree, "double"
    )


def bessel_far(name: str, order: int, degree: int) -> Fit:
    """sqrt(x) exp(-x) I_n(x) in t = 16/x - 1 for x >= 8."""

    def target(t: mp.mpf) -> mp.mpf:
        x = 16 / (t + 1)
        return mp.sqrt(x) * mp.exp(-x) * mp.besseli(order, x)

    return Fit(
        f"{name} far: sqrt(x) exp(-x) I(x) in 16/x - 1", target, lambda t: 1 / target(t), (-1, 1), degree, "double"
    )


FITS = (
    exp_fit("exp: (e^r - 1 - r) / r^2", 4, "float"),
    exp_fit("exp: (e^r - 1 - r) / r^2", 9, "double"),
    Fit("sigmoid: 1/d", lambda d: 1 / d, lambda d: d, (1, 2), 2, "float"),
    Fit(
        "log: (log(1+r) - r + r^2/2) / r^3",
        lambda r: (mp.log1p(r) - r + r * r / 2) / r**3,
        lambda r: r**3 / mp.log1p(r),
        (SQRT_2 / 2 - 1, SQRT_2 - 1),
        7,
        "float",
    ),
    Fit(
        "log: (log m - 2s) / s, z = s^2, s = (m-1)/(m+1)",
        lambda z: log_quotient(z) / z,
        lambda z: z * mp.mpf(1) / 2,
        (0, ((SQRT_2 - 1) / (SQRT_2 + 1)) ** 2),
        6,
        "double",
    ),
    Fit(
        "erf: -log(erfc x) / x",
        lambda x: -mp.log(mp.erfc(x)) / x,
        lambda x: x * mp.erfc(x) / mp.erf(x),
        (0, 4),
        9,
        "float",
    ),
    Fit(
        "1 + erf: -log(erfc x) / x",
        lambda x: -mp.log(mp.erfc(x)) / x,
        lambda x: x * mp.erfc(x),
        (mp.mpf("1e-9"), 4),
        7,
        "float",
    ),
    Fit(
        "erfc: exp(x^2) erfc(x) in t = (x-3.75)/(x+3.75)",
        erfcx_of_t,
        lambda t: 1 / erfcx_of_t(t),
        (-1, mp.mpf("0.47")),
        12,
        "double",
    ),
    sin_fit("sin: (sin x - x) / x^3", 3, "float"),
    cos_fit("cos: (cos x - 1 + x^2/2) / x^4", 2, "float"),
    sin_fit("sin: (sin x - x) / x^3", 4, "double"),
    cos_fit("cos: (cos x - 1 + x^2/2) / x^4", 4, "double"),
    Fit(
        "atan: (atan x - x) / x^3, z = x^2",
        even(lambda x: (mp.atan(x) - x) / x**3),
        even(lambda x: x**3 / mp.atan(x)),
        (0, 1),
        8,
        "float",
    ),
    Fit(
        "asin: (asin x - x) / x^3, z = x^2",
        even(lambda x: (mp.asin(x) - x) / x**3),
        even(lambda x: x**3 / mp.asin(x)),
        (0, mp.mpf("0.3165")),
        5,
        "float",
    ),
    bessel_near("i0e", 0, 28),
    bessel_far("i0e", 0, 23),
    bessel_near("i1e", 1, 28),
    bessel_far("i1e", 1, 23),
)


def main(names: list[str]) -> None:
    for fit in FITS:
        if not names or any(fit.name.startswith(n) for n in names):
            report(fit)


if __name__ == "__main__":
    main(sys.argv[1:])
