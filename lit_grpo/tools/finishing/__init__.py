"""The end of a run: a folder for other people, with the policy, a model card, and GGUF files for llama.cpp."""
