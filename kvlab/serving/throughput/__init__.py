"""Speed of the whole engine, without a server: decode throughput, capacity by filling, time to first token."""

from kvlab.serving.throughput.bench import Setup, bench_first_token, bench_throughput

__all__ = ["Setup", "bench_first_token", "bench_throughput"]
