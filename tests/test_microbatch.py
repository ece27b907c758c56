"""Micro-batches: layout, and random invariants of the packing."""

from __future__ import annotations

import random

import pytest
import torch
from hand_made import make_rollout

from lit_grpo.types import MicroBatch, Rollout
from lit_grpo.update.microbatch import make_micro_batch, make_micro_batches, num_row_tokens

Row = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], float]


def test_a_micro_batch_points_at_the_predecessor_of_each_completion_token() -> None:
    rollouts = [make_rollout([5, 6], [7, 8], logprobs=[-0.5, -0.25]), make_rollout([5], [9], logprobs=[-2.0])]
    micro_batch = make_micro_batch(rollouts, [1.5, -0.5])
    assert micro_batch.input_ids_BT.tolist() == [[5, 6, 7, 8], [5, 9, 0, 0]]
    assert micro_batch.row_N.tolist() == [0, 0, 1]
    assert micro_batch.column_N.tolist() == [1, 2, 0]
    assert micro_batch.target_ids_N.tolist() == [7, 8, 9]
    assert micro_batch.sampled_logprobs_N.tolist() == [-0.5, -0.25, -2.0]
    assert micro_batch.advantages_C.tolist() == [1.5, -0.5]
    assert micro_batch.lengths_C.tolist() == [2, 1]


def test_without_rollouts_it_is_one_row_of_one_token_and_no_completion() -> None:
    micro_batch = make_micro_batch([], [])
    assert micro_batch.input_ids_BT.tolist() == [[0]]
    for name in ("row_N", "column_N", "target_ids_N", "sampled_logprobs_N", "advantages_C", "lengths_C"):
        assert getattr(micro_batch, name).shape == (0,), name
    assert micro_batch.row_N.dtype == micro_batch.column_N.dtype == micro_batch.target_ids_N.dtype == torch.int64
    assert micro_batch.sampled_logprobs_N.dtype == micro_batch.advantages_C.dtype == torch.float32


def test_an_id_that_looks_like_padding_is_a_token_like_any_other() -> None:
    micro_batch = make_micro_batch([make_rollout([0, 0], [0, 0, 0])], [1.0])
    assert micro_batch.input_ids_BT.tolist() == [[0, 0, 0, 0, 0]]
    assert micro_batch.column_N.tolist() == [1, 2, 3]


def test_moving_to_a_device_moves_every_field() -> None:
    moved = make_micro_batch([make_rollout([5], [9])], [1.0]).to("meta")
    assert {value.device.type for value in vars(moved).values()} == {"meta"}


def test_no_rollouts_make_no_micro_batch() -> None:
    assert make_micro_batches([], [], 8) == []


def test_padding_counts_towards_the_budget() -> None:
    rollouts = [make_rollout([5], [7] * length) for length in (5, 1, 1)]  # rows of 6, 2 and 2 tokens
    shapes = [tuple(batch.input_ids_BT.shape) for batch in make_micro_batches(rollouts, [1.0, 2.0, 3.0], 11)]
    assert shapes == [(1, 6), (2, 2)]  # a row of 2 beside that of 6 would be padded to 6, and 12 is too many


def test_a_rollout_longer_than_the_budget_is_an_error_that_says_what_works() -> None:
    rollouts = [make_rollout([5, 6, 7], [8] * 4), make_rollout([5], [8] * 2)]
    with pytest.raises(ValueError, match=r"max_tokens_per_micro_batch is 6, .* has 7 tokens; set it to at least 7\."):
        make_micro_batches(rollouts, [1.0, 1.0], 6)
    assert len(make_micro_batches(rollouts, [1.0, 1.0], 7)) == 2


def rows_of(micro_batch: MicroBatch) -> list[Row]:
    """Prompt, completion, log-probs and advantage of each row, read back through the N axis alone."""
    rows = []
    for row in range(len(micro_batch.lengths_C)):
        mine = micro_batch.row_N == row
        first = int(micro_batch.column_N[mine][0]) + 1
        assert (micro_batch.column_N[mine] + 1).tolist() == list(range(first, first + int(mine.sum())))
        length = int(micro_batch.lengths_C[row])
        assert length == int(mine.sum())
        tokens = micro_batch.input_ids_BT[row].tolist()
        assert tokens[first : first + length] == micro_batch.target_ids_N[mine].tolist()
        assert not any(tokens[first + length :])
        logprobs = tuple(micro_batch.sampled_logprobs_N[mine].tolist())
        completion = tuple(tokens[first : first + length])
        rows.append((tuple(tokens[:first]), completion, logprobs, float(micro_batch.advantages_C[row])))
    return rows


def row_of(rollout: Rollout, advantage: float) -> Row:
    completion = rollout.completion
    tokens, logprobs = tuple(completion.token_ids_T.tolist()), tuple(completion.logprobs_T.tolist())
    return (rollout.prompt.token_ids, tokens, logprobs, float(torch.tensor(advantage)))


@pytest.mark.parametrize("seed", range(80))
def test_nothing_is_lost_nothing_is_over_budget_and_the_longest_come_first(seed: int) -> None:
    rng = random.Random(seed)
    rollouts = [
        make_rollout(
            [rng.randrange(1, 30) for _ in range(rng.randint(1, 9))],
            completion := [rng.randrange(0, 30) for _ in range(rng.randint(1, 20))],
            logprobs=[-rng.random() for _ in completion],
        )
        for _ in range(rng.randint(1, 40))
    ]
    advantages = [rng.gauss(0, 1) for _ in rollouts]
    longest = max(map(num_row_tokens, rollouts))
    budget = longest + rng.randrange(0, 3 * longest)
    micro_batches = make_micro_batches(rollouts, advantages, budget)

    rows = [row for micro_batch in micro_batches for row in rows_of(micro_batch)]
    assert sorted(rows) == sorted(map(row_of, rollouts, advantages))
    assert all(micro_batch.input_ids_BT.numel() <= budget for micro_batch in micro_batches)
    places = [place for micro_batch in micro_batches for place in micro_batch.rows_C.tolist()]
    assert rows == [row_of(rollouts[place], advantages[place]) for place in places]
    lengths = [len(prompt) + len(completion) for prompt, completion, _, _ in rows]
    assert lengths == sorted(lengths, reverse=True)
    for micro_batch in micro_batches:
        (prompt, completion, _, _), num_columns = rows_of(micro_batch)[0], micro_batch.input_ids_BT.shape[1]
        assert num_columns == len(prompt) + len(completion)  # no more padding than the longest row asks for
    for micro_batch in micro_batches[:-1]:
        assert micro_batch.input_ids_BT.numel() + micro_batch.input_ids_BT.shape[1] > budget  # no more row fits
