"""Prompts with images: samples, log-probs and gradients beside the model's own forward, and what is never shared."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import table_rows
from seeing import FAMILIES, load, make_policy, plain_logits, png, read
from test_slots import decode

from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.sampling import request_key, sample_tokens, uniform
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import Completion, Request, Rollout, SamplingParams
from lit_grpo.update.batches.layout import in_order
from lit_grpo.update.batches.microbatch import least_tokens, make_micro_batches
from lit_grpo.update.logprobs.forward import micro_batch_logprobs
from lit_grpo.update.prefix.sharing import shared_prefixes

SAMPLING = SamplingParams(max_tokens=8)


@pytest.mark.parametrize("name", table_rows(FAMILIES, ["qwen3_vl"]))
def test_samples_log_probs_and_gradients_are_those_of_the_models_own_forward(name: str, tmp_path: Path) -> None:
    """Two images in one prompt, none in another, and two prompts of equal tokens with other pixels."""
    model, tokenizer, vision = load(make_policy(name, tmp_path))
    prompts = [
        read(vision, tokenizer, name, "one # and # two", [png(32, 48, 0), png(64, 32, 1)]),
        read(vision, tokenizer, name, "plain", []),
        read(vision, tokenizer, name, "#?", [png(48, 48, 2)]),
        read(vision, tokenizer, name, "#?", [png(48, 48, 3)]),
    ]
    assert prompts[2].token_ids == prompts[3].token_ids and prompts[2].digest != prompts[3].digest
    generator = SlotGenerator(3, prefill_tokens=40)
    generator.start(PolicySpec(model, tokenizer))
    generator.load_weights(model.named_parameters(), 0)
    requests = [Request(prompt, (sample,), SAMPLING) for prompt in prompts for sample in range(2)]
    completions = [*decode(generator, requests).values()]
    for completion in completions:
        keys = np.array([request_key(completion.request)], dtype=np.uint64)
        uniform_T = torch.from_numpy(uniform(keys[:, None], np.arange(completion.num_tokens))[0])
        with torch.no_grad():
            logits_TV = plain_logits(model, vision, completion.request.prompt, completion.token_ids_T)
        tokens_T, logprobs_T, _ = sample_tokens(logits_TV, SAMPLING, uniform_T)
        assert torch.equal(tokens_T, completion.token_ids_T)
        assert torch.allclose(logprobs_T, completion.logprobs_T, atol=5e-5)
    again = [
        Request(each.request.prompt, each.request.path, SAMPLING, prefix=each.until(3))
        for each in completions
        if each.num_tokens > 3
    ]
    resumed = decode(generator, again)
    for completion in completions:
        if (other := resumed.get(completion.request.key)) is not None:
            assert torch.equal(other.token_ids_T, completion.token_ids_T)
    expected = _gradient(model, partial(_plain_loss, model, vision, completions))
    rollouts = [Rollout(each.request.prompt, each, {}, 0.0) for each in completions]
    for shared, most_tokens in ((True, 2000), (True, least_tokens(rollouts, True)), (False, 2000)):
        with shared_prefixes(model) if shared else nullcontext():
            actual = _gradient(model, partial(_backward, model, rollouts, shared, most_tokens))
        assert actual.keys() == expected.keys()
        gap = sum(float((actual[each] - expected[each]).square().sum()) for each in expected)
        assert gap**0.5 < 1e-4 * sum(float(each.square().sum()) for each in expected.values()) ** 0.5
    assert any("vis" in each for each in expected)


def _plain_loss(model: Any, vision: Any, completions: Sequence[Completion]) -> None:
    for each in completions:
        logprobs_TV = plain_logits(model, vision, each.request.prompt, each.token_ids_T).log_softmax(-1)
        logprobs_T = logprobs_TV.gather(-1, each.token_ids_T[:, None]).squeeze(-1)
        (logprobs_T * torch.sin(each.token_ids_T.float())).sum().backward()


def _backward(model: Any, rollouts: Sequence[Rollout], shared: bool, most_tokens: int) -> None:
    rows = make_micro_batches(rollouts, most_tokens, shared)
    assert not shared or (len(rows) > 1) == (most_tokens < 2000)
    for row in in_order(rows):
        filled = row.filled(rollouts)
        logprobs_N, _ = micro_batch_logprobs(model, filled, 1.0)
        (logprobs_N * torch.sin(filled.columns["target_id"].float())).sum().backward()


def _gradient(model: Any, run: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    run()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
