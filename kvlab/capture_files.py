"""Captures on disk: one safetensors file per layer, a manifest, written atomically and read memory-mapped.

A folder holds ``manifest.json`` and, per captured layer, ``layer-NNN.safetensors`` with

========================  =====================================================================
``q``                     queries at the sampled positions, ``[num_heads, num_queries, head_dim]``
``positions``             those positions, int64 ``[num_queries]``
``k`` or ``normed_keys``  keys as attention sees them; where the gain folds, instead the keys before it (and so
                          before any rotation), ``[num_kv_heads, tokens, head_dim]``
``v``                     values, the same shape
``q_gain``, ``k_gain``    QK-norm gains ``[head_dim]``, float32, where the model has them
========================  =====================================================================

All but positions and gains are BF16. A layer with QK-norm and RoPE has both ``k`` and ``normed_keys``. While a
streamed capture runs, ``hidden.safetensors`` holds the hidden states after the last captured layer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvlab.models.streaming import LayerTimes
from kvlab.recording import Capture, LayerCapture

FORMAT = "kvlab-capture/1"
MANIFEST = "manifest.json"
HIDDEN = "hidden.safetensors"
SCRATCH = ".writing-"


@dataclass(frozen=True)
class Manifest:
    """What a capture is of, and where and when it was made.

    Attributes
    ----------
    model, revision, model_type
        Name or path, the hub's commit (empty for a local folder), transformers' model type.
    config_hash, text_hash
        SHA-256 of the model's architecture and of the text.
    first_token, tokens
        The range of the text's tokens: ``tokens`` from ``first_token`` on.
    num_queries
        Query positions sampled per layer.
    layers
        Absolute decoder indices.
    hidden_size, num_heads, num_kv_heads, head_dim
        Shapes.
    kvlab, date, machine
        Version, day and machine of the capture.
    """

    model: str
    revision: str
    model_type: str
    config_hash: str
    text_hash: str
    first_token: int
    tokens: int
    num_queries: int
    layers: tuple[int, ...]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kvlab: str
    date: str
    machine: str

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's file, to within its header."""
        return 2 * self.head_dim * (2 * self.num_kv_heads * self.tokens + self.num_heads * self.num_queries)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states of the whole context."""
        return 2 * self.hidden_size * self.tokens


@dataclass(eq=False)
class StoredCapture(Capture):
    """A `Capture` read from disk; a layer's tensors are mapped when it is asked for.

    Attributes
    ----------
    manifest
        What it is of.
    times
        Seconds per layer, where this process streamed it.
    """

    manifest: Manifest | None = None
    times: list[LayerTimes] = field(default_factory=list)


class CaptureWriter:
    """Writes a capture layer by layer; what is finished survives anything, and only that counts.

    Parameters
    ----------
    folder
        Created where missing. A folder with the same capture, finished or not, is continued.
    manifest
        What is to be captured.

    Raises
    ------
    ValueError
        The folder cannot be written, holds something else, or the disk lacks room.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _clear_scratch(folder)
            known = _read_manifest(folder) if (folder / MANIFEST).exists() else None
            if known is None and any(path.name[: len(SCRATCH)] != SCRATCH for path in folder.iterdir()):
                raise ValueError(
                    f"out is {str(folder)!r}, which holds other files; accepted: an empty folder or a capture"
                )
            if known is not None:
                _check_same(folder, known, manifest)
            self._check_disk()
            if known is None:
                document = json.dumps({"format": FORMAT, **dataclasses.asdict(manifest)}, indent=2)
                _replace(folder / MANIFEST, lambda path: path.write_text(document + "\n"))
        except OSError as error:
            raise ValueError(
                f"out is {str(folder)!r}, which cannot be written ({error.strerror}); accepted: a folder"
            ) from None

    def missing(self) -> list[int]:
        """Layers that are not finished yet, or whose file was damaged since."""
        return [index for index in self.manifest.layers if _layer_problem(self.folder, index, self.manifest)]

    def needed_bytes(self) -> int:
        """Bytes still to be written, hidden states included."""
        missing = len(self.missing())
        return missing * self.manifest.layer_bytes + (2 * self.manifest.hidden_bytes if missing > 1 else 0)

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self.folder).free
        if self.needed_bytes() > free:
            raise ValueError(
                f"out is {str(self.folder)!r} with {free / 1e9:.1f} GB free; accepted: a disk with "
                f"{self.needed_bytes() / 1e9:.1f} GB for this capture"
            )

    def write(self, layer: LayerCapture) -> None:
        """Write one layer of a batch of one."""
        tensors = {"q": layer.q[0], "v": layer.v[0]}
        if not layer.folds_gain:
            tensors["k"] = layer.k[0]
        if layer.normed_keys is not None:
            tensors["normed_keys"] = layer.normed_keys[0]
        tensors = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
        tensors["positions"] = layer.positions.cpu()
        for name in ("q_gain", "k_gain"):
            if getattr(layer, name) is not None:
                tensors[name] = getattr(layer, name).cpu().float().contiguous()
        facts = {"index": layer.index, "kind": layer.kind, "rope": layer.rope, "scaling": layer.scaling}
        metadata = {"kvlab": json.dumps(facts)}
        _replace(layer_file(self.folder, layer.index), lambda path: save_file(tensors, path, metadata=metadata))

    def save_hidden(self, hidden: torch.Tensor, layer: int) -> None:
        """Keep the hidden states that left ``layer``, so that a capture resumes behind it."""
        tensors = {"hidden": hidden.cpu().contiguous()}
        _replace(self.folder / HIDDEN, lambda path: save_file(tensors, path, metadata={"layer": str(layer)}))

    def load_hidden(self) -> tuple[torch.Tensor, int] | None:
        """Hidden states and the layer they left, if any were kept and every layer up to it is finished."""
        try:
            with safe_open(self.folder / HIDDEN, framework="pt") as file:
                layer, hidden = int(file.metadata()["layer"]), file.get_tensor("hidden").clone()
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            # Not there or damaged: the pass starts again, what is finished stays.
            return None
        wanted = (1, self.manifest.tokens, self.manifest.hidden_size)
        resumable = layer in self.manifest.layers and all(index > layer for index in self.missing())
        return (hidden, layer) if resumable and hidden.shape == wanted else None

    def finish(self) -> StoredCapture:
        """Drop what only resuming needs and open the capture."""
        (self.folder / HIDDEN).unlink(missing_ok=True)
        return open_capture(self.folder)


