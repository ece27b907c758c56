"""The LightningModule: a policy, its objective, and one optimizer step after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable

from lit_grpo.checkpoints.form import check_form
from lit_grpo.checkpoints.resuming import RunSettings, apply_to, check_optimizer, differences, recorded_settings
from lit_grpo.checks import (
    FORMAT,
    check_callbacks,
    check_checkpoint,
    check_epoch,
    check_format,
    check_generations,
    check_images,
    check_micro_batch,
    check_monitors,
    check_prompt_lengths,
    check_ranks,
    check_rewarded,
    check_schedule,
    check_stepping,
    check_token_ids,
    check_trainer,
    check_training_sampling,
    make_part,
    total_updates,
)
from lit_grpo.data.rendering import Converses
from lit_grpo.evaluation import EvaluationModule
from lit_grpo.faults.differing_ranks import CONTENTS, check_alike, of_policy, of_run
from lit_grpo.findings.rewards import BatchWatch
from lit_grpo.limits import Count, checks_arguments
from lit_grpo.memory import step_without_temporaries
from lit_grpo.metrics import dataset_metrics, rollout_metrics, staleness_shares
from lit_grpo.optim.course import Course
from lit_grpo.optim.rates import UnusualRate, unusual_rate
from lit_grpo.plugins import UPDATE_HOOKS, Plugin, RunFacts, ask, overriding
from lit_grpo.policy.adapters import LoraSettings, add_adapters, check_can_be_shards, go_on_with, has_adapters
from lit_grpo.policy.architecture.decoder import attention_name, context_length
from lit_grpo.policy.architecture.support import check_policy
from lit_grpo.policy.architecture.unread import TRAINED
from lit_grpo.policy.architecture.vision import give_vision
from lit_grpo.policy.frozen import check_base, fingerprint, recorded_name, without_frozen
from lit_grpo.policy.loading import as_loaded, embeddings, load_policy, load_tokenizer, load_vision
from lit_grpo.policy.nf4 import has_four_bits, without_quant_states
from lit_grpo.policy.saving import Comparison, export
from lit_grpo.policy.sharding import class_of, gather_for_sampling
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import TrainedWeights
from lit_grpo.process.packages import MISSING_KERNELS
from lit_grpo.process.threads import wait_without_spinning
from lit_grpo.rewards import RewardSpec, load_rewards
from lit_grpo.rewards.function import RewardFunction, check_names, check_prompts, warn_of_doubts
from lit_grpo.rewards.runner import Timeout
from lit_grpo.rollout.generator import Generator
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.settings import takes_dicts
from lit_grpo.strategies.fsdp2 import FSDP2Strategy
from lit_grpo.types import Prompt, PromptBatch, SamplingParams
from lit_grpo.update.advantages.estimator import Advantages, GroupRewards
from lit_grpo.update.learner import Learner
from lit_grpo.update.learner_settings import LearnerSettings
from lit_grpo.update.logprobs.checkpointing import checkpoint_layers
from lit_grpo.update.logprobs.reference import Reference, ReferenceSettings, make_reference
from lit_grpo.update.logprobs.teacher import ModelTeacher, ServerTeacher, TeacherSettings, check_teacher, make_teacher
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.passes import PolicyPasses
from lit_grpo.update.plugin import TrainingRun
from lit_grpo.update.prefix.support import prefix_refusal

if TYPE_CHECKING:
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


SHOWN_LOSSES = {True: ("ce/loss",), False: ("ce/loss", "loss")}
"""Losses in the progress line, by whether the run has rewards, which show by themselves what is learned."""


class GRPOModule(EvaluationModule):
    """Train a causal language model with GRPO (DeepSeekMath, arXiv 2402.03300).

    The batch comes in with whole rollout groups that :class:`lit_grpo.callbacks.RolloutScheduler` has put there;
    ``training_step`` turns rewards into advantages, and takes ``num_iterations x num_minibatches``
    optimizer steps on them.

    Args:
        policy: Model to train: ``tiny`` (the demo's, which comes with the package), a folder made by
            ``save_pretrained``, or a Hugging Face id of a causal language model with safetensors, or of a LoRA adapter
            for one. Also a GGUF file, and ``smollm2`` after ``python -m lit_grpo smollm2``. From Python also a loaded
            model (or ``PeftModel``), or a pair of it and its tokenizer.
        generator: Generator that decodes completions.
        rewards: Reward functions; a rollout's reward is their weighted sum. From Python also functions, and paths.
        keep_special_tokens: Keep the tokenizer's special tokens, such as ``<think>`` if it is one, in the completion
            text that reward functions get. By default they are left out of the text. The tokens that end a completion
            are always left out.
        on_reward_error: Handling of a reward function that fails: ``raise`` stops the run; with ``none`` the rollouts
            concerned have no reward of this function.
        reward_timeout_s: Seconds after which a call of a reward function counts as failed.
        reward_workers: Number of threads that call reward functions which are not ``async``.
        num_generations: Number of completions per prompt (G in the GRPO paper).
        sampling: Sampling parameters for training. Truncation (top_p, top_k, min_p) is refused here, because the
            objective needs the log-probs of the distribution sampled from.
        eval_num_generations: Number of completions per prompt in validation and test.
        eval_sampling: Sampling parameters for validation, test and predict; those of training by default.
        pass_at_k: Values of k for which validation reports pass@k; each at most ``eval_num_generations``.
        pass_threshold: Min reward of a correct completion, by the reward function that ``pass_reward`` names.
        pass_reward: Name of the reward function that decides whether a completion is correct, for pass@k; it may be an
            environment's own reward. By default the first of ``rewards``.
        advantages: Computing advantages from rewards.
        objective: The loss that an optimizer step minimizes.
        num_iterations: Number of passes over each rollout batch (mu in the GRPO paper; TRL's ``num_iterations``).
        num_minibatches: Number of optimizer steps per pass over a rollout batch; its prompts are divided among them.
        max_tokens_per_micro_batch: Max tokens per micro-batch: completions, and a prompt with some of its completions
            or by itself. ``auto`` estimates it from the free memory; if memory runs out all the same, it halves the
            number and restarts the step.
        sequence_parallel_size: Number of ranks that split the tokens of a micro-batch (Ulysses), for sequences that are
            too long for one rank. In attention each rank processes all tokens, for its part of the heads.
        max_grad_norm: Max gradient norm, to which larger gradients are clipped; 0 does not clip.
        max_skipped_updates: Number of skipped updates in a row that ends the run. An update whose loss or
            gradient is not finite is skipped: it changes no weight and is counted in ``update/skipped``. The rollouts
            of the first few are written to the run's folder, as ``broken-update-N-rank-R.safetensors``.
        optimizer: Optimizer, any of torch; AdamW with a learning rate of 1e-6 by default.
        lr_scheduler: Learning-rate scheduler, any of torch, stepped once per optimizer step; constant by default.
        vision: Load the policy's vision tower for prompts with images (``data.image_column``): ``frozen`` or
            ``trained``; ``none`` trains on texts alone. With ``lora`` a trained tower has adapters too.
        dtype: Data type of the policy's weights. Keep float32 and choose the compute precision with
            ``trainer.precision``: bfloat16 weights lose updates of a learning rate of 1e-6 to rounding.
        lora: Train LoRA adapters instead of all weights, at about ten times the learning rate; needs peft. The KL
            term's reference is then the policy without them, so it takes no memory. A policy that is an adapter of peft
            already (of SFT, say) is trained on as it is, with no ``lora`` or the same; the reference is then its base
            with the adapter as it was.
        reference: The reference policy of the KL term: its place in memory.
        teacher: The teacher of methods that learn from the log-probs of another model, or of the policy with another
            prompt; by default none.
        gradient_checkpointing: Recompute activations in the backward pass instead of keeping them; ``selective`` keeps
            the results of matrix products and of attention, and so costs little time.
        sampling_seed: Seed of sampling: with the same seed, data and weights a run samples the same completions. The
            command line takes it from ``seed_everything``.
    """

    policy: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    spec: PolicySpec
    """The policy for those who decode with it."""
    learner: Learner

    @takes_dicts
    @checks_arguments()
    def __init__(
        self,
        policy: str = "tiny",
        generator: Generator | None = None,
        rewards: list[RewardSpec] | None = None,
        on_reward_error: Literal["raise", "none"] = "raise",
        reward_timeout_s: Timeout = 60.0,
        reward_workers: Count = 16,
        num_generations: int = 16,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        eval_num_generations: int = 1,
        eval_sampling: SamplingParams | None = None,
        pass_at_k: tuple[int, ...] = (1,),
        pass_threshold: float = 1.0,
        pass_reward: str | None = None,
        advantages: Advantages = Advantages(),  # noqa: B008 (frozen)
        objective: Objective = Objective(),  # noqa: B008 (frozen)
        num_iterations: int = 1,
        num_minibatches: int = 1,
        max_tokens_per_micro_batch: int | Literal["auto"] = 8192,
        sequence_parallel_size: int = 1,
        max_grad_norm: float = 1.0,
        max_skipped_updates: int = 3,
        optimizer: OptimizerCallable = lambda parameters: torch.optim.AdamW(parameters, lr=1e-6),
        lr_scheduler: LRSchedulerCallable | None = None,
        vision: Literal["none", "frozen", "trained"] = "none",
        dtype: Literal["float32", "bfloat16"] = "float32",
        lora: LoraSettings | None = None,
        reference: ReferenceSettings = ReferenceSettings(),  # noqa: B008 (frozen)
        teacher: TeacherSettings | None = None,
        gradient_checkpointing: bool | Literal["selective"] = False,
        sampling_seed: int = 0,
        keep_special_tokens: bool = False,
    ) -> None:
        super().__init__(load_rewards(rewards, reward_timeout_s), pass_at_k, pass_threshold, pass_reward)
        self.automatic_optimization = False
        self.policy_name = as_loaded(policy)
        _check_parts(generator, optimizer, lr_scheduler)
        self.generator: Generator = generator or SlotGenerator()
        self.on_reward_error: Literal["raise", "none"] = on_reward_error
        self.reward_timeout_s, self.reward_workers = reward_timeout_s, reward_workers
        self.num_generations, self.eval_num_generations = num_generations, eval_num_generations
        self.sampling, self.eval_sampling = sampling, eval_sampling or sampling
        weights = {function.name: function.weight for function in self.rewards}
        self.settings = LearnerSettings(
            objective=objective,
            advantages=advantages,
            weights=weights,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            num_iterations=num_iterations,
            num_minibatches=num_minibatches,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            max_grad_norm=max_grad_norm,
            gradient_checkpointing=gradient_checkpointing,
            max_skipped_updates=max_skipped_updates,
            pass_rule=self.pass_rule,
            sequence_parallel_size=sequence_parallel_size,
        )
        self.make_optimizer, self.make_lr_scheduler = optimizer, lr_scheduler
        self.policy_dtype, self.reference, self.sampling_seed = dtype, reference, sampling_seed
        self.vision = vision
        self.teacher_settings = teacher
        self.teacher: ModelTeacher | ServerTeacher | None = None
        self.lora = LoraSettings(**lora) if isinstance(lora, dict) else lora  # a checkpoint has it as a dict
        self.strict_loading = self.lora is None  # where adapters are alone in a checkpoint, its loading checks them
        self._continues = False  # an adapter that the policy came with
        self._base: str | None = None  # of adapters, the fingerprint
        check_generations(num_generations, eval_num_generations, pass_at_k)
        advantages.check(num_generations)
        reference.check(objective.kl.without_term, lora is not None)
        self.policy_version = 0
        self._batch_watch = BatchWatch(self.rewards, on_reward_error)
        self._doubted: set[str] = set()  # splits whose rows were looked at for answers that cannot be won
        self.unusual_rate: UnusualRate | None = None
        self._course: Course | None = None
        self._told, self._told_before = RunSettings(), RunSettings()  # in this run, in the checkpoint's
        self._names_logged: dict[str, set[str]] = {}
        self.keep_special_tokens, self._plugins_started = keep_special_tokens, False
        self.given: Mapping[str, Any] = {}  # all settings of a run by group and name, to compare them with other ranks'

    # ---- set-up -----------------------------------------------------------------------------------

    def set_plugins(self, *plugins: Plugin) -> None:
        """Learn as plug-ins decide that override hooks of the update; others are passed over.

        :class:`lit_grpo.callbacks.RolloutScheduler` calls it before a run; call it yourself only where rollouts come
        from elsewhere.
        """
        learning = overriding(plugins, *UPDATE_HOOKS)
        self._check_plugins(learning, self.facts())
        self.settings.set_plugins(*plugins)
        self._plugins_started = False

    @staticmethod
    def _check_plugins(plugins: Sequence[Plugin], facts: RunFacts) -> None:
        for plugin in plugins:
            try:
                ask(plugin, "check", facts)
            except ValueError as error:
                raise ValueError(f"rollout.plugins {type(plugin).__name__}: {error}") from None

    def facts(self, num_prompts: int | None = None) -> RunFacts:
        """Return the numbers of the run that plug-ins may depend on.

        Args:
            num_prompts: Prompts of a batch on each rank; None if that is not known.
        """
        adapters, policy, total = "" if self.lora is None else "model.lora", getattr(self, "policy", None), None
        if self._continues:
            adapters = "model.policy"
        if self._trainer is not None:
            total = total_updates(self.trainer, self.settings.updates_per_batch)
            total = math.inf if total is None and self.trainer.max_epochs == -1 else total
        teacher, micro_batch_tokens = self.teacher_settings, self.settings.max_tokens_per_micro_batch
        return RunFacts(
            num_prompts=num_prompts,
            num_generations=self.num_generations,
            max_tokens=self.sampling.max_tokens,
            updates_per_batch=self.settings.updates_per_batch,
            max_observed=min(self.sampling.max_observed, self.eval_sampling.max_observed),
            divided_advantages=self.settings.advantages.divides_groups,
            normalization=self.settings.objective.normalized_by,
            corrected=self.settings.objective.correction.mode != "none",
            kl_beta=self.settings.objective.kl.beta,
            adapters=adapters,
            generator=type(self.generator).__name__,
            abilities=self.generator.abilities,
            total_updates=total,
            policy=policy,
            teacher="" if teacher is None else teacher.policy,
            micro_batch_tokens=None if micro_batch_tokens == "auto" else micro_batch_tokens,
            shares_prefix=self.settings.shares_prefix,
            largest_chunk=self.settings.largest_chunk,
        )

    def start_plugins(
        self, max_staleness: int | None = None, open_versions: Callable[[int], set[int]] | None = None
    ) -> None:
        """Tell the learning plug-ins that training begins; the arguments are those of a ``TrainingRun``.

        :class:`lit_grpo.callbacks.RolloutScheduler` calls it before the generator starts.
        """
        reference = self.learner.reference
        run = TrainingRun(
            self.policy,
            reference.model if isinstance(reference, Reference) else None,
            self.policy_version,
            self.settings.updates_per_batch,
            self.ranks,
            max_staleness,
            open_versions,
            self.teacher,
            self.spec,
        )
        for plugin in self.settings.plugins:
            ask(plugin, "on_train_start", run)
        self._plugins_started = True

    def join_rewards(self, functions: Sequence[RewardFunction]) -> None:
        """Score with further functions too, which plug-ins bring; those that have joined already stay as they are."""
        joining = [function for function in functions if function not in self.rewards]
        if not joining:
            return
        check_names([*self.rewards, *joining])
        self.score_with([*self.rewards, *joining])
        self.settings.weights = {function.name: function.weight for function in self.rewards}
        self.settings.pass_rule = self.pass_rule
        self._batch_watch = BatchWatch(self.rewards, self.on_reward_error)

    def setup(self, stage: str) -> None:
        """Check what can be checked before anything expensive starts."""
        wait_without_spinning()
        if self.ranks.size > 1 and not hasattr(self.trainer.datamodule, "prompts"):  # pyrefly: ignore[missing-attribute]
            check_alike(self.ranks, {"the stage": stage, **of_run(self.trainer, self)})  # a PromptDataModule did it
        self.pass_rule.check([function.name for function in self.rewards])
        if stage == "fit":
            check_rewarded(self.rewards, self.num_generations, self.settings.learns_unrewarded)
            check_training_sampling(self.sampling)
            data = self.trainer.datamodule  # pyrefly: ignore[missing-attribute]
            num_minibatches = self.settings.num_minibatches
            if (num_prompts := getattr(data, "batch_size", num_minibatches)) < num_minibatches:
                raise _few_prompts(num_minibatches, num_prompts)
            self._check_plugins(self.settings.plugins, self.facts())
            self._check_teacher()
            prompts = getattr(data, "prompts", None)
            check_epoch(self.trainer)
            self._check_monitors(validates=prompts is None or "validation" in prompts)
            check_ranks(self.trainer, self.policy_name, self.lora, self.settings)

    def _check_monitors(self, validates: bool) -> None:
        """Check what Lightning's callbacks monitor; what the user's own code may log cannot be known."""
        kinds = [type(self), *map(type, self.trainer.callbacks)]  # pyrefly: ignore[missing-attribute]
        owns = any(not kind.__module__.startswith(("lit_grpo.", "lightning.")) for kind in kinds)
        may_log = owns or any(function.may_log for function in self.rewards)
        if (warning := check_monitors(self.trainer, validates, self.held_out_metrics, may_log)) is not None:
            self.ranks.warn(warning)

    def _check_teacher(self) -> None:
        asking = [type(plugin).__name__ for plugin in self.settings.plugins if "asks_teacher" in plugin.traits]
        if asking and self.teacher_settings is None:
            raise ValueError(f"rollout.plugins {asking[0]} learns from a teacher; set model.teacher.policy.")
        if self.teacher_settings is not None and not asking:
            raise ValueError(
                "model.teacher has no effect, because no plug-in of rollout.plugins learns from a teacher; add one "
                "that does (docs/update.md), or leave it out."
            )

    def find_teacher(self) -> None:
        """Check that the teacher is there, once the policy is loaded; the learner loads it."""
        if self.teacher_settings is not None:
            check_teacher(self.teacher_settings, self.tokenizer, len(embeddings(self.policy)[0]))

    def configure_callbacks(self) -> list[pl.Callback]:
        """Check the trainer before Lightning does, whose sentences name no field of ours; add no callback.

        The trainer's callbacks and loggers are guarded from here on, which is before their first hook.
        """
        self.observers.guard([*self.trainer.callbacks, *self.trainer.loggers])  # pyrefly: ignore[missing-attribute]
        if self.trainer.state.fn == "fit":
            check_trainer(self.trainer, self.policy_dtype)
        check_callbacks(self.trainer)
        return []

    def configure_model(self) -> None:
        """Load the policy and its tokenizer, and a reference where beta asks for one."""
        strategy = None if self._trainer is None else self.trainer.strategy
        if getattr(self, "policy", None) is None:
            outline = isinstance(strategy, FSDP2Strategy) and self.ranks.rank > 0
            self.ranks.together(lambda: self._load(outline))
            if self.ranks.size > 1:
                has_weights, adds_adapters = not isinstance(strategy, FSDP2Strategy), not self._continues
                check_alike(self.ranks, of_policy(self.policy, self.tokenizer, has_weights, adds_adapters))
            self._base, attention = self.ranks.gather((self._base, attention_name(self.policy)))[0]
            if attention != attention_name(self.policy):  # an outline's, of which nothing is known
                self.policy.set_attn_implementation(attention)
            name, device = class_of(self.policy).__name__, "cpu" if strategy is None else strategy.root_device.type
            if (sentence := MISSING_KERNELS.sentence(name, device)) is not None:
                self.ranks.warn(sentence)
        if isinstance(strategy, FSDP2Strategy):
            check_can_be_shards(self.policy)
            strategy.shard(self.policy, whole_at_rest="own_weights" not in self.generator.abilities)
        if self._trainer is not None and self.trainer.training and getattr(self, "learner", None) is None:
            self.learner = self._make_learner()

    def _load(self, outline: bool) -> None:
        """Load policy and tokenizer; an outline of the policy where the first rank alone reads its weights."""
        self.tokenizer = load_tokenizer(self.policy_name)
        nf4 = self.lora is not None and self.lora.base == "nf4"
        sees = self.vision != "none"
        self.policy = load_policy(self.policy_name, self.policy_dtype, nf4, outline, sees).train()
        self._continues = has_adapters(self.policy)
        self.strict_loading = self.lora is None and not self._continues  # else a checkpoint has adapters alone
        if not outline:
            check_policy(self.policy)
            self._base = None if self.strict_loading else fingerprint(self.policy, self.policy_name)
        if sees:
            give_vision(self.policy, load_vision(self.policy_name, self.tokenizer), self.vision == "trained")
        if self._continues:
            go_on_with(self.policy, self.lora)
        elif self.lora is not None:
            add_adapters(self.policy, self.lora)
        elif has_four_bits(self.policy):
            raise ValueError(
                f"The files of model.policy {self.policy_name!r} hold weights in four bits, which cannot be trained "
                "themselves; set model.lora, or take the policy without quantization."
            )
        checkpoint_layers(self.policy, self.settings.gradient_checkpointing)
        self.spec = PolicySpec(self.policy, self.tokenizer, self.keep_special_tokens)

    def _make_learner(self) -> Learner:
        """Make what trains the policy, with a reference where a KL term asks for one."""
        with self.trainer.precision_plugin.forward_context():
            refusal, reference = prefix_refusal(self.policy), None
        self.settings.shares_prefix = refusal is None
        if refusal is not None:
            name = class_of(self.policy).__name__
            self.ranks.warn(f"Each completion goes through {name} padded, with a prompt of its own: {refusal}.")
        source, device = self.policy_name, self.trainer.strategy.root_device
        began = "full" if self.strict_loading else "adapter" if self._continues else "bare"
        if self.settings.objective.kl.beta > 0:
            self.reference.check(self.settings.objective.kl.without_term, not self.strict_loading)
            reference = make_reference(self.policy, source, self.policy_dtype, device, self.reference, began)
        if (teacher := self.teacher_settings) is not None:
            tokenizer = self.tokenizer
            self.teacher = make_teacher(teacher, self.policy, source, self.policy_dtype, tokenizer, device, began)
        return Learner(self.policy, self, self.settings, reference, Path(self.trainer.default_root_dir))

    def check_lengths(self, prompts: Mapping[str, Sequence[Prompt]]) -> None:
        """Check that every prompt can be sampled from and scored: its tokens, room for its completion, its columns.

        Args:
            prompts: By split; ``train`` is sampled with ``sampling``, all others with ``eval_sampling``.

        Raises:
            ValueError: The policy does not know a token, a prompt is too long for its context or for a micro-batch, or
                it lacks a column that a reward function needs, whose failures end the run.
        """
        if self.on_reward_error == "raise":
            check_prompts(prompts, self.rewards)
        if self.ranks.rank == 0:
            warn_of_doubts({split: rows for split, rows in prompts.items() if split not in self._doubted}, self.rewards)
        self._doubted |= prompts.keys()
        check_token_ids(prompts, len(embeddings(self.policy)[0]))
        callbacks = [] if self._trainer is None else self.trainer.callbacks  # pyrefly: ignore[missing-attribute]
        observes = any(isinstance(each, Converses) and each.conversing is not None for each in callbacks)
        teacher = "" if self.teacher_settings is None else self.teacher_settings.policy
        check_images(prompts, self.policy, self.generator, teacher, self.settings, observes)
        context = context_length(self.policy)
        longest_row = check_prompt_lengths(prompts, self.sampling, self.eval_sampling, context) or None
        self.spec = replace(self.spec, longest_row=longest_row)
        if self.teacher is not None and "train" in prompts:
            longest = max(len(prompt.token_ids) for prompt in prompts["train"])
            self.teacher.check_context(longest + self.sampling.room)
        max_tokens = self.settings.max_tokens_per_micro_batch
        if "train" in prompts and max_tokens != "auto":
            largest, shares_prefix = self.settings.largest_chunk, self.settings.shares_prefix
            check_micro_batch(prompts["train"], self.sampling, max_tokens, shares_prefix, largest)

    def configure_optimizers(self) -> Any:
        """Make the optimizer, and the scheduler that is stepped with it."""
        trained = TrainedWeights(self.policy)
        if not trained:
            raise ValueError("model.policy has no weight that may be trained; set requires_grad of some of them.")
        optimizer, scheduler = make_part("model.optimizer", self.make_optimizer, trained), None
        check_stepping(optimizer, trained)
        if self.make_lr_scheduler is not None:
            scheduler = make_part("model.lr_scheduler", self.make_lr_scheduler, optimizer)
            check_schedule(scheduler, optimizer)
            self._course = Course(scheduler)
            self._check_course()
        self._check_plugins(self.settings.plugins, replace(self.facts(), optimizer=optimizer))
        self.unusual_rate = unusual_rate(self.policy, optimizer)  # before a checkpoint's rate is restored
        self._told = recorded_settings(
            self.trainer, self.policy_name, self.settings, self.teacher_settings, optimizer, scheduler
        )
        step_without_temporaries(optimizer)
        if self.ranks.size > 1:
            check_alike(self.ranks, {name: one for name, one in self._told.items() if name not in CONTENTS})
        if self._told_before:
            check_optimizer(self._told_before, self._told)
        return optimizer if scheduler is None else ([optimizer], [{"scheduler": scheduler, "interval": "step"}])

    def _check_course(self) -> int | None:
        """Check that the schedule is as long as the run; return the number of updates of the run if it is known."""
        total = total_updates(self.trainer, self.settings.updates_per_batch)
        if self._course is not None and total is not None:
            self._course.check(total)
        return total

    def on_train_start(self) -> None:
        """On resuming let the optimizer's settings hold, and name all that differ from the checkpoint's."""
        if self.ranks.size > 1:
            check_alike(self.ranks, {"the number of updates in ckpt_path": self.policy_version})
        if not self._plugins_started:  # rollouts come from elsewhere
            self.start_plugins()
        total = self.settings.total_updates = self._check_course()
        self._check_plugins(
            self.settings.plugins, replace(self.facts(), total_updates=math.inf if total is None else total)
        )
        if self._course is not None and total is not None:
            finding = self._course.finding(total, resumed=self.policy_version > 0)
            if finding is not None:
                self.ranks.warn(finding)
        differing = differences(self._told_before, self._told) if self._told_before else {}
        if differing:
            apply_to(cast("LightningOptimizer", self.optimizers()).optimizer, self._told_before, self._told)
            self.ranks.warn(f"Resumed with other settings than the checkpoint's: {', '.join(differing.values())}.")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the policy version and what the learner remembers."""
        gather_for_sampling(self.policy)  # its shards have been saved, and may be decoded with next
        checkpoint["state_dict"] = self._kept(checkpoint["state_dict"])
        checkpoint |= {} if self._base is None else {"base": self._base}
        if (head := vars(self.policy).get(TRAINED)) is not None:
            checkpoint["drafts"] = head.state_dict()
        checkpoint["format"], checkpoint["policy_version"], checkpoint["told"] = FORMAT, self.policy_version, self._told
        names = {source: sorted(names) for source, names in self._names_logged.items()}
        checkpoint["logged"] = (names, self._batch_watch.state_dict())
        checkpoint["reward_curves"] = (self.reward_curves.state_dict(), self.held_out_curves.state_dict())
        lora = None if self.lora is None else asdict(self.lora)
        settings = {"dtype": self.policy_dtype, "vision": self.vision, "lora": lora}
        checkpoint["hyper_parameters"] = {"policy": recorded_name(self.policy_name, self._continues), **settings}
        learner: Learner | None = getattr(self, "learner", None)
        if learner is not None:
            checkpoint |= learner.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore them."""
        learner: Learner | None = getattr(self, "learner", None)
        path = None if self._trainer is None else self.trainer.ckpt_path
        check_form(checkpoint, path)
        if learner is not None:
            check_format(checkpoint, path)
            check_form(checkpoint, path, resumes=True)
        self.check_fits(checkpoint, path)
        self.policy_version = checkpoint["policy_version"]
        if "drafts" in checkpoint:
            from lit_grpo.policy.architecture.heads import prediction_head

            head = prediction_head(self.policy)
            head.load_state_dict(checkpoint["drafts"])
            head.train_in(self.policy)
        if learner is not None:
            learner.load_state_dict(checkpoint)
            names, watch = checkpoint["logged"]
            self._names_logged = {source: set(those) for source, those in names.items()}
            self._batch_watch.load_state_dict(watch)
            training, held_out = checkpoint["reward_curves"]
            self.reward_curves.load_state_dict(training)
            self.held_out_curves.load_state_dict(held_out)
            self._told_before = checkpoint["told"]

    def check_fits(self, checkpoint: Mapping[str, Any], path: Path | str | None) -> None:
        """Check that a checkpoint is of the policy, and that its adapters were trained on it, before it is loaded."""
        check_base(checkpoint, self._base, recorded_name(self.policy_name, self._continues), self.policy_dtype)
        check_checkpoint(checkpoint, self._kept(self.state_dict()), path)

    def _kept(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = without_quant_states(state_dict)
        return kept if self._base is None else without_frozen(self, kept)

    def export(self, folder: str | Path) -> Comparison | None:
        """Save policy and tokenizer as a Hugging Face folder (safetensors) that ``from_pretrained`` loads.

        LoRA adapters are merged into the weights, and also saved alone in ``adapter/``. All ranks call it; one saves,
        and opens the folder again to compare it with the policy.

        Returns:
            What was compared, on the rank that saved.

        Raises:
            ExportError: The folder is not the policy; nothing is put there.
            ValueError: There is no room for it; what was there before is left as it was.
        """
        return export(self.policy, self.tokenizer, Path(folder), keep=self.ranks.rank == 0)

    # ---- validation -------------------------------------------------------------------------------

    @property
    def validates_completions(self) -> bool:
        """True if validation samples completions; not in a run without rollouts that has no reward function."""
        return bool(self.rewards) or self.settings.has_rollouts

    def on_validation_epoch_end(self) -> None:
        """Log what completions have earned, and what plug-ins measure."""
        if self.validates_completions:
            super().on_validation_epoch_end()
        for plugin in overriding(self.settings.plugins, "validate"):
            with self.trainer.precision_plugin.forward_context():
                values = ask(plugin, "validate", self._passes.by_completion, self.ranks)
            self.log_dict({f"val/{name}": value for name, value in values.items()})
            self.log("step", float(self.policy_version), sync_dist=True)  # as the means of completions are logged

    @property
    def _passes(self) -> PolicyPasses:
        """The learner's passes, or others if the policy is validated before it is trained."""
        learner: Learner | None = getattr(self, "learner", None)
        if learner is not None:
            return learner.passes
        self.settings.shares_prefix = prefix_refusal(self.policy) is None
        return PolicyPasses(self.policy, self, self.settings)

    # ---- training ---------------------------------------------------------------------------------

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Learn from one batch of whole rollout groups, or of examples alone."""
        with self.phases.of("update"):
            if batch.without_rollouts:
                self.log_anew("update", self.learner.learn_examples(), shown=SHOWN_LOSSES[bool(self.rewards)])
                self.log("step", float(self.policy_version))
                batch.trained = True
                return
            update = None if batch.arriving is None else self.learner.learn(batch.arriving)
            if not batch.groups:
                raise RuntimeError(
                    "The batch has no rollouts; give the Trainer callbacks=default_callbacks(), of lit_grpo.training."
                )
            rewards = GroupRewards.of(batch.groups, list(self.settings.weights))
            version = self.policy_version - (update is not None)
            logs = rollout_metrics(batch.groups, rewards, version, self.ranks)
            with self.observers.may_fail("The finding of a collapse"):
                collapsed = self._batch_watch.collapse(logs, version)
                for sentence in filter(None, (collapsed, *self._batch_watch.unseen_text(batch.rollouts, self.spec))):
                    self.ranks.warn(sentence)
            sentence = self._batch_watch.missing_rewards(logs)  # raises an error if there are no rewards to learn from
            if sentence is not None:
                self.ranks.warn(sentence)
            self.follow(self.reward_curves, logs)
            frac_uniform = logs["frac_reward_zero_std"]
            self.log("reward", logs.pop("reward"), prog_bar=True)
            self.log_dict(logs)
            if batch.groups[0].prompt.dataset:
                self.log_anew("datasets", dataset_metrics(batch.groups, rewards, self.ranks))
            if batch.carried:
                self.log_dict(staleness_shares(batch.groups, version, self.ranks))
            elif len(batch.groups) < self.settings.num_minibatches:
                raise _few_prompts(self.settings.num_minibatches, len(batch.groups))
            update = self.learner.learn(batch.groups, rewards) if update is None else update
            with self.observers.may_fail("The finding of batches without signal"):
                sentence = self._batch_watch.missing_signal(update | {"frac_reward_zero_std": frac_uniform}, version)
                if sentence is not None:
                    self.ranks.warn(sentence)
            self.log_anew("update", update, shown=SHOWN_LOSSES[bool(self.rewards)])
            self.log("step", float(self.policy_version))
            batch.trained = True

    def log_anew(self, source: str, values: Mapping[str, float], shown: Collection[str] = ()) -> None:
        """Log values, and NaN for what ``source`` logged before and not now: Lightning would repeat its last value.

        Args:
            source: Name of the caller, under which the names of its values are remembered.
            values: Values to log, by their full names.
            shown: Names of the values that the progress line shows.
        """
        names = self._names_logged.setdefault(source, set())
        names.update(values)
        logged = dict.fromkeys(names, math.nan) | dict(values)
        for name in shown:
            if name in logged:
                self.log(name, logged.pop(name), prog_bar=True)
        self.log_dict(logged)

    def add_gradient(self, compute_loss: Callable[[], torch.Tensor], exchange: bool) -> None:
        """Add a loss's gradient to that of the step, as the learner asks; with ``exchange`` it is summed over ranks."""
        self.phases.heartbeat()
        with cast("LightningOptimizer", self.optimizers()).toggle_model(sync_grad=exchange):
            self.manual_backward(compute_loss() * self.trainer.world_size)  # the strategy averages over ranks

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return cast("LightningOptimizer", self.optimizers()).optimizer

    def take_step(self, scale: float = 1.0) -> float:
        """Take the optimizer's step, at ``scale`` times its learning rate, and the scheduler's; return the rate."""
        optimizer = cast("LightningOptimizer", self.optimizers())
        groups = optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            if scale != 1.0:  # of the rate and not of the gradient, by whose size Adam divides
                for group in groups:
                    group["lr"] = group["lr"] * scale
            optimizer.step()
        finally:
            for group, lr in zip(groups, rates, strict=True):
                group["lr"] = lr
        if self.make_lr_scheduler is not None:
            cast(Any, self.lr_schedulers()).step()
        self.policy_version += 1
        return rates[0]


def _check_parts(generator: Any, optimizer: Any, lr_scheduler: Any) -> None:
    """Refuse what a caller from Python gives in place of a generator or of what makes an optimizer or a schedule."""
    methods = ("start", "submit", "step", "load_weights", "close")
    is_generator = all(callable(getattr(type(generator), name, None)) for name in methods)
    for name, given, fits, remedy in (
        ("generator", generator, is_generator, "an object such as lit_grpo.rollout.slots.SlotGenerator(num_slots=32)"),
        (
            "optimizer",
            optimizer,
            callable(optimizer),
            "a function of the parameters, such as functools.partial(torch.optim.AdamW, lr=1e-5)",
        ),
        (
            "lr_scheduler",
            lr_scheduler,
            callable(lr_scheduler),
            "a function of the optimizer, such as functools.partial(torch.optim.lr_scheduler.LinearLR, total_iters=9)",
        ),
    ):
        if given is not None and not fits:
            kind = f"the class {given.__name__}" if isinstance(given, type) else f"of type {type(given).__name__}"
            raise ValueError(f"{name} is {kind}; give {remedy}, or leave it out.")


def _few_prompts(num_minibatches: int, num_prompts: int) -> ValueError:
    """Return the error of a batch that has fewer prompts than optimizer steps are taken on it."""
    return ValueError(
        f"num_minibatches is {num_minibatches}, but a batch has {num_prompts} prompts; lower it, or raise "
        "data.batch_size."
    )
