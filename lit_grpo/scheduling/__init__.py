"""What is decoded next. Pure: no torch, no lightning, no transformers."""
