"""The tasks of reasoning-gym (arXiv 2505.24760): generated questions, and the graders that belong to them.

The package ``reasoning-gym`` draws questions of some hundred tasks, at levels of difficulty, and grades answers, some
of them in part. :class:`ReasoningGymRows` gives the questions as rows, and :class:`ReasoningGymScore` is the reward.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import random
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from lit_grpo.process.packages import require
from lit_grpo.rewards.builtin import compile_pattern
from lit_grpo.rewards.loading import near_names
from lit_grpo.rewards.texts import comparable
from lit_grpo.tasks.drawn import DrawnRows, Split, split_of

INSTRUCTION = "Write only the answer, between <answer> and </answer>."
ANSWER_PATTERN = r"<answer>(.*?)</answer>"
"""Group 1 of its match is the answer of a completion."""
POOL = 2**14
"""Questions of a task and level that rows of one seed are drawn from: what every task of reasoning-gym allows."""
MOST_DRAWS = 2000
"""Draws in a row that bring no new question, before there are taken to be no more."""
RUN_BY_THEIR_GRADERS = ("intermediate_integration", "polynomial_multiplication", "simple_integration")
"""Tasks whose graders run the answer as Python, in ways that no check of its letters makes safe."""
PLAIN_ANSWERS = {
    "binary_matrix": r"[\d\[\],\s-]*",
    "countdown": r"(?!.*\*\s*\*)[\d+\-*/(). ]*",
    "n_queens": r"[Q_\s\[\],'\"]*",
    "puzzle24": r"(?!.*\*\s*\*)[\d+\-*/(). ]*",
    "spiral_matrix": r"[\d\[\],\s-]*",
    "string_insertion": r"[A-Z\[\],'\" ]*",
}
"""Tasks whose graders run the answer as Python: what an answer may be made of, so that it cannot do more than to be a
number, a text or a list of them. Their graders never see another answer, which scores 0."""

Settings = Mapping[str, Any]
logger = logging.getLogger(__name__)


def installed() -> Any:
    """Return the package."""
    require(
        "reasoning_gym",
        "it takes its tasks from the package reasoning-gym, which is not installed; install the extra "
        "lit_grpo[reasoning-gym], or take other rows and rewards.",
    )
    with warnings.catch_warnings():  # of packages that it imports, as they are compiled
        warnings.simplefilter("ignore")
        return importlib.import_module("reasoning_gym")


def known_tasks() -> list[str]:
    installed()
    registered = importlib.import_module("reasoning_gym.factory").DATASETS
    return sorted(registered.keys() - {"composite", *RUN_BY_THEIR_GRADERS})


def check_task(task: str) -> None:
    """Check that there is a task of this name."""
    if task in RUN_BY_THEIR_GRADERS:
        raise ValueError(
            f"the task {task!r} of reasoning-gym is graded by running the answer as Python, and no answer of a model "
            "is run; leave it out, or grade it with the reward math_equivalence on rows of your own."
        )
    if task == "composite":
        raise ValueError("the task 'composite' of reasoning-gym mixes others; name those in tasks, with weights.")
    known = known_tasks()
    if task not in known:
        remedy = near_names(task, known) or f"it has {', '.join(known)}."
        raise ValueError(f"reasoning-gym has no task {task!r}; {remedy}")


def num_levels(task: str) -> int:
    """Return how many levels the task's curriculum has; 0 of a task without one."""
    curricula = importlib.import_module("reasoning_gym.factory").CURRICULA
    if task not in curricula:
        return 0
    return max((len(attribute.levels) for attribute in curricula[task]().attributes.values()), default=0)


def make_dataset(
    task: str, level: int | None = None, settings: Settings | None = None, seed: int = 0, size: int = 500
) -> Any:
    """Return reasoning-gym's data set of a task.

    Args:
        task: Name of the task.
        level: The level of all attributes of the task's curriculum, from 0; None for the task's own defaults. An
            attribute with fewer levels is at its last one.
        settings: Fields of the task's config, which go before those of the level.
        seed: Question i of one seed is question i - 1 of the next one.
        size: Number of questions in the data set.

    Raises:
        ValueError: There is no such task, level or field, or the task refuses its values.
    """
    check_task(task)
    return _made(task, level, json.dumps(dict(settings or {}), sort_keys=True), seed, size)


