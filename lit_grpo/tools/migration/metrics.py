"""Our counterpart of each metric that TRL 1.16's GRPOTrainer logs."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
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
METRICS: dict[str, Metric] = {
    "loss": Metric("loss", "per row as in TRL with logging_steps 1; TRL's is a mean over the logged steps"),
    "grad_norm": Metric("grad_norm"),
    "learning_rate": Metric("lr"),
    "step_time": Metric("time/step_s", "with validation and checkpoints, which TRL leaves out"),
    "num_tokens": Metric("num_tokens", "with completions that a rollout mode discards, which TRL does not have"),
    "reward": Metric("reward", "if only functions of weight 0 apply to a completion: no reward, 0 in TRL"),
    "reward_std": Metric("reward_std", "of one completion: 0, NaN in TRL"),
    "rewards/*/mean": Metric("rewards/*/mean"),
    "rewards/*/std": Metric("rewards/*/std", "of one completion: 0, NaN in TRL"),
    "frac_reward_zero_std": Metric(
        "frac_reward_zero_std",
        "the fraction of groups always; in TRL with scale_rewards batch or normalize_then_sum it is 1 or 0, by the "
        "deviation of the whole batch",
    ),
    "completions/mean_length": Metric("completions/mean_length"),
    "completions/min_length": Metric("completions/min_length"),
    "completions/max_length": Metric("completions/max_length"),
    "completions/clipped_ratio": Metric(
        "completions/clipped_ratio", "a completion that ends in a stop text is not clipped; in TRL it is"
    ),
    "completions/mean_terminated_length": Metric("completions/mean_terminated_length", ENDED),
    "completions/min_terminated_length": Metric("completions/min_terminated_length", ENDED),
    "completions/max_terminated_length": Metric("completions/max_terminated_length", ENDED),
    "entropy": Metric("entropy", TRAINED),
    "kl": Metric("kl", TRAINED + "; without the factor of use_bias_correction_kl, which TRL's has"),
    "clip_ratio/low_mean": Metric("clip_ratio/low", TOKENS),
    "clip_ratio/high_mean": Metric("clip_ratio/high", TOKENS),
    "clip_ratio/region_mean": Metric("", "clip_ratio/low + clip_ratio/high"),
    "clip_ratio/low_min": Metric("", "the least of a completion is not logged"),
    "clip_ratio/high_max": Metric("", "the most of a completion is not logged"),
    "cispo_clip_ratio": Metric("clip_ratio/high"),
    "vespo/phi_seq_mean": Metric("vespo/weight", "the mean over tokens; TRL's is over sequences"),
    "sampling/sampling_logp_difference/mean": Metric(
        "sampling/logprob_gap_mean", "the mean over tokens; TRL's is over ranks' means"
    ),
    "sampling/sampling_logp_difference/max": Metric("sampling/logprob_gap_max"),
    "sampling/importance_sampling_ratio/min": Metric("", WEIGHTS),
    "sampling/importance_sampling_ratio/mean": Metric("correction/weight", WEIGHTS),
    "sampling/importance_sampling_ratio/max": Metric("", WEIGHTS),
    "policy_loss": Metric("", "loss without its entropy term is not logged"),
    "entropy_coef": Metric(
        "entropy_coefficient", "with the plug-in entropy_target; a constant coefficient is not logged"
    ),
    "aux_loss": Metric("router/loss", "only with the plug-in router_loss"),
    "tools/call_frequency": Metric("environments/tool_calls", TOOLS),
    "tools/failure_frequency": Metric("environments/tool_failures", TOOLS),
    "eval_*": Metric("val/*", "reward, rewards/*/mean, completion_length and truncated of held-out prompts"),
}
"""By TRL's name."""
