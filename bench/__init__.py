"""Benchmarks: what the figures in the README are measured with."""
