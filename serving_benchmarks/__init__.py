"""Benchmarks that others can repeat: programs with --help that print a table and write JSON."""
