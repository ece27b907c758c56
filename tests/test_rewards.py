"""Loading reward functions, and the ones that come with the project."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
from conftest import random_policy
from hand_made import fit, make_module, random_groups

from lit_grpo.data import PromptDataModule
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.rewards import (
    ExactMatch,
    FormatMatch,
    RewardFunction,
    RewardRunner,
    RewardSpec,
    SoftOverlongPenalty,
    exact_match,
    load_rewards,
)
from lit_grpo.tools.doctor.patient import Patient
from lit_grpo.tools.doctor.report import Report
from lit_grpo.tools.doctor.rewards import check_rewards
from lit_grpo.types import Completion, Prompt, Request, Rollout, RolloutGroup, SamplingParams


def write(path: Path, code: str) -> str:
    path.write_text(textwrap.dedent(code))
    return str(path)


def load(function: str, **args: Any) -> RewardFunction:
    return RewardFunction.load(RewardSpec(function, args=args))


def error_of(function: str, **args: Any) -> str:
    with pytest.raises(ValueError) as caught:
        load(function, **args)
    return str(caught.value)


@pytest.fixture
def rewards_py(tmp_path: Path) -> str:
    return write(
        tmp_path / "my_rewards.py",
        """
        LOADED = []
        def score(completion, answer): return float(completion == answer)
        def score_group(completions, **columns): return [1.0 for _ in completions]
        def scaled(completion, scale, offset=0.0): return scale * len(completion) + offset
        async def later(completion): return 1.0
        class Scaled:
            def __init__(self, scale=1.0): self.scale = scale
            def __call__(self, completion): return self.scale
            def method(self, completion): return 2.0
        class Later:
            async def __call__(self, completions): return [1.0]
        class Mute: pass
        class Broken:
            def __init__(self): raise KeyError("no such key")
        instance = Scaled(3.0)
        text = "score"
        def neither(text, answer): return 0.0
        def both(completion, completions): return 0.0
        def positional(completion, /): return 0.0
        def declared(completion, **columns): return 0.0
        declared.columns = "answer"
        def unreadable(completion): return 0.0
        unreadable.__signature__ = "none"
        """,
    )


def test_functions_of_one_file_share_one_module(rewards_py: str) -> None:
    first, second = load(f"{rewards_py}:score"), load(f"{rewards_py}:scaled", scale=1.0)
    assert first.call.__globals__ is second.call.func.__globals__  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["lit_grpo.rewards.exact_match", "lit_grpo.rewards:exact_match"])
def test_function_is_found_by_import_path(path: str) -> None:
    function = load(path)
    assert function.call is exact_match
    assert function.name == "exact_match"


def test_class_is_built_with_its_args(rewards_py: str) -> None:
    assert load(f"{rewards_py}:Scaled", scale=2.5).call(completion="x") == 2.5
    assert load(f"{rewards_py}:Scaled").name == "Scaled"


def test_args_are_bound_to_a_function(rewards_py: str) -> None:
    function = load(f"{rewards_py}:scaled", scale=2.0)
    function.check_columns([])
    assert function.call(completion="abc") == 6.0


def test_missing_file_is_named_with_the_directory_it_was_looked_for_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert error_of("nowhere.py:score") == (
        "reward function 'nowhere.py:score': there is no file nowhere.py in the working directory "
        f"{tmp_path}; correct the path."
    )


def test_broken_file_gives_the_first_line_of_its_error(tmp_path: Path) -> None:
    path = write(tmp_path / "broken.py", "raise RuntimeError('no license.\\nmore\\nlines')")
    assert error_of(f"{path}:score") == (
        f"reward function '{path}:score': its module cannot be imported (RuntimeError: no license); "
        "mend it, or correct "
        "the path."
    )
    assert "(SyntaxError: " in error_of(write(tmp_path / "syntax.py", "def score(:") + ":score")


def test_missing_name_lists_near_names(rewards_py: str) -> None:
    assert error_of(f"{rewards_py}:scor") == (
        f"reward function '{rewards_py}:scor': {rewards_py} has no 'scor'; did you mean 'score'?"
    )
    assert error_of(f"{rewards_py}:xyz").endswith("has no 'xyz'; define it or correct the name.")


@pytest.mark.parametrize("path", ["score", "my_rewards.py", "module:", ":score", ""])
def test_path_without_module_or_name_is_refused(path: str) -> None:
    assert error_of(path) == (
        f"reward function {path!r} names no function; write module:name, module.name or file.py:name, or one of "
        "exact_match, math_equivalence, format_match, soft_overlong_penalty, relative_judge, rubric_judge, http_judge, "
        "reward_model."
    )


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        ("text", {}, " is a str, which cannot be called; name a function or a class."),
        ("Mute", {}, " is a class whose objects cannot be called; add a __call__."),
        ("Broken", {}, " cannot be built with args {} (KeyError: 'no such key'); correct its args."),
        ("instance", {"scale": 1}, " is already built and takes no args; name its class Scaled to give it some."),
        ("score", {"anwser": 1}, " has no parameter 'anwser' to bind; did you mean 'answer'?"),
        ("score", {"q": 1}, " has no parameter 'q' to bind; its parameters are completion, answer."),
        (
            "neither",
            {},
            " must take 'completion' (to score one rollout) or 'completions' (to score a "
            "group), but has neither among "
            "its parameters (text, answer); name one of them so.",
        ),
        (
            "both",
            {},
            " takes 'completion', which is of one rollout, and 'completions', which is of a whole group; "
            "leave 'completions' out, or leave 'completion' out and take 'completions', which has it for each.",
        ),
        (
            "positional",
            {},
            ": parameter 'completion' is positional-only, and arguments are given by name; "
            "wrap it in a function without '/'.",
        ),
        ("declared", {}, ": its attribute 'columns' must be a tuple of names, not 'answer'."),
        ("unreadable", {}, ": its parameters cannot be read; wrap it in a function with named ones."),
    ],
)
def test_what_cannot_score_is_refused(rewards_py: str, name: str, args: dict[str, Any], problem: str) -> None:
    path = f"{rewards_py}:{name}"
    assert error_of(path, **args) == f"reward function {path!r}{problem}"


def test_required_parameter_that_is_no_column_is_refused(rewards_py: str) -> None:
    function = load(f"{rewards_py}:score")
    function.check_columns(["question", "answer"])
    with pytest.raises(ValueError) as caught:
        function.check_columns(["question", "solution"])
    assert str(caught.value) == (
        f"reward 'score' ({rewards_py}:score) requires the parameter 'answer', which is neither "
        "one of prompt, "
        "completion, completion_ids, num_tokens, finish_reason, max_tokens, episode, trainer_state, log_metric, "
        "log_extra, log_feedback nor a column of the data (its columns: question, solution); set it in args, rename it "
        "or give it a default."
    )


def test_importing_the_rewards_imports_nothing_heavy() -> None:
    code = (
        "import sys, lit_grpo.rewards; "
        "print([m for m in ('torch', 'transformers', 'lightning', 'math_verify', 'sympy') if m "
        "in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("completion", "answer", "reward"), [(" 72\n", "72", 1.0), ("72", 72, 1.0), ("7", "72", 0.0), ("x", None, None)]
)
def test_exact_match_compares_stripped_text(completion: str, answer: Any, reward: float | None) -> None:
    assert exact_match(completion, answer=answer) == reward


def test_exact_match_takes_group_1_of_the_last_match() -> None:
    score = ExactMatch("target", pattern=r"<answer>(.*?)</answer>")
    assert score("<answer>1</answer> no: <answer> 2 </answer>", target="2") == 1.0
    assert score("<answer>2</answer> no: <answer>1</answer>", target="2") == 0.0
    assert score("2", target="2") == 0.0


def test_exact_match_ignores_case_if_told_to() -> None:
    assert exact_match("paris", answer="Paris") == 0.0
    assert ExactMatch(ignore_case=True)("paris", answer="Paris") == 1.0


def test_pattern_that_cannot_find_an_answer_is_refused() -> None:
    assert error_of("lit_grpo.rewards.ExactMatch", pattern="#### .*") == (
        "reward function 'lit_grpo.rewards.ExactMatch': pattern '#### .*' has no group; put "
        "parentheses around the "
        "answer."
    )


def test_format_match_wants_the_whole_completion_unless_told_otherwise() -> None:
    pattern = r"<think>.*</think>"
    assert FormatMatch(pattern)("<think>a\nb</think>") == 1.0
    assert FormatMatch(pattern)("<think>a\nb</think> c") == 0.0
    assert FormatMatch(pattern, full=False)("<think>a\nb</think> c") == 1.0
    assert FormatMatch(pattern, full=False)("<think>a") == 0.0


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (101, -1.0), (900, -1.0)]
)
def test_overlong_penalty_is_linear_in_the_buffer(num_tokens: int, penalty: float) -> None:
    assert SoftOverlongPenalty(buffer=20)("", num_tokens, max_tokens=100) == penalty
    assert SoftOverlongPenalty(buffer=20, max_tokens=100)("", num_tokens, max_tokens=4096) == penalty


def test_overlong_penalty_refuses_a_buffer_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"buffer must be at least 1, not 0."):
        SoftOverlongPenalty(buffer=0)
    with pytest.raises(ValueError, match=r"buffer 20 is larger than max_tokens 10; make it smaller."):
        SoftOverlongPenalty(buffer=20, max_tokens=10)
    with pytest.raises(ValueError, match=r"buffer 20 is larger than max_tokens 10; make it smaller."):
        SoftOverlongPenalty(buffer=20)("", 5, max_tokens=10)


def test_one_reward_may_stand_for_a_list_of_it() -> None:
    def score(completion: str) -> float:
        return 1.0

    for given in (score, [score], "exact_match", {"path": "exact_match"}, RewardSpec("exact_match"), ("exact_match",)):
        (function,) = load_rewards(given)
        assert function.name == ("score" if given in (score, [score]) else "exact_match")
    assert load_rewards(None) == []


@pytest.mark.parametrize(
    ("prompt", "completion", "value"),
    [
        ("<|im_start|>assistant\n<think>\n", "a</think> 4", 1.0),
        ("<|im_start|>assistant\n<think>\n", "<think>a</think> 4", 1.0),
        ("<|im_start|>assistant\n<think>\n", "a 4", 0.0),
        ("<|im_start|>assistant\n", "a</think> 4", 0.0),
        ("Write <think> first. Question: 1+1?", "a</think> 4", 0.0),
    ],
)
def test_a_format_counts_what_the_prompt_has_begun(prompt: str, completion: str, value: float) -> None:
    (function,) = load_rewards([RewardSpec("format_match", args={"pattern": r"<think>(?!.*<think>)(.*?)</think>.*"})])
    request = Request(Prompt("train/0", (1,), prompt), (0,), SamplingParams())
    rollout = Rollout(request.prompt, Completion(request, [5], [0.0], [0], "stop", completion))
    runner = RewardRunner([function])
    runner.score(RolloutGroup(rollout.prompt, [rollout]))
    runner.close()
    assert rollout.rewards["format_match"] == value


def test_a_run_says_which_reward_gives_nothing_where_the_prompt_has_begun_the_answer(policy_folder: Path) -> None:
    def batch(text: str) -> list[RolloutGroup]:
        groups = random_groups(random_policy(), [[0.0, 0.0]])
        for rollout in groups[0].rollouts:
            rollout.prompt = dataclasses.replace(rollout.prompt, text=text)
            rollout.rewards = {"exact_match": 0.0}
        return groups

    with pytest.warns(UserWarning, match="Prompts end in '<think>', .* exact_match gave 0 to every completion"):
        fit(make_module(policy_folder), batch("1+1? <think>\n"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(make_module(policy_folder), batch("1+1? "))
    assert not any("Prompts end in" in str(each.message) for each in caught)


@pytest.mark.parametrize(
    ("text", "said", "rows"),
    [
        ("1+1? <think>\n", "a</think> 4", ["reward whole", "<think> in prompts"]),
        ("1+1? <think>\n", "<think>a</think> 4", ["reward whole"]),  # it has earned something
        ("1+1? ", "a</think> 4", ["reward whole"]),
    ],
)
def test_the_doctor_says_which_reward_gives_nothing_where_the_prompt_has_begun_the_answer(
    text: str, said: str, rows: list[str]
) -> None:
    def whole(completion: str) -> float:
        return float(completion.startswith("<think>"))

    module, data, none = make_module("nowhere", rewards=[whole]), PromptDataModule(), cast("Any", None)
    module.tokenizer = load_tokenizer("tiny")
    request = Request(Prompt("train/0", (1,), text), (0,), SamplingParams())
    rollout = Rollout(request.prompt, Completion(request, [5], [0.0], [0], "stop", said))
    data.prompts["train"] = [request.prompt]
    patient = Patient(none, module, data, none, none, Report(), None, groups=[RolloutGroup(request.prompt, [rollout])])
    found = [finding for finding in check_rewards(patient) if finding.name not in ("pass@1", "rewards")]
    assert [finding.name for finding in found] == rows
    if len(rows) > 1:
        assert (found[1].verdict, found[1].figure, found[1].remedy) == (
            "warn",
            "prompts end in <think>, so the text of completions lacks it, and whole gives 0 to all",
            "if whole looks for <think>, let it take the argument prompt too, or use format_match",
        )


# ---- rewards from Python --------------------------------------------------------------------------------


def right(completion: str, answer: Any) -> float:
    return float(completion == answer)


class Scaled:
    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale

    def __call__(self, completion: str) -> float:
        return self.scale


WITH_A_FUNCTION: dict[str, tuple[Any, tuple[str, float]]] = {
    "a weight": ({"function": right, "weight": 0.1}, ("right", 0.1)),
    "a spec": (RewardSpec(right, weight=0.1), ("right", 0.1)),
    "a name": ({"function": right, "name": "mine"}, ("mine", 1.0)),
    "a path": ({"path": right, "weight": 2}, ("right", 2)),
    "an object": (RewardSpec(Scaled(3.0), weight=0.5), ("Scaled", 0.5)),
    "a class with arguments": (RewardSpec(Scaled, args={"scale": 4.0}), ("Scaled", 1.0)),
    "a class": (Scaled, ("Scaled", 1.0)),
    "bound arguments": (RewardSpec(right, args={"answer": 7}), ("right", 1.0)),
    "partial": ({"function": functools.partial(right, answer=7), "weight": 0.0}, ("right", 0.0)),
    "a lambda": ({"function": lambda completion: 1.0, "name": "one"}, ("one", 1.0)),
    "ours": ({"function": ExactMatch(), "weight": 0.25, "name": "exact"}, ("exact", 0.25)),
}


@pytest.mark.parametrize("case", WITH_A_FUNCTION)
def test_a_function_object_may_have_a_weight_and_a_name(case: str) -> None:
    given, expected = WITH_A_FUNCTION[case]
    (function,) = load_rewards(given)
    assert (function.name, function.weight) == expected


def test_a_function_object_may_have_data_sets_retries_and_arguments() -> None:
    given = {"function": Scaled, "args": {"scale": 4.0}, "datasets": ["a"], "retries": 2, "retry_pause_s": 0.5}
    (function,) = load_rewards(given)
    assert function.datasets == {"a"} and (function.retries, function.retry_pause_s) == (2, 0.5)
    assert function.call(completion="") == 4.0


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"func": right}, "has no field 'func'; write 'function'."),
        ({"reward_funcs": right, "weight": 0.1}, "has no field 'reward_funcs'; write 'function'."),
        ({"function": right, "reward_weights": 0.1}, "has no field 'reward_weights'; write 'weight'."),
        ({"function": right, "wieght": 0.1}, "has no field 'wieght'; did you mean 'weight'?"),
        ({"function": right, "zzz": 1}, "has no field 'zzz'; it has function, weight, name, args, datasets, retries"),
        ({"weight": 0.1}, "has no function; add 'function' with a function or its path."),
        ({"function": right, "name": ""}, "the name of reward function 'right' is empty; leave it out"),
        ({"function": 3}, "the reward 3 is no function, path or RewardSpec; give one of these, or a mapping such as"),
        ({"function": right, "weight": "a"}, "reward function 'right': weight must be a finite number, not 'a'"),
        ({"function": right, "weight": float("nan")}, "reward function 'right': weight must be a finite number"),
        ({"function": right, "process": True}, "give its path (file.py:name or module:name), or leave process out."),
        ([right, {"function": right}], "2 rewards have the name 'right' (right, right); set a name for each."),
        ({"function": Scaled, "args": {"scal": 1}}, "reward function 'Scaled' cannot be built with args {'scal': 1}"),
        (
            {"function": lambda environments, episode: 0.0, "name": "scores"},
            "takes 'episode', which is of one rollout, and 'environments', which is of a whole group; leave "
            "'environments' out, or leave 'episode' out and take 'episodes', which has it for each.",
        ),
        (
            lambda data_source, solution_str, ground_truth, extra_info=None: 1.0,
            "has verl's parameters (data_source, solution_str, ground_truth, extra_info); wrap it in a fun",
        ),
    ],
)
def test_a_reward_that_is_wrong_is_refused_in_a_sentence(given: Any, problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_rewards(given)
    assert problem in str(caught.value) and "\n" not in str(caught.value)
