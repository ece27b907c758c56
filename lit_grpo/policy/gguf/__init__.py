"""Policies in GGUF files, the format of llama.cpp."""

from lit_grpo.policy.gguf.file import GGUFFile, gguf_file, unreadable, without_bars
from lit_grpo.policy.gguf.header import ROPE_FACTORS, GGUFError, Header

__all__ = ["ROPE_FACTORS", "GGUFError", "GGUFFile", "Header", "gguf_file", "unreadable", "without_bars"]
