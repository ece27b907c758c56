"""Two ranks do what one process does, however they share the work: real processes and gloo.

``ROWS`` is the table of all ways to share it and of all runs. This file is also the script that the ranks run:
``python test_two_ranks.py POLICY OUTPUT``; OUTPUT holds the rows to run, ``rows.json``, and what comes of them.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import forks
import lightning.pytorch as pl
import plugin_runs
import pytest
import torch
from conftest import random_policy, table_rows
from hand_made import (
    Batches,
    StepRecorder,
    assert_ranks_end_as_one,
    chosen,
    make_module,
    make_trainer,
    random_groups,
    relative_error,
    weights_of,
)
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from benchmarks.learning_callbacks import StaleSlots
from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.data.module import PromptDataModule
from lit_grpo.methods import shipped
from lit_grpo.methods.a3po import InterpolatedPolicy
from lit_grpo.methods.copo import Blended
from lit_grpo.methods.d3s import D3S
from lit_grpo.methods.entropy_target import EntropyTarget
from lit_grpo.methods.members import MaxEntropy
from lit_grpo.methods.seco import SeCO
from lit_grpo.methods.shared.self_teaching import Hint, SelfTeacher
from lit_grpo.methods.vcpo import EffectiveSamples
from lit_grpo.module import GRPOModule
from lit_grpo.plugins import GroupBatch, fresh
from lit_grpo.policy.adapters import LoraSettings
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import PolicyWeights
from lit_grpo.rewards import RewardSpec
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.rollout.weights.tensors import SyncReport
from lit_grpo.types import OBSERVED, Prompt, PromptBatch, RolloutGroup, SamplingParams
from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.logprobs.teacher import TeacherSettings
from lit_grpo.update.micro_batch_size import MicroBatchSize
from lit_grpo.update.objective.corrections import Correction
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import EntropyBonus, Objective

pytestmark = pytest.mark.filterwarnings("ignore")

NAN = math.nan
TESTS = Path(__file__).parent.parent


@dataclass
class Case:
    """A run on rewards_PG of each batch; of its groups rank r trains on every second one.

    ``scarce`` lets the memory of rank 1 run out, where the token budget is open; ``seeded`` draws the same adapters
    every time; ``hybrid`` trains the policy that has recurrent states.
    """

    batches: list[list[list[float]]]
    options: dict[str, Any] = field(default_factory=dict)
    scarce: bool = False
    seeded: bool = False
    hybrid: bool = False


MIXED = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.2, 0.5], [0.0, 0.0, 0.0, 1.0], [3.0, 0.0, 2.0, 0.5]]
OVERFLOWING = [MIXED[0], [0.0, 1e30, 0.2, 0.5], *MIXED[2:]]  # the square of a gradient of rank 1 is infinite
RANK_1_UNIFORM = [[1.0, 0.0, 0.0, 1.0], [1.0] * 4, [0.3, 0.1, 0.0, 0.0], [0.7] * 4]
RANK_0_MISSING = [[NAN] * 4, [1.0, NAN, 0.0, 1.0], [NAN] * 4, [0.0, 1.0, 0.0, NAN]]
ALL_UNIFORM = [[0.0] * 4, [1.0] * 4, [NAN] * 4, [0.7] * 4]
RAGGED = [[1.0, 0.0, 0.5, 0.2, 0.9], [0.0, 1.0, 0.3], [], [1.0]]


class LongTaught(SelfTeacher):
    """Teaches completions of more than two tokens, which rank 1 has not, after a prompt that is two tokens longer."""

    def hints(self, group: RolloutGroup, batch: GroupBatch) -> list[list[Hint]]:
        return [[{}] if rollout.completion.num_tokens > 2 else [] for rollout in group.rollouts]

    def write(self, prompt: Prompt, hint: Hint) -> Prompt:
        return replace(prompt, token_ids=(5, 6, *prompt.token_ids))


ADAPTIVE_KL = Objective(kl=KLTerm(0.1, "k1", place="reward", target=0.001, horizon=50))
ADAPTIVE_ENTROPY = EntropyTarget(3.0, 0.05, 0.01)
VCPO = Objective("grpo", epsilon=1.0, epsilon_high=1e9, correction=Correction("sequence_truncate", high=8.0))
SIZED: dict[str, Any] = {"objective": VCPO, "plugins": [EffectiveSamples()]}
FILTERED = Objective(correction=Correction("geometric_mask"), off_policy_kl=0.3)
INTERPOLATED = {"objective": Objective(correction=Correction("token_truncate")), "plugins": [InterpolatedPolicy()]}
CASES = {
    "token": Case([MIXED]),
    "constant_with_kl": Case([MIXED, MIXED], {"objective": Objective("dr_grpo", kl=KLTerm(0.2))}),
    "batch_scale_and_clipping": Case([MIXED], {"advantages": Advantages(scale="batch"), "max_grad_norm": 0.05}),
    "one_rank_uniform_with_kl": Case([RANK_1_UNIFORM], {"objective": Objective(kl=KLTerm(0.2))}),
    "one_rank_missing": Case([RANK_0_MISSING]),
    "two_iterations_of_two_minibatches": Case([MIXED], {"num_iterations": 2, "num_minibatches": 2}),
    "memory_runs_out_in_a_measurement_of_one_rank": Case(
        [MIXED],
        {
            "max_tokens_per_micro_batch": "auto",
            "objective": Objective(correction=Correction("sequence_mask")),
            "num_iterations": 2,
        },
        scarce=True,
    ),
    "not_finite_on_one_rank": Case([OVERFLOWING, MIXED], {"advantages": Advantages(scale="none")}),
    "all_uniform_after_an_update": Case([MIXED, ALL_UNIFORM]),
    "kl_in_the_reward": Case([MIXED, RANK_0_MISSING], {"objective": ADAPTIVE_KL, "num_minibatches": 2}),
    "adaptive_entropy": Case([MIXED, RANK_1_UNIFORM], {"plugins": [ADAPTIVE_ENTROPY]}),
    "effective_samples": Case([MIXED, RANK_1_UNIFORM], SIZED | {"num_minibatches": 2}),
    "filtered": Case([MIXED, RANK_1_UNIFORM, MIXED], {"objective": FILTERED, "num_minibatches": 2}),
    "interpolated": Case([MIXED, MIXED], INTERPOLATED | {"num_minibatches": 2}),
    "ragged_over_the_batch": Case(
        [RAGGED, RAGGED[::-1]],
        {"advantages": Advantages(scale="batch"), "objective": Objective("grpo", top_entropy_quantile=0.5)},
    ),
}

SCHEDULE = D3S(3, tokens=0.8, first_keep=2, first_tokens=0.4)
CASES["parts_of_rollouts_and_tokens"] = Case(
    [MIXED, RAGGED, RANK_1_UNIFORM], {"plugins": [SCHEDULE], "num_minibatches": 2}
)
CASES["compared_with_other_groups"] = Case(
    [MIXED, RAGGED, RANK_0_MISSING], {"plugins": [Blended(gamma=1.0, rho=0.0)], "num_minibatches": 2}
)
CASES["taught_on_one_rank"] = Case(
    [MIXED, RANK_0_MISSING, RAGGED],
    {"plugins": [LongTaught(0.5)], "teacher": TeacherSettings("average", average_rate=0.5), "num_minibatches": 2},
)
CASES["highest_entropy"] = Case(
    [MIXED, RAGGED], {"plugins": [MaxEntropy(2)], "max_tokens_per_micro_batch": "auto"}, scarce=True
)

COMPOSED = {"gspo": Correction("sequence_mask"), "vespo": Correction("token_truncate")}  # of sequences, and of tokens
for name, correction in COMPOSED.items():
    composed = Objective(
        name,
        kl=KLTerm(0.1, importance_weighted=True),
        entropy=EntropyBonus(0.05),
        correction=correction,
        mask_truncated=True,
        top_entropy_quantile=0.5,
        off_policy_threshold=0.1,
    )
    CASES[f"loss_{name}_composed"] = Case([MIXED, RANK_1_UNIFORM], {"objective": composed, "num_minibatches": 2})
for estimator in ("gdpo", "dcpo", "least_variance", "reinforce_plus_plus_baseline"):  # by the batch, or by visits
    options = {"advantages": Advantages(estimator, max_reward=3.0)}
    CASES[f"advantages_{estimator}"] = Case([MIXED, RANK_0_MISSING, MIXED[::-1]], options)

LORA = {"lora": LoraSettings(r=2), "objective": Objective(kl=KLTerm(0.2))}
HYBRIDS = {
    "hybrid": Case([MIXED, RANK_1_UNIFORM], {"num_minibatches": 2, "max_grad_norm": 0.5}, hybrid=True),
    "hybrid, split prompts": Case(
        [MIXED], {"max_tokens_per_micro_batch": 14, "gradient_checkpointing": True}, hybrid=True
    ),
    "hybrid, lora, checkpointed": Case([MIXED], LORA | {"gradient_checkpointing": True}, seeded=True, hybrid=True),
    "hybrid, in chunks": Case([MIXED], {"plugins": [SeCO(4)], "gradient_checkpointing": True}, hybrid=True),
}
OTHERS = HYBRIDS | {
    "lora": Case([MIXED, MIXED], LORA, seeded=True),
    "lora, checkpointed": Case([MIXED, MIXED], LORA | {"gradient_checkpointing": True}, seeded=True),
    "checkpointed": Case([MIXED, RANK_1_UNIFORM], {"gradient_checkpointing": True}),
    "selectively": Case([MIXED, RANK_0_MISSING], {"gradient_checkpointing": "selective", "num_minibatches": 2}),
    "entropy": Case([MIXED, MIXED], {"objective": Objective(entropy=EntropyBonus(0.1))}),
    "long rows": Case([MIXED, MIXED], {"max_tokens_per_micro_batch": 1000}),
    "split prompts": Case([MIXED, MIXED], {"max_tokens_per_micro_batch": 14, "gradient_checkpointing": True}),
}
"""Cases for ranks that have a part of the weights, or of the rows."""


@dataclass
class Sharing:
    """What two ranks share, beside the prompts of a batch.

    Args:
        strategy: Lightning's: with ``fsdp2`` each rank has a shard of the weights.
        rows: Whether both ranks compute a part of every row.
        apart: Whether each decodes with a model of its own, to which the weights travel.
    """

    strategy: str
    rows: bool = False
    apart: bool = False


SHARINGS = {
    "ddp": Sharing("ddp"),
    "fsdp2": Sharing("fsdp2"),
    "fsdp2, apart": Sharing("fsdp2", apart=True),
    "ddp, rows": Sharing("ddp", rows=True),
    "fsdp2, rows": Sharing("fsdp2", rows=True),
}
MAIN = ("one_rank_missing", "batch_scale_and_clipping", "not_finite_on_one_rank", "loss_gspo_composed")
THREE = ("two_iterations_of_two_minibatches", "parts_of_rollouts_and_tokens", "advantages_least_variance")
RUNS = {
    "ddp": (*CASES, "hybrid", "pipeline"),
    "fsdp2": (*MAIN, *THREE, *HYBRIDS, "lora, checkpointed", "selectively", "pipeline"),
    "fsdp2, apart": (*THREE, "constant_with_kl", "lora, checkpointed"),
    "ddp, rows": (*MAIN, *THREE, *(name for name in OTHERS if name not in HYBRIDS)),
    "fsdp2, rows": ("lora, checkpointed", "split prompts"),
}
ROWS = [(sharing, name) for sharing, names in RUNS.items() for name in names]
"""What two ranks share, and the run whose outcome is held to that of one process."""
QUICK_RUNS = {
    "ddp": (
        *("token", "one_rank_missing", "two_iterations_of_two_minibatches", "not_finite_on_one_rank"),
        *("memory_runs_out_in_a_measurement_of_one_rank", "ragged_over_the_batch", "compared_with_other_groups"),
    ),
    "fsdp2": ("two_iterations_of_two_minibatches", "parts_of_rollouts_and_tokens", "selectively", "hybrid, in chunks"),
    "fsdp2, apart": ("constant_with_kl",),
    "ddp, rows": ("one_rank_missing", "split prompts"),
    "fsdp2, rows": ("lora, checkpointed",),
}
QUICK_PLUGINS = ("balanced", "copo, twice", "rlep", "echo, sft")
QUICK = [(sharing, name) for sharing, names in QUICK_RUNS.items() for name in names]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Linear in the gradient: AdamW would make of rounding errors where the gradient is 0 a whole step."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def rank_and_world_size() -> tuple[int, int]:
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def uneven_groups(rewards_PG: list[list[float]], hybrid: bool = False) -> list[RolloutGroup]:
    """Ragged groups; those of rank 1 have at most two tokens a completion."""
    groups = random_groups(random_policy(hybrid=hybrid), rewards_PG, noise=0.2)
    if RAGGED[0] in rewards_PG:
        groups = with_gaps(groups, rewards_PG)
    for index, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
        rollout.rewards = {"exact_match": None if math.isnan(rollout.reward) else rollout.reward}
        rollout.completion.finish_reason = "length" if index % 3 == 2 else "stop"
    for rollout in (rollout for group in groups[1::2] for rollout in group.rollouts):
        completion = rollout.completion
        completion.token_ids_T, completion.logprobs_T = completion.token_ids_T[:2], completion.logprobs_T[:2]
        completion.versions_T = completion.versions_T[:2]
    return groups


def with_gaps(groups: list[RolloutGroup], rewards_PG: list[list[float]]) -> list[RolloutGroup]:
    """A group for each row, members or not; some tokens are observed, and some rollouts are not kept."""
    for index, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
        versions_T = rollout.completion.versions_T
        versions_T[: index % 3] = OBSERVED
        rollout.completion.versions_T, rollout.kept = versions_T, index % 5 != 3
    found = {group.prompt.prompt_id: group for group in groups}
    names = [f"train/{row}" for row in range(len(rewards_PG))]
    return [found.get(name, RolloutGroup(Prompt(name, (3, 4), ""), [])) for name in names]


class RankBatches(Batches):
    """Gives each rank its share of every batch."""

    def __iter__(self) -> Iterator[PromptBatch]:
        rank, world_size = rank_and_world_size()
        return iter(Batches([groups[rank::world_size] for groups in self.batches]))


class ScarceRank(pl.Callback):
    """Rank 1 runs out of memory the first time that its policy is given more than one token."""

    num_raised = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        pl_module.learner.passes.budget = MicroBatchSize(40)
        pl_module.policy.get_decoder().register_forward_pre_hook(self._check, with_kwargs=True)

    def _check(self, _: Any, __: Any, kwargs: dict[str, Any]) -> None:
        if rank_and_world_size()[0] == 1 and kwargs["input_ids"].shape[1] > 1 and not self.num_raised:
            self.num_raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")


def outcome(module: GRPOModule, recorder: StepRecorder) -> dict[str, Any]:
    """What must be the same on all ranks."""
    logs = [plugin_runs.shared(of_batch) for of_batch in recorder.logs]
    return {"weights": weights_of(module), "version": module.policy_version, "logs": logs}


def run_case(case: Case, policy: str, **trainer_options: Any) -> dict[str, Any]:
    """Train on groups made by hand."""
    if case.seeded:
        pl.seed_everything(1, verbose=False)
    options: dict[str, Any] = {"max_tokens_per_micro_batch": 24} | case.options
    options["plugins"] = [*map(fresh, options.get("plugins", ()))]
    folder = str(Path(policy, "hybrid")) if case.hybrid else policy
    module = make_module(folder, optimizer=momentum, **options)
    scarce = ScarceRank()
    trainer = make_trainer(recorder := StepRecorder(), *([scarce] if case.scarce else []), **trainer_options)
    batches = [uneven_groups(rewards, case.hybrid) for rewards in case.batches]
    trainer.fit(module, train_dataloaders=RankBatches(batches))
    assert scarce.num_raised == int(case.scarce and rank_and_world_size()[0] == 1)
    return outcome(module, recorder)


def even_length(completion: str, num_tokens: int) -> float:
    """A reward that about half of all completions get."""
    return float(num_tokens % 2 == 0)


def write_prompts(folder: Path, prompts: Sequence[str], split: str = "train") -> None:
    (folder / f"{split}.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))


def run_pipeline(policy: str, output: Path, **trainer_options: Any) -> dict[str, Any]:
    """Two batches of four prompts in all, sampled on the spot; then three validation prompts."""
    rank_batch = 4 // trainer_options.get("devices", 1)
    for split, prompts in (("train", ["1+1=", "2*3=", "a", "9-4=", "7", "12+30="]), ("validation", ["3+", "b=", "8"])):
        write_prompts(output, prompts, split)
    data = PromptDataModule(
        policy,
        train=str(output / "train.jsonl"),
        validation=str(output / "validation.jsonl"),
        batch_size=rank_batch,
        eval_batch_size=1,
    )
    module = make_module(
        policy,
        optimizer=momentum,
        rewards=[RewardSpec(f"{__file__}:even_length")],
        eval_num_generations=6,
        pass_at_k=(1, 2, 4),
        sampling=SamplingParams(max_tokens=9),
    )
    recorder = StepRecorder()
    trainer = make_trainer(
        RolloutScheduler(), WeightSync(), recorder, max_steps=2, max_epochs=-1, limit_val_batches=0, **trainer_options
    )
    trainer.fit(module, datamodule=data)
    evaluator = make_trainer(RolloutScheduler(), WeightSync(), **trainer_options)
    (validation,) = evaluator.validate(module, datamodule=data, verbose=False)
    return outcome(module, recorder) | {"validation": validation}


class Scheduling(pl.Callback):
    """Keeps what this rank's scheduler foretold and measured of each batch, before which it can leave a checkpoint."""

    def __init__(self, checkpoint: Path | None = None) -> None:
        self.checkpoint = checkpoint
        self.seen: list[tuple[Any, ...]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("lengths/")}
        trained = [(r.completion.request.key, r.completion.versions_T.tolist()) for r in batch.rollouts]
        again = [rollout.completion for group in batch.groups for rollout in group.rollouts if rollout.replayed]
        replayed = [(each.request.key, each.token_ids_T.tolist(), each.logprobs_T.tolist()) for each in again]
        sampled = [(r.completion.request.key, r.completion.token_ids_T.tolist()) for r in batch.rollouts]
        self.seen.append((logged, dict(batch.predicted), list(batch.spans), replayed, sampled, trained))
        if self.checkpoint is not None:
            trainer.save_checkpoint(self.checkpoint / f"after-{pl_module.policy_version}.ckpt")