def layer_file(folder: Path, index: int) -> Path:
    """Path of one layer's tensors."""
    return folder / f"layer-{index:03d}.safetensors"


def open_capture(folder: Path | str, device: torch.device | str = "cpu") -> StoredCapture:
    """Open a capture for measuring.

    Parameters
    ----------
    folder
        As written by ``kvlab capture``.
    device
        Where a layer's tensors go when it is asked for; on the CPU they stay memory-mapped.

    Returns
    -------
    StoredCapture
        With its `Manifest`.

    Raises
    ------
    ValueError
        The folder is no capture, of another format, or unfinished.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"capture is {str(folder)!r}; accepted: a folder written by kvlab capture")
    manifest = _read_manifest(folder)
    problems = [problem for index in manifest.layers if (problem := _layer_problem(folder, index, manifest))]
    if problems:
        raise ValueError(f"capture {str(folder)!r}: {problems[0]}; run the same kvlab capture again to finish it")
    layers = _StoredLayers(folder, manifest.layers, torch.device(device))
    return StoredCapture(manifest.model, manifest.model_type, read_layers=lambda: layers, manifest=manifest)


def describe(captures: Mapping[str, StoredCapture]) -> str:
    """Say what captures are of, for the captions of figures: model, texts, machine, date."""
    manifest = next(iter(captures.values())).manifest
    texts = ", ".join(
        f"{capture.manifest.tokens:,} tokens of {name} (SHA-256 {capture.manifest.text_hash[:12]})"
        for name, capture in captures.items()
    )
    return (
        f"Measured: {manifest.model}, {texts}, captured with kvlab {manifest.kvlab} on {manifest.machine}, "
        f"{manifest.date}."
    )


class _StoredLayers(Mapping[int, LayerCapture]):
    """Layers by index, each read when asked for and held by nobody but the asker."""

    def __init__(self, folder: Path, indices: tuple[int, ...], device: torch.device) -> None:
        self.folder, self.indices, self.device = folder, indices, device

    def __getitem__(self, index: int) -> LayerCapture:
        if index not in self.indices:
            raise KeyError(index)
        return _read_layer(layer_file(self.folder, index), self.device)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def _layer_problem(folder: Path, index: int, manifest: Manifest) -> str | None:
    """Say what is wrong with a layer's file, by its header alone; None if it is whole and of this capture."""
    path = layer_file(folder, index)
    if not path.exists():
        return f"layer {index} is missing"
    per_token = [manifest.num_kv_heads, manifest.tokens, manifest.head_dim]
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["kvlab"])
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no mapping)
            keys = [shapes[name] for name in ("k", "normed_keys") if name in shapes]
            queries = [manifest.num_heads, shapes["positions"][0], manifest.head_dim]
            if (
                facts["index"] != index
                or shapes["q"] != queries
                or {*map(tuple, [shapes["v"], *keys])} != {tuple(per_token)}
            ):
                return f"{path.name} is of another layer or shape"
            return None if keys else f"{path.name} has no keys"
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        return f"{path.name} is damaged ({error})"


