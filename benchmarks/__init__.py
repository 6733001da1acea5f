"""What kvprobe costs, measured beside its rivals; ``python -m benchmarks``."""
