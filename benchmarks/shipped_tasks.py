"""A shipped configuration as the benchmarks of learning read it: its policy, rows, prompts and rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from benchmarks.report import ROOT
from lit_grpo.data.rendering import PromptRenderer
from lit_grpo.policy.loading import load_vision
from lit_grpo.policy.named import resolve_policy
from lit_grpo.rewards import ExactMatch
from lit_grpo.tasks import ArithmeticRows, KnightsRows, ShapesRows, WordProblemRows
from lit_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SOURCES = {source.__name__: source for source in (ArithmeticRows, KnightsRows, ShapesRows, WordProblemRows)}
Row = dict[str, Any]


@dataclass(frozen=True)
class ShippedTask:
    """A configuration of ``configs/`` whose rows are drawn and whose only reward is an exact match."""

    name: str

    @property
    def settings(self) -> Row:
        """The whole configuration."""
        return yaml.safe_load((ROOT / "configs" / f"{self.name}.yaml").read_text())

    @property
    def model(self) -> Row:
        """Its section ``model``."""
        return self.settings["model"]

    @property
    def policy(self) -> str:
        """The folder of its policy."""
        return resolve_policy(self.model["policy"])

    @property
    def reward(self) -> Callable[..., float | None]:
        """Its reward function."""
        (reward,) = self.model["rewards"]
        return ExactMatch(**reward["args"])

    def rows(self, part: str, num_rows: int | None = None) -> list[Row]:
        """Return the rows of ``train`` or ``validation``, as many as it names unless told."""
        source = self.settings["data"][part]
        arguments = source["init_args"] | ({} if num_rows is None else {"num_rows": num_rows})
        return list(SOURCES[source["class_path"]](**arguments).rows())

    def prompts(self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> list[Prompt]:
        """Tokenize prompts as in training: texts as they are, conversations by the tokenizer's chat template."""
        column = self.settings["data"].get("image_column")
        vision = None if column is None else load_vision(self.policy, tokenizer)
        renderer, prompts = PromptRenderer(image_column=column, vision=vision), []
        for number, row in enumerate(rows):
            made = renderer.rendered(row, tokenizer)
            prompts.append(Prompt(f"{self.name}/{number}", made.token_ids, made.text, row, pictures=made.pictures))
        return prompts