def run_on(
    policy: str, output: Path, mode: str | None = None, replay: str | None = None, **trainer_options: Any
) -> dict[str, Any]:
    """Six batches at a stretch, and the last three again from the checkpoint after the third."""
    output = output / f"{(mode or 'synchronous').partition(':')[0]}-{replay}"
    output.mkdir(exist_ok=True)
    write_prompts(output, ["1+1=", "2*3=", "a", "9-4=", "7", "12+30="])

    def train(scheduling: Scheduling, ckpt_path: Path | None = None) -> list[tuple[Any, ...]]:
        rewards = [RewardSpec(f"{__file__}:even_length")]
        module = make_module(policy, optimizer=momentum, rewards=rewards, num_generations=24)
        data = PromptDataModule(policy, train=str(output / "train.jsonl"), batch_size=1)
        own = {"max_steps": 6, "max_epochs": -1, "limit_val_batches": 0, **trainer_options}
        trainer = make_trainer(RolloutScheduler(plugins=chosen(mode, replay)), WeightSync(), scheduling, **own)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        return scheduling.seen

    return {"whole": train(Scheduling(output)), "resumed": train(Scheduling(), output / "after-3.ckpt")}


class SlotsBeside(StaleSlots):
    """Decodes with a copy of the policy, and its last weights, so it may do that while the policy is updated."""

    abilities = StaleSlots.abilities | {"own_devices"}


