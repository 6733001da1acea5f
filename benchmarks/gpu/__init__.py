"""What GPU sampling costs, and whether its figures are true: ``python -m benchmarks.gpu``."""
