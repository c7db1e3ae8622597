"""Code shared by tests, benchmarks and load tools."""
