"""What a run's metrics show to be wrong with its learning, each as one sentence: while it goes, and after it."""