def run_beside(policy: str, output: Path, mode: str, **trainer_options: Any) -> dict[str, Any]:
    """Four batches of four prompts in all, decoded while the policy is updated."""
    prompts = [f"{a}+{b}=" for a in range(4) for b in range(6)]
    write_prompts(output, prompts)
    batch_size = 4 // trainer_options.get("devices", 1)
    data = PromptDataModule(policy, train=str(output / "train.jsonl"), batch_size=batch_size)
    module = make_module(
        policy,
        optimizer=momentum,
        rewards=[RewardSpec(f"{__file__}:even_length")],
        generator=SlotsBeside(lag=0, num_slots=6),
    )
    recorder, scheduling = StepRecorder(), Scheduling()
    plugins = chosen(None if mode == "synchronous" else mode)
    callbacks = (RolloutScheduler(plugins=plugins), WeightSync(), recorder, scheduling)
    options = {"max_steps": 4, "max_epochs": -1, "limit_val_batches": 0, **trainer_options}
    make_trainer(*callbacks, **options).fit(module, datamodule=data)
    return outcome(module, recorder) | {"trained": [batch for *_, batch in scheduling.seen]}


def seldom(completion: str, prompt: str) -> float:
    """A reward that some prompts never earn, and the others now and then."""
    return float(int(prompt[0]) % 2 and sum(map(ord, completion)) % 3 == 0)


