"""Benchmarks that others can repeat: `python -m serving_benchmarks COMMAND` prints tables and writes JSON."""
