"""Groups of their own sizes, and further rounds by what the first have earned."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conftest import table_rows
from test_loop import FakeGenerator, prompts

from lit_grpo.budgets.foresight import MOST_LEFT, Foresight
from lit_grpo.budgets.history import PromptHistory, Record
from lit_grpo.budgets.prompts import PromptChooser
from lit_grpo.data.loaders import PromptLoader
from lit_grpo.faults import Phases
from lit_grpo.methods import make_plugins, shipped
from lit_grpo.methods.dars import HardMore
from lit_grpo.methods.greso import Greso
from lit_grpo.methods.reinforce_ada import Balanced
from lit_grpo.methods.xrpo import UncertainMore
from lit_grpo.plugins import Answer, Listener, Plugin, RunFacts
from lit_grpo.ranks import Ranks
from lit_grpo.rewards import RewardRunner, load_rewards
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rounds import RoundScheduler
from lit_grpo.rollout.rules import RolloutMode
from lit_grpo.rollout.session import RolloutSession
from lit_grpo.types import PassRule, PromptBatch, RolloutGroup, SamplingParams

SAMPLING = SamplingParams(max_tokens=40)
PASSES = {"a": "1" * 16, "b": "0" * 16, "c": "0001" + "0100" + "1" * 8, "d": "0111" + "0" * 12}
"""Which samples of a prompt pass, in their order."""


class Marked(FakeGenerator):
    """Its completions say whether they pass."""

    def step(self) -> StepEvents:
        events = super().step()
        for each in events.finished:
            each.text = PASSES[each.request.key[0]][each.request.path[0]]
        return events


def mark(completion: str) -> float | None:
    return None if completion == "-" else float(completion)


@pytest.fixture
def runner() -> Iterator[RewardRunner]:
    runner = RewardRunner(load_rewards([mark], 10.0))
    yield runner
    runner.close()


def collect(
    allocation: Plugin,
    runner: RewardRunner,
    names: str = "abcd",
    slots: int = 5,
    lengths: Any = None,
    foresees: bool = True,
) -> tuple[dict[str, RolloutGroup], RoundScheduler, Marked]:
    lengths = {name: [3 + sample % 7 for sample in range(40)] for name in names} | (lengths or {})
    pass_rule = PassRule(runner.functions[0].name)
    generator, rounds = Marked(slots, lengths), RoundScheduler(runner, allocation, pass_rule, foresees=foresees)
    loop = RolloutLoop(generator, listeners=[rounds])
    groups, stats = loop.collect(prompts(*names), 4, SAMPLING, seed=0)
    assert sum(stats.lengths) == sum(each.completion.num_tokens for group in groups for each in group.rollouts)
    assert not generator.remaining
    return {group.prompt.prompt_id: group for group in groups}, rounds, generator


def test_prompts_get_rounds_until_both_kinds_are_there(runner: RewardRunner) -> None:
    groups, rounds, _ = collect(Balanced(rounds=3, passed=2, failed=1), runner)
    assert {name: len(group.rollouts) for name, group in groups.items()} == {"a": 12, "b": 12, "c": 8, "d": 4}
    for name, group in groups.items():
        assert [each.completion.request.path for each in group.rollouts] == [(n,) for n in range(len(group.rollouts))]
        assert [each.reward for each in group.rollouts] == [float(mark) for mark in PASSES[name][: len(group.rollouts)]]
    assert rounds.metrics() == {"budget/further_completions": 20.0, "budget/frac_flat_first": 0.5}


def test_dars_gives_hard_prompts_a_second_round_alone(runner: RewardRunner) -> None:
    groups, _, _ = collect(HardMore(most=10), runner)
    # p = 1/4: S = 3/8, (2 - 4 S) / S = 4/3; none: p = 1/8, S = 7/32, (2 - 7/8) / (7/32) = 5.1
    assert {name: len(group.rollouts) for name, group in groups.items()} == {"a": 4, "b": 10, "c": 6, "d": 4}


def test_others_decode_while_a_prompt_waits_for_its_next_round(runner: RewardRunner) -> None:
    lengths = {"a": [30] * 4, "b": [2] * 16}
    groups, _, generator = collect(Balanced(rounds=3, passed=1, failed=0), runner, "ab", 8, lengths)
    assert {name: len(group.rollouts) for name, group in groups.items()} == {"a": 4, "b": 12}
    submitted = [keys for what, keys in generator.log if what == "submit"]
    assert len(submitted) == 3 and generator.num_steps == 30  # two more rounds of b, beside the first of a


@pytest.mark.parametrize(("foresees", "num_steps"), [(True, 49), (False, 62)])
def test_a_round_begins_before_the_last_is_whole_where_it_is_certain(
    runner: RewardRunner, foresees: bool, num_steps: int
) -> None:
    # of b none passes: after three of four, two passes are out of reach
    groups, rounds, generator = collect(
        Balanced(rounds=2, passed=2, failed=1), runner, "b", 8, {"b": [30, 2, 3, 4, 20, 20, 20, 32]}, foresees
    )
    assert [each.reward for each in groups["b"].rollouts] == [0.0] * 8
    assert rounds.metrics() == {"budget/further_completions": 4.0, "budget/frac_flat_first": 1.0}
    assert generator.num_steps == num_steps


@pytest.mark.parametrize("kind", ["of a group", "async"])
def test_what_scores_groups_or_waits_is_given_whole_rounds(kind: str) -> None:
    sizes: list[int] = []

    def marks(completions: list[str]) -> list[float]:
        sizes.append(len(completions))
        return [float(each) for each in completions]

    async def slow_mark(completion: str) -> float:
        return float(completion)

    runner = RewardRunner(load_rewards([marks if kind == "of a group" else slow_mark], 10.0))
    rule = Balanced(rounds=2, passed=2, failed=1)
    _, _, generator = collect(rule, runner, "b", 8, {"b": [30, 2, 3, 4, 20, 20, 20, 32]})
    runner.close()
    assert generator.num_steps == 62 and sizes == ([4, 4] if kind == "of a group" else [])


@dataclass
class Odd(Plugin):
    """Asks for more or fewer without any order, up to three times."""

    seed: int = 0

    def next_round(self, num_rewarded: int, num_passed: int, num_rounds: int, num_first: int) -> int:
        drawn = random.Random(f"{self.seed} {num_rewarded} {num_passed} {num_rounds} {num_first}")
        return drawn.randint(-1, 3) if num_rounds < 4 else 0


@pytest.mark.parametrize("seed", table_rows(range(40), range(12)))
def test_foresight_changes_nothing_that_is_asked(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(seed)
    for name in "abcd":
        chance = drawn.random()
        marks = "".join("-" if drawn.random() < 0.05 else str(int(drawn.random() < chance)) for _ in range(40))
        monkeypatch.setitem(PASSES, name, marks)
    rules = [Balanced(3, 2, 2), HardMore("equal", 12), HardMore("hardness", 16), Odd(seed), Odd(seed + 1)]
    rule, slots = rules[seed % 5], drawn.choice([3, 9, 30])
    lengths = {name: [drawn.choice([1, 3, 8, 35]) for _ in range(40)] for name in "abcd"}
    found = []
    for foresees in (True, False):
        runner = RewardRunner(load_rewards([mark], 10.0))
        groups, rounds, _ = collect(rule, runner, "abcd", slots, lengths, foresees)
        runner.close()
        each = {name: [(r.completion.request.path, repr(r.reward)) for r in g.rollouts] for name, g in groups.items()}
        found.append((each, rounds.metrics(), rounds.flat))
    assert found[0] == found[1]
    assert all(paths == [((n,), paths[n][1]) for n in range(len(paths))] for paths in found[0][0].values())


def test_what_is_certain_is_the_least_of_all_outcomes() -> None:
    for rule in (Balanced(3, 2, 2), HardMore("equal", 32), HardMore("hardness", 64), Odd(3)):
        foresight = Foresight(rule)
        for left, rewarded in itertools.product(range(5), range(5)):
            for passed in range(rewarded + 1):
                ends = {
                    (rewarded + sum(value is not None for value in some), passed + sum(filter(None, some)))
                    for some in itertools.product((None, 0, 1), repeat=left)
                }
                least = min(max(rule.next_round(*end, 1, 4), 0) if end[0] else 0 for end in ends)
                assert foresight.least(rewarded, passed, left, 1, 4) == least
    assert Foresight(Balanced()).least(1, 0, MOST_LEFT + 1, 1, 4) == 0


def test_what_is_sampled_does_not_depend_on_how_long_rewards_take(runner: RewardRunner) -> None:
    go_on = threading.Event()

    def slow(completion: str) -> float:
        go_on.wait(0.02)
        return float(completion)

    quick, _, _ = collect(Balanced(rounds=3, passed=2, failed=1), runner)
    waiting = RewardRunner(load_rewards([slow], 10.0))
    late, _, _ = collect(Balanced(rounds=3, passed=2, failed=1), waiting)
    waiting.close()
    keys = [[each.completion.request.key for each in group.rollouts] for group in quick.values()]
    assert keys == [[each.completion.request.key for each in group.rollouts] for group in late.values()]


class Drops(Listener):
    """Leaves the first completion of a prompt out of its group after so many steps."""

    def __init__(self, name: str, at: int) -> None:
        self.key, self.left = (name, 0, (0,)), at

    def on_step(self, events: StepEvents) -> Answer | None:
        self.left -= 1
        return None if self.left else Answer(drop=[self.key])


@pytest.mark.parametrize("at", [1, 3, 6, 9, 15, 29])
@pytest.mark.parametrize(("name", "lengths"), [("d", [30, 5, 3, 4]), ("b", [30, 5, 3, 20]), ("c", [30, 5, 3, 25])])
def test_a_round_is_whole_without_what_is_left_out(
    runner: RewardRunner, at: int, name: str, lengths: list[int]
) -> None:
    """However much has ended before: its group is rewarded, replaced where it is flat, and has its further rounds."""
    for allocation in (Plugin(), Balanced(rounds=2, passed=1, failed=1), UncertainMore(phases=2, base=4)):
        generator = Marked(9, {name: lengths + [4] * 36, "a": [4] * 40})
        rounds = RoundScheduler(runner, allocation, PassRule("mark"), iter(prompts("a")), num_generations=8)
        loop = RolloutLoop(generator, listeners=[rounds, Drops(name, at)])
        groups, _ = loop.collect(prompts(name), 4, SAMPLING, seed=0)
        rewards = {group.prompt.prompt_id: [each.reward for each in group.rollouts] for group in groups}
        paths = [each.completion.request.path for each in groups[0].rollouts]
        assert paths == [(number,) for number in range(1, 1 + len(paths))]
        assert rewards[name] == [float(mark) for mark in PASSES[name][1 : 1 + len(paths)]] and len(paths) >= 3
        flat = len(set(rewards[name])) == 1
        assert ((name, 0) in rounds.flat) == flat == ("a" in rewards)
        metrics = rounds.metrics()
        assert metrics["budget/frac_flat_first"] > 0 or not flat
        assert metrics["budget/further_completions"] == sum(map(len, rewards.values())) - 3 - 4 * flat
        if isinstance(allocation, Balanced):  # c alone has both at once
            assert len(paths) == {"d": 7, "b": 7, "c": 3}[name]


def test_an_interrupt_leaves_nothing_behind(runner: RewardRunner) -> None:
    generator = Marked(5, {name: [3] * 40 for name in "abcd"})
    rounds = RoundScheduler(runner, Balanced(), PassRule("mark"))
    loop = RolloutLoop(generator, listeners=[rounds])
    generator.fail_at_step = 5
    with pytest.raises(KeyboardInterrupt):
        loop.collect(prompts(*"abcd"), 4, SAMPLING, seed=0)
    assert not len(loop.buffer) and not generator.remaining
    groups, _ = loop.collect(prompts(*"ad"), 4, SAMPLING, seed=0)
    assert [len(group.rollouts) for group in groups] == [16, 8]


# ---- a run's budget ------------------------------------------------------------------------------------


def session_of(*specs: str) -> RolloutSession:
    return RolloutSession(make_plugins(specs))


def test_sizes_follow_what_is_known_of_prompts() -> None:
    session, history = session_of("knapsack:least=2"), PromptHistory()
    history.records = {"a": Record(1, pass_rate=1.0), "b": Record(1, pass_rate=0.3)}
    session.open(history, None)
    session._sizes = session._group_sizes(prompts("a", "b", "c"), 6)
    assert session._sizes == [2, 10, 6]
    assert session._metrics(run_of()) == {"budget/smallest_group": 2.0, "budget/largest_group": 10.0}


def loader(number: int = 9, size: int = 3, **options: Any) -> PromptLoader:
    loader = PromptLoader(prompts(*(f"p{place}" for place in range(number))), size, shuffle=False, **options)
    next(iter(loader))
    return loader


def run_of() -> Any:
    return SimpleNamespace(ranks=Ranks(), pass_rule=PassRule("mark"), policy_version=1)


def test_who_is_asked_is_learned_from_every_batch() -> None:
    session, chooser, history = RolloutSession(), PromptChooser(Greso(), 0, prompts("p0")), PromptHistory()
    session.open(history, loader(chooser=chooser))
    history.records = {"p0": Record(2)}
    assert chooser.history is history
    batch = PromptBatch([])
    batch.groups = [RolloutGroup(prompts("p0")[0], [])]
    session.end_update(run_of(), batch)
    assert session._metrics(run_of()) == {"prompts/easy": 0.51, "prompts/hard": 0.49, "prompts/skipped": 0.0}


FACTS = RunFacts(num_prompts=4, num_generations=8, max_tokens=2000, updates_per_batch=1)
MODES = sorted(name for name, plugin in shipped().items() if isinstance(plugin, RolloutMode))


# ---- groups without a difference are replaced ----------------------------------------------------------


def differs(name: str) -> bool:
    """Prompts p2, p3, p6, p7 and so on are passed now and then; the others always, or never."""
    return int(name[1:]) % 4 in (2, 3)


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        passes = "0110" if differs(f"p{number}") else str(number % 4) * 4
        monkeypatch.setitem(PASSES, f"p{number}", passes)


def fill(
    runner: RewardRunner, loader: PromptLoader, replaces: int, seed_of_lengths: int = 0, metric: str = "passed"
) -> PromptBatch:
    """A batch whose groups without a difference are replaced."""
    batch = next(iter(loader))
    rng = random.Random(seed_of_lengths)
    lengths = {f"p{number}": [rng.randint(1, 9) for _ in range(4)] for number in range(40)}
    session = session_of(f"replace_flat:most={replaces},metric={metric}")
    session.open(PromptHistory(), loader)
    session.rewards = runner
    run = SimpleNamespace(
        generator=Marked(5, lengths),
        sampling=SAMPLING,
        sampling_seed=0,
        num_generations=4,
        policy_version=0,
        pass_rule=PassRule("mark"),
        ranks=Ranks(),
        phases=Phases(),
    )
    session.next_batch(cast(Any, run), batch)
    batch.metrics = {name: value for name, value in batch.metrics.items() if name.startswith("budget/")}
    return batch


@pytest.mark.usefixtures("marks")
@pytest.mark.parametrize("seed", range(3))  # of lengths, and so of who is whole first
def test_prompts_are_asked_until_the_batch_is_full_of_groups_that_differ(runner: RewardRunner, seed: int) -> None:
    stream = PromptLoader(prompts(*(f"p{place}" for place in range(20))), 3, shuffle=False)
    batch = fill(runner, stream, 20, seed)
    names = [prompt.prompt_id for prompt in batch.prompts]
    assert names == ["p0", "p1", "p2", "p3", "p4", "p5", "p6"]  # the first seven hold three that differ
    assert [group.prompt.prompt_id for group in batch.groups] == names
    kept = {r.prompt.prompt_id for group in batch.groups for r in group.rollouts if r.kept}
    assert kept == {"p2", "p3", "p6"} and batch.metrics == {"budget/replaced_groups": 4.0}
    assert stream.state_dict()["prompts_consumed"] == 0
    batch.trained = True
    assert stream.state_dict()["prompts_consumed"] == 7
    assert next(iter(stream)).prompts[0].prompt_id == "p7"


@pytest.mark.usefixtures("marks")
def test_a_limit_on_replacements_that_is_reached_is_told_once(runner: RewardRunner) -> None:
    stream = PromptLoader(prompts(*(f"p{place}" for place in range(20))), 3, shuffle=False)
    alike = r"in 1 more groups of a batch either all completions pass \(mark >= 1\) or none do"
    with pytest.warns(UserWarning, match=f"All 1 prompts that may replace .* have been asked: {alike}"):
        batch = fill(runner, stream, 1)
    assert [prompt.prompt_id for prompt in batch.prompts] == ["p0", "p1", "p2", "p3"]
    assert batch.metrics == {"budget/replaced_groups": 1.0}


@pytest.mark.usefixtures("marks")
@pytest.mark.parametrize(("metric", "replaced"), [("passed", 4), ("reward", 0)])
def test_a_penalty_for_length_makes_no_signal_of_a_group_that_is_passed_throughout(metric: str, replaced: int) -> None:
    """DAPO, equation 11: 0 < |{o : o is right}| < G, whatever else completions are scored by."""
    penalties = itertools.cycle((0.0, -0.5, -0.25))

    def penalty(completion: str) -> float:
        return next(penalties)

    runner = RewardRunner(load_rewards([mark, penalty], 10.0))
    stream = PromptLoader(prompts(*(f"p{place}" for place in range(20))), 3, shuffle=False)
    batch = fill(runner, stream, 20, metric=metric)
    runner.close()
    assert all(len({rollout.reward for rollout in group.rollouts}) > 1 for group in batch.groups)
    assert batch.metrics == {"budget/replaced_groups": float(replaced)}
    kept = [{rollout.kept for rollout in group.rollouts} for group in batch.groups]
    assert kept.count({True}) == 3 and kept.count({False}) == replaced


def test_ranks_share_what_stands_behind_the_batch() -> None:
    streams = [loader(20, 2, rank=rank, world_size=2) for rank in (0, 1)]
    taken = [list(stream.further(most)) for stream, most in zip(streams, (3, 1), strict=True)]
    assert [[prompt.prompt_id for prompt in some] for some in taken] == [["p4", "p6", "p8"], ["p5"]]
    largest = max(stream._taken for stream in streams)
    for stream in streams:
        stream.sync_draws_across_ranks(lambda value: max(value, float(largest)))
    assert [[each.prompt_id for each in next(iter(stream)).prompts] for stream in streams] == [
        ["p10", "p11"],
        ["p12", "p13"],
    ]
