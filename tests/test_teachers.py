"""Learning from a teacher's log-probs: beside TRL's losses, and what is refused."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_policy, save_tokenizer
from hand_made import VOCAB_SIZE, Watching, full_logprobs, make_rollout, meet, random_groups
from test_channels import Imitated, assert_mixed_is_the_sum
from test_learner import make_learner, member, ragged_groups
from torch import distributed

from lit_grpo.checkpoints.resuming import differences, recorded_settings
from lit_grpo.methods.distill import Distill
from lit_grpo.methods.shared.teaching import divergence
from lit_grpo.plugins import fresh
from lit_grpo.policy.adapters import LoraSettings, add_adapters
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.ranks import Ranks
from lit_grpo.types import Prompt, Rollout, RolloutGroup
from lit_grpo.update.logprobs.forward import log_rest
from lit_grpo.update.logprobs.linear_head import LinearHead, linear_logprobs
from lit_grpo.update.logprobs.teacher import (
    ModelTeacher,
    TeacherSettings,
    check_num_tokens,
    check_vocabulary,
    make_teacher,
)
from lit_grpo.update.plugin import TrainingRun

pytestmark = pytest.mark.usefixtures("exact_norms")
NAN = math.nan
REWARDS = [[1.0, 0.0, 0.0, 1.0]] * 2
CPU = torch.device("cpu")


def teacher_of(model: Any, vocab_size: int = VOCAB_SIZE, **settings: Any) -> ModelTeacher:
    return ModelTeacher(TeacherSettings("another", **settings), vocab_size, partial(nullcontext, model))


def other_policy(seed: int = 1) -> Any:
    """A policy of the same kind, whose distributions differ clearly."""
    generator, model = torch.Generator().manual_seed(seed), random_policy().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def unrewarded(groups: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
    for rollout in rollouts_of(groups):
        rollout.reward, rollout.rewards = NAN, {"exact": None}
    return groups


def rollouts_of(groups: Sequence[RolloutGroup]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def update_of(
    groups: Sequence[RolloutGroup], plugin: Distill, teacher: Any, watching: Sequence[Watching] = (), **changes: Any
) -> tuple[torch.Tensor, Any]:
    """The gradient of one update, and its logs."""
    plugin = fresh(plugin)
    learner, steps = make_learner(plugins=[plugin, *watching], **changes)
    if teacher == "live":
        teacher = learner.policy
    plugin.on_train_start(TrainingRun(learner.policy, None, 0, 1, Ranks(), teacher=teacher_of(teacher)))
    logs = learner.learn(list(groups))
    return steps.gradients[0], logs


def gradient_of(loss: torch.Tensor, policy: Any) -> torch.Tensor:
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def logits_of(model: Any, rollout: Rollout) -> torch.Tensor:
    """Logits of a rollout's tokens by the model's own forward, alone in a batch, float64, shape (T, V)."""
    prompt, ids_T = rollout.prompt.token_ids, rollout.completion.token_ids_T
    return model(input_ids=torch.cat([torch.tensor(prompt), ids_T])[None]).logits[0, len(prompt) - 1 : -1].double()


@pytest.mark.parametrize("changes", [{}, {"max_tokens_per_micro_batch": 40}, {"shares_prefix": False}])
def test_the_gradient_of_sampled_tokens_is_that_of_trls_self_distillation(changes: dict[str, Any]) -> None:
    trl = pytest.importorskip("trl.experimental.sdpo.loss_utils")
    policy, teacher = random_policy().double(), other_policy()
    groups = unrewarded(random_groups(policy, [[0.0] * 4] * 3, noise=0.0))
    losses = [
        trl.compute_sampled_token_self_distillation_loss(
            logits_of(policy, each),
            logits_of(teacher, each).detach(),
            each.completion.token_ids_T,
            distillation_alpha=1.0,
        )
        for each in rollouts_of(groups)
    ]
    expected = gradient_of(torch.cat(losses).mean(), policy)
    found, _ = update_of(groups, Distill(), teacher, **changes)
    assert float((found - expected).norm() / expected.norm()) < 1e-6
    assert float(expected.norm()) > 1e-3


@pytest.mark.parametrize(
    ("beta", "changes"),
    [(0.0, {}), (1.0, {}), (0.3, {}), (0.3, {"max_tokens_per_micro_batch": 40}), (0.3, {"shares_prefix": False})],
)
def test_over_all_tokens_it_is_trls_generalized_jensen_shannon_divergence(beta: float, changes: dict[str, Any]) -> None:
    """With as many tokens as the vocabulary has; the tail has 1e-7 of probability then, as TRL's."""
    trl = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    policy, teacher = random_policy().double(), other_policy()
    groups = unrewarded(random_groups(policy, [[0.0] * 4] * 3, noise=0.3))
    rows = [(logits_of(policy, each), logits_of(teacher, each).detach()) for each in rollouts_of(groups)]
    own, its = (torch.cat(logits)[None] for logits in zip(*rows, strict=True))
    loss = trl.GKDTrainer.generalized_jsd_loss(own, its, torch.zeros(own.shape[:2], dtype=torch.int64), beta=beta)
    found, logs = update_of(groups, Distill(top_k=VOCAB_SIZE, beta=beta), teacher, **changes)
    expected = gradient_of(loss, policy)
    assert logs["token_loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert float((found - expected).norm() / expected.norm()) < 1e-6


def of_candidates(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of some tokens, and of all others together as the last."""
    logprobs = logits.log_softmax(-1)
    return torch.cat([logprobs.gather(-1, ids), log_rest(logprobs, ids)], -1)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_over_some_tokens_and_a_tail_is_trls(beta: float) -> None:
    trl = pytest.importorskip("trl.experimental.sdpo.loss_utils")
    generator = torch.Generator().manual_seed(0)
    own, its = (torch.randn(5, 30, generator=generator, dtype=torch.float64) * 2 for _ in range(2))
    ids = its.topk(6).indices
    mine = own.clone().requires_grad_()
    divergence(of_candidates(mine, ids), of_candidates(its, ids), beta).sum().backward()
    theirs = own.clone().requires_grad_()
    chosen, taught = (each.log_softmax(-1).gather(-1, ids) for each in (theirs, its))
    with_their_tail = trl.add_tail_bucket(chosen), trl.add_tail_bucket(taught)
    expected = trl.compute_divergence(*with_their_tail, beta)
    expected.sum().backward()
    assert torch.allclose(divergence(of_candidates(mine, ids), of_candidates(its, ids), beta), expected, atol=1e-12)
    assert mine.grad is not None and theirs.grad is not None
    assert torch.allclose(mine.grad, theirs.grad, atol=1e-12)
    assert of_candidates(its, ids).exp().sum(-1).allclose(torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("sure", [0.0, 10.0, 20.0])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_gradient_in_float32_is_that_in_float64_where_the_policy_is_sure(beta: float, sure: float) -> None:
    """Of the policy, all but exp(-sure) of the probability is one token's; 1 less a sum would be 7% off at 17."""
    generator = torch.Generator().manual_seed(1)
    own, its = (torch.randn(64, 300, generator=generator).double() * scale for scale in (1.5, 1.0))
    own[:, 7], its[:, 7] = own[:, 7] + sure, its[:, 7] + sure / 2
    ids, found = its.topk(8).indices, []
    for dtype in (torch.float64, torch.float32):
        hidden = own.float().to(dtype).clone().requires_grad_()
        logprobs, _ = linear_logprobs(hidden, torch.cat([ids[:, :1], ids], 1), LinearHead(torch.eye(300, dtype=dtype)))
        divergence(logprobs[:, 1:], of_candidates(its, ids).to(dtype), beta).sum().backward()
        assert hidden.grad is not None
        found.append(hidden.grad.double())
    exact, rounded = found
    assert float(((rounded - exact).norm(dim=1) / exact.norm(dim=1)).max()) < 1e-4


def test_the_gradient_of_a_few_likeliest_tokens_is_that_of_finite_differences() -> None:
    """With the forward KL where the teacher is open; along a random direction of all weights."""
    teacher, groups = other_policy(), unrewarded(random_groups(random_policy(), [[0.0] * 4] * 2))
    logits = [logits_of(teacher, each) for each in rollouts_of(groups)]
    tails = [of_candidates(each, each.topk(5).indices) for each in logits]
    entropies = torch.cat([-(tail.exp() * tail).sum(-1) for tail in tails]).detach().sort().values
    limit = float(entropies[len(entropies) // 2 :][:2].mean())
    plugin = Distill(weight=0.7, top_k=5, beta=0.4, entropy_above=limit)
    found, _ = update_of(groups, plugin, teacher)
    directions = [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) for p in random_policy().parameters()
    ]

    def loss(step: float) -> float:
        policy, total, number = random_policy().double(), 0.0, 0
        with torch.no_grad():
            for parameter, direction in zip(policy.parameters(), directions, strict=True):
                parameter += step * direction
            for each in rollouts_of(groups):
                its, own = (logits_of(model, each) for model in (teacher, policy))
                taught, chosen = (of_candidates(logits, its.topk(5).indices) for logits in (its, own))
                opened = -(taught.exp() * taught).sum(-1) > limit
                total += float((divergence(chosen, taught, 0.4) + opened * divergence(chosen, taught, 0.0)).sum())
                number += len(opened)
        return 0.7 * total / number

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    expected = float(found @ torch.cat([direction.flatten().double() for direction in directions]))
    assert slope == pytest.approx(expected, rel=1e-5) and abs(slope) > 1e-3


@pytest.mark.parametrize("plugin", [Distill(), Distill(top_k=4), Distill(top_k=4, beta=0.5, entropy_above=0.0)])
def test_a_teacher_that_is_the_policy_teaches_nothing(plugin: Distill) -> None:
    groups = unrewarded(random_groups(random_policy().double(), [[0.0] * 4] * 2, noise=0.0))
    found, _ = update_of(groups, plugin, "live")
    assert float(found.norm()) < 1e-6 < 1e-3 < float(update_of(groups, plugin, other_policy())[0].norm())


def test_observed_and_masked_tokens_are_neither_scored_nor_trained_on() -> None:
    """What is learned from the others does not change with what a teacher would say of them."""
    for plugin in (Distill(), Distill(top_k=3)):
        groups = unrewarded(ragged_groups())
        _, logs = update_of(groups, plugin, other_policy(), [watching := Watching()])
        assert math.isfinite(logs["grad_norm"])
        first = groups[0].rollouts[1]  # sampled, observed, sampled
        taught = watching.of(first)["candidate_ids" if plugin.top_k else "token_advantage"]
        assert len(taught) == first.completion.num_trained == 5


def test_the_last_token_is_trained_on_and_nothing_behind_it() -> None:
    """By hand: the prompt [5, 6], the completion [7, 1]; its places are those of 6 and 7."""
    rollout = make_rollout([5, 6], [7, 1], NAN, [-1.0, -2.0])
    rollout.rewards = {"exact": None}
    teacher = other_policy()
    update_of([RolloutGroup(rollout.prompt, [rollout])], Distill(weight=2.0), teacher, [watching := Watching()])
    logits = teacher(input_ids=torch.tensor([[5, 6, 7]])).logits[0].log_softmax(-1)
    expected = [2 * (float(logits[1, 7].detach()) + 1.0), 2 * (float(logits[2, 1].detach()) + 2.0)]
    assert watching.of(rollout)["token_advantage"].tolist() == pytest.approx(expected, abs=1e-6)


def test_it_adds_to_the_advantages_of_rewards() -> None:
    policy, teacher = random_policy().double(), other_policy()
    groups = random_groups(policy, REWARDS, noise=0.0)
    alone, _ = update_of(random_groups(policy, REWARDS, noise=0.0), Distill(weight=1e-12), teacher)
    both, _ = update_of(groups, Distill(weight=0.5), teacher)
    taught, _ = update_of(unrewarded(random_groups(policy, REWARDS, noise=0.0)), Distill(weight=0.5), teacher)
    assert float((both - alone - taught).norm()) < 1e-6 * float(both.norm())


def test_the_temperature_of_the_teacher_is_its_own() -> None:
    (rollout,) = rollouts_of(unrewarded(random_groups(random_policy(), [[0.0]])))
    teacher, plugin, watching = other_policy(), fresh(Distill()), Watching()
    learner, _ = make_learner(plugins=[plugin, watching], temperature=0.7)
    run = TrainingRun(learner.policy, None, 0, 1, Ranks(), teacher=teacher_of(teacher, temperature=2.0))
    plugin.on_train_start(run)
    learner.learn([RolloutGroup(rollout.prompt, [rollout])])
    expected = full_logprobs(teacher, rollout, 2.0) - rollout.completion.logprobs_T
    assert torch.allclose(watching.of(rollout)["token_advantage"], expected, atol=1e-5)


def on_a_rank(rank: int, folder: str, top_k: int) -> None:
    meet(rank, folder)
    own, logs = update_of(unrewarded(ragged_groups())[rank::2], Distill(top_k=top_k), other_policy())
    distributed.all_reduce(own)
    if rank == 0:
        torch.save((own, logs.get("token_loss", 0.0)), f"{folder}/sum.pt")
    distributed.destroy_process_group()


@pytest.mark.parametrize("top_k", [0, 3])
def test_two_ranks_learn_what_one_does(tmp_path: Path, top_k: int) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=on_a_rank, args=(n, str(tmp_path), top_k)) for n in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    both, loss = torch.load(tmp_path / "sum.pt")
    alone, logs = update_of(unrewarded(ragged_groups()), Distill(top_k=top_k), other_policy())
    assert float((both - alone).abs().max()) < 1e-10
    assert loss == pytest.approx(logs.get("token_loss", 0.0), abs=1e-6)


def test_completions_that_begin_alike_may_have_other_candidates() -> None:
    """They stand in the row once, and their teachers have read other prompts."""
    prompt = Prompt("t", (5, 4), "")
    tree = [member(prompt, sample, [0] * 44, [True] * 44, NAN) for sample in range(2)]
    token_ids_T = tree[1].completion.token_ids_T
    token_ids_T[:40] = tree[0].completion.token_ids_T[:40]
    tree[1].completion.token_ids_T = token_ids_T
    together, _ = update_of([RolloutGroup(prompt, tree)], Distill(top_k=3), other_policy())
    apart, _ = update_of([RolloutGroup(prompt, tree)], Distill(top_k=3), other_policy(), shares_prefix=False)
    assert float((together - apart).norm() / apart.norm()) < 1e-6


# ---- a moving average ---------------------------------------------------------------------------------


@pytest.mark.parametrize("adapters", [False, True])
def test_a_moving_average_follows_the_policy_and_is_restored(adapters: bool) -> None:
    policy: Any = random_policy()
    if adapters:
        add_adapters(policy, LoraSettings(r=2))
    source: Any = (policy, None)
    settings, began = TeacherSettings("average", average_rate=0.25), "bare" if adapters else "full"
    teacher = make_teacher(settings, policy, source, "float32", None, CPU, began)  # pyrefly: ignore[bad-argument-type]
    trained = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    first = {name: weight.detach().clone() for name, weight in trained.items()}
    assert isinstance(teacher, ModelTeacher) and teacher.weights().keys() >= trained.keys()
    with torch.no_grad():
        for weight in trained.values():
            weight += 1.0
    teacher.follow(policy)
    with teacher.lend() as model:
        moved = dict(model.named_parameters())
        assert all(torch.allclose(moved[name], first[name] + 0.25, atol=1e-6) for name in trained)
    assert all(torch.equal(weight, first[name] + 1.0) for name, weight in trained.items())
    plugin = fresh(Distill())
    plugin.on_train_start(TrainingRun(policy, None, 0, 1, Ranks(), teacher=teacher))
    kept = {name: weight.clone() for name, weight in plugin.state_dict().items()}
    teacher.follow(policy)
    again = fresh(Distill())
    again.load_state_dict(kept)
    again.on_train_start(TrainingRun(policy, None, 0, 1, Ranks(), teacher=teacher))
    assert all(torch.equal(teacher.weights()[name], weight) for name, weight in kept.items())


# ---- what is refused ----------------------------------------------------------------------------------


def test_a_teacher_may_have_more_tokens_and_not_fewer(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    own, its = load_tokenizer(str(tmp_path)), load_tokenizer(str(tmp_path))
    check_vocabulary("large", own, its)
    its.add_tokens(["<new>"])
    check_vocabulary("large", own, its)
    with pytest.raises(ValueError, match=r"token '<new>' has the id \d+, and the teacher does not know it; take a"):
        check_vocabulary("large", its, own)


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "warns", "refuses"),
    [
        (0, 0, 0, 0),
        (64, 0, 0, 0),
        (64, 64, 0, 0),
        (0, 64, 1, 0),
        (8, 64, 1, 0),
        (-1, 0, 0, 1),
        (-1, 64, 0, 1),
        (-1, -1, 0, 0),
    ],
)
def test_rows_that_the_teacher_lacks_are_told_of_before_the_run(
    num_tokens: int, num_rows: int, warns: int, refuses: int, tokenizer: Any, recwarn: pytest.WarningsRecorder
) -> None:
    """Numbers of rows are relative to the number of tokens of the policy's tokenizer."""
    known = len(tokenizer)
    if refuses:
        with pytest.raises(
            ValueError, match=rf"'large' has {known - 1} rows of embeddings, and the policy's token '.' has"
        ):
            check_num_tokens("large", known + num_tokens, tokenizer, known + num_rows)
    else:
        check_num_tokens("large", known + num_tokens, tokenizer, known + num_rows)
    assert len(recwarn) == warns
    if warns:
        said = (
            f"{known + num_rows} rows of embeddings and model.teacher.policy 'large' has {known + num_tokens}; a comp"
        )
        assert said in str(recwarn[0].message)


@pytest.mark.parametrize("plugin", [Distill(), Distill(top_k=3)])
def test_a_completion_is_taught_up_to_a_token_that_the_teacher_does_not_know(plugin: Distill) -> None:
    """The gradient is that of the completion cut there, with the number of tokens of the whole."""
    last = VOCAB_SIZE - 1
    small: Any = other_policy()
    small.resize_token_embeddings(last)

    def of(*completions: list[int]) -> tuple[torch.Tensor, Any]:
        rollouts = [make_rollout([5, 6], ids, NAN, sample_id=number) for number, ids in enumerate(completions)]
        for rollout in rollouts:
            rollout.rewards = {"exact": None}
            ids_T = rollout.completion.token_ids_T
            logprobs_TV = logits_of(random_policy().double(), rollout).log_softmax(-1)
            rollout.completion.logprobs_T[:] = logprobs_TV.gather(1, ids_T[:, None])[:, 0].detach()
        learner, steps = make_learner(plugins=[own := fresh(plugin)])
        own.on_train_start(TrainingRun(learner.policy, None, 0, 1, Ranks(), teacher=teacher_of(small)))
        learner.learn([RolloutGroup(rollouts[0].prompt, rollouts)])
        return steps.gradients[0], own.on_update_end(SimpleNamespace(all_gather=lambda value: [value]))  # pyrefly: ignore[bad-argument-type]

    whole, logs = of([7, 9, last, 8, 7], [4, 5, 6])
    cut, expected = of([7, 9], [4, 5, 6])
    assert logs["teacher/tokens"] == expected["teacher/tokens"] == 5
    for name in ("teacher/reverse_kl", "teacher/entropy"):
        assert logs[name] == pytest.approx(expected[name], rel=1e-6)
    assert torch.allclose(whole * 8, cut * 5, rtol=1e-6, atol=1e-9) and float(cut.norm()) > 1e-3
    nothing, logs = of([last, 7], [last])
    assert not nothing.any() and logs["teacher/tokens"] == 0


def test_more_likely_tokens_than_the_teacher_knows_are_refused_before_the_run() -> None:
    small: Any = other_policy()
    small.resize_token_embeddings(VOCAB_SIZE - 1)
    with pytest.raises(ValueError, match=rf"top_k is {VOCAB_SIZE}, and the teacher knows {VOCAB_SIZE - 1} tokens; low"):
        update_of(random_groups(random_policy(), [[0.0]]), Distill(top_k=VOCAB_SIZE), small)


@pytest.mark.parametrize("plugin", [Distill(), Distill(top_k=2)])
def test_a_teacher_that_answers_nan_teaches_nothing_and_is_named(plugin: Distill) -> None:
    broken = other_policy()
    with torch.no_grad():
        broken.get_output_embeddings().weight[9] = NAN
    learner, steps = make_learner(plugins=[plugin := fresh(plugin)], lr=1.0)
    plugin.on_train_start(TrainingRun(learner.policy, None, 0, 1, Ranks(), teacher=teacher_of(broken)))
    with pytest.raises(ValueError, match=r"gives sample \(0,\) of prompt 'train/0' the log-prob nan at its trained to"):
        learner.learn(list(unrewarded(random_groups(learner.policy, [[0.0] * 2]))))
    assert not steps.gradients


def test_a_prompt_that_is_too_long_for_the_teacher_is_refused_beforehand() -> None:
    with pytest.raises(
        ValueError, match=r"'another' has a context of \d+ tokens, and a prompt with its completion may"
    ):
        teacher_of(random_policy()).check_context(100_000)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beta": 0.5}, "beta is of the divergence .* set top_k above 0"),
        ({"entropy_above": 1.0}, "entropy_above is of the divergence"),
        ({"weight": 0.0}, "weight"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_fields_that_have_no_effect_or_no_meaning_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Distill(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "live", "offload": True}, r"model\.teacher\.offload has no effect with .*'live'; leave it out"),
        ({"policy": "base", "dtype": "nf4"}, r"model\.teacher\.dtype has no effect with"),
        ({"policy": "base", "average_rate": 0.5}, r"model\.teacher\.average_rate has no effect with"),
    ],
)
def test_settings_of_a_teacher_that_have_no_effect_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TeacherSettings(**fields)


