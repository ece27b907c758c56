"""Whether the tokens trained on are those that were sampled, for random conversations.

A random policy talks with an environment that answers as a tool or as the user, over up to 16 turns. What the generator
samples is noted as it comes, and what a chat template makes of each answer. Then all conversations are trained on, and
what the update reads is held to these notes by id, and to a forward of each whole conversation in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from lit_grpo.metrics import rollout_metrics
from lit_grpo.policy.architecture.decoder import decoder_of
from lit_grpo.ranks import Ranks
from lit_grpo.types import Completion, Key, Rollout
from lit_grpo.update.advantages.estimator import Advantages, GroupRewards
from lit_grpo.update.batches.microbatch import make_micro_batches
from lit_grpo.update.learner import Learner
from lit_grpo.update.learner_settings import LearnerSettings
from lit_grpo.update.logprobs.reference import Reference, ReferenceSettings
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import EntropyBonus, Objective
from tests.doubles.conversations import GROUP_SIZE, SAMPLING, Played

NUM_CONVERSATIONS = 50
LEAST_TURNS = 8
"""That the longest conversation takes at least, so that the figures are of many turns."""
NUM_REWRITTEN = 12
"""Conversations whose history is rerendered: each turn is a row of its own, with the conversation before it."""
EXACT = 1e-5
"""Max difference of a log-prob from that of the float64 forward, in nats, and of a logged figure from the true one."""
EXACT_VLLM = 2e-5
"""The same for those that vLLM's CPU build tells in float32; they were off by 9.9e-6 at most."""
Figures = dict[str, Any]
COUNTS = ("wrong_sampled", "wrong_trained", "wrong_observed", "wrong_members", "over_limits", "gradient_of_observed")
"""Figures that have to be 0."""
SHARES = ("tokens", "kl", "entropy", "mean_length")
"""Logged metrics, none of which may count an environment token; their relative errors are reported."""


class Exact(NamedTuple):
    """A float64 forward of a whole conversation: of each of its tokens that was sampled."""

    logprobs_T: torch.Tensor
    entropies_T: torch.Tensor
    reference_logprobs_T: torch.Tensor


def check(played: Played) -> Figures:
    """Return the figures of conversations: what is wrong, and by how much numbers differ."""
    rollouts = [rollout for group in played.groups for rollout in group.rollouts]
    completions = [rollout.completion for rollout in rollouts]
    row: Figures = {
        "conversations": len(rollouts),
        "most_turns": max(len(completion.turns) for completion in completions),
        "sampled": sum(completion.num_sampled for completion in completions),
        "observed": sum(completion.num_observed for completion in completions),
        "alone_at_the_end": _num_alone(played),
        "beyond_max_tokens": sum(completion.num_tokens > SAMPLING.max_tokens for completion in completions),
    }
    row["wrong_members"] = sum(
        [each.completion.request.path for each in group.rollouts] != [(sample,) for sample in range(size)]
        for groups, size in ((played.alone, 1), (played.siblings, GROUP_SIZE))
        for group in groups
    )
    row["over_limits"] = sum(
        completion.num_sampled > SAMPLING.max_tokens or completion.num_observed > SAMPLING.max_observed
        for completion in completions
    )
    _compare_ids(row, played, rollouts)
    exact = _exact(played.policy, rollouts)
    row["generator_gap"] = max(
        float((each.logprobs_T[each.trained_T] - exact[each.request.key].logprobs_T).abs().max())
        for each in completions
    )
    _compare_update(row, played, rollouts, exact)
    return row


def _num_alone(played: Played) -> int:
    """Return the number of trajectories that continued after all of their siblings had ended."""
    ends: dict[Key, list[int]] = {}
    for place, (key, _) in enumerate(played.order):
        ends.setdefault(key, []).append(place)
    num_alone = 0
    for group in played.siblings:
        of_group = [ends[rollout.completion.request.key] for rollout in group.rollouts]
        last = max(of_group, key=lambda places: places[-1])
        others = max(places[-1] for places in of_group if places is not last)
        num_alone += sum(place > others for place in last) > 1
    return num_alone


