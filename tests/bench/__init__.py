"""Benchmarks, each run by its make target on a quiet machine, and their tests."""
