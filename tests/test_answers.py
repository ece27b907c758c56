"""Rewards that compare a completion with the row's answer: what is equal, what cannot be won, what no clock decides."""

from __future__ import annotations

import signal
import unicodedata
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import table_rows

from lit_grpo.process.calls import CallTimeout
from lit_grpo.process.processes import ProcessEnded, TooMuchComputing
from lit_grpo.rewards import ExactMatch, MathEquivalence, RewardRunner, RewardSpec, load_rewards
from lit_grpo.rewards.function import check_prompts, warn_of_doubts
from lit_grpo.tools.evaluation.answers import find_answers
from lit_grpo.types import Completion, Prompt, Request, Rollout, RolloutGroup, SamplingParams


@pytest.fixture(scope="module")
def maths() -> MathEquivalence:
    return MathEquivalence()


# ---- mathematics ---------------------------------------------------------------------------------------

ITSELF = [
    *("72", "-3", "0", "-0", "3.14", "1,234", "1,234,567", "1e-05", "1.5e-5", "3\u00d710^5", "1E400", "25%", r"25\%"),
    *("12:00", "10:30", "3:1", "2024-03-01", "100_8", "1010_2", "FF_{16}", "10 kg/m^3", "5 km", "10 m/s"),
    *("20 °C", "90°", r"5\text{ km}", "٣", "9^9^9^9"),
    *("$18", "$5,000", "$1.5$ or $2.5$", "1331 and 1728", "2 hours 30 minutes", "3 feet 4 inches", "from 3 to 5"),
    *("½", "1½", "√2", "2√3", "1 1/2", "3/4 cup", r"\frac{1}{2}", r"\dfrac12", r"2\sqrt{3}", r"\pm 2021"),
    *("(1,2)", "[0,1)", r"\{1,2\}", "1, 2", "x=5", "x^2+1", r"(-\infty, 3] \cup [5, \infty)", r"\emptyset", "∞", "inf"),
    *(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\text{Evelyn}", "Evelyn", "B", "(B)", "True", "yes", "no solution"),
    *("???", "n/a", "NaN", "None", "2x + 3y = 7", "a \\le b", "A^c", "H2O", "C_6H_{12}O_6", "Hiếu", "東京"),
    *("{", "1}", r"\boxed{7}", "So $x$ is \\boxed{\\frac{1}{2}}.", "\\", "$", "1/0", "\\frac{1}{0}", "a" * 3000),
]
"""Typical answers, and some that no one can read."""


@pytest.mark.parametrize("answer", table_rows(ITSELF, ["72", "12:00", "100_8", "10 kg/m^3", "√2", "{", r"\boxed{7}"]))
def test_each_answer_is_equal_to_itself(maths: MathEquivalence, answer: str) -> None:
    given = [answer, answer if answer.count("{") != answer.count("}") else rf"So it is \boxed{{{answer}}}."]
    assert [maths(text, answer=answer) for text in given] == [1.0, 1.0]


EQUAL = [
    (r"so it is \boxed{72}", "72"),
    ("The answer is 72.", 72),
    ("0.5", r"\frac{1}{2}"),
    ("$1 + x^2$", "x^2+1"),
    (r"$2\pi$", r"2\pi"),
    ("18 dollars", "18 dollars"),
    (r"\boxed{18}", "18 dollars"),
    ("0.00001", 1e-5),
    (r"\boxed{1{,}234}", "1,234"),
    (r"\boxed{1\,234\,567}", "1234567"),
    (r"\boxed{1 234 567}", "1234567"),
    (r"\boxed{\frac12}", "½"),
    (r"\boxed{\sqrt{2}}", "√2"),
    (r"\boxed{\frac{3}{2}}", "1 1/2"),
    (r"\boxed{7/3}", "2 1/3"),
    (r"\boxed{10 \text{ m/s}}", "10 m/s"),
    (r"\boxed{10\ \mathrm{kg/m^3}}", "10 kg/m^3"),
    ("\u22123", "-3"),
    (r"\boxed{-3}", "\u22123"),
    (r"\boxed{2,1}", "1, 2"),
    (r"Wait, \boxed{3}. No: \boxed{7}", "7"),
    ("3.0", 3),
    ("3", 3.0),
]


@pytest.mark.parametrize(
    ("completion", "answer"), table_rows(EQUAL, [EQUAL[0], EQUAL[2], EQUAL[6], EQUAL[11], EQUAL[20]])
)
def test_values_are_compared(maths: MathEquivalence, completion: str, answer: Any) -> None:
    assert maths(completion, answer=answer) == 1.0


DIFFERENT = [
    ("The answer is 71.", 72),
    ("2", r"2\pi"),
    ("", "72"),
    ("no idea", "72"),
    (r"\boxed{}", "72"),
    ("72", "???"),
    (r"\boxed{1:00}", "12:00"),
    (r"\boxed{100_9}", "100_8"),
    (r"\boxed{1:3}", "3:1"),
    (r"\boxed{(2,1)}", "(1,2)"),
    (r"\boxed{123}", "1,2,3"),
    (r"\boxed{1728}", "1331 and 1728"),
    (r"\boxed{1}", "3 to 1"),
    (r"\boxed{3}", "from 3 to 5"),
    (r"\boxed{2}", "2 hours 30 minutes"),
    (r"\boxed{7}. No: \boxed{3}", "7"),
    (r"\boxed{\pm 2021}", "2021"),
    (r"\boxed{1234}", "12,34"),
    (r"\boxed{no}", "yes"),
    (r"\boxed{5}", "NaN"),
    (r"\boxed{31/2}", "3 1/2"),
]


@pytest.mark.parametrize(("completion", "answer"), table_rows(DIFFERENT, [DIFFERENT[0], DIFFERENT[6], DIFFERENT[11]]))
def test_what_differs_is_wrong(maths: MathEquivalence, completion: str, answer: Any) -> None:
    assert maths(completion, answer=answer) == 0.0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("completion", "answer", "is_equal"), [(r"\boxed{5 \text{ cm}}", "5 m", True), (r"\boxed{10}", "10 m/s", False)]
)
def test_math_verify_knows_no_units(maths: MathEquivalence, completion: str, answer: str, is_equal: bool) -> None:
    """Faults of math-verify that stay, and that the documentation names; once it has mended them, this test says so."""
    assert maths(completion, answer=answer) == float(is_equal)


