"""One computation of a prompt for all of its completions."""
