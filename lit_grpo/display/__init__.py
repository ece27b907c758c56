"""The output of a run on the terminal: live lines, samples, and a card before the first update and after the last."""