def run_with_budget(policy: str, output: Path, replace_flat: int = 0, **trainer_options: Any) -> dict[str, Any]:
    """Six batches of four prompts in all, of six that there are, and the last three again from a checkpoint."""
    output = output / f"budget-{replace_flat}"
    output.mkdir(exist_ok=True)
    write_prompts(output, [f"{n}+{n}=" for n in range(6)])

    def train(scheduling: Scheduling, ckpt_path: Path | None = None) -> dict[str, Any]:
        batch_size = 4 // trainer_options.get("devices", 1)
        source = str(output / "train.jsonl")
        data = PromptDataModule(policy, train=source, batch_size=batch_size)
        rewards = [RewardSpec(f"{__file__}:seldom")]
        module = make_module(policy, optimizer=momentum, rewards=rewards, num_generations=4)
        replacing = f"replace_flat:most={replace_flat}" if replace_flat else None
        plugins = chosen("greso:begin_at=0.3", "balanced:rounds=2,passed=1,failed=1", replacing)
        scheduler = RolloutScheduler(plugins=plugins)
        own = {"max_steps": 6, "max_epochs": -1, "limit_val_batches": 0, **trainer_options}
        trainer = make_trainer(scheduler, WeightSync(), scheduling, **own)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        trained = [sorted(key for key, _ in batch) for *_, batch in scheduling.seen]
        records = module.learner.history.state_dict()
        return {"trained": trained, "records": records, "weights": weights_of(module), "stream": data.state_dict()}

    return {"whole": train(Scheduling(output)), "resumed": train(Scheduling(), output / "after-3.ckpt")}


