"""Checks that reward functions give numbers, that the numbers differ, and that rewards can be earned."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from lit_grpo.display.pictures import without_images
from lit_grpo.process.terminal import on_one_line
from lit_grpo.rewards import RewardError, RewardRunner
from lit_grpo.rewards.function import RewardFunction
from lit_grpo.rewards.inputs import begun
from lit_grpo.tools.doctor.patient import Patient
from lit_grpo.tools.doctor.report import CheckResult
from lit_grpo.types import Completion, Prompt, Request, Rollout, RolloutGroup


def check_rewards(patient: Patient) -> Iterator[CheckResult]:
    """Score the samples, and the columns of the data as if they were completions, with each function."""
    module = patient.module
    answers = [_answers(patient, group.prompt) for group in patient.groups]
    totals: list[float] = []
    differing: list[str] = []
    can_vary = False
    for function in module.rewards:
        name = f"reward {function.name}"
        runner = RewardRunner([function], "raise", module.reward_timeout_s, module.reward_workers)
        try:
            seconds, values = _score(runner, function, patient.groups)
            reached = {*_score(runner, function, answers)[1]} if any(group.rollouts for group in answers) else set()
        except RewardError as error:
            verdict = "fail" if module.on_reward_error == "raise" else "warn"
            yield CheckResult(verdict, name, str(error).rstrip("."), "mend the function, or its data")
            continue
        finally:
            runner.close()
        if _decides(patient, function):
            passed = sum(module.pass_rule.passes({function.name: value}) for value in values)
            yield CheckResult("pass", "pass@1", f"counts {module.pass_rule}: {passed} of {len(values)} samples pass")
        given = [value for value in values if value is not None]
        if not given:
            yield CheckResult("warn", name, "None for all samples", "let it apply to some of them")
            continue
        figure = f"{min(given):.3g} to {max(given):.3g}, {1000 * seconds:.1f} ms a call"
        varies = len(set(given)) > 1
        others = reached - set(given) - {None}
        can_vary |= bool(function.weight) and (varies or bool(others))
        totals += given
        differing += [function.name] if varies and (function.weight or _decides(patient, function)) else []
        yield _judged(name, figure, varies, given[0], len(given), bool(others))
        if not any(given):
            yield from _of_begun_answers(patient, function)
    _show_one(patient)
    yield from _what_is_learned(module.pass_rule.reward, differing)
    if totals and not can_vary:
        yield CheckResult(
            "fail",
            "rewards",
            "no sample, and no column of the data as a completion, earns more than another",
            "try the functions on a completion that deserves a reward; without differences nothing is learned",
        )


def _of_begun_answers(patient: Patient, function: RewardFunction) -> Iterator[CheckResult]:
    """Warn if a function gives 0 to all samples whose prompts begin the answer with a tag that it does not see."""
    if tag := begun(patient.prompts[0].text).strip():
        yield CheckResult(
            "warn",
            f"{tag} in prompts",
            f"prompts end in {tag}, so the text of completions lacks it, and {function.name} gives 0 to all",
            f"if {function.name} looks for {tag}, let it take the argument prompt too, or use format_match",
        )


def _show_one(patient: Patient) -> None:
    """Print a completion beside the other columns of its row, and its rewards; the best one, if they differ."""
    scored = [rollout for rollout in patient.rollouts if rollout.rewards]
    if scored:
        best = max(scored, key=lambda one: sum(value for value in one.rewards.values() if value is not None))
        columns = {
            name: value for name, value in best.prompt.columns.items() if name != patient.data.renderer.prompt_column
        }
        patient.report.quote(f'{best.prompt.prompt_id} is completed: "{on_one_line(best.completion.text)}"')
        for name, value in without_images(columns).items():
            patient.report.quote(f"  its {name}: {on_one_line(str(value))}")
        for name, value in best.rewards.items():
            patient.report.quote(f"  its reward {name}: {'none' if value is None else f'{value:.3g}'}")


def _decides(patient: Patient, function: RewardFunction) -> bool:
    return function.name == patient.module.pass_rule.reward


def _what_is_learned(decides: str, differing: list[str]) -> Iterator[CheckResult]:
    """Warn if other functions tell samples apart, and the one that decides who passes does not."""
    if differing and decides not in differing:
        yield CheckResult(
            "warn",
            "what is learned",
            f"only {', '.join(differing)} of these samples, for {decides}, which decides pass@1, gives all of them the "
            "same",
            f"watch rewards/{decides}/mean; if the reward rises without it, weigh the others less",
        )


def _judged(name: str, figure: str, varies: bool, value: float, count: int, reachable: bool) -> CheckResult:
    if varies:
        return CheckResult("pass", name, figure)
    figure = f"{value:.3g} for all {count} samples, {figure.rpartition(', ')[2]}"
    if reachable:
        return CheckResult(
            "warn",
            name,
            f"{figure}, and another for the data's answers",
            "perhaps out of the policy's reach; raise num_generations, or begin with easier prompts",
        )
    return CheckResult("warn", name, figure, "constant; check that it can be earned at all")


def _score(
    runner: RewardRunner, function: RewardFunction, groups: list[RolloutGroup]
) -> tuple[float, list[float | None]]:
    """Return the seconds of a call, and the values."""
    start = time.perf_counter()
    for group in groups:
        runner.score(group)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    seconds = (time.perf_counter() - start) / max(len(groups) if function.on_group else len(rollouts), 1)
    return seconds, [rollout.rewards[function.name] for rollout in rollouts]


def _answers(patient: Patient, prompt: Prompt) -> RolloutGroup:
    """Return each text column of a prompt's row as a completion; one of them is often the right answer."""
    tokenizer, rollouts = patient.module.tokenizer, []
    columns = {name: value for name, value in prompt.columns.items() if isinstance(value, str | int | float)}
    for number, text in enumerate(dict.fromkeys(map(str, columns.values()))):
        ids_T = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
        request = Request(prompt, (number,), patient.module.sampling)
        completion = Completion(request, ids_T, torch.zeros(len(ids_T)), torch.zeros_like(ids_T), "stop", text)
        rollouts.append(Rollout(prompt, completion))
    return RolloutGroup(prompt, rollouts)
