"""A conversation that the chat template writes again before each turn: a trajectory that is trained on in rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import random_policy, table_rows
from conversations import Scripted, call, only, prompts_of
from hand_made import full_logprobs, relative_error
from test_buffer import ended
from test_learner import make_learner, ragged_groups

from lit_grpo.compatibility import check_together
from lit_grpo.environments import Environments
from lit_grpo.plugins import fresh
from lit_grpo.rollout.buffer import RolloutBuffer
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.types import OBSERVED, Completion, Request, RolloutGroup, SamplingParams
from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.logprobs.reference import Reference, ReferenceSettings
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import EntropyBonus, Objective
from tests.doubles.conversation_check import check, wrong
from tests.doubles.conversations import CHATML, FAMILIES, GENERATORS, chat_tokenizer, play, template_of

THINKS = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% set parts = m.content.split('</think>') %}"
    "{% set thought = m.reasoning_content or (parts[0].split('<think>')[-1] if parts | length > 1 else '') %}"
    "{% if thought and loop.index0 > ns.last %}{{ '<think>' + thought + '</think>' }}{% endif %}{{ parts[-1] }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Qwen3's: reasoning before the last user message is left out."""
TOKENIZER = chat_tokenizer(THINKS)
SAMPLING = SamplingParams(max_tokens=400, max_observed=400)


class Asks:
    """Asks three times, and then gives a reward; a tool looks something up."""

    def reset(self, **_: Any) -> str:
        self._left = 3
        return " Ready?"

    def look(self) -> str:
        """Look something up."""
        return "found"

    def respond(self, text: str) -> str | None:
        self._left -= 1
        return f"And {self._left}?" if self._left else None

    def get_reward(self) -> float:
        return 1.0


def says(request: Request, _: int) -> str:
    """A thought in each turn, and a call in the second, by the seed: it is another one for each turn."""
    turn = request.seed
    return f"<think>thought {turn}</think>" + (call("look") if turn == 1 else f"Answer {turn}.")


def talk(
    num_generations: int = 1,
    tokenizer: Any = TOKENIZER,
    says: Any = says,
    sampling: SamplingParams = SAMPLING,
    factory: type = Asks,
    **options: Any,
) -> tuple[list[RolloutGroup], dict[str, float]]:
    worker = fresh(Environments(factory=factory, history="rerendered", **options))
    worker.prepare(tokenizer, {})
    loop = RolloutLoop(Scripted(tokenizer, says), listeners=[worker])
    try:
        groups, stats = loop.collect(prompts_of(worker, [{"prompt": "Go."}]), num_generations, sampling, seed=0)
        return groups, worker.metrics() | {"num_discarded": stats.num_discarded}
    finally:
        worker.close()


def test_a_turn_that_the_template_refuses_to_write_is_the_last(caplog: pytest.LogCaptureFixture) -> None:
    """As Llama's, which takes one call in a turn."""
    one_call = "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}"
    tokenizer = chat_tokenizer(one_call + "{% endif %}{% endfor %}" + THINKS)
    calls = {0: "Answer 0.", 1: call("look") + call("look")}
    groups, metrics = talk(tokenizer=tokenizer, says=lambda request, _: calls[request.seed])
    completion = only(groups)
    assert [tokenizer.decode(turn).removesuffix("<|im_end|>") for turn in completion.turns] == list(calls.values())
    assert completion.finish_reason == "length" and metrics["environments/cut_short"] == 1
    assert "A turn of the policy is refused by the chat template: one" in caplog.text


BEGIN = "<|im_start|>user\nGo. Ready?<|im_end|>\n<|im_start|>assistant\n"
ASKED = "<|im_end|>\n<|im_start|>user\nAnd {}?<|im_end|>\n<|im_start|>assistant\n"
LOOKED = (
    '<think>thought 1</think><tool_call>{"name": "look", "arguments": {}}</tool_call><|im_end|>\n'
    "<|im_start|>tool\nfound<|im_end|>\n<|im_start|>assistant\n"
)
FORGOTTEN = LOOKED.replace("<think>thought 1</think>", "")


