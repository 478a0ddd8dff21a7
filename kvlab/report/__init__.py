"""One HTML page of a set of measurements: figures, tables and where they come from."""

from kvlab.report.page import write_report

__all__ = ["write_report"]
