"""The LightningModule: a policy, its objective, and one optimizer step after another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn

from lit_grpo.checks import (
    check_generations,
    check_micro_batch,
    check_minibatches,
    check_mode,
    check_prompt_lengths,
    check_trainer,
    check_training_sampling,
    check_updates,
)
from lit_grpo.evaluation import EvaluationModule
from lit_grpo.memory import free_bytes, is_out_of_memory, return_freed_memory
from lit_grpo.metrics import TokenMetrics, rollout_metrics
from lit_grpo.optim.galore import GaLoreAdamW
from lit_grpo.policy.adapters import LoraSettings, add_adapters, has_adapters, save_merged
from lit_grpo.policy.loading import check_token_logits, context_length, embeddings, load_policy, load_tokenizer
from lit_grpo.policy.nf4 import without_quant_states
from lit_grpo.ranks import Ranks
from lit_grpo.rewards import RewardSpec, load_rewards
from lit_grpo.rollout.generator import Generator
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import Prompt, PromptBatch, Rollout, SamplingParams
from lit_grpo.update.advantages.estimator import Advantages, GroupRewards
from lit_grpo.update.batches.layout import MicroBatch
from lit_grpo.update.batches.microbatch import MicroBatches, least_tokens, make_micro_batches
from lit_grpo.update.batches.step import (
    Before,
    Key,
    Step,
    kl_sums,
    measure,
    minibatches,
    sampled_kl,
    taking_part_and_learnt,
)
from lit_grpo.update.budget import TokenBudget, estimate_tokens
from lit_grpo.update.gradient import clip_gradient
from lit_grpo.update.logprobs.checkpointing import Checkpointing, checkpoint_layers
from lit_grpo.update.logprobs.forward import micro_batch_logprobs
from lit_grpo.update.logprobs.reference import AdapterFreeReference, Reference, ReferenceSettings
from lit_grpo.update.normalization import StepTotals
from lit_grpo.update.objective.kl import KL_ESTIMATORS
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.objective.policy_loss import policy_loss
from lit_grpo.update.objective.state import ObjectiveState
from lit_grpo.update.objective.tokens import Tokens, entropy_threshold
from lit_grpo.update.prefix.sharing import shared_prefixes
from lit_grpo.update.prefix.support import prefix_refusal

if TYPE_CHECKING:
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class GRPOModule(EvaluationModule):
    """Train a causal language model with GRPO (DeepSeekMath, arXiv 2402.03300).

    The batch comes in with whole rollout groups that :class:`lit_grpo.callbacks.RolloutScheduler` has put there;
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
        advantages: How rewards become advantages.
        objective: What an optimizer step minimises.
        num_iterations: How often a rollout batch is gone through.
        num_minibatches: Into how many optimizer steps one pass is cut, by prompts.
        max_tokens_per_micro_batch: Tokens that go through the model at once: completions, and a prompt with some of
            its completions or by itself. ``auto`` estimates it from the free memory, and halves it and begins
            the step anew when memory runs out all the same.
        max_grad_norm: The gradient's norm is clipped to this; 0 does not clip.
        optimizer: Any torch optimizer.
        lr_scheduler: Any torch LR scheduler, stepped once per optimizer step; constant by default.
        dtype: What the policy's weights are loaded in. Keep float32 and choose the compute precision with
            ``trainer.precision``: bfloat16 weights lose updates of a learning rate of 1e-6 to rounding.
        lora: Train LoRA adapters instead of all weights; needs peft. The KL term's reference is then the policy without
            them, so it takes no memory.
        reference: Where the KL term's reference lives, and whether it moves.
        gradient_checkpointing: Recompute activations in the backward pass instead of keeping them; ``selective`` keeps
            the results of matrix products and of attention, and so costs little time.
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
        advantages: Advantages = Advantages(),  # noqa: B008 (frozen)
        objective: Objective = Objective(),  # noqa: B008 (frozen)
        num_iterations: int = 1,
        num_minibatches: int = 1,
        max_tokens_per_micro_batch: int | Literal["auto"] = 8192,
        max_grad_norm: float = 1.0,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        lora: LoraSettings | None = None,
        reference: ReferenceSettings = ReferenceSettings(),  # noqa: B008 (frozen)
        gradient_checkpointing: bool | Literal["selective"] = False,
        sampling_seed: int = 0,
    ) -> None:
        super().__init__(load_rewards(rewards or []), pass_at_k, pass_threshold)
        self.automatic_optimization = False
        self.policy_name = policy
        self.generator: Generator = generator or SlotGenerator()
        self.on_reward_error: Literal["raise", "none"] = on_reward_error
        self.reward_timeout_s = reward_timeout_s
        self.num_generations = num_generations
        self.sampling = sampling
        self.eval_num_generations = eval_num_generations
        self.eval_sampling = eval_sampling or sampling
        self.advantages = advantages
        self.objective = objective
        self.objective_state = ObjectiveState(objective)
        self.num_iterations = num_iterations
        self.num_minibatches = num_minibatches
        self.max_tokens_per_micro_batch: int | Literal["auto"] = max_tokens_per_micro_batch
        self._budget: TokenBudget | None = None
        self.max_grad_norm = max_grad_norm
        self.make_optimizer = optimizer
        self.make_lr_scheduler = lr_scheduler
        self.policy_dtype = dtype
        self.lora = lora
        self.reference = reference
        self.gradient_checkpointing: Checkpointing = gradient_checkpointing
        self.sampling_seed = sampling_seed
        self._check_arguments(pass_at_k)
        self.policy_version = 0
        self._reference: Reference | AdapterFreeReference | None = None

    def _check_arguments(self, pass_at_k: Sequence[int]) -> None:
        check_generations(self.num_generations, self.eval_num_generations, pass_at_k)
        check_updates(self.num_iterations, self.num_minibatches, self.max_tokens_per_micro_batch, self.max_grad_norm)
        self.advantages.check(self.num_generations, self.objective.kl.place)
        self.reference.check(self.objective.kl.beta, self.lora is not None)

    # ---- set-up -----------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Check what can be checked before anything expensive starts."""
        if not self.rewards and stage != "predict":
            raise ValueError("model.rewards is empty; name at least one, such as lit_grpo.rewards.exact_match.")
        if stage == "fit":
            check_training_sampling(self.sampling)
            check_minibatches(self.num_minibatches, getattr(self._data(), "batch_size", self.num_minibatches))

    def configure_callbacks(self) -> list[pl.Callback]:
        """Check the trainer before Lightning does, whose sentences name no field of ours; add no callback."""
        if self.trainer.state.fn == "fit":
            check_trainer(self.trainer)
        return []

    def _data(self) -> pl.LightningDataModule | None:
        return self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def ranks(self) -> Ranks:
        """Reductions over the ranks of the run."""
        return Ranks(self.trainer, self.device)

    def configure_model(self) -> None:
        """Load the policy and its tokenizer, and a reference where beta asks for one."""
        if getattr(self, "policy", None) is None:
            self.tokenizer = load_tokenizer(self.policy_name)
            nf4 = self.lora is not None and self.lora.base == "nf4"
            self.policy = load_policy(self.policy_name, self.policy_dtype, nf4).train()
            check_token_logits(self.policy)
            if self.lora is not None:
                add_adapters(self.policy, self.lora)
            self._shares_prefix = self._check_prefix()
            checkpoint_layers(self.policy, self.gradient_checkpointing)
        if self.objective.kl.beta > 0 and self.trainer.training and self._reference is None:
            if self.lora is not None:
                self._reference = AdapterFreeReference(self.policy)
            else:
                model = load_policy(self.policy_name, self.policy_dtype)
                self._reference = Reference(model, self.trainer.strategy.root_device, self.reference)

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
        check_prompt_lengths(prompts, self.sampling, self.eval_sampling, context)
        if "train" in prompts and self.max_tokens_per_micro_batch != "auto":
            check_micro_batch(prompts["train"], self.sampling, self.max_tokens_per_micro_batch, self._shares_prefix)

    def configure_optimizers(self) -> Any:
        """Make the optimizer, and the scheduler that is stepped with it."""
        optimizer = self.make_optimizer(p for p in self.policy.parameters() if p.requires_grad)
        if isinstance(optimizer, GaLoreAdamW):
            optimizer.leave_whole(embeddings(self.policy))
        if self.make_lr_scheduler is None:
            return optimizer
        return [optimizer], [{"scheduler": self.make_lr_scheduler(optimizer), "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the policy version, what the objective remembers, and a reference that has moved."""
        checkpoint["state_dict"] = without_quant_states(checkpoint["state_dict"])
        checkpoint["policy_version"] = self.policy_version
        checkpoint["objective_state"] = self.objective_state.state_dict()
        if isinstance(self._reference, Reference):
            checkpoint["reference"] = self._reference.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore them."""
        self.policy_version = checkpoint["policy_version"]
        self.objective_state.load_state_dict(checkpoint["objective_state"])
        if isinstance(self._reference, Reference):
            self._reference.load_state_dict(checkpoint.get("reference", {}))

    def export(self, folder: str | Path) -> None:
        """Save policy and tokenizer as a Hugging Face folder (safetensors) that ``from_pretrained`` loads.

        LoRA adapters are merged into the weights, and also saved alone in ``adapter/``.
        """
        if has_adapters(self.policy):
            save_merged(self.policy, folder)
        else:
            self.policy.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    # ---- training ---------------------------------------------------------------------------------

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Learn from one batch of whole rollout groups."""
        rewards = self._rewards(batch)
        self._log_rollouts(
            rollout_metrics(batch, rewards.rewards_PG, self.policy_version, self.ranks.sum, self.ranks.max)
        )
        metrics = TokenMetrics()
        before = self._before(batch.rollouts)
        advantages_PG = self._advantages(self._less_kl(batch, rewards, before, metrics))
        check_minibatches(self.num_minibatches, len(batch.groups))
        for rows in minibatches(len(batch.groups), self.num_iterations, self.num_minibatches):
            rollouts = [rollout for row in rows for rollout in batch.groups[row].rollouts]
            self._update(rollouts, advantages_PG[rows].flatten().tolist(), metrics, before)
        logs = metrics.compute(self.ranks.sum, self.ranks.max)
        self.objective_state.kl.update(logs.get("kl", math.nan), int(self.ranks.sum(len(batch.rollouts))))
        self.log_dict(logs | self.objective_state.coefficients())
        self.log("step", float(self.policy_version))
        batch.trained = True

    def _rewards(self, batch: PromptBatch) -> GroupRewards:
        if not batch.groups:
            raise RuntimeError(
                "The batch has no rollouts; add lit_grpo.callbacks.RolloutScheduler to the trainer's callbacks."
            )
        return GroupRewards.of(batch.groups, [function.name for function in self.rewards])

    def _before(self, rollouts: Sequence[Rollout]) -> Before:
        """Measure what all updates on the rollouts compare with, before the first of them.

        The reference is computed here and not beside the policy, so that it need not be on the device in a backward
        pass, and once for all updates; a reference that moves between them counts from the next batch (as in TRL).
        """
        old = reference = None
        if self._reference is not None:
            reference = self._measure(rollouts, "logprobs", self._reference.lend())
        if self.objective.correction.active and self.num_iterations * self.num_minibatches > 1:
            old = self._measure(rollouts, "logprobs")
        return Before(old, reference)

    def _less_kl(
        self, batch: PromptBatch, rewards: GroupRewards, before: Before, metrics: TokenMetrics
    ) -> GroupRewards:
        """Take the KL term out of the rewards, where its place is there; of the log-probs that were sampled with."""
        if self.objective.kl.place == "loss" or before.reference is None:
            return rewards
        kl = sampled_kl(batch.rollouts, before.reference, KL_ESTIMATORS[self.objective.kl.estimator])
        metrics.add_kl(torch.cat([torch.empty(0), *kl.values()]))
        return rewards.less(kl_sums(batch.groups, kl) * self.objective_state.kl.beta)

    def _advantages(self, rewards: GroupRewards) -> torch.Tensor:
        """Advantages of this rank's groups; from all ranks' rewards where the estimator needs them."""
        weights_K = torch.tensor([function.weight for function in self.rewards])
        history = self.objective_state.history
        if not self.advantages.needs_all_ranks:
            return self.advantages.compute(rewards, weights_K, history)
        ranks = self.ranks.gather(rewards)
        advantages = self.advantages.compute(GroupRewards.concatenate(ranks), weights_K, history)
        return advantages.split([len(rank.prompt_ids) for rank in ranks])[self.ranks.own]

    def _measure(
        self,
        rollouts: Sequence[Rollout],
        what: Literal["logprobs", "entropy"],
        lent: AbstractContextManager[PreTrainedModel] | None = None,
    ) -> dict[Key, torch.Tensor]:
        """Measure every token under the policy, or under a model that is lent for it."""
        with_tokens = [rollout for rollout in rollouts if rollout.completion.num_tokens]
        max_tokens = self._max_tokens(with_tokens)  # an estimate is made before a lent model takes memory
        place = ("logprobs", "entropy").index(what)
        with lent or nullcontext(self.policy) as model:
            return measure(
                with_tokens,
                lambda micro: micro_batch_logprobs(model, micro, self.sampling.temperature)[place],
                max_tokens,
                self.device,
                self._shares_prefix,
            )

    def _update(
        self,
        rollouts: Sequence[Rollout],
        advantages: Sequence[float],
        metrics: TokenMetrics,
        before: Before,
    ) -> None:
        """Take one optimizer step."""
        step = self._step_on(rollouts, advantages, before)
        optimizer = cast("LightningOptimizer", self.optimizers())
        metrics_before = metrics.state()
        while not self._accumulate(self._micro_batches(step), step, metrics, optimizer):
            self._halve_budget(step)
            metrics.restore(metrics_before)
            step.entropy_sum = 0.0
        self._step(optimizer, metrics)
        if self.objective.entropy.target is not None:
            num_tokens = max(step.totals.num_entropy_tokens, 1)
            self.objective_state.entropy.update(float(self.ranks.sum(step.entropy_sum)) / num_tokens)

    def _accumulate(
        self, micro_batches: MicroBatches, step: Step, metrics: TokenMetrics, optimizer: LightningOptimizer
    ) -> bool:
        """Gather the step's gradient; return whether the memory of all ranks sufficed, where the budget is open.

        A rank whose memory runs out cannot take part in the exchange of gradients, so with an open budget ranks agree
        beforehand, and exchange in the backward pass of an empty micro-batch.
        """
        optimizer.zero_grad()
        is_open, short = self._budget is not None, False
        if is_open and micro_batches and self.trainer.world_size > 1:
            micro_batches = micro_batches.and_empty(1)
        with shared_prefixes(self.policy) if self._shares_prefix else nullcontext():
            for index, micro_batch in enumerate(micro_batches):
                is_last = index == len(micro_batches) - 1
                if is_open and is_last and self.ranks.max(float(short)):
                    return False
                try:
                    if not short:
                        with optimizer.toggle_model(sync_grad=is_last):
                            loss = self._loss(micro_batch.to(self.device), step, metrics)
                            self.manual_backward(loss * self.trainer.world_size)  # the strategy averages over ranks
                except (RuntimeError, MemoryError) as error:
                    if not is_open or not is_out_of_memory(error):
                        raise
                    short = True
                if self.device.type == "cpu":
                    return_freed_memory()
        return not short

    def _max_tokens(self, rollouts: Sequence[Rollout]) -> int:
        """The token budget of micro-batches; where it is open, estimated the first time, the same on every rank."""
        if self.max_tokens_per_micro_batch != "auto":
            return self.max_tokens_per_micro_batch
        if self._budget is None:
            tokens = estimate_tokens(
                self.policy, free_bytes(self.device), self._shares_prefix, self.gradient_checkpointing == "selective"
            )
            self._budget = TokenBudget(int(-self.ranks.max(-tokens)))
        return max(self._budget.tokens, least_tokens(rollouts, self._shares_prefix))

    def _halve_budget(self, step: Step) -> None:
        assert self._budget is not None
        least = int(self.ranks.max(least_tokens(step.rollouts, self._shares_prefix)))
        rank_zero_warn(self._budget.halve(least))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _step_on(self, rollouts: Sequence[Rollout], advantages: Sequence[float], before: Before) -> Step:
        """Count what the step is normalised by, on all ranks, and choose what goes through the policy.

        A rollout without an advantage (NaN) counts in nothing. One with advantage 0 has gradient 0 unless the objective
        has another term, so it is left out; it counts in the denominator all the same.
        """
        taking_part, learnt = taking_part_and_learnt(rollouts, advantages, self.objective.mask_truncated)
        num_sequences = int(self.ranks.sum(len(taking_part)))
        num_tokens = int(self.ranks.sum(sum(rollout.completion.num_tokens for rollout, _ in learnt)))
        kept = self._highest_entropy([rollout for rollout, _ in learnt])
        num_kept = num_tokens if kept is None else int(self.ranks.sum(float(sum(part.sum() for part in kept.values()))))
        totals = StepTotals(num_tokens, num_sequences, self.sampling.max_tokens, num_kept)
        if not self.objective.uses_every_completion:
            learnt = [(rollout, advantage) for rollout, advantage in learnt if advantage != 0]
        return Step([r for r, _ in learnt], [advantage for _, advantage in learnt], totals, before, kept)

    def _highest_entropy(self, rollouts: Sequence[Rollout]) -> dict[Key, torch.Tensor] | None:
        """Which tokens are among those with the highest entropy of the whole step, where only those are learnt from."""
        share = self.objective.top_entropy_quantile
        if share == 1:
            return None
        entropy = self._measure(rollouts, "entropy")
        everyone = self.ranks.gather(torch.cat([torch.empty(0), *entropy.values()]))
        threshold = entropy_threshold(torch.cat(everyone), share)
        return {key: entropy_T >= threshold for key, entropy_T in entropy.items()}

    def _micro_batches(self, step: Step) -> MicroBatches:
        """Cut into micro-batches, equally many on every rank; none where no rank has anything to learn."""
        max_tokens = self._max_tokens(step.rollouts)
        micro_batches = make_micro_batches(step.rollouts, step.advantages, max_tokens, self._shares_prefix)
        return micro_batches.and_empty(int(self.ranks.max(len(micro_batches))) - len(micro_batches))

    def _loss(self, micro_batch: MicroBatch, step: Step, metrics: TokenMetrics) -> torch.Tensor:
        """The micro-batch's share of the step's loss."""
        check_mode(self.policy, bool(self.gradient_checkpointing))
        tokens = self._tokens(micro_batch, step)
        kept_N = None if step.kept is None else step.of(step.kept, micro_batch)
        state = self.objective_state
        loss, token_metrics = policy_loss(
            self.objective, tokens, step.totals, state.kl.beta, state.entropy.applied, kept_N
        )
        entropy_N = tokens.entropy_N.detach()
        step.entropy_sum += (entropy_N if kept_N is None else entropy_N * kept_N).sum()
        metrics.add_means(entropy=entropy_N, **token_metrics)
        metrics.add_sums(loss=loss.detach())
        if metrics.num_updates == 0:  # the weights are still those that sampled
            metrics.add_gap(tokens.logprobs_N.detach() - tokens.sampled_logprobs_N, tokens.lengths_C)
        return loss

    def _tokens(self, micro_batch: MicroBatch, step: Step) -> Tokens:
        """What the objective sees of a micro-batch: the policy goes through it."""
        logprobs_N, entropy_N = micro_batch_logprobs(
            self.policy, micro_batch, self.sampling.temperature, self.objective.entropy.active
        )
        old_logprobs_N = micro_batch.sampled_logprobs_N
        if step.before.old is not None:
            old_logprobs_N = step.of(step.before.old, micro_batch)
        elif self.objective.correction.active:  # before the only update on these rollouts
            old_logprobs_N = logprobs_N.detach()
        reference_logprobs_N = None
        if step.before.reference is not None and self.objective.kl_in_loss:
            reference_logprobs_N = step.of(step.before.reference, micro_batch)
        return Tokens(
            logprobs_N,
            micro_batch.sampled_logprobs_N,
            old_logprobs_N,
            entropy_N,
            micro_batch.advantages_C,
            micro_batch.lengths_C,
            reference_logprobs_N,
        )

    def _step(self, optimizer: LightningOptimizer, metrics: TokenMetrics) -> None:
        """Clip and step. Without a gradient (nothing to learn) the step counts, and changes no weight."""
        grad_norm = clip_gradient(self.policy, self.max_grad_norm, self.policy_version)
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        optimizer.zero_grad()  # neither a rollout nor a measurement needs gradients beside it
        if self.make_lr_scheduler is not None:
            cast(Any, self.lr_schedulers()).step()
        self.policy_version += 1
        if isinstance(self._reference, Reference):
            self._reference.follow(self.policy, self.policy_version)
        metrics.finish_update(grad_norm=grad_norm, lr=lr)

    def _log_rollouts(self, logs: dict[str, float]) -> None:
        self.log("reward", logs.pop("reward"), prog_bar=True)
        self.log_dict(logs)
