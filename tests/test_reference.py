"""The KL term's reference: where it lives, how it moves, and what a checkpoint keeps of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from conftest import random_policy
from hand_made import Batches, Checkpoints, fit, flat, make_module, make_step, make_trainer, random_groups, sgd

from lit_grpo.methods.tr_dpo import MovingReference
from lit_grpo.module import GRPOModule
from lit_grpo.plugins import fresh
from lit_grpo.policy.adapters import LoraSettings
from lit_grpo.ranks import Ranks
from lit_grpo.update.logprobs.reference import HostWeights, Reference, ReferenceSettings
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.plugin import TrainingRun

CPU = torch.device("cpu")
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.2, 0.5], [0.3, 0.1, 0.9, 0.0]]
KL = Objective(kl=KLTerm(0.1))


@torch.no_grad()
def walk(policy: torch.nn.Module, step: int) -> None:
    """A made-up optimizer step."""
    generator = torch.Generator().manual_seed(step)
    for parameter in policy.parameters():
        parameter += 0.01 * torch.randn(parameter.shape, generator=generator)


def vector(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().clone().flatten() for parameter in model.parameters()])


def reference_of(module: GRPOModule) -> Reference:
    assert isinstance(module.learner.reference, Reference)
    return module.learner.reference


@pytest.mark.parametrize("alpha", [0.6, 1.0])
@pytest.mark.parametrize("offload", [False, True])
def test_it_moves_as_that_of_trl(alpha: float, offload: bool) -> None:
    callbacks = pytest.importorskip("trl.trainer.callbacks")
    policy, trl_reference, first = (cast(Any, random_policy()) for _ in range(3))
    ours, plugin = Reference(first, CPU, ReferenceSettings(offload)), fresh(MovingReference(alpha, 3))
    plugin.on_train_start(TrainingRun(policy, ours.model, 0, 1, Ranks()))
    Accelerator(cpu=True)  # the callback asks for its state
    callback = callbacks.SyncRefModelCallback(trl_reference, accelerator=None)
    arguments: Any = SimpleNamespace(ref_model_sync_steps=3, ref_model_mixup_alpha=alpha)
    seen = {vector(ours.model).sum().item()}
    for step in range(1, 8):
        walk(policy, step)
        state: Any = SimpleNamespace(global_step=step)
        callback.on_step_end(arguments, state, None, model=policy)
        plugin.on_optimizer_step(make_step(version=step - 1))
        assert torch.equal(vector(ours.model), vector(trl_reference))
        seen.add(vector(ours.model).sum().item())
    assert len(seen) == 3  # as it began, and after steps 3 and 6


def test_in_a_run_it_moves_after_every_so_many_steps_and_counts_from_the_next_batch(policy_folder: Path) -> None:
    groups = random_groups(random_policy(), REWARDS, noise=0.0)
    module = make_module(
        policy_folder,
        objective=KL,
        optimizer=sgd(0.02),
        num_minibatches=3,
        plugins=[fresh(MovingReference(1.0, 3))],
    )
    recorder = fit(module, groups, groups)
    assert module.policy_version == 6
    assert torch.equal(vector(reference_of(module).model), vector(module.policy))
    fixed = make_module(policy_folder, objective=KL, optimizer=sgd(0.02), num_minibatches=3)
    beside = fit(fixed, groups, groups)
    for actual, expected in zip(recorder.gradients[:3], beside.gradients[:3], strict=True):
        assert torch.equal(flat(actual), flat(expected))
    assert recorder.logs[0]["kl"] == beside.logs[0]["kl"] > 0
    assert recorder.logs[1]["kl"] < 0.5 * beside.logs[1]["kl"]


class KeepsPlugin(pl.Callback):
    """Keeps a plug-in in checkpoints, as ``RolloutScheduler`` does."""

    def __init__(self, plugin: MovingReference) -> None:
        self.plugin = plugin

    def state_dict(self) -> dict[str, Any]:
        return self.plugin.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.plugin.load_state_dict(state_dict)


def test_a_checkpoint_keeps_it_once_it_has_moved(policy_folder: Path, tmp_path: Path) -> None:
    groups = random_groups(random_policy(), REWARDS)
    options: dict[str, Any] = {"objective": KL, "optimizer": sgd(0.02)}
    options["reference"] = ReferenceSettings(offload=True)

    def run(ckpt_path: Path | None = None) -> GRPOModule:
        plugin = fresh(MovingReference(0.3, 2))
        module = make_module(policy_folder, plugins=[plugin], **options)
        trainer = make_trainer(Checkpoints(tmp_path), KeepsPlugin(plugin))
        trainer.fit(module, Batches([groups] * 5), ckpt_path=ckpt_path)
        assert module.policy_version == 5
        return module

    whole = run()
    loaded = [torch.load(tmp_path / f"{version}.ckpt", weights_only=True) for version in range(1, 6)]
    kept = [checkpoint["callbacks"].get("KeepsPlugin", {}) for checkpoint in loaded]
    assert kept[0] == {} and all(isinstance(tensor, torch.Tensor) for tensor in kept[1].values())
    for version in (1, 3):
        resumed = run(tmp_path / f"{version}.ckpt")
        assert torch.equal(vector(resumed.policy), vector(whole.policy))
        assert torch.equal(vector(reference_of(resumed).model), vector(reference_of(whole).model))


@torch.no_grad()
def test_lent_weights_are_a_copy_that_is_gone_afterwards() -> None:
    model = random_policy()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = HostWeights(model, pinned=False)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with weights.lent_to(CPU):
        assert not {parameter.data_ptr() for parameter in model.parameters()} & set(addresses)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(MemoryError), weights.lent_to(CPU):
        raise MemoryError
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Order(pl.Callback):
    """Notes what happens in a batch: the reference is lent (L), goes forward (r), is given back (G); the policy (p)."""

    def __init__(self) -> None:
        self.events = ""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        reference, host = reference_of(pl_module), reference_of(pl_module)._host
        assert host is not None
        lent_to = host.lent_to

        @contextmanager
        def noted(device: torch.device) -> Iterator[None]:
            self.note("L")
            with lent_to(device):
                yield
            self.note("G")

        host.lent_to = noted
        reference.model.get_decoder().register_forward_pre_hook(lambda *_: self.note("r"))
        pl_module.policy.get_decoder().register_forward_pre_hook(lambda *_: self.note("p"))

    def note(self, event: str) -> None:
        self.events += event


def test_offloaded_it_is_there_for_one_pass_before_all_updates_of_a_batch(policy_folder: Path) -> None:
    groups = random_groups(random_policy(), REWARDS)
    options: dict[str, Any] = {"objective": KL, "num_iterations": 2, "max_tokens_per_micro_batch": 60}
    order = Order()
    offloaded = fit(
        make_module(policy_folder, reference=ReferenceSettings(offload=True), **options), groups, callbacks=[order]
    )
    num_micro_batches = order.events.count("r")
    assert num_micro_batches > 1
    assert order.events == "L" + "r" * num_micro_batches + "G" + "p" * 2 * num_micro_batches
    resident = fit(make_module(policy_folder, **options), groups)
    for actual, expected in zip(offloaded.gradients, resident.gradients, strict=True):
        assert torch.equal(flat(actual), flat(expected))


def test_weights_that_there_are_not_are_not_offloaded(policy_folder: Path) -> None:
    offloaded = ReferenceSettings(offload=True)
    with pytest.raises(ValueError, match=r"offload true needs a KL term, but .*kl\.beta 0\.0 leaves it out; set"):
        make_module(policy_folder, reference=offloaded)
    with pytest.raises(ValueError, match=r"offload true needs a reference whose .* model\.lora takes the policy"):
        make_module(policy_folder, objective=KL, lora=LoraSettings(), reference=offloaded)
