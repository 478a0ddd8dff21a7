"""What a user asks of the server: ``--additional-config '{"kolibri1": {"kv_cache": "hadamard-int4"}}'``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from kvlab.checks import check_choice, check_integer

SECTION = "kolibri1"
ROTATED = ("hadamard-int4", "hadamard-int4-refit", "hadamard-int4-refit-kv")
SCHEMES = (*ROTATED, "int4", "calibrated")


@dataclass(frozen=True)
class Options:
    """The options under ``kolibri1``.

    Attributes
    ----------
    kv_cache
        What the full-attention layers store: one of `SCHEMES`.
    rotation_seed
        Of the rotation of keys, for one of `ROTATED`; None is the library's, so that what was measured is served.
    calibration
        For ``"calibrated"``, a file that ``kvlab calibrate`` wrote.

    Raises
    ------
    TypeError, ValueError
        A value is none of these, or does not go with the others.
    """

    kv_cache: str
    rotation_seed: int | None = None
    calibration: str | None = None

    def __post_init__(self) -> None:
        check_choice(self.kv_cache, f"{SECTION}.kv_cache", SCHEMES)
        if self.rotation_seed is not None:
            check_integer(self.rotation_seed, f"{SECTION}.rotation_seed", minimum=0)
            if self.kv_cache not in ROTATED:
                raise ValueError(
                    f"{SECTION}.rotation_seed is given with kv_cache {self.kv_cache!r}; accepted: with "
                    f"{', '.join(ROTATED)}"
                )
        if (self.calibration is None) == (self.kv_cache == "calibrated"):
            raise ValueError(
                f"{SECTION}.calibration is {self.calibration!r} with kv_cache {self.kv_cache!r}; "
                "accepted: a file that kvlab calibrate wrote, with 'calibrated'"
            )
        if self.calibration is not None and not Path(self.calibration).is_file():
            raise ValueError(f"{SECTION}.calibration is {self.calibration!r}; accepted: a file that exists")

    @classmethod
    def read(cls, additional_config: object) -> Options | None:
        """Read vLLM's ``additional_config``; None if it asks for nothing of this library.

        Raises
        ------
        TypeError, ValueError
            The section or an option in it is not what is accepted.
        """
        section = additional_config.get(SECTION) if isinstance(additional_config, Mapping) else None
        if section is None:
            return None
        if not isinstance(section, Mapping):
            raise TypeError(f"additional_config.{SECTION} is {section!r}; accepted: an object of options")
        known = [field.name for field in fields(cls)]
        for name in section:
            if name not in known:
                raise ValueError(f"{SECTION} has the option {name!r}; accepted: {', '.join(known)}")
        if "kv_cache" not in section:
            raise ValueError(f"{SECTION}.kv_cache is missing; accepted: {', '.join(SCHEMES)}")
        return cls(**section)
