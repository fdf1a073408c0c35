"""How close floating-point results must be; whatever is an integer is compared with `==` and has no entry here.

Each entry is a pair (relative, absolute) with the reason for its size.
"""

from __future__ import annotations

from typing import Any

TOLERANCES: dict[str, tuple[float, float]] = {
    # one division in double precision, rounded once to float32
    "probability": (2e-7, 0.0),
    # a power of a ratio in float32 or wider: a few units in the last place on any device
    "weight": (2e-6, 1e-12),
    # integers that come from a power, which may differ in the last bit between libraries before it is rounded
    "mass": (1e-9, 1.0),
    # a priority read back may come from its mass, which is rounded to 2^-20
    "priority": (1e-5, 2e-6),
    # sums of up to a million terms in double precision, returned as Python floats
    "statistic": (1e-6, 1e-9),
    # one multiplication in float32 cut to bfloat16, where Triton's interpreter does not round
    "cut": (8e-3, 0.0),
}


def close(actual: Any, expected: Any, kind: str) -> bool:
    """Whether all entries agree within the tolerance named `kind`; False for different lengths or a NaN."""
    relative, absolute = TOLERANCES[kind]
    found = actual.double().flatten().tolist() if hasattr(actual, "double") else _flat(actual)
    wanted = expected.double().flatten().tolist() if hasattr(expected, "double") else _flat(expected)
    return len(found) == len(wanted) and all(
        abs(one - other) <= absolute + relative * abs(other) for one, other in zip(found, wanted, strict=True)
    )


def _flat(values: Any) -> list[float]:
    return [float(value) for value in values] if hasattr(values, "__iter__") else [float(values)]