class SlotsApart(SlotGenerator):
    """Decodes with a model of its own, to which the weights travel."""

    abilities = SlotGenerator.abilities | {"own_devices", "own_weights"}
    _of: PolicySpec

    def start(self, policy: PolicySpec) -> None:
        self._of = policy
        assert policy.name == "Qwen3ForCausalLM" and isinstance(policy.module, Qwen3ForCausalLM)
        policy.save_skeleton(folder := Path(tempfile.mkdtemp(dir=Path.cwd())))
        assert json.loads((folder / "config.json").read_text())["architectures"] == [policy.name]
        bare: Any = AutoModelForCausalLM.from_config(policy.config, dtype=policy.dtype)
        super().start(PolicySpec(bare, policy.tokenizer))

    def weights(self) -> PolicyWeights:
        return self._of.weights()

    def load_weights(self, weights: Any, version: int) -> SyncReport:
        own = dict(self.policy.named_parameters())
        with torch.no_grad():
            names = [own[name].copy_(tensor) is not None and name for name, tensor in weights]
        report = super().load_weights(super().weights(), version)
        assert len(names) == len(own)
        return report


BESIDE = ("synchronous", "periodic", "asynchronous:max_staleness=1")


def run(name: str, policy: str, output: Path, **trainer_options: Any) -> dict[str, Any]:
    """Do a run that the ways to share the work do not change."""
    match name:
        case "pipeline":
            return run_pipeline(policy, output, **trainer_options)
        case "resumed":
            return run_on(policy, output, **trainer_options)
        case "replayed":
            return run_on(policy, output, replay="rlep", **trainer_options)
        case "in a mode":
            return run_on(policy, output, "april:max_staleness=3,batches_in_work=4", **trainer_options)
        case "budget":
            return run_with_budget(policy, output, **trainer_options)
        case "budget, replaced":
            return run_with_budget(policy, output, 2, **trainer_options)
        case _ if name in plugin_runs.RUNS | plugin_runs.UNEQUAL:
            return plugin_runs.run_plugin(name, Path(policy), output, **trainer_options)
        case _ if name in BESIDE:
            return run_beside(policy, output, name, **trainer_options)
        case _:
            return run_case((CASES | OTHERS)[name], policy, default_root_dir=str(output), **trainer_options)


