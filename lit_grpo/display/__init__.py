"""What a run shows in the terminal: live lines while it goes on, samples, and a card before and after."""
