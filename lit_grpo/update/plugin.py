"""Arguments of hooks of the update: a batch whose columns they write, a teacher, and parts of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch

from lit_grpo.limits import Limit
from lit_grpo.plugins.columns import OF_CANDIDATES, Numbers, Writer, is_list, row_name, shown
from lit_grpo.types import GroupBatch, alone
from lit_grpo.update.advantages.functions import EPSILON

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.plugins.columns import Method
    from lit_grpo.policy.spec import PolicySpec
    from lit_grpo.ranks import Ranks
    from lit_grpo.types import AllGather, Completion, Key, Request, Rollout
    from lit_grpo.update.advantages.estimator import GroupRewards

    Visit = Callable[[Callable[[Callable[[], object], float], None]], None]


class Measure(Protocol):
    """Sends rollouts through the policy without a gradient. All ranks call it together."""

    def __call__(
        self,
        rollouts: Sequence[Rollout],
        what: Literal["entropy", "logprobs", "scores"] | Callable[..., torch.Tensor],
        lend: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None,
        /,
    ) -> Mapping[Key, torch.Tensor]:
        """Return by completion what was measured of each token that is trained on.

        Args:
            rollouts: Rollouts of this rank to measure.
            what: Entropies in nats, log-probs, log-probs with squared norms of their gradients with respect to the last
                hidden states (shape T, 2), or what a function makes of the last hidden states that predict tokens
                (:data:`lit_grpo.update.logprobs.measurements.OfHidden`).
            lend: Makes a context that gives the model to measure under; by default the policy.
        """
        ...


class TeacherScores(NamedTuple):
    """A teacher's scores of the tokens of a completion that are trained on.

    Attributes:
        logprobs_T: Log-prob of each of them, float32, shape (num_trained,).
        entropy_T: Entropy of the teacher's distribution there, in nats.
        top_ids_TK: Ids of the K likeliest tokens at each place, int64, the likeliest first.
        top_logprobs_TL: Their log-probs, and that of all other tokens together, L = K + 1; without any where K is 0.
    """

    logprobs_T: torch.Tensor
    entropy_T: torch.Tensor
    top_ids_TK: torch.Tensor
    top_logprobs_TL: torch.Tensor


class Teacher(Protocol):
    """Says how likely the tokens of completions are; a model, or a server that has one.

    Attributes:
        num_tokens: Number of tokens that it knows: those with smaller ids.
    """

    num_tokens: int

    def score(
        self, measure: Measure, rollouts: Sequence[Rollout], all_gather: AllGather, top_k: int = 0
    ) -> Mapping[Key, TeacherScores]:
        """Return by completion what the teacher says of its tokens that are trained on. All ranks call it together.

        From the first token of a completion on that the teacher does not know, log-probs and entropies are NaN.

        Args:
            measure: Sends rollouts through a model, ``Batch.measure``.
            rollouts: Of this rank. Each has the prompt that the teacher sees, which need not be the policy's.
            all_gather: Brings values of all ranks together.
            top_k: How many of the teacher's likeliest tokens to return at each place.

        Raises:
            ValueError: A log-prob is not finite, or a server gives none; on every rank.
        """
        ...

    def complete(
        self, requests: Sequence[Request], spec: PolicySpec, version: int, all_gather: AllGather = alone
    ) -> Mapping[Key, Completion]:
        """Return the completions that the teacher samples, by key, each after its prompt and the request's prefix.

        All ranks call it together. Left out are those with a prompt or prefix that the teacher cannot read, and those
        that end in tokens that the policy does not know. Sampled tokens have no log-probs of the policy: they are 0,
        or those of the teacher.

        Args:
            requests: Requests of this rank, with unique keys. ``sampling.max_tokens`` counts the prefix too.
            spec: The policy, whose tokenizer makes the texts.
            version: What the tokens of the teacher have as their policy version.
            all_gather: Brings values of all ranks together; by default there is one rank.

        Raises:
            ValueError: A server gives no tokens, on every rank; or slots cannot decode the model.
        """
        ...

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the weights of a moving average of the policy, by name; empty for any other teacher."""
        ...

    def follow(self, policy: PreTrainedModel) -> None:
        """Move a moving average towards the policy, after an optimizer step; other teachers stay as they are."""
        ...


BY_CORE = Writer(None, "on_batch")
_OF_TRAINED = ("advantage", "turn_advantage", "token_advantage")


