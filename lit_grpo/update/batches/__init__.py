"""What goes through the policy together."""
