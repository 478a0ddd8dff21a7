"""Calibration: captures in, what makes the keys of each full-attention layer cheaper to store out.

`calibrate` does it all and returns a `Calibration`, which is a file on disk and a scheme in use. `fit_transforms` finds
a matrix per layer and KV head instead of a seed; the README of this folder derives them.
"""

from kvlab.calibrate.bound import bound_table, rate_distortion_error, seen_energies, spectrum_table
from kvlab.calibrate.calibrating import calibrate
from kvlab.calibrate.closed_forms import balanced, channel_scales, plain, query_basis, scaled_query_basis
from kvlab.calibrate.compose import calibrated_scheme, fitted_scheme
from kvlab.calibrate.file import Calibration, check_names
from kvlab.calibrate.fit import fit_transforms
from kvlab.calibrate.learned import expected_error, learned_matrix, learned_rotation
from kvlab.calibrate.means import key_means
from kvlab.calibrate.objective import KeyObjective, query_covariance, weighted_key_error
from kvlab.calibrate.sample import KeySample, attention_sample, mixed_sample, uniform_sample
from kvlab.calibrate.seeds import ranking_agreement, search_seeds
from kvlab.calibrate.unequal import unequal
from kvlab.calibrate.values import fit_value_transforms, fit_values

__all__ = [
    "Calibration",
    "KeyObjective",
    "KeySample",
    "attention_sample",
    "balanced",
    "bound_table",
    "calibrate",
    "calibrated_scheme",
    "channel_scales",
    "check_names",
    "expected_error",
    "fit_transforms",
    "fit_value_transforms",
    "fit_values",
    "fitted_scheme",
    "key_means",
    "learned_matrix",
    "learned_rotation",
    "mixed_sample",
    "plain",
    "query_basis",
    "query_covariance",
    "ranking_agreement",
    "rate_distortion_error",
    "scaled_query_basis",
    "search_seeds",
    "seen_energies",
    "spectrum_table",
    "unequal",
    "uniform_sample",
    "weighted_key_error",
]
