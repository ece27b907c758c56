"""vLLM servers on whichever machines of a Ray cluster have room."""
