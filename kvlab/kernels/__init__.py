"""Kernels of the 4-bit cache: store, decode, prefill; each with a naive torch twin. See the folder's README."""
