"""Measurements: each prints a table and writes JSON to benchmarks/out/."""
