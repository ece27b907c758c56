"""Rollouts made by hand, and a real Trainer that learns from them."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import ALPHABET, random_policy, save_tokenizer
from torch import distributed

from lit_grpo.methods import make_plugins
from lit_grpo.module import GRPOModule
from lit_grpo.plugins import Answer, Listener, Plugin, Resume
from lit_grpo.policy.sharding import full_tensor
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.ranks import Ranks
from lit_grpo.rewards import RewardSpec
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import (
    Completion,
    FinishReason,
    Key,
    PassRule,
    Prompt,
    PromptBatch,
    Request,
    Rollout,
    RolloutGroup,
    SamplingParams,
)
from lit_grpo.update.advantages.estimator import GroupRewards
from lit_grpo.update.batches.layout import PackedRow, RowPart, lay_out, lay_out_padded
from lit_grpo.update.objective.tokens import StepTotals, Tokens
from lit_grpo.update.plugin import Batch
from lit_grpo.update.step import Step

MAX_TOKENS = 12
VOCAB_SIZE = len(ALPHABET) + 2  # of conftest.random_policy
SERVER_ARGUMENTS = {"max_model_len": 128, "block_size": 32, "kv_cache_memory_bytes": 8 * 2**20, "stream_interval": 1}


def save_policy_for_vllm(folder: Path, is_long: bool = False) -> Path:
    """Save a policy of a head size that vLLM's CPU kernels know, and two prompts; return the folder.

    Args:
        folder: The folder to save in.
        is_long: Whether its completions are to be long: all tokens are likelier then than the end token.
    """
    policy: Any = random_policy(head_dim=32)
    if is_long:
        with torch.no_grad():
            policy.lm_head.weight[1] = 0.0
    policy.save_pretrained(folder)
    save_tokenizer(folder)
    (folder / "train.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2*3="}\n')
    return folder


def make_rollout(
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    reward: float = math.nan,
    logprobs: Sequence[float] | None = None,
    prompt_id: str = "train/0",
    sample_id: int = 0,
    finish_reason: FinishReason = "stop",
    version: int = 0,
) -> Rollout:
    """A rollout with these tokens; without ``logprobs`` each token had an even chance."""
    prompt = Prompt(prompt_id, tuple(prompt_ids), "")
    tokens_T = torch.tensor(completion_ids, dtype=torch.int64)
    completion = Completion(
        Request(prompt, (sample_id,), SamplingParams(max_tokens=MAX_TOKENS)),
        tokens_T,
        torch.tensor([math.log(0.5)] * len(tokens_T) if logprobs is None else logprobs, dtype=torch.float32),
        torch.full_like(tokens_T, version),
        finish_reason,
    )
    return Rollout(prompt, completion, {}, reward)


def as_groups(rollouts: Sequence[Rollout]) -> list[RolloutGroup]:
    """Rollouts by prompt."""
    by_prompt: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        by_prompt.setdefault(rollout.prompt.prompt_id, []).append(rollout)
    return [RolloutGroup(members[0].prompt, members) for members in by_prompt.values()]


def make_micro_batch(
    rollouts: Sequence[Rollout], advantages_C: Sequence[float | torch.Tensor], shared_prefix: bool = True
) -> PackedRow:
    """Lay all these rollouts out as one micro-batch."""
    prompts: dict[tuple[int, ...], list[int]] = {}
    for place, rollout in enumerate(rollouts):
        prompts.setdefault(rollout.prompt.token_ids, []).append(place)
    if shared_prefix:
        row = lay_out(rollouts, [RowPart(prompt_ids, members) for prompt_ids, members in prompts.items()])
    else:
        row = lay_out_padded(rollouts, range(len(rollouts)))
    for rollout, advantage in zip(rollouts, advantages_C, strict=True):
        rollout.columns.pop("token_advantage", None)
        if isinstance(advantage, torch.Tensor):
            rollout.columns["token_advantage"] = advantage
        rollout.advantage = 0.0 if isinstance(advantage, torch.Tensor) else advantage
    return row.filled(rollouts)


@torch.no_grad()
def full_logprobs(model: Any, rollout: Rollout, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of a rollout's completion, alone in a batch, by ``model``'s own forward and a full softmax."""
    prompt, completion = rollout.prompt.token_ids, rollout.completion.token_ids_T
    input_ids = torch.cat([torch.tensor(prompt), completion])[None]
    logits_TV = model(input_ids=input_ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs_TV = (logits_TV.double() / temperature).log_softmax(-1)
    return logprobs_TV.gather(-1, completion[:, None]).squeeze(-1).float()


def random_groups(
    model: Any, rewards_PG: Sequence[Sequence[float]], seed: int = 0, noise: float = 0.3, temperature: float = 1.0
) -> list[RolloutGroup]:
    """Groups of ragged random tokens.

    Their sampled log-probs are those of ``model`` off by ``noise`` x N(0, 1), as after an earlier update,
    so that some ratios are clipped.
    """
    generator = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high + 1, (), generator=generator))
        return torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()

    rollouts = []
    for row, rewards_G in enumerate(rewards_PG):
        prompt_ids = tokens(1, 8)
        for sample_id, reward in enumerate(rewards_G):
            rollout = make_rollout(prompt_ids, tokens(1, MAX_TOKENS), reward, None, f"train/{row}", sample_id)
            exact = full_logprobs(model, rollout, temperature)
            rollout.completion.logprobs_T = exact + noise * torch.randn(exact.shape, generator=generator)
            rollouts.append(rollout)
    return as_groups(rollouts)