def test_each_turn_is_sampled_after_the_conversation_as_the_template_writes_it_then() -> None:
    groups, metrics = talk()
    completion = only(groups)
    prompt = list(completion.request.prompt.token_ids)
    first = "Answer 0." + ASKED.format(2)
    expected = [
        BEGIN,
        BEGIN + first,
        BEGIN + first + LOOKED,  # a tool's answer leaves the thought before it
        BEGIN + first + FORGOTTEN + "Answer 2." + ASKED.format(1),
    ]
    assert [TOKENIZER.decode([*prompt, *context]) for context in completion.contexts] == expected
    spoken = ["<think>thought 0</think>Answer 0.", LOOKED.split("<|im_end|>")[0], "<think>thought 2</think>Answer 2."]
    spoken += ["<think>thought 3</think>Answer 3."]
    assert [TOKENIZER.decode(turn) for turn in completion.turns] == [f"{each}<|im_end|>" for each in spoken]
    assert completion.finish_reason == "stop"
    assert completion.text == TOKENIZER.decode(completion.sampled_ids, skip_special_tokens=True)
    assert metrics["environments/turns"] == metrics["environments/rows"] == 4
    assert metrics["num_discarded"] == 0
    assert completion.request.seed == 0 and completion.request.prefix.num_tokens == 0


def test_max_tokens_are_those_of_all_turns_together() -> None:
    whole = only(talk()[0])
    for most in (30, 45, whole.num_sampled - 1, whole.num_sampled):
        completion = only(talk(sampling=replace(SAMPLING, max_tokens=most))[0])
        assert completion.num_sampled == most and completion.sampled_ids == whole.sampled_ids[:most]
        assert completion.finish_reason == ("stop" if most == whole.num_sampled else "length")
        assert len(completion.contexts) == len(completion.turns) == len(completion.rows)


def test_max_observed_is_that_of_one_conversation() -> None:
    longest = max(map(len, only(talk()[0]).contexts))
    assert len(only(talk(sampling=replace(SAMPLING, max_observed=longest))[0]).turns) == 4
    cut, metrics = talk(sampling=replace(SAMPLING, max_observed=longest - 1))
    assert only(cut).finish_reason == "length" and len(only(cut).turns) < 4 and metrics["environments/cut_short"] == 1


def test_checkpoints_keep_what_turns_were_sampled_after() -> None:
    groups, _ = talk()
    buffer, other = RolloutBuffer(), RolloutBuffer()
    buffer.open([only(groups).request])
    ended(buffer, only(groups))
    other.load_state_dict(copy.deepcopy(buffer.state_dict()))
    (group,) = other.renew(0).unscored
    assert group.rollouts[0].completion.contexts == only(groups).contexts


# ---- the update -----------------------------------------------------------------------------------------


def with_contexts(groups: Sequence[RolloutGroup], forget: int) -> list[RolloutGroup]:
    """The same groups, in which turns come after what is before them here but for the first ``forget`` tokens."""
    changed = []
    for group in groups:
        rollouts = []
        for rollout in group.rollouts:
            completion = rollout.completion
            ids, contexts = completion.token_ids_T.tolist(), []
            place = 0
            for turn in completion.turns:
                while completion.versions_T[place] == OBSERVED:
                    place += 1
                contexts.append(ids[min(forget, place) : place])
                place += len(turn)
            other = Completion(
                completion.request,
                ids,
                completion.logprobs_T,
                completion.versions_T,
                completion.finish_reason,
                trained_T=completion.trained_T,
                contexts=contexts,
            )
            rollouts.append(replace(rollout, completion=other))
        changed.append(RolloutGroup(group.prompt, rollouts))
    return changed


EVERY = Objective(kl=KLTerm(0.1), entropy=EntropyBonus(0.05))


