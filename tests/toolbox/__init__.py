"""What tests, benchmarks and load tools share."""
