"""What a model computes beside what its layers are called: found out by running it on next to nothing."""
