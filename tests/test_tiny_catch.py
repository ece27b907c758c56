"""The embedded policy of the game: what is shipped, the script that has made it, and how it plays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_tiny import configs, weights

from benchmarks.make_tiny import TinyRecipe, new_model
from lit_grpo.data.rendering import PromptRenderer
from lit_grpo.environments import Environments
from lit_grpo.plugins import fresh
from lit_grpo.policy import load_policy, load_tokenizer
from lit_grpo.policy.named import NAMED, TINY_CATCH
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.tasks.catch import Catch, CatchRows
from lit_grpo.types import Prompt, SamplingParams
from scripts.make_calculator import make_tokenizer
from scripts.make_catch import CATCH, CHARACTERS, PIECES, RECIPE, TEMPLATE, main

SHORT = TinyRecipe(
    hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1, num_steps=4, crowd_steps=2, batch_tokens=512
)


def test_the_script_makes_what_is_shipped_up_to_the_numbers_in_its_weights(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHARACTERS, tuple(PIECES.values()), TEMPLATE)
    new_model(RECIPE, seed=0, tokenizer=tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert configs(tmp_path) == configs(NAMED[TINY_CATCH].folder)
    made, shipped = weights(tmp_path), weights(NAMED[TINY_CATCH].folder)
    assert {name: weight.shape for name, weight in made.items()} == {
        name: weight.shape for name, weight in shipped.items()
    }


def test_it_writes_calls_and_mostly_misses_the_ball() -> None:
    model, tokenizer = load_policy("tiny_catch"), load_tokenizer("tiny_catch")
    worker = fresh(Environments(factory=Catch))
    worker.prepare(tokenizer, {})
    rows = list(CatchRows(24, "validation").rows())
    rendered = [PromptRenderer(conversing=worker).render(row, tokenizer) for row in rows]
    prompts = [
        Prompt(f"validation/{number}", each.token_ids, each.text, row, messages=each.messages)
        for number, (row, each) in enumerate(zip(rows, rendered, strict=True))
    ]
    generator = SlotGenerator(48)
    generator.start(PolicySpec(model, tokenizer))
    generator.load_weights(model.named_parameters(), 0)
    sampling = SamplingParams(max_tokens=25, max_observed=256)
    groups, _ = RolloutLoop(generator, listeners=[worker]).collect(prompts, 2, sampling, seed=0)
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    worker.close()
    caught = [each.episode.reward for each in completions if each.episode is not None]
    assert sum(len(each.turns) == 5 for each in completions) >= 0.9 * len(completions)
    assert 0.05 < sum(reward == 1.0 for reward in caught) / len(completions) < 0.6


def test_the_script_warm_starts_a_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.make_catch.RECIPE", SHORT)
    main([str(tmp_path / "made")])
    assert "configs/catch.yaml trains it" in capsys.readouterr().out
    made: Any = load_policy(str(tmp_path / "made"))
    assert made.config.hidden_size == 32
    assert load_tokenizer(str(tmp_path / "made")).chat_template == TEMPLATE
    assert len(CATCH.alphabet) == made.config.vocab_size - 3
