"""What a plan would make of recorded or made-up lengths."""
