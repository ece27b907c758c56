"""The completion tokens of a micro-batch as objectives see them: sums, ratios, weights, and which are trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from lit_grpo.limits import Limit
from lit_grpo.plugins.columns import Numbers, Writer, shown

if TYPE_CHECKING:
    from lit_grpo.plugins.columns import Method


def _column(name: str) -> torch.Tensor:
    """Return a property that reads a column; its type is that of what is read."""
    return cast("torch.Tensor", property(lambda tokens: tokens.columns[name]))


@dataclass
class Tokens:
    """The completion tokens of a micro-batch that are trained on, as a loss sees them: columns by name.

    The N axis holds the completions one after another, each of them whole. Tokens that are not trained on (observed
    ones) are none of it. What a plug-in has written for them stands in ``columns`` under the name that it has for
    rollouts, such as ``mask`` and ``weight``, with these beside the properties below:

    - ``age`` (N): the optimizer steps that the policy has had since the token was sampled.
    - ``whole_length`` (C): the number of tokens of each whole completion, if only a part of one is here.
    - ``ce_weight``, ``ce_count`` and ``ce_logprob`` (M), of all tokens with a weight in the channel ``ce``, observed
      tokens among them: the weight, the number of the whole step's tokens with a weight from the same source, and the
      log-prob, with gradient.
    - ``candidate_logprobs`` (NK): the log-probs of further tokens at each place, with gradient; ``rest_logprob`` (N):
      the log of the probability of all that are no candidates; ``candidate_values``: what a plug-in knows of them, NaN
      where it names none.

    Args:
        columns: All values, by name.
        figures: Values of tokens whose means are logged, shape N, by name.
        writer: Plug-in and hook that write columns, named in errors.
    """

    columns: dict[str, torch.Tensor]
    figures: dict[str, torch.Tensor] = field(default_factory=dict, kw_only=True)
    writer: Writer = field(default=Writer(None, "loss"), kw_only=True)

    logprobs_N = _column("logprob")
    """Log-probs under the policy; they carry the gradient."""
    sampled_logprobs_N = _column("sampled_logprob")
    """Log-probs under the policy that sampled."""
    old_logprobs_N = _column("old_logprob")
    """Log-probs that ratios are taken to: of the sampler, or of another proximal policy."""
    entropy_N = _column("entropy")
    """Entropies in nats; they carry a gradient if an entropy bonus asks for it."""
    advantages_N = _column("advantage")
    """Advantages, which may differ within a completion."""
    versions_N = _column("version")
    """Versions of the policy that sampled."""
    lengths_C = _column("length")
    """Number of tokens of each completion."""

    @property
    def reference_logprobs_N(self) -> torch.Tensor | None:
        return self.columns.get("reference_logprob")

    @property
    def turn_lengths_S(self) -> torch.Tensor | None:
        """Number of tokens of each turn, of one completion after another; None if each completion is one turn."""
        return self.columns.get("turn_length")

    @property
    def advantages_C(self) -> torch.Tensor:
        """The mean advantage of each completion's tokens; its sign is exact where they all have the same."""
        return completion_means(self.advantages_N, self.lengths_C)

    def of(self, plugin: Method) -> Tokens:
        """Return the same columns for a plug-in to write."""
        return Tokens(self.columns, figures=self.figures, writer=Writer(plugin, "loss"))

    def __setitem__(self, column: str, values_N: Any) -> None:
        """Write a column: ``proximal_logprob``, which ratios are taken to, or ``added_loss``, which has a gradient.

        What is added to the loss of a token is weighted as the objective's loss of it is, and neither clipped nor
        masked.

        Raises:
            ValueError: The column cannot be written here, or the values do not fit the tokens.
        """
        numbers, logprobs_N = self.writer.column(column).numbers, self.logprobs_N
        read_N = self._read(column, values_N, numbers or Numbers("float32"))
        if column == "added_loss" and logprobs_N.requires_grad and not read_N.requires_grad and read_N.any():
            raise ValueError(f"{self.writer} gives tokens an added_loss without a gradient; compute it from tokens.")
        if column == "added_loss":
            self.columns[column] = read_N
        else:
            self.columns["old_logprob"] = read_N.detach()

    def log(self, name: str, values_N: Any) -> None:
        """Let the mean of a value over all tokens be logged, shape N.

        Raises:
            ValueError: There is not one number for each token: a scalar says nothing of how many it stands for.
        """
        self.figures[name] = self._read(name, values_N, Numbers("float32", Limit(), nan=True)).detach()

    def _read(self, name: str, values_N: Any, numbers: Numbers) -> torch.Tensor:
        logprobs_N, said = self.logprobs_N, f"{self.writer} gives tokens the {name}"
        each = f"{len(logprobs_N)} tokens of a micro-batch, as tokens.logprobs_N has them"
        if getattr(values_N, "device", None) != logprobs_N.device:
            where = f"give a tensor on {logprobs_N.device}, one number for each of {each}"
            raise ValueError(f"{said} {shown(values_N)}; {where}.")
        return numbers.read(said, values_N, tuple(logprobs_N.shape), each, keeps_gradient=True)


