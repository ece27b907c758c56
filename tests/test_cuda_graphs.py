"""Recorded decode steps, with a stand-in that records a function and calls it again, and one for the kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from conftest import random_policy

from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots.attention import KVLayer, KVShape
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.rollout.slots.graphs import GraphedDecoder, RecordedStep
from lit_grpo.rollout.slots.kv.tables import RowTables
from lit_grpo.types import Prompt, SamplingParams
from tests.doubles.row_attention import attend_by_tables

PROMPTS = [Prompt("a", (2, 3, 4), ""), Prompt("b", tuple(range(2, 30)), "")]
SAMPLING = SamplingParams(max_tokens=30)
NUM_BUCKETS = 5  # of 11 rows: 1, 2, 4, 8, 11
Samples = list[tuple[list[int], list[float]]]


class Recorder:
    """Keeps what it records. As a CUDA graph would be, a part is run before, on whatever the buffers hold.

    A pool ends with the last of its recordings, as one of CUDA graphs does.
    """

    def __init__(self) -> None:
        self.recorded: list[RecordedStep] = []
        self.num_replays = 0

    def make(self) -> Callable[[RecordedStep], RecordedStep]:
        pool = WeakSet[Any]()
        used = False

        def record(part: RecordedStep) -> RecordedStep:
            nonlocal used
            assert not torch.is_autocast_cache_enabled()
            assert pool or not used, "the pool has ended with its recordings"
            used = True
            self.recorded.append(part)
            part()
            part()
            replay = partial(self._replay, part)
            pool.add(replay)
            return replay

        return record

    def _replay(self, part: RecordedStep) -> None:
        self.num_replays += 1
        part()


def make(policy: Any, folder: Path, num_slots: int, recorder: Recorder | None) -> SlotGenerator:
    generator = SlotGenerator(num_slots)
    generator.start(PolicySpec(policy, load_tokenizer(str(folder))))
    if recorder is not None:
        fused: Any = generator._fused
        assert fused is not None
        generator._tables = RowTables(generator._shape, num_slots, attend_by_tables)
        generator._graphs = GraphedDecoder(fused, generator._tables, policy.parameters, recorder.make)
    generator.load_weights(policy.named_parameters(), 0)
    return generator


def sample(generator: SlotGenerator) -> Samples:
    groups, _ = RolloutLoop(generator).collect(PROMPTS, 12, SAMPLING, seed=0)
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    return [(each.token_ids_T.tolist(), each.logprobs_T.tolist()) for each in completions]


def check_same(actual: Samples, expected: Samples) -> None:
    assert [ids for ids, _ in actual] == [ids for ids, _ in expected]
    for (_, one), (_, other) in zip(actual, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_rollout_from_recordings_samples_the_same(policy_folder: Path) -> None:
    policy, recorder = random_policy(), Recorder()
    expected = sample(make(policy, policy_folder, 11, None))
    generator = make(policy, policy_folder, 11, recorder)
    check_same(sample(generator), expected)
    num_recorded, num_replays = len(recorder.recorded), recorder.num_replays
    assert num_replays > 5 * num_recorded > 0
    check_same(sample(generator), expected)  # a second rollout records nothing
    assert len(recorder.recorded) == num_recorded and recorder.num_replays == 2 * num_replays


def test_twenty_pieces_of_a_completion_fit_into_the_first_tables() -> None:
    tables = RowTables(KVShape((KVLayer(2, 16, 16),), torch.float32, torch.device("cpu")), 4, attend_by_tables)
    places = tables.places
    there = {name: torch.ones(size, dtype=torch.int32) for name, size in (("bounds", 22), ("sizes", 23))}
    there |= {"segments": torch.ones((4, 43), dtype=torch.int32), "pointers": torch.ones((2, 23), dtype=torch.int64)}
    tables.take({**there, "columns": torch.arange(4)}, 4)
    assert tables.places == places  # else all would be recorded anew


def test_weights_that_are_updated_in_place_are_seen_without_recording_anew(policy_folder: Path) -> None:
    policy, recorder = random_policy(), Recorder()
    generator = make(policy, policy_folder, 11, recorder)
    first = sample(generator)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.1)
    generator.load_weights(policy.named_parameters(), 1)
    second = sample(generator)
    assert [ids for ids, _ in second] != [ids for ids, _ in first]
    check_same(second, sample(make(policy, policy_folder, 11, None)))
    assert len(recorder.recorded) <= NUM_BUCKETS


def test_weights_that_moved_are_recorded_anew(policy_folder: Path) -> None:
    policy, recorder = random_policy(), Recorder()
    generator = make(policy, policy_folder, 11, recorder)
    sample(generator)
    for weight in policy.parameters():
        weight.data = weight.data * 1.1
    generator.load_weights(policy.named_parameters(), 1)
    check_same(sample(generator), sample(make(policy, policy_folder, 11, None)))
    assert len(recorder.recorded) > NUM_BUCKETS


def test_positions_beyond_the_table_are_recorded_anew(policy_folder: Path) -> None:
    policy: Any = random_policy(max_position_embeddings=4096)
    recorder, long = Recorder(), [Prompt("long", tuple(2 + i % 30 for i in range(1500)), "")]
    generator = make(policy, policy_folder, 2, recorder)
    sample(generator)
    num_recorded = len(recorder.recorded)
    actual, _ = RolloutLoop(generator).collect(long, 2, SAMPLING, seed=0)
    assert len(recorder.recorded) > num_recorded
    expected, _ = RolloutLoop(make(policy, policy_folder, 2, None)).collect(long, 2, SAMPLING, seed=0)
    for one, other in zip(actual[0].rollouts, expected[0].rollouts, strict=True):
        assert one.completion.token_ids_T.tolist() == other.completion.token_ids_T.tolist()
        assert torch.allclose(one.completion.logprobs_T, other.completion.logprobs_T, atol=1e-5)
    check_same(sample(generator), sample(make(policy, policy_folder, 2, None)))
