"""The LightningModule: a policy, its objective, and one optimizer step after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torchmetrics import MeanMetric

from lit_grpo.metrics import PassAtK, TokenMetrics, rollout_metrics
from lit_grpo.policy import check_token_logits, context_length, load_policy, load_tokenizer
from lit_grpo.rewards import RewardSpec, load_rewards
from lit_grpo.rollout.generator import Generator
from lit_grpo.rollout.out_of_memory import is_out_of_memory
from lit_grpo.rollout.slots import SlotGenerator
from lit_grpo.types import MicroBatch, Prompt, PromptBatch, Rollout, SamplingParams
from lit_grpo.update.advantages import Scale, group_advantages
from lit_grpo.update.kl import k3
from lit_grpo.update.losses import Normalization, StepTotals, clipped_objective, token_weights
from lit_grpo.update.microbatch import make_micro_batch, make_micro_batches, num_row_tokens
from lit_grpo.update.prefix_support import prefix_refusal
from lit_grpo.update.reference import Reference, micro_batch_logprobs
from lit_grpo.update.shared_prefix import shared_prefixes
from lit_grpo.update.token_budget import TokenBudget, estimate_tokens, free_bytes

if TYPE_CHECKING:
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EVAL_MEANS = ("reward", "completion_length", "truncated")


class GRPOModule(pl.LightningModule):
    """Train a causal language model with GRPO (DeepSeekMath, arXiv 2402.03300).

    The batch comes in with whole rollout groups that :class:`callbacks.RolloutScheduler` has put there;
    ``training_step`` turns rewards into advantages, and takes ``num_iterations x num_minibatches``
    optimizer steps on them.

    Args:
        policy: ``tiny`` (the embedded one, made on the spot), a folder made by ``save_pretrained``, or a
            Hugging Face id of a causal language model with safetensors.
        generator: What decodes completions.
        rewards: Reward functions; a rollout's reward is their weighted sum.
        on_reward_error: ``raise`` stops the run when a reward function fails; ``none`` counts it as no
            reward for the rollouts concerned.
        reward_timeout_s: Seconds after which a call of a reward function counts as failed.
        num_generations: G, the completions per prompt.
        sampling: How completions are sampled for training. Truncation (top_p, top_k, min_p) is refused
            here, because the objective needs the log-probs of the distribution sampled from.
        eval_num_generations: Completions per prompt in validation and test.
        eval_sampling: How completions are sampled in validation, test and predict; as in training by default.
        pass_at_k: The k of the pass@k reported in validation; each at most ``eval_num_generations``.
        pass_threshold: A completion passes when its first reward function gives at least this.
        scale_rewards: What group-centred rewards are divided by: the standard deviation of the ``group``, of
            the ``batch``, or ``none``.
        epsilon: How far the probability ratio may fall below 1 before it is clipped.
        epsilon_high: How far it may rise above 1; ``epsilon`` by default.
        beta: Weight of the KL term to the first policy; 0 loads no reference model.
        loss_normalization: ``token`` (each token alike), ``sequence`` (each completion alike) or
            ``constant`` (by the limit on completion length).
        num_iterations: How often a rollout batch is gone through.
        num_minibatches: Into how many optimizer steps one pass is cut, by prompts.
        max_tokens_per_micro_batch: Tokens that go through the model at once: completions, and their prompt once for
            all of its completions among them. ``auto`` estimates it from the free memory, and halves it and begins
            the step anew when memory runs out all the same.
        max_grad_norm: The gradient's norm is clipped to this; 0 does not clip.
        optimizer: Any torch optimizer.
        lr_scheduler: Any torch LR scheduler, stepped once per optimizer step; constant by default.
        dtype: What the policy's weights are loaded in. Keep float32 and choose the compute precision with
            ``trainer.precision``: bfloat16 weights lose updates of a learning rate of 1e-6 to rounding.
        gradient_checkpointing: Recompute activations in the backward pass instead of keeping them.
        sampling_seed: With the same seed, data and weights a run samples the same completions. The command
            line takes it from ``seed_everything``.
    """

    policy: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def __init__(
        self,
        policy: str = "tiny",
        generator: Generator | None = None,
        rewards: list[RewardSpec] | None = None,
        on_reward_error: Literal["raise", "none"] = "raise",
        reward_timeout_s: float = 60.0,
        num_generations: int = 16,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        eval_num_generations: int = 1,
        eval_sampling: SamplingParams | None = None,
        pass_at_k: tuple[int, ...] = (1,),
        pass_threshold: float = 1.0,
        scale_rewards: Scale = "group",
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        loss_normalization: Normalization = "token",
        num_iterations: int = 1,
        num_minibatches: int = 1,
        max_tokens_per_micro_batch: int | Literal["auto"] = 8192,
        max_grad_norm: float = 1.0,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        gradient_checkpointing: bool = False,
        sampling_seed: int = 0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy_name = policy
        self.generator: Generator = generator or SlotGenerator()
        self.rewards = load_rewards(rewards or [])
        self.on_reward_error: Literal["raise", "none"] = on_reward_error
        self.reward_timeout_s = reward_timeout_s
        self.num_generations = num_generations
        self.sampling = sampling
        self.eval_num_generations = eval_num_generations
        self.eval_sampling = eval_sampling or sampling
        self.pass_threshold = pass_threshold
        self.scale_rewards: Scale = scale_rewards
        self.epsilon = epsilon
        self.epsilon_high = epsilon if epsilon_high is None else epsilon_high
        self.beta = beta
        self.loss_normalization: Normalization = loss_normalization
        self.num_iterations = num_iterations
        self.num_minibatches = num_minibatches
        self.max_tokens_per_micro_batch: int | Literal["auto"] = max_tokens_per_micro_batch
        self._budget: TokenBudget | None = None
        self.max_grad_norm = max_grad_norm
        self.make_optimizer = optimizer
        self.make_lr_scheduler = lr_scheduler
        self.policy_dtype = dtype
        self.gradient_checkpointing = gradient_checkpointing
        self.sampling_seed = sampling_seed
        self._check_arguments(pass_at_k)
        self.policy_version = 0
        self.pass_metrics = torch.nn.ModuleDict({f"pass@{k}": PassAtK(k) for k in pass_at_k})
        self.eval_metrics = torch.nn.ModuleDict({name: MeanMetric() for name in EVAL_MEANS})
        self._reference: Reference | None = None

    def _check_arguments(self, pass_at_k: Sequence[int]) -> None:
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations is {self.num_generations}, but a group needs at least 2 completions: "
                "an advantage compares a completion with the others of its prompt."
            )
        if self.eval_num_generations < 1:
            raise ValueError(f"eval_num_generations must be at least 1, not {self.eval_num_generations}.")
        for k in pass_at_k:
            if not 1 <= k <= self.eval_num_generations:
                raise ValueError(
                    f"pass_at_k holds {k}, but there are {self.eval_num_generations} completions a prompt in "
                    "validation; give values between 1 and eval_num_generations."
                )
        for name in ("num_iterations", "num_minibatches", "max_tokens_per_micro_batch"):
            if getattr(self, name) != "auto" and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name in ("epsilon", "epsilon_high", "beta", "max_grad_norm"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be a number >= 0, not {getattr(self, name)}.")
        for name, choices in (("scale_rewards", get_args(Scale)), ("loss_normalization", get_args(Normalization))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}.")

    # ---- set-up -----------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Check what can be checked before anything expensive starts."""
        if not self.rewards and stage != "predict":
            raise ValueError("model.rewards is empty; name at least one, such as lit_grpo.rewards.exact_match.")
        if stage == "fit":
            self._check_training_sampling()
            self._check_minibatches(getattr(self._data(), "batch_size", self.num_minibatches))
            if not isinstance(self.trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
                strategy = type(self.trainer.strategy).__name__
                raise ValueError(
                    f"trainer.strategy {strategy} shards the policy, which cannot decode then; use one device, or ddp."
                )
            if self.trainer.precision in ("16-mixed", "16-true"):
                raise ValueError(
                    f"trainer.precision {self.trainer.precision!r} is not supported; use bf16-mixed or 32-true."
                )

    def _data(self) -> pl.LightningDataModule | None:
        return self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]

    def _check_minibatches(self, num_prompts: int) -> None:
        if num_prompts < self.num_minibatches:
            raise ValueError(
                f"num_minibatches is {self.num_minibatches}, but a batch has {num_prompts} prompts; "
                "lower it, or raise data.batch_size."
            )

    def _check_training_sampling(self) -> None:
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0: greedy completions of a prompt are all the same, so there is nothing to "
                "learn from; set it above 0, or set eval_sampling.temperature for greedy validation."
            )
        if self.sampling.truncates:
            raise ValueError(
                "sampling.top_p, top_k and min_p leave tokens out, which the objective's log-probs would not know of; "
                "set them in eval_sampling, and leave them at 1, 0 and 0 for training."
            )

    def configure_model(self) -> None:
        """Load the policy and its tokenizer, and a reference where beta asks for one."""
        if getattr(self, "policy", None) is None:
            self.tokenizer = load_tokenizer(self.policy_name)
            self.policy = load_policy(self.policy_name, self.policy_dtype).train()
            check_token_logits(self.policy)
            self._shares_prefix = self._check_prefix()
            if self.gradient_checkpointing:
                self.policy.gradient_checkpointing_enable({"use_reentrant": False})
        if self.beta > 0 and self.trainer.training and self._reference is None:
            self._reference = Reference(load_policy(self.policy_name, self.policy_dtype))

    def _check_prefix(self) -> bool:
        """Whether prompts are computed once for all of their completions; says so where they are not."""
        refusal = prefix_refusal(self.policy)
        if refusal is not None:
            name = type(self.policy).__name__
            rank_zero_warn(f"Each completion goes through {name} padded, with a prompt of its own: {refusal}.")
        return refusal is None

    def check_lengths(self, prompts: Mapping[str, Sequence[Prompt]]) -> None:
        """Check that every prompt leaves room for its completion, before anything is sampled.

        Args:
            prompts: By split; ``train`` is sampled with ``sampling``, all others with ``eval_sampling``.

        Raises:
            ValueError: A prompt is too long for the model's context or for a micro-batch.
        """
        context = context_length(self.policy)
        for split, rows in prompts.items():
            max_tokens = (self.sampling if split == "train" else self.eval_sampling).max_tokens
            longest = max(rows, key=lambda prompt: len(prompt.token_ids))
            total = len(longest.token_ids) + max_tokens
            said = f"Prompt {longest.prompt_id!r} has {len(longest.token_ids)} tokens and up to {max_tokens} may follow"
            if total > context:
                raise ValueError(
                    f"{said}, but the model's context is {context}; "
                    "lower sampling.max_tokens or data.max_prompt_tokens."
                )
            limit = self.max_tokens_per_micro_batch
            if split == "train" and limit != "auto" and total > limit:
                raise ValueError(
                    f"{said}, but max_tokens_per_micro_batch is {limit}; the smallest that works is {total}."
                )

    def configure_optimizers(self) -> Any:
        """Make the optimizer, and the scheduler that is stepped with it."""
        optimizer = self.make_optimizer(self.policy.parameters())
        if self.make_lr_scheduler is None:
            return optimizer
        return [optimizer], [self.make_lr_scheduler(optimizer)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the policy version."""
        checkpoint["policy_version"] = self.policy_version

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the policy version."""
        self.policy_version = checkpoint["policy_version"]

    def export(self, folder: str | Path) -> None:
        """Save policy and tokenizer as a Hugging Face folder (safetensors) that ``from_pretrained`` loads."""
        self.policy.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    # ---- training ---------------------------------------------------------------------------------

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Learn from one batch of whole rollout groups."""
        rewards_PG = self._rewards(batch)
        advantages_PG = self._advantages(rewards_PG)
        self._log_rollouts(rollout_metrics(batch, rewards_PG, self.policy_version, self._sum, self._max))
        metrics = TokenMetrics()
        for rows in self._minibatches(len(batch.groups)):
            rollouts = [rollout for row in rows for rollout in batch.groups[row].rollouts]
            self._update(rollouts, advantages_PG[rows].flatten().tolist(), metrics)
        self.log_dict(metrics.compute(self._sum, self._max))
        self.log("step", float(self.policy_version))
        batch.trained = True

    def _rewards(self, batch: PromptBatch) -> torch.Tensor:
        if not batch.groups:
            raise RuntimeError("The batch has no rollouts; add callbacks.RolloutScheduler to the trainer's callbacks.")
        return torch.tensor([[rollout.reward for rollout in group.rollouts] for group in batch.groups])

    def _advantages(self, rewards_PG: torch.Tensor) -> torch.Tensor:
        """Advantages of this rank's groups; on the scale of all ranks' rewards where that is asked for."""
        if self.scale_rewards != "batch" or self.trainer.world_size == 1:
            return group_advantages(rewards_PG, self.scale_rewards)
        everyone = cast(torch.Tensor, self.all_gather(rewards_PG.to(self.device))).cpu()
        advantages = group_advantages(everyone.flatten(0, 1), "batch").view_as(everyone)
        return advantages[self.global_rank]

    def _minibatches(self, num_groups: int) -> Iterator[list[int]]:
        """Yield the groups of each optimizer step: whole groups, every one once in each iteration."""
        self._check_minibatches(num_groups)
        for _ in range(self.num_iterations):
            for part in torch.arange(num_groups).tensor_split(self.num_minibatches):
                yield part.tolist()

    def _update(self, rollouts: Sequence[Rollout], advantages: Sequence[float], metrics: TokenMetrics) -> None:
        """Take one optimizer step. Rollouts without a reward (NaN) count in nothing."""
        valid = [(r, a) for r, a in zip(rollouts, advantages, strict=True) if a == a and r.completion.num_tokens]
        totals = StepTotals(
            num_tokens=int(self._sum(sum(r.completion.num_tokens for r, _ in valid))),
            num_sequences=int(self._sum(len(valid))),
            max_tokens=self.sampling.max_tokens,
        )
        optimizer = cast("LightningOptimizer", self.optimizers())
        self._prepare_budget()
        before = metrics.state()
        while not self._accumulate(self._micro_batches(valid), totals, metrics, optimizer):
            self._halve_budget(valid)
            metrics.restore(before)
        self._step(optimizer, metrics)

    def _accumulate(
        self, micro_batches: list[MicroBatch], totals: StepTotals, metrics: TokenMetrics, optimizer: LightningOptimizer
    ) -> bool:
        """Gather the step's gradient; return whether the memory of all ranks sufficed, where the budget is open.

        A rank whose memory runs out cannot take part in the exchange of gradients, so with an open budget ranks agree
        beforehand, and exchange in the backward pass of an empty micro-batch.
        """
        optimizer.zero_grad()
        is_open, short = self._budget is not None, False
        if is_open and micro_batches and self.trainer.world_size > 1:
            micro_batches = [*micro_batches, make_micro_batch([], [], self._shares_prefix)]
        with shared_prefixes(self.policy) if self._shares_prefix else nullcontext():
            for index, micro_batch in enumerate(micro_batches):
                is_last = index == len(micro_batches) - 1
                if is_open and is_last and self._max(float(short)):
                    return False
                try:
                    if not short:
                        self._backward(micro_batch, totals, metrics, optimizer, sync=is_last)
                except (RuntimeError, MemoryError) as error:
                    if not is_open or not is_out_of_memory(error):
                        raise
                    short = True
        return not short

    def _backward(
        self,
        micro_batch: MicroBatch,
        totals: StepTotals,
        metrics: TokenMetrics,
        optimizer: LightningOptimizer,
        sync: bool,
    ) -> None:
        with optimizer.toggle_model(sync_grad=sync):
            loss = self._loss(micro_batch.to(self.device), totals, metrics)
            self.manual_backward(loss * self.trainer.world_size)  # the strategy averages over ranks

    def _prepare_budget(self) -> None:
        """Estimate a budget the first time that one is open, the same on every rank."""
        if self.max_tokens_per_micro_batch == "auto" and self._budget is None:
            tokens = estimate_tokens(self.policy, free_bytes(self.device), self._shares_prefix)
            self._budget = TokenBudget(int(-self._max(-tokens)))

    def _halve_budget(self, valid: Sequence[tuple[Rollout, float]]) -> None:
        assert self._budget is not None
        before = self._budget.tokens
        self._budget.halve(int(self._max(max((num_row_tokens(rollout) for rollout, _ in valid), default=1))))
        tokens = self._budget.tokens
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        rank_zero_warn(
            f"Memory ran out with micro-batches of {before} tokens. They have at most {tokens} from now on and the "
            f"step begins anew; max_tokens_per_micro_batch={tokens} would begin with that."
        )

    def _micro_batches(self, valid: Sequence[tuple[Rollout, float]]) -> list[MicroBatch]:
        """Cut into micro-batches, equally many on every rank.

        A rollout with advantage 0 has gradient 0 where there is no KL term, so it is left out; it counts in
        the denominator all the same. A step in which no rank has anything to learn has no micro-batch.
        """
        if self.beta == 0:
            valid = [(rollout, advantage) for rollout, advantage in valid if advantage != 0]
        longest = max((num_row_tokens(rollout) for rollout, _ in valid), default=1)
        budget = self.max_tokens_per_micro_batch if self._budget is None else max(self._budget.tokens, longest)
        micro_batches = make_micro_batches(
            [rollout for rollout, _ in valid],
            [advantage for _, advantage in valid],
            cast(int, budget),
            self._shares_prefix,
        )
        most = int(self._max(len(micro_batches)))
        return micro_batches + [make_micro_batch([], [], self._shares_prefix) for _ in range(most - len(micro_batches))]

    def _loss(self, micro_batch: MicroBatch, totals: StepTotals, metrics: TokenMetrics) -> torch.Tensor:
        """The micro-batch's share of the step's loss."""
        self._check_mode()
        logprobs_N, entropy_N = micro_batch_logprobs(self.policy, micro_batch, self.sampling.temperature)
        lengths_C = micro_batch.lengths_C
        advantages_N = micro_batch.advantages_C.repeat_interleave(lengths_C)
        loss_N, token_metrics = clipped_objective(
            logprobs_N, micro_batch.sampled_logprobs_N, advantages_N, self.epsilon, self.epsilon_high
        )
        if self._reference is not None:
            kl_N = k3(logprobs_N, self._reference.logprobs(micro_batch, self.sampling.temperature))
            loss_N = loss_N + self.beta * kl_N
            token_metrics["kl"] = kl_N.detach()
        weights_N = token_weights(lengths_C, totals, self.loss_normalization).repeat_interleave(lengths_C)
        loss = (loss_N * weights_N).sum()
        metrics.add_means(entropy=entropy_N, **token_metrics)
        metrics.add_sums(loss=loss.detach())
        if metrics.num_updates == 0:  # the weights are still those that sampled
            metrics.add_gap(logprobs_N.detach() - micro_batch.sampled_logprobs_N)
        return loss

    def _step(self, optimizer: LightningOptimizer, metrics: TokenMetrics) -> None:
        """Clip and step. Without a gradient (nothing to learn) the step counts, and changes no weight."""
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm or torch.inf)
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"The gradient's norm is {float(norm)} at policy version {self.policy_version}; the weights were not "
                "touched. Lower the learning rate, or look for NaN rewards and extreme log-probs."
            )
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        if self.make_lr_scheduler is not None:
            cast(Any, self.lr_schedulers()).step()
        self.policy_version += 1
        metrics.finish_update(grad_norm=float(norm), lr=lr)

    def _check_mode(self) -> None:
        checkpointing = self.policy.is_gradient_checkpointing
        if not self.policy.training or checkpointing != self.gradient_checkpointing:
            mode = "training" if self.policy.training else "evaluation"
            raise RuntimeError(
                f"The policy is in {mode} mode with gradient checkpointing {checkpointing}; "
                "a callback has changed it and must put it back."
            )

    def _log_rollouts(self, logs: dict[str, float]) -> None:
        self.log("reward", logs.pop("reward"), prog_bar=True)
        self.log_dict(logs)

    def _sum(self, value: float | torch.Tensor) -> torch.Tensor:
        return self._reduce(value, "sum")

    def _max(self, value: float | torch.Tensor) -> torch.Tensor:
        return self._reduce(value, "max")

    def _reduce(self, value: float | torch.Tensor, operation: str) -> torch.Tensor:
        """Reduce over ranks."""
        tensor = torch.as_tensor(value, dtype=torch.float64, device=self.device)
        return cast(torch.Tensor, self.trainer.strategy.reduce(tensor, reduce_op=operation))

    # ---- validation, test, predict ----------------------------------------------------------------

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Count which completions of held-out prompts pass."""
        for group in batch.groups:
            first = self.rewards[0].name
            passed = [(r.rewards[first] or 0.0) >= self.pass_threshold for r in group.rollouts]
            for metric in self.pass_metrics.values():
                cast(PassAtK, metric).update(len(passed), sum(passed))
            for rollout in group.rollouts:
                values = (rollout.reward, rollout.completion.num_tokens, rollout.completion.finish_reason == "length")
                for name, value in zip(EVAL_MEANS, values, strict=True):
                    cast(MeanMetric, self.eval_metrics[name]).update(value)

    def on_validation_epoch_start(self) -> None:
        """Begin the counts anew."""
        for metric in (*self.pass_metrics.values(), *self.eval_metrics.values()):
            cast("PassAtK | MeanMetric", metric).reset()

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Log pass@k and the means over all held-out prompts."""
        self._log_evaluation("val")

    def test_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Do the same for the test prompts."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Log pass@k and the means over all test prompts."""
        self._log_evaluation("test")

    def _log_evaluation(self, prefix: str) -> None:
        for name, metric in (*self.pass_metrics.items(), *self.eval_metrics.items()):
            value = cast("PassAtK | MeanMetric", metric).compute().float()
            self.log(f"{prefix}/{name}", value, prog_bar=name == "pass@1")
        self.log("step", float(self.policy_version))

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """Return one row a completion, for :class:`callbacks.CompletionWriter`."""
        return [
            {
                "prompt_id": rollout.prompt.prompt_id,
                "sample_id": rollout.completion.request.sample_id,
                "prompt": rollout.prompt.text,
                "completion": rollout.completion.text,
                "token_ids": rollout.completion.token_ids_T.tolist(),
                "logprob": float(rollout.completion.logprobs_T.sum()),
                "finish_reason": rollout.completion.finish_reason,
                **({"reward": rollout.reward, "rewards": rollout.rewards} if rollout.rewards else {}),
            }
            for rollout in batch.rollouts
        ]
