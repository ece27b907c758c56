"""What a plug-in may decide of learning: which rollouts and tokens, with which advantages, in which parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from lit_grpo.plugins import AllGather, GroupBatch, Plugin, overriding
from lit_grpo.update.objective.tokens import Tokens, highest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from lit_grpo.ranks import Ranks
    from lit_grpo.types import Completion, Key, Rollout, RolloutGroup
    from lit_grpo.update.advantages.estimator import GroupRewards

    Visit = Callable[[Callable[[Callable[[], object], float], None]], None]


Measured = Literal["logprobs", "entropy", "scores"] | Callable[..., "torch.Tensor"]


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
            rollouts: Of this rank.
            what: Entropies in nats, log-probs, log-probs with squared norms of their gradients with respect to the last
                hidden states (shape T, 2), or what a function makes of the last hidden states that predict tokens
                (:data:`lit_grpo.update.logprobs.measurements.OfHidden`).
            lend: Makes a context that gives the model to measure under; by default the policy.
        """
        ...


@dataclass(frozen=True)
class LearningBatch(GroupBatch):
    """A batch on this rank that the policy learns from.

    Args:
        rewards: Of its rollouts, in their order.
        progress: The fraction of the run's optimizer steps that has been taken, from 0 to 1.
        measure: Measures tokens under the policy, as in ``measure(rollouts, "entropy")``.
        optimizer: Takes the steps; known to :meth:`LearningPlugin.token_mask` only.
    """

    rewards: GroupRewards
    progress: float
    measure: Measure
    optimizer: torch.optim.Optimizer | None = None

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts of the batch on this rank, group by group."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    def highest(self, scores: Mapping[Key, torch.Tensor], share: float) -> dict[Key, torch.Tensor]:
        """Return by completion which tokens are among that share of all ranks' tokens whose scores are highest."""
        return dict(zip(scores, highest([*scores.values()], share, self.all_gather), strict=True))


class Chunk(NamedTuple):
    """Neighbouring tokens of a completion, from ``begin`` to before ``end``, that go through the policy by themselves.

    All that they add to the gradient, also through what later chunks have seen of them, is multiplied by ``weight``;
    with 0 they have no backward pass.
    """

    begin: int
    end: int
    weight: float = 1.0


class Term:
    """What is added to the loss of one optimizer step: here, nothing.

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
            loss: The objective's.
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
    """

    policy: PreTrainedModel
    reference: PreTrainedModel | None
    version: int
    updates_per_batch: int
    ranks: Ranks
    max_staleness: int | None = None
    open_versions: Callable[[int], set[int]] | None = None


@dataclass(frozen=True)
class SquaredNorm:
    """The squared norm of what some prompts have added to a step's gradient, summed over ranks.

    The gradient of a step is the mean over its prompts of theirs, which are taken to be independent, with mean ``G``
    and covariance ``S``. Of n of N prompts on each rank, the sum over ranks has the expectation
    ``signal |G|^2 + noise tr S``, with ``signal = sum of (n / N)^2`` and ``noise = sum of n / N^2``; of the whole
    gradient, ``signal = 1`` and ``noise = 1 / N``.

    Args:
        square: The squared norm.
        signal: Factor of ``|G|^2`` in its expectation.
        noise: Factor of ``tr S`` in its expectation.
    """

    square: float
    signal: float
    noise: float


