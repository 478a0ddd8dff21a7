"""Checks of what a user hands in: one clear line naming the argument, its value and what is accepted."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Iterable
from numbers import Real

import torch

FP16_MAX = 65_504.0
LARGEST = 10**9
"""More than any dimension of a model, context or number of GPUs; with it, products of sizes stay numbers."""
FLOAT32 = torch.finfo(torch.float32)


def check_vectors(x: object, name: str = "x", *, head_dim: int | None = None, min_ndim: int = 1) -> torch.Tensor:
    """Check that ``x`` is a non-empty floating-point tensor of vectors.

    Parameters
    ----------
    x
        What the user passed: expected ``[..., head_dim]``, any floating dtype.
    name
        The argument's name in the error.
    head_dim
        The last dimension expected, in numbers; None accepts any.
    min_ndim
        The fewest dimensions accepted (2 for ``[..., tokens, head_dim]``).

    Returns
    -------
    torch.Tensor
        ``x`` itself.

    Raises
    ------
    TypeError
        ``x`` is no tensor, or not of a floating dtype.
    ValueError
        ``x`` has too few dimensions, is empty, or its last dimension is not ``head_dim``.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; accepted: a floating-point torch.Tensor")
    if not x.is_floating_point():
        raise TypeError(f"{name} has dtype {x.dtype}; accepted: a floating dtype (float32, bfloat16, …)")
    if x.ndim < min_ndim:
        raise ValueError(f"{name} has shape {list(x.shape)}; accepted: at least {min_ndim} dimensions")
    if x.numel() == 0:
        raise ValueError(f"{name} has shape {list(x.shape)}; accepted: at least one token and one channel")
    if head_dim is not None and x.shape[-1] != head_dim:
        raise ValueError(f"{name} has head_dim {x.shape[-1]} (its last dimension); accepted: {head_dim}")
    return x


def check_finite(x: torch.Tensor, name: str = "x", *, limit: float | None = None) -> torch.Tensor:
    """Check that every component is finite and, with ``limit``, at most that large in magnitude.

    Raises
    ------
    ValueError
        A component is NaN, infinite or beyond ``limit``.
    """
    # Two reductions: on a transposed view they are several times faster than aminmax.
    largest = torch.maximum(-x.amin(), x.amax()).item()
    # NaN compares false with everything, so the accepted case is the one that is spelled out.
    if not largest < float("inf"):
        raise ValueError(f"{name} has a non-finite component; accepted: finite numbers only")
    if limit is not None and largest > limit:
        raise ValueError(f"{name} has a component of magnitude {largest:.6g}; accepted: at most {limit:g}")
    return x


def check_choice(value: object, name: str, accepted: Iterable[object]) -> object:
    """Check that ``value`` is one of ``accepted``, its type included (4.0 is not 4); the error lists them.

    Raises
    ------
    ValueError
        ``value`` is none of them.
    """
    accepted = list(accepted)
    if not any(isinstance(value, type(choice)) and value == choice for choice in accepted):
        raise ValueError(f"{name} is {value!r}; accepted: {', '.join(map(str, accepted))}")
    return value


def check_integer(value: object, name: str, *, minimum: int, maximum: int | None = None) -> int:
    """Check that ``value`` is an integer (NumPy's and torch's too) in range and return it as an int.

    Parameters
    ----------
    value
        What the user passed.
    name
        The argument's name in the error.
    minimum, maximum
        The smallest and the largest integer accepted; None sets no largest.

    Raises
    ------
    TypeError
        ``value`` is no integer (a bool is none).
    ValueError
        ``value`` is below ``minimum`` or above ``maximum``.
    """
    accepted = f"accepted: an integer {f'of at least {minimum}' if maximum is None else f'from {minimum} to {maximum}'}"
    try:
        integer = operator.index(value)
    except TypeError:
        integer = None
    # NumPy's and torch's booleans say so in their dtype.
    if integer is None or "bool" in f"{type(value).__name__} {getattr(value, 'dtype', '')}":
        raise TypeError(f"{name} is {value!r}; {accepted}")
    if integer < minimum or (maximum is not None and integer > maximum):
        raise ValueError(f"{name} is {reprlib.repr(integer)}; {accepted}")
    return integer


def check_number(value: object, name: str, accepted: str = "a finite number") -> float:
    """Check that ``value`` is a finite real number (a bool is none) and return it as a float.

    Raises
    ------
    TypeError, ValueError
        ``value`` is no number, or not a finite one; the error says what is ``accepted``.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; accepted: {accepted}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is {value!r}; accepted: {accepted}")
    return number


def check_scale(value: object, name: str) -> float:
    """Check that ``value`` can scale float32 numbers and be divided by: a positive, normal, finite float32.

    Raises
    ------
    TypeError, ValueError
        It is no number or no such number.
    """
    accepted = f"a positive finite scale, {FLOAT32.tiny:.4g} to {FLOAT32.max:.4g}"
    scale = check_number(value, name, accepted)
    if not FLOAT32.tiny <= scale <= FLOAT32.max:
        raise ValueError(f"{name} is {value!r}; accepted: {accepted}")
    return scale


def check_list(values: object, name: str, accepted: str = "a list of at least one") -> list:
    """Check that ``values`` can be gone through, as a list, a tuple or a generator can, and return them as a list.

    Raises
    ------
    TypeError
        It is a string, or not to be gone through; the error says what is ``accepted``.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} is {values!r}; accepted: {accepted}")
    return list(values)
