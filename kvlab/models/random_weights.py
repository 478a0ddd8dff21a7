"""Random weights in the form of a checkpoint, for trying the machinery without one."""

from __future__ import annotations

import hashlib
import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvlab.models.kolibri1_layout import EXPERT_BIAS, TensorSpec, embedding_specs, head_specs, layer_specs
from kvlab.models.raw_tensors import RawTensors
from kvlab.models.weight_source import WeightSource
from kvlab.transforms.parameters import check_integer

if TYPE_CHECKING:
    from transformers import Kolibri1Config

TAG = "kvlab/random-weights/1"
# What torch's generators take too.
MAX_SEED = 2**63 - 1
# A prime, so that rows of any length start at different places of the pool.
POOL = 4_194_301
# Standard deviation of half the sum of four uniform bytes.
POOL_STD = math.sqrt((256**2 - 1) / 12)
# Root mean square of factors uniform in [0.5, 1.5].
FACTOR_RMS = math.sqrt(13 / 12)


class RandomWeights(WeightSource):
    """Weights that are drawn in place of read: FP8 with block scales, the same bytes on any machine and device.

    Every tensor is a stretch of one pool of nearly normal numbers, which SHA-3's SHAKE-256 gives for the seed;
    where the stretch begins and the scale of each block follow from the seed and the tensor's name, so bytes
    depend on no order, and no two tensors are equal. Weights have a standard deviation of 1/√fan_in, gains are
    near 1, embeddings of variance 1: hidden states stay of the order of 1.

    Parameters
    ----------
    config
        The model's.
    seed
        Integer from 0 to 2⁶³ − 1.
    device
        Where the bytes are made. ``pin`` matters on the CPU only.

    Raises
    ------
    TypeError, ValueError
        ``seed`` is no such integer.
    """

    def __init__(self, config: Kolibri1Config, seed: int, *, device: torch.device | str = "cpu") -> None:
        self.seed = check_integer(seed, "seed", minimum=0)
        if seed > MAX_SEED:
            raise ValueError(f"seed is {seed}; accepted: an integer of at most {MAX_SEED}")
        self.device = torch.device(device)
        super().__init__(config, f"random-weights-{seed}", TAG)

    def layer(self, index: int, *, pin: bool = False) -> RawTensors:
        """Make decoder layer ``index``."""
        self.check_layer(index)
        return self._make(layer_specs(self.config, index), pin=pin)

    def embeddings(self, *, pin: bool = False) -> RawTensors:
        """Make the token embeddings."""
        return self._make(embedding_specs(self.config), pin=pin)

    def head(self, *, pin: bool = False) -> RawTensors:
        """Make the final norm and the LM head."""
        return self._make(head_specs(self.config), pin=pin)

    @cached_property
    def _pool(self) -> torch.Tensor:
        """Float32 ``[POOL]``: half the sum of four random bytes, less its mean; multiples of ½ up to 255."""
        stream = hashlib.shake_256(f"{TAG}:{self.seed}".encode("ascii")).digest(4 * POOL)
        sums = np.frombuffer(stream, dtype=np.uint8).reshape(4, POOL).sum(axis=0, dtype=np.float32)
        return torch.from_numpy(sums / 2 - 255).to(self.device)

    @cached_property
    def _fp8_pool(self) -> torch.Tensor:
        """The same numbers in FP8, as bytes."""
        return self._pool.to(torch.float8_e4m3fn).view(torch.uint8)

    def _make(self, specs: list[TensorSpec], *, pin: bool) -> RawTensors:
        stored = [each for spec in specs for each in ((spec, spec.scale) if spec.quantized else (spec,))]
        raw = RawTensors.empty([(s.name, s.dtypes[0], s.shape) for s in stored], self.device, pin=pin)
        for spec in specs:
            stream = hashlib.shake_256(f"{TAG}:{self.seed}:{spec.disk_name}".encode("ascii"))
            start = int.from_bytes(stream.digest(8), "little") % POOL
            if spec.quantized:
                _repeat(self._fp8_pool, start, raw[spec.name].view(torch.uint8).flatten())
                raw[spec.scale.name].copy_(_scales(spec, stream))
            else:
                _repeat(self._pool, start, raw[spec.name].flatten(), *_mean_and_std(spec))
        return raw


def _repeat(pool: torch.Tensor, start: int, out: torch.Tensor, mean: float = 0.0, std: float | None = None) -> None:
    """Fill ``out`` with the pool from ``start`` on, again from its beginning after its end."""
    done = 0
    while done < len(out):
        stretch = pool[start : start + len(out) - done]
        out[done : done + len(stretch)] = stretch if std is None else mean + stretch * (std / POOL_STD)
        done, start = done + len(stretch), 0


def _scales(spec: TensorSpec, stream: hashlib._Hash) -> torch.Tensor:
    """Block scales that give the weight a standard deviation of 1/√fan_in, each with a factor from 0.5 to 1.5."""
    blocks = spec.scale.shape
    numbers = np.frombuffer(stream.digest(8 + 2 * math.prod(blocks)), dtype="<u2")[4:].reshape(blocks)
    factors = torch.from_numpy(0.5 + numbers.astype(np.float32) / 65_535)
    return factors * (spec.shape[-1] ** -0.5 / POOL_STD / FACTOR_RMS)


def _mean_and_std(spec: TensorSpec) -> tuple[float, float]:
    if spec.name == EXPERT_BIAS:
        return 0.0, 0.1
    if spec.name == "embed_tokens.weight":
        return 0.0, 1.0
    return (1.0, 0.2) if len(spec.shape) == 1 else (0.0, spec.shape[-1] ** -0.5)
