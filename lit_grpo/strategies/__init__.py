"""Lightning strategies beside its own."""
