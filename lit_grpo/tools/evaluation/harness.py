"""Held-out rows as a task of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_grpo.process.files import replace_file
from lit_grpo.rewards.builtin import ExactMatch
from lit_grpo.rewards.function import RewardFunction
from lit_grpo.types import PassRule, Prompt, SamplingParams

ROWS = "rows.jsonl"
_WHOLE = r"(?s)\A\s*(.*\S)\s*\Z"


@dataclass(frozen=True)
class HarnessTask:
    """A task of the harness, as its documentation of task files defines it (``generate_until``, ``exact_match``).

    Args:
        name: Name of the task.
        settings: Content of the task's file, without the path of the rows.
        rows: The rows, each with ``prompt`` and ``answer``, and of conversations with ``system``.
        is_chat: Whether the prompts are messages of the user, which the harness renders with the chat template.
        is_rendered: Whether the prompts are conversations as the chat template of one policy has rendered them.
    """

    name: str
    settings: dict[str, Any]
    rows: list[dict[str, str]]
    is_chat: bool
    is_rendered: bool

    def write(self, folder: Path) -> str:
        """Write ``NAME.yaml`` and the rows into a folder; return the command that evaluates a policy on the task."""
        lines = "".join(json.dumps(row) + "\n" for row in self.rows)
        replace_file(folder / ROWS, lines.encode())
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str((folder / ROWS).resolve())}}}
        text = yaml.safe_dump({"task": self.name, **data, **self.settings}, sort_keys=False, allow_unicode=True)
        replace_file(folder / f"{self.name}.yaml", text.encode())
        chat = " --apply_chat_template" if self.is_chat else ""
        return f"lm_eval --model hf --model_args pretrained=POLICY --include_path {folder} --tasks {self.name}{chat}"


def make_task(
    name: str, prompts: Sequence[Prompt], rewards: Sequence[RewardFunction], rule: PassRule, sampling: SamplingParams
) -> HarnessTask:
    """Return held-out rows as a task that is decoded greedily.

    Args:
        name: Name of the run.
        prompts: The rows.
        rewards: Reward functions of the run.
        rule: Rule by which a completion is correct; its reward function must be ``exact_match``.
        sampling: Sampling parameters; the task takes ``max_tokens`` and ``stop``.

    Raises:
        ValueError: The reward or its pattern has no equivalent in the harness.
    """
    match = next((function.call for function in rewards if function.name == rule.reward), None)
    if not isinstance(match, ExactMatch) or not 0 < rule.threshold <= 1:
        raise ValueError(
            f"--lm-eval writes tasks for the reward exact_match alone, and here a completion is correct if {rule}; "
            "leave --lm-eval out, or name an exact_match as model.pass_reward."
        )
    pattern = _WHOLE if match.pattern is None else match.pattern.pattern
    if match.pattern is not None and match.pattern.groups > 1:
        raise ValueError(
            f"--lm-eval: the pattern {pattern!r} of the reward {rule.reward} has {match.pattern.groups} groups, and "
            "the harness takes the first that is not empty; write the others as (?:...)."
        )
    talks = [prompt.messages for prompt in prompts if prompt.messages is not None]
    is_chat = bool(talks) and all(_is_question(talk) for talk in talks)
    rows = [_row(prompt, match.answer_column, is_chat) for prompt in prompts]
    settings: dict[str, Any] = {
        "test_split": "test",
        "output_type": "generate_until",
        **({"description": "{{system}}"} if any("system" in row for row in rows) else {}),
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
        "filter_list": [
            {
                "name": "answer",
                "filter": [
                    {"function": "regex", "regex_pattern": pattern, "group_select": -1},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": match.ignore_case,
                "ignore_punctuation": False,
            }
        ],
        "metadata": {"version": 1.0},
    }
    rows = [row for row in rows if row]
    return HarnessTask(re.sub(r"\W+", "_", name), settings, rows, is_chat, is_rendered=bool(talks) and not is_chat)


def _is_question(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation is one message of the user, after one of the system or none."""
    return [one["role"] for one in messages] in (["user"], ["system", "user"])


def _row(prompt: Prompt, answer_column: str, is_chat: bool) -> dict[str, str]:
    """Return a row; empty if the row has no answer, so that no reward applies to it."""
    answer = prompt.columns[answer_column]
    if answer is None:
        return {}
    row = {"prompt_id": prompt.prompt_id, "prompt": prompt.text, "answer": str(answer).strip()}
    if not is_chat or prompt.messages is None:
        return row
    *before, last = prompt.messages
    return row | {"prompt": last["content"], "system": before[0]["content"] if before else ""}
