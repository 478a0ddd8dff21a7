"""Schemes: how one layer's keys and values are stored, named once and used everywhere."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvlab.checks import check_integer
from kvlab.quantizers import (
    MXFP4,
    NVFP4,
    AsymmetricInteger,
    Cast,
    Float8,
    Float8ScaledInteger,
    IntegerZeroPoint,
    LloydMax,
    PerChannelInteger,
    PerGroup,
    PerTokenHead,
    RefitInteger,
    SymmetricInteger,
    TurboQuant,
    nf4,
)
from kvlab.quantizers.base import Quantizer, map_blocks
from kvlab.transforms import Hadamard, RandomizedHadamard
from kvlab.transforms.base import Chain, Transform


class StoredAs:
    """One side of a cache (its keys or its values): a chain of transforms, then a quantizer.

    Parameters
    ----------
    *transforms
        Applied in order before quantizing, undone afterwards.
    quantizer
        What the transformed vectors are stored as.

    Raises
    ------
    TypeError
        ``transforms`` or ``quantizer`` are not of this library's types.

    Examples
    --------
    >>> StoredAs(RandomizedHadamard(seed=7), quantizer=AsymmetricInteger(4)).bits_per_number(128)
    4.25
    """

    def __init__(self, *transforms: Transform, quantizer: Quantizer) -> None:
        if not isinstance(quantizer, Quantizer):
            raise TypeError(f"quantizer is a {type(quantizer).__name__}; accepted: a kvlab quantizer")
        self.transform = Chain(*transforms)
        self.quantizer = quantizer

    @property
    def per_token(self) -> bool:
        """Whether each token's stored form depends on that token alone."""
        return self.quantizer.per_token

    def bits_per_number(self, head_dim: int) -> float:
        """Bits stored per number, scales and offsets included, for vectors of ``head_dim``.

        Raises
        ------
        TypeError, ValueError
            ``head_dim`` is no positive integer, or a transform or the quantizer is not defined for it.
        """
        self.transform.check_head_dim(check_integer(head_dim, "head_dim", minimum=1))
        return self.quantizer.bits_per_number(head_dim)

    def roundtrip(self, x: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Store ``x`` and return what the cache gives back, mapped back to where ``x`` came from.

        Parameters
        ----------
        x
            ``[..., tokens, head_dim]`` (with per-head transforms ``[..., num_kv_heads, tokens,
            head_dim]``), any float dtype, any device.
        layer
            Absolute index of the decoder layer, for transforms that differ between layers.

        Returns
        -------
        torch.Tensor
            Same shape, dtype and device; the arithmetic inside is float32.

        Raises
        ------
        TypeError
            ``x`` is not a floating-point tensor.
        ValueError
            ``x`` is empty, has a non-finite component or one that the format cannot hold, or a
            head_dim for which a transform or the quantizer is not defined.
        """
        name = "x, transformed," if self.transform.transforms else "x"

        def store(block: torch.Tensor) -> torch.Tensor:
            stored = self.quantizer.roundtrip_block(self.transform.forward(block, layer), name)
            return self.transform.inverse(stored, layer)

        return map_blocks(store, x, per_token=self.per_token)

    def __repr__(self) -> str:
        parts = [*map(repr, self.transform.transforms), f"quantizer={self.quantizer!r}"]
        return f"StoredAs({', '.join(parts)})"


@dataclass(frozen=True)
class Scheme:
    """How the keys and values of one layer are stored.

    Attributes
    ----------
    name
        Its name in tables, figures, on the command line and in serving.
    keys, values
        What each side is stored as.
    fold_gain
        Whether keys are stored without their QK-norm gain where the gain can be folded into the
        query (QK-norm and no RoPE, as in Kolibri-1's full-attention layers).
    source
        The paper, document or software that defines the format.

    Raises
    ------
    TypeError, ValueError
        ``name`` is no string or empty, or a side is no `StoredAs`.
    """

    name: str
    keys: StoredAs
    values: StoredAs
    fold_gain: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name is a {type(self.name).__name__}; accepted: a non-empty string")
        if not self.name:
            raise ValueError("name is empty; accepted: a non-empty string")
        for side in ("keys", "values"):
            if not isinstance(stored := getattr(self, side), StoredAs):
                raise TypeError(f"{side} is a {type(stored).__name__}; accepted: a kvlab.StoredAs")

    def bits_per_number(self, head_dim: int) -> float:
        """Bits per number over keys and values together."""
        return (self.keys.bits_per_number(head_dim) + self.values.bits_per_number(head_dim)) / 2

    def store_keys(
        self,
        k: torch.Tensor,
        *,
        layer: int = 0,
        normed_keys: torch.Tensor | None = None,
        k_gain: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store a layer's keys, without their gain where this scheme folds it, and return them with it.

        Parameters
        ----------
        k
            ``[..., tokens, head_dim]``, any float dtype: keys as attention sees them.
        layer
            Absolute index of the decoder layer.
        normed_keys, k_gain
            Keys before their gain (``k``'s shape) and the gain ``[head_dim]``, where the layer allows
            folding; None elsewhere.

        Returns
        -------
        torch.Tensor
            ``k``'s shape and dtype.
        """
        if self.fold_gain and normed_keys is not None and k_gain is not None:
            return (k_gain * self.keys.roundtrip(normed_keys, layer)).to(k.dtype)
        return self.keys.roundtrip(k, layer)


_REGISTRY: dict[str, Scheme] = {}


def register_scheme(scheme: Scheme) -> Scheme:
    """Make ``scheme`` available under its name to everything that takes scheme names.

    Raises
    ------
    TypeError
        ``scheme`` is no `Scheme`.
    ValueError
        Another scheme has that name.
    """
    if not isinstance(scheme, Scheme):
        raise TypeError(f"scheme is a {type(scheme).__name__}; accepted: a kvlab.Scheme")
    if scheme.name in _REGISTRY:
        raise ValueError(f"scheme name {scheme.name!r} is taken; accepted: a name not in kvlab.list_schemes()")
    _REGISTRY[scheme.name] = scheme
    return scheme


def list_schemes() -> list[str]:
    """Names of all registered schemes, in the order of registration."""
    return list(_REGISTRY)


def get_scheme(scheme: str | Scheme) -> Scheme:
    """Look a scheme up by name; a `Scheme` is returned as it is.

    Raises
    ------
    TypeError
        ``scheme`` is neither a name nor a `Scheme`.
    ValueError
        No scheme has that name.
    """
    if isinstance(scheme, Scheme):
        return scheme
    if not isinstance(scheme, str):
        raise TypeError(f"scheme is a {type(scheme).__name__}; accepted: a name or a kvlab.Scheme")
    if scheme not in _REGISTRY:
        close = difflib.get_close_matches(scheme, _REGISTRY, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"scheme is {scheme!r}{hint}; accepted: {', '.join(_REGISTRY)}")
    return _REGISTRY[scheme]


def get_schemes(schemes: Iterable[str | Scheme]) -> list[Scheme]:
    """Look several schemes up, whose results a table tells apart by name.

    Raises
    ------
    TypeError, ValueError
        As `get_scheme`, or two have one name.
    """
    found = [get_scheme(scheme) for scheme in schemes]
    for name, count in Counter(scheme.name for scheme in found).items():
        if count > 1:
            raise ValueError(f"schemes has {count} named {name!r}; accepted: one scheme per name")
    return found


def _register_all() -> None:
    """Register the stock cache, the write-up's schemes and their peers."""
    write_up = "“Serving Kolibri-1 with a 4-bit KV cache” (2026)"
    searched = "this project: range searched by squared error, then fitted to the codes"
    lloyd_max = "this project, with the levels of Max 1960 and Lloyd 1982"
    rotation = RandomizedHadamard(seed=0)

    refit, g64, lloyd = (StoredAs(quantizer=q) for q in (RefitInteger(), Float8ScaledInteger(), LloydMax()))
    int2, int3, int4, int8 = (StoredAs(quantizer=AsymmetricInteger(bits)) for bits in (2, 3, 4, 8))

    def both(side: StoredAs | Quantizer) -> dict[str, StoredAs]:
        side = side if isinstance(side, StoredAs) else StoredAs(quantizer=side)
        return {"keys": side, "values": side}

    def rotated(side: StoredAs) -> StoredAs:
        return StoredAs(rotation, quantizer=side.quantizer)

    def rotated_keys(side: StoredAs) -> dict[str, StoredAs]:
        return {"keys": rotated(side), "values": side}

    for scheme in (
        Scheme("bf16", **both(Cast(torch.bfloat16)), source="what models compute in"),
        Scheme("fp8", **both(Float8("e4m3")), source="vLLM's --kv-cache-dtype fp8: scale 1, saturating"),
        Scheme("fp8-e5m2", **both(Float8("e5m2")), source="vLLM's --kv-cache-dtype fp8_e5m2"),
        Scheme("fp8-per-token-head", **both(Float8("e4m3", PerTokenHead())), source="vLLM's fp8_per_token_head"),
        Scheme("int8", **both(int8)),
        Scheme("int4", **both(int4), source=write_up),
        Scheme("int3", **both(int3)),
        Scheme("int2", **both(int2)),
        Scheme("int4-symmetric", **both(SymmetricInteger(4))),
        Scheme("int4-g64", **both(AsymmetricInteger(4, PerGroup(64)))),
        Scheme("int4-g32", **both(AsymmetricInteger(4, PerGroup(32)))),
        Scheme("hadamard-int4", **rotated_keys(int4), fold_gain=True, source=write_up),
        Scheme("hadamard-int4-with-gain", **rotated_keys(int4), source=f"{write_up}, without folding"),
        Scheme("hadamard-int3", **rotated_keys(int3), fold_gain=True),
        Scheme("hadamard-int2", **rotated_keys(int2), fold_gain=True),
        Scheme(
            "int4-per-token-head",
            **both(StoredAs(Hadamard(), quantizer=IntegerZeroPoint())),
            source="vLLM 0.29's int4_per_token_head",
        ),
        Scheme(
            "turboquant-4bit",
            keys=StoredAs(Hadamard(), quantizer=TurboQuant(4)),
            values=int4,
            source="Zandieh et al. 2025, arXiv:2504.19874, as vLLM 0.29's turboquant_4bit_nc",
        ),
        Scheme(
            "kivi-int4",
            keys=StoredAs(quantizer=PerChannelInteger(4)),
            values=StoredAs(quantizer=AsymmetricInteger(4, PerGroup(32))),
            source="Liu et al. 2024, arXiv:2402.02750",
        ),
        Scheme(
            "kivi-int2",
            keys=StoredAs(quantizer=PerChannelInteger(2)),
            values=StoredAs(quantizer=AsymmetricInteger(2, PerGroup(32))),
            source="Liu et al. 2024, arXiv:2402.02750",
        ),
        Scheme("nvfp4", **both(NVFP4()), source="NVIDIA's NVFP4: blocks of 16, e4m3 scales"),
        Scheme("mxfp4", **both(MXFP4()), source="OCP Microscaling Formats 1.0"),
        Scheme("nf4", **both(nf4()), source="Dettmers et al. 2023, arXiv:2305.14314"),
        Scheme("hadamard-int4-refit", **rotated_keys(refit), fold_gain=True, source=searched),
        Scheme("hadamard-int4-refit-kv", **both(rotated(refit)), fold_gain=True, source=searched),
        Scheme("hadamard-int4-g64-fp8", **rotated_keys(g64), fold_gain=True, source=searched),
        Scheme("hadamard-int4-g64-fp8-kv", **both(rotated(g64)), fold_gain=True, source=searched),
        Scheme("hadamard-lloyd-g32", **rotated_keys(lloyd), fold_gain=True, source=lloyd_max),
        Scheme("hadamard-lloyd-g32-kv", **both(rotated(lloyd)), fold_gain=True, source=lloyd_max),
    ):
        register_scheme(scheme)


_register_all()