def test_math_equivalence_extracts_the_expected_answer() -> None:
    score = MathEquivalence("solution", answer_pattern=r"####\s*(.+)")
    assert score.columns == ("solution",)
    assert score(r"\boxed{1072}", solution="40 + 32 = 72 #### 1,072") == 1.0
    sentence = r"the expected answer 'it is 72' does not match answer_pattern '####\\s*(.+)'; mend one"
    for refused in (lambda: score("72", solution="it is 72"), lambda: score.check({"solution": "it is 72"})):
        with pytest.raises(ValueError) as caught:
            refused()
        assert str(caught.value) == sentence


# ---- texts ---------------------------------------------------------------------------------------------

UNSEEN = {
    "NFD": unicodedata.normalize("NFD", "café Hiếu"),
    "NFC": unicodedata.normalize("NFC", "café Hiếu"),
    "no-break space": "café\u00a0Hiếu",
    "narrow no-break space": "café\u202fHiếu",
    "ideographic space": "café\u3000Hiếu",
    "zero-width space": "café Hi\u200bếu",
    "byte order mark": "\ufeffcafé Hiếu",
    "word joiner": "café\u2060 Hiếu",
    "soft hyphen": "ca\u00adfé Hiếu",
    "writing direction": "\u200ecafé Hiếu\u200f",
    "spaces around": " \u00a0café Hiếu\n",
}


def compared(kind: str) -> Callable[[str, str], float | None]:
    if kind == "--answer":
        answers = find_answers(r"(?s)<(.*)>", [], "")
        prompt = Prompt("test/0", (1,), "?")
        return lambda said, right: float(answers.of(prompt, f"<{said}>") == answers.of(prompt, f"<{right}>"))
    if kind == "math_equivalence":
        score: Any = MathEquivalence()
        return lambda said, right: score(rf"\boxed{{{said}}}", answer=right)
    match = ExactMatch(pattern=None if kind == "exact_match" else r"(?s)it is (.*)\.")
    begin, end = ("", "") if kind == "exact_match" else ("it is ", ".")
    return lambda said, right: match(f"{begin}{said}{end}", answer=right)


