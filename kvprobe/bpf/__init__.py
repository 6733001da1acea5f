"""The kernel side: compose probes, load them with one of two loaders, read what they send."""
