"""Where keys and values lie while completions are decoded, and how much memory they may take."""
