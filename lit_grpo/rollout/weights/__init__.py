"""How weights reach a generator, and the proof that they arrived."""
