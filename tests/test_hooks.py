"""What a plug-in from outside may override, what its hooks may return, and what it may write in columns."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass, replace
from operator import methodcaller
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from conftest import random_policy
from hand_made import (
    as_groups,
    fit,
    learning_batch,
    make_module,
    make_rollout,
    make_step,
    make_tokens,
    random_groups,
)
from test_learner import make_learner

from lit_grpo.budgets.history import PromptHistory
from lit_grpo.methods import make_plugins, shipped
from lit_grpo.plugins import UPDATE_HOOKS, Answer, Listener, Plugin, RunNumbers, ask, check_overrides, restricted
from lit_grpo.plugins.columns import COLUMNS
from lit_grpo.plugins.hooks import HOOKS
from lit_grpo.types import OBSERVED
from lit_grpo.update.assigning import fill_batch
from lit_grpo.update.plugin import Chunk, Term

ROOT = Path(__file__).parents[1]
ROLLOUTS = [make_rollout([2, 3], [4] * (3 + n), float(n % 2), None, f"data/{n // 2}", n % 2) for n in range(4)]
GROUPS = as_groups(ROLLOUTS)
BATCH = learning_batch(GROUPS)
KEYS = [rollout.completion.request.key for rollout in ROLLOUTS]
PROMPT, REQUESTS = ROLLOUTS[0].prompt, [rollout.completion.request for rollout in ROLLOUTS]
LOGPROBS_N = torch.zeros(5, requires_grad=True) * 1.0
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "on_requests": (REQUESTS,),
    "prompt_chance": (PROMPT, None, {}),
    "rewrite": (PROMPT, None),
    "first_round": ([1, 2], 4, None),
    "shared_round": ([1, 2], 1, 4),
}


@pytest.fixture(autouse=True)
def _with_advantages() -> None:
    for rollout in ROLLOUTS:
        rollout.advantage, rollout.kept, rollout.columns = 1.0, True, {}


def made(hook: str, returned: Any) -> Plugin:
    """A plug-in whose hook returns this."""
    is_property = isinstance(getattr(Plugin, hook), property)
    own: Any = property(lambda self: returned) if is_property else lambda self, *arguments: returned
    return type("Mine", (Plugin,), {hook: own})()


def writing(columns: str, hook: str, write: Any) -> Plugin:
    """A plug-in that declares these columns, and does this with what its hook is given."""
    return type("Mine", (Plugin,), {"writes": frozenset(columns.split()), hook: lambda self, given: write(given)})()


def written(plugin: Plugin, hook: str) -> Any:
    """What a hook of the update is given, once it has written in it."""
    given: Any = {"on_batch": BATCH, "loss": make_tokens(logprob=LOGPROBS_N)}.get(hook, make_step(ROLLOUTS))
    its = given.of(plugin) if hook in ("on_batch", "loss") else given.of(plugin, hook)
    ask(plugin, hook, its)
    return its


def example(observed: bool = True, weights: Any = (1.0, 1.0)) -> Any:
    rollout = make_rollout([2], [3, 4], prompt_id="sft/1", version=OBSERVED if observed else 0)
    if weights is not None:
        rollout.columns["ce_weight"] = weights
    return rollout


# ---- what a class overrides ------------------------------------------------------------------------------


@dataclass
class Nothing(Plugin):
    width: int = 3


@dataclass
class Misspelled(Plugin):
    def on_minibatches(self, step: Any) -> None: ...


def overriding(**members: Any) -> Plugin:
    kind: Any = type("Mine", (Plugin,), members)
    return dataclass(kind)()


def named(name: str) -> Plugin:
    """A plug-in with a hook, and a method of another name beside it."""
    return overriding(**{name: lambda self, *of: None, "on_update_end": lambda self, batch: {}})


OVERRIDES: dict[str, tuple[Any, str]] = {
    "nothing": (Nothing, "overrides no hook of lit_grpo.plugins.Plugin, so it does nothing in a run"),
    "setup alone": (lambda: overriding(setup=lambda self: None), "overrides no hook"),
    "check alone": (lambda: overriding(check=lambda self, run: None), "overrides no hook"),
    "misspelled alone": (
        Misspelled,
        "has on_minibatches, which is no hook, so nothing calls it; did you mean on_minib",
    ),
    "misspelled beside another": (lambda: named("first_rounds"), "did you mean first_round"),
    "camel case": (lambda: named("onGradient"), "did you mean on_gradient"),
    "plural": (lambda: named("on_completions"), "did you mean on_completion"),
    "beginning": (lambda: named("prompt_chan"), "did you mean prompt_chance"),
    "Lightning's": (lambda: named("on_train_batch_end"), "has on_train_batch_end, which is no hook.*there are on_"),
    "an attribute": (lambda: overriding(need=frozenset(), metrics=lambda self, gather: {}), "did you mean needs"),
    "inherited": (type("Below", (Misspelled,), {}), "has on_minibatches"),
    "method for property": (lambda: overriding(numbers=lambda self: 4), "numbers as a method.*put @property above"),
    "value for method": (lambda: overriding(batch_size=4), "batch_size as a value, and it is called as a method"),
    "too few parameters": (
        lambda: overriding(first_round=lambda self, records: []),
        r"Mine.first_round takes \(self, records\), and it is called with \(self, records, num_gen",
    ),
    "no self": (lambda: overriding(on_batch=lambda: None), "on_batch takes"),
    "no such column": (
        lambda: writing("advantages", "on_batch", None),
        "'advantages' in writes, which is no column",
    ),
    "nothing like a column": (
        lambda: writing("x", "on_batch", None),
        "'x' in writes, which is no col.* there are old_",
    ),
    "a column of another hook": (
        lambda: writing("advantage weight", "on_batch", None),
        "'weight' in writes, which is written in on_minibatch, and does not override that; override it",
    ),
    "an unknown trait": (
        lambda: overriding(traits=frozenset({"evaluate"}), metrics=lambda self, gather: {}),
        "has 'evaluate' in traits, which is no trait; did you mean 'evaluates'",
    ),
    "a trait as an attribute": (
        lambda: overriding(common=True, metrics=lambda self, gather: {}),
        "has common, which nothing reads there; put 'common' into traits",
    ),
    "a number as a property": (
        lambda: overriding(num_parts=property(lambda self: 2), metrics=lambda self, gather: {}),
        r"has num_parts, which nothing reads there; give RunNumbers\(num_parts=...\) in numbers",
    ),
    "the longest prompt by itself": (
        lambda: overriding(longest_rewrite=lambda self, prompt, writer: prompt, metrics=lambda self, gather: {}),
        "has longest_rewrite, which nothing reads there; return that prompt from rewrite if .* longest=True",
    ),
    "the next state by itself": (
        lambda: overriding(next_prompt_state=lambda self, prompts, records, state: state),
        "has next_prompt_state, which nothing reads there; return that state from prompt_state, .* records and state",
    ),
    "a number out of its limits": (
        lambda: overriding(numbers=property(lambda self: RunNumbers(num_parts=0))),
        "numbers: num_parts must be at least 1, not 0",
    ),
    "one name": (lambda: overriding(writes="advantage"), "has 'advantage' as writes; give a frozenset of names of col"),
    "two moments": (
        lambda: writing("weight chunks", "on_minibatch", None),
        "has 'weight' and 'chunks' in writes, and the second is written later, .*; make two plug-ins of it",
    ),
}


@pytest.mark.parametrize(("make", "message"), [*OVERRIDES.values()])
def test_a_class_that_does_not_act_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_overrides("rollout.plugins Mine", make())


async def _later(self: Any, completion: Any) -> None: ...


def test_a_hook_that_is_async_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Mine.on_completion is async or yields"):
        check_overrides("Mine", overriding(on_completion=_later))


@pytest.mark.parametrize("name", ["_on_batches", "helper", "write", "values", "weight", "metrics_of", "hints"])
def test_methods_of_a_plug_in_s_own_may_have_other_names(name: str) -> None:
    check_overrides("Mine", named(name))


def test_a_helper_may_be_named_like_a_hook_that_is_overridden() -> None:
    check_overrides("Mine", overriding(first_rounds=3, first_round=lambda self, *of: []))


def test_what_ships_overrides_what_there_is() -> None:
    for name, plugin in shipped().items():
        check_overrides(name, plugin)


def test_both_ways_in_check_what_a_class_overrides(policy_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout.plugins test_hooks.Misspelled has on_minibatches"):
        make_plugins(["test_hooks.Misspelled"])
    with pytest.raises(ValueError, match=r"rollout.plugins Nothing overrides no hook"):
        make_module(policy_folder, [Nothing()])


# ---- what hooks return -----------------------------------------------------------------------------------

T = torch.ones
RIGHT: list[tuple[str, Any, Any]] = [
    ("metrics", {"mine": torch.tensor(1.5), "its": np.float32(2)}, {"mine": 1.5, "its": 2.0}),
    ("metrics", {"unknown": math.nan}, {"unknown": None}),
    ("on_update_end", None, {}),
    ("validate", {"loss": torch.tensor([2.0])}, {"loss": 2.0}),
    *((hook, None, None) for hook in UPDATE_HOOKS if hook.startswith("on_") or hook == "loss"),
    ("batch_size", np.int64(3), 3),
    ("first_round", np.array([2, 3]), [2, 3]),
    ("numbers", RunNumbers(num_recent=None, num_parts=cast(Any, np.int64(2))), [1, None, 0, 2, None]),
    ("on_step", Answer(drop=[KEYS[0]]), None),
    ("on_requests", [REQUESTS[1]], None),
]
WRONG: list[tuple[str, Any, str]] = [
    ("numbers", 4, "return lit_grpo.plugins.RunNumbers"),
    ("numbers", RunNumbers(num_parts=0), "num_parts must be at least 1, not 0"),
    ("numbers", RunNumbers(num_parts=cast(Any, 2.5)), "num_parts must be a whole number of at least 1, not 2.5"),
    ("batch_size", None, "must be a whole number"),
    ("numbers", RunNumbers(largest_chunk=-1), "largest_chunk must be at least 1"),
    ("numbers", RunNumbers(first_rollout=-1), "first_rollout must be at least 0"),
    ("numbers", RunNumbers(prompt_candidates=0), "prompt_candidates must be at least 1"),
    ("numbers", RunNumbers(num_recent=cast(Any, 1.5)), "num_recent must be a whole number"),
    ("prompt_chance", 1.5, "of prompt 'data/0' must be from 0 to 1, not 1.5"),
    ("prompt_chance", math.nan, "of prompt 'data/0' must be from 0 to 1, not nan"),
    ("prompt_state", [1.0], "return numbers by name"),
    ("prompt_state", {"a": None}, "gives 'a' the value None; give one number"),
    ("first_round", [4], r"a list of one number for each of 2 prompts"),
    ("first_round", [4, 0], "must be at least 1, not 0"),
    ("shared_round", [1, -1], "must be at least 0, not -1"),
    ("shared_round", None, "each of 2 prompts"),
    ("next_round", None, "must be a whole number, not None"),
    ("rewrite", "1+1=", "for prompt 'data/0'; return a Prompt of the same prompt_id"),
    ("rewrite", replace(PROMPT, prompt_id="other"), "of the same prompt_id"),
    ("rewrite", None, "returns None for prompt 'data/0'"),
    ("metrics", {"mine": T(3)}, r"gives 'mine' the value numbers of shape \(3,\); give one number by a name"),
    ("metrics", {1: 1.0}, "gives 1 the value 1.0"),
    ("on_update_end", 1.0, "returns 1.0; return numbers by name, or nothing"),
    ("validate", {"loss": "low"}, "gives 'loss' the value 'low'"),
    ("on_step", [REQUESTS[0]], "return a lit_grpo.plugins.Answer or None"),
    ("on_turn", True, "return a lit_grpo.plugins.Answer or None"),
    ("on_completion", Answer(submit=cast(Any, [KEYS[0]])), "an Answer with submit .*give a sequence of Requests"),
    ("on_group", Answer(drop=cast(Any, [REQUESTS[0]])), "an Answer with drop .*give a sequence of keys of requests"),
    ("on_idle", Answer(hold=cast(Any, "data/0")), "an Answer with hold 'data/0'"),
    ("on_requests", None, "return those of the requests it is given"),
    ("on_requests", [replace(REQUESTS[0], path=(9,))], "return those of the requests it is given"),
    ("observes", 4, "return a lit_grpo.plugins.ObservationPoint or None"),
    ("waits_in_time", 1, "return a builtins.bool"),
    ("rewards", [len], "return a sequence of lit_grpo.rewards.function.RewardFunction"),
    ("findings", ["bad"], "return a sequence of lit_grpo.findings.rewards.Finding"),
    ("state_dict", None, "return a builtins.dict"),
    ("add_members", [], r"returns \[\].*, which nothing reads; return nothing"),
    ("on_drop", Answer(), "which nothing reads; return nothing"),
    *(
        (hook, [], "which nothing reads; return nothing")
        for hook in ("on_batch", "on_minibatch", "loss", "on_gradient")
    ),
    ("on_optimizer_step", 1, "which nothing reads"),
]


def plain(value: Any) -> Any:
    """Lists and numbers, None for NaN."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


