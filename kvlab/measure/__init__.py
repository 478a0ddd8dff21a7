"""Measurements: captured tensors or a model in, tidy tables out."""

from kvlab.measure.attention import STORED, attention_error_table, attention_output_error, layer_errors
from kvlab.measure.captures import by_text, measure_captures, over_texts
from kvlab.measure.channels import channel_table
from kvlab.measure.loss import loss_table, token_losses
from kvlab.measure.outliers import layers_lowered_by_folding, outlier_ratio, outlier_table
from kvlab.measure.rounding import median_token, relative_error, rounding_table

__all__ = [
    "STORED",
    "attention_error_table",
    "attention_output_error",
    "by_text",
    "channel_table",
    "layer_errors",
    "layers_lowered_by_folding",
    "loss_table",
    "measure_captures",
    "median_token",
    "outlier_ratio",
    "outlier_table",
    "over_texts",
    "relative_error",
    "rounding_table",
    "token_losses",
]
