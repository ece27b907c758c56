"""How long completions are going to be."""
