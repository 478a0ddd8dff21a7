"""What every quantizer is: numbers in, the numbers a cache would give back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from kvlab.checks import FP16_MAX, check_finite, check_vectors

BLOCK_VECTORS = 4096
"""Vectors handled at once on a CPU: at head_dim 128 a float32 block of 2 MB, which stays in a core's cache."""
DEVICE_BLOCK_VECTORS = 1 << 17
"""The same on a GPU, 64 MB: a block is up to hundreds of launches, and its check waits for the GPU."""

HEAP_BYTES = 30 << 20
"""Just under the largest piece whose freeing raises glibc's threshold (32 MiB); never written to."""


class Quantizer(ABC):
    """A simulated quantizer: float in, what storing it in fewer bits gives back, float out.

    A subclass defines `_roundtrip` on float32 and `bits_per_number`; checks, dtypes and blocks are here.

    Attributes
    ----------
    per_token : bool
        Whether each token's stored form depends on that token alone. A quantizer that shares
        metadata between tokens (KIVI's keys) sets it to False and always sees the whole context.
    limit : float
        The largest magnitude accepted: fp16's, as most formats keep an fp16 scale.
    """

    per_token: bool = True
    limit: float = FP16_MAX

    @abstractmethod
    def bits_per_number(self, head_dim: int) -> float:
        """Bits stored per number, scales and offsets included, for vectors of ``head_dim``.

        Raises
        ------
        TypeError, ValueError
            This format cannot hold that ``head_dim``.
        """

    @abstractmethod
    def _roundtrip(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize and dequantize ``x``: float32 ``[..., tokens, head_dim]``, finite. May not write to ``x``."""

    def roundtrip(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize ``x`` and return what a cache would give back.

        Parameters
        ----------
        x
            ``[..., tokens, head_dim]`` (or one vector ``[head_dim]``), any float dtype, any device.

        Returns
        -------
        torch.Tensor
            Same shape, dtype and device; the arithmetic inside is float32.

        Raises
        ------
        TypeError
            ``x`` is not a floating-point tensor.
        ValueError
            ``x`` is empty, has a non-finite component or one beyond `limit`, or a head_dim that this
            format cannot hold.
        """
        return map_blocks(self.roundtrip_block, x, per_token=self.per_token)

    def roundtrip_block(self, x: torch.Tensor, name: str = "x") -> torch.Tensor:
        """Roundtrip one float32 block ``[..., tokens, head_dim]``, checking its values only; ``name`` is for errors."""
        return self._roundtrip(check_finite(x, name, limit=self.limit))


def saturate(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keep float32 ``x`` within what ``dtype`` holds: o + 15 s can round up past fp16, not past wider dtypes."""
    return x.clamp(-FP16_MAX, FP16_MAX) if dtype == torch.float16 else x


def map_blocks(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *, per_token: bool) -> torch.Tensor:
    """Apply ``fn`` to float32 blocks of tokens of ``x`` and gather the results in ``x``'s dtype.

    Beside the result only one block's temporaries exist, however long the context.

    Parameters
    ----------
    fn
        Maps float32 ``[..., tokens, head_dim]`` to the same shape without writing to its argument.
    x
        ``[..., tokens, head_dim]`` or ``[head_dim]``, any float dtype.
    per_token
        False hands ``fn`` all tokens at once, because it shares something between them.

    Returns
    -------
    torch.Tensor
        Same shape and dtype as ``x``.

    Raises
    ------
    TypeError, ValueError
        ``x`` is not a non-empty floating-point tensor.
    """
    check_vectors(x)
    if x.ndim == 1:
        return map_blocks(fn, x[None], per_token=per_token)[0]
    tokens = x.shape[-2]
    vectors = BLOCK_VECTORS if x.device.type == "cpu" else DEVICE_BLOCK_VECTORS
    step = max(1, vectors * tokens * x.shape[-1] // x.numel()) if per_token else tokens
    out = torch.empty_like(x)
    # glibc returns freed memory to the system beyond a threshold that freeing one large piece raises;
    # below it every block would fault its temporaries in anew, which costs more than the arithmetic.
    if x.device.type == "cpu":
        torch.empty(HEAP_BYTES, dtype=torch.uint8)
    with torch.no_grad():
        for start in range(0, tokens, step):
            block = (..., slice(start, start + step), slice(None))
            out[block] = saturate(fn(x[block].float()), x.dtype)
    return out