def run_shared(sharing: Sharing, name: str, policy: str, output: Path) -> dict[str, Any]:
    """Do a run as one of two ranks."""
    devices: dict[str, Any] = {"devices": 2, "strategy": sharing.strategy}
    if not (sharing.rows or sharing.apart):
        return run(name, policy, output, **devices)
    case = (CASES | OTHERS)[name]
    more = {"sequence_parallel_size": 2} if sharing.rows else {"generator": SlotsApart()}
    return run_case(replace(case, options=case.options | more), policy, default_root_dir=str(output), **devices)


def main(policy: str, output: str) -> None:
    """Do the asked runs as one of two ranks, and save what came of them."""
    torch.set_num_threads(1)
    results = {}
    for sharing, name in json.loads(Path(output, "rows.json").read_text()):
        results[sharing, name] = run_shared(SHARINGS[sharing], name, policy, Path(output))
        print(f"rank {rank_and_world_size()} has finished {sharing}: {name}", flush=True)
    torch.save(results, Path(output) / f"rank-{rank_and_world_size()[0]}.pt")


Outcomes = dict[str, dict[str, Any]]
ALWAYS = ("token", "all_uniform_after_an_update", "not_finite_on_one_rank", "pipeline", "in a mode")
"""Runs of ddp that tests without a parameter look at."""


