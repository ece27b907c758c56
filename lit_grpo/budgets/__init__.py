"""Budgets of prompts: the choice of prompts, the number of completions of each, and the memory of earlier visits."""