@cache
def _made(task: str, level: int | None, settings: str, seed: int, size: int) -> Any:
    factory = importlib.import_module("reasoning_gym.factory")
    dataset, config_class = factory.DATASETS[task]
    wanted = {"seed": seed, "size": size, **json.loads(settings)}
    known = [field.name for field in dataclasses.fields(config_class)]
    for name in wanted.keys() - set(known):
        raise ValueError(f"the task {task!r} has no setting {name!r}; it has {', '.join(known)}.")
    if level is not None and not 0 <= level < num_levels(task):
        which = f"levels from 0 to {num_levels(task) - 1}" if num_levels(task) else "no levels; leave them out"
        raise ValueError(f"the task {task!r} of reasoning-gym has no level {level}; it has {which}.")
    try:
        if level is None:
            config = config_class(**wanted)
        else:
            curriculum = factory.CURRICULA[task]()
            curriculum.set_global_level(level)
            config = dataclasses.replace(curriculum.generate_configuration(), **wanted)
        return dataset(config=config)
    except Exception as error:  # a task checks its values in ways of its own, mostly by assert
        place = "its defaults" if level is None else f"level {level}"
        raise ValueError(
            f"the task {task!r} of reasoning-gym refuses {place} with the settings {settings} "
            f"({type(error).__name__}: {error}); take another level, or mend the settings."
        ) from error


class ReasoningGymRows(DrawnRows):
    """Questions of reasoning-gym; each comes once, and none is in both splits, whatever the seeds.

    A row has the columns ``prompt`` (a conversation of one message: the question and ``instruction``), ``answer`` (as
    text; None for tasks that know a good answer only when they see it), ``task``, ``level`` and ``settings`` (of the
    task), and ``entry``, what the task's grader needs. The reward is :class:`ReasoningGymScore`.

    Args:
        tasks: Name of a task, several names, or names with weights: ``{chain_sum: 3, gcd: 1}`` draws three
            questions of chain_sum for each of gcd, as long as there are new ones.
            ``lit_grpo.tasks.reasoning_gym.known_tasks()`` lists the names.
        num_rows: Number of questions to draw.
        split: Split of the questions: ``train`` or ``validation``; the hash of a question decides its split.
        seed: Seed of the draw of questions from the split, and of their order.
        levels: Level of the tasks' curricula, from 0, or several, which are drawn equally often. By default each task
            has its own defaults, which are harder than level 0. Where the plug-in ``curriculum`` chooses, give all
            levels that it may reach.
        settings: Fields of tasks' configs, by task: ``{chain_sum: {max_terms: 3}}``. They go before those of a level.
        instruction: Text on a line of its own after each question, which says how to mark the answer.

    Raises:
        ValueError: reasoning-gym is not installed; a task, level or setting is unknown; a weight is not above 0; or
            there are fewer questions than ``num_rows``.
    """

    most_draws: ClassVar[int | None] = MOST_DRAWS

    def __init__(
        self,
        tasks: str | list[str] | dict[str, float],
        num_rows: int = 2048,
        split: Split = "train",
        seed: int = 0,
        levels: int | list[int] | None = None,
        settings: dict[str, dict[str, Any]] | None = None,
        instruction: str = INSTRUCTION,
    ) -> None:
        super().__init__(num_rows, split, seed)
        self.weights = _weights(tasks)
        self.levels: Sequence[int | None] = levels if isinstance(levels, list) else [levels]
        self.settings, self.instruction = settings or {}, instruction
        if not self.levels or len({*self.levels}) < len(self.levels):
            raise ValueError(f"levels must be a level or several, each once, not {levels}.")
        for task in self.settings.keys() - self.weights.keys():
            raise ValueError(f"settings has {task!r}, which is not among the tasks ({', '.join(self.weights)}).")
        for task in self.weights:
            for level in self.levels:
                make_dataset(task, level, self.settings.get(task))

    def describe(self) -> str:
        return f"reasoning-gym ({', '.join(self.weights)})"

    def key(self, row: dict[str, Any]) -> str:
        return row["entry"]["question"]

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """Draw a question of the split."""
        kinds = {(task, level): weight for task, weight in self.weights.items() for level in self.levels}
        ((task, level),) = rng.choices([*kinds], [*kinds.values()])
        settings = self.settings.get(task, {})
        dataset = make_dataset(task, level, settings, seed=POOL * self.seed, size=POOL)
        for _ in range(MOST_DRAWS):
            entry = self._entry(dataset, rng.randrange(POOL), task, level)
            if split_of(entry["question"]) == self.split:
                text = f"{entry['question']}\n{self.instruction}".strip()
                prompt = [{"role": "user", "content": text}]
                row = {"prompt": prompt, "answer": entry["answer"], "task": task, "level": level or 0}
                return row | {"entry": entry | {"level": level, "settings": settings}}
        raise ValueError(
            f"the task {task!r} of reasoning-gym has no question of the {self.split} split with the settings "
            f"{settings}; leave it out, or take other settings."
        )

    def _entry(self, dataset: Any, index: int, task: str, level: int | None) -> dict[str, Any]:
        try:
            return _plain(dataset[index])
        except Exception as error:  # a task fails in a way of its own where its values leave it no question
            raise ValueError(
                f"the task {task!r} of reasoning-gym finds no question {'' if level is None else f'at level {level} '}"
                f"({type(error).__name__}: {error}); take another level, or other settings."
            ) from error


