"""Fills prompt batches with rollouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.checks import check_rewarded, total_updates
from lit_grpo.compatibility import ONE_TURN, SHARDS, Requirement, check_together, clashing
from lit_grpo.data.module import PromptDataModule, asked_prompts, loaded_prompts, own_loader
from lit_grpo.data.rendering import Conversing
from lit_grpo.methods import make_plugins
from lit_grpo.methods.plans import find_plan
from lit_grpo.module import GRPOModule
from lit_grpo.plugins import Listener, ask, check_traits, overriding
from lit_grpo.process.terminal import warn
from lit_grpo.ranks import Ranks
from lit_grpo.rewards import RewardRunner, TrainerState
from lit_grpo.rewards.runner import can_score
from lit_grpo.rollout.session import RolloutSession
from lit_grpo.types import PromptBatch
from lit_grpo.update.learner_settings import check_arriving


class RolloutScheduler(pl.Callback):
    """Sample and reward the completions of each batch before its step, in every stage.

    A slot that is free takes the next completion at once, whatever its group; which one is next, the plan says. Plans
    follow predicted lengths as long as the predictions have been worth it, else the order of arrival. The plan
    changes how long a rollout takes, and never what is sampled. ``predict`` rewards completions too, where its data has
    the columns that the reward functions need. Callbacks that are a :class:`lit_grpo.plugins.Listener` hear
    of every rollout, and may answer. The work is done by :class:`lit_grpo.rollout.session.RolloutSession`.

    Args:
        plan: Scheduling policy: ``short_last`` decodes in the order of arrival and keeps the short completions for the
            end, so that slots and memory are in use to the last; ``lpt`` decodes the longest first, ``sjf`` the
            shortest first, ``fcfs`` in the order of arrival; ``balanced`` and ``infinite_sampling`` distribute lists of
            about equal length over the slots, as even as an ``epsilon`` says (``balanced:epsilon=0.05``; 0.02 by
            default). A plan of your own, a :class:`lit_grpo.scheduling.plans.Plan`, is its class path.
        predict_lengths: Predict the lengths of completions from the policy's hidden states and from earlier completions
            of the same prompts.
        prediction_points: Numbers of sampled tokens after which a length is predicted from the policy's hidden state; 0
            is the prompt's end. By default 0, 8, 32 and 64, up to ``sampling.max_tokens``.
        min_correlation: Min rank correlation of predicted and actual lengths at which the plan uses predictions. For a
            probe the correlation within groups counts, because a probe is to order the completions of one prompt.
        probe_tokens: Number of tokens to decode of every completion before any continues, so that the plan can order
            the completions of one prompt by predicted length (Infinite Sampling, arXiv 2506.22950). With a list, all
            completions are decoded to each of its numbers in turn, so that they share the slots evenly. ``auto`` takes
            the value that would have saved most decode steps in the rollouts so far: one of ``prediction_points``, time
            slices, or 0, which is no probe.
        plugins: Methods of papers, each by its name or the class path of a :class:`lit_grpo.plugins.Plugin`, optionally
            with its fields: ``[april, {knapsack: {budget: 256}}]``. docs/modes.md, docs/budgets.md, docs/update.md and
            docs/objectives.md have all that ship. By default none: rollouts are synchronous, every prompt gets
            ``num_generations`` completions, and the policy is trained on all of them.
    """

    def __init__(
        self,
        plan: str = "short_last",
        predict_lengths: bool = True,
        prediction_points: list[int] | None = None,
        min_correlation: float = 0.2,
        probe_tokens: int | list[int] | Literal["auto"] = "auto",
        plugins: list[str | dict[str, Any]] | str | None = None,
    ) -> None:
        self.plugins = [plugins] if isinstance(plugins, str | dict) else plugins or []
        self.session = RolloutSession(
            make_plugins(self.plugins),
            find_plan(plan, "rollout.plan"),
            predict_lengths,
            prediction_points,
            min_correlation,
            probe_tokens,
        )
        self._started = False
        self._listeners: list[Listener] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that data, rewards and plug-ins go together."""
        if not isinstance(pl_module, GRPOModule):
            raise ValueError(f"RolloutScheduler needs a GRPOModule, not a {type(pl_module).__name__}.")
        pl_module.join_rewards(
            [reward for plugin in self.session.plugins.values() for reward in ask(plugin, "rewards")]
        )
        if stage != "predict":
            unrewarded = any("learns_unrewarded" in plugin.traits for plugin in self.session.plugins.values())
            unrewarded = unrewarded or math.isinf(self.session.first_rollout)
            check_rewarded(pl_module.rewards, pl_module.num_generations, unrewarded)
        for split, rows in loaded_prompts(trainer).items():
            if split == "predict":
                continue
            for function in pl_module.rewards:
                for row in itertools.islice(filter(function.applies_to, rows), 1):
                    function.check_columns(row.columns)
        self._check_datasets(trainer, pl_module)
        data = trainer.datamodule  # pyrefly: ignore[missing-attribute]
        facts = pl_module.facts(getattr(data, "batch_size", None))
        if stage == "fit":
            has_shards = hasattr(trainer.strategy, "shard")
            callbacks = [each for each in trainer.callbacks if isinstance(each, Listener)]  # pyrefly: ignore[missing-attribute]
            for callback in callbacks:
                check_traits(callback)
            answering = overriding([*self.session.plugins.values(), *callbacks], "on_turn")
            others = [replace(SHARDS, chosen=has_shards), replace(ONE_TURN, chosen=not answering)]
            known = replace(facts, data=data) if isinstance(data, PromptDataModule) else facts
            self.session.check(known, [*self._other_parts(data, pl_module), *others])
            if answering:
                self._check_turns([getattr(each, "datasets", frozenset()) for each in answering])
            for sentence in self._unvisited(trainer, pl_module):
                rank_zero_only(warn)(sentence)
            if self.session.mode.overlap == "within":
                check_arriving(pl_module.settings, pl_module.ranks.size, has_shards, self.session.parts())
            pl_module.set_plugins(*self.session.plugins.values())
            if isinstance(data, PromptDataModule):
                data.plug_in(self.session.prompt_rule, self.session.rewriting, on_demand=self.session.mode.carries)
        self.session.prepare(facts)

    def _check_datasets(self, trainer: pl.Trainer, module: GRPOModule) -> None:
        """Check that reward functions and plug-ins are limited to data sets that there are, and each has a reward."""
        prompts = loaded_prompts(trainer)
        rows = [row for split in ("train", "validation", "test") for row in prompts.get(split, ())]
        known = dict.fromkeys(row.dataset for row in rows if row.dataset)
        limited = {f"reward {function.name!r}": function.datasets for function in module.rewards}
        limited |= {f"rollout.plugins {name}": plugin.datasets for name, plugin in self.session.plugins.items()}
        for what, datasets in limited.items():
            for dataset in sorted(datasets - known.keys()) if rows else ():
                there = f"the data sets are {', '.join(map(repr, known))}; name one of them"
                none = "no row names a data set; set data.mixture, or make data.train a lit_grpo.data.Mixture"
                raise ValueError(f"{what} is limited to data set {dataset!r}, but {there if known else none}.")
        if not module.rewards:
            return
        of_dataset = {row.dataset: row for row in prompts.get("train", ())}
        weights = getattr(trainer.datamodule, "mixture", None)  # pyrefly: ignore[missing-attribute]
        unrewarded = [plugin for plugin in self.session.plugins.values() if "learns_unrewarded" in plugin.traits]
        for dataset, row in of_dataset.items() if known else ():
            sampled = weights is None or not weights.weights or any(w.get(dataset) for w in weights.all)
            rewarded = any(function.weight and function.applies_to(row) for function in module.rewards)
            if sampled and not rewarded and not any(row.is_of(plugin.datasets) for plugin in unrewarded):
                raise ValueError(
                    f"Data set {dataset!r} has no reward function with a weight; add its name to the datasets of one, "
                    "or set its weight in data.mixture.weights to 0."
                )

    def _check_turns(self, answered: Sequence[frozenset[str]]) -> None:
        """Check that plug-ins that need several turns are limited to data sets that have some.

        Args:
            answered: The data sets whose turns are answered, by each part that answers; an empty set is all.
        """
        for plugin, part in zip(self.session.plugins.values(), self.session.parts(), strict=True):
            alone = plugin.datasets and all(those and not those & plugin.datasets for those in answered)
            limits = f"this run on {' and '.join(map(repr, sorted(plugin.datasets)))}"
            check_together([part, replace(ONE_TURN, name=limits, chosen=bool(alone))])

    @property
    def conversing(self) -> Conversing | None:
        return next((each for each in self.session.plugins.values() if isinstance(each, Conversing)), None)

    def _unvisited(self, trainer: pl.Trainer, module: GRPOModule) -> list[str]:
        """Return what is to be said of plug-ins that go by earlier visits in a run that asks no prompt twice."""
        data = trainer.datamodule  # pyrefly: ignore[missing-attribute]
        if not isinstance(data, PromptDataModule):
            return []
        updates = total_updates(trainer, module.settings.updates_per_batch)
        if updates is None:
            return []
        rule, number = self.session.prompt_rule, len(loaded_prompts(trainer).get("train", ()))
        batches = -(-updates // module.settings.updates_per_batch)
        candidates = 1 if rule is None else ask(rule, "numbers").prompt_candidates
        asked = batches * data.batch_size * trainer.world_size * candidates
        said = f"asks for {asked} of {number} training prompts, each once"
        once = Requirement("this run", changes={"revisits": said}, remedy="raise trainer.max_steps", fixed=True)
        return list(clashing([*self.session.parts(), replace(once, chosen=asked <= number)]))

    def _other_parts(self, data: object, module: GRPOModule) -> list[Requirement]:
        """Return what plug-ins have to go with: the data and what is learned."""
        parts = module.settings.parts()
        if not isinstance(data, PromptDataModule):
            changes = {"prompt_stream": "is asked for its batches alone"}
            parts.append(Requirement("a dataloader of your own", changes=changes))
        return parts

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the session; all ranks call together."""
        return self.session.state_dict(Ranks())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.session.load_state_dict(state_dict, Ranks())

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the prompts' lengths and start the generator."""
        assert isinstance(pl_module, GRPOModule)
        self._listeners = [each for each in trainer.callbacks if isinstance(each, Listener)]  # pyrefly: ignore[missing-attribute]
        pl_module.check_lengths(asked_prompts(trainer))
        if trainer.training:
            mode, buffer = self.session.mode, self.session.buffer
            carried = (mode.max_staleness, buffer.versions) if mode.carries else (None, None)
            pl_module.start_plugins(*carried)
            self.session.open(pl_module.learner.history, own_loader(trainer))
        if self._started:
            return
        keeps_kv = self.session.mode.at_sync == "keep"
        policy = replace(pl_module.spec, keeps_kv=keeps_kv, trained=trainer.state.fn == "fit")
        for plugin in overriding(self.session.plugins.values(), "on_policy_start"):
            ask(plugin, "on_policy_start", policy.eos_ids)
        pl_module.generator.start(policy)
        rows = loaded_prompts(trainer)["predict"][:1] if trainer.predicting else []
        if pl_module.rewards and all(can_score(pl_module.rewards, row) for row in rows):
            for state in filter(None, (function.state for function in pl_module.rewards)):
                state.begin(pl_module.device, Path(trainer.default_root_dir))
            self.session.rewards = RewardRunner(
                pl_module.rewards, pl_module.on_reward_error, pl_module.reward_timeout_s, pl_module.reward_workers
            )
        self._started = True

    on_validation_start = on_test_start = on_predict_start = on_train_start

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Sample the completions of the batch, and reward them."""
        assert isinstance(pl_module, GRPOModule)
        if self.session.rewards is not None:
            epoch = trainer.current_epoch + batch_idx / trainer.num_training_batches
            self.session.rewards.state = TrainerState(trainer.global_step, trainer.max_steps, epoch)
        self.session.next_batch(pl_module, batch, self._listeners, trainer.precision_plugin.forward_context)
        if self.session.mode.overlap == "none":
            pl_module.log_anew("rollout", batch.metrics)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Learn from the lengths, and forget the batch, now that the update has been made; have the last validated."""
        assert isinstance(pl_module, GRPOModule)
        logs = self.session.end_update(pl_module, batch)
        pl_module.log_dict(logs.pop("learned"))
        for source, values in logs.items():
            pl_module.log_anew(source, values)
        if 0 < trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True  # so Lightning validates the final policy, whatever val_check_interval is

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Sample ``eval_num_generations`` completions a prompt."""
        assert isinstance(pl_module, GRPOModule)
        if not pl_module.validates_completions:
            return
        if self.session.rewards is not None:
            self.session.rewards.state = TrainerState(trainer.global_step, trainer.max_steps, trainer.current_epoch)
        self.session.evaluate(
            pl_module,
            batch,
            pl_module.eval_num_generations,
            pl_module.eval_sampling,
            self._listeners,
            "validation" if trainer.validating else "rollout",
            trainer.precision_plugin.forward_context,
        )

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the means of what reward functions have logged, over all batches and ranks."""
        assert isinstance(pl_module, GRPOModule)
        if self.session.rewards is not None:
            stage = "test" if trainer.testing else "val"
            logged = self.session.rewards.take_metrics(all_gather=pl_module.ranks.gather)
            pl_module.log_dict({f"{stage}/{name}": value for name, value in logged.items()})

    on_test_epoch_end = on_validation_epoch_end

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.session.stop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Free the generator's memory and stop the reward functions' threads."""
        if self._started:
            assert isinstance(pl_module, GRPOModule)
            self.session.stop()
            pl_module.generator.close()
            self.session.close()
            self._started = False
