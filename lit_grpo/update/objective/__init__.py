"""What an optimizer step minimises."""
