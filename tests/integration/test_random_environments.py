"""Random environments through kills and resumes: nothing is lost, no error but a refusal, and equal where promised."""

from __future__ import annotations

import random
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from forks import run
from random_environments import NUM_UPDATES, Case, Killed, Play

from lit_grpo.checkpoints import check_whole, read
from lit_grpo.plugins import CannotGoOn

SCRIPT = Path(__file__).parents[1] / "random_environments.py"
LIMIT_S = 60.0
"""After so many seconds a case counts as hanging; one takes less than a second."""
REFUSAL = "returns a state that no checkpoint can hold"
GONE = "All trajectories of the last batch were dropped after their retries"  # before any has begun


def played(play: Play) -> list[Any] | str:
    """Play to the end; return what was trained on, or the sentence that refused the run."""
    outcomes: list[Any] = []

    def act() -> None:
        try:
            outcomes.append(play.run())
        except BaseException as error:  # whatever goes wrong is looked at below
            outcomes.append(error)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert outcomes, f"case {play.case} hangs"
    (outcome,) = outcomes
    if isinstance(outcome, ValueError) and REFUSAL in str(outcome):
        return REFUSAL
    if isinstance(outcome, CannotGoOn) and GONE in str(outcome):
        return GONE
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def cut_again_and_again(case: Case, folder: Path) -> list[Any] | str:
    rng = random.Random(f"cuts/{case.seed}")
    for _ in range(rng.randint(1, 4)):
        try:
            return played(Play(case, folder, cut_at=rng.randint(0, 7)))
        except Killed:
            continue
    return played(Play(case, folder))


def by_group(trained_on: Sequence[Sequence[Any]]) -> dict[tuple[str, int], dict[tuple[int, ...], Any]]:
    groups: dict[tuple[str, int], dict[tuple[int, ...], Any]] = defaultdict(dict)
    for prompt_id, visit, path, *told in (each for update in trained_on for each in update):
        assert tuple(path) not in groups[prompt_id, visit], "a completion was trained on twice"
        groups[prompt_id, visit][tuple(path)] = told
    return groups


def check(case: Case, alone: list[Any] | str, cut: list[Any] | str, folders: Sequence[Path]) -> None:
    if case.is_refused:  # unless no environment ever began
        assert all(told == REFUSAL or not any(told) for told in (alone, cut)), case
        return
    if GONE in (alone, cut):
        assert case.chances["reset"] > 0, case
        return
    assert not isinstance(alone, str) and not isinstance(cut, str), case
    assert len(alone) == len(cut) == NUM_UPDATES
    groups = [by_group(alone), by_group(cut)]
    for trained_on, folder in zip(groups, folders, strict=True):
        check_whole(folder / "last.ckpt")
        saved = read(folder / "last.ckpt")
        drawn = [(each.prompt_id, each.visit) for each in Play(case, folder / "new").loader.draw(saved["consumed"])]
        left = {tuple(key) for key in saved["open"]}
        assert len(set(drawn)) == len(drawn) and trained_on.keys() | left | set(map(tuple, saved["empty"])) == set(
            drawn
        )
        assert not trained_on.keys() & left
        assert all(dict(told[-1])["audit"] == 1.0 for group in trained_on.values() for told in group.values()), case
    for key in groups[0].keys() & groups[1].keys():
        assert groups[0][key] == groups[1][key], f"{case}: {key} was trained on differently"
    if case.ends_alike:
        assert alone == cut, case


@pytest.mark.parametrize(
    "seeds", [range(8), *(pytest.param(range(n, n + 24), marks=pytest.mark.nightly) for n in range(8, 200, 24))]
)
def test_a_random_environment_is_cut_off_and_goes_on(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        case, folders = Case.of(seed), [tmp_path / f"{seed}" / name for name in ("alone", "cut")]
        check(case, played(Play(case, folders[0])), cut_again_and_again(case, folders[1]), folders)


KILLED = (1, 4, 6, 9, 16, 18, 20, 21, 25, 28)
"""Cases that are no refusals."""


@pytest.mark.parametrize("seeds", [KILLED[:1], pytest.param(KILLED[1:], marks=pytest.mark.nightly)])
def test_processes_with_random_environments_are_killed_and_go_on(seeds: Sequence[int], tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "killed"), *map(str, seeds)]
    done = run(command, timeout=LIMIT_S * len(seeds))
    told = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [seed for seed, *_ in told] == list(seeds), done.stderr
    for seed, *killed, code in told:
        case, folders = Case.of(seed), [tmp_path / f"{seed}", tmp_path / "killed" / str(seed)]
        assert code == 0 and set(killed) <= {-9, 0}, done.stderr
        check(case, played(Play(case, folders[0])), read(folders[1] / "last.ckpt")["trained_on"], folders)
