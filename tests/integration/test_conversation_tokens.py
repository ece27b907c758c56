"""Tokens trained on are the tokens sampled, by every generator and chat template."""

from __future__ import annotations

import pytest
from conftest import table_rows

from tests.doubles.conversation_check import NUM_CONVERSATIONS, NUM_REWRITTEN, check, wrong
from tests.doubles.conversations import FAMILIES, GENERATORS, play, template_of

FEW = 6
OF_VLLM = [name for name in GENERATORS if name != "slots"]
REWRITTEN = [(generator, "qwen3", NUM_REWRITTEN) for generator in OF_VLLM]
TABLE = [(generator, family, NUM_CONVERSATIONS) for generator in OF_VLLM for family in FAMILIES]
QUICK = ("vLLM in process", "smollm2", FEW)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("generator", "family", "num_conversations"), table_rows([QUICK, *TABLE, *REWRITTEN], quick=[QUICK])
)
def test_what_vllm_samples_in_conversations_is_what_is_trained_on(
    generator: str, family: str, num_conversations: int, forked_servers: None
) -> None:
    """That of the slots is in ``test_environment_tokens.py``."""
    if template_of(family) is None:
        pytest.skip("TRL, whose wheel has the templates, is not installed")
    history = "rerendered" if num_conversations == NUM_REWRITTEN else "appended"
    assert wrong(check(play(family, GENERATORS[generator], num_conversations, history)), generator) == []
