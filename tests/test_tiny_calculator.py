"""The embedded policy of the task with a tool: what is shipped, the script that has made it, and what it says."""

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
from lit_grpo.policy.named import NAMED, TINY_CALCULATOR
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rewards import ExactMatch
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.tasks.calculator import ANSWER_PATTERN, CalculatorRows, calculate
from lit_grpo.types import Prompt, SamplingParams
from scripts.make_calculator import CALCULATOR, RECIPE, main, make_tokenizer

SHORT = TinyRecipe(
    hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1, num_steps=4, crowd_steps=2, batch_tokens=256
)


def test_the_script_makes_what_is_shipped_up_to_the_numbers_in_its_weights(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    new_model(RECIPE, seed=0, tokenizer=tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert configs(tmp_path) == configs(NAMED[TINY_CALCULATOR].folder)
    made, shipped = weights(tmp_path), weights(NAMED[TINY_CALCULATOR].folder)
    assert {name: weight.shape for name, weight in made.items()} == {
        name: weight.shape for name, weight in shipped.items()
    }


def test_some_of_it_calls_the_tool_and_repeats_what_it_says() -> None:
    """At most 40% of its answers are right, and those are what the calculator has said."""
    model, tokenizer = load_policy("tiny_calculator"), load_tokenizer("tiny_calculator")
    worker = fresh(Environments(tools=[calculate]))
    worker.prepare(tokenizer, {})
    rows = list(CalculatorRows(48, "validation").rows())
    rendered = [PromptRenderer(conversing=worker).render(row, tokenizer) for row in rows]
    prompts = [
        Prompt(f"validation/{number}", each.token_ids, each.text, row, messages=each.messages)
        for number, (row, each) in enumerate(zip(rows, rendered, strict=True))
    ]
    generator = SlotGenerator(48)
    generator.start(PolicySpec(model, tokenizer))
    generator.load_weights(model.named_parameters(), 0)
    sampling = SamplingParams(max_tokens=48, max_observed=48)
    groups, _ = RolloutLoop(generator, listeners=[worker]).collect(prompts, 2, sampling, seed=0)
    worker.close()
    score = ExactMatch(pattern=ANSWER_PATTERN)
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    right = [each for each in completions if score(each.text, answer=each.request.prompt.columns["answer"])]
    assert 0.05 < len(right) / len(completions) <= 0.4
    assert sum(len(each.turns) > 1 for each in right) >= 0.9 * len(right)


def test_the_script_warm_starts_a_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.make_calculator.RECIPE", SHORT)
    main([str(tmp_path / "made")])
    assert "configs/calculator.yaml trains it" in capsys.readouterr().out
    made: Any = load_policy(str(tmp_path / "made"))
    assert made.config.hidden_size == 32
    assert load_tokenizer(str(tmp_path / "made")).chat_template == make_tokenizer().chat_template
    assert len(CALCULATOR.alphabet) == made.config.vocab_size - 3
