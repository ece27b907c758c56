"""Settings of this process and of those that it starts: how threads wait."""
