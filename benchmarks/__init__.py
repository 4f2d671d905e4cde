"""Benchmarks: run as modules, such as ``python -m benchmarks.save_load``."""
