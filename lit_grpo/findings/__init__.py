"""Problems of learning that a run's metrics show, each as one sentence, during the run and after it."""