def test_more_tokens_than_the_policy_knows_are_refused() -> None:
    facts: Any = SimpleNamespace(policy=random_policy())
    with pytest.raises(ValueError, match=r"top_k is 1000, and the policy knows \d+ tokens; lower it"):
        Distill(top_k=1000).check(facts)


def test_the_divergence_and_imitated_tokens_add_up() -> None:
    """A row whose tokens have candidates and weights of the channel ``ce``, observed ones among them."""
    parts = []
    for plugins in ([Distill(top_k=3), Imitated()], [Distill(top_k=3)], [Imitated()]):
        made = [fresh(plugin) for plugin in plugins]
        learner, steps = make_learner(plugins=made, max_tokens_per_micro_batch=60)
        for plugin in made:
            plugin.on_train_start(TrainingRun(learner.policy, None, 0, 1, Ranks(), teacher=teacher_of(other_policy())))
        learner.learn(list(unrewarded(ragged_groups())))
        parts.append(steps.gradients[0])
    assert_mixed_is_the_sum(parts)


def test_a_resumed_run_names_another_teacher() -> None:
    """A checkpoint keeps the settings of the teacher beside those of the update."""
    trainer = SimpleNamespace(callbacks=[])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    settings = SimpleNamespace(objective=None, advantages=None)
    before, now, none = (
        recorded_settings(trainer, "tiny", settings, teacher, optimizer, None)
        for teacher in (TeacherSettings("base"), TeacherSettings("live"), None)
    )
    assert differences(before, now) == {
        "model.teacher.policy": "model.teacher.policy was base and is now live",
    }
    assert "model.teacher.policy was base and is now None" in differences(before, none).values()
