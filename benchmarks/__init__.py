"""Benchmarks: run from the top of the repository, as `python -m benchmarks.bench_throughput`."""
