"""What reward functions see of special tokens in completions."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from conftest import random_policy, save_tokenizer
from hand_made import as_groups, fit, make_module, make_rollout
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.rollout.vllm.streams import EngineRequests
from lit_grpo.types import Prompt, Request, SamplingParams

END, PAD = 1, 0
BITE = 3  # a digit of the alphabet, declared to be special below


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose tokenizer has a digit as a special token, in the place of ``<think>``."""
    path = tmp_path_factory.mktemp("special")
    save_tokenizer(path)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": [tokenizer.convert_ids_to_tokens(BITE)]})
    tokenizer.save_pretrained(path)
    random_policy().save_pretrained(path)
    return path


@pytest.fixture
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(folder))


def spec_of(tokenizer: PreTrainedTokenizerBase, keeps: bool) -> PolicySpec:
    return PolicySpec(random_policy(), tokenizer, keeps)


@pytest.mark.parametrize("keeps", [False, True])
def test_both_kinds_of_generators_give_such_text(tokenizer: PreTrainedTokenizerBase, keeps: bool) -> None:
    spec, sampling = spec_of(tokenizer, keeps), SamplingParams(max_tokens=40)
    slots = SlotGenerator(4)
    slots.start(spec)
    slots.load_weights(spec.module.named_parameters(), 1)
    ((group,), _) = RolloutLoop(slots).collect([Prompt("a", (2, 4), "")], 8, sampling, seed=0)
    completions = [rollout.completion for rollout in group.rollouts]
    bitten = [one for one in completions if BITE in one.token_ids_T.tolist()]
    assert bitten and all((str(tokenizer.convert_ids_to_tokens(BITE)) in one.text) == keeps for one in bitten)
    streams, events = EngineRequests(spec), StepEvents()
    stream = streams.open(Request(Prompt("b", (2,), ""), (0,), sampling), 1.0, "")
    stream.token_ids = completions[0].token_ids_T.tolist()
    assert spec.text_of(stream.token_ids) == completions[0].text
    stream.token_ids, stream.logprobs, stream.versions = [BITE, END], [0.0, 0.0], [1, 1]
    streams.finish(stream, "stop", events)
    assert events.finished[0].text == (tokenizer.convert_ids_to_tokens(BITE) if keeps else "")


@pytest.mark.parametrize(
    ("tokens", "keeps", "says"), [([BITE, END], False, 1), ([BITE], True, 0), ([4, END], False, 0)]
)
def test_a_run_says_once_which_special_tokens_no_reward_sees(
    folder: Path, tokenizer: PreTrainedTokenizerBase, tokens: list[int], keeps: bool, says: int
) -> None:
    module = make_module(folder, num_generations=2, keep_special_tokens=keeps)
    groups = as_groups([make_rollout([4], tokens, reward=float(n), sample_id=n) for n in range(2)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, groups, groups)
    said = [str(each.message) for each in caught if "special tokens" in str(each.message)]
    bite = tokenizer.convert_ids_to_tokens(BITE)
    sentence = (
        f"Completions hold the special tokens {bite}, which the text that reward functions get leaves out; "
        "set model.keep_special_tokens to true where a reward is to see them."
    )
    assert said == [sentence] * says
