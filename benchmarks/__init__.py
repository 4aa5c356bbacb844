"""Measurements against a real MongoDB: `python -m benchmarks.waiting`, `python -m benchmarks.signals`."""
