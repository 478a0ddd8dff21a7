"""The calibration file: safetensors with a manifest, and the scheme that it stands for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvlab.calibrate.compose import calibrated_scheme, check_base
from kvlab.checks import check_finite
from kvlab.paths import written_whole
from kvlab.quantizers import UnequalInteger
from kvlab.schemes import Scheme, get_scheme
from kvlab.transforms import Matrix
from kvlab.transforms.parameters import check_integer

FORMAT = "kvlab-calibration/1"
OPTIONAL = {"key_means": 1, "key_maps": 2, "value_means": 1, "value_maps": 2}
"""Ingredients that may be missing → how many dimensions of head_dim each KV head has in them."""
FINE = "fine_channels"
INGREDIENTS = ("rotation_seeds", *OPTIONAL, FINE)
MANIFEST_KEY = "kvlab"


@dataclass(frozen=True, eq=False)
class Calibration:
    """Rotation seeds, means and maps of each full-attention layer, with where they come from.

    Attributes
    ----------
    seeds
        Absolute decoder layer → seed of its rotation.
    key_means
        The same layers → float32 ``[num_kv_heads, head_dim]``; None where keys are not centred.
    key_maps
        The same layers → float32 ``[num_kv_heads, head_dim, head_dim]``, the matrices that keys are multiplied with,
        the rotations of these seeds inside them; None where keys are only rotated.
    value_means, value_maps
        The same of the values; None where they are stored as they are.
    fine_channels
        How many channels of the mapped keys have eight bits, and how many none (`kvlab.quantizers.UnequalInteger`); 0
        where all have four.
    manifest
        What can be written as JSON: ``format``, ``kvlab`` (its version), ``date``, ``model``, ``config_hash``,
        ``num_kv_heads``, ``head_dim``, ``scheme`` (the base), ``ingredients``, ``captures`` and ``holdout`` (each
        with ``capture_hash``, ``text_hash``, ``revision``, ``tokens``), ``objective``, ``search`` (its ``seeds``
        and ``tokens``) and per layer ``layers``: every seed's objective, the finalists' attention-output errors,
        ``error_before`` and ``error_after``; with maps ``error_map`` too, and ``finder`` under ``search``; with value
        maps ``value_error_before`` and ``value_error_after``, V stored. Where unequal bits were tried,
        ``errors_by_fine``: the error with each number of fine channels.

    Raises
    ------
    TypeError, ValueError
        A base scheme that is unknown or that `kvlab.calibrate.compose.check_base` refuses, an ingredient that this
        version does not know, a seed below 0, means or maps that are not finite or of another shape than the manifest
        says, a map that cannot be inverted.
    """

    seeds: dict[int, int]
    key_means: dict[int, torch.Tensor] | None
    manifest: dict
    key_maps: dict[int, torch.Tensor] | None = None
    value_means: dict[int, torch.Tensor] | None = None
    value_maps: dict[int, torch.Tensor] | None = None
    fine_channels: int = 0

    def __post_init__(self) -> None:
        fine = check_integer(self.fine_channels, FINE, minimum=0)
        with_values = self.value_means is not None or self.value_maps is not None
        check_base(get_scheme(self.base), values=with_values, fine=fine)
        for seed in self.seeds.values():
            check_integer(seed, "rotation seed", minimum=0)
        unknown = set(self.manifest["ingredients"]) - set(INGREDIENTS)
        if unknown:
            accepted = ", ".join(INGREDIENTS)
            raise ValueError(
                f"calibration has the ingredient {min(unknown, key=str)!r}; accepted by this kvlab: {accepted}"
            )
        parts = [self.manifest["layers"], self.seeds]
        for name in OPTIONAL:
            values = getattr(self, name)
            if (name in self.manifest["ingredients"]) != (values is not None):
                raise ValueError(f"calibration disagrees with its manifest on {name}; accepted: both or neither")
            for layer, value in (values or {}).items():
                if list(value.shape) != self._shape(name):
                    found = list(value.shape)
                    raise ValueError(f"{name} of layer {layer} has shape {found}; accepted: {self._shape(name)}")
                check_finite(value, f"{name} of layer {layer}")
            parts += [values] if values is not None else []
        if len({tuple(sorted(map(str, part))) for part in parts}) > 1:
            raise ValueError(f"calibration has seeds for layers {list(self.layers)}; accepted: those of its manifest")
        for name in ("key_maps", "value_maps"):
            if (maps := getattr(self, name)) is not None:
                Matrix(maps, name)
        self._check_fine()

    def _check_fine(self) -> None:
        if (FINE in self.manifest["ingredients"]) != (self.fine_channels != 0):
            raise ValueError(f"calibration disagrees with its manifest on {FINE}; accepted: both or neither")
        if self.fine_channels:
            if self.key_maps is None:
                raise ValueError(f"calibration has {FINE} without key_maps; accepted: both")
            # Refuses what cannot be.
            UnequalInteger(self.fine_channels).bits_per_number(self.manifest["head_dim"])

    def _shape(self, name: str) -> list[int]:
        """Return what an optional ingredient has for each layer."""
        return [self.manifest["num_kv_heads"], *[self.manifest["head_dim"]] * OPTIONAL[name]]

    @property
    def layers(self) -> tuple[int, ...]:
        """Absolute decoder layers, in order."""
        return tuple(sorted(self.seeds))

    @property
    def base(self) -> str:
        """Name of the scheme that was calibrated."""
        return self.manifest["scheme"]

    def scheme(self, name: str = "calibrated") -> Scheme:
        """Return the scheme to measure, apply and serve: ``base`` with these seeds, means and maps."""
        others = {"value_means": self.value_means, "value_maps": self.value_maps, "fine": self.fine_channels}
        return calibrated_scheme(self.base, self.seeds, self.key_means, self.key_maps, **others, name=name)

    @property
    def search(self) -> pd.DataFrame:
        """Every seed's objective, tidy: ``layer``, ``seed``, ``objective``."""
        seeds = self.manifest["search"]["seeds"]
        rows = [
            (layer, seed, objective)
            for layer in self.layers
            for seed, objective in zip(seeds, self._entry(layer)["objectives"], strict=True)
        ]
        return pd.DataFrame(rows, columns=["layer", "seed", "objective"])

    @property
    def table(self) -> pd.DataFrame:
        """One row per layer: the spread of the objective over all seeds, the seed chosen, errors before and after.

        Columns ``layer``, ``seed``, ``objective`` (of that seed), ``min``, ``q1``, ``median``, ``q3``, ``max``
        (over all seeds), ``error_before`` (base scheme) and ``error_after``: attention-output errors, K stored,
        on what was held out. With maps ``error_map`` too, which is ``error_after`` where the map was taken; with value
        maps ``value_error_before`` and ``value_error_after``, V stored.
        """
        rows = []
        for layer, own in self.search.groupby("layer"):
            quantiles = own["objective"].quantile([0, 0.25, 0.5, 0.75, 1]).tolist()
            chosen = own.loc[own["seed"] == self.seeds[layer], "objective"].item()
            entry = self._entry(layer)
            rows.append((layer, self.seeds[layer], chosen, *quantiles, *(entry[name] for name in self._errors)))
        spread = ["min", "q1", "median", "q3", "max"]
        return pd.DataFrame(rows, columns=["layer", "seed", "objective", *spread, *self._errors])

    @property
    def texts(self) -> dict[str, list[tuple[str, str]]]:
        """Hash and model revision of each text: of ``captures``, calibrated on, and of ``holdout``, which decided."""
        return {
            role: [(entry["text_hash"], entry["revision"]) for entry in self.manifest[role]]
            for role in ("captures", "holdout")
        }

    @property
    def _errors(self) -> list[str]:
        of_maps = [] if self.key_maps is None else ["error_map"]
        of_values = [] if self.value_maps is None else ["value_error_before", "value_error_after"]
        return ["error_before", "error_after", *of_maps, *of_values]

    def _entry(self, layer: int) -> dict:
        return self.manifest["layers"][str(layer)]

    def check_applies(self, config_hash: str, layers: Iterable[int], num_kv_heads: int, head_dim: int) -> None:
        """Check that this calibration is of a model and has all ``layers`` of it.

        Raises
        ------
        ValueError
            Another config hash, heads of another number or size, or a layer that was not calibrated.
        """
        given = {"config_hash": config_hash, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, value in given.items():
            if value != self.manifest[name]:
                raise ValueError(
                    f"calibration is of {self.manifest['model']}, {name} {self.manifest[name]}; accepted: {value}"
                )
        if missing := sorted(set(layers) - set(self.layers)):
            raise ValueError(f"calibration lacks layers {missing}; accepted: one with every full-attention layer")

    def save(self, path: str | Path) -> Path:
        """Write the file, whole or not at all; equal calibrations give equal bytes.

        Returns
        -------
        pathlib.Path
            ``path``.
        """
        tensors = {
            "layers": torch.tensor(self.layers),
            "rotation_seeds": torch.tensor([self.seeds[layer] for layer in self.layers]),
        }
        for name in OPTIONAL:
            if (values := getattr(self, name)) is not None:
                tensors[name] = torch.stack([values[layer] for layer in self.layers]).float().cpu()
        if self.fine_channels:
            tensors[FINE] = torch.tensor([self.fine_channels])
        # One entry only: safetensors writes several in an order of its own.
        metadata = {MANIFEST_KEY: json.dumps(self.manifest, sort_keys=True, ensure_ascii=False)}
        path = Path(path)
        with written_whole(path) as scratch:
            scratch.write_bytes(save(tensors, metadata))
        return path

    @classmethod
    def load(cls, path: str | Path, *, config_hash: str | None = None) -> Calibration:
        """Read a file that `save` wrote.

        Parameters
        ----------
        path
            The file.
        config_hash
            Of the model it is meant for; None does not check.

        Raises
        ------
        ValueError
            The file cannot be read or is no calibration, of another format version or model, has ingredients
            that this version does not know, or tensors that do not fit its manifest.
        """
        try:
            manifest, tensors = _read(Path(path))
            loaded = cls._assemble(manifest, tensors, config_hash)
            loaded._check_entries()
            return loaded
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is no valid calibration file: {error}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def _assemble(cls, manifest: dict, tensors: dict[str, torch.Tensor], config_hash: str | None) -> Calibration:
        if config_hash not in (None, manifest["config_hash"]):
            raise ValueError(
                f"calibration is of {manifest['model']}, config_hash {manifest['config_hash']}; accepted: {config_hash}"
            )
        expected = {"layers", *manifest["ingredients"]}
        if set(tensors) != expected and set(manifest["ingredients"]) <= set(INGREDIENTS):
            raise ValueError(f"calibration has the tensors {sorted(tensors)}; accepted: {sorted(expected)}")
        layers, seeds = tensors["layers"], tensors["rotation_seeds"]
        integers = layers.dtype == seeds.dtype == torch.int64
        if not integers or layers.ndim != 1 or seeds.shape != layers.shape or not len(layers):
            raise ValueError(
                f"rotation_seeds is {seeds.dtype} {list(seeds.shape)} for layers {layers.dtype} {list(layers.shape)}; "
                "accepted: int64, one per layer"
            )
        indices, optional = layers.tolist(), dict.fromkeys(OPTIONAL)
        if len(set(indices)) < len(indices):
            raise ValueError(f"calibration has layers {indices}; accepted: each layer once")
        for name, dims in OPTIONAL.items():
            if (x := tensors.get(name)) is None:
                continue
            if x.dtype != torch.float32 or x.ndim != dims + 2 or len(x) != len(layers):
                sizes = [manifest["num_kv_heads"], *[manifest["head_dim"]] * dims]
                raise ValueError(f"{name} is {x.dtype} {list(x.shape)}; accepted: float32 {[len(layers), *sizes]}")
            optional[name] = dict(zip(indices, x.unbind(), strict=True))
        if (fine := tensors.get(FINE)) is not None:
            if fine.dtype != torch.int64 or fine.shape != (1,):
                raise ValueError(f"{FINE} is {fine.dtype} {list(fine.shape)}; accepted: int64 [1]")
            optional[FINE] = int(fine)
        return cls(seeds=dict(zip(indices, seeds.tolist(), strict=True)), manifest=manifest, **optional)

    def _check_entries(self) -> None:
        """Read the manifest's entries once, so that a damaged one is refused here and not where they are needed."""
        try:
            _ = self.table.astype(float), self.texts, self.manifest["model"]
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ValueError("calibration has a damaged manifest; accepted: what kvlab calibrate wrote") from None


def _read(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """Manifest and tensors of a file of this format version."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(MANIFEST_KEY, "null")
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"cannot be read as safetensors ({error}); accepted: a calibration file") from None
    manifest = json.loads(text)
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        kind = "no calibration file" if found is None else f"of format {found!r}"
        raise ValueError(f"is {kind}; accepted: {FORMAT!r}")
    return manifest, tensors


def check_names(calibrations: Sequence[Path], taken: Sequence[str]) -> None:
    """Check that files may be measured under their names without the ending, beside rows of ``taken`` names.

    Raises
    ------
    ValueError
        A file's name is another's or is taken.
    """
    for number, path in enumerate(calibrations):
        if path.stem in [*taken, *(other.stem for other in calibrations[:number])]:
            named = f"calibration is {str(path)!r}, but other rows are called {path.stem!r}"
            raise ValueError(f"{named}; accepted: files whose names, without the ending, no scheme or other file has")
