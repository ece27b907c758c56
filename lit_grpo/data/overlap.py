"""Validation prompts that are also training prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lit_grpo.types import Prompt

LEAST_SHARE = 0.1  # of the validation prompts; in small data a few equal prompts are chance
REMEDY = "give data.validation rows that are held out, or leave it out"


def shared_validation(prompts: Mapping[str, Sequence[Prompt]]) -> str:
    """Say how many validation prompts are training prompts too; return an empty text if they are few."""
    held_out = prompts.get("validation", ())
    trained = {prompt.digest for prompt in prompts.get("train", ())}
    shared = sum(prompt.digest in trained for prompt in held_out)
    if not held_out or shared < LEAST_SHARE * len(held_out):
        return ""
    return f"{shared:,} of {len(held_out):,} prompts of data.validation are in data.train too"
