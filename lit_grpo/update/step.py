"""One optimizer step on this rank: its rollouts, whose columns plug-ins write, and what its loss is divided by."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from lit_grpo.plugins.columns import COLUMNS, Numbers, Writer, is_list, row_name, shown
from lit_grpo.types import Completion, GroupKey, Rollout
from lit_grpo.update.objective.tokens import StepTotals, highest
from lit_grpo.update.plugin import Chunk, Measure, SquaredNorm, Term

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.plugins.columns import Method
    from lit_grpo.ranks import Ranks
    from lit_grpo.update.plugin import Visit

BY_CORE = Writer(None, "on_minibatch")
PROVISIONAL = 2**12
"""What the gradient is divided by while groups of its step are still to come; a power of two, which rounds nothing."""


@dataclass(frozen=True)
class Step:
    """One optimizer step on this rank.

    ``set`` writes a column of a rollout, ``step["scale"] = 0.5`` one of the step: ``scale``, ``entropy_coefficient``,
    the weight of the entropy bonus, and ``term``, what is added to the loss.

    Args:
        rollouts: Rows that may be trained on, with their advantages; in the end those that go through the policy.
        version: Version of the policy that takes the step: the number of its updates.
        progress: The fraction of the run's optimizer steps that has been taken, from 0 to 1; 0 if it is not known.
        ranks: Reductions over the ranks of the run.
        policy: The policy being trained.
        optimizer: Optimizer of the run, which takes the step.
        measure: Measures tokens under the policy, as in ``measure(rollouts, "entropy")``.
        visit: Calls a function for each micro-batch of the step, with what sends it through the policy's layers without
            gradient, and with what its tokens count. All ranks call it together or not at all.
        beta: Weight of the KL term.
        own: What the rollouts of this rank count, those that do not go through the policy among them.
        totals: What the loss is divided by, of all ranks.
        values: Columns of the step itself, by name.
        log_weights_C: Log of policy / behavior policy of each completion that went through the policy, on this rank:
            the sum over its tokens, not truncated. Known in ``on_gradient``.
        entropy: Mean entropy of the tokens that the step trained on, over all ranks, in nats; NaN if there are none, or
            if loss or gradient are not finite, so that the step changed no weight. Known in ``on_optimizer_step``.
        norms: Squared norms of the gradient as it was added up, after each of ``RunNumbers.num_parts`` parts of the
            step's prompts, the last of the whole gradient; empty if no plug-in sets that. Known as the entropy is.
        writer: Plug-in and hook that write columns, named in errors.
    """

    rollouts: Sequence[Rollout]
    version: int
    progress: float
    ranks: Ranks
    policy: PreTrainedModel
    optimizer: torch.optim.Optimizer
    measure: Measure
    visit: Visit
    beta: float
    own: StepTotals
    totals: StepTotals
    values: dict[str, Any] = field(default_factory=dict)
    log_weights_C: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    entropy: float = math.nan
    norms: Sequence[SquaredNorm] = ()
    writer: Writer = BY_CORE

    @property
    def number(self) -> int:
        """Number of optimizer steps that the policy has had, with this one."""
        return self.version + 1

    def of(self, plugin: Method, hook: str, source: int = 0) -> Step:
        """Return the part of the step that a plug-in acts on, for the plug-in to write in a hook."""
        own = [each for each in self.rollouts if each.prompt.is_of(plugin.datasets)]
        return replace(self, rollouts=own, writer=Writer.of(plugin, hook, own, source))

    def of_prompts(self, prompts: Collection[GroupKey]) -> Step:
        """Return the part of the step that has the rollouts of some prompts; it is divided by what all of it is."""
        return replace(self, rollouts=[each for each in self.rollouts if each.completion.request.group in prompts])

    def set(self, column: str, rollout: Rollout, value: Any) -> None:
        """Write a column of a rollout.

        Args:
            column: A name that the plug-in declares in ``writes``: ``mask``, which tokens are trained on; ``weight``,
                what each token counts that would be trained on, 0 or more, where one with weight 0 is not trained on,
                and those after the last with a weight do not go through the policy, while the denominator stays that
                of all tokens; ``chunks``, in their order and without a gap, each a micro-batch of its own.
            rollout: Rollout of the step, whose column is written.
            value: A list, array or tensor with a number for each token that is trained on; or
                :class:`~lit_grpo.update.plugin.Chunk` s.

        Raises:
            ValueError: The column cannot be written here, or the value does not fit; the message names plug-in, column
                and row.
        """
        read = self.writer.read(column, rollout, value)
        rollout.columns[column] = self._chunks(rollout, read) if column == "chunks" else read

    def __getitem__(self, column: str) -> Any:
        """Return a column of the step; None if nothing has been written."""
        return self.values.get(column)

    def __setitem__(self, column: str, value: Any) -> None:
        """Write a column of the step: ``entropy_coefficient``, ``term``, or ``scale``, which is multiplied.

        Raises:
            ValueError: The column cannot be written here, or the value does not fit.
        """
        its = self.writer.column(column)
        if its.of != "step" or column == "examples":
            method = "add" if its.of == "step" else "set"
            raise ValueError(f"{self.writer} writes {column!r} as a value of the step; use step.{method}.")
        if its.numbers is None:
            if not isinstance(value, Term):
                raise ValueError(f"{self.writer} gives the step the {column} {shown(value)}; give a Term.")
            self.values[column] = value
        else:
            number = its.numbers.read(f"{self.writer} gives the step the {column}", value, (), "").item()
            self.values[column] = self.values.get(column, 1.0) * number if column == "scale" else number

    def add(self, examples: Sequence[Rollout]) -> None:
        """Let the step imitate sequences beside its rollouts: the column ``examples``.

        They belong to no group: no reward, statistic or advantage sees them. They go through the policy in the same
        micro-batches, and share the prompts of rollouts.

        Args:
            examples: Rollouts whose completion has no token that is trained on, with unique keys; each with the column
                ``ce_weight``, the weight of each of its tokens.

        Raises:
            ValueError: One has tokens that are trained on, or no weights that fit.
        """
        self.writer.column("examples")
        if not is_list(examples):
            raise ValueError(f"{self.writer} adds {shown(examples)}; add a list of Rollouts.")
        for example in examples:
            if not isinstance(example, Rollout):
                raise ValueError(f"{self.writer} adds {shown(example)}; add Rollouts.")
            said, completion = f"{self.writer} gives {row_name(example)}", example.completion
            if completion.num_trained:
                raise ValueError(f"{said} tokens that are trained on by advantages; mark all as observed.")
            if (weights_T := example.columns.get("ce_weight")) is None:
                raise ValueError(f"{said} no ce_weight, so nothing is imitated; give one for each token.")
            numbers, number = COLUMNS["ce_weight"].numbers or Numbers("float32"), completion.num_tokens
            read_T = numbers.read(f"{said} the ce_weight", weights_T, (number,), f"its {number} tokens")
            example.columns["ce_weight"], example.ce_source = read_T, self.writer.source
        self.values.setdefault("examples", []).extend(examples)

    def highest(self, scores: Sequence[torch.Tensor], share: float) -> list[torch.Tensor]:
        """Return which tokens of each rollout are among that share of all ranks' tokens whose scores are highest."""
        return highest(scores, share, self.ranks.gather)

    def _chunks(self, rollout: Rollout, value: Any) -> Sequence[Chunk]:
        """Check that chunks follow one another from the first token to the last, none above ``largest_chunk``."""
        number, plugin = rollout.completion.num_tokens, self.writer.plugin
        largest = None if plugin is None else plugin.numbers.largest_chunk
        chunks = [*value] if isinstance(value, Sequence) else [value]
        if all(isinstance(chunk, Chunk) for chunk in chunks):
            begins = [0, *(chunk.end for chunk in chunks)]
            joins = all(chunk.begin == begin < chunk.end for chunk, begin in zip(chunks, begins, strict=False))
            weighs = all(math.isfinite(chunk.weight) and chunk.weight >= 0 for chunk in chunks)
            fits = largest is None or all(chunk.end - chunk.begin <= largest for chunk in chunks)
            if not chunks or (joins and weighs and fits and begins[-1] == number):
                return chunks
        given = [tuple(each) if isinstance(each, Chunk) else each for each in chunks]
        raise ValueError(
            f"{self.writer} cuts {row_name(rollout)} into {shown(given)}; give Chunks without a gap from 0 to "
            f"{number}, its number of tokens, of at most {largest} tokens (largest_chunk), with weights of 0 or more."
        )