class ReasoningGymScore:
    """Reward from 0 to 1 of the completion's answer by reasoning-gym's grader of the row's task.

    An answer that is not right is graded again with usual spaces and signs, in Unicode's NFC
    (:func:`lit_grpo.rewards.texts.comparable`). Some graders give a part of the score to an answer that is nearly
    right; 1 is right. Answers that a grader fails on score 0: the first one is warned of, and their share is logged as
    ``reasoning_gym/failed``. Rows are those of :class:`ReasoningGymRows`.

    Few graders can take long on an answer that is made for it. With ``process: true`` beside the ``function``, they run
    in processes, which ``reward_timeout_s`` limits.

    Args:
        pattern: Regular expression; group 1 of its last match is the completion's answer.
        needs_mark: Score a completion without a match as 0; by default all of its text is the answer.

    Raises:
        ValueError: reasoning-gym is not installed, or ``pattern`` is no regular expression with a group.
    """

    def __init__(self, pattern: str = ANSWER_PATTERN, needs_mark: bool = False) -> None:
        installed()
        self._pattern = compile_pattern("pattern", pattern, re.DOTALL, needs_group=True)
        self._needs_mark, self._warned = needs_mark, False

    def __call__(
        self, completion: str, task: str, entry: dict[str, Any], log_metric: Callable[[str, float], None]
    ) -> float:
        """Score one completion."""
        answer = self._answer(completion)
        score, failed = self._score(answer, task, entry) if answer else (0.0, False)
        if score < 1 and (usual := comparable(answer)) not in ("", answer):
            score, failed = max((score, failed), self._score(usual, task, entry))
        log_metric("reasoning_gym/failed", float(failed))
        return score

    def _answer(self, completion: str) -> str:
        """Return the completion's answer; an empty text if it has none."""
        matches = self._pattern.findall(completion)
        if not matches:
            return "" if self._needs_mark else completion.strip()
        return (matches[-1] if isinstance(matches[-1], str) else matches[-1][0]).strip()

    def _score(self, answer: str, task: str, entry: dict[str, Any]) -> tuple[float, bool]:
        """Return the grader's score, and whether it failed."""
        if task in PLAIN_ANSWERS and not re.fullmatch(PLAIN_ANSWERS[task], answer):
            return 0.0, False
        dataset = make_dataset(task, entry["level"], entry["settings"])
        try:
            return float(dataset.score_answer(answer=answer, entry=entry)), False
        except Exception as error:  # graders fail in any way on answers that they did not think of
            if not self._warned:
                self._warned = True
                logger.warning(
                    "reasoning-gym's grader of %s fails on the answer %.80r (%s: %.80s), which scores 0; further such "
                    "answers of any task are only counted (reasoning_gym/failed).",
                    task,
                    answer,
                    type(error).__name__,
                    error,
                )
            return 0.0, True


def _weights(tasks: str | list[str] | dict[str, float]) -> dict[str, float]:
    """Return the weight of each task."""
    named = [tasks] if isinstance(tasks, str) else tasks
    weights = named if isinstance(named, dict) else dict.fromkeys(named, 1.0)
    if not weights or len(weights) < len(named):
        raise ValueError(f"tasks must name a task or several, each once, not {tasks}.")
    for task, weight in weights.items():
        if not 0 < weight < float("inf"):
            raise ValueError(f"the weight of the task {task!r} must be above 0 and finite, not {weight}.")
    return dict(weights)


def _plain(value: Any) -> Any:
    """Return the value of Python's own types alone, as checkpoints keep it."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(each) for each in value)
    return next((kind(value) for kind in (bool, int, float, str) if isinstance(value, kind)), value)
