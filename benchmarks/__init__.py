"""Each claim measured beside a peer: ``python -m benchmarks.NAME``."""
