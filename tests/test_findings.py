"""What the curves of reward functions show to be wrong: when it is said, when it is not, and how often of noise."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from lit_grpo.findings.rewards import HELD_OUT, TRAINING, Finding, Place, RewardCurves
from lit_grpo.types import PassRule

NAN = float("nan")
CORRECT = PassRule("correct", 1.0)


def followed(
    functions: Mapping[str, Sequence[float]],
    weights: dict[str, float] | None = None,
    passes: PassRule = CORRECT,
    place: Place = TRAINING,
) -> tuple[RewardCurves, list[tuple[int, Finding]]]:
    """The curves of a run, and what was said while it went, after which row."""
    weights = weights or dict.fromkeys(functions, 1.0)
    curves, said = RewardCurves(weights, passes, place), []
    for number, values in enumerate(zip(*functions.values(), strict=True), start=1):
        row = dict(zip(functions, values, strict=True))
        reward = sum(weights[name] * value for name, value in row.items() if value == value)
        told = curves.add({"reward": reward, **{f"rewards/{name}/mean": value for name, value in row.items()}})
        said += [(number, finding) for finding in told]
    return curves, said


def names(found: Sequence[Finding]) -> list[str]:
    return [finding.name for finding in found]


def ramp(first: float, last: float, updates: int = 30, noise: float = 0.02, seed: int = 0) -> list[float]:
    """A curve that moves evenly over the first two thirds of a run, with noise."""
    up = np.minimum(np.linspace(0, 1.5, updates), 1)
    return (first + (last - first) * up + np.random.default_rng(seed).normal(0, noise, updates)).tolist()


# ---- a reward that is hacked --------------------------------------------------------------------------


def test_a_reward_that_rises_without_the_function_that_decides_is_named_while_the_run_goes_and_after_it() -> None:
    format_ = [0.06] * 8 + [0.5] * 4 + [0.99] * 18
    curves, said = followed({"correct": [0.03125, 0.0625] * 15, "format": format_}, {"correct": 1.0, "format": 0.5})
    (found,) = curves.findings()
    assert found == Finding(
        "reward hacking",
        "format",
        "The reward rose from 0.0769 to 0.542 in 30 updates by `format` (from 0.06 to 0.99), and not by `correct`, "
        "which decides pass@1: it stayed at 0.0469. Weigh `format` less, or let it pay only where `correct` does.",
    )
    assert [(number, finding.name) for number, finding in said] == [(16, "reward hacking")]  # once, and early


def test_a_function_that_falls_while_the_reward_rises_is_said_to_fall() -> None:
    curves, _ = followed({"correct": ramp(0.4, 0.1), "format": ramp(0, 1, seed=1)})
    hacked, parted = curves.findings()
    assert hacked.name == "reward hacking" and "which decides pass@1: it fell from 0.3" in hacked.sentence
    assert parted.name == "rewards part" and parted.sentence.startswith("`correct` fell from 0.3")


@pytest.mark.parametrize(
    ("correct", "format_"),
    [
        (ramp(0.05, 0.6), ramp(0.1, 0.9, seed=1)),
        (ramp(0.05, 0.3), ramp(0.1, 0.9, seed=1)),
        (ramp(0.05, 0.6), ramp(0.5, 0.5, seed=1)),
        (ramp(0.97, 0.97, noise=0.01), ramp(0, 1, seed=1)),
        (ramp(0.2, 0.2, noise=0.4), ramp(0, 0.5, seed=1)),
        (ramp(0.3, 0.3), ramp(0.6, 0.6, seed=1)),
        (ramp(0.3, 0.3), ramp(0.9, 0.2, seed=1)),
        (ramp(0.2, 0.2, 15), ramp(0, 1, 15, seed=1)),
        ([NAN] * 30, ramp(0, 1, seed=1)),
    ],
    ids=[
        *("both rise", "the other rises more", "it alone rises", "at its ceiling", "it is too noisy to tell"),
        *("nothing moves", "the reward falls", "too few updates", "it never applies"),
    ],
)
def test_nothing_is_said_where_no_reward_is_hacked(correct: list[float], format_: list[float]) -> None:
    curves, said = followed({"correct": correct, "format": format_})
    assert not curves.findings() and not said


def test_a_run_whose_right_answers_come_later_is_no_longer_called_hacked() -> None:
    functions = {"correct": [0.05, 0.06] * 30 + ramp(0.05, 0.9, 200), "format": ramp(0, 1, 60, seed=1) + [1.0] * 200}
    curves, said = followed(functions)
    assert [finding.name for _, finding in said] == ["reward hacking"] and not curves.findings()


def test_validations_are_held_against_the_first_three_and_said_to_be_held_out() -> None:
    functions = {"correct": [0.05, 0.06, 0.05, 0.05, 0.06, 0.05, 0.06], "format": [0.0, 0.05, 0.1, 0.9, 1, 1, 1]}
    (found,) = followed(functions, place=HELD_OUT)[0].findings()
    assert found.name == "reward hacking, held out"
    assert found.sentence.startswith(
        "The reward on held-out prompts rose from 0.103 to 1.06 in 7 validations by `format`"
    )
    assert not followed(functions)[0].findings()


# ---- one falls while another rises ----------------------------------------------------------------------


def test_a_function_that_falls_while_another_rises_is_named() -> None:
    curves, said = followed({"correct": ramp(0.1, 0.8), "short": ramp(0.9, 0.2, seed=1)})
    (found,) = curves.findings()
    assert (found.name, found.about) == ("rewards part", "short") and len(said) == 1
    assert "`short` fell from 0.777 to 0.194 in 30 updates, while `correct` rose from 0.234" in found.sentence
    assert found.sentence.endswith("If `short` matters, weigh it more.")


# ---- noise ----------------------------------------------------------------------------------------------


def noise(kind: str, rng: np.random.Generator, updates: int) -> np.ndarray:
    """Curves of two functions that go nowhere, shape (updates, 2)."""
    size = (updates, 2)
    if kind == "binary":
        return rng.binomial(32, (0.05, 0.5), size) / 32
    if kind == "rare":
        return rng.binomial(64, 0.01, size) / 64
    if kind == "groups":  # in most of them all pass, or none
        return np.stack([rng.beta(0.3, 0.3 * odds, (updates, 4)).mean(1) for odds in (9, 1)], axis=1)
    if kind == "heavy":
        return rng.standard_t(2, size)
    values, steps = np.zeros(size), rng.normal(0, 1, size)  # batches like those before them
    for row in range(1, updates):
        values[row] = 0.5 * values[row - 1] + steps[row]
    return values


def test_a_hack_is_seen_through_noise_in_nearly_all_runs() -> None:
    rng, num_seen = np.random.default_rng(0), 0
    for _ in range(200):
        up = np.minimum(np.linspace(0, 1.5, 30), 1)
        curves = rng.binomial(32, np.stack([np.full(30, 0.047), 0.06 + 0.93 * up])) / 32
        said = followed({"correct": curves[0].tolist(), "format": curves[1].tolist()}, {"correct": 1.0, "format": 0.5})[
            1
        ]
        num_seen += bool(said)
    assert num_seen >= 180


# ---- memory, and resuming -------------------------------------------------------------------------------


def wave(updates: int) -> Iterator[tuple[float, float]]:
    rng = np.random.default_rng(0)
    for update in range(updates):
        yield 0.1 + 0.05 * float(rng.random()), min(update / 1000, 1.0) + 0.05 * float(rng.random())


def test_a_long_run_is_kept_in_few_numbers_and_still_told() -> None:
    correct, format_ = zip(*wave(5000), strict=True)
    curves, said = followed({"correct": correct, "format": format_})
    assert curves.num_rows == 5000
    kept = sum(len(rows) for rows in curves.state_dict().values() if isinstance(rows, list))
    assert kept < 250
    assert names(curves.findings()) == ["reward hacking"] and len(said) == 1


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped_unless_its_functions_are_others() -> None:
    rows = [{"reward": a + b, "rewards/correct/mean": a, "rewards/format/mean": b} for a, b in wave(400)]
    weights = {"correct": 1.0, "format": 1.0}
    whole, first, second = (RewardCurves(weights, CORRECT) for _ in range(3))
    said = []
    for number, row in enumerate(rows):
        curves = first if number < 150 else second
        if number == 150:
            second.load_state_dict(first.state_dict())
        told = whole.add(row)
        assert curves.add(row) == told
        said += told
    assert second.state_dict() == whole.state_dict() and names(said) == ["reward hacking"]
    other = RewardCurves({"correct": 1.0, "format": 0.1}, CORRECT)
    other.load_state_dict(first.state_dict())
    assert other.num_rows == 0 and other.latest == {}
