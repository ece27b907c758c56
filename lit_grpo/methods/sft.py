"""Supervised fine-tuning on examples, as a warm start of the same run or mixed into it.

A step on examples adds the mean negative log-likelihood of their answers' tokens to the loss, through the channel
``ce``::

    loss = loss_rl - w / n sum_t log pi(answer token t | prompt, answer tokens before it)

with ``n`` the number of tokens of the step that have a weight, over all ranks. Prompts are masked, and the token that
ends a turn is imitated. With ``w`` = 1 and no rollouts this is the loss of TRL 1.16's ``SFTTrainer`` with
``completion_only_loss``, on the same tokens, however rows are packed.

Deviations from TRL: what a chat template writes after the token that ends a turn, such as a line break, is no part of
an answer, because the policy never samples it; and log-probs are those of the distribution that is sampled from, the
softmax of ``logits / model.sampling.temperature``, which is TRL's if the temperature is 1, its default.

Evidence: loss and gradient equal those of TRL's trainer, in ``tests/test_sft.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from lit_grpo.data.examples import Example
from lit_grpo.limits import Count, NotNegative
from lit_grpo.plugins import Plugin, RunFacts
from lit_grpo.ranks import Ranks
from lit_grpo.types import OBSERVED, Completion, Prompt, Request, Rollout, SamplingParams


@dataclass
class SFT(Plugin):
    """Imitates examples.

    They are drawn in an order that depends on ``data.seed`` and the number of the update alone: each epoch of them is
    shuffled, and update u of W ranks with E examples each takes the places from ``u W E`` on.

    Example::

        rollout:
          plugins:
            - sft: {column: solution, weight: 0.1}
    """

    needs: ClassVar[frozenset[str]] = frozenset({"prompt_stream"})

    column: str = ""
    """Column of ``data.train`` that holds the answers: a text, or a list of chat messages that begins and ends with one
    of the assistant.
    """
    weight: NotNegative = 0.1
    """Weight of the mean negative log-likelihood per token in the loss."""
    per_update: Count | None = None
    """Number of examples per update and rank; by default ``data.batch_size``."""
    turns: Literal["all", "last"] = "all"
    """Turns of the assistant that are imitated, in an answer of several messages: ``all`` in one row, or the ``last``
    alone. ``all`` needs a chat template that writes earlier turns as they were sampled.
    """

    def setup(self) -> None:
        """Begin without examples."""
        self._examples: Sequence[Example] = ()
        self._seed, self._number = 0, self.per_update or 1
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def check(self, run: RunFacts) -> None:
        """Read the examples, once, and note how many an update has."""
        if not self.column:
            raise ValueError("column is empty; name the column of data.train that holds the answers.")
        if run.num_prompts is not None:
            self._number = self.per_update or run.num_prompts
        if run.data is not None and not self._examples:
            self._examples, self._seed = run.data.answered("train", self.column, self.turns), run.data.seed

    def examples(self, version: int, ranks: Ranks) -> Sequence[Rollout]:
        """Return this rank's examples of an update, none if they have no weight."""
        if not self.weight:
            return ()
        begin = (version * ranks.size + ranks.rank) * self._number
        return [self._imitated(*self._place(index)) for index in range(begin, begin + self._number)]

    def _place(self, index: int) -> tuple[int, int]:
        """Return an example of the stream: its epoch, and its place in the data."""
        epoch, place = divmod(index, len(self._examples))
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self._examples))
        return epoch, int(self._order[1][place])

    def _imitated(self, epoch: int, place: int) -> Rollout:
        """Return an example as a rollout that nobody sampled."""
        example = self._examples[place]
        prompt, ids_T = Prompt(f"sft/{place}", example.prompt_ids, "", visit=epoch), example.answer_ids_T
        completion = Completion(
            Request(prompt, (0,), SamplingParams()),
            ids_T,
            np.zeros(len(ids_T), np.float32),
            np.full(len(ids_T), OBSERVED),
            "stop",
        )
        rollout = Rollout(prompt, completion)
        rollout.ce_weights = torch.from_numpy(self.weight * example.learned_T.astype(np.float32))
        return rollout


PLUGINS = {"sft": SFT()}
