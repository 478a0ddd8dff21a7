"""The portable kernels: plain Triton, for any GPU it supports, other head sizes, and the interpreter on a CPU."""
