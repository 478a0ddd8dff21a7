"""Figures: a table in, a matplotlib Figure out, all in one style."""

from kvlab.plots.ablation import plot_ablation
from kvlab.plots.attention_error import plot_attention_error
from kvlab.plots.capacity import plot_session_gain, plot_session_sizes
from kvlab.plots.channels import plot_channels
from kvlab.plots.error_by_bits import plot_error_by_bits
from kvlab.plots.gpqa import plot_gpqa
from kvlab.plots.kernels import plot_decode_times, plot_store_times, run_of
from kvlab.plots.loss import plot_loss
from kvlab.plots.outliers import plot_outliers
from kvlab.plots.overview import plot_overview
from kvlab.plots.rounding import plot_rounding
from kvlab.plots.ruler import plot_ruler
from kvlab.plots.seeds import plot_seed_spread
from kvlab.plots.spectrum import plot_spectrum
from kvlab.plots.step_model import plot_step_model
from kvlab.plots.style import save, scheme_color, style
from kvlab.plots.throughput import engine_of, plot_throughput
from kvlab.plots.training import plot_training

__all__ = [
    "engine_of",
    "plot_ablation",
    "plot_attention_error",
    "plot_channels",
    "plot_decode_times",
    "plot_error_by_bits",
    "plot_gpqa",
    "plot_loss",
    "plot_outliers",
    "plot_overview",
    "plot_rounding",
    "plot_ruler",
    "plot_seed_spread",
    "plot_session_gain",
    "plot_session_sizes",
    "plot_spectrum",
    "plot_step_model",
    "plot_store_times",
    "plot_throughput",
    "plot_training",
    "run_of",
    "save",
    "scheme_color",
    "style",
]
