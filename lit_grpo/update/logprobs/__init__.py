"""What the policy and its reference think of the tokens."""
