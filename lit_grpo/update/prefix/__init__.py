"""How a prompt is computed once for all of its completions."""
