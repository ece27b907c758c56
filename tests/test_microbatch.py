"""Micro-batches: layout, and random invariants of the packing."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hand_made import make_rollout

from lit_grpo.types import MicroBatch, PackedGroup, Rollout
from lit_grpo.update.microbatch import make_micro_batch, make_micro_batches, num_row_tokens

Row = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], float]


def test_a_packed_micro_batch_holds_each_prompt_once_and_points_at_predecessors() -> None:
    rollouts = [
        make_rollout([5, 6], [7, 8], logprobs=[-0.5, -0.25]),
        make_rollout([5], [9], logprobs=[-2.0]),
        make_rollout([5, 6], [9, 4, 3], logprobs=[-1.0, -3.0, -4.0]),
    ]
    micro_batch = make_micro_batch(rollouts, [1.5, -0.5, 2.0])
    assert micro_batch.input_ids_BT.tolist() == [[5, 6, 7, 9, 4, 5]]  # the last token of a completion predicts nothing
    assert micro_batch.position_ids_BT.tolist() == [[0, 1, 2, 2, 3, 0]]
    assert micro_batch.groups == (PackedGroup(0, 2, (1, 2)), PackedGroup(5, 1, (0,)))
    assert micro_batch.source_N.tolist() == [1, 2, 1, 3, 4, 5]
    assert micro_batch.target_ids_N.tolist() == [7, 8, 9, 4, 3, 9]
    assert micro_batch.sampled_logprobs_N.tolist() == [-0.5, -0.25, -1.0, -3.0, -4.0, -2.0]
    assert micro_batch.advantages_C.tolist() == [1.5, 2.0, -0.5]
    assert micro_batch.lengths_C.tolist() == [2, 3, 1]


def test_in_rows_each_completion_has_a_prompt_of_its_own() -> None:
    rollouts = [make_rollout([5, 6], [7, 8, 2]), make_rollout([5], [9])]
    micro_batch = make_micro_batch(rollouts, [1.5, -0.5], shared_prefix=False)
    assert micro_batch.input_ids_BT.tolist() == [[5, 6, 7, 8], [5, 0, 0, 0]]
    assert micro_batch.position_ids_BT.tolist() == [[0, 1, 2, 3]] * 2
    assert micro_batch.groups == ()
    assert micro_batch.source_N.tolist() == [1, 2, 3, 4]
    assert micro_batch.target_ids_N.tolist() == [7, 8, 2, 9]
    assert micro_batch.lengths_C.tolist() == [3, 1]


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_without_rollouts_it_is_one_row_of_one_token_and_no_completion(shared_prefix: bool) -> None:
    micro_batch = make_micro_batch([], [], shared_prefix)
    assert micro_batch.input_ids_BT.tolist() == micro_batch.position_ids_BT.tolist() == [[0]]
    assert micro_batch.groups == ((PackedGroup(0, 1, ()),) if shared_prefix else ())
    for name in ("source_N", "target_ids_N", "sampled_logprobs_N", "advantages_C", "lengths_C"):
        assert getattr(micro_batch, name).shape == (0,), name
    assert micro_batch.source_N.dtype == micro_batch.target_ids_N.dtype == torch.int64
    assert micro_batch.sampled_logprobs_N.dtype == micro_batch.advantages_C.dtype == torch.float32


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_an_id_that_looks_like_padding_is_a_token_like_any_other(shared_prefix: bool) -> None:
    micro_batch = make_micro_batch([make_rollout([0, 0], [0, 0, 0])], [1.0], shared_prefix)
    assert micro_batch.input_ids_BT.tolist() == [[0, 0, 0, 0]]
    assert micro_batch.source_N.tolist() == [1, 2, 3]


def test_moving_to_a_device_moves_every_field() -> None:
    here = make_micro_batch([make_rollout([5], [9])], [1.0])
    moved = vars(here.to("meta"))
    assert moved.pop("groups") == here.groups
    assert {value.device.type for value in moved.values()} == {"meta"}


def test_no_rollouts_make_no_micro_batch() -> None:
    assert len(make_micro_batches([], [], 8)) == 0


def test_micro_batches_are_laid_out_when_asked_for_and_empty_ones_follow() -> None:
    made = make_micro_batches([make_rollout([5], [7] * length) for length in (3, 2)], [1.0, 2.0], 5).and_empty(2)
    assert made[0] is not made[0]
    assert [batch.lengths_C.tolist() for batch in made] == [[3], [2], [], []]
    assert [batch.rows_C.tolist() for batch in made[1:3]] == [[1], []]


def test_in_rows_padding_counts_towards_the_budget() -> None:
    rollouts = [make_rollout([5], [7] * length) for length in (5, 1, 1)]  # rows of 6, 2 and 2 tokens
    made = make_micro_batches(rollouts, [1.0, 2.0, 3.0], 11, shared_prefix=False)
    assert [batch.lengths_C.tolist() for batch in made] == [[5], [1, 1]]  # two rows of 6 would be too many


def test_a_group_that_fits_is_never_split_and_a_larger_one_takes_its_prompt_along() -> None:
    fits, large = [make_rollout([5] * 4, [7] * 6)] * 2, [make_rollout([6] * 5, [7] * 7)] * 4
    made = make_micro_batches([*large, *fits], [0.0] * 6, 20)  # 4 + 2 x 6 = 16 tokens; 5 + 4 x 7 = 33 in two of 19
    assert [batch.groups for batch in made] == [(PackedGroup(0, 5, (6, 6)),)] * 2 + [(PackedGroup(0, 4, (5, 5)),)]


def test_what_is_left_of_a_split_group_shares_a_micro_batch_with_another() -> None:
    large, small = [make_rollout([6] * 5, [7] * 7)] * 3, [make_rollout([5], [7] * 7)]
    made = make_micro_batches([*large, *small], [0.0] * 4, 20)
    assert [len(batch.groups) for batch in made] == [2, 1]
    assert sorted(length for batch in made for length in batch.lengths_C.tolist()) == [7] * 4


def test_a_rollout_longer_than_the_budget_is_an_error_that_says_what_works() -> None:
    rollouts = [make_rollout([5, 6, 7], [8] * 4), make_rollout([5], [8] * 2)]
    with pytest.raises(ValueError, match=r"max_tokens_per_micro_batch is 6, .* has 7 tokens; set it to at least 7\."):
        make_micro_batches(rollouts, [1.0, 1.0], 6)
    assert len(make_micro_batches(rollouts, [1.0, 1.0], 7)) == 2


def rows_of(micro_batch: MicroBatch) -> list[Row]:
    """Prompt, completion, log-probs and advantage of each completion, read back through the N axis alone."""
    tokens, positions = micro_batch.input_ids_BT.flatten(), micro_batch.position_ids_BT.flatten()
    columns = zip(micro_batch.source_N, micro_batch.target_ids_N, micro_batch.sampled_logprobs_N, strict=True)
    rows = []
    for length, advantage in zip(micro_batch.lengths_C.tolist(), micro_batch.advantages_C.tolist(), strict=True):
        sources, targets, logprobs = zip(*(next(columns) for _ in range(length)), strict=True)
        last = int(sources[0])
        prompt = tokens[last - int(positions[last]) : last + 1].tolist()
        assert positions[torch.stack(sources)].tolist() == list(range(len(prompt) - 1, len(prompt) - 1 + length))
        assert tokens[torch.stack(sources)].tolist() == [prompt[-1], *map(int, targets[:-1])]
        rows.append((tuple(prompt), tuple(map(int, targets)), tuple(map(float, logprobs)), advantage))
    return rows


def row_of(rollout: Rollout, advantage: float) -> Row:
    completion = rollout.completion
    tokens, logprobs = tuple(completion.token_ids_T.tolist()), tuple(completion.logprobs_T.tolist())
    return (rollout.prompt.token_ids, tokens, logprobs, float(torch.tensor(advantage)))


def num_budgeted(micro_batch: MicroBatch) -> int:
    """What a micro-batch takes of the budget."""
    if micro_batch.groups:
        return sum(group.prompt_tokens for group in micro_batch.groups) + int(micro_batch.lengths_C.sum())
    return len(micro_batch.lengths_C) * (micro_batch.input_ids_BT.shape[1] + 1)


@pytest.mark.parametrize("shared_prefix", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_lost_nothing_is_over_budget_and_the_largest_come_first(seed: int, shared_prefix: bool) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, 30) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 6))]
    rollouts = [
        make_rollout(
            rng.choice(prompts),
            completion := [rng.randrange(0, 30) for _ in range(rng.randint(1, 20))],
            logprobs=[-rng.random() for _ in completion],
        )
        for _ in range(rng.randint(1, 40))
    ]
    advantages = [rng.gauss(0, 1) for _ in rollouts]
    longest = max(map(num_row_tokens, rollouts))
    budget = longest + rng.randrange(0, 3 * longest)
    micro_batches = make_micro_batches(rollouts, advantages, budget, shared_prefix)

    rows = [row for micro_batch in micro_batches for row in rows_of(micro_batch)]
    assert sorted(rows) == sorted(map(row_of, rollouts, advantages))
    sizes = [num_budgeted(micro_batch) for micro_batch in micro_batches]
    assert all(size <= budget for size in sizes)
    if shared_prefix:
        assert sizes == sorted(sizes, reverse=True)
        assert all(
            smaller + larger > budget for smaller, larger in pairwise(sorted(sizes))
        )  # no two would fit into one
    else:
        lengths = [len(prompt) + len(completion) for prompt, completion, _, _ in rows]
        assert lengths == sorted(lengths, reverse=True)
