"""What `evaluate` computes of completions: intervals, the paired test, the majority, and what it writes."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from made_runs import HOSTILE

from lit_grpo.methods.majority_vote import MajorityVote
from lit_grpo.plugins import fresh
from lit_grpo.rewards import ExactMatch
from lit_grpo.rewards.function import RewardFunction
from lit_grpo.tools.evaluation.answers import find_answers, majority_correct
from lit_grpo.tools.evaluation.command import read_options
from lit_grpo.tools.evaluation.figures import Pass, compare
from lit_grpo.tools.evaluation.harness import adds_special_tokens, make_task
from lit_grpo.tools.evaluation.held_out import SamplingPass, Scored
from lit_grpo.tools.evaluation.intervals import paired_p, percentile_interval, resampled, wilson
from lit_grpo.tools.evaluation.policies import find_policies
from lit_grpo.tools.evaluation.result import Conditions, Result
from lit_grpo.tools.evaluation.side_by_side import side_by_side
from lit_grpo.types import PassRule, Prompt, SamplingParams


def scored(row: int, sample: int = 0, text: str = "", correct: bool | None = False, **fields: Any) -> Scored:
    """A completion of a row, right or wrong."""
    values: dict[str, Any] = {"policy": "a", "greedy": False, "reward": float(correct or 0), "answer": text}
    values |= {"length": 3, "truncated": False}
    return Scored(f"test/{row}", f"{row}?", sample=sample, completion=text, correct=correct, **(values | fields))


def passed(*rows: str, **fields: Any) -> list[Scored]:
    """Completions of rows, a digit for each: 1 is right."""
    return [
        scored(row, place, correct=one == "1", **fields)
        for row, digits in enumerate(rows)
        for place, one in enumerate(digits)
    ]


# ---- intervals and the test ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correct", "rows", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_is_that_of_newcombes_table(correct: int, rows: int, low: float, high: float) -> None:
    """Statistics in Medicine 17 (1998) 857-872, table I, method 3."""
    assert wilson(correct, rows) == pytest.approx((low, high), abs=5e-5)
    assert wilson(rows - correct, rows) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_every_proportion_lies_in_its_interval() -> None:
    for rows in range(1, 2001):
        for correct in {0, 1, rows // 3, rows - 1, rows}:
            low, high = wilson(correct, rows)
            assert 0 <= low <= correct / rows <= high <= 1, (correct, rows)


@pytest.mark.parametrize("digits", ["000", "111", "1" * 100, "1" * 1319, "10" * 7, "0"])
def test_figures_lie_in_their_intervals(digits: str) -> None:
    for number in (1, 3):
        rows = Pass(passed(*(digit * number for digit in digits)), number, () if number == 1 else (1, 2))
        for name, (value, low, high) in rows.figures().items():
            assert low <= value <= high, name
    low, high = compare(rows, rows)[1:3]
    assert low <= 0 <= high


def test_the_bootstrap_draws_all_resamples_equally_often() -> None:
    """Of three rows there are 27, whose sums can be written down."""
    values = np.array([[0.0], [1.0], [5.0]])
    exact = [sum(values[place, 0] for place in places) for places in itertools.product(range(3), repeat=3)]
    sums = resampled(values, resamples=27_000)[:, 0]
    for total in set(exact):
        expected = 1000 * exact.count(total)
        assert abs((sums == total).sum() - expected) < 5 * math.sqrt(expected)
    assert percentile_interval(sums) == (0.0, 15.0)  # each 1 of 27 resamples, more than 2.5%
    assert (resampled(values)[:, 0] == resampled(values)[:, 0]).all()


def brute_force_p(differences: Sequence[int]) -> float:
    """Of all signs, the share whose sum is at least as far from 0."""
    observed = abs(sum(differences))
    signs = list(itertools.product((-1, 1), repeat=len(differences)))
    return sum(abs(sum(map(int.__mul__, row, differences))) >= observed for row in signs) / len(signs)


def test_the_paired_test_counts_all_signs() -> None:
    random = np.random.default_rng(0)
    for _ in range(30):
        differences = random.integers(-4, 5, random.integers(1, 11)).tolist()
        assert paired_p(differences) == pytest.approx(brute_force_p(differences), abs=1e-12)
    assert paired_p([0, 0, 0]) == 1.0
    assert 0 < paired_p([1] * 800) < 1e-200


@pytest.mark.parametrize(("better", "worse"), [(6, 16), (0, 5), (7, 7), (120, 2)])
def test_the_paired_test_of_single_completions_is_mcnemars(better: int, worse: int) -> None:
    """Twice the tail of the binomial distribution at a half (McNemar 1947, exact)."""
    number, few = better + worse, min(better, worse)
    tail = 2 * sum(math.comb(number, place) for place in range(few + 1)) / 2**number
    assert paired_p([1] * better + [-1] * worse + [0] * 9) == pytest.approx(min(1.0, tail), rel=1e-9)


def test_intervals_and_tests_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    random = np.random.default_rng(1)
    for number, rows in ((3, 10), (50, 96), (255, 256)):
        expected = stats.binomtest(number, rows).proportion_ci(method="wilson")
        assert wilson(number, rows) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert paired_p([1] * 6 + [-1] * 16) == pytest.approx(stats.binomtest(6, 22).pvalue, rel=1e-9)
    differences = random.integers(-3, 5, 12)
    expected = stats.permutation_test((differences,), np.sum, permutation_type="samples", n_resamples=np.inf)
    assert paired_p(differences.tolist()) == pytest.approx(expected.pvalue, rel=1e-9)
    values = random.random(200)
    found = percentile_interval(resampled(values[:, None])[:, 0] / 200)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=10_000, random_state=2)
    assert found == pytest.approx(tuple(theirs.confidence_interval), abs=0.003)


# ---- figures -------------------------------------------------------------------------------------------


def test_figures_of_greedy_completions() -> None:
    rows = passed("1", "0", "1", "1")
    rows[1] = scored(1, length=9, truncated=True, reward=math.nan)
    figures = Pass(rows, 1, ()).figures()
    assert list(figures) == ["accuracy", "reward", "length", "truncated"]
    assert figures["accuracy"] == (0.75, *wilson(3, 4))
    assert figures["reward"].value == 1.0  # of the three that have one, as validate takes the mean
    assert (figures["length"].value, figures["truncated"].value) == (4.5, 0.25)
    assert figures["length"].low < 4.5 < figures["length"].high


def test_figures_of_sampled_completions() -> None:
    """pass@2 of two right ones of four is 1 - C(2, 2) / C(4, 2)."""
    figures = Pass(passed("1100", "0000", "1111", answer=None), 4, (1, 2, 4)).figures()
    assert list(figures) == ["pass@1", "pass@2", "pass@4", "reward", "length", "truncated"]
    values = [figures[f"pass@{k}"].value for k in (1, 2, 4)]
    assert values == pytest.approx([0.5, (5 / 6 + 0 + 1) / 3, 2 / 3])
    assert figures["pass@4"][1:] == wilson(2, 3)  # a row has passed or not
    assert figures["pass@1"][1:] == (0.0, 1.0)  # of three rows


def test_figures_of_several_data_sets() -> None:
    """The majority is that of the rows whose answers are told apart."""
    told = [scored(0, place, text, text == "7", dataset="sums") for place, text in enumerate(("7", "7", "8"))]
    others = [scored(1, place, correct=False, dataset="words", answer=None) for place in range(3)]
    figures = Pass([*told, *others], 3, (1,)).figures()
    assert figures["majority@3"] == (1.0, *wilson(1, 1))
    assert [figures[name].value for name in ("pass@1", "pass@1 sums")] == pytest.approx([1 / 3, 2 / 3])
    assert figures["pass@1 words"] == (0.0, *wilson(0, 1))
    assert Pass(others[:1], 1, ()).figures()["accuracy words"].value == 0.0


def test_figures_of_nothing_are_none(tmp_path: Path) -> None:
    rows = [scored(row, reward=math.nan) for row in range(2)]
    assert math.isnan(Pass(rows, 1, ()).figures()["reward"].value)


def test_the_comparison_is_paired() -> None:
    first, other = (Pass(passed(*rows), 2, (1,)) for rows in (("11", "00", "10"), ("11", "11", "00")))
    found = compare(first, other)
    assert (found.difference, found.better, found.worse) == (pytest.approx(1 / 6), 1, 1)
    assert found.p == brute_force_p([0, 2, -1])
    same = compare(first, first)
    assert same == (0.0, 0.0, 0.0, 1.0, 0, 0)


# ---- answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "correct", "chance"),
    [
        (["4", "4", "5"], [True, True, False], 1.0),
        (["4", "5", "5"], [True, False, False], 0.0),
        (["4", "5"], [True, False], 0.5),  # a tie
        (["4", "", ""], [True, False, False], 1.0),
        (["", ""], [False, False], 0.0),
        (["4", "4", "5"], [True, False, False], 0.5),  # the same answer is right once
    ],
)
def test_the_majority(answers: list[str], correct: list[bool], chance: float) -> None:
    assert majority_correct(answers, correct) == chance


def test_how_answers_are_told_apart() -> None:
    exact = RewardFunction.of(ExactMatch(pattern=r"=(\w+)$", ignore_case=True), "correct")

    def length(completion: str) -> float:
        return len(completion)

    other = RewardFunction.of(length, "length")
    row, sum_row = Prompt("a", (1,), ""), Prompt("b", (1,), "", dataset="sums")
    of_reward = find_answers(None, [other, exact], "correct").of
    assert of_reward(row, "2=A") == "a" and of_reward(row, "2") == ""
    (vote,) = fresh(MajorityVote(pattern=r"\[(\d)\]")).rewards
    of_vote = find_answers(None, [other, vote, exact], "length").of  # the first that has answers
    assert of_vote(row, "[3]") == "3"
    of_sums = find_answers(None, [replace(vote, datasets=frozenset({"sums"}))], "length").of
    assert of_sums(sum_row, "[3]") == "3" and of_sums(row, "[3]") is None
    of_option = find_answers(r"(\d)", [exact], "correct").of
    assert of_option(row, "1 2") == "2"
    none = find_answers(None, [other], "length")
    assert not none.exist and none.of(row, "1") is None and "the reward length does not say which answer" in none.rule
    with pytest.raises(ValueError, match=r"--answer .* has no group"):
        find_answers(r"\d", [other], "length")


# ---- the command line ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--samples", "4", "--k", "8"], "--k is 8, but .* --samples is 4; raise --samples, or lower --k"),
        (["--k", "0"], "--k is 0"),
        (["--samples", "-1"], "--samples is -1; give the number of completions per row"),
        (["tiny", "tiny"], "'tiny' is given twice; give each policy once"),
        (["run/last.ckpt"], "There is no checkpoint 'run/last.ckpt'; give one of a run's checkpoints"),
        (["runs/new"], "'runs/new' has saved no policy, which it does at its end; give one of its checkpoints"),
        (["runs/demo", "runs/demo/policy"], "'runs/demo/policy' is given twice, also as 'runs/demo'"),
        (["--output", "file"], "--output 'file' is a file; give a folder"),
        (["--lm-eval", "file"], "--lm-eval 'file' is a file; give a folder"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run_folder(tmp_path / "runs" / "demo")
    new = tmp_path / "runs" / "new"
    (new / "checkpoints" / "last.ckpt").mkdir(parents=True)
    (new / "versions.json").write_text("{}")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=sentence):
        read_options(arguments)


def make_run_folder(folder: Path) -> None:
    """What is looked at in the folder of a run."""
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "config.json").write_text("{}")
    (folder / "versions.json").write_text("{}")
    (folder / "config.yaml").write_text("{}")


def test_a_runs_config_and_folder_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run_folder(tmp_path / "runs" / "demo")
    options, others = read_options(["tiny", "runs/demo", "--data.eval_batch_size", "4"])
    assert [(one.name, one.policy) for one in options.policies] == [("tiny", "tiny"), ("runs/demo", "runs/demo/policy")]
    assert options.output == Path("runs/demo/evaluation") and options.ks == (1, 2, 4, 8)
    assert others == ["--config", "runs/demo/config.yaml", "--data.eval_batch_size", "4"]
    options, others = read_options(["runs/demo/policy", "--config", "arithmetic", "--output", "out", "--samples", "0"])
    assert (options.output, options.ks, others) == (Path("out"), (), ["--config", "arithmetic"])
    options, _ = read_options(["runs/demo", "tiny"])  # the last one is of no run
    assert options.output is None


def test_a_policy_that_is_no_folder_is_left_to_its_loading() -> None:
    (source,) = find_policies(["org/model"])
    assert (source.policy, source.run, source.checkpoint) == ("org/model", None, None)


# ---- files ---------------------------------------------------------------------------------------------


def result_of(first: list[Scored], other: list[Scored]) -> Result:
    conditions = Conditions(
        split="test",
        source="data.test",
        num_rows=len(first),
        num_left_out=0,
        passes=[SamplingPass(True, 1, SamplingParams(temperature=0.0))],
        temperature_from="",
        ks=(),
        seed=0,
        pass_rule="correct >= 1",
        majority="none",
        has_answers=False,
    )
    sources = {name: {"policy": name, "checkpoint": None} for name in ("a", "b")}
    return Result(conditions, {"a": [first], "b": [other]}, sources)


def test_the_files_of_an_evaluation(tmp_path: Path) -> None:
    first = passed("1", "0", greedy=True)
    other = [
        scored(0, text=HOSTILE, policy="b", greedy=True, reward=math.nan),
        scored(1, text="5", policy="b", columns={"answer": "<7>"}),
    ]
    files = result_of(first, other).write(tmp_path)
    assert set(files) == {path.name for path in tmp_path.iterdir()}
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "prompt_id": "test/0", "prompt": "0?", "policy": "a", "greedy": True, "sample": 0, "completion": "",
        "reward": 1.0, "correct": True, "answer": "", "length": 3, "truncated": False, "columns": {},
    }  # fmt: skip
    assert [line["policy"] for line in lines] == ["a", "a", "b", "b"] and lines[2]["reward"] is None
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert content["policies"][0]["figures"]["greedy"]["accuracy"]["value"] == 0.5
    assert content["comparisons"][0]["greedy"]["difference"] == -0.5
    page = (tmp_path / "side_by_side.html").read_text()
    assert "wrong</span> <small>no reward, 3 tokens</small>" in page
    assert "<script" not in page and "\x1b" not in page and "Correct in the first policy, wrong in the last: 1" in page
    if "evaluation.svg" in files:
        assert "greedy accuracy" in (tmp_path / "evaluation.svg").read_text()


def test_rows_that_nothing_can_grade_are_in_no_figure_and_said_to_be_so(tmp_path: Path) -> None:
    """A row without an answer; of the third row one reward failed, which counts as wrong."""
    first = [scored(0, correct=True), scored(1, correct=None, reward=0.25), scored(2, correct=None, length=30)]
    other = [scored(0), scored(1, correct=None, length=90), scored(2, correct=True)]
    result = result_of(first, other)
    figures = result.figures["a"]["greedy"]
    assert (figures["accuracy"].value, figures["length"].value) == (0.5, 16.5)
    assert (result.comparisons["b"]["greedy"].better, result.comparisons["b"]["greedy"].worse) == (1, 1)
    said = "1 row of these got no reward that says whether correct >= 1, as without an answer; it is in no figure."
    assert said in result.sentences()
    result.write(tmp_path)
    assert json.loads((tmp_path / "evaluation.json").read_text())["conditions"]["num_ungraded"] == 1
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert [line["correct"] for line in lines] == [True, None, None, False, None, True]
    page = (tmp_path / "side_by_side.html").read_text()
    assert (
        "Without a reward that says whether they are correct: 1 row" in page and page.count("not graded <small>") == 3
    )
    nothing = result_of([scored(0, correct=None)], [scored(0, correct=None)])
    assert nothing.figures["a"]["greedy"]["accuracy"].value == 0
    assert "No row got a reward that says whether correct >= 1, so nothing counts as correct." in nothing.sentences()
    assert not any("no figure" in sentence for sentence in result_of(passed("1"), passed("0")).sentences())


@pytest.mark.parametrize("part", ["draw", "side_by_side"])
def test_figures_are_there_where_a_picture_or_a_page_fails(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")

    def fails(*_: object) -> str:
        raise RuntimeError("no font")

    monkeypatch.setattr(f"lit_grpo.tools.evaluation.result.{part}", fails)
    lost = {"draw": "evaluation.svg", "side_by_side": "side_by_side.html"}[part]
    with pytest.warns(UserWarning, match=rf"^{lost} could not be made \(RuntimeError: no font\); .* in \w+\.json"):
        files = result_of(passed("0", greedy=True), passed("1", greedy=True)).write(tmp_path)
    assert set(files) == {path.name for path in tmp_path.iterdir()}
    assert {"completions.jsonl", "evaluation.json"} < set(files) and lost not in files


def test_rows_that_differ_stand_first() -> None:
    before, after = passed("1", "1", "0", "0"), passed("1", "0", "1", "0")
    page = side_by_side({"a": before, "b": after}, "Rows.")
    assert re.findall(r"<small>(test/\d)</small>", page) == ["test/2", "test/1", "test/3", "test/0"]


# ---- lm-evaluation-harness -----------------------------------------------------------------------------


def task_of(prompts: list[Prompt], match: ExactMatch) -> Any:
    function = RewardFunction.of(match, "correct")
    return make_task("my/run_test", prompts, [function], PassRule("correct"), SamplingParams(max_tokens=7, stop=("#",)))


def read_task(folder: Path, name: str = "my_run_test") -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    """The settings of a task, its rows as datasets reads them, and the function that grades."""
    datasets = pytest.importorskip("datasets")
    written = (folder / f"{name}.yaml").read_text().replace("!function", "")
    settings = yaml.safe_load(written)
    kind, files = settings["dataset_path"], settings["dataset_kwargs"]["data_files"]
    rows = list(datasets.load_dataset(kind, data_files=files, cache_dir=str(folder / "cache"))["test"])
    module, function = settings["process_results"].split(".")
    scope: dict[str, Any] = {}
    exec((folder / f"{module}.py").read_text(), scope)
    return settings, rows, scope[function]


def test_a_task_of_the_harness(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be {{short}}."}, {"role": "user", "content": "2+3?"}]
    prompts = [
        Prompt("test/0", (1,), "<system>Be {{short}}.<user>2+3?", {"answer": 5}, messages=messages),
        Prompt("test/1", (1,), "<user>?", {"answer": None}, messages=messages),
    ]
    task = task_of(prompts, ExactMatch(pattern=r"(\d+)\D*$"))
    command = task.write(tmp_path)
    settings, (row,), grade = read_task(tmp_path)
    text = "<system>Be {{short}}.<user>2+3?"
    assert row == {"prompt_id": "test/0", "prompt": text, "given": "", "answer": "5"}
    assert (
        task.num_left_out == 1
        and task.is_rendered
        and command.endswith("add_bos_token=False --include_path " + f"{tmp_path} --tasks my_run_test")
    )
    assert settings["generation_kwargs"] == {"do_sample": False, "temperature": 0.0, "max_gen_toks": 7, "until": ["#"]}
    assert [grade(row, [text]) for text in ("it is 5.", "5, no: 6")] == [{"exact_match": 1.0}, {"exact_match": 0.0}]


COMPARED: dict[str, dict[str, Any]] = {
    "the whole text": {},
    "a pattern": {"pattern": r"=(\d+)"},
    "the last one": {"pattern": r"(\d+)\D*$"},
    "two groups": {"pattern": r"=(\S+) (\S*)"},
    "letters of any case": {"ignore_case": True},
}


@pytest.mark.parametrize("how", COMPARED)
@pytest.mark.parametrize("text", ["1=2=33", " 7 ", "none", "a\nb=4\n", "", "STRASSE", "stra\u00dfe", "\u22127", "=7 m"])
def test_the_harness_grades_as_the_reward_does(how: str, text: str, tmp_path: Path) -> None:
    match = ExactMatch(**COMPARED[how])
    answers = ["33", "1=2=33", "7", "none", "4", "a\nb=4", "b=4", "-7", "Stra\u00dfe", ["8", "7"]]
    task = task_of([Prompt(f"test/{n}", (1,), "?", {"answer": answer}) for n, answer in enumerate(answers)], match)
    scope: dict[str, Any] = {}
    exec(task.grading, scope)
    theirs = [scope["process_results"](row, [text])["exact_match"] for row in task.rows]
    assert theirs == [match(text, answer=answer) for answer in answers]


def test_the_beginning_of_an_answer_that_the_prompt_gives_is_graded_with_it() -> None:
    task = task_of([Prompt("test/0", (1,), "2+3? =", {"answer": 5}, given="=")], ExactMatch(pattern=r"=(\d)"))
    scope: dict[str, Any] = {}
    exec(task.grading, scope)
    assert scope["process_results"](task.rows[0], ["5"]) == {"exact_match": 1.0}


DATES = {
    "dates": (["2024-03-01", "1999-12-31"], ["a", "b"]),
    "dates and times": (["2024-03-01 10:00:00", "2024-03-02 11:00:00"], ["a", "b"]),
    "prompts that are dates": (["a", "b"], ["2024-03-01", "2024-03-02"]),
    "digits": (["011", "12"], ["a", "b"]),
    "lists of dates": ([["2024-03-01"], ["2024-03-02", "2 March 2024"]], ["a", "b"]),
}


@pytest.mark.parametrize("case", DATES)
def test_rows_of_a_task_keep_texts_that_look_like_something_else(case: str, tmp_path: Path) -> None:
    answers, texts = DATES[case]
    prompts = [
        Prompt(f"test/{number}", (1,), text, {"answer": answer})
        for number, (answer, text) in enumerate(zip(answers, texts, strict=True))
    ]
    task_of(prompts, ExactMatch()).write(tmp_path)
    _, rows, _ = read_task(tmp_path)
    assert [(row["prompt"], row["answer"]) for row in rows] == list(zip(texts, answers, strict=True))


def test_a_task_without_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="no row has an answer in the column 'answer'; leave --lm-eval out"):
        task_of([Prompt("test/0", (1,), "?", {"answer": None})], ExactMatch())


class Spells:
    """A tokenizer of characters, which begins texts with token 1 where it is asked for special tokens; ``#`` is 2."""

    bos_token = "^"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        ids = [{"^": 1, "#": 2}.get(one, ord(one)) for one in text]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}