def thinned(rollout: Rollout, kept_N: torch.Tensor, whole_length: int) -> Rollout:
    """Return a rollout that ends with the last token that it has a part in the loss with.

    Args:
        rollout: Rollout with all of its tokens.
        kept_N: Which of the tokens that are trained on stay so, bool, shape (completion.num_trained,).
        whole_length: Number of tokens that its loss is divided by.
    """
    whole, weights_T, trained_T = rollout.completion, rollout.columns.get("ce_weight"), rollout.completion.trained_T
    trained_T[trained_T.clone()] = kept_N
    used_T = trained_T if weights_T is None else trained_T | (weights_T != 0)
    end = max(used_T.nonzero().flatten().tolist(), default=-1) + 1
    part = Completion(
        whole.request,
        whole.token_ids_T[:end],
        whole.logprobs_T[:end],
        whole.versions_T[:end],
        whole.finish_reason,
        whole.text,
        whole.entropy,
        trained_T[:end],
    )
    part.engines, part.pictures = whole.engines, whole.pictures_until(end)
    columns = {name: its[kept_N] for name, its in rollout.columns.items() if name != "ce_weight"}
    columns |= {"whole_length": whole_length} | ({} if weights_T is None else {"ce_weight": weights_T})
    return replace(rollout, completion=part, columns=columns)


def with_ce(rollouts: Sequence[Rollout], trained: Sequence[Rollout]) -> list[Rollout]:
    """Return the rows of a step, with those that have weights in the channel ``ce`` alone.

    Args:
        rollouts: All of the step.
        trained: Rows that are trained on by their advantages.
    """
    by_key = {row.completion.request.key: row for row in trained}
    rows: list[Rollout] = []
    for row in (row for rollout in rollouts for row in rollout.rows):
        if (own := by_key.get(row.completion.request.key)) is not None:
            rows.append(own)
        elif (weights_T := row.columns.get("ce_weight")) is not None and weights_T.any():
            nothing = torch.zeros(row.completion.num_trained, dtype=torch.bool)
            rows.append(replace(thinned(row, nothing, 0), advantage=0.0))
    return rows
