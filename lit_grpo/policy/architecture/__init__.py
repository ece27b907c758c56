"""Facts about a model's computation, found out by running it on a few tokens."""
