"""What is spent on which prompt: who is asked, how many completions each gets, and what earlier visits have shown."""