def _compare_ids(row: Figures, played: Played, rollouts: list[Rollout]) -> None:
    """Count the tokens that are not those that were sampled or said, in trajectories and in what the update reads."""
    sampled: dict[Key, list[list[int]]] = {}
    for key, turn in played.order:
        sampled.setdefault(key, []).append(turn)
    turns = {rollout.completion.request.key: rollout.completion.turns for rollout in rollouts}
    most = SAMPLING.max_tokens  # of a conversation that is rerendered, the last turn may be cut there
    row["wrong_sampled"] = sum(
        len(turns[key]) != len(each) or _joined(turns[key]) != _joined(each)[:most] for key, each in sampled.items()
    )
    row["wrong_observed"] = sum(
        observed not in played.said for rollout in rollouts for observed in _observed(rollout.completion)
    )
    rows = [each for rollout in rollouts for each in rollout.rows]
    trained: dict[int, list[int]] = {}
    for micro_batch in make_micro_batches(rows, 8192):
        token_ids = micro_batch.columns["target_id"].split(micro_batch.lengths_C.tolist())
        trained |= {place: ids_T.tolist() for place, ids_T in zip(micro_batch.rows, token_ids, strict=True)}
    by_key: dict[Key, list[list[int]]] = {key: [] for key in sampled}
    for place, each in enumerate(rows):
        prompt_id, visit, path = each.completion.request.key
        by_key[prompt_id, visit, path[:1]].append(trained[place])
    row["rows"] = len(rows)
    row["wrong_trained"] = sum(_joined(by_key[key]) != _joined(each)[:most] for key, each in sampled.items())


def _joined(turns: Sequence[Sequence[int]]) -> list[int]:
    return [token for turn in turns for token in turn]


def _observed(completion: Completion) -> Iterator[tuple[int, ...]]:
    """The stretches of tokens that were observed."""
    token_ids, begin = completion.token_ids_T.tolist(), 0
    for segment in completion.segments:
        if segment.version is None:
            yield tuple(token_ids[begin : begin + segment.num_tokens])
        begin += segment.num_tokens


def _reference(policy: Any) -> Any:
    """A policy near this one."""
    other = copy.deepcopy(policy)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.02)
    return other


@torch.no_grad()
def _exact(policy: Any, rollouts: list[Rollout]) -> dict[Key, Exact]:
    models = [copy.deepcopy(policy).double(), _reference(policy).double()]
    exact = {}
    for rollout in rollouts:
        parts = [_exact_row(models, row) for row in rollout.rows]
        exact[rollout.completion.request.key] = Exact(*(torch.cat(values) for values in zip(*parts, strict=True)))
    return exact


def _exact_row(models: Sequence[Any], rollout: Rollout) -> Exact:
    prompt, completion = torch.tensor(rollout.prompt.token_ids), rollout.completion
    input_ids_1T, trained_T = torch.cat([prompt, completion.token_ids_T])[None], completion.trained_T
    token_ids_T1 = completion.token_ids_T[trained_T][:, None]
    mine_TV, its_TV = (
        model(input_ids=input_ids_1T, use_cache=False).logits[0, len(prompt) - 1 : -1][trained_T].log_softmax(-1)
        for model in models
    )
    return Exact(
        mine_TV.gather(-1, token_ids_T1)[:, 0],
        -(mine_TV.exp() * mine_TV).sum(-1),
        its_TV.gather(-1, token_ids_T1)[:, 0],
    )


class _NoStep:
    """Takes the place of an optimizer and changes nothing."""

    policy_version = 0
    optimizer: Any = None

    def add_gradient(self, compute_loss: Callable[[], torch.Tensor], exchange: bool) -> None:
        compute_loss().backward()

    def take_step(self, scale: float = 1.0) -> float:
        return 0.0


