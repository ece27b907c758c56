"""A completion is packed, and comes out as the tensors that went in."""

from __future__ import annotations

import torch

from lit_grpo.types import Completion, Prompt, Request, SamplingParams

REQUEST = Request(Prompt("a", (2, 3), ""), (4,), SamplingParams())


def make(ids: list[int], logprobs: list[float], versions: list[int]) -> Completion:
    tensors = torch.tensor(ids, dtype=torch.int64), torch.tensor(logprobs), torch.tensor(versions, dtype=torch.int64)
    return Completion(REQUEST, *tensors, "stop", "text", 0.5)


def test_tensors_can_be_assigned_and_logprobs_written_to() -> None:
    completion = make([5, 6, 1], [-0.25, -3.5, 0.0], [3, 3, 4])
    completion.logprobs_T[1] -= 1.0
    assert completion.logprobs_T.tolist() == [-0.25, -4.5, 0.0]
    completion.token_ids_T = completion.token_ids_T[:2]
    completion.logprobs_T = completion.logprobs_T[:2]
    completion.versions_T = completion.versions_T[:2]
    assert completion.token_ids_T.tolist() == [5, 6] and completion.logprobs_T.tolist() == [-0.25, -4.5]
    assert completion.versions_T.tolist() == [3, 3]


def test_tensors_asked_for_within_inference_mode_take_part_in_autograd() -> None:
    with torch.inference_mode():
        logprobs_T = make([5, 6, 1], [-0.25, -3.5, 0.0], [3, 3, 4]).logprobs_T
    weight = torch.ones(3, requires_grad=True)
    (weight * logprobs_T).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [-0.25, -3.5, 0.0]


def test_the_digest_of_a_prompt_is_that_of_what_the_policy_reads() -> None:
    prompt = Prompt("a", (2, 3, 4), "text", {"answer": "7"})
    assert prompt.digest == Prompt("b", (2, 3, 4), "another text", visit=1).digest
    others = [Prompt("a", token_ids, "text") for token_ids in ((2, 3), (3, 2, 4), (2, 3, 4, 0), (2**31, 3, 4), ())]
    assert len({prompt.digest, *(other.digest for other in others)}) == 6