def spread(values_C: torch.Tensor, lengths_C: torch.Tensor, num_tokens: int | None = None) -> torch.Tensor:
    """Give each token the value of its completion: C to N.

    With ``num_tokens``, the sum of ``lengths_C``, nothing waits for a GPU; without it the sum is read from there.
    """
    return values_C.repeat_interleave(lengths_C, output_size=num_tokens)


def completion_sums(values_N: torch.Tensor, lengths_C: torch.Tensor) -> torch.Tensor:
    """Sum up each completion's tokens: N to C; 0 for a completion without tokens."""
    if not len(lengths_C):
        return values_N  # of no token, and part of the graph
    return torch.segment_reduce(values_N, "sum", lengths=lengths_C, unsafe=True)


def completion_means(values_N: torch.Tensor, lengths_C: torch.Tensor) -> torch.Tensor:
    """Average each completion's tokens: N to C; 0 for a completion without tokens."""
    return completion_sums(values_N, lengths_C) / lengths_C.clamp(min=1)


RatioLevel = Literal["token", "turn", "sequence"]
Normalization = Literal["token", "sequence", "constant", "sequence_sum"]
LARGEST_LOG_RATIO = 20.0
"""Beyond it, on either side, a log-ratio is cut and has no gradient: float32 has no number for exp(90)."""


def log_ratios(tokens: Tokens, level: RatioLevel) -> torch.Tensor:
    """Return the log of the ratio that each token's surrogate sees, shape N, with gradient.

    ``token``: ``log r_t = log pi(o_t) - log pi_old(o_t)`` (PPO). ``sequence``: its mean over the completion, the
    log of ``s = (pi(o) / pi_old(o)) ** (1 / |o|)``, the same for all of its tokens (GSPO, arXiv 2507.18071, eq. 7).
    Where a completion has one advantage, GSPO-token (eq. 13) has the same value and gradient. ``turn``: likewise over
    each turn, between two answers of an environment (Turn-PPO of ST-PPO, arXiv 2511.20718). All are cut to
    [-20, 20], as in verl's ``compute_policy_loss``.
    """
    log_ratio_N = tokens.logprobs_N - tokens.old_logprobs_N
    if level != "token":
        turn_lengths_S = tokens.turn_lengths_S
        lengths = tokens.lengths_C if level == "sequence" or turn_lengths_S is None else turn_lengths_S
        log_ratio_N = spread(completion_means(log_ratio_N, lengths), lengths, len(log_ratio_N))
    return log_ratio_N.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


@torch.no_grad()
def on_policy_completions(tokens: Tokens, threshold: float) -> torch.Tensor:
    """Say which completions to keep, shape C: those with A >= 0, and bad ones that the policy has not left.

    A bad completion is left out where ``mean_t(log pi_sampled - log pi)`` exceeds ``threshold`` (off-policy sequence
    mask, DeepSeek-V3.2, arXiv 2512.02556, eq. 9; TRL's ``off_policy_mask_threshold``).
    """
    gap_N = tokens.sampled_logprobs_N - tokens.logprobs_N
    return (tokens.advantages_C >= 0) | (completion_means(gap_N, tokens.lengths_C) <= threshold)


