"""Benchmarks: programs to run by hand on a quiet machine, each by its make target; pytest collects none of them."""
