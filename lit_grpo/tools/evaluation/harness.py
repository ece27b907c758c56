"""Held-out rows as a task of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lit_grpo.process.files import replace_file
from lit_grpo.process.packages import require
from lit_grpo.process.terminal import shell
from lit_grpo.rewards import texts
from lit_grpo.rewards.builtin import ExactMatch, accepted_answers
from lit_grpo.rewards.function import RewardFunction
from lit_grpo.types import PassRule, Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS = "rows.parquet"
GRADING = "grading"
_PROCESS_RESULTS = """

PATTERN = {pattern}
IGNORE_CASE = {ignore_case}


def process_results(doc, results):
    pattern = None if PATTERN is None else re.compile(PATTERN)
    answers = [doc["answer"]] if isinstance(doc["answer"], str) else doc["answer"]
    return {{"exact_match": float(is_same_answer(doc["given"] + results[0], answers, pattern, IGNORE_CASE))}}
"""


@dataclass(frozen=True)
class HarnessTask:
    """A task of the harness, as its documentation of task files defines it (``generate_until``, ``exact_match``).

    Prompts are written as the run's policy reads them, after the chat template, and completions are graded by the
    function by which ``exact_match`` compares them, which the task carries. Rows are in a file with types, because the
    harness's reader of JSON makes a date of each text that looks like one.

    Args:
        name: Name of the task.
        settings: Content of the task's file, without the paths of rows and grading.
        grading: The Python file that grades.
        rows: The rows, each with ``prompt_id``, ``prompt``, ``given`` (the beginning of the answer that the prompt ends
            in) and ``answer``, a text or, if any row of the task has several, a list of texts.
        is_rendered: Whether the prompts are conversations as the chat template of one policy has rendered them.
        adds_special_tokens: Whether the tokenizer adds its special tokens to the prompts, such as one that begins a
            text.
        num_left_out: Number of rows that have no answer; no figure of an evaluation counts them either.
    """

    name: str
    settings: dict[str, Any]
    grading: str
    rows: list[dict[str, Any]]
    is_rendered: bool
    adds_special_tokens: bool = False
    num_left_out: int = 0

    def write(self, folder: Path) -> str:
        """Write the task, its rows and its grading into a folder; return the command that evaluates a policy on it.

        Raises:
            ValueError: The package that writes the rows is not installed.
        """
        require("pyarrow", "--lm-eval writes rows with pyarrow; install the extra lit_grpo[datasets].")
        import pyarrow
        import pyarrow.parquet

        text = pyarrow.string()
        has_lists = any(isinstance(row["answer"], list) for row in self.rows)
        kinds = {"prompt_id": text, "prompt": text, "given": text, "answer": pyarrow.list_(text) if has_lists else text}
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(self.rows, pyarrow.schema(kinds)), sink)
        replace_file(folder / ROWS, sink.getvalue().to_pybytes())
        data = {"dataset_path": "parquet", "dataset_kwargs": {"data_files": {"test": str((folder / ROWS).resolve())}}}
        written = yaml.safe_dump({"task": self.name, **data, **self.settings}, sort_keys=False, allow_unicode=True)
        written += f"process_results: !function {GRADING}.process_results\n"
        replace_file(folder / f"{GRADING}.py", self.grading.encode())
        replace_file(folder / f"{self.name}.yaml", written.encode())
        model = "pretrained=POLICY" + ("" if self.adds_special_tokens else ",add_bos_token=False")
        return f"lm_eval --model hf --model_args {model} --include_path {shell(str(folder))} --tasks {self.name}"


def make_task(
    name: str, prompts: Sequence[Prompt], rewards: Sequence[RewardFunction], rule: PassRule, sampling: SamplingParams
) -> HarnessTask:
    """Return held-out rows as a task that is decoded greedily.

    Args:
        name: Name of the run.
        prompts: Held-out rows, rendered as prompts.
        rewards: Reward functions of the run.
        rule: Rule by which a completion is correct; its reward function must be ``exact_match``.
        sampling: Sampling parameters; the task takes ``max_tokens`` and ``stop``.

    Raises:
        ValueError: The reward is not ``exact_match``, or no row has an answer.
    """
    match = next((function.call for function in rewards if function.name == rule.reward), None)
    if not isinstance(match, ExactMatch) or not 0 < rule.threshold <= 1:
        raise ValueError(
            f"--lm-eval writes tasks for the reward exact_match alone, and here a completion is correct if {rule}; "
            "leave --lm-eval out, or name an exact_match as model.pass_reward."
        )
    settings: dict[str, Any] = {
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "num_fewshot": 0,
        "generation_kwargs": {
            "do_sample": False,
            "temperature": 0.0,
            "max_gen_toks": sampling.max_tokens,
            "until": list(sampling.stop),
        },
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 2.0},
    }
    column = match.answer_column
    answered = [prompt for prompt in prompts if prompt.columns[column] is not None]
    if not answered:
        raise ValueError(f"--lm-eval: no row has an answer in the column {column!r}; leave --lm-eval out.")
    answers = [accepted_answers(prompt.columns[column], column) for prompt in answered]
    are_single = all(len(each) == 1 for each in answers)
    rows = [
        {
            "prompt_id": prompt.prompt_id,
            "prompt": prompt.text,
            "given": prompt.given,
            "answer": right[0] if are_single else right,
        }
        for prompt, right in zip(answered, answers, strict=True)
    ]
    pattern = None if match.pattern is None else match.pattern.pattern
    grading = inspect.getsource(texts) + _PROCESS_RESULTS.format(
        pattern=ascii(pattern), ignore_case=ascii(match.ignore_case)
    )
    is_rendered = any(prompt.messages is not None for prompt in prompts)
    task = HarnessTask(re.sub(r"\W+", "_", name), settings, grading, rows, is_rendered)
    return replace(task, num_left_out=len(prompts) - len(rows))


def adds_special_tokens(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the harness must have the tokenizer add special tokens to read the prompts' own token ids.

    Raises:
        ValueError: It reads others in either way, such as the control tokens that a text spells where
            ``data.split_special_tokens`` leaves them a text.
    """
    wrong = {adds: _read_otherwise(prompts, tokenizer, adds) for adds in (False, True)}
    for adds, place in wrong.items():
        if place is None:
            return adds
    row = prompts[max(place for place in wrong.values() if place is not None)].prompt_id
    raise ValueError(
        f"--lm-eval: the lm-evaluation-harness would read other tokens than the policy does in row {row}, because its "
        "text alone does not say them; leave --lm-eval out, or leave out data.split_special_tokens and rows that spell "
        "control tokens."
    )


def _read_otherwise(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, adds: bool) -> int | None:
    """Return the number of the first prompt whose text has other token ids than the prompt; None if there is none.

    The harness adds special tokens to no text of a batch whose first text begins with the token that begins texts.
    """
    begin = str(tokenizer.bos_token or "")
    for number, prompt in enumerate(prompts):
        is_begun = bool(begin) and prompt.text.startswith(begin)
        read = tokenizer(prompt.text, add_special_tokens=adds)["input_ids"]
        if tuple(read) != prompt.token_ids or (adds and is_begun):
            return number
    return None