def _compare_update(row: Figures, played: Played, rollouts: list[Rollout], exact: dict[Key, Exact]) -> None:
    """Learn from all conversations, and compare what the update computes and logs."""
    for number, rollout in enumerate(rollouts):
        rollout.reward = float(number % 3)
        rollout.rewards = {"reward": rollout.reward}
    objective = Objective(kl=KLTerm(0.1), entropy=EntropyBonus(0.05))
    settings = LearnerSettings(objective, Advantages(), {"reward": 1.0}, 1.0, SAMPLING.max_tokens, max_grad_norm=0.0)
    policy = played.policy.train()
    reference = Reference(_reference(policy), torch.device("cpu"), ReferenceSettings())
    learner = Learner(policy, _NoStep(), settings, reference)
    measured = learner.passes.by_completion(rollouts, "logprobs")
    row["update_gap"] = max(float((measured[key] - each.logprobs_T).abs().max()) for key, each in exact.items())
    settings.shares_prefix = False  # a row for each conversation, in which every token has its place
    learner.passes.laid_out.clear()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(_: Any, __: Any, inputs: dict[str, Any], output: Any) -> None:
        if output.last_hidden_state.requires_grad:
            output.last_hidden_state.retain_grad()
            seen.append((inputs["input_ids"], output.last_hidden_state))

    handle = decoder_of(policy).register_forward_hook(keep, with_kwargs=True)
    logs = learner.learn(played.groups) | rollout_metrics(
        played.groups, GroupRewards.of(played.groups, ["reward"]), 0, Ranks()
    )
    handle.remove()
    row |= _gradients([row for rollout in rollouts for row in rollout.rows], seen)
    everything = {name: torch.cat([getattr(each, name) for each in exact.values()]) for name in Exact._fields}
    difference_N = everything["reference_logprobs_T"] - everything["logprobs_T"]
    expected = {
        "tokens": float(len(difference_N)),
        "kl": float((difference_N.exp() - difference_N - 1).mean()),
        "entropy": float(everything["entropies_T"].mean()),
        "mean_length": len(difference_N) / len(rollouts),
    }
    logged = {"tokens": "update/tokens", "mean_length": "completions/mean_length"}
    for name in SHARES:
        row[f"{name}_off"] = abs(logs[logged.get(name, name)] / expected[name] - 1)


def _gradients(rollouts: list[Rollout], seen: list[tuple[torch.Tensor, torch.Tensor]]) -> Figures:
    """The largest gradient of a hidden state that predicts an observed token, and how many that predict sampled ones.

    Each last hidden state is used for the token after it alone.
    """
    read = {(*each.prompt.token_ids, *each.completion.token_ids_T[:-1].tolist()): each for each in rollouts}
    largest, num_observed, num_trained = 0.0, 0, 0
    for input_ids_BT, states_BTH in seen:
        assert states_BTH.grad is not None
        for ids_T, norms_T in zip(input_ids_BT.tolist(), states_BTH.grad.norm(dim=-1), strict=True):
            row = max((row for row in read if tuple(ids_T[: len(row)]) == row), key=len)
            begin, trained_T = len(read[row].prompt.token_ids), read[row].completion.trained_T
            before_T = norms_T[begin - 1 : len(row)]
            others_T = torch.cat([norms_T[: begin - 1], before_T[~trained_T], norms_T[len(row) :]])
            largest = max(largest, float(others_T.max()))
            num_observed += int((~trained_T).sum())
            num_trained += int((before_T[trained_T] > 0).sum())
    assert num_observed == sum(rollout.completion.num_observed for rollout in rollouts), "every row was seen once"
    return {"gradient_of_observed": largest, "with_gradient": num_trained}


def wrong(row: Figures, generator: str) -> list[str]:
    """Return what is not as it should be."""
    limits = dict.fromkeys(COUNTS, 0.0) | {f"{name}_off": EXACT for name in SHARES}
    limits |= {"update_gap": EXACT, "generator_gap": limit_of(generator)}
    found = [f"{name} {row[name]} > {limit:g}" for name, limit in limits.items() if not float(row[name]) <= limit]
    found += [f"{name} is 0" for name in ("alone_at_the_end", "beyond_max_tokens") if not row[name]]
    if row["with_gradient"] != row["sampled"]:
        found.append(f"{row['with_gradient']} of {row['sampled']} sampled tokens have a gradient")
    if int(row["most_turns"]) < LEAST_TURNS:
        found.append(f"most_turns {row['most_turns']} < {LEAST_TURNS}")
    return found


def limit_of(generator: str) -> float:
    """Return how far the log-probs that a generator tells may be from the exact ones, in nats."""
    return EXACT if generator == "slots" else EXACT_VLLM
