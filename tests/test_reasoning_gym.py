"""Rows and reward of reasoning-gym."""

from __future__ import annotations

import inspect
import logging
import re
from collections import Counter
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from conftest import table_rows

from lit_grpo.rewards import RewardRunner, RewardSpec, load_rewards
from lit_grpo.tasks import reasoning_gym as gym
from lit_grpo.tasks.drawn import Split
from lit_grpo.tasks.reasoning_gym import ReasoningGymRows, ReasoningGymScore
from lit_grpo.types import RolloutGroup

pytestmark = pytest.mark.skipif(util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")

WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks that know a good answer only when they see it."""
ATTACKS = (
    "[open({path!r}, 'w')]",
    "__import__('pathlib').Path({path!r}).touch()",
    "open({path!r}, 'w') or 1",
    "(lambda: open({path!r}, 'w'))()",
)
LOGGED: dict[str, list[float]] = {}


def log(name: str, value: float) -> None:
    LOGGED.setdefault(name, []).append(value)


def score(row: dict[str, Any], completion: str, **arguments: Any) -> float:
    LOGGED.clear()
    return ReasoningGymScore(**arguments)(completion, row["task"], row["entry"], log)


def row_of(task: str, **arguments: Any) -> dict[str, Any]:
    (row,) = ReasoningGymRows(task, num_rows=1, **arguments).rows()
    return row


# ---- the reward ----------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_the_right_answer_of_every_task_scores_1() -> None:
    one_of_each = {task: row_of(task) for task in gym.known_tasks()}
    answers = {task: row["answer"] for task, row in one_of_each.items()}
    assert len(answers) == 102 and {task for task, answer in answers.items() if answer is None} == WITHOUT_ANSWER
    marked = {task: f"It is <answer>\n{answer}</answer>." for task, answer in answers.items() if answer is not None}
    assert {task: score(one_of_each[task], text) for task, text in marked.items()} == dict.fromkeys(marked, 1.0)
    for task in WITHOUT_ANSWER:
        assert 0 <= score(one_of_each[task], "<answer>no</answer>") < 1


RUNNING = "those whose graders run Python"


@pytest.mark.parametrize("tasks", table_rows([RUNNING, "all"], [RUNNING]))
def test_no_answer_is_run_as_python(tasks: str, tmp_path: Path) -> None:
    for task in gym.PLAIN_ANSWERS if tasks == RUNNING else gym.known_tasks():
        row = row_of(task)
        for number, attack in enumerate(ATTACKS):
            path = tmp_path / f"{task}-{number}"
            score(row, attack.format(path=str(path)))
    assert list(tmp_path.iterdir()) == []


def test_every_grader_that_runs_python_is_known() -> None:
    gym.installed()
    from reasoning_gym.factory import DATASETS

    running = {
        name
        for name, (dataset, _) in DATASETS.items()
        if re.search(r"\b(eval|exec|parse_expr|sympify)\(", inspect.getsource(dataset.score_answer))
    }
    # number_sorting evaluates its own answer, propositional_logic has a parser of that name
    assert running - {"number_sorting"} == {*gym.PLAIN_ANSWERS, *gym.RUN_BY_THEIR_GRADERS}


def test_lists_and_sums_still_reach_the_graders_that_run_them() -> None:
    matrix = row_of("spiral_matrix")
    assert score(matrix, f"[{matrix['answer'].replace(' ', ', ')}]") == 0.1
    assert score(matrix, "[9**9**9]") == 0
    sums = row_of("countdown")
    assert score(sums, "1 + 1") == 0.05  # a sum of other numbers
    assert score(sums, "9**9**9**9") == score(sums, "exit()") == 0


def test_the_last_mark_counts_and_a_text_without_one_as_a_whole() -> None:
    row = row_of("gcd")
    right = row["answer"]
    assert score(row, f"<answer>0</answer> no, <answer>{right}</answer>") == 1
    assert score(row, f"<answer>{right}</answer> no, <answer>0</answer>") == 0
    assert score(row, f" {right}\n") == 1 and score(row, f" {right}\n", needs_mark=True) == 0
    assert score(row, f"[{right}]", pattern=r"\[(.*)\]", needs_mark=True) == 1
    assert score(row, "<answer> </answer>") == score(row, "") == 0


def test_usual_signs_are_graded_as_well() -> None:
    row = row_of("chain_sum", levels=0)
    answer = str(row["answer"])
    assert score(row, f"<answer>\ufeff{answer}\u200b</answer>") == 1.0


def test_a_part_of_the_score_is_given_where_the_grader_gives_it() -> None:
    row = row_of("word_sorting", levels=0)
    assert 0 < score(row, ", ".join(reversed(row["answer"].split(", ")))) < 1


def test_a_grader_that_fails_scores_0_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    row = row_of("gcd")

    def fails(answer: str, entry: object) -> float:
        raise KeyError(answer)

    monkeypatch.setattr(gym.make_dataset("gcd"), "score_answer", fails)
    reward = ReasoningGymScore()
    LOGGED.clear()
    with caplog.at_level(logging.WARNING):
        assert [reward(text, "gcd", row["entry"], log) for text in ("<answer>7</answer>", "8", "")] == [0, 0, 0]
    (told,) = caplog.messages
    assert told.startswith("reasoning-gym's grader of gcd fails on the answer '7' (KeyError: '7'), which scores 0;")
    assert LOGGED == {"reasoning_gym/failed": [1.0, 1.0, 0.0]}


@pytest.mark.parametrize("process", table_rows([False, True], [False]))
def test_the_runner_scores_rows_in_this_process_and_in_others(process: bool) -> None:
    from hand_made import make_rollout

    row = row_of("decimal_arithmetic", levels=1)
    spec = RewardSpec("lit_grpo.tasks.ReasoningGymScore", name="score", process=process)
    runner = RewardRunner(load_rewards([spec]), timeout_s=None, num_workers=1)
    rollouts = [make_rollout([1], [2], sample_id=number) for number in range(2)]
    rollouts[0].prompt.columns.update(row)
    for rollout, text in zip(rollouts, (f"<answer>{row['answer']}</answer>", "<answer>x</answer>"), strict=True):
        rollout.completion.text = text
    runner.score(RolloutGroup(rollouts[0].prompt, rollouts))
    runner.close()
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0]
    assert runner.take_metrics() == {"reasoning_gym/failed": 0.0}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"pattern": "("}, "pattern '(' is no regular expression (missing ), unterminated subpattern at position 0)"),
        ({"pattern": "x"}, "pattern 'x' has no group; put parentheses around the answer."),
    ],
)
def test_a_wrong_pattern_is_told(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        ReasoningGymScore(**arguments)


# ---- the rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [(0, 0), (0, 7)])
def test_no_question_is_in_both_splits_or_twice(seeds: tuple[int, int]) -> None:
    splits: tuple[Split, Split] = ("train", "validation")
    train, validation = (
        [
            row["entry"]["question"]
            for row in ReasoningGymRows(
                "count_bits", num_rows=number, split=split, seed=seed, settings={"count_bits": {"max_n": 400}}
            ).rows()
        ]
        for split, seed, number in zip(splits, seeds, (250, 50), strict=True)
    )
    assert len({*train, *validation}) == 300  # of about 400 that there are


WRONG = [
    ({"tasks": "chain_sums"}, "reasoning-gym has no task 'chain_sums'; did you mean 'chain_sum' or "),
    ({"tasks": "zzz"}, "reasoning-gym has no task 'zzz'; it has ab, acre, advanced_geometry, "),
    ({"tasks": "composite"}, "'composite' of reasoning-gym mixes others; name those in tasks, with weights."),
    ({"tasks": "simple_integration"}, "is graded by running the answer as Python, and no answer of a model is run"),
    ({"tasks": []}, "tasks must name a task or several, each once, not []."),
    ({"tasks": ["gcd", "gcd"]}, "tasks must name a task or several, each once, not ['gcd', 'gcd']."),
    ({"tasks": {"gcd": 0}}, "the weight of the task 'gcd' must be above 0 and finite, not 0."),
    ({"tasks": "gcd", "levels": 99}, "the task 'gcd' of reasoning-gym has no level 99; it has levels from 0 to "),
    ({"tasks": "acre", "levels": 0}, "has no level 0; it has no levels; leave them out."),
    ({"tasks": "gcd", "levels": []}, "levels must be a level or several, each once, not []."),
    ({"tasks": "gcd", "settings": {"lcm": {}}}, "settings has 'lcm', which is not among the tasks (gcd)."),
    ({"tasks": "gcd", "settings": {"gcd": {"most": 1}}}, "the task 'gcd' has no setting 'most'; it has "),
    ({"tasks": "knight_swap", "levels": 0}, "refuses level 0 with the settings {} (AssertionError: min_nodes must be"),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG)
def test_a_wrong_argument_is_told_in_a_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        ReasoningGymRows(**arguments)


def test_a_task_without_further_questions_leaves_the_rest_to_the_others() -> None:
    few = ReasoningGymRows(["count_bits", "gcd"], num_rows=60, settings={"count_bits": {"max_n": 10}})
    assert Counter(row["task"] for row in few.rows())["count_bits"] <= 10
    alone = ReasoningGymRows("count_bits", num_rows=50, settings={"count_bits": {"max_n": 10}})
    with pytest.raises(
        ValueError, match=r"reasoning-gym \(count_bits\) has only \d rows of the train split, and num_rows is 50; ask"
    ):
        list(alone.rows())


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    for build in (lambda: ReasoningGymRows("gcd"), ReasoningGymScore):
        with pytest.raises(ValueError, match=r"reasoning-gym, which is not installed; install the extra lit_grpo\[rea"):
            build()
