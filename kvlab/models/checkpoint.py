"""The released Kolibri-1 checkpoints on disk, in FP8 or BF16."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import torch

from kvlab.models.kolibri1_config import read_config
from kvlab.models.kolibri1_layout import (
    SCALE_SUFFIX,
    TensorSpec,
    embedding_specs,
    head_specs,
    layer_specs,
)
from kvlab.models.raw_tensors import RawTensors
from kvlab.models.safetensors_reader import DTYPE_NAMES, DTYPES, StoredTensor, read_header, read_tensors
from kvlab.models.weight_source import WeightSource, prefetch

__all__ = ["CheckpointFiles", "WeightSource", "open_checkpoint", "prefetch"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer*"]


class CheckpointFiles(WeightSource):
    """A folder with ``config.json`` and safetensors files in the format of the Kolibri-1 release.

    Opening reads the headers and checks every tensor's presence, shape and dtype; weights are read when asked for.

    Parameters
    ----------
    folder
        With ``model.safetensors.index.json`` and its shards, or a single ``model.safetensors``.
    name
        The model's; the folder's own by default.
    revision
        Of the model; by default SHA-256 over the headers and the norms' gains, which tells one training state
        from another without reading the weights.

    Raises
    ------
    ValueError
        One line naming the file or tensor, what was found and what is accepted. `layer` raises it for a scale
        that is not positive and finite and for a file that became shorter.
    """

    def __init__(self, folder: str | Path, *, name: str | None = None, revision: str | None = None) -> None:
        self.folder = Path(folder)
        config = read_config(self.folder)
        self._stored = _stored_tensors(self.folder)
        self._layers = [layer_specs(config, index) for index in range(config.num_hidden_layers)]
        self._embeddings, self._head = embedding_specs(config), head_specs(config)
        self._check()
        super().__init__(config, name or self.folder.resolve().name, revision or self._fingerprint())

    def layer(self, index: int, *, pin: bool = False) -> RawTensors:
        """Read decoder layer ``index``."""
        self.check_layer(index)
        return self._read(self._layers[index], pin=pin)

    def embeddings(self, *, pin: bool = False) -> RawTensors:
        """Read the token embeddings."""
        return self._read(self._embeddings, pin=pin)

    def head(self, *, pin: bool = False) -> RawTensors:
        """Read the final norm and the LM head."""
        return self._read(self._head, pin=pin)

    def _check(self) -> None:
        specs = [*self._embeddings, *self._head, *(spec for layer in self._layers for spec in layer)]
        # Experts are fused, so all projections have the dtype of the first.
        first = next(spec for spec in specs if spec.quantized)
        projection = self._check_tensor(first, first.dtypes)
        for spec in specs:
            dtype = self._check_tensor(spec, (projection,) if spec.quantized else spec.dtypes)
            if dtype == torch.float8_e4m3fn:
                self._check_tensor(spec.scale, spec.scale.dtypes)

    def _check_tensor(self, spec: TensorSpec, dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
        stored = self._stored.get(spec.disk_name)
        if stored is None:
            raise ValueError(f"{self.folder}: {spec.disk_name} is missing; accepted: shape {list(spec.shape)}")
        where = f"{stored.path}: {spec.disk_name}"
        if stored.shape != spec.shape:
            raise ValueError(f"{where} has shape {list(stored.shape)}; accepted: {list(spec.shape)}")
        if DTYPES.get(stored.dtype) not in dtypes:
            accepted = " or ".join(DTYPE_NAMES[dtype] for dtype in dtypes)
            raise ValueError(f"{where} has dtype {stored.dtype}; accepted: {accepted}")
        return DTYPES[stored.dtype]

    def _read(self, specs: list[TensorSpec], *, pin: bool) -> RawTensors:
        with_scales = [each for spec in specs for each in (spec, spec.scale) if each.disk_name in self._stored]
        raw = read_tensors({spec.name: self._stored[spec.disk_name] for spec in with_scales}, pin=pin)
        labels = {spec.name: f"{self._stored[spec.disk_name].path}: {spec.disk_name}" for spec in with_scales}
        for name, label in labels.items():
            if name.endswith(SCALE_SUFFIX):
                _check_scale(raw[name], label)
        return dataclasses.replace(raw, labels=labels)

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, stored in sorted(self._stored.items()):
            digest.update(f"{name} {stored.dtype} {stored.shape}\n".encode())
        norms = {name: stored for name, stored in self._stored.items() if name.endswith("norm.weight")}
        for _, norm in sorted(read_tensors(norms).tensors().items()):
            digest.update(norm.view(torch.uint8).numpy())
        return digest.hexdigest()


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by name, as the index and the headers of the files have them."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise ValueError(f"{folder} has neither {INDEX} nor {SINGLE}; accepted: one of them")
        return read_header(folder / SINGLE)
    try:
        shards: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        headers = {shard: read_header(folder / shard) for shard in sorted(set(shards.values()))}
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{index} is malformed ({error!r}); accepted: a weight_map from tensors to shards") from None
    for name, shard in shards.items():
        if name not in headers[shard]:
            raise ValueError(f"{index} names {name} in {shard}, which lacks it; accepted: tensors that are there")
    return {name: headers[shard][name] for name, shard in shards.items()}


def _check_scale(scale: torch.Tensor, where: str) -> None:
    smallest, largest = (bound.item() for bound in scale.aminmax())
    # NaN compares false with everything, so the accepted case is the one that is spelled out.
    if not 0 < smallest <= largest < float("inf"):
        raise ValueError(f"{where} has scales from {smallest} to {largest}; accepted: positive finite numbers")


def open_checkpoint(model: str | Path) -> CheckpointFiles:
    """Open a local folder, or a model of the Hugging Face hub, downloaded where its cache lacks it.

    Parameters
    ----------
    model
        An existing folder, else a hub id such as ``Aleph-Alpha/Kolibri-1``. The download is huggingface_hub's,
        with its progress bars; it resumes. The config is checked before any weights are downloaded.

    Raises
    ------
    ValueError
        Neither a folder nor a model of the hub, no connection, or `CheckpointFiles` refuses it.
    """
    if Path(model).is_dir():
        return CheckpointFiles(model)
    read_config(_snapshot(str(model), ["config.json"]))
    snapshot = _snapshot(str(model), DOWNLOADED)
    return CheckpointFiles(snapshot, name=str(model), revision=snapshot.name)


def _snapshot(model: str, patterns: list[str]) -> Path:
    import httpx
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns))
    except (OSError, ValueError, httpx.HTTPError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"model is {model!r}; accepted: an existing folder or a hub id that can be read "
            f"({type(error).__name__}: {reason})"
        ) from error
