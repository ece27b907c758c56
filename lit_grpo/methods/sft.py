"""Supervised fine-tuning on examples: a warm start of the same run, mixed into RL, or a stage alone.

A step on examples adds the mean negative log-likelihood of their answers' tokens to the loss, through the channel
``ce``::

    loss = loss_rl - w / n sum_t log pi(answer token t | prompt, answer tokens before it)

with ``n`` the number of the examples' tokens in the step that have a weight, over all ranks. Prompts are masked, and
the token that ends a turn is imitated. Without rollouts ``w`` is 1, and this is the loss of TRL 1.16's ``SFTTrainer``
with ``completion_only_loss``, on the same tokens, however rows are packed.

Deviations from TRL: what a chat template writes after the token that ends a turn, such as a line break, is no part of
an answer, because the policy never samples it; and log-probs are those of the distribution that is sampled from, the
softmax of ``logits / model.sampling.temperature``, which is TRL's if the temperature is 1, its default.

Evidence: loss and gradient equal those of TRL's trainer, in ``tests/integration/test_sft_beside_trl.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from lit_grpo.data.examples import Example
from lit_grpo.limits import Count, NotNegative, Number
from lit_grpo.plugins import Plugin, RunFacts, RunNumbers
from lit_grpo.ranks import Ranks
from lit_grpo.types import OBSERVED, Completion, Prompt, Request, Rollout, SamplingParams
from lit_grpo.update.plugin import Measure
from lit_grpo.update.step import Step


@dataclass
class SFT(Plugin):
    """Imitates examples.

    They are drawn in an order that depends on ``data.seed`` and the number of the update alone: each epoch of them is
    shuffled, and update u of W ranks with E examples each takes the places from ``u W E`` on.

    Example: 20 updates on examples alone, then GRPO with a tenth of their loss::

        rollout:
          plugins:
            - sft: {column: solution, warm_up: 20, weight: 0.1}
    """

    writes: ClassVar[frozenset[str]] = frozenset({"examples"})
    needs: ClassVar[frozenset[str]] = frozenset({"prompt_stream"})

    column: str = ""
    """Column of the answers: texts, or lists of chat messages that begin and end with one of the assistant. If it is
    empty, the prompts' column holds whole conversations, which end with a message of the assistant.
    """
    data: str | dict[str, Any] = ""
    """Data set of the examples: a file, a folder or a dataset id, or the arguments of ``lit_grpo.data.HubRows``
    (``path``, ``name``, ``split``, ``revision``). By default ``data.train``. Prompts are rendered with the settings of
    ``data``.
    """
    validation: str | dict[str, Any] = ""
    """Held-out examples, in the forms of ``data``, whose loss is logged in validation. By default those of
    ``data.validation``, if the examples are those of ``data.train`` and its rows have the column.
    """
    prompt_column: str = ""
    """Column of the prompts in ``data`` and ``validation``; by default ``data.prompt_column``."""
    weight: NotNegative = 0.1
    """Weight of the mean negative log-likelihood per token in updates with rollouts; 0 leaves the examples out."""
    warm_up: Number | Literal["all"] = 0
    """Number of updates at the beginning of the run that have no rollouts, and learn from examples alone with weight 1;
    ``all`` for a run without RL. They count in ``trainer.max_steps``.
    """
    per_update: Count | None = None
    """Number of examples per update and rank; by default ``data.batch_size``."""
    turns: Literal["all", "last"] = "all"
    """Turns of the assistant that are imitated: ``all`` in one row, or the ``last`` alone. ``all`` needs a chat
    template that writes earlier turns as they were sampled. A message with ``weight: 0`` is not imitated.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, needed in (("prompt_column", self.data or self.validation), ("validation", self.data)):
            if getattr(self, name) and not needed:
                raise ValueError(f"{name} is set, but data is not; set data, or leave {name} out.")

    def setup(self) -> None:
        self._examples: Sequence[Example] = ()
        self._held_out: Sequence[Example] = ()
        self._seed, self._number = 0, self.per_update or 1
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    @property
    def numbers(self) -> RunNumbers:
        """Begin with rollouts after the warm start."""
        return RunNumbers(first_rollout=math.inf if self.warm_up == "all" else int(self.warm_up))

    def check(self, run: RunFacts) -> None:
        """Read the examples, once, and note how many an update has."""
        if self.warm_up != "all" and int(self.warm_up) % run.updates_per_batch:
            raise ValueError(
                f"warm_up is {self.warm_up}, but a batch has {run.updates_per_batch} optimizer steps "
                "(model.num_iterations x num_minibatches); give a multiple of that."
            )
        if run.policy is not None and run.micro_batch_tokens is not None:
            self._check_lengths(run.micro_batch_tokens, run.shares_prefix, run.largest_chunk)
        if run.num_prompts is not None:
            self._number = self.per_update or run.num_prompts
        if run.data is None or self._examples:
            return
        self._seed = run.data.seed
        if self.data:
            self._examples = run.data.examples_of(self.data, self.prompt_column, self.column, self.turns)
            if self.validation:
                self._held_out = run.data.examples_of(self.validation, self.prompt_column, self.column, self.turns)
            return
        self._examples = run.data.answered("train", self.column, self.turns, self.datasets)
        held_out = [prompt for prompt in run.data.prompts.get("validation", ()) if prompt.is_of(self.datasets)]
        if held_out and (not self.column or any(self.column in prompt.columns for prompt in held_out)):
            self._held_out = run.data.answered("validation", self.column, self.turns, self.datasets)

    def _check_lengths(self, most: int, shares_prefix: bool, largest_chunk: int | None) -> None:
        for example in (*self._examples, *self._held_out):
            prompt, answer = len(example.prompt_ids), len(example.answer_ids_T)
            answer = min(answer, largest_chunk or answer)
            if (least := max(prompt, answer) if shares_prefix else prompt + answer) > most:
                raise ValueError(
                    f"{example.place} has a prompt of {prompt} tokens and an answer of "
                    f"{len(example.answer_ids_T)}, but model.max_tokens_per_micro_batch is {most}; the smallest that "
                    f"works is {least}."
                )

    def on_minibatch(self, step: Step) -> None:
        """Add this rank's examples of an update, none if they have no weight."""
        weight = 1.0 if step.version < self.numbers.first_rollout else self.weight
        if weight:
            begin = (step.version * step.ranks.size + step.ranks.rank) * self._number
            drawn = [self._place(index) for index in range(begin, begin + self._number)]
            step.add([_imitated(self._examples[place], place, epoch, weight) for epoch, place in drawn])

    def _place(self, index: int) -> tuple[int, int]:
        """Return an example of the stream: its epoch, and its place in the data."""
        epoch, place = divmod(index, len(self._examples))
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self._examples))
        return epoch, int(self._order[1][place])

    def validate(self, measure: Measure, ranks: Ranks) -> Mapping[str, float]:
        """Return the mean negative log-likelihood per token of the held-out examples, in nats."""
        if not self._held_out:
            return {}
        own = [*enumerate(self._held_out)][ranks.rank :: ranks.size]
        logprobs = measure([_sampled(example, place) for place, example in own], "logprobs").values()
        total = sum(float(its.double().sum()) for its in logprobs)
        sums = ranks.sum(torch.tensor([total, sum(map(len, logprobs))], dtype=torch.float64))
        return {"sft/loss": float(-sums[0] / sums[1])}


def _imitated(example: Example, place: int, epoch: int, weight: float) -> Rollout:
    """Return an example as a rollout that nobody sampled, with the weights of its tokens."""
    rollout = _rollout(example, f"sft/{place}", epoch, np.full(len(example.answer_ids_T), OBSERVED))
    rollout.columns["ce_weight"] = torch.from_numpy(weight * example.learned_T.astype(np.float32))
    return rollout


def _sampled(example: Example, place: int) -> Rollout:
    """Return an example as if the tokens that are imitated had been sampled, so that they are measured."""
    return _rollout(example, f"sft/held-out/{place}", 0, np.where(example.learned_T, 0, OBSERVED))


def _rollout(example: Example, prompt_id: str, visit: int, versions_T: np.ndarray) -> Rollout:
    prompt = Prompt(prompt_id, example.prompt_ids, "", visit=visit, pictures=example.pictures)
    ids_T = example.answer_ids_T
    request = Request(prompt, (0,), SamplingParams())
    return Rollout(prompt, Completion(request, ids_T, np.zeros(len(ids_T), np.float32), versions_T, "stop"))


PLUGINS = {"sft": SFT()}
