"""Places of keys and values while completions are decoded, and the memory that they may take."""