@pytest.mark.parametrize("kind", ["exact_match", "exact_match with a pattern", "math_equivalence", "--answer"])
def test_texts_that_look_the_same_are_the_same(kind: str) -> None:
    score = compared(kind)
    for name, text in UNSEEN.items():
        for other in UNSEEN.values():
            assert score(text, other) == 1.0, name
        assert score(text, "cafe Hieu") == 0.0
    for minus in "-\u2010\u2011\u2212\uff0d":
        assert score(f"{minus}12", "-12") == score("-12", f"{minus}12") == 1.0
    assert score("\u201312", "-12") == score("12", "-12") == 0.0


def test_a_pattern_is_found_in_the_usual_text_and_in_the_text_as_it_is() -> None:
    assert ExactMatch(pattern=r"= (-?\d+)")("x\u00a0=\u00a0\u22125", answer="-5") == 1.0
    assert ExactMatch(pattern="\u2212(\\d+)")("\u22125", answer="5") == 1.0


# ---- lists, and what is no answer ----------------------------------------------------------------------

SEVERAL: list[Any] = [["12", "twelve"], ("12", "twelve"), np.array(["12", "twelve"]), [12, "twelve"]]


@pytest.mark.parametrize("make", [ExactMatch, MathEquivalence])
def test_each_answer_of_a_list_is_right(make: Any) -> None:
    score = make()
    for answers in SEVERAL:
        score.check({"answer": answers})
        assert [score(text, answer=answers) for text in ("12", "twelve", "13", str(answers))] == [1.0, 1.0, 0.0, 0.0]
    for number in (torch.tensor(5), torch.tensor([5, 7]), np.int64(5), np.array([5, 6])):
        assert score("5", answer=number) == 1.0


@pytest.mark.parametrize("make", [ExactMatch, MathEquivalence])
@pytest.mark.parametrize("answer", [[], {}, {"a": 1}, {"12"}, [["12"]], [None], ["12", None], b"12", [{"text": "12"}]])
def test_what_is_neither_a_text_a_number_nor_a_list_of_these_is_refused_before_the_run(make: Any, answer: Any) -> None:
    (function,) = load_rewards([make()])
    with pytest.raises(ValueError) as caught:
        check_prompts({"train": [Prompt("train/7", (1,), "?", {"answer": answer})]}, [function])
    assert (
        f"cannot score row train/7 (rows count from 0): the answer {answer!r} is neither a text, a number nor a list"
        in str(caught.value)
    )


def test_an_empty_answer_is_no_mathematics(maths: MathEquivalence) -> None:
    with pytest.raises(ValueError, match="the expected answer ' ' is empty; mend the column 'answer'"):
        maths.check({"answer": " "})


# ---- rows that cannot be won ---------------------------------------------------------------------------


