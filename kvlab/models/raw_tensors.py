"""A part of a checkpoint as it lies on disk, and what transformers' modules take."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from kvlab.models.dequantize import dequantize
from kvlab.models.kolibri1_layout import EXPERT_BIAS, SCALE_SUFFIX

ALIGNMENT = 16
EXPERT = re.compile(r"mlp\.experts\.\d+\.")
# Weights of this many experts are stacked before they are dequantised: 84 MB of FP8 at Kolibri-1's sizes.
EXPERTS_AT_ONCE = 64


@dataclass(frozen=True)
class Place:
    """Where in a buffer of bytes a tensor lies.

    Attributes
    ----------
    offset
        Bytes from the buffer's start, a multiple of the dtype's size.
    dtype, shape
        The tensor's.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def aligned(offset: int) -> int:
    """Return the next offset, in bytes, at which a tensor of any dtype may lie."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class RawTensors:
    """Tensors in their on-disk dtypes, views of one buffer that moves to a device in one copy.

    Attributes
    ----------
    buffer
        uint8 ``[bytes]``.
    places
        By transformers' parameter name relative to the module (``self_attn.q_proj.weight``), experts still
        one by one (``mlp.experts.7.up_proj.weight``), scales beside their weights (``…weight_scale_inv``).
    labels
        By the same names, what errors call a tensor; by default its name.
    """

    buffer: torch.Tensor
    places: dict[str, Place]
    labels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def empty(
        cls,
        tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
        device: torch.device | str = "cpu",
        *,
        pin: bool,
    ) -> RawTensors:
        """Allocate room for tensors of the names, dtypes and shapes given; with ``pin`` in pinned host memory."""
        places, size = {}, 0
        for name, dtype, shape in tensors:
            places[name] = Place(aligned(size), dtype, shape)
            size = aligned(size) + places[name].nbytes
        return cls(empty_bytes(size, device, pin=pin), places)

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self.places[name]
        return self.buffer[place.offset : place.offset + place.nbytes].view(place.dtype).view(place.shape)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor, a view of the buffer."""
        return {name: self[name] for name in self.places}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, gaps between tensors included."""
        return self.buffer.nbytes

    def materialize(self, device: torch.device | str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return new tensors as transformers' module takes them: ``load_state_dict(…, strict=True, assign=True)``.

        FP8 is dequantised on the device, experts are fused, the router's correction bias is in float32. At its
        peak the device holds the result, these raw bytes and the temporaries of some experts.

        Parameters
        ----------
        device
            Where the result lies.
        dtype
            Its floating dtype.

        Returns
        -------
        dict[str, torch.Tensor]
            By parameter name; with experts ``mlp.experts.gate_up_proj [experts, 2 · inner, hidden]`` and
            ``mlp.experts.down_proj [experts, hidden, inner]``.

        Raises
        ------
        ValueError
            A weight is not finite, as stored or in ``dtype``.
        """
        raw = RawTensors(self.buffer.to(device, non_blocking=True), self.places, self.labels)
        weights = [name for name in self.places if not name.endswith(SCALE_SUFFIX)]
        single = [name for name in weights if not EXPERT.match(name)]
        result, finite = {}, []
        for name in single:
            result[name] = raw._empty(name, dtype)
            finite += raw._write([name], result[name][None])
        if len(weights) > len(single):
            result |= raw._fused_experts((len(weights) - len(single)) // 3, dtype, finite)
        # Read once, since on CUDA that waits for the device.
        if not torch.stack(finite).all():
            raw._raise_not_finite(weights, dtype)
        return result

    def _empty(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        kept = torch.float32 if name == EXPERT_BIAS else dtype
        return torch.empty(self.places[name].shape, dtype=kept, device=self.buffer.device)

    def _raise_not_finite(self, weights: list[str], dtype: torch.dtype) -> None:
        for name in weights:
            if not all(self._write([name], self._empty(name, dtype)[None])):
                label = self.labels.get(name, name)
                raise ValueError(f"{label} has a non-finite value; accepted: finite weights")

    def _fused_experts(
        self, num_experts: int, dtype: torch.dtype, finite: list[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        inner, hidden = self.places["mlp.experts.0.gate_proj.weight"].shape
        gate_up = torch.empty(num_experts, 2 * inner, hidden, dtype=dtype, device=self.buffer.device)
        down = torch.empty(num_experts, hidden, inner, dtype=dtype, device=self.buffer.device)
        for projection, fused in {"gate": gate_up[:, :inner], "up": gate_up[:, inner:], "down": down}.items():
            names = [f"mlp.experts.{expert}.{projection}_proj.weight" for expert in range(num_experts)]
            for first in range(0, num_experts, EXPERTS_AT_ONCE):
                some = slice(first, first + EXPERTS_AT_ONCE)
                finite += self._write(names[some], fused[some])
        return {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": down}

    def _write(self, names: list[str], out: torch.Tensor) -> list[torch.Tensor]:
        """Write the tensors of ``names``, alike in shape and dtype, to ``out[0]``, ``out[1]`` and so on.

        Returns whether their minimum and maximum are finite, on the device; NaN is either's.
        """
        stacked = self._stack(names)
        if names[0] + SCALE_SUFFIX in self.places:
            dequantize(stacked, self._stack([name + SCALE_SUFFIX for name in names]), out)
        else:
            out.copy_(stacked)
        return [bound.isfinite() for bound in out.aminmax()]

    def _stack(self, names: list[str]) -> torch.Tensor:
        if len(names) == 1:
            return self[names[0]][None]
        # As bytes, since torch has few operations on FP8.
        return torch.stack([self[name].view(torch.uint8) for name in names]).view(self.places[names[0]].dtype)


def empty_bytes(size: int, device: torch.device | str = "cpu", *, pin: bool) -> torch.Tensor:
    """Allocate uint8 ``[size]``; in host memory pinned when ``pin`` and there is a CUDA device to copy to."""
    pinned = pin and torch.cuda.is_available() and torch.device(device).type == "cpu"
    return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
