"""The completions in a report: the same prompts at several updates, and before and after the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import HOSTILE, make_run

from lit_grpo.tools.dashboard.report import read_folder, write_report
from lit_grpo.tools.dashboard.report.completions import MAX_CHARACTERS, MAX_PROMPTS, MAX_TEXT, completions, over_time


def sample(step: int, prompt: str, reward: float | None, completion: str = "It is 6.") -> dict[str, Any]:
    return {"step": step, "prompt_id": prompt, "prompt": f"{prompt}?", "completion": completion, "reward": reward}


def evaluated(
    prompt: str, policy: str, correct: bool | None = None, greedy: bool = True, sample: int = 0
) -> dict[str, Any]:
    row = {"prompt_id": prompt, "prompt": f"{prompt}?", "policy": policy, "greedy": greedy, "sample": sample}
    return row | {"completion": f"{policy} to {prompt}", "reward": float(bool(correct)), "correct": correct}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- the same prompts over time -----------------------------------------------------------------------


def test_a_prompt_is_shown_at_its_first_middle_and_last_update_with_its_best_and_worst_sample() -> None:
    rows = [sample(step, "train/1", reward=step / 10, completion=f"at {step}") for step in (1, 2, 4, 8, 9)]
    rows += [sample(9, "train/1", 0.1, "worst"), sample(9, "train/1", 0.5, "between")]
    rows += [sample(4, "train/2", 1.0), sample(4, "train/2", 0.0)]  # at one update only
    (prompt,) = over_time(rows)
    assert (prompt["prompt_id"], prompt["prompt"], prompt["num_updates"]) == ("train/1", "train/1?", 5)
    assert prompt["moments"] == [
        {"step": 1, "number": 1, "shown": [{"completion": "at 1", "reward": 0.1}]},
        {"step": 4, "number": 1, "shown": [{"completion": "at 4", "reward": 0.4}]},
        {
            "step": 9,
            "number": 3,
            "shown": [{"completion": "at 9", "reward": 0.9}, {"completion": "worst", "reward": 0.1}],
        },
    ]


def test_prompts_whose_reward_changed_come_first_then_those_of_most_updates() -> None:
    rows = [sample(step, "a", 0.0) for step in (3, 7)] + [sample(step, "b", 0.0) for step in (1, 2, 3)]
    rows += [sample(3, "c", 0.0), sample(9, "c", 1.0), sample(9, "c", 0.0)]
    found = over_time(rows)
    assert [prompt["prompt_id"] for prompt in found] == ["c", "b", "a"]
    assert [moment["step"] for moment in found[2]["moments"]] == [3, 7]


def test_samples_without_an_id_a_step_or_a_reward_are_told_apart_by_their_text() -> None:
    rows = [{"step": 1, "prompt": "x", "completion": "a"}, {"step": 2, "prompt": "x", "reward": None}, {"prompt": "x"}]
    rows.append({"step": 2, "prompt": "x", "reward": 10**400})
    (prompt,) = over_time([*rows, {"step": 3}, {}])
    assert prompt["prompt_id"] is None and [moment["step"] for moment in prompt["moments"]] == [1, 2]
    assert over_time([]) == []


def test_completions_of_the_last_validation_are_there_though_it_is_the_only_one() -> None:
    rows = [sample(step, "validation/0", reward=step / 60, completion=f"at {step}") for step in (0, 60)]
    (prompt,) = completions([], [], rows)["held_out"]
    assert [moment["shown"][0]["completion"] for moment in prompt["moments"]] == ["at 0", "at 60"]
    (prompt,) = completions([], [], rows[1:])["held_out"]
    assert prompt["num_updates"] == 1 and prompt["moments"][0]["step"] == 60


# ---- before and after ---------------------------------------------------------------------------------


def shown(rows: list[dict[str, Any]]) -> Any:
    return completions([], rows)["evaluation"]


def test_the_first_policy_is_before_and_the_last_one_after_and_prompts_that_changed_come_first() -> None:
    answers = {"p/0": (True, True), "p/1": (False, False), "p/2": (False, True), "p/3": (True, False)}
    rows = [evaluated(prompt, "base", before) for prompt, (before, _) in answers.items()]
    rows += [evaluated(prompt, "runs/a/policy", after) for prompt, (_, after) in answers.items()]
    found = shown(rows)
    assert found["policies"] == ["base", "runs/a/policy"] and found["num_prompts"] == 4
    assert found["counts"] == {"gained": 1, "lost": 1, "both": 1, "neither": 1}
    assert [(row["prompt_id"], row["kind"]) for row in found["prompts"]] == [
        ("p/2", "gained"), ("p/3", "lost"), ("p/1", "neither"), ("p/0", "both"),
    ]  # fmt: skip
    assert found["prompts"][0]["cells"][1] == {"completion": "runs/a/policy to p/2", "reward": 1.0, "correct": True}


def test_one_policy_is_no_comparison_and_a_prompt_that_one_policy_lacks_is_an_empty_cell() -> None:
    assert shown([evaluated("p/0", "base", True)]) is None and shown([]) is None
    found = shown([evaluated("p/0", "base"), evaluated("p/1", "base"), evaluated("p/1", "new")])
    assert found["counts"] == {"gained": 0, "lost": 0, "both": 0, "neither": 0}
    assert {row["prompt_id"]: row["cells"][1] is None for row in found["prompts"]} == {"p/0": True, "p/1": False}


def test_of_many_policies_the_first_three_and_the_last_are_shown() -> None:
    names = [f"policy{number}" for number in range(7)]
    assert shown([evaluated("p", name) for name in names])["policies"] == [*names[:3], "policy6"]


def test_of_a_prompts_completions_the_greedy_one_is_read_or_else_the_first_sample(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", updates=2, names=["reward"])
    rows = [evaluated("p", "a", greedy=False, sample=number) for number in range(3)]
    rows += [evaluated("p", "b", greedy=False), evaluated("p", "b", greedy=True, sample=0), evaluated("p", "b")]
    rows += [{"policy": "no prompt"}, {"prompt_id": "no policy"}]
    path = run / "evaluation" / "completions.jsonl"
    write(path, rows)
    with path.open("a") as file:
        file.write('no json\n{"prompt_id": "p", "policy": "half')
    kept = read_folder(run).evaluated
    shown = [tuple(map(dict(row).get, ("policy", "greedy", "sample"))) for row in kept]
    assert shown == [("a", False, 0), ("b", True, 0)]


# ---- limits, and text that is no text -----------------------------------------------------------------


@pytest.mark.parametrize("num_runs", [1, 5])
def test_texts_of_all_runs_together_are_limited(num_runs: int) -> None:
    text = "y" * 3 * MAX_CHARACTERS
    samples = [sample(step, f"train/{number}", 0.0, text) for step in range(50) for number in range(40)]
    policies = [evaluated(f"p/{number}", name) | {"completion": text} for name in "ab" for number in range(99)]
    made = completions(samples, policies, samples, num_runs)
    assert len(json.dumps(made)) * num_runs < 1.05 * MAX_TEXT
    assert made["samples"][-1]["step"] == 49 and made["num_samples"] == 2000
    assert 0 < len(made["over_time"]) <= MAX_PROMPTS and 0 < len(made["held_out"]) <= MAX_PROMPTS
    assert 0 < len(made["evaluation"]["prompts"]) <= MAX_PROMPTS


def test_a_hostile_evaluation_cannot_end_the_element_that_holds_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", updates=2, names=["reward"])
    rows = [evaluated("p", f"{name} {HOSTILE}") | {"prompt": HOSTILE, "completion": HOSTILE} for name in "ab"]
    write(run / "evaluation" / "completions.jsonl", rows)
    text = write_report(run).read_text()
    assert text.count("</script>") == 2 and "<img" not in text and "\x1b" not in text
