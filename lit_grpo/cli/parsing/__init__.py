"""What the command line was given: names and fields resolved, checked, and refused in a sentence."""
