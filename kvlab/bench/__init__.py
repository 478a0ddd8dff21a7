"""Benchmarks: what the kernels take, beside their competitors, on one GPU in one run."""
