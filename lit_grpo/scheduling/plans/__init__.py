"""In which order completions are decoded."""