def _read_layer(path: Path, device: torch.device) -> LayerCapture:
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["kvlab"])
            tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); run the same kvlab capture again") from None
    normed, k_gain = tensors.get("normed_keys"), tensors.get("k_gain")
    k = tensors.get("k")
    if k is None:
        # The model's own arithmetic: BF16 gain times BF16 normalised key.
        k = k_gain.to(normed.dtype) * normed
    return LayerCapture(
        **facts,
        q=tensors["q"][None],
        positions=tensors["positions"],
        k=k[None],
        v=tensors["v"][None],
        normed_keys=None if normed is None else normed[None],
        q_gain=tensors.get("q_gain"),
        k_gain=k_gain,
    )


def _read_manifest(folder: Path) -> Manifest:
    try:
        values = json.loads((folder / MANIFEST).read_text())
        found = values.pop("format", None)
    except (ValueError, AttributeError):
        raise ValueError(f"{folder / MANIFEST} is damaged; accepted: what kvlab capture wrote") from None
    if found != FORMAT:
        raise ValueError(f"{folder / MANIFEST} has format {found!r}; accepted: {FORMAT!r}")
    kinds = {field.name: {"int": int, "str": str}.get(field.type, list) for field in dataclasses.fields(Manifest)}
    wrong = [name for name, kind in kinds.items() if type(values.get(name)) is not kind] + [*values.keys() - kinds]
    if wrong or not all(type(index) is int for index in values["layers"]):
        field = (wrong or ["layers"])[0]
        raise ValueError(f"{folder / MANIFEST} is damaged ({field}); accepted: what kvlab capture wrote")
    return Manifest(**{**values, "layers": tuple(values["layers"])})


def _check_same(folder: Path, known: Manifest, wanted: Manifest) -> None:
    for name in (f.name for f in dataclasses.fields(Manifest) if f.name not in ("date", "machine")):
        if getattr(known, name) != getattr(wanted, name):
            raise ValueError(
                f"out is {str(folder)!r}, which holds a capture with {name} {getattr(known, name)!r}; accepted: one "
                f"with {getattr(wanted, name)!r}, or another folder"
            )


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file in a scratch folder and move it into place, so that it is whole or not there."""
    scratch = path.parent / f"{SCRATCH}{os.getpid()}"
    scratch.mkdir(exist_ok=True)
    try:
        write(scratch / path.name)
        with (scratch / path.name).open("rb") as file:
            os.fsync(file.fileno())
        # safetensors keeps its files to the owner; captures are for the group that shares the machine.
        (scratch / path.name).chmod(0o644)
        (scratch / path.name).replace(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be written ({error}); what is finished is kept") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _clear_scratch(folder: Path) -> None:
    """Remove what processes that were killed while writing have left."""
    for scratch in folder.glob(f"{SCRATCH}*"):
        try:
            os.kill(int(scratch.name[len(SCRATCH) :]), 0)
        except (ProcessLookupError, OverflowError, ValueError):
            shutil.rmtree(scratch, ignore_errors=True)
        except PermissionError:
            # Alive, and somebody else's.
            continue
