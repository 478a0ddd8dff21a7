"""Benchmarks through lm-evaluation-harness: what was asked, what came back, one JSON line a prompt."""
