"""Fills prompt batches with rollouts."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from lit_grpo.data.module import asked_prompts, loaded_prompts, own_loader, training_loader
from lit_grpo.module import GRPOModule
from lit_grpo.ranks import Ranks
from lit_grpo.rewards import RewardRunner, TrainerState
from lit_grpo.rewards.runner import can_score
from lit_grpo.rollout.budget import Budget, check_stream
from lit_grpo.rollout.buffer import RolloutBuffer, group_requests
from lit_grpo.rollout.listeners import Listener, Rewarding, Stepped
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.pruning import Pruner
from lit_grpo.rollout.pump import RolloutPump
from lit_grpo.rollout.rules import check_estimator, check_generator, check_resumed, make_mode
from lit_grpo.rollout.stats import RolloutStats
from lit_grpo.scheduling.lengths import LengthPredictor
from lit_grpo.scheduling.lengths.probe import PREDICTION_POINTS, Points, ProbeChoice, make_predictor
from lit_grpo.scheduling.plans.plan import check_probe, find_plan
from lit_grpo.types import Key, Prompt, PromptBatch, SamplingParams
from lit_grpo.update.arriving import check_arriving


class RolloutScheduler(pl.Callback):
    """Sample and reward the completions of each batch before its step, in every stage.

    A slot that is free takes the next completion at once, whatever its group; which one is next, the plan says. Plans
    follow predicted lengths as long as the predictions have been worth it, else the order of arrival. The plan
    changes how long a rollout takes, and never what is sampled. ``predict`` rewards completions too, where its data has
    the columns that the reward functions need. Callbacks that are a :class:`lit_grpo.rollout.listeners.Listener` hear
    of every rollout, and may answer.

    Args:
        plan: ``short_last`` decodes in the order of arrival and keeps the short ones for the end, so that slots and
            memory are in use to the last; ``lpt`` decodes the longest first, ``sjf`` the shortest first, ``fcfs`` in
            the order of arrival; ``balanced`` and ``infinite_sampling`` deal lists of about equal length onto the
            slots, as even as an ``epsilon`` asks for (``balanced:epsilon=0.05``; 0.02 by default). A plan of your own,
            a :class:`lit_grpo.scheduling.plans.Plan`, is its class path.
        predict_lengths: Learn the lengths of completions from the policy's hidden states and from earlier visits of
            the same prompts.
        prediction_points: After how many tokens the policy's hidden state is looked at; 0 is the prompt's end. By
            default 0, 8, 32 and 64, as far as ``sampling.max_tokens`` reaches.
        min_correlation: The rank correlation of predicted with actual lengths from which on they are followed; of a
            probe's within groups, for these are what it is to tell apart.
        probe_tokens: Decode so many tokens of every completion before any goes on, so that the plan can tell those of
            one prompt apart (Infinite Sampling, arXiv 2506.22950); with a list, to each of its numbers of tokens in
            turn, so that all completions share the slots evenly. ``auto`` takes what would have saved most steps in the
            rollouts so far: one of ``prediction_points``, time slices, or 0, which is no probe.
        mode: How rollouts and updates take turns (:data:`lit_grpo.rollout.rules.MODES`). ``synchronous`` is on-policy,
            and waits for the longest completion of a batch; ``april``, ``sortedrl``, ``sortedrl_partial`` and
            ``chunked`` do not. ``periodic`` and ``asynchronous`` decode during updates, on servers, in the order of
            the plan without predictions; ``pruned`` stops completions early, by the rewards that are foretold of
            them. Fields of :class:`lit_grpo.rollout.rules.RolloutMode` follow behind a colon
            (``april:batches_in_work=3,max_staleness=4``), and a mode of your own is its class path.
        allocation: How many completions each prompt gets (:data:`lit_grpo.budgets.allocation.ALLOCATIONS`):
            ``uniform``, ``model.num_generations``; divided by what earlier visits have shown (``knapsack``,
            ``variance``, ``buckets``); or in rounds, by what the first ones have earned (``dars_equal``,
            ``dars_hardness``, ``balanced``). Fields follow behind a colon (``knapsack:budget=256,most=64``), and a rule
            of your own is its class path.
        replace_flat: In place of groups whose rewards are all equal, which are then not learnt from, at most so many
            further prompts are asked in the same rollout (DAPO's dynamic sampling, arXiv 2503.14476); 0 for none.
        replay: Which successes of earlier visits of a prompt take part in its group again
            (:data:`lit_grpo.budgets.replay.REPLAYS`): ``none``; ``rlep``, two at random; or ``repo``, up to eight of
            the highest reward. Fields follow behind a colon (``rlep:members=4,max_age=100``), and a rule of your own is
            its class path.
    """

    def __init__(
        self,
        plan: str = "short_last",
        predict_lengths: bool = True,
        prediction_points: list[int] | None = None,
        min_correlation: float = 0.2,
        probe_tokens: int | list[int] | Literal["auto"] = "auto",
        mode: str = "synchronous",
        allocation: str = "uniform",
        replace_flat: int = 0,
        replay: str = "none",
    ) -> None:
        self.mode, self._turns = mode, make_mode(mode)
        self.allocation, self.replace_flat, self.replay = allocation, replace_flat, replay
        self._budget = Budget(allocation, replace_flat, replay)
        self._follows_lengths = find_plan(plan, "rollout.plan").follows_lengths
        LengthPredictor(prediction_points or PREDICTION_POINTS, min_correlation=min_correlation)
        self.probe_tokens = probe_tokens
        self._choice = ProbeChoice(min_correlation) if probe_tokens == "auto" else None
        self._pruner: Pruner | None = None
        if self._turns.prune_at is not None:
            self._pruner = Pruner(self._turns.prune_at, self._turns.keep, self._turns.positive_share)
        self._points: Points = ()
        self._num_slots = 0
        if probe_tokens != "auto":
            self._points = check_probe(probe_tokens, plan, predict_lengths)
        self.plan, self.predict_lengths = plan, predict_lengths
        self.prediction_points, self.min_correlation = prediction_points, min_correlation
        self._lengths: LengthPredictor | None = None
        self._buffer = RolloutBuffer()
        self._predicted: dict[Key, float] = {}  # of the groups that are open between two batches
        self._rewards: RewardRunner | None = None
        self._pump: RolloutPump | None = None
        self._started = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the reward functions can be called with the data's columns, and the points within the limit."""
        if not isinstance(pl_module, GRPOModule):
            raise ValueError(f"RolloutScheduler needs a GRPOModule, not a {type(pl_module).__name__}.")
        for split, rows in loaded_prompts(trainer).items():
            if split == "predict":
                continue
            for function in pl_module.rewards:
                function.check_columns(rows[0].columns)
        if stage == "fit":
            self._check_turns(trainer, pl_module)
        if self.predict_lengths and self._lengths is None and self._turns.overlap == "none":
            points = self.prediction_points, self._points, None if self._pruner is None else self._pruner.at
            self._lengths = make_predictor(*points, self.min_correlation, pl_module.sampling.max_tokens)
        if stage == "fit" and self._turns.carries:
            loader = training_loader(_data(trainer))
            check_stream(loader, self._turns)
            loader.on_demand, of_batch = True, (loader.batch_size, pl_module.num_generations)
            self._buffer.rule = self._turns.rule(*of_batch, pl_module.settings.updates_per_batch)

    def _check_turns(self, trainer: pl.Trainer, module: GRPOModule) -> None:
        """Check that the mode goes with the run's updates, its generator and what each prompt gets."""
        turns, learning, generator = self._turns, module.settings, module.generator
        max_tokens, num_generations = module.sampling.max_tokens, module.num_generations
        self._budget.check(self.mode, turns, getattr(_data(trainer), "batch_size", None), num_generations)
        turns.check(learning.updates_per_batch, max_tokens, num_generations, self.predict_lengths)
        check_generator(self.mode, turns, generator)
        check_estimator(self.mode, turns, learning.advantages.estimator)
        self._budget.replay.check(learning.objective, learning.advantages.estimator)
        if turns.overlap == "within":
            check_arriving(learning, module.ranks.size, hasattr(trainer.strategy, "shard"))
        if hasattr(generator, "keeps_kv"):
            generator.keeps_kv = turns.at_sync == "keep"  # pyright: ignore[reportAttributeAccessIssue]

    def _check_snapshots(self, module: GRPOModule) -> None:
        """Check that there is room for the weights that old tokens need, and on resuming that they are there."""
        snapshots, learning = module.learner.snapshots, module.settings
        if snapshots is None or not self._turns.carries:
            return
        limit_gib = learning.objective.snapshot_gib
        snapshots.check_memory(self._turns.max_staleness, learning.updates_per_batch, limit_gib, module.ranks)
        needed = self._buffer.versions(module.policy_version) - {module.policy_version}
        module.ranks.together(lambda: snapshots.check_kept(needed))

    def state_dict(self) -> dict[str, Any]:
        """What each rank has learnt of lengths, and has sampled and not yet learnt from; all ranks ask together."""
        self._stop_pump()
        own = {} if self._lengths is None else {"lengths": self._lengths.state_dict()}
        if self._choice is not None:
            own["probe"] = self._choice.state_dict()
        if self._pruner is not None:
            own["pruning"] = self._pruner.state_dict()
        own |= {"buffer": self._buffer.state_dict(), "predicted": list(self._predicted.items())}
        return {"mode": self.mode, "ranks": Ranks().gather(own), "replay": self._budget.replay.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what this rank had learnt; of N ranks that saved, rank r takes what r modulo N has left.

        Raises:
            ValueError: Prompts are open that another mode has begun with, or as many ranks as are not there.
        """
        states, ranks = state_dict["ranks"], Ranks()
        num_open = sum(len(state["buffer"]["groups"]) for state in states)
        check_resumed((self.mode, ranks.size), (state_dict["mode"], len(states)), num_open)
        own = states[ranks.own % len(states)]
        if self._lengths is not None and "lengths" in own:
            self._lengths.load_state_dict(own["lengths"])
        if self._choice is not None and "probe" in own:
            self._choice.load_state_dict(own["probe"])
        if self._pruner is not None and "pruning" in own:
            self._pruner.load_state_dict(own["pruning"])
        self._buffer.load_state_dict(own["buffer"])
        self._budget.replay.load_state_dict(state_dict["replay"])
        self._predicted = {(name, visit, tuple(path)): value for (name, visit, path), value in own["predicted"]}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the prompts' lengths and start the generator."""
        assert isinstance(pl_module, GRPOModule)
        pl_module.check_lengths(asked_prompts(trainer))
        if trainer.training:
            self._check_snapshots(pl_module)
            self._budget.begin(pl_module.learner.state.history, own_loader(trainer), self._turns, self._lengths)
        self._start(trainer, pl_module)

    on_validation_start = on_test_start = on_predict_start = on_train_start

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Sample ``num_generations`` completions a prompt."""
        assert isinstance(pl_module, GRPOModule)
        if self._lengths is not None:
            self._lengths.end(commit=False)  # of a rollout whose update was interrupted
        self._choose_points()
        self._num_slots = pl_module.generator.capacity().slots
        progress = batch_idx / trainer.num_training_batches
        if self._turns.carries:
            batch.prompts = self._open(trainer, pl_module)
            if pl_module.learner.snapshots is not None:  # what is sampled now may be learnt from after the update
                pl_module.learner.snapshots.hold(pl_module.policy_version)
        if self._turns.overlap != "none":
            self._begin_beside(trainer, pl_module, batch, progress)
            return
        listeners = self._listeners(trainer, pl_module, self._budget) + ([] if self._pruner is None else [self._pruner])
        loop = RolloutLoop(pl_module.generator, self._buffer, self.plan, self._lengths, listeners, self._points)
        sizes = self._budget.sizes(batch.prompts, pl_module.num_generations)
        stats = self._collect(trainer, pl_module, loop, batch, sizes, pl_module.sampling, progress)
        if self._turns.carries:
            self._carry(batch, stats)
        self._budget.settle(batch, pl_module.policy_version, pl_module.ranks)
        batch.metrics |= self._budget.metrics() | ({} if self._pruner is None else self._pruner.metrics())
        if self._rewards is not None:
            batch.metrics |= self._rewards.metrics.take()
        batch.metrics["rollout/probe_tokens"] = float(self._points[0]) if self._points else 0.0
        batch.metrics |= pl_module.generator.sleep()
        pl_module.log_anew("rollout", batch.metrics)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Learn from the lengths, and forget the batch, now that the update has been made; have the last validated."""
        assert isinstance(pl_module, GRPOModule)
        if self._pump is not None:
            self._end_beside(self._pump, pl_module, batch)
        self._buffer.learnt()
        if self._turns.carries and pl_module.learner.snapshots is not None:
            pl_module.log_dict(pl_module.learner.snapshots.metrics())
            needed = self._buffer.versions(pl_module.policy_version)
            pl_module.learner.snapshots.let_go(needed, pl_module.ranks)
        if self._pruner is not None:
            self._pruner.learn(batch.groups, pl_module.pass_rule)
            pl_module.log_dict(self._pruner.quality())
        if self._lengths is not None:
            if self._choice is not None:
                outcome, limit = self._lengths.outcome(), pl_module.sampling.max_tokens
                self._choice.learn(outcome, limit, self._num_slots, self._lengths.informative)
                pl_module.log_dict(self._choice.metrics())
            self._lengths.end(commit=True)
            pl_module.log_dict(self._lengths.metrics())
        version, ranks = pl_module.policy_version, pl_module.ranks
        pl_module.log_anew("hints", self._budget.learn(batch.groups, pl_module.pass_rule, version, ranks))
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
        loop = RolloutLoop(pl_module.generator, listeners=self._listeners(trainer, pl_module))
        self._collect(trainer, pl_module, loop, batch, pl_module.eval_num_generations, pl_module.eval_sampling)
        if self._rewards is not None and not trainer.predicting:
            stage = "test" if trainer.testing else "val"
            logged = self._rewards.metrics.take()
            pl_module.log_dict({f"{stage}/{name}": value for name, value in logged.items()}, batch_size=1)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Decode no more."""
        self._stop_pump()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Free the generator's memory and stop the reward functions' threads."""
        if self._started:
            assert isinstance(pl_module, GRPOModule)
            self._stop_pump()
            pl_module.generator.close()
            if self._rewards is not None:
                self._rewards.close()
            self._rewards, self._started = None, False

    # ---- decoding beside an update ------------------------------------------------------------------

    def _begin_beside(self, trainer: pl.Trainer, module: GRPOModule, batch: PromptBatch, progress: float) -> None:
        """Let decoding begin, and the batch be of what is ready, or of what is going to be."""
        assert self._rewards is not None
        self._pump = self._pump or RolloutPump(self._rewards, drains=self._turns.at_sync == "drain")
        self._tell_state(trainer, progress)
        listeners = [*self._heard_by(trainer), Rewarding(self._rewards, waits=False)]
        sizes = self._budget.sizes(batch.prompts, module.num_generations)
        requests = group_requests(batch.prompts, sizes, module.sampling, module.sampling_seed)
        self._buffer.open(requests)
        self._pump.start(RolloutLoop(module.generator, self._buffer, self.plan, listeners=listeners))
        if self._turns.overlap == "within":
            arriving = self._pump.arriving(batch, module.phases)
            batch.arriving = self._budget.replay.joining(arriving, module.policy_version)
            return
        with module.phases.of("rollout"):
            batch.groups = self._pump.take(module.phases.move)
        self._budget.replay.join(batch.groups, module.policy_version)
        batch.prompts, batch.carried = [group.prompt for group in batch.groups], True

    def _end_beside(self, pump: RolloutPump, module: GRPOModule, batch: PromptBatch) -> None:
        """Stop decoding, and log what was done beside the update."""
        stats = pump.stop()
        assert stats is not None
        self._describe(batch, stats)
        if self._turns.carries:
            self._carry(batch, stats)
        batch.metrics |= pump.metrics(stats) | self._budget.metrics()
        if self._rewards is not None:
            batch.metrics |= self._rewards.metrics.take()
        module.log_anew("rollout", batch.metrics)

    def _stop_pump(self) -> None:
        """Stop decoding, where a run is broken off; whatever goes wrong then is not the reason."""
        if self._pump is not None and self._pump.runs:
            with contextlib.suppress(Exception):
                self._pump.stop()
            if not self._turns.carries:
                self._buffer.undo()

    # ---- decoding before an update ------------------------------------------------------------------

    def _open(self, trainer: pl.Trainer, module: GRPOModule) -> list[Prompt]:
        """Take the prompts that the mode wants beside those that are open; on all ranks equally many."""
        loader = training_loader(_data(trainer))
        wanted = self._turns.num_wanted(len(self._buffer), loader.batch_size)
        return loader.draw(int(module.ranks.max(wanted)))

    def _carry(self, batch: PromptBatch, stats: RolloutStats) -> None:
        """Let the batch be of the groups that have come out, and keep what is known of the others."""
        batch.prompts, batch.carried = [group.prompt for group in batch.groups], True
        batch.predicted = self._predicted | dict(batch.predicted)
        self._predicted = {key: value for key, value in batch.predicted.items() if key[:2] in self._buffer}
        batch.metrics |= {
            "rollout/open_prompts": float(self._buffer.num_left),
            "rollout/waiting_groups": float(self._buffer.num_waiting),
            "rollout/continued_tokens": float(stats.num_continued),
            "rollout/discarded_tokens": float(stats.num_discarded),
        }

    def _listeners(self, trainer: pl.Trainer, module: GRPOModule, budget: Budget | None = None) -> list[Listener]:
        scoring: list[Listener] = []
        if self._rewards is not None:
            rewards, pass_rule = self._rewards, module.pass_rule
            scoring = [Rewarding(rewards) if budget is None else budget.scoring(rewards, pass_rule)]
        moving = Stepped(lambda _: module.phases.move(), lambda: module.phases.begin("reward"))
        return [moving, *self._heard_by(trainer), *scoring]

    def _heard_by(self, trainer: pl.Trainer) -> list[Listener]:
        callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        return [callback for callback in callbacks if isinstance(callback, Listener)]

    def _choose_points(self) -> None:
        """Choose the points of the next rollout."""
        if self._lengths is None or self._choice is None or not self._follows_lengths:
            return
        if self._pruner is not None and self._pruner.head.proven:
            self._points = (self._pruner.at,)  # so that nobody goes on whom a comparison could stop
            return
        correlations = {point: self._lengths.within_correlation(point) for point in self._lengths.points if point}
        self._points = self._choice.points(correlations)

    def _start(self, trainer: pl.Trainer, module: GRPOModule) -> None:
        if self._started:
            return
        module.generator.start(module.spec)
        rows = loaded_prompts(trainer)["predict"][:1] if trainer.predicting else []
        if module.rewards and all(can_score(module.rewards, row) for row in rows):
            self._rewards = RewardRunner(
                module.rewards, module.on_reward_error, module.reward_timeout_s, module.reward_workers
            )
        self._started = True

    def _collect(
        self,
        trainer: pl.Trainer,
        module: GRPOModule,
        loop: RolloutLoop,
        batch: PromptBatch,
        num_generations: int | list[int],
        sampling: SamplingParams,
        progress: float = 0.0,
    ) -> RolloutStats:
        self._tell_state(trainer, progress)
        phase = "validation" if trainer.validating else "rollout"
        with module.phases.of(phase), trainer.precision_plugin.forward_context():
            batch.groups, stats = loop.collect(batch.prompts, num_generations, sampling, module.sampling_seed)
        self._describe(batch, stats)
        return stats

    def _tell_state(self, trainer: pl.Trainer, progress: float) -> None:
        """Let reward functions know where training stands."""
        if self._rewards is not None:
            epoch = trainer.current_epoch + progress
            self._rewards.state = TrainerState(trainer.global_step, trainer.max_steps, epoch)

    def _describe(self, batch: PromptBatch, stats: RolloutStats) -> None:
        """Let the batch say how its rollout went."""
        batch.metrics, batch.predicted = stats.metrics(), stats.predicted
        batch.spans, batch.clock = stats.spans, stats.clock
        for message in stats.messages:
            rank_zero_warn(message)
        if self._rewards is not None:
            batch.metrics["num_reward_errors"] = float(self._rewards.num_errors)


def _data(trainer: pl.Trainer) -> Any:
    return trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
