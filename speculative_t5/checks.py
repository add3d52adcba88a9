"""Checks of options' types and ranges."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An option as an integer, whichever type of integer it is.

    Raises:
        ValueError: If it is not an integer, or out of its range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool) or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be an integer {bounds}, got {value!r}")
    return number


def check_number(name: str, value: Any) -> float:
    """An option as a float.

    Raises:
        ValueError: If it is not a real number.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)
