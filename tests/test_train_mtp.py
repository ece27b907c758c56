"""Training of the policy's own heads: their loss by plain forwards, and a policy that does not notice it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hand_made
import pytest
import torch
from safetensors.torch import load_file
from test_learner import make_learner
from torch.nn.functional import scaled_dot_product_attention

from lit_grpo.methods.train_mtp import TrainMTP
from lit_grpo.module import GRPOModule
from lit_grpo.plugins import fresh
from lit_grpo.policy.architecture.decoder import hidden_states, token_logits
from lit_grpo.policy.architecture.heads import PredictionHead, prediction_head
from lit_grpo.policy.loading import load_policy
from lit_grpo.ranks import Ranks
from lit_grpo.tools.commands.export import load_checkpoint
from lit_grpo.types import Rollout, RolloutGroup
from lit_grpo.update.plugin import TrainingRun
from tests.doubles.draft_layers import add_layer

SHIPPED = Path(__file__).parents[1] / "lit_grpo" / "policy" / "tiny_hybrid"
NO_BATCH: Any = None
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(SHIPPED, tmp_path / "base"))
    add_layer(folder, 2)
    return folder


@pytest.fixture(autouse=True)
def small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_made, "VOCAB_SIZE", 15)


def groups(model: Any) -> list[RolloutGroup]:
    return hand_made.random_groups(model, REWARDS)


def begun(model: Any, **fields: Any) -> TrainMTP:
    plugin = fresh(TrainMTP(**fields))
    plugin.on_train_start(TrainingRun(model, None, 0, 1, Ranks(torch.device("cpu"))))
    return plugin


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)


def loss_by_sequences(model: Any, head: PredictionHead, rollouts: Sequence[Rollout]) -> torch.Tensor:
    """The mean over all tokens that are trained on, one sequence after another."""
    losses = list[torch.Tensor]()
    for rollout in rollouts:
        begin = len(rollout.prompt.token_ids)
        ids_1T = torch.tensor([[*rollout.prompt.token_ids, *rollout.completion.token_ids_T.tolist()]])
        with torch.no_grad():
            hidden_1TD = hidden_states(model, ids_1T)
        positions_1T = torch.arange(1, ids_1T.shape[1])[None]
        u_TD = head(hidden_1TD[:, :-1], ids_1T[:, 1:], positions_1T, causal)[0]  # of tokens 1 and later
        targets = range(max(begin, 2), ids_1T.shape[1])  # nothing predicts token 1
        logprobs_TV = token_logits(model, u_TD).log_softmax(-1)
        losses.append(-torch.stack([logprobs_TV[place - 2, ids_1T[0, place]] for place in targets]))
    return torch.cat(losses).mean()


@pytest.mark.parametrize("max_tokens", [1000, 24])
def test_its_gradient_is_that_of_sequences_by_themselves_and_the_policys_is_what_it_was(
    max_tokens: int, base: Path
) -> None:
    model = load_policy(str(base))
    plain, steps_of_plain = make_learner(policy=load_policy(str(base)), max_tokens_per_micro_batch=max_tokens)
    plain.learn(groups(model))
    policy = load_policy(str(base)).double()
    plugin = begun(policy)
    seen = dict[str, torch.Tensor]()
    take = plugin.on_optimizer_step

    def watched(step: Any) -> None:
        number = float(plugin._sums[1])
        seen.update({n: one.grad / number for n, one in plugin._layer.named_parameters() if one.grad is not None})
        take(step)

    plugin.on_optimizer_step = watched
    learner, steps = make_learner(policy=policy, plugins=[plugin], max_tokens_per_micro_batch=max_tokens)
    batch = groups(model)
    learner.learn(batch)
    assert float((steps.gradients[0] - steps_of_plain.gradients[0]).norm()) < 1e-6 * float(steps.gradients[0].norm())
    reference = PredictionHead(load_policy(str(base)).double()).requires_grad_(True)
    through = [each for group in batch for each in group.rollouts if each.advantage]
    loss = loss_by_sequences(policy, reference, through)
    loss.backward()
    losses = plugin.on_update_end(NO_BATCH)
    if max_tokens == 1000:  # else a prompt in another micro-batch is not seen
        assert losses["train_mtp/loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
        for name, weight in reference.named_parameters():
            assert weight.grad is not None and weight.grad.norm() > 0
            assert float((seen[name] - weight.grad).norm() / weight.grad.norm()) < 1e-5  # norms are in float32
    else:
        assert losses["train_mtp/loss"] == pytest.approx(float(loss.detach()), rel=0.2)
    assert policy.get_input_embeddings().weight.requires_grad


def test_training_lowers_its_loss_and_exports_and_checkpoints_have_it(base: Path, tmp_path: Path) -> None:
    module, losses = GRPOModule(str(base)), list[float]()
    module.configure_model()
    plugin = begun(module.policy, learning_rate=3e-3)
    learner, _ = make_learner(double=False, policy=module.policy, plugins=[plugin])
    batch = groups(load_policy(str(base)))
    for _ in range(6):
        learner.learn(batch)
        losses.append(plugin.on_update_end(NO_BATCH)["train_mtp/loss"])
    assert losses[-1] < 0.8 * losses[0]
    saved: dict[str, Any] = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(saved)
    torch.save(saved, tmp_path / "last.ckpt")
    loaded = load_checkpoint(tmp_path / "last.ckpt")
    before, trained = load_file(base / "model.safetensors"), prediction_head(module.policy).stored()
    for number, own in enumerate((module, loaded)):
        compared = own.export(tmp_path / str(number))
        after = load_file(tmp_path / str(number) / "model.safetensors")
        assert compared is not None and not compared.num_carried and before.keys() == after.keys()
        for name, tensor in trained.items():
            assert torch.equal(after[name], tensor) and not torch.equal(before[name], tensor)
    again = fresh(TrainMTP())
    again.load_state_dict(plugin.state_dict())
    again.on_train_start(TrainingRun(loaded.policy, None, 6, 1, Ranks(torch.device("cpu"))))
    for own, other in zip(plugin._layer.parameters(), again._layer.parameters(), strict=True):
        assert torch.equal(own, other) and other.requires_grad
        assert torch.equal(plugin._optimizer.state[own]["exp_avg"], again._optimizer.state[other]["exp_avg"])


def test_a_policy_without_heads_is_refused_before_the_run(base: Path) -> None:
    from lit_grpo.plugins import RunFacts

    run = RunFacts(1, 2, 8, 1, policy=load_policy("tiny"))
    with pytest.raises(ValueError, match="holds no layer of multi-token prediction"):
        fresh(TrainMTP()).check(run)
