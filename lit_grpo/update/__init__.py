"""How groups become one optimizer step after another."""