@pytest.fixture(scope="module")
def shared(
    policy_folder: Path, hybrid_folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[tuple[str, str], dict[str, Any]]]:
    """What came of the runs that the selected tests look at, on rank 0 and on rank 1."""
    assert hybrid_folder.is_relative_to(policy_folder)
    plugin_runs.save_policies(policy_folder)
    output = tmp_path_factory.mktemp("two_ranks")
    items = [item for item in request.session.items if item.path == request.path]
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
    asked = [("ddp", name) for name in ALWAYS]
    asked += [(each.get("sharing", "ddp"), each["name"]) for each in parameters]
    (output / "rows.json").write_text(json.dumps(list(dict.fromkeys(asked))))
    python_path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(policy_folder), str(output)]
    process = forks.run(command, 500, env=environment, cwd=output)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return [torch.load(output / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.fixture(scope="module")
def ranks(shared: list[dict[tuple[str, str], dict[str, Any]]]) -> list[Outcomes]:
    """What came of the runs with ddp."""
    return [{name: of_run for (sharing, name), of_run in each.items() if sharing == "ddp"} for each in shared]


@pytest.fixture(scope="module")
def single(
    policy_folder: Path, hybrid_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """What comes of a run in one process over all groups."""
    assert hybrid_folder.is_relative_to(policy_folder)
    plugin_runs.save_policies(policy_folder)
    output = tmp_path_factory.mktemp("one_rank")
    return functools.cache(lambda name: run(name, str(policy_folder), output))


@pytest.mark.parametrize(("sharing", "name"), table_rows(ROWS, QUICK))
def test_two_ranks_end_with_the_weights_and_the_metrics_of_one_process(
    sharing: str,
    name: str,
    shared: list[dict[tuple[str, str], dict[str, Any]]],
    single: Callable[[str], dict[str, Any]],
) -> None:
    first, second = (outcomes[sharing, name] for outcomes in shared)
    assert_ranks_end_as_one(first, second, single(name))
    torch.testing.assert_close(first["weights"], single(name)["weights"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", table_rows(plugin_runs.RUNS, QUICK_PLUGINS))
def test_each_plug_in_logs_the_columns_of_one_process_on_two_ranks(
    name: str, ranks: list[Outcomes], single: Callable[[str], dict[str, Any]]
) -> None:
    """All of them, those of validations too, and with the same weights at the end."""
    first, second, alone = ranks[0][name], ranks[1][name], single(name)
    for ours, theirs, its in zip(first["logs"], second["logs"], alone["logs"], strict=True):
        assert ours.keys() == its.keys()
        assert ours == pytest.approx(theirs, nan_ok=True)
        wrong = {key: (ours[key], its[key]) for key in ours if ours[key] != pytest.approx(its[key], 1e-3, 1e-5, True)}
        assert wrong == {}
    assert torch.equal(first["weights"], second["weights"]) and len(first["logs"]) == 3
    assert relative_error(first["weights"], alone["weights"]) < 1e-5


@pytest.mark.parametrize("name", table_rows(plugin_runs.UNEQUAL, ("knapsack",)))
def test_what_each_rank_does_for_its_own_prompts_is_logged_for_both(
    name: str, ranks: list[Outcomes], single: Callable[[str], dict[str, Any]]
) -> None:
    first, second, alone = ranks[0][name], ranks[1][name], single(name)
    assert len(first["logs"]) == 3 and torch.equal(first["weights"], second["weights"])
    for ours, theirs in zip(first["logs"], second["logs"], strict=True):
        assert ours == pytest.approx(theirs, nan_ok=True)
    assert {*itertools.chain(*first["logs"])} == {*itertools.chain(*alone["logs"])}


def test_each_plug_in_is_in_one_of_the_tables() -> None:
    rows = [each for specs, _ in (plugin_runs.RUNS | plugin_runs.UNEQUAL).values() for each in specs]
    assert names_of(rows) | plugin_runs.APART.keys() == shipped().keys()


def names_of(specs: list[Any]) -> set[str]:
    return {each.partition(":")[0] if isinstance(each, str) else next(iter(each)) for each in specs}


def test_a_step_in_which_no_rank_has_anything_to_learn_counts_and_moves_no_weight(ranks: list[Outcomes]) -> None:
    """The first batches of these two cases are the same; momentum and weight decay wait."""
    before = torch.cat([parameter.detach().flatten() for parameter in random_policy().parameters()])
    for outcomes in ranks:
        once, twice = outcomes["token"], outcomes["all_uniform_after_an_update"]
        assert (once["version"], twice["version"]) == (1, 2)
        assert torch.equal(once["weights"], twice["weights"]) and not torch.equal(once["weights"], before)


def test_a_gradient_that_is_not_finite_on_one_rank_is_left_out_on_all(ranks: list[Outcomes]) -> None:
    for outcomes in ranks:
        assert [logs["update/skipped"] for logs in outcomes["not_finite_on_one_rank"]["logs"]] == [1.0, 0.0]


def test_pass_at_k_is_taken_over_the_prompts_of_both_ranks(
    ranks: list[Outcomes], single: Callable[[str], dict[str, Any]]
) -> None:
    """Three prompts, so that rank 1 has one fewer than rank 0."""
    expected = single("pipeline")["validation"]
    assert 0 < expected["val/pass@1"] < expected["val/pass@2"] < expected["val/pass@4"]
    for outcomes in ranks:
        assert outcomes["pipeline"]["validation"] == pytest.approx(expected)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["resumed"])
def test_each_rank_goes_on_with_what_it_had_learned_of_lengths(name: str, ranks: list[Outcomes]) -> None:
    wholes, resumed = ([outcomes[name][part] for outcomes in ranks] for part in ("whole", "resumed"))
    assert wholes[0] != wholes[1]
    for whole, again in zip(wholes, resumed, strict=True):
        assert len(whole) == 6 and again == whole[3:]


def test_ranks_have_prompts_of_their_own_in_work_and_go_on_with_them(ranks: list[Outcomes]) -> None:
    wholes, resumed = ([outcomes["in a mode"][name] for outcomes in ranks] for name in ("whole", "resumed"))
    for whole, again in zip(wholes, resumed, strict=True):
        assert len(whole) == 6 and again == whole[3:]
    trained = [[each for *_, batch in whole for each in batch] for whole in wholes]
    keys = [key for each in trained for key, _ in each]
    assert len(keys) == len({*keys}) == 2 * 6 * 24
    assert all(any(len({*versions}) > 1 for _, versions in each) for each in trained)  # some went on


@pytest.mark.parametrize("name", ["budget"])
def test_two_ranks_ask_the_prompts_and_rounds_of_one_process(
    name: str, ranks: list[Outcomes], single: Callable[[str], dict[str, Any]]
) -> None:
    expected, (first, second) = single(name)["whole"], (outcomes[name]["whole"] for outcomes in ranks)
    both = [sorted(own + others) for own, others in zip(first["trained"], second["trained"], strict=True)]
    assert both == expected["trained"]
    assert {len(batch) for batch in both} > {16}  # some groups had further rounds
    assert len({key[:2] for batch in both for key in batch}) == 6 * 4
    assert first["records"] == second["records"] and first["records"].keys() == expected["records"].keys()
    torch.testing.assert_close(first["weights"], expected["weights"], rtol=0, atol=2e-5)
    assert relative_error(first["weights"], expected["weights"]) < 2e-6


@pytest.mark.parametrize("name", table_rows(["budget", "budget, replaced"], ["budget"]))
def test_ranks_go_on_with_their_budget_as_if_nothing_had_been(name: str, ranks: list[Outcomes]) -> None:
    for outcomes in ranks:
        whole, resumed = outcomes[name]["whole"], outcomes[name]["resumed"]
        assert resumed["trained"] == whole["trained"][3:] and resumed["records"] == whole["records"]
        assert torch.equal(resumed["weights"], whole["weights"]) and resumed["stream"] == whole["stream"]
    first, second = (outcomes[name]["whole"] for outcomes in ranks)
    assert first["stream"] == second["stream"] and torch.equal(first["weights"], second["weights"])
    keys = [key for outcome in (first, second) for batch in outcome["trained"] for key in batch]
    assert len(keys) == len({*keys})


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["replayed"])
def test_ranks_replay_what_any_of_them_has_sampled_and_go_on_with_it(name: str, ranks: list[Outcomes]) -> None:
    wholes, resumed = ([outcomes[name][part] for outcomes in ranks] for part in ("whole", "resumed"))
    for whole, again in zip(wholes, resumed, strict=True):
        assert len(whole) == 6 and again == whole[3:]
    sampled = [{(key[0], tuple(tokens)) for *_, those, _ in whole[:3] for key, tokens in those} for whole in wholes]
    replayed = [{(key[0], tuple(tokens)) for *_, some, _, _ in whole for key, tokens, _ in some} for whole in wholes]
    assert all(replayed) and replayed[0] | replayed[1] <= sampled[0] | sampled[1]
    assert replayed[0] & sampled[1] or replayed[1] & sampled[0]  # of a prompt that has come to the other rank


@pytest.mark.parametrize("name", table_rows(BESIDE, BESIDE[2:]))
def test_ranks_that_decode_beside_their_updates_stay_one_policy_and_lose_nothing(
    name: str, ranks: list[Outcomes]
) -> None:
    both = [outcomes[name] for outcomes in ranks]
    assert torch.equal(both[0]["weights"], both[1]["weights"]) and both[0]["version"] == both[1]["version"] == 4
    trained = [each for one in both for batch in one["trained"] for each in batch]
    assert len(trained) == len({key for key, _ in trained}) and len({key[:2] for key, _ in trained}) == 4 * 4
    ages = {
        version - age for one in both for version, batch in enumerate(one["trained"]) for _, own in batch for age in own
    }
    assert ages == ({0, 1} if "asynchronous" in name else {0})
    if name == "periodic":
        expected = ranks[0]["synchronous"]["weights"]
        assert relative_error(both[0]["weights"], expected) < 1e-6


if __name__ == "__main__":
    main(*sys.argv[1:])
