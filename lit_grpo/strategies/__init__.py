"""Lightning strategies that this project adds."""