class LearningPlugin(Plugin):
    """A plug-in that decides something of learning. Only the methods that it overrides are called.

    A batch passes them in the order in which they stand here: rollouts are chosen (:meth:`choose`), the run's estimator
    compares their rewards, their advantages change (:meth:`shape`), some are left out by comparison with the whole
    batch (:meth:`choose_from_batch`), and turns or tokens get advantages of their own (:meth:`credit`,
    :meth:`credit_tokens`). At each optimizer step tokens are chosen (:meth:`token_mask`, :meth:`token_weights`) and
    long completions are cut (:meth:`chunks`), the loss gets a further term (:meth:`term`), norms of the gradient are
    measured (:meth:`measured`), by which the size of batches may change (:meth:`Plugin.batch_size`), and the learning
    rate of the step is scaled (:meth:`step_scale`).

    For example, smaller advantages for long completions::

        @dataclass
        class ByLength(LearningPlugin):
            cost: float = 0.001

            def shape(self, batch, advantages):
                return [
                    [value - self.cost * each.completion.num_sampled for value, each in zip(values, group.rollouts)]
                    for values, group in zip(advantages, batch.groups)
                ]

    In :attr:`needs` stands ``all_ranks`` if it compares groups or calls ``batch.all_gather``, ``whole_groups`` if it
    compares members of a group, and ``plain_rewards`` if it uses ``Rollout.reward``.
    """

    statistics: Literal["group", "kept"] = "group"
    """Of which rewards an advantage's mean and deviation are: all of the ``group``, or those :meth:`choose` kept."""
    whitens: bool = False
    """Whether credited tokens are given mean 0 and variance 1 over all tokens of a batch."""

    @property
    def roles(self) -> Sequence[str]:
        """What it decides, by the methods that it overrides."""
        return [role for role, hooks in ROLES.items() if overriding([self], *hooks, base=LearningPlugin)]

    def on_train_start(self, run: TrainingRun) -> None:
        """Training begins or goes on; what a checkpoint had is loaded, and nothing has been sampled yet.

        Raises:
            ValueError: It cannot act on the run.
        """

    # ---- once a batch ---------------------------------------------------------------------------------

    @property
    def begins_with(self) -> Mapping[str, float]:
        """Fields whose values move over the run, with the values that they begin with: ``{"first_keep": 4}``."""
        return {}

    def choose(self, batch: LearningBatch) -> torch.Tensor:
        """Return which rollouts are trained on, by comparison within their groups: booleans, shape R.

        The others were sampled and rewarded, and count in statistics alone, or not even there (:attr:`statistics`).
        """
        return ~batch.rewards.rewards_R.isnan()

    def shape(self, batch: GroupBatch, advantages: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
        """Return an advantage for each rollout of each group.

        Args:
            batch: Groups with any number of rollouts each.
            advantages: The estimator's, in the same order; NaN for one that is not trained on, which stays so.
        """
        return advantages

    def choose_from_batch(self, batch: LearningBatch, advantages_R: torch.Tensor, num_groups: int) -> torch.Tensor:
        """Return which rollouts are trained on, by comparison within the batch: booleans, shape R; needs ``all_ranks``.

        Args:
            batch: The part of the batch on this rank.
            advantages_R: Of the rollouts of all ranks; NaN for those that are not trained on.
            num_groups: Number of groups of all ranks.
        """
        return ~advantages_R.isnan()

    def credit(self, group: RolloutGroup, advantages: Sequence[float]) -> Sequence[Sequence[float]] | None:
        """Return an advantage for each turn of each rollout of a group; None if all turns have their rollout's.

        For example, half of an advantage for what each turn earned by itself (``rollout.turn_rewards``, which an
        environment gives) beside that of the whole::

            def credit(self, group, advantages):
                mean = fmean(reward for rollout in group.rollouts for reward in rollout.turn_rewards)
                return [
                    [advantage + 0.5 * (reward - mean) for reward in rollout.turn_rewards]
                    for rollout, advantage in zip(group.rollouts, advantages)
                ]

        Args:
            group: Of any number of rollouts.
            advantages: One per rollout; NaN for one that is not trained on, whose turns' values are ignored.
        """
        return None

    def credit_tokens(
        self, group: RolloutGroup, advantages: Sequence[float]
    ) -> Sequence[torch.Tensor | Sequence[float]] | None:
        """Return an advantage for each token that is trained on, in place of :meth:`credit`.

        Args:
            group: Of any number of rollouts.
            advantages: One per rollout; NaN for one that is not trained on, whose tokens' values are ignored.

        Returns:
            For each rollout values of shape (completion.num_trained,); None if all have their rollout's.
        """
        return None

    def old_logprobs(self, batch: LearningBatch, several_steps: bool) -> Mapping[Key, torch.Tensor] | None:
        """Return the log-probs in the denominator of probability ratios, by completion, shape ``num_trained``.

        Called before the first step on a batch, by all ranks together. A value that is NaN is the log-prob of the pass
        that trains on the token, which the policy now has to have sampled.

        Args:
            batch: Of the policy before its first step on the batch.
            several_steps: Whether there are several: the policy of the later passes is another one.

        Returns:
            None if all log-probs are those of the pass that trains on the token.
        """
        return None

    # ---- at each optimizer step -----------------------------------------------------------------------

    def proximal_logprobs(
        self, logprobs_N: torch.Tensor, sampled_logprobs_N: torch.Tensor, versions_N: torch.Tensor, version: int
    ) -> torch.Tensor:
        """Return the log-probs in the denominator of a micro-batch's ratios, in place of :meth:`old_logprobs`.

        Args:
            logprobs_N: Of the policy now, with gradient; the result has none.
            sampled_logprobs_N: Those that the tokens were sampled with.
            versions_N: Versions of the policy that sampled the tokens.
            version: Of the policy now.
        """
        return sampled_logprobs_N

    def token_metrics(self, tokens: Tokens) -> Mapping[str, torch.Tensor]:
        """Return values of a micro-batch's tokens by name, shape N, whose means over all tokens are logged."""
        return {}

    def token_mask(self, batch: LearningBatch, rollouts: Sequence[Rollout]) -> Mapping[Key, torch.Tensor] | None:
        """Return which tokens are trained on, bool by completion; None for all. Called before each optimizer step.

        Args:
            batch: The batch, whose ``version`` and ``progress`` are those of the step.
            rollouts: Those of the step on this rank, with their advantages.
        """
        return None

    def token_weights(self, rollouts: Sequence[Rollout], version: int) -> Mapping[Key, torch.Tensor] | None:
        """Return what each token counts that would be trained on, by completion; None if each counts 1.

        Called once for each part of an optimizer step, and again where the part is taken again: the same rollouts and
        version have the same weights. A token of weight 0 is not trained on, and those after the last token with a
        weight do not go through the policy: the row is shorter. The step's denominator is still of all tokens, so the
        gradient is that of all in expectation where each weight is 1 on average. A plug-in that has weights changes
        ``whole_completions``.

        Args:
            rollouts: Of a step on this rank, each with a token that would be trained on.
            version: Of the policy that takes the step.

        Returns:
            Float32, shape ``num_trained`` of each completion.
        """
        return None

    @property
    def largest_chunk(self) -> int | None:
        """The largest number of tokens of a chunk; None if no completion is cut."""
        return None

    def chunks(self, completion: Completion, version: int) -> Sequence[Chunk]:
        """Return the chunks of a completion in their order, without a gap; none if it goes through whole.

        A chunk is a micro-batch of its own, and the last has its turn first. Keys and values of the chunks before it
        have been computed without a gradient; its backward pass leaves theirs
        (:class:`lit_grpo.update.prefix.carried.CarriedSpan`). The gradient is that of the whole completion. It is
        called again where a step is taken again: the same completion and version have the same chunks. A plug-in that
        has chunks sets :attr:`largest_chunk`.

        Args:
            completion: Trained on.
            version: Of the policy that takes the step.
        """
        return ()

    def term(self, policy: PreTrainedModel, visit: Visit, ranks: Ranks) -> Term:
        """Return what is added to the loss of an optimizer step, before its first backward pass.

        The log of ``loss`` stays the objective's.

        Args:
            policy: The policy being trained.
            visit: Calls a function for each micro-batch of the step, with what sends it through the policy's layers
                without gradient, and with what its tokens count. All ranks call it together or not at all.
            ranks: Of the run.
        """
        return Term()

    @property
    def entropy_coefficient(self) -> float:
        """Weight of the entropy bonus in the next step, in place of ``model.objective.entropy.coefficient``."""
        return 0.0

    @property
    def num_parts(self) -> int:
        """In how many parts of its prompts a step's gradient is added up, for :meth:`measured`."""
        return 1

    def measured(self, norms: Sequence[SquaredNorm]) -> None:
        """A step's gradient has been added up; its norms after each part, and of the whole, on all ranks alike."""

    def step_scale(self, log_weights_C: torch.Tensor, all_gather: AllGather) -> float:
        """Return the factor of the learning rate of a step; several plug-ins' factors are multiplied.

        All ranks call it together, unless the step's loss or gradient is not finite.

        Args:
            log_weights_C: Log of policy / behavior policy of each completion that went through the policy in the step,
                on this rank: the sum over its tokens, not truncated.
            all_gather: See :data:`lit_grpo.plugins.AllGather`.
        """
        return 1.0

    def on_optimizer_step(self, version: int, entropy: float) -> None:
        """An optimizer step has been taken; all ranks call it.

        Args:
            version: Number of optimizer steps that the policy has had, with this one.
            entropy: Mean entropy of the tokens that the step trained on, over all ranks, in nats; NaN if there are
                none, or if loss or gradient are not finite, so that the step changed no weight.
        """


ROLES: Mapping[str, Sequence[str]] = {
    "which rollouts are learnt from": ("choose", "choose_from_batch", "token_mask", "token_weights"),
    "what each rollout is learnt from with": ("shape",),
    "what each turn is learnt from with": ("credit", "credit_tokens"),
    "which completions go through the policy in chunks": ("chunks",),
    "what is added to the objective's loss": ("term",),
    "which log-probs ratios are taken to": ("old_logprobs", "proximal_logprobs"),
    "how much the entropy bonus counts": ("entropy_coefficient",),
    "how many prompts a batch has": ("measured", "batch_size"),
}
"""What at most one plug-in of a run may decide, and the methods of :class:`LearningPlugin` that decide it."""