@dataclass(frozen=True)
class Batch(GroupBatch):
    """A batch on this rank that the policy learns from; :meth:`set` writes columns of its rollouts.

    Args:
        rewards: Rewards of the batch's rollouts, in their order.
        progress: The fraction of the run's optimizer steps that has been taken, from 0 to 1; 0 if the run has no known
            end (``RunFacts.total_updates``).
        measure: Measures tokens under the policy, as in ``measure(rollouts, "entropy")``.
        several_steps: Whether several optimizer steps are taken on it: the policy of the later passes is another one.
        num_ids: Size of the policy's vocabulary.
        rank: The number of this rank.
        estimate: Gives its rollouts the advantages of the run's estimator, those of the whole batch with the advantage
            NaN left out.
        writer: Plug-in and hook that write columns, named in errors.
    """

    rewards: GroupRewards
    progress: float
    measure: Measure
    several_steps: bool = False
    num_ids: int = 2**31
    rank: int = 0
    estimate: Callable[[], None] = lambda: None
    writer: Writer = BY_CORE

    def of(self, plugin: Method, source: int = 0) -> Batch:
        """Return the part of the batch that a plug-in acts on, for the plug-in to write."""
        batch = self
        if plugin.datasets:
            own = [number for number, group in enumerate(self.groups) if group.prompt.is_of(plugin.datasets)]
            batch = replace(self, groups=[self.groups[number] for number in own], rewards=self.rewards.of_groups(own))
        return replace(batch, writer=Writer.of(plugin, "on_batch", batch.rollouts, source))

    def set(self, column: str, rollout: Rollout, value: Any) -> None:
        """Write a column of a rollout.

        Args:
            column: A name of :data:`lit_grpo.plugins.columns.COLUMNS` that the plug-in declares in ``writes``:
                ``chosen``, whether the rollout is trained on, by comparison within its group; ``advantage``;
                ``trained``, whether it is trained on, by comparison within the batch; ``turn_advantage``, a number for
                each turn; ``token_advantage``, ``epsilon`` and ``old_logprob``, a number for each token that is trained
                on; ``ce_weight``, for each token the weight of its negative log-likelihood, observed tokens among them;
                ``candidates``, two tensors with the ids and values of K further tokens at each place, perhaps with a
                value of all other tokens after these.
            rollout: Rollout of this batch, whose column is written.
            value: A number, or a list, array or tensor of numbers. Advantages of a rollout that is not trained on are
                not read: its own is NaN.

        Raises:
            ValueError: The column cannot be written here, or the value does not fit; the message names plug-in, column
                and row.
        """
        self.writer.column_of(column, rollout)
        if column in _OF_TRAINED and math.isnan(rollout.advantage):
            return
        read = self.writer.read(column, rollout, value)
        match column:
            case "chosen" | "trained":
                rollout.advantage = rollout.advantage if read else math.nan
            case "advantage":
                rollout.advantage = read
            case "turn_advantage":
                rollout.columns["token_advantage"] = rollout.completion.of_turns(read.tolist())
            case "ce_weight":
                self._check_observed(rollout, read)
                rollout.columns[column], rollout.ce_source = read, self.writer.source
            case "candidates":
                rollout.columns |= dict(zip(OF_CANDIDATES, self._candidates(rollout, read), strict=True))
            case _:
                rollout.columns[column] = read

    def compare(self) -> None:
        """Estimate its rollouts' advantages again, by comparison with those alone that are still trained on."""
        self.estimate()

    def _check_observed(self, rollout: Rollout, weights_T: torch.Tensor) -> None:
        """Check that a token with a weight stands in a row of the update."""
        completion = rollout.completion
        if not completion.contexts:
            return
        outside_T = torch.ones(completion.num_tokens, dtype=torch.bool)
        for begin, end, _ in completion.places_of_turns:
            outside_T[begin:end] = False
        if weights_T[outside_T].any():
            raise ValueError(
                f"{self.writer} gives {row_name(rollout)} the ce_weight of observed tokens, but its earlier turns were "
                "rendered again, so that those tokens are in no row of the update; give observed tokens the weight 0."
            )

    def _candidates(self, rollout: Rollout, pair: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Check ids and values of further tokens."""
        said, number = f"{self.writer} gives {row_name(rollout)}", rollout.completion.num_trained
        if not is_list(pair) or len(pair) != 2 or len(getattr(pair[0], "shape", ())) != 2:
            raise ValueError(f"{said} the candidates {shown(pair)}; give two tensors, ids and values of K tokens.")
        width, each = pair[0].shape[1], "K tokens at each place"
        width_of_values = width + (tuple(getattr(pair[1], "shape", ())) == (number, width + 1))
        ids_TK = Numbers("int64", Limit(ge=0)).read(f"{said} candidate ids", pair[0], (number, width), each)
        values_TL = Numbers("float32", Limit(), nan=True).read(
            f"{said} candidate values", pair[1], (number, width_of_values), each
        )
        if ids_TK.numel() and ids_TK.max() >= self.num_ids:
            raise ValueError(
                f"{said} the candidate id {int(ids_TK.max())}; the policy has ids from 0 to {self.num_ids - 1}."
            )
        return ids_TK, values_TL

    def whitened(self, values: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return tokens' advantages with mean 0 and variance 1 over all tokens of all ranks, for ``token_advantage``.

        They are ``(A - mean) / (standard deviation + 1e-4)``, float32 (TRL's epsilon). Rollouts that are not trained
        on and those without a tensor take no part and get None. All ranks call it together.

        Args:
            values: For each rollout of the batch on this rank an advantage for each token, or None.
        """
        found: list[torch.Tensor | None] = [None] * len(values)
        own: dict[int, torch.Tensor] = {}
        for row, (rollout, values_T) in enumerate(zip(self.rollouts, values, strict=True)):
            if values_T is not None and not math.isnan(rollout.advantage):
                own[row] = values_T.float().double()
        all_T = torch.cat(self.all_gather(torch.cat([torch.empty(0, dtype=torch.float64), *own.values()])))
        mean, deviation = (all_T.mean(), all_T.std()) if len(all_T) > 1 else (0.0, 1.0)
        for row, values_T in own.items():
            found[row] = ((values_T - mean) / (deviation + EPSILON)).float()
        return found


class Chunk(NamedTuple):
    """Neighboring tokens of a completion, from ``begin`` to before ``end``, that go through the policy by themselves.

    All that they add to the gradient, also through what later chunks have seen of them, is multiplied by ``weight``;
    with 0 they have no backward pass.
    """

    begin: int
    end: int
    weight: float = 1.0


class Term:
    """A term of the loss of one optimizer step: here, nothing.

    Attributes:
        metrics: What to log of the step, the same on every rank.
    """

    metrics: Mapping[str, float] = {}

    def watching(self) -> AbstractContextManager[object]:
        """Return a context for the forward pass of a micro-batch, in which the term may look at what is computed."""
        return nullcontext()

    def added_to(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """Return a micro-batch's share of the step's loss, with the term's share of what was last watched.

        Args:
            loss: Loss of the micro-batch by the objective, a scalar with gradient.
            weight: What the tokens of the micro-batch count; 0 where it has none to learn from.
        """
        return loss


@dataclass(frozen=True)
class TrainingRun:
    """A run that is about to train, or to go on from a checkpoint.

    Args:
        policy: The policy being trained.
        reference: The model of the KL term's reference policy, if it has weights of its own.
        version: Number of optimizer steps that the policy has had.
        updates_per_batch: Optimizer steps on one batch.
        ranks: Reductions over the ranks of the run.
        max_staleness: Optimizer steps that may lie between the sampling of a token and the step that trains on it; None
            if every token is trained on in the batch that it was sampled for.
        open_versions: Returns the versions that sampled the tokens which may yet be trained on, on this rank, given the
            version that samples next; None if ``max_staleness`` is.
        teacher: The model of ``model.teacher``, if a plug-in of the run asks it.
        spec: The policy as generators see it, with its tokenizer.
    """

    policy: PreTrainedModel
    reference: PreTrainedModel | None
    version: int
    updates_per_batch: int
    ranks: Ranks
    max_staleness: int | None = None
    open_versions: Callable[[int], set[int]] | None = None
    teacher: Teacher | None = None
    spec: PolicySpec | None = None


@dataclass(frozen=True)
class SquaredNorm:
    """The squared norm of what some prompts have added to a step's gradient, summed over ranks.

    The gradient of a step is the mean over its prompts of theirs, which are taken to be independent, with mean ``G``
    and covariance ``S``. Of n of N prompts on each rank, the sum over ranks has the expectation
    ``signal |G|^2 + noise tr S``, with ``signal = sum of (n / N)^2`` and ``noise = sum of n / N^2``; of the whole
    gradient, ``signal = 1`` and ``noise = 1 / N``.

    Args:
        square: Squared norm of the summed gradients of these prompts.
        signal: Factor of ``|G|^2`` in its expectation.
        noise: Factor of ``tr S`` in its expectation.
    """

    square: float
    signal: float
    noise: float
