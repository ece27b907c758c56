"""The loss of routers over the global batch: transformers' own value and gradient, however a step is cut."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import transformers
from conftest import random_policy, table_rows
from test_learner import make_learner, ragged_groups
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from lit_grpo.methods import make_plugins
from lit_grpo.methods.router_loss import RouterLoss
from lit_grpo.methods.seco import SeCO
from lit_grpo.types import RolloutGroup


def policy() -> Any:
    torch.manual_seed(5)
    config = cast("Any", transformers.Qwen3MoeConfig)(
        vocab_size=32, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=6, num_experts_per_tok=2,
        mlp_only_layers=[1], max_position_embeddings=128,
    )  # fmt: skip
    made = transformers.Qwen3MoeForCausalLM(config)
    for name, parameter in made.named_parameters():
        if name.endswith("gate.weight"):
            torch.nn.init.normal_(parameter, std=1.0)
    made.set_experts_implementation("eager")  # which goes in float64
    return made


def transformers_loss(groups: list[RolloutGroup], model: Any) -> torch.Tensor:
    """``load_balancing_loss_func`` of all tokens in one batch, each prompt once; ``gate_logits`` of plain forwards."""
    layers: list[list[torch.Tensor]] = [[], []]
    for group in groups:
        begin = 0
        for rollout in (one for one in group.rollouts if one.kept and one.completion.num_trained and one.advantage):
            ids = torch.cat([torch.tensor(rollout.prompt.token_ids), rollout.completion.token_ids_T[:-1]])
            logits = model(input_ids=ids[None], use_cache=False, output_router_logits=True).router_logits
            for layer, logits_TE in zip(layers, logits, strict=True):
                layer.append(logits_TE[begin:])
            begin = len(rollout.prompt.token_ids)
    return cast("Any", load_balancing_loss_func)(tuple(torch.cat(layer) for layer in layers), 6, 2)


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in model.parameters()])


@pytest.mark.parametrize("max_tokens", table_rows([9, 14, 25, 1000], [14, 1000]))
@pytest.mark.parametrize("chunks", [[], [SeCO(4)]], ids=["whole", "chunks"])
def test_value_and_gradient_are_those_of_transformers_however_a_step_is_cut(max_tokens: int, chunks: Any) -> None:
    groups = ragged_groups()
    plain, steps_of_plain = make_learner(policy=policy(), max_tokens_per_micro_batch=1000)
    plain.learn(groups)
    model = policy().double()
    expected = transformers_loss(groups, model)
    (0.3 * expected).backward()
    whole = steps_of_plain.gradients[0] + gradients(model)
    learner, steps = make_learner(
        policy=policy(), plugins=[RouterLoss(0.3), *chunks], max_tokens_per_micro_batch=max_tokens
    )
    logs = learner.learn(groups)
    assert logs["router/loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
    assert float((steps.gradients[0] - whole).norm() / gradients(model).norm()) < 1e-5  # routers soften in float32
    assert float(gradients(model).norm() / whole.norm()) > 0.01


def test_it_is_logged_without_a_weight_and_then_changes_nothing() -> None:
    plain, steps_of_plain = make_learner(policy=policy())
    plain.learn(ragged_groups())
    learner, steps = make_learner(policy=policy(), plugins=[RouterLoss(0.0)])
    assert learner.learn(ragged_groups())["router/loss"] >= 2 - 1e-6
    assert torch.equal(steps.gradients[0], steps_of_plain.gradients[0])


def test_checkpointing_changes_nothing() -> None:
    found = []
    for checkpointing in (False, True):
        model = policy()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        learner, steps = make_learner(policy=model, plugins=[RouterLoss(0.3)], gradient_checkpointing=checkpointing)
        learner.learn(ragged_groups())
        found.append(steps.gradients[0])
    torch.testing.assert_close(found[0], found[1])


def test_a_policy_without_experts_is_refused() -> None:
    learner, steps = make_learner(policy=random_policy(), plugins=[RouterLoss()])
    with pytest.raises(ValueError, match="it needs the logits of routers, which Qwen3ForCausalLM does not"):
        learner.learn(ragged_groups())
    assert steps.gradients == []
    assert make_plugins(["router_loss:coefficient=0.01"])["router_loss"] == RouterLoss(0.01)