def doubts(reward: Any, answers: Sequence[Any], split: str = "train") -> list[str]:
    prompts = [Prompt(f"{split}/{number}", (1,), "?", {"answer": each}) for number, each in enumerate(answers)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_doubts({split: prompts}, load_rewards([reward]))
    return [str(each.message) for each in caught]


GROUPS: dict[str, tuple[Any, list[Any], list[Any]]] = {  # pattern, answers that it can give, answers that it cannot
    "digits": (r"(\d+)", ["12", 7, "\u0663"], ["twelve", "-12", "1,234", "1.5"]),
    "signed": (r"answer:?\s*(-?\d+)", ["12", "-12", "\u221212"], ["+12"]),
    "tags": (r"<answer>(.*?)</answer>", ["12", "a b"], ["a\nb"]),
    "tags over lines": (r"(?s)<answer>(.*?)</answer>", ["12", "a\nb"], []),
    "letters": (r"\(([A-D])\)", ["A"], ["a", "E", "(A)"]),
    "letters of any case": (r"(?i)\(([A-D])\)", ["A", "b"], ["E"]),
    "a name": (r"(?:is|=) (?P<found>\w+)", ["Evelyn"], ["Hiếu!"]),
    "a class with brackets": (r"[)(]([^])]+)", ["12"], ["1)2"]),
    "escaped": (r"\((\(?\d+\)?)\)", ["12", "(12)"], ["[12]"]),
    "in it a group": (r"#((?:\d+|none))#(x)?", ["12", "none"], ["some"]),
    "with spaces": (r"=(\s?\d+\s)", ["12"], ["x"]),
    "around it": (r"(?<==)(\d+(?=\.))", ["12", "x"], []),  # which its group alone does not say
    "verbose": ("(?x) ( \\d+ ) # digits", ["12", "x"], []),
    "one of several": (r"(\d+)", [["twelve", "12"]], [["twelve", "dozen"]]),
    "none": (r"(\d+)", [None], []),
}


@pytest.mark.parametrize("case", GROUPS)
def test_rows_whose_answer_no_match_can_give_are_named(case: str) -> None:
    pattern, can, cannot = GROUPS[case]
    found = doubts(ExactMatch(pattern=pattern), [*can, *cannot])
    numbers = range(len(can), len(can) + len(cannot))
    rows = ", ".join(f"train/{number}" for number in numbers)
    number = f"{len(cannot)} of {len(can) + len(cannot)} rows of train"
    begin = f"{number} cannot be won by reward 'ExactMatch' as they are ({rows}): "
    assert [each.startswith(begin) for each in found] == ([True] if cannot else [])


def test_rows_that_math_verify_cannot_read_are_named() -> None:
    found = doubts(MathEquivalence(), ["72", "12:00", r"\frac{1}{2}", "100_8", None, "1331 and 1728"], "validation")
    (sentence,) = found
    assert sentence.startswith(
        "3 of 6 rows of validation cannot be won by reward 'MathEquivalence' as they are ("
        "validation/1, validation/3, validation/5): of validation/1, math-verify does not find"
    )


def test_at_most_ten_rows_are_named_and_no_prediction() -> None:
    (sentence,) = doubts(ExactMatch(pattern=r"(\d+)"), ["x"] * 30)
    assert sentence.startswith("30 of 30 rows of train") and "train/9 ...)" in sentence and "train/10" not in sentence
    assert doubts(ExactMatch(pattern=r"(\d+)"), ["x"], "predict") == []


# ---- clocks --------------------------------------------------------------------------------------------


def test_an_answer_that_cannot_be_computed_is_wrong_by_its_cpu_time_and_the_next_is_scored() -> None:
    score = MathEquivalence(timeout_s=0.5)
    assert score("The answer is 9^9^9^9", answer="72") == 0.0
    assert score("72.0", answer="72") == 1.0
    assert score.take_counts() == {"unscored": 0.0}


@pytest.mark.parametrize(
    ("error", "reward", "unscored"),
    [
        (TooMuchComputing("it used more than 3 s"), 0.0, 0.0),
        (ProcessEnded(-signal.SIGSEGV), 0.0, 0.0),
        (CallTimeout("it took longer than 60 s"), None, 1.0),
        (ProcessEnded(-signal.SIGKILL), None, 1.0),
    ],
)
def test_what_the_machine_ends_has_no_reward_and_is_counted(
    error: Exception, reward: float | None, unscored: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(**_: Any) -> Any:
        raise error

    monkeypatch.setattr("lit_grpo.rewards.maths.ProcessCall", lambda *_, **__: call)
    score = MathEquivalence()
    assert (score.doubt({"answer": "12:00"}) is None) == (reward is None)
    assert score("71", answer="72") == reward
    assert [score.take_counts(), score.take_counts()] == [{"unscored": unscored}, {"unscored": 0.0}]


def scored(spec: RewardSpec, completion: str, columns: Mapping[str, Any], timeout_s: float) -> Rollout:
    runner = RewardRunner(load_rewards([spec], timeout_s=60.0), timeout_s=timeout_s)
    request = Request(Prompt("train/0", (1,), "?", dict(columns)), (0,), SamplingParams())
    rollout = Rollout(request.prompt, Completion(request, [5], [0.0], [0], "stop", completion))
    try:
        runner.score(RolloutGroup(rollout.prompt, [rollout]))
    finally:
        runner.close()
    return rollout


@pytest.mark.parametrize("spec", [RewardSpec("math_equivalence"), RewardSpec("exact_match", process=True)])
def test_the_start_of_a_process_is_no_time_of_a_call(spec: RewardSpec) -> None:
    """The limit of a call is shorter than any process takes to start."""
    assert scored(spec, "72", {"answer": "72" if spec.process else "72.0"}, timeout_s=0.01).reward == 1.0