left: list[Any] = []


def meet(rank: int, folder: str | Path) -> None:
    """Be one of two ranks, in a forked process; what another test has left there is no group of these two."""
    left.append(distributed.GroupMember.WORLD)  # kept, because its end would wait for threads that no fork has
    distributed.GroupMember.WORLD = None
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", world_size=2, rank=rank)
    torch.set_num_threads(1)


class Batches:
    """A loader that gives these groups, one list of them a batch."""

    def __init__(self, batches: Sequence[Sequence[RolloutGroup]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[PromptBatch]:
        for groups in self.batches:
            batch = PromptBatch([group.prompt for group in groups])
            batch.groups = list(groups)
            yield batch


class StepRecorder(pl.Callback):
    """Keeps the gradient of each optimizer step, and what was logged after each batch."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor | None]] = []
        self.logs: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        assert isinstance(pl_module, GRPOModule)
        named = pl_module.policy.named_parameters()
        self.gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in named})

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self.logs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


class Checkpoints(pl.Callback):
    """Saves one after every batch, named after the policy's version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        assert isinstance(pl_module, GRPOModule)
        trainer.save_checkpoint(self.folder / f"{pl_module.policy_version}.ckpt")


class Nudge(pl.Callback):
    """Moves the policy away from the reference, as updates would have."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        nudge(pl_module.policy)


@torch.no_grad()
def nudge(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


class Budgets(pl.Callback):
    """A budget of its own for each batch; notes how many micro-batches that made."""

    def __init__(self, budgets: Sequence[int]) -> None:
        self.budgets = budgets
        self.num_forwards: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        pl_module.policy.get_decoder().register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num_forwards[-1] += 1

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, GRPOModule)
        pl_module.settings.max_tokens_per_micro_batch = self.budgets[batch_idx]
        self.num_forwards.append(0)


def flat(gradient: dict[str, torch.Tensor | None]) -> torch.Tensor:
    """All gradients as one vector; a parameter without a gradient must not be among them."""
    tensors = [tensor for tensor in gradient.values() if tensor is not None]
    assert len(tensors) == len(gradient)
    return torch.cat([tensor.flatten() for tensor in tensors])


def weights_of(module: GRPOModule) -> torch.Tensor:
    """A copy of all weights as one vector; of shards, which all ranks ask for, what they are together."""
    return torch.cat([full_tensor(parameter.detach()).clone().flatten() for parameter in module.policy.parameters()])


def relative_error(actual: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """The norm of the difference over the norm of what is expected."""
    assert actual is not None and expected is not None
    return float((actual - expected).norm() / expected.norm())


def assert_ranks_end_as_one(first: dict[str, Any], second: dict[str, Any], alone: dict[str, Any]) -> None:
    """Hold what came of a run on two ranks to what came of it in one process: weights, version and metrics."""
    assert torch.equal(first["weights"], second["weights"])
    assert relative_error(first["weights"], alone["weights"]) < 2e-6
    assert first["version"] == second["version"] == alone["version"]
    assert len(first["logs"]) == len(alone["logs"]) > 0
    for ours, theirs, its in zip(first["logs"], second["logs"], alone["logs"], strict=True):
        assert ours == pytest.approx(theirs, nan_ok=True)
        assert ours == pytest.approx(its, rel=1e-4, abs=1e-5, nan_ok=True)


def differing(completion: str) -> float:
    """A reward from 0 to 1 that hardly two texts share, so that there is a signal in every group, on every CPU."""
    return zlib.crc32(completion.encode()) % 1009 / 1008


def by_text() -> RewardSpec:
    return RewardSpec(f"{__file__}:differing")


def sgd(lr: float) -> Any:
    """An optimizer factory."""
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def make_module(policy: str | Path, plugins: Sequence[Plugin] = (), **options: Any) -> GRPOModule:
    """A module that neither clips the gradient nor, unless told otherwise, changes a weight.

    It learns as ``plugins`` decide, without a scheduler that says so.
    """
    defaults: dict[str, Any] = {
        "rewards": [RewardSpec("lit_grpo.rewards.exact_match")],
        "num_generations": 4,
        "sampling": SamplingParams(max_tokens=MAX_TOKENS),
        "max_grad_norm": 0.0,
        "optimizer": sgd(0.0),
    }
    module = GRPOModule(policy=str(policy), **(defaults | options))
    module.set_plugins(*plugins)
    return module


def learning_batch(
    groups: Sequence[RolloutGroup],
    measure: Any = lambda rollouts, what: {},
    functions: Sequence[str] = (),
    progress: float = 0.0,
) -> Batch:
    """What a learner gives a plug-in, on one rank."""
    rewards = GroupRewards.of(groups, functions)
    return Batch(groups, 0, PassRule(), lambda own: [own], rewards, progress, measure)


def credited(plugin: Plugin, group: RolloutGroup, advantages: Sequence[float]) -> list[list[float]]:
    """What the tokens of a group are trained on with by a plug-in, whose rollouts have these advantages.

    For a plug-in that credits turns, one number for each turn; numbers are those that it writes, not yet rounded.
    """
    written: dict[int, list[float]] = {}

    class Read(Batch):
        def set(self, column: str, rollout: Rollout, value: Any) -> None:
            super().set(column, rollout, value)
            written[id(rollout)] = torch.as_tensor(value, dtype=torch.float64).tolist()

    for rollout, advantage in zip(group.rollouts, advantages, strict=True):
        rollout.advantage = advantage
    plugin.on_batch(Read(**vars(learning_batch([group]))).of(plugin))
    return [
        written.get(id(rollout), [rollout.advantage] * rollout.completion.num_trained) for rollout in group.rollouts
    ]


def make_step(rollouts: Sequence[Rollout] = (), measure: Any = lambda rollouts, what: {}, **changes: Any) -> Step:
    """What a learner gives a plug-in before an optimizer step, on one rank; ``changes`` are other fields."""
    totals, optimizer = StepTotals(0, 0, MAX_TOKENS), torch.optim.SGD([torch.zeros(1)])
    defaults: dict[str, Any] = {"version": 0, "progress": 0.0, "policy": None, "optimizer": optimizer, "beta": 0.0}
    defaults |= {"ranks": Ranks(), "measure": measure, "visit": lambda visitor: None, "own": totals, "totals": totals}
    defaults["values"] = {"entropy_coefficient": 0.0}
    return Step(rollouts, **(defaults | changes))


def make_tokens(**columns: torch.Tensor | None) -> Tokens:
    """The columns of a micro-batch's tokens, by the names of Tokens: ``logprob``, ``sampled_logprob``, ..."""
    return Tokens({name: values for name, values in columns.items() if values is not None})


def make_trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A quiet Trainer on one CPU that goes through its data once."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(callbacks=list(callbacks), **(defaults | options))


def fit(module: GRPOModule, *batches: Sequence[RolloutGroup], callbacks: Sequence[pl.Callback] = ()) -> StepRecorder:
    """Train on the batches, one after another."""
    recorder = StepRecorder()
    make_trainer(*callbacks, recorder).fit(module, train_dataloaders=Batches(batches))
    return recorder


def check_slots_decode_with(module: Any, atol: float = 1e-5) -> None:
    """The log-probs that SlotGenerator samples with must be those of the policy's own forward pass."""
    generator = SlotGenerator(4)
    generator.start(PolicySpec(module.policy, module.tokenizer))
    generator.load_weights(module.policy.named_parameters(), 1)
    prompts = [Prompt("a", (2, 3, 4), ""), Prompt("b", (9,), "")]
    groups, _ = RolloutLoop(generator).collect(prompts, 3, SamplingParams(max_tokens=12), seed=0)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        assert torch.allclose(rollout.completion.logprobs_T, full_logprobs(module.policy, rollout), atol=atol)


class Unshaped(Plugin):
    """A plug-in that leaves everything as it is."""

    def on_batch(self, batch: Batch) -> None:
        """Write nothing."""


class Watching(Plugin):
    """A plug-in that keeps what all others have written of rollouts before the first step, by completion."""

    def __init__(self) -> None:
        self.columns: dict[Key, dict[str, torch.Tensor]] = {}

    def on_batch(self, batch: Batch) -> None:
        self.columns |= {rollout.completion.request.key: dict(rollout.columns) for rollout in batch.rollouts}

    def of(self, rollout: Rollout) -> dict[str, torch.Tensor]:
        """The columns of a rollout."""
        return self.columns[rollout.completion.request.key]


def plugin(spec: str) -> Any:
    """The plug-in of a name with fields, as ``april:max_staleness=4``."""
    (made,) = make_plugins([spec]).values()
    return made


def chosen(*specs: str | None) -> list[str | dict[str, Any]]:
    """Those that are given, for ``RolloutScheduler(plugins=...)``."""
    return [spec for spec in specs if spec is not None]


def observed(completion: Completion) -> list[int] | None:
    """What a completion observes after a turn: at most three times, so many tokens as the turn's length says."""
    turns = completion.turns
    left = completion.request.sampling.max_tokens - completion.num_sampled
    if len(turns) > 3 or completion.finish_reason != "stop" or not left:
        return None
    return [5 + len(turns)] * (1 + len(turns[-1]) % 3)


def decode_alone(generator: Any, request: Request) -> Completion:
    """Decode one trajectory, turn after turn, without the loop."""
    while True:
        generator.submit([request])
        while not (finished := generator.step().finished):
            pass
        (completion,) = finished
        tokens = observed(completion)
        if tokens is None:
            return completion
        request = completion.request.after(completion.followed_by(tokens))


def watch_rows(learner: Any, monkeypatch: pytest.MonkeyPatch) -> list[PackedRow]:
    """The rows whose loss a learner computes from here on."""
    seen: list[PackedRow] = []
    loss = learner.passes._loss

    def watched(micro_batch: PackedRow, **others: Any) -> torch.Tensor:
        seen.append(micro_batch)
        return loss(micro_batch, **others)

    monkeypatch.setattr(learner.passes, "_loss", watched)
    return seen


def step_of(plugin: Plugin, hook: str, rollouts: Sequence[Rollout] = (), **facts: Any) -> Step:
    """A step of which these facts are known, after a plug-in has written it in a hook."""
    step = make_step(rollouts, **facts).of(plugin, hook)
    getattr(plugin, hook)(step)
    return step


class Environment(Listener):
    """Answers each turn at once, or some steps later, in another order than the turns have ended."""

    def __init__(self, most_delay: int = 0) -> None:
        self.most_delay = most_delay
        self.waiting: dict[Key, tuple[int, Request]] = {}
        self.heard: list[Key] = []
        self.finished: list[Key] = []
        self.most_away = 0
        self._rng, self._step = random.Random(0), 0

    def on_rollout_start(self, ledger: Any) -> None:
        self.ledger = ledger

    def on_turn(self, completion: Completion) -> Answer | None:
        tokens = observed(completion)
        if tokens is None:
            return None
        key = completion.request.key
        self.heard.append(key)
        request = completion.request.after(completion.followed_by(tokens))
        delay = self._rng.randint(0, self.most_delay)
        if not delay:
            return Answer(resume=[Resume(request)])
        self.waiting[key] = (self._step + delay, request)
        return Answer(hold=[key])

    def on_completion(self, completion: Completion) -> Answer | None:
        self.finished.append(completion.request.key)

    def on_step(self, events: Any) -> Answer:
        self._step += 1
        self.most_away = max(self.most_away, len(self.ledger.awaiting_env))
        return self._answer()

    def on_idle(self) -> Answer:
        self._step += 1
        return self._answer()

    def _answer(self) -> Answer:
        due = [key for key, (step, _) in self.waiting.items() if step <= self._step]
        return Answer(resume=[Resume(self.waiting.pop(key)[1]) for key in due])


def alone(own: Any) -> list[Any]:
    """Bring together what one rank has."""
    return [own]