@pytest.mark.parametrize(("hook", "returned", "expected"), RIGHT)
def test_what_can_be_read_is_right(hook: str, returned: Any, expected: Any) -> None:
    found = ask(made(hook, returned), hook, *ARGUMENTS.get(hook, (BATCH,)))
    assert expected is None or plain(found) == expected


@pytest.mark.parametrize(("hook", "returned", "message"), WRONG)
def test_what_cannot_be_read_is_refused_by_name(hook: str, returned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^Mine\.{hook}\b.*{message}"):
        ask(made(hook, returned), hook, *ARGUMENTS.get(hook, (BATCH,)))


# ---- what is written in columns --------------------------------------------------------------------------

NONE = [None] * 3
RIGHT_WRITES: list[tuple[str, list[Any], str, list[Any]]] = [
    ("chosen", [True, np.True_, torch.tensor(False), None], "advantage", [1.0, 1.0, None, 1.0]),
    ("trained", [None, False, False, True], "advantage", [1.0, None, None, 1.0]),
    ("advantage", [2, 0.5, np.float32(3), torch.tensor(4.0, requires_grad=True)], "advantage", [2.0, 0.5, 3.0, 4.0]),
    ("turn_advantage", [[2.0], (2,), np.ones(1), None], "token_advantage", [[2.0] * 3, [2.0] * 4, [1.0] * 5, None]),
    ("token_advantage", [np.ones(3), [1] * 4, T(5, requires_grad=True), None], "", [[1.0] * n for n in (3, 4, 5)]),
    ("ce_weight", [[1] * 3, None, T(5, requires_grad=True), np.zeros(6)], "", [[1.0] * 3, None, [1.0] * 5, [0.0] * 6]),
    ("mask", [[True] * 3, T(4).bool(), None, np.ones(6, bool)], "", [[True] * 3, [True] * 4, None, [True] * 6]),
    ("weight", [[2] * 3, T(4).bool(), [True] * 5, None], "", [[2.0] * 3, [1.0] * 4, [1.0] * 5, None]),
    ("old_logprob", [None, -T(4), T(5) * math.nan, None], "", [None, [-1.0] * 4, [None] * 5, None]),
    ("epsilon", [T(3), [0] * 4, None, None], "", [[1.0] * 3, [0.0] * 4, None, None]),
    ("candidates", [(T(3, 2).long(), T(3, 3)), *NONE], "candidate_values", [[[1.0] * 3] * 3, *NONE]),
    ("chunks", [*NONE, [Chunk(0, 2), Chunk(2, 6, 0.0)]], "", [*NONE, [[0, 2, 1.0], [2, 6, 0.0]]]),
    ("chunks", [(), *NONE], "", [[], *NONE]),
]


@pytest.mark.parametrize(("column", "values", "found_in", "expected"), RIGHT_WRITES)
def test_what_can_be_read_is_written(column: str, values: list[Any], found_in: str, expected: list[Any]) -> None:
    def write(given: Any) -> None:
        for rollout, value in zip(ROLLOUTS, values, strict=True):
            if value is not None:
                given.set(column, rollout, value)

    written(writing(column, COLUMNS[column].hook, write), COLUMNS[column].hook)
    name = found_in or column
    found = [rollout.advantage if name == "advantage" else rollout.columns.get(name) for rollout in ROLLOUTS]
    assert plain(found) == [*expected, None][: len(ROLLOUTS)]
    assert not any(each.requires_grad for each in found if torch.is_tensor(each))


def test_the_advantage_of_a_rollout_that_is_not_trained_on_stays_none() -> None:
    def write(batch: Any) -> None:
        for column, value in (("advantage", 2.0), ("turn_advantage", [1.0]), ("token_advantage", [1.0] * 3)):
            batch.set(column, ROLLOUTS[0], value)

    ROLLOUTS[0].advantage = math.nan
    written(writing("advantage turn_advantage token_advantage", "on_batch", write), "on_batch")
    assert math.isnan(ROLLOUTS[0].advantage) and not ROLLOUTS[0].columns


def test_values_of_a_step_and_of_a_micro_batch_are_written() -> None:
    def write(step: Any) -> None:
        step["entropy_coefficient"] = 0.1
        step["term"] = term
        step.add([example(), example(weights=np.ones(2))])

    term = Term()
    step = written(writing("entropy_coefficient term examples", "on_minibatch", write), "on_minibatch")
    assert (step["entropy_coefficient"], step["term"]) == (0.1, term)  # to the last bit
    assert [plain(each.columns["ce_weight"]) for each in step.values["examples"]] == [[1.0, 1.0]] * 2

    def scale(step: Any) -> None:
        step["scale"] = torch.tensor(0.5)
        step["scale"] = np.float64(0.2)

    assert written(writing("scale", "on_gradient", scale), "on_gradient").values["scale"] == 0.1

    def of_tokens(tokens: Any) -> None:
        tokens["proximal_logprob"] = tokens.logprobs_N - 1
        tokens["added_loss"] = tokens.logprobs_N * 2
        tokens.log("mine", tokens.logprobs_N > 1)

    tokens = written(writing("proximal_logprob added_loss", "loss", of_tokens), "loss")
    assert plain(tokens.old_logprobs_N) == [-1.0] * 5 and not tokens.old_logprobs_N.requires_grad
    assert tokens.columns["added_loss"].requires_grad and plain(tokens.figures) == {"mine": [0.0] * 5}


def to(column: str, value: Any, row: int = 0) -> Any:
    """A write of a column of one rollout."""
    return methodcaller("set", column, ROLLOUTS[row], value)


def of(column: str, value: Any) -> Any:
    """A write of a column of a step or a micro-batch."""
    return methodcaller("__setitem__", column, value)


FIRST, LAST = r"gives sample \(0,\) of prompt 'data/0' the", r"gives sample \(1,\) of prompt 'data/1' the"
IDS_TK = T(3, 2).long()
WRONG_WRITES: list[tuple[str, Any, str]] = [
    ("chosen", to("chosen", None), f"{FIRST} chosen as None; give a boolean"),
    ("chosen", to("chosen", [True] * 3), rf"{FIRST} chosen of shape \(3,\); give a boolean"),
    ("chosen", to("chosen", 1.0), f"{FIRST} chosen of torch.float64; give a boolean"),
    ("chosen", to("chosen", 1, 3), f"{LAST} chosen of torch.int64; give a boolean"),
    ("trained", to("trained", 0), f"{FIRST} trained of torch.int64; give a boolean"),
    ("advantage", to("advantage", None), f"{FIRST} advantage as None; give a finite number"),
    ("advantage", to("advantage", [1.0, 2.0]), rf"{FIRST} advantage of shape \(2,\); give a finite number"),
    ("advantage", to("advantage", math.nan, 3), f"{LAST} advantage with nan; give a finite number"),
    ("advantage", to("advantage", math.inf), f"{FIRST} advantage with inf; give"),
    ("advantage", to("advantage", "a"), f"{FIRST} advantage as 'a'; give"),
    ("advantage", to("advantage", True), f"{FIRST} advantage of torch.bool; give"),
    ("turn_advantage", to("turn_advantage", [1.0, 2.0]), rf"{FIRST} turn_advantage of shape \(2,\).*its 1 turns"),
    ("turn_advantage", to("turn_advantage", 1.0), rf"{FIRST} turn_advantage of shape \(\); give"),
    ("token_advantage", to("token_advantage", T(3), 3), rf"{LAST} token_advantage of shape \(3,\).* its 6 tokens that"),
    ("token_advantage", to("token_advantage", T(3) * math.nan), f"{FIRST} token_advantage with nan at place 0"),
    ("token_advantage", to("token_advantage", {}), f"{FIRST} token_advantage as {{}}; give"),
    ("token_advantage", to("token_advantage", None), f"{FIRST} token_advantage as None; give"),
    ("ce_weight", to("ce_weight", [1.0]), rf"{FIRST} ce_weight of shape \(1,\); .*its 3 tokens, observed tokens among"),
    ("ce_weight", to("ce_weight", [1.0] * 5 + [math.inf], 3), f"{LAST} ce_weight with inf at place 5"),
    ("ce_weight", to("ce_weight", "abc"), f"{FIRST} ce_weight as 'abc'"),
    ("candidates", to("candidates", IDS_TK), f"{FIRST} candidates numbers of shape .*give two tensors, ids and values"),
    ("candidates", to("candidates", [1]), f"{FIRST} candidates .*give two tensors, ids and values"),
    ("candidates", to("candidates", (T(3, 2), T(3, 2))), "'data/0' candidate ids of torch.float32"),
    ("candidates", to("candidates", (-IDS_TK, T(3, 2))), r"'data/0' candidate ids with -1 at place \(0, 0\)"),
    ("candidates", to("candidates", (T(4, 2).long(), T(3, 2))), r"'data/0' candidate ids of shape \(4, 2\)"),
    ("candidates", to("candidates", (IDS_TK, T(3))), r"'data/0' candidate values of shape \(3,\)"),
    (
        "candidates",
        to("candidates", (IDS_TK + 2**31, T(3, 2))),
        "candidate id 2147483649; the policy has ids from 0",
    ),
    ("epsilon", to("epsilon", -T(3)), f"{FIRST} epsilon with -1 at place 0"),
    ("old_logprob", to("old_logprob", T(3)), f"{FIRST} old_logprob with 1 at place 0; give .*at most 0.001"),
    ("old_logprob", to("old_logprob", [-1.0]), rf"{FIRST} old_logprob of shape \(1,\)"),
    ("old_logprob", to("old_logprob", T(3) * -math.inf), f"{FIRST} old_logprob with -inf at place 0"),
    ("mask", to("mask", T(3)), f"{FIRST} mask of torch.float32; give a boolean"),
    ("mask", to("mask", [True]), rf"{FIRST} mask of shape \(1,\)"),
    ("weight", to("weight", -T(3)), f"{FIRST} weight with -1 at place 0; .*at least 0"),
    ("weight", to("weight", T(6) * math.nan, 3), f"{LAST} weight with nan at place 0"),
    ("weight", to("weight", T(3, 1)), rf"{FIRST} weight of shape \(3, 1\)"),
    ("weight", to("weight", T(3) * 1j), f"{FIRST} weight of torch.complex64"),
    ("weight", to("weight", "aaa"), f"{FIRST} weight as 'aaa'"),
    ("chunks", to("chunks", [Chunk(0, 2), Chunk(3, 6)], 3), r"cuts sample \(1,\) of prompt 'data/1' .*gap from 0 to 6"),
    ("chunks", to("chunks", [Chunk(0, 3)], 3), "without a gap"),
    ("chunks", to("chunks", [Chunk(0, 6, -1.0)], 3), "weights of 0 or more"),
    ("chunks", to("chunks", [(0, 6)], 3), r"cuts sample \(1,\) of prompt 'data/1' into \[\(0, 6\)\].*; give Chunks"),
    ("chunks", to("chunks", None), r"cuts sample \(0,\) of prompt 'data/0' into \[None\]"),
    (
        "examples",
        lambda step: step.add([example(observed=False)]),
        r"sample \(0,\) of prompt 'sft/1' tokens that are trained on by advantages",
    ),
    ("examples", lambda step: step.add([example(weights=None)]), "no ce_weight, so nothing is imitated"),
    ("examples", lambda step: step.add([example(weights=[1.0])]), r"'sft/1' the ce_weight of shape \(1,\)"),
    ("examples", lambda step: step.add(None), "adds None; add a list of Rollouts"),
    ("examples", lambda step: step.add(example()), "add a list of Rollouts"),
    ("examples", lambda step: step.add([1]), "adds 1; add Rollouts"),
    ("term", of("term", 0.5), "gives the step the term 0.5; give a Term"),
    ("term", of("term", Term), "give a Term"),
    (
        "entropy_coefficient",
        of("entropy_coefficient", math.inf),
        "the entropy_coefficient with inf; give a fin",
    ),
    ("entropy_coefficient", of("entropy_coefficient", "0.1"), "the step the entropy_coefficient as '0.1'"),
    ("scale", of("scale", None), "the step the scale as None; give a finite number of at least 0"),
    ("scale", of("scale", -0.5), "the step the scale with -0.5"),
    ("scale", of("scale", math.nan), "the step the scale with nan"),
    ("scale", of("scale", True), "the step the scale of torch.bool"),
    ("added_loss", of("added_loss", 1.0), "gives tokens the added_loss 1.0; give a tensor on cpu"),
    ("added_loss", of("added_loss", T(4)), r"the added_loss of shape \(4,\)"),
    ("added_loss", of("added_loss", T(5)), "an added_loss without a gradient; compute it from tokens"),
    ("added_loss", of("added_loss", LOGPROBS_N + math.nan), "the added_loss with nan at place 0"),
    ("proximal_logprob", of("proximal_logprob", T(5)), "the proximal_logprob with 1 at place 0"),
    ("proximal_logprob", of("proximal_logprob", -T(4)), r"the proximal_logprob of shape \(4,\)"),
    ("added_loss", lambda tokens: tokens.log("mine", torch.tensor(1.0)), r"the mine of shape \(\); .*each of 5 tokens"),
    ("added_loss", lambda tokens: tokens.log("mine", 1.0), "the mine 1.0; give a tensor on cpu"),
]


@pytest.mark.parametrize(("column", "write", "message"), WRONG_WRITES)
def test_what_cannot_be_read_is_not_written(column: str, write: Any, message: str) -> None:
    hook = COLUMNS[column].hook
    with pytest.raises(ValueError, match=rf"^Mine\.{hook}\b.*{message}"):
        written(writing(column, hook, write), hook)
    assert not any(rollout.columns for rollout in ROLLOUTS)


STRANGER = make_rollout([2, 3], [4], 0.0, None, "other/0")
NOT_OPEN: list[tuple[str, str, Any, str]] = [
    ("", "on_batch", to("advantage", 1.0), "'advantage' and does not declare it; set writes = .*'advantage'}"),
    ("chosen", "on_batch", to("advantage", 1.0), "set writes = frozenset.{'advantage', 'chosen'}. in the class"),
    ("", "on_minibatch", of("entropy_coefficient", 1.0), "'entropy_coefficient' and does not declare it"),
    ("", "on_minibatch", lambda step: step.add([]), "'examples' and does not declare it"),
    ("", "loss", of("added_loss", LOGPROBS_N), "'added_loss' and does not declare it"),
    ("", "on_gradient", of("scale", 1.0), "'scale' and does not declare it"),
    ("advantage", "on_batch", to("advantages", 1.0), "'advantages', which is no column; did you mean 'advantage'?"),
    (
        "advantage",
        "on_batch",
        to("x", 1.0),
        "'x', which is no column; the columns of on_batch are old_logprob,",
    ),
    ("scale", "on_gradient", of("x", 1.0), "'x', which is no column; the columns of on_gradient are scale"),
    ("advantage", "on_batch", lambda batch: batch.set(ROLLOUTS[0], "advantage", 1.0), "Rollout.*, which is no column"),
    (
        "weight",
        "on_minibatch",
        to("ce_weight", T(3)),
        "'ce_weight', which is written in on_batch; did you mean",
    ),
    ("advantage", "on_batch", to("mask", T(3)), "'mask', which is written in on_minibatch; "),
    ("added_loss", "loss", of("scale", 1.0), "'scale', which is written in on_gradient; the columns of loss are"),
    ("scale", "on_optimizer_step", of("scale", 1.0), "'scale', which is written in on_gradient; on_optimizer_step"),
    (
        "term",
        "on_minibatch",
        to("term", Term()),
        r"'term' of a rollout, and the whole step has one; write step",
    ),
    ("examples", "on_minibatch", to("examples", []), r"'examples' of a rollout, .*; write step.add\(\[...\]\)"),
    (
        "entropy_coefficient",
        "on_minibatch",
        to("entropy_coefficient", 1.0),
        r"step\[.entropy_coefficient.\] = ",
    ),
    ("mask", "on_minibatch", of("mask", [True]), "'mask' as a value of the step; use step.set"),
    ("examples", "on_minibatch", of("examples", [example()]), "'examples' as a value of the step; use step.add"),
    (
        "advantage",
        "on_batch",
        lambda batch: batch.set("advantage", 0, 1.0),
        "'advantage' of 0; give one of its",
    ),
    (
        "advantage",
        "on_batch",
        lambda batch: batch.set("advantage", STRANGER, 1.0),
        r"'advantage' of sample \(0,\) of prompt 'other/0', which is not among the rollouts that it is given; write",
    ),
    ("weight", "on_minibatch", lambda step: step.set("weight", STRANGER, [1.0]), "'other/0', which is not among"),
]


@pytest.mark.parametrize(("columns", "hook", "write", "message"), NOT_OPEN)
def test_what_is_not_open_to_a_plug_in_is_not_written(columns: str, hook: str, write: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^Mine\.{hook} writes .*{message}"):
        written(writing(columns, hook, write), hook)
    assert not any(rollout.columns for rollout in ROLLOUTS)


def test_every_column_is_written_right_and_wrong() -> None:
    assert {column for column, *_ in WRONG_WRITES} == COLUMNS.keys()
    of_steps = {"entropy_coefficient", "term", "examples", "scale", "proximal_logprob", "added_loss"}
    assert {column for column, *_ in RIGHT_WRITES} == COLUMNS.keys() - of_steps


@pytest.mark.parametrize(("several_steps", "version"), [(True, 0), (False, 3)])
def test_old_logprobs_are_needed_where_no_pass_computes_them(several_steps: bool, version: int) -> None:
    plugin = writing("old_logprob", "on_batch", to("old_logprob", -T(6), 3))
    passes = make_learner(plugins=[plugin])[0].passes
    batch = replace(learning_batch(GROUPS, functions=["exact"]), several_steps=several_steps, version=version)
    with pytest.raises(
        ValueError, match=r"^Mine.on_batch gives sample \(0,\) of prompt 'data/0' no old_logprob \(NaN\) at"
    ):
        fill_batch(batch, passes, PromptHistory())
    for rollout in ROLLOUTS[:3]:
        rollout.kept = False  # none of these is trained on
    fill_batch(batch, passes, PromptHistory())
    assert [plain(rollout.columns["old_logprob"]) for rollout in ROLLOUTS[2:]] == [[None] * 5, [-1.0] * 6]


def test_all_rollouts_have_as_many_candidates() -> None:
    def write(batch: Any) -> None:
        batch.set("candidates", ROLLOUTS[0], (IDS_TK, T(3, 2)))
        batch.set("candidates", ROLLOUTS[1], (T(4, 2).long(), T(4, 3)))

    plugin = writing("candidates", "on_batch", write)
    passes = make_learner(plugins=[plugin])[0].passes
    message = r"Mine.on_batch gives sample \(0,\) of prompt 'data/0' 2 candidates with 2 val.* another rollout 2 with 3"
    with pytest.raises(ValueError, match=message):
        fill_batch(learning_batch(GROUPS, functions=["exact"]), passes, PromptHistory())


@pytest.mark.parametrize("base", [Listener, Plugin])
def test_a_class_has_the_traits_of_all_its_bases_unless_it_says_its_own(base: type[Listener]) -> None:
    forks, waits = (type("Base", (base,), {"traits": frozenset({trait})}) for trait in ("forks", "lock_step"))
    assert type("Both", (forks, waits), {}).traits == {"forks", "lock_step"}  # pyrefly: ignore[missing-attribute]
    assert type("Own", (forks, waits), {"traits": frozenset()}).traits == set()  # pyrefly: ignore[missing-attribute]


def test_every_hook_has_a_form() -> None:
    hooks = {
        name
        for kind in (Listener, Plugin)
        for name in vars(kind)
        if name[0] != "_" and name not in kind.__annotations__
    }
    assert hooks == HOOKS.keys()


def test_the_core_asks_hooks_in_one_place_alone() -> None:
    """Whatever a hook returns is read in ``ask``; names that other classes have too are left out."""
    common = {"requirement", "check", "setup", "rewards", "findings", "state_dict", "load_state_dict", "close"}
    names = HOOKS.keys() - common - {"metrics", "rewrite", "validate", "batch_size", "on_train_start"}
    rooms = (ROOT / "lit_grpo" / room for room in ("update", "rollout", "budgets", "data"))
    paths = [*(path for room in rooms for path in room.rglob("*.py")), ROOT / "lit_grpo" / "module.py"]
    found = [
        f"{path.name} {node.func.attr}"
        for path in [*paths, *(ROOT / "callbacks").glob("*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names
    ]
    assert not found


# ---- in a run --------------------------------------------------------------------------------------------


class _Short(Plugin):
    writes: ClassVar[frozenset[str]] = frozenset({"chosen", "weight"})

    def on_batch(self, batch: Any) -> None:
        for rollout in batch.rollouts:
            batch.set("chosen", rollout, [True])

    def on_minibatch(self, step: Any) -> None:
        for rollout in step.rollouts:
            step.set("weight", rollout, [-1.0])


def of_datasets(*names: str) -> list[Any]:
    """The rollouts, each of the data set with its name."""
    return [
        replace(each, prompt=replace(each.prompt, dataset=name)) for each, name in zip(ROLLOUTS, names, strict=True)
    ]


def test_a_plug_in_of_a_data_set_is_named_too() -> None:
    rollouts = of_datasets("others", "others", "data", "data")
    plugin = restricted("short", _Short(), ["data"])
    with pytest.raises(ValueError, match=r"^_Short.on_batch gives sample \(0,\) of prompt 'data/1' the chosen"):
        ask(plugin, "on_batch", learning_batch(as_groups(rollouts)).of(plugin))
    with pytest.raises(ValueError, match=r"^_Short.on_minibatch gives sample \(0,\) of prompt 'data/1' the weight"):
        ask(plugin, "on_minibatch", make_step(rollouts).of(plugin, "on_minibatch"))


@pytest.mark.parametrize("own", ["others", "none"])
def test_a_plug_in_of_a_data_set_writes_its_rows_alone(own: str) -> None:
    """Where a batch has none of its rows, all of them are those of others."""
    rollouts = of_datasets("others", "others", "data", "data")
    rollouts[3].advantage = math.nan
    for column, hook, row in (
        ("advantage", "on_batch", 2),
        ("advantage", "on_batch", 3),
        ("weight", "on_minibatch", 2),
    ):
        value = 1.0 if column == "advantage" else T(5)
        plugin = restricted(
            "m", writing(column, hook, lambda its, args=(column, rollouts[row], value): its.set(*args)), [own]
        )
        given: Any = learning_batch(as_groups(rollouts)).of(plugin)
        given = given if hook == "on_batch" else make_step(rollouts).of(plugin, hook)
        with pytest.raises(ValueError, match=rf"^Mine.{hook} writes '{column}' of .* 'data/1', which is not among"):
            ask(plugin, hook, given)


def test_a_run_refuses_by_name_and_averages_values_of_tokens_right(policy_folder: Path) -> None:
    groups = random_groups(random_policy(), [[0.0, 1.0, 0.5, 1.0]], noise=0.0)

    def negative(step: Any) -> None:
        for rollout in step.rollouts:
            step.set("weight", rollout, -torch.ones(rollout.completion.num_trained))

    with pytest.raises(ValueError, match=r"Mine.on_minibatch gives sample \(0,\) of prompt 'train/0' the weight with"):
        fit(make_module(policy_folder, [writing("weight", "on_minibatch", negative)]), groups)
    scalar = writing("", "loss", lambda tokens: tokens.log("mine", torch.tensor(1.0)))
    with pytest.raises(ValueError, match=r"Mine.loss gives tokens the mine of shape \(\)"):
        fit(make_module(policy_folder, [scalar]), groups)

    class Ones(Plugin):
        def loss(self, tokens: Any) -> None:
            tokens.log("mine", torch.ones_like(tokens.logprobs_N))

    module = make_module(policy_folder, [Ones()], max_tokens_per_micro_batch=20)
    fit(module, groups)
    assert float(module.trainer.callback_metrics["mine"]) == pytest.approx(1.0)


def test_a_rollout_without_a_reward_that_is_chosen_has_no_advantage(policy_folder: Path) -> None:
    groups = random_groups(random_policy(), [[0.0, math.nan, 0.5, 1.0]], noise=0.0)

    def write(batch: Any) -> None:
        for rollout in batch.rollouts:
            batch.set("chosen", rollout, True)

    fit(make_module(policy_folder, [writing("chosen", "on_batch", write)]), groups)
    assert [math.isnan(rollout.advantage) for rollout in groups[0].rollouts] == [False, True, False, False]