@pytest.mark.parametrize("shares_prefix", [True, False])
@pytest.mark.parametrize(
    ("objective", "changes"),
    [
        (EVERY, {}),
        (replace(EVERY, proximal="recomputed"), {"num_iterations": 2}),
        (Objective(kl=KLTerm(0.1, place="reward")), {}),
        (Objective(top_entropy_quantile=0.5), {}),
        (Objective("dr_grpo"), {}),
        (Objective(), {"advantages": Advantages("least_variance")}),
    ],
)
def test_rows_with_all_that_was_before_them_are_the_one_row_they_stand_for(
    objective: Objective, changes: dict[str, Any], shares_prefix: bool
) -> None:
    found = []
    for groups in (ragged_groups(), with_contexts(ragged_groups(), forget=0)):
        learner, steps = make_learner(objective=objective, max_tokens=64, shares_prefix=shares_prefix, **changes)
        other: Any = random_policy(seed=1).double()
        learner.reference = Reference(other, torch.device("cpu"), ReferenceSettings())
        found.append((learner.learn(groups), steps.gradients, [r.advantage for g in groups for r in g.rollouts]))
    (logs, gradients, advantages), (of_rows, others, same) = found
    assert advantages == pytest.approx(same, nan_ok=True)
    for gradient, other in zip(gradients, others, strict=True):
        assert relative_error(other, gradient) < 1e-6 and float(gradient.norm()) > 1e-4
    del logs["sampling/ess_sequence"], of_rows["sampling/ess_sequence"]  # which is that of rows
    assert of_rows == pytest.approx(logs, rel=1e-6, abs=1e-9, nan_ok=True)


def test_the_gradient_is_that_of_each_turn_after_its_own_context() -> None:
    """By plain forwards of each row in float64; the denominator is that of all sampled tokens."""
    groups = with_contexts(ragged_groups(), forget=2)
    policy: Any = random_policy().double()
    for group in groups:
        for rollout in group.rollouts:
            values = [full_logprobs(policy, row)[row.completion.trained_T] for row in rollout.rows]
            logprobs_T = rollout.completion.logprobs_T.clone()
            logprobs_T[rollout.completion.trained_T] = torch.cat([torch.empty(0), *values])
            rollout.completion.logprobs_T = logprobs_T
    learner, steps = make_learner(max_tokens=64)
    learner.learn(groups)
    policy.train()
    total, loss = 0, torch.tensor(0.0)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        if not rollout.kept or not rollout.completion.num_trained:
            continue
        total += rollout.completion.num_trained
        for row in rollout.rows:
            ids_T = torch.cat([torch.tensor(row.prompt.token_ids), row.completion.token_ids_T])
            logprobs_TV = policy(input_ids=ids_T[None], use_cache=False).logits[0].log_softmax(-1)
            begin = len(row.prompt.token_ids)
            logprobs_T = logprobs_TV[begin - 1 : -1].gather(-1, ids_T[begin:, None])[:, 0]
            loss = loss - rollout.advantage * logprobs_T[row.completion.trained_T].sum()
    (loss / total).backward()
    expected = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
    assert relative_error(steps.gradients[0], expected) < 1e-6


WRITES_ALL = [family for family in FAMILIES if family != "llama3_1"]  # which refuses two calls in a turn


@pytest.mark.parametrize("family", table_rows(WRITES_ALL, quick=[]))
def test_random_conversations_are_trained_on_as_they_were_sampled(family: str) -> None:
    if template_of(family) is None:
        pytest.skip("TRL, whose wheel has the templates, is not installed")
    assert wrong(check(play(family, GENERATORS["slots"], 6, history="rerendered")), "slots") == []


# ---- what it goes with ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (Objective("grpo"), "model.objective.normalization sequence needs each completion in one row of the update"),
        (Objective("gspo"), "model.objective.ratio sequence needs each completion"),
        (Objective(off_policy_threshold=0.1), r"model\.objective\.off_policy_threshold 0\.1 needs each completion"),
    ],
)
def test_what_takes_a_completion_together_is_refused(objective: Objective, message: str) -> None:
    rule = Environments(factory=Asks, history="rerendered")
    part = rule.requirement("rollout.plugins environments")
    with pytest.raises(ValueError, match=f"{message}.* makes each turn a row of its own; set its history to appended"):
        check_together([*objective.parts, part])
    plain = Environments(factory=Asks)
    check_together([*objective.parts, plain.requirement("environments")])


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (THINKS, "differently after a user's answer to a turn with reasoning; with history rerendered each turn is"),
        (CHATML, "a row of its own in the update; the chat template only adds to conversations"),
    ],
)
def test_the_user_is_told_once(template: str, sentence: str, caplog: pytest.LogCaptureFixture) -> None:
    worker = fresh(Environments(factory=Asks, history="rerendered"))
    for _ in range(2):
        worker.prepare(chat_tokenizer(template), {})
        worker.chat = None
    assert sum(sentence in record.message for record in caplog.records) == 1
