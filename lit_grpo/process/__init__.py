"""What this process, and those that it starts, are told of the machine: how threads wait."""