@pytest.mark.parametrize(
    ("prompts", "adds"),
    [
        ([("ab", (97, 98))], False),
        ([("ab", (1, 97, 98)), ("b", (1, 98))], True),
        ([("^ab", (1, 97, 98))], False),
        ([("ab", (97, 98)), ("a#", (97, 35))], "test/1"),  # a control token that is only spelled
        ([("ab", (1, 97, 98)), ("b", (98,))], "test/1"),
        ([("^b", (1, 1, 98))], "test/0"),  # of such texts the harness adds nothing
    ],
)
def test_a_task_has_the_tokens_that_the_policy_reads_or_is_refused(
    prompts: list[tuple[str, tuple[int, ...]]], adds: bool | str
) -> None:
    rows = [Prompt(f"test/{number}", ids, text) for number, (text, ids) in enumerate(prompts)]
    if isinstance(adds, bool):
        assert adds_special_tokens(rows, Spells()) == adds  # pyrefly: ignore[bad-argument-type]
        return
    with pytest.raises(ValueError, match=f"would read other tokens than the policy does in row {adds}"):
        adds_special_tokens(rows, Spells())  # pyrefly: ignore[bad-argument-type]


def test_another_reward_than_exact_match_is_no_task() -> None:
    function = RewardFunction.of(lambda completion: 1.0, "mine")
    with pytest.raises(ValueError, match="exact_match alone, and here a completion is correct if mine >= 1"):
        make_task("a", [], [function], PassRule("mine"), SamplingParams())
