"""Micro-batches: layout, and random invariants of the packing."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import table_rows
from hand_made import make_micro_batch, make_rollout

from lit_grpo.types import Completion, Rollout
from lit_grpo.update.batches.layout import PackedRow, empty_row, in_order
from lit_grpo.update.batches.microbatch import least_tokens, make_micro_batches
from lit_grpo.update.prefix.layout import Stretch

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
    assert micro_batch.stretches == (
        Stretch(0, 0, 2, last=2),
        Stretch(2, 2, 1, last=1),
        Stretch(3, 2, 2, last=2),
        Stretch(5, 0, 1, last=3),
    )
    assert micro_batch.columns["source"].tolist() == [1, 2, 1, 3, 4, 5]
    assert micro_batch.columns["target_id"].tolist() == [7, 8, 9, 4, 3, 9]
    assert micro_batch.sampled_logprobs_N.tolist() == [-0.5, -0.25, -1.0, -3.0, -4.0, -2.0]
    assert micro_batch.advantages_N.tolist() == [1.5, 1.5, 2.0, 2.0, 2.0, -0.5]
    assert micro_batch.lengths_C.tolist() == [2, 3, 1]


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_the_tokens_of_a_completion_may_have_advantages_of_their_own(shared_prefix: bool) -> None:
    """Two segments of one completion, of which the second is not wholly trained on, beside one with one advantage."""
    segments, plain = make_rollout([5, 6], [7, 8, 9, 4]), make_rollout([5, 6], [9, 3], sample_id=1)
    whole, trained_T = segments.completion, torch.tensor([True, True, False, True])
    segments.completion = Completion(
        whole.request, whole.token_ids_T, whole.logprobs_T, whole.versions_T, "stop", trained_T=trained_T
    )
    micro_batch = make_micro_batch([segments, plain], [torch.tensor([0.5, 0.5, -1.0]), 2.0], shared_prefix)
    assert micro_batch.columns["target_id"].tolist() == [7, 8, 4, 9, 3]
    assert micro_batch.advantages_N.tolist() == [0.5, 0.5, -1.0, 2.0, 2.0]
    with pytest.raises(RuntimeError, match="expanded size"):
        make_micro_batch([segments], [torch.tensor([0.5, 0.5, 0.5, -1.0])], shared_prefix)


def test_in_rows_each_completion_has_a_prompt_of_its_own() -> None:
    rollouts = [make_rollout([5, 6], [7, 8, 2]), make_rollout([5], [9])]
    micro_batch = make_micro_batch(rollouts, [1.5, -0.5], shared_prefix=False)
    assert micro_batch.input_ids_BT.tolist() == [[5, 6, 7, 8], [5, 0, 0, 0]]
    assert micro_batch.position_ids_BT.tolist() == [[0, 1, 2, 3]] * 2
    assert micro_batch.stretches == ()
    assert micro_batch.columns["source"].tolist() == [1, 2, 3, 4]
    assert micro_batch.columns["target_id"].tolist() == [7, 8, 2, 9]
    assert micro_batch.lengths_C.tolist() == [3, 1]


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_without_rollouts_it_is_one_row_of_one_token_and_no_completion(shared_prefix: bool) -> None:
    micro_batch = make_micro_batch([], [], shared_prefix)
    assert micro_batch.input_ids_BT.tolist() == micro_batch.position_ids_BT.tolist() == [[0]]
    assert micro_batch.stretches == ((Stretch(0, 0, 1, last=0),) if shared_prefix else ())
    assert micro_batch.weight == (0.0 if shared_prefix else 1.0)
    assert {values.shape for values in micro_batch.columns.values()} == {(0,)}
    assert micro_batch.columns["source"].dtype == micro_batch.columns["target_id"].dtype == torch.int64
    assert micro_batch.sampled_logprobs_N.dtype == micro_batch.advantages_N.dtype == torch.float32


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_an_id_that_looks_like_padding_is_a_token_like_any_other(shared_prefix: bool) -> None:
    micro_batch = make_micro_batch([make_rollout([0, 0], [0, 0, 0])], [1.0], shared_prefix)
    assert micro_batch.input_ids_BT.tolist() == [[0, 0, 0, 0]]
    assert micro_batch.columns["source"].tolist() == [1, 2, 3]


def test_moving_to_a_device_moves_every_column() -> None:
    here = make_micro_batch([make_rollout([5], [9])], [1.0])
    there, tensors = here.to("meta"), ("input_ids_BT", "position_ids_BT", "columns")
    assert all(its is getattr(here, name) for name, its in vars(there).items() if name not in tensors)
    assert there.columns.keys() == {*here.columns, "labels", "starts"}
    moved = there.input_ids_BT, there.position_ids_BT, *there.columns.values()
    assert {values.device.type for values in moved} == {"meta"} and here.to("cpu") is here


def test_no_rollouts_make_no_micro_batch() -> None:
    assert len(make_micro_batches([], 8)) == 0


def test_micro_batches_are_laid_out_once_and_empty_ones_follow() -> None:
    rollouts = [make_rollout([n], [7] * n) for n in (3, 2)]
    made = [*make_micro_batches(rollouts, 6), empty_row(True), empty_row(True)]
    assert next(in_order(made)) is made[0]
    rollouts[0].advantage, rollouts[1].advantage = 1.0, 2.0
    first = [row.filled(rollouts) for row in made]
    rollouts[0].columns["token_advantage"], rollouts[1].advantage = torch.tensor([0.5, 0.25, 0.0]), 3.0
    for rollout in rollouts:
        rollout.columns["mask"] = torch.arange(rollout.completion.num_trained) > 0
    others = [row.filled(rollouts) for row in made]
    assert [batch.advantages_N.tolist() for batch in first] == [[1.0] * 3, [2.0] * 2, [], []]
    assert [batch.advantages_N.tolist() for batch in others] == [[0.5, 0.25, 0.0], [3.0] * 2, [], []]
    masks = [batch.columns["mask"].tolist() for batch in others if "mask" in batch.columns]
    assert masks == [[False, True, True], [False, True]] and "mask" not in next(iter(first)).columns
    assert all(one.input_ids_BT is other.input_ids_BT for one, other in zip(made, others, strict=True))
    assert [batch.lengths_C.tolist() for batch in made] == [[3], [2], [], []]
    assert [batch.rows for batch in made] == [[0], [1], [], []]


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_tokens_without_a_column_that_others_of_their_row_have_get_its_default(shared_prefix: bool) -> None:
    rollouts = [make_rollout([5, 6], [7, 8]), make_rollout([5, 6], [9, 4], sample_id=1)]
    rollouts[0].columns = {
        "mask": torch.tensor([False, True]),
        "weight": torch.tensor([0.5, 2.0]),
        "old_logprob": torch.tensor([-1.0, -2.0]),
    }
    columns = make_micro_batch(rollouts, [1.0, 2.0], shared_prefix).columns
    assert columns["mask"].tolist() == [False, True, True, True]
    assert columns["weight"].tolist() == [0.5, 2.0, 1.0, 1.0]
    torch.testing.assert_close(columns["old_logprob"], torch.tensor([-1.0, -2.0, math.nan, math.nan]), equal_nan=True)


def test_in_rows_padding_counts_towards_the_budget() -> None:
    rollouts = [make_rollout([5], [7] * length) for length in (5, 1, 1)]  # rows of 6, 2 and 2 tokens
    made = make_micro_batches(rollouts, 11, shared_prefix=False)
    assert [batch.lengths_C.tolist() for batch in made] == [[5], [1, 1]]  # two rows of 6 would be too many


def test_a_group_that_fits_is_never_split_and_the_last_micro_batch_of_a_larger_one_has_its_prompt() -> None:
    fits, large = [make_rollout([5] * 4, [7] * 6)] * 2, [make_rollout([6] * 5, [7] * 7)] * 4
    made = make_micro_batches([*large, *fits], 20)  # 4 + 2 x 6 = 16 tokens; 5 + 4 x 7 = 33 in two of 19
    first, second, third = made
    carried, prompt = Stretch(12, 0, 5, last=2, carried=True), Stretch(0, 0, 5, last=2)
    assert first.stretches == (carried, Stretch(0, 5, 6, last=1), Stretch(6, 5, 6, last=2))
    assert second.stretches == (prompt, Stretch(5, 5, 6, last=1), Stretch(11, 5, 6, last=2))
    assert third.stretches == (Stretch(0, 0, 4, last=2), Stretch(4, 4, 5, last=1), Stretch(9, 4, 5, last=2))
    (span,) = first.carried
    assert second.in_row == ((slice(0, 5), span),) and second.carried == third.carried == third.in_row == ()
    assert first.input_ids_BT.tolist() == [[7] * 12] and first.position_ids_BT.tolist() == [[*range(5, 11)] * 2]
    # behind the row, the prompt's last token
    assert first.columns["source"].tolist() == [12, *range(6), 12, *range(6, 12)]


def test_a_carried_prompt_needs_no_token_in_the_row() -> None:
    rollouts = [make_rollout([6] * 5, [7])] * 7
    first, second = make_micro_batches(rollouts, 8)
    assert first.stretches == (Stretch(1, 0, 5, last=0, carried=True), Stretch(0, 0, 1, last=1))
    assert first.weight == 0 and second.weight == 1
    assert first.input_ids_BT.tolist() == [[0]] and first.columns["source"].tolist() == [1] * 4
    assert second.stretches == (Stretch(0, 0, 5, last=0),) and second.columns["source"].tolist() == [4] * 3


def test_a_prompt_may_be_alone_in_its_row() -> None:
    rollouts = [make_rollout([6] * 5, [7] * 6)]
    first, second = make_micro_batches(rollouts, 6)
    assert first.stretches == (Stretch(5, 0, 5, last=1, carried=True), Stretch(0, 5, 5, last=1))
    assert first.columns["source"].tolist() == [5, *range(5)]
    assert second.stretches == (Stretch(0, 0, 5, last=0),) and second.lengths_C.tolist() == []
    assert second.in_row == ((slice(0, 5), first.carried[0]),)


def test_the_part_with_the_prompt_shares_a_micro_batch_with_another_group_and_the_others_come_before() -> None:
    large, small = [make_rollout([6] * 5, [7] * 7)] * 4, [make_rollout([5], [7])]
    made = list(make_micro_batches([*small, *large], 21))
    assert [[prompt.length for prompt, _ in prompts_and_spans(batch)] for batch in made] == [[5], [5, 1]]


def test_a_rollout_longer_than_the_budget_is_an_error_that_says_what_works() -> None:
    rollouts = [make_rollout([5, 6, 7], [8] * 4), make_rollout([5], [8] * 2)]
    for shared_prefix, least in [(True, 4), (False, 7)]:
        error = rf"max_tokens_per_micro_batch is {least - 1}, .* has {least} tokens; set it to at least {least}\."
        with pytest.raises(ValueError, match=error):
            make_micro_batches(rollouts, least - 1, shared_prefix)
    assert len(make_micro_batches(rollouts, 7, shared_prefix=False)) == 2
    assert len(make_micro_batches(rollouts, 4)) == 3


def prompts_and_spans(micro_batch: PackedRow) -> list[tuple[Stretch, Any]]:
    """Each prompt of a row, with its span where other rows see it; without a token that stands for nothing."""
    carried = iter(micro_batch.carried)
    in_row = {place.start: span for place, span in micro_batch.in_row}
    return [
        (stretch, next(carried) if stretch.carried else in_row.get(stretch.start))
        for stretch in micro_batch.stretches
        if stretch.first == 0 and (stretch.carried or micro_batch.weight)
    ]


def rows_of(micro_batch: PackedRow) -> list[Row]:
    """Prompt, completion, log-probs and advantage of each completion, read back through the N axis alone."""
    tokens, positions = micro_batch.input_ids_BT.flatten(), micro_batch.position_ids_BT.flatten()
    columns = zip(
        micro_batch.columns["source"], micro_batch.columns["target_id"], micro_batch.sampled_logprobs_N, strict=True
    )
    rows = []
    advantages = [each[0].item() for each in micro_batch.advantages_N.split(micro_batch.lengths_C.tolist())]
    for length, advantage in zip(micro_batch.lengths_C.tolist(), advantages, strict=True):
        sources, targets, logprobs = zip(*(next(columns) for _ in range(length)), strict=True)
        last, own = int(sources[0]), [int(source) for source in sources[1:]]
        if last >= len(tokens):
            prompt = list(micro_batch.carried[last - len(tokens)].token_ids)
        else:
            prompt = tokens[last - int(positions[last]) : last + 1].tolist()
        assert positions[own].tolist() == list(range(len(prompt), len(prompt) - 1 + length))
        assert tokens[own].tolist() == [*map(int, targets[:-1])]
        rows.append((tuple(prompt), tuple(map(int, targets)), tuple(map(float, logprobs)), advantage))
    return rows


@pytest.mark.parametrize("seed", range(30))
def test_a_prompt_is_in_the_row_of_the_last_micro_batch_that_has_responses_to_it(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[number] * rng.randint(1, 9) for number in range(1, 5)]
    rollouts = [make_rollout(rng.choice(prompts), [7] * rng.randint(1, 20)) for _ in range(40)]
    places: dict[tuple[int, ...], list[tuple[bool, Any]]] = {}
    for micro_batch in make_micro_batches(rollouts, rng.randint(20, 100)):
        row = micro_batch.input_ids_BT[0]
        for prompt, span in prompts_and_spans(micro_batch):
            ids = span.token_ids if prompt.carried else tuple(row[prompt.start : prompt.start + prompt.length].tolist())
            places.setdefault(ids, []).append((prompt.carried, span))
    for carried in places.values():
        assert [is_carried for is_carried, _ in carried] == [True] * (len(carried) - 1) + [False]
        assert len({id(prompt) for _, prompt in carried}) == 1
        assert (carried[0][1] is None) == (len(carried) == 1)


@pytest.mark.parametrize("num_groups", [4, 16, 64])
def test_few_prompts_are_carried_at_a_time_however_many_groups_there_are(num_groups: int) -> None:
    rng = random.Random(num_groups)
    rollouts = [
        make_rollout([number] * 8, [7] * rng.randint(4, 30)) for number in range(1, num_groups + 1) for _ in range(20)
    ]
    begun: set[int] = set()
    most = 0
    for micro_batch in make_micro_batches(rollouts, 64):
        for prompt, span in prompts_and_spans(micro_batch):
            if prompt.carried:
                begun.add(id(span))
            else:
                begun.discard(id(span))
        most = max(most, len(begun))
    assert 1 <= most <= 3


def row_of(rollout: Rollout) -> Row:
    completion = rollout.completion
    tokens, logprobs = tuple(completion.token_ids_T.tolist()), tuple(completion.logprobs_T.tolist())
    return (rollout.prompt.token_ids, tokens, logprobs, float(torch.tensor(rollout.advantage)))


def num_budgeted(micro_batch: PackedRow) -> int:
    """What a micro-batch takes of the budget."""
    if micro_batch.stretches:
        in_row = sum(stretch.length for stretch in micro_batch.stretches if not stretch.carried)
        return (in_row if micro_batch.weight else 0) + len(micro_batch.lengths_C)
    return len(micro_batch.lengths_C) * (micro_batch.input_ids_BT.shape[1] + 1)


def goes_once(micro_batch: PackedRow) -> bool:
    """Whether each beginning of a completion goes through the policy once, and each token through the head."""
    beginnings, tokens = set(), set()
    for prompt, completion, _, _ in rows_of(micro_batch):
        beginnings |= {(prompt, completion[:end]) for end in range(1, len(completion))}
        tokens |= {(prompt, completion[:end]) for end in range(1, len(completion) + 1)}
    in_row = sum(stretch.length for stretch in micro_batch.stretches if stretch.first) if micro_batch.weight else 0
    through_head = len(micro_batch.unique("target_id"))
    shares = "unique" in micro_batch.columns
    return in_row == len(beginnings) and (through_head == len(tokens) or not shares)


@pytest.mark.parametrize(("shared_prefix", "least_shared"), [(True, 32), (True, 1), (True, 3), (False, 32)])
@pytest.mark.parametrize("seed", table_rows(range(60), range(20)))
def test_nothing_is_lost_and_nothing_is_over_budget(seed: int, shared_prefix: bool, least_shared: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, 30) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 6))]
    rollouts = [
        make_rollout(
            rng.choice(prompts),
            completion := [rng.randrange(0, 30 if least_shared > 3 else 2) for _ in range(rng.randint(1, 20))],
            logprobs=[-rng.random() for _ in completion],
        )
        for _ in range(rng.randint(1, 40))
    ]
    for rollout in rollouts:
        rollout.advantage = rng.gauss(0, 1)
    least = least_tokens(rollouts, shared_prefix)
    budget = least + rng.randrange(0, 3 * least)
    cut = make_micro_batches(rollouts, budget, shared_prefix, least_shared=least_shared)
    micro_batches = [row.filled(rollouts) for row in cut]

    rows = [row for micro_batch in micro_batches for row in rows_of(micro_batch)]
    assert sorted(rows) == sorted(map(row_of, rollouts))
    assert all(num_budgeted(micro_batch) <= budget for micro_batch in micro_batches)
    if least_shared == 1:
        assert all(goes_once(micro_batch) for micro_batch in micro_batches)
    if not shared_prefix:
        lengths = [len(prompt) + len(completion) for prompt, completion, _, _ in rows]
        assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("seed", range(30))
def test_groups_that_fit_are_packed_best_fit_the_largest_first(seed: int) -> None:
    rng = random.Random(seed)
    rollouts = [make_rollout([number] * rng.randint(1, 9), [7] * rng.randint(1, 20)) for number in range(1, 30)]
    budget = 29 + rng.randint(0, 60)
    sizes = [num_budgeted(micro_batch) for micro_batch in make_micro_batches(rollouts, budget)]
    assert sizes == sorted(sizes, reverse=True)
    assert all(smaller + larger > budget for smaller, larger in pairwise(sorted(sizes)))  # no two would fit into one


def test_a_short_completion_counts_as_many_tokens_as_layers_fill_it_up_to() -> None:
    rollouts = [make_rollout([5] * 10, [6, 7, 8 + sample], sample_id=sample) for sample in range(40)]
    (one,) = make_micro_batches(rollouts, 200)
    assert len(one.rows) == 40
    filled = [len(row.rows) for row in make_micro_batches(rollouts, 200, least_counted=64)]
    assert sum(filled) == 40 and max(filled) == 3
    longest = make_micro_batches([make_rollout([5], [6] * 30), *rollouts[:1]], 40, least_counted=64)
    assert sorted(len(row.rows) for row in longest)[-1] == 1  # a budget below what is counted takes them one by one
