"""Reading chosen tensors of safetensors files at the disk's speed.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name → dtype, shape, offsets
from the header's end) and the tensors' bytes. Headers are parsed here and not by the safetensors library,
because knowing where everything lies lets neighbours be read together, straight into one buffer.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from kvlab.models.raw_tensors import Place, RawTensors, aligned, empty_bytes

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000
# Reading on over a gap this small is faster than a second request.
MAX_GAP = 1 << 20
PIECE = 16 << 20
# Pieces in flight: one leaves a fast disk waiting while its bytes are copied out of the page cache.
READERS = 4


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: the dtype as safetensors spells it, the shape, and its bytes ``[start, stop)``."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read and check the header of one safetensors file; the tensors' bytes are left alone.

    Raises
    ------
    ValueError
        The file is missing, shorter than its header says, or no safetensors file.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing; accepted: every shard of the checkpoint")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size >= 8 and length > MAX_HEADER:
            raise ValueError(f"{path} has a header of {length} bytes; accepted: a safetensors file")
        if size < 8 + length:
            raise ValueError(f"{path} has {size} bytes; accepted: at least {max(8, 8 + length)}, it is truncated")
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(
                path, entry["dtype"], tuple(entry["shape"]), *(8 + length + x for x in entry["data_offsets"])
            )
            for name, entry in header.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} has a malformed header ({error!r}); accepted: a safetensors file") from None
    for name, tensor in tensors.items():
        needed = math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize if tensor.dtype in DTYPES else None
        if needed not in (None, tensor.stop - tensor.start):
            raise ValueError(f"{path}: {name} has {tensor.stop - tensor.start} bytes; accepted: {needed}, as its shape")
    end = max((tensor.stop for tensor in tensors.values()), default=0)
    if size < end:
        raise ValueError(f"{path} has {size} bytes; accepted: at least {end}, it is truncated")
    return tensors


@dataclass(frozen=True)
class _Run:
    """Bytes ``[start, stop)`` of a file that go to the buffer's ``offset``."""

    path: Path
    start: int
    stop: int
    offset: int

    def pieces(self) -> Iterator[_Run]:
        for start in range(self.start, self.stop, PIECE):
            yield _Run(self.path, start, min(start + PIECE, self.stop), self.offset + start - self.start)


def read_tensors(wanted: dict[str, StoredTensor], *, pin: bool = False) -> RawTensors:
    """Read tensors, of any files, into one host buffer.

    Parameters
    ----------
    wanted
        What to read, by the names to give it; dtypes among `DTYPES`.
    pin
        Into pinned memory, where there is CUDA.

    Raises
    ------
    ValueError
        A file has become shorter since its header was read.
    """
    runs, places, moves, size = _plan(wanted)
    buffer = empty_bytes(size, pin=pin)
    view = memoryview(buffer.numpy())
    with ThreadPoolExecutor(READERS, thread_name_prefix="kvlab-read") as pool:
        for _ in pool.map(lambda piece: _read(piece, view), [piece for run in runs for piece in run.pieces()]):
            pass
    for name, offset in moves.items():
        place = places[name]
        buffer[place.offset : place.offset + place.nbytes] = buffer[offset : offset + place.nbytes]
    return RawTensors(buffer, places)


def _plan(wanted: dict[str, StoredTensor]) -> tuple[list[_Run], dict[str, Place], dict[str, int], int]:
    """Find the runs to read, where each tensor then lies, which lie there only after a move, and the buffer's size."""
    runs: list[_Run] = []
    offsets = {}
    for name, tensor in sorted(wanted.items(), key=lambda item: (str(item[1].path), item[1].start)):
        last = runs[-1] if runs else None
        if last and last.path == tensor.path and tensor.start - last.stop < MAX_GAP:
            runs[-1] = _Run(last.path, last.start, max(last.stop, tensor.stop), last.offset)
        else:
            end = last.offset + last.stop - last.start if last else 0
            runs.append(_Run(tensor.path, tensor.start, tensor.stop, aligned(end)))
        offsets[name] = runs[-1].offset + tensor.start - runs[-1].start
    size = runs[-1].offset + runs[-1].stop - runs[-1].start
    places, moves = {}, {}
    for name, tensor in wanted.items():
        place = Place(offsets[name], DTYPES[tensor.dtype], tensor.shape)
        if place.offset % place.dtype.itemsize:
            # The file does not align it; a view of its numbers needs that.
            moves[name] = place.offset
            place = Place(aligned(size), place.dtype, place.shape)
            size = place.offset + place.nbytes
        places[name] = place
    return runs, places, moves, size


def _read(piece: _Run, view: memoryview) -> None:
    with piece.path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), piece.start, piece.stop - piece.start, os.POSIX_FADV_WILLNEED)
        file.seek(piece.start)
        rest = view[piece.offset : piece.offset + piece.stop - piece.start]
        while rest:
            count = file.readinto(rest)
            if not count:
                raise ValueError(f"{piece.path} ends at byte {file.tell()}; accepted: at least {piece.stop} bytes")
            rest = rest[count:]
