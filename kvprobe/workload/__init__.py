"""A load generator with the I/O shape of an inference engine, and readers of request traces."""
