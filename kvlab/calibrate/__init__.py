"""Calibration: captures in, the rotation seeds and key means of each full-attention layer out.

`calibrate` does it all and returns a `Calibration`, which is a file on disk and a scheme in use.
"""

from kvlab.calibrate.calibrating import calibrate
from kvlab.calibrate.compose import calibrated_scheme
from kvlab.calibrate.file import Calibration
from kvlab.calibrate.means import key_means
from kvlab.calibrate.objective import KeyObjective, query_covariance, weighted_key_error
from kvlab.calibrate.seeds import ranking_agreement, search_seeds

__all__ = [
    "Calibration",
    "KeyObjective",
    "calibrate",
    "calibrated_scheme",
    "key_means",
    "query_covariance",
    "ranking_agreement",
    "search_seeds",
    "weighted_key_error",
]