@torch.no_grad()
def near_completions(tokens: Tokens, limit: float) -> torch.Tensor:
    """Say which completions to keep, shape C: those with A > 0, and others that the policy has not left.

    A completion is near where ``sum_t (r_t - 1 - log r_t) < limit``, with ``r = pi / pi_sampled``: the sum over its
    tokens of the k3 estimate of KL(sampler || policy), which is unbiased for tokens of the sampler and never negative.
    The filter of F-TIS (arXiv 2605.22537): "A > 0 or KL(policy || sampler) < gamma", gamma 50. How it estimates and
    adds up the divergence is not known to us. An unbiased estimate of that direction, ``r log r - r + 1``, is at most 1
    for a token that the policy has given up, however far; this one grows with the distance.
    """
    log_ratio_N = tokens.logprobs_N - tokens.sampled_logprobs_N
    kl_N = log_ratio_N.clamp(max=LARGEST_LOG_RATIO).exp() - 1 - log_ratio_N
    return (tokens.advantages_C > 0) | (completion_sums(kl_N, tokens.lengths_C) < limit)


def entropy_threshold(entropy_N: torch.Tensor, share: float) -> float:
    """Return the entropy that the ``share`` of tokens with the highest reach; infinite without tokens.

    Linear interpolation between neighbors, as ``torch.quantile``, which takes no more than 2**24 values. Tokens at
    the threshold are kept ("Beyond the 80/20 Rule", arXiv 2506.01939; TRL's ``top_entropy_quantile``).
    """
    if not entropy_N.numel():
        return math.inf
    ordered_N = entropy_N.sort().values
    position = (1 - share) * (len(ordered_N) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered_N) - 1)
    return float(torch.lerp(ordered_N[below], ordered_N[above], position - below))


def highest(
    scores: Sequence[torch.Tensor], share: float, all_gather: Callable[[torch.Tensor], list[torch.Tensor]]
) -> list[torch.Tensor]:
    """Return which tokens of each completion are among that share of all ranks' tokens whose scores are highest."""
    everyone = all_gather(torch.cat([torch.empty(0, dtype=torch.float32), *scores]))
    threshold = entropy_threshold(torch.cat(everyone), share)
    return [scores_T >= threshold for scores_T in scores]


@dataclass(frozen=True)
class StepTotals:
    """Denominators of one optimizer step, counted over all micro-batches and ranks beforehand.

    Because it is fixed before the first backward, the gradient does not depend on how the step is split.
    ``num_tokens`` and ``num_sequences`` are of the completions with a reward; ``num_entropy_tokens`` are those that an
    entropy bonus is averaged over, and ``num_ce_tokens`` those whose weight in the ``ce`` channel is not 0, for each
    source of weights: the plug-ins of the update that write ``ce_weight`` or ``examples``, in their order. ``has_mask``
    says whether a column ``mask`` chooses tokens on any rank.
    """

    num_tokens: int
    num_sequences: int
    max_tokens: int
    num_entropy_tokens: int = 0
    num_ce_tokens: tuple[int, ...] = ()
    has_mask: bool = False


def token_weights(
    lengths_C: torch.Tensor,
    totals: StepTotals,
    normalization: Normalization,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return what each token of a completion counts in the step's loss, shape C.

    ``token``: every token of the step alike (DAPO; TRL's ``dapo``). ``sequence``: every completion alike,
    whatever its length (the first GRPO; TRL's ``grpo``). ``constant``: by the limit on completion length, so
    that length is not rewarded either way (Dr. GRPO; TRL's ``dr_grpo``). ``sequence_sum``: the mean over completions of
    the sum over their tokens (TRL's ``luspo``).
    """
    if normalization == "sequence":
        return 1 / (lengths_C.clamp(min=1) * max(totals.num_sequences, 1)).to(dtype)
    denominator = {
        "token": totals.num_tokens,
        "constant": totals.num_sequences * totals.max_tokens,
        "sequence_sum": totals.num_sequences,
    }[normalization]
    return torch.full_like(lengths_C, 1 / max(denominator, 1), dtype=dtype)
