"""Our counterpart of each metric that TRL 1.16's GRPOTrainer logs."""

from __future__ import annotations

from typing import NamedTuple


class MetricCounterpart(NamedTuple):
    """Our counterpart of a metric.

    Args:
        ours: Name of the metric in lit_grpo; empty if there is none.
        differs: What differs from TRL's; empty if nothing does.
    """

    ours: str
    differs: str = ""


ENDED = "if no completion ended by itself: NaN, 0 in TRL"
TRAINED = (
    "the mean over the tokens trained on; groups of equal rewards are left out if nothing trains on them, in TRL they "
    "count. TRL takes a mean over micro-batches"
)
TOKENS = f"{TRAINED}, and over sequences if importance_sampling_level is sequence"
WEIGHTS = "the mean is logged if objective.correction is set; see sampling/ess_token and sampling/ess_sequence too"
TOOLS = "a number of calls per batch, not a fraction"
METRICS: dict[str, MetricCounterpart] = {
    "loss": MetricCounterpart("loss", "per row as in TRL with logging_steps 1; TRL's is a mean over the logged steps"),
    "grad_norm": MetricCounterpart("grad_norm"),
    "learning_rate": MetricCounterpart("lr"),
    "step_time": MetricCounterpart("time/step_s", "with validation and checkpoints, which TRL leaves out"),
    "num_tokens": MetricCounterpart(
        "num_tokens", "with completions that a rollout mode discards, which TRL does not have"
    ),
    "reward": MetricCounterpart("reward", "if only functions of weight 0 apply to a completion: no reward, 0 in TRL"),
    "reward_std": MetricCounterpart("reward_std", "of one completion: 0, NaN in TRL"),
    "rewards/*/mean": MetricCounterpart("rewards/*/mean"),
    "rewards/*/std": MetricCounterpart("rewards/*/std", "of one completion: 0, NaN in TRL"),
    "frac_reward_zero_std": MetricCounterpart(
        "frac_reward_zero_std",
        "the fraction of groups always; in TRL with scale_rewards batch or normalize_then_sum it is 1 or 0, by the "
        "deviation of the whole batch",
    ),
    "completions/mean_length": MetricCounterpart("completions/mean_length"),
    "completions/min_length": MetricCounterpart("completions/min_length"),
    "completions/max_length": MetricCounterpart("completions/max_length"),
    "completions/clipped_ratio": MetricCounterpart(
        "completions/clipped_ratio", "a completion that ends in a stop text is not clipped; in TRL it is"
    ),
    "completions/mean_terminated_length": MetricCounterpart("completions/mean_terminated_length", ENDED),
    "completions/min_terminated_length": MetricCounterpart("completions/min_terminated_length", ENDED),
    "completions/max_terminated_length": MetricCounterpart("completions/max_terminated_length", ENDED),
    "entropy": MetricCounterpart("entropy", TRAINED),
    "kl": MetricCounterpart("kl", TRAINED + "; without the factor of use_bias_correction_kl, which TRL's has"),
    "clip_ratio/low_mean": MetricCounterpart("clip_ratio/low", TOKENS),
    "clip_ratio/high_mean": MetricCounterpart("clip_ratio/high", TOKENS),
    "clip_ratio/region_mean": MetricCounterpart("", "clip_ratio/low + clip_ratio/high"),
    "clip_ratio/low_min": MetricCounterpart("", "the least of a completion is not logged"),
    "clip_ratio/high_max": MetricCounterpart("", "the most of a completion is not logged"),
    "cispo_clip_ratio": MetricCounterpart("clip_ratio/high"),
    "vespo/phi_seq_mean": MetricCounterpart("vespo/weight", "the mean over tokens; TRL's is over sequences"),
    "sampling/sampling_logp_difference/mean": MetricCounterpart(
        "sampling/logprob_gap_mean", "the mean over tokens; TRL's is over ranks' means"
    ),
    "sampling/sampling_logp_difference/max": MetricCounterpart("sampling/logprob_gap_max"),
    "sampling/importance_sampling_ratio/min": MetricCounterpart("", WEIGHTS),
    "sampling/importance_sampling_ratio/mean": MetricCounterpart("correction/weight", WEIGHTS),
    "sampling/importance_sampling_ratio/max": MetricCounterpart("", WEIGHTS),
    "policy_loss": MetricCounterpart("", "loss without its entropy term is not logged"),
    "entropy_coef": MetricCounterpart(
        "entropy_coefficient", "with the plug-in entropy_target; a constant coefficient is not logged"
    ),
    "aux_loss": MetricCounterpart("router/loss", "only with the plug-in router_loss"),
    "tools/call_frequency": MetricCounterpart("environments/tool_calls", TOOLS),
    "tools/failure_frequency": MetricCounterpart("environments/tool_failures", TOOLS),
    "eval_*": MetricCounterpart("val/*", "reward, rewards/*/mean, completion_length and truncated of held-out prompts"),
}
"""By TRL's name."""
