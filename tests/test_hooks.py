"""What a plug-in from outside may override, and what each of its hooks may return."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import random_policy
from hand_made import as_groups, fit, learning_batch, make_module, make_rollout, random_groups

from lit_grpo.methods import make_plugins, shipped
from lit_grpo.plugins import Answer, Listener, Plugin, ask, check_overrides
from lit_grpo.plugins.hooks import HOOKS
from lit_grpo.types import OBSERVED
from lit_grpo.update.by_dataset import joined, restricted
from lit_grpo.update.plugin import Chunk, Term

ROOT = Path(__file__).parents[1]
ROLLOUTS = [make_rollout([2, 3], [4] * (3 + n), float(n % 2), None, f"data/{n // 2}", n % 2) for n in range(4)]
GROUPS = as_groups(ROLLOUTS)
BATCH = learning_batch(GROUPS)
KEYS = [rollout.completion.request.key for rollout in ROLLOUTS]
PROMPT, REQUESTS = ROLLOUTS[0].prompt, [rollout.completion.request for rollout in ROLLOUTS]
TOKENS = SimpleNamespace(logprobs_N=torch.zeros(5, requires_grad=True) * 1.0)
OF_TOKENS = TOKENS.logprobs_N, torch.zeros(5), torch.zeros(5), 0
ADVANTAGES = [[1.0, -1.0], [math.nan, 0.5]]
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "on_requests": (REQUESTS,),
    "prompt_chance": (PROMPT, None, {}),
    "rewrite": (PROMPT, None),
    "longest_rewrite": (PROMPT, None),
    "first_round": ([1, 2], 4, None),
    "shared_round": ([1, 2], 1, 4),
    "choose_rollouts": (BATCH,),
    "shape_advantages": (BATCH, ADVANTAGES),
    "choose_from_batch": (BATCH, torch.zeros(4), 2),
    "credit": (BATCH,),
    "ce_weights": (BATCH,),
    "candidate_tokens": (BATCH,),
    "old_logprobs": (BATCH, False),
    "token_mask": (BATCH, ROLLOUTS),
    "token_weights": (ROLLOUTS, 0),
    "chunks": (ROLLOUTS[3].completion, 0),
    "proximal_logprobs": OF_TOKENS,
    "token_loss": (TOKENS,),
    "token_metrics": (TOKENS,),
}


@pytest.fixture(autouse=True)
def _with_advantages() -> None:
    for rollout in ROLLOUTS:
        rollout.advantage, rollout.kept = 1.0, True


def made(hook: str, returned: Any) -> Plugin:
    """A plug-in whose hook returns this."""
    is_property = isinstance(getattr(Plugin, hook), property)
    own: Any = property(lambda self: returned) if is_property else lambda self, *arguments: returned
    return type("Mine", (Plugin,), {hook: own})()


def by_key(values: Any, leave_out: int = 0) -> dict[Any, Any]:
    """What a function makes of each rollout's number of tokens, by key."""
    return {each.completion.request.key: values(each.completion.num_trained) for each in ROLLOUTS[leave_out:]}


def candidates(ids: Any, values: Any = torch.zeros) -> dict[Any, Any]:
    return by_key(lambda number: (ids(number, 2), values(number, 2)))


def example(observed: bool = True, weights: bool = True) -> Any:
    rollout = make_rollout([2], [3, 4], prompt_id="sft/1", version=OBSERVED if observed else 0)
    rollout.ce_weights = torch.ones(2) if weights else None
    return rollout


# ---- what a class overrides ------------------------------------------------------------------------------


@dataclass
class Nothing(Plugin):
    width: int = 3


@dataclass
class Misspelt(Plugin):
    def shape_advantage(self, batch: Any, advantages: Any) -> Any:
        return advantages


def overriding(**members: Any) -> Plugin:
    return dataclass(type("Mine", (Plugin,), members))()


def named(name: str) -> Plugin:
    """A plug-in with a hook, and a method of another name beside it."""
    return overriding(**{name: lambda self, *of: None, "on_update_end": lambda self, batch: {}})


OVERRIDES: dict[str, tuple[Any, str]] = {
    "nothing": (Nothing, "overrides no hook of lit_grpo.plugins.Plugin, so it does nothing in a run"),
    "setup alone": (lambda: overriding(setup=lambda self: None), "overrides no hook"),
    "check alone": (lambda: overriding(check=lambda self, run: None), "overrides no hook"),
    "misspelt alone": (Misspelt, "has shape_advantage, which is no hook, so nothing calls it; did you mean shape_adv"),
    "misspelt beside another": (lambda: named("choose_rollout"), "did you mean choose_rollouts"),
    "camel case": (lambda: named("tokenWeights"), "did you mean token_weights"),
    "plural": (lambda: named("on_completions"), "did you mean on_completion"),
    "beginning": (lambda: named("entropy_coeff"), "did you mean entropy_coefficient"),
    "Lightning's": (lambda: named("on_train_batch_end"), "has on_train_batch_end, which is no hook.*there are on_"),
    "an attribute": (lambda: overriding(need=frozenset(), metrics=lambda self, gather: {}), "did you mean needs"),
    "inherited": (type("Below", (Misspelt,), {}), "has shape_advantage"),
    "method for property": (lambda: overriding(num_parts=lambda self: 4), "num_parts as a method.*put @property above"),
    "value for method": (lambda: overriding(batch_size=4), "batch_size as a value, and it is called as a method"),
    "too few parameters": (
        lambda: overriding(shape_advantages=lambda self, batch: []),
        r"Mine.shape_advantages takes \(self, batch\), and it is called with \(self, batch, advantages\)",
    ),
    "no self": (lambda: overriding(credit=lambda: None), "credit takes"),
}


@pytest.mark.parametrize(("make", "message"), [*OVERRIDES.values()])
def test_a_class_that_does_not_act_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_overrides("rollout.plugins Mine", make())


async def _later(self: Any, completion: Any) -> None: ...


def test_a_hook_that_is_async_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Mine.on_completion is async or yields"):
        check_overrides("Mine", overriding(on_completion=_later))


@pytest.mark.parametrize("name", ["_shape_advantage", "helper", "keep_at", "values", "weight", "metrics_of", "hints"])
def test_methods_of_a_plug_in_s_own_may_have_other_names(name: str) -> None:
    check_overrides("Mine", named(name))


def test_a_helper_may_be_named_like_a_hook_that_is_overridden() -> None:
    check_overrides("Mine", overriding(chunk=lambda self: 3, chunks=lambda self, completion, version: ()))


def test_what_ships_overrides_what_there_is() -> None:
    for name, plugin in shipped().items():
        check_overrides(name, plugin)


def test_both_ways_in_check_what_a_class_overrides(policy_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout.plugins test_hooks.Misspelt has shape_advantage"):
        make_plugins(["test_hooks.Misspelt"])
    with pytest.raises(ValueError, match=r"rollout.plugins Nothing overrides no hook"):
        make_module(policy_folder, [Nothing()])


# ---- what hooks return -----------------------------------------------------------------------------------

T = torch.ones
RIGHT: list[tuple[str, Any, Any]] = [
    ("choose_rollouts", [True, False, True, True], [True, False, True, True]),
    ("choose_rollouts", np.array([True] * 4), [True] * 4),
    ("shape_advantages", torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [[1.0, 2.0], [None, 4.0]]),
    ("shape_advantages", [(1, 2), np.array([3.0, 4.0])], [[1.0, 2.0], [None, 4.0]]),
    ("choose_from_batch", [True] * 4, [True] * 4),
    ("credit", [np.ones(3 + n) for n in range(4)], [[1.0] * (3 + n) for n in range(4)]),
    ("credit", [[2.0], [2], T(5), None], [[2.0] * 3, [2.0] * 4, [1.0] * 5, None]),
    ("ce_weights", [[1] * 3, None, T(5, requires_grad=True), np.zeros(6)], [[1.0] * 3, None, [1.0] * 5, [0.0] * 6]),
    ("token_mask", by_key(lambda n: [True] * n), [[True] * (3 + n) for n in range(4)]),
    ("token_weights", by_key(lambda n: [2] * n), [[2.0] * (3 + n) for n in range(4)]),
    ("token_weights", by_key(lambda n: T(n).bool()) | {"another": 3}, [[1.0] * (3 + n) for n in range(4)]),
    ("token_weights", None, None),
    ("old_logprobs", by_key(lambda n: -T(n), 1), [[None] * 3, *([-1.0] * (3 + n) for n in range(1, 4))]),
    ("old_logprobs", {}, [[None] * (3 + n) for n in range(4)]),
    ("chunks", [Chunk(0, 2), Chunk(2, 6, 0.0)], [[0, 2, 1.0], [2, 6, 0.0]]),
    ("chunks", (), []),
    ("examples", [example()], None),
    ("token_metrics", {"mine": TOKENS.logprobs_N > 1}, {"mine": [0.0] * 5}),
    ("token_metrics", None, {}),
    ("proximal_logprobs", TOKENS.logprobs_N - 1, [-1.0] * 5),
    ("metrics", {"mine": torch.tensor(1.5), "its": np.float32(2)}, {"mine": 1.5, "its": 2.0}),
    ("metrics", {"unknown": math.nan}, {"unknown": None}),
    ("on_update_end", None, {}),
    ("validate", {"loss": torch.tensor([2.0])}, {"loss": 2.0}),
    ("step_scale", torch.tensor(0.5), 0.5),
    ("entropy_coefficient", np.float64(0.1), 0.1),
    ("batch_size", np.int64(3), 3),
    ("first_round", np.array([2, 3]), [2, 3]),
    ("num_recent", None, None),
    ("loss_term", None, None),
    ("on_step", Answer(drop=[KEYS[0]]), None),
    ("on_requests", [REQUESTS[1]], None),
]
WRONG: list[tuple[str, Any, str]] = [
    ("choose_rollouts", None, "the batch choice as None; give a boolean for each of 4 rollouts"),
    ("choose_rollouts", [True] * 3, r"of shape \(3,\)"),
    ("choose_rollouts", T(4), "of torch.float32; give a boolean"),
    ("choose_rollouts", [0, 2], r"of shape \(2,\)"),
    ("choose_rollouts", [0, 1, 1, 0], "of torch.int64; give a boolean"),
    ("choose_rollouts", BATCH.rewards.of_groups([0]), r"rewards of shape \(2,\)"),
    ("choose_from_batch", [True] * 3, r"of shape \(3,\)"),
    ("shape_advantages", None, "return a list for each of 2 groups"),
    ("shape_advantages", [1.0, 2.0], r"prompt 'data/0' advantages of shape \(\)"),
    ("shape_advantages", [[1.0, 2.0], [1.0]], r"prompt 'data/1' advantages of shape \(1,\); give a finite number"),
    ("shape_advantages", [[1.0, math.nan], [1.0, 1.0]], r"prompt 'data/0' .*nan\]; give a finite number"),
    ("shape_advantages", [[1.0, math.inf], [1.0, 1.0]], "prompt 'data/0' advantages with inf at place 1"),
    ("shape_advantages", [["a", 1.0], [1.0, 1.0]], r"prompt 'data/0' advantages as \['a', 1.0\]"),
    ("credit", [[1.0]], "return a list with an entry, or None, for each of 4 rollouts"),
    (
        "credit",
        [[1.0, 2.0], None, None, None],
        r"sample \(0,\) of prompt 'data/0' advantages of shape \(2,\).*its 1 turns",
    ),
    ("credit", [None, T(3), None, None], r"sample \(1,\) of prompt 'data/0' .*its 4 tokens that are trained on"),
    ("credit", [None, None, T(5) * math.nan, None], r"sample \(0,\) of prompt 'data/1' advantages with nan at place 0"),
    ("credit", {}, "return a list"),
    ("ce_weights", [[1.0]] * 4, r"of shape \(1,\); .*its 3 tokens, observed tokens among them"),
    ("ce_weights", [None, None, None, [1.0] * 5 + [math.inf]], r"sample \(1,\) of prompt 'data/1' ce_weights with inf"),
    ("ce_weights", "abcd", "returns 'abcd'"),
    ("candidate_tokens", [1], "return a mapping"),
    ("candidate_tokens", by_key(lambda n: T(n, 2)), "give two tensors, ids and values"),
    ("candidate_tokens", candidates(torch.zeros), r"sample \(0,\) of prompt 'data/0' ids of torch.float32"),
    ("candidate_tokens", candidates(lambda *of: -T(*of).long()), "ids with -1 at place"),
    ("candidate_tokens", candidates(lambda n, k: T(n + 1, k).long()), r"ids of shape \(4, 2\)"),
    ("candidate_tokens", candidates(lambda *of: T(*of).long(), lambda n, k: T(n)), r"values of shape \(3,\)"),
    ("old_logprobs", by_key(lambda n: T(n)), r"log-probs with 1 at place 0; give .*at most 0.001"),
    ("old_logprobs", by_key(lambda n: -T(1)), r"of shape \(1,\)"),
    ("old_logprobs", by_key(lambda n: T(n) * -math.inf), "with -inf at place 0"),
    ("token_mask", {}, r"sample \(0,\) of prompt 'data/0' no mask; give each completion one tensor"),
    ("token_mask", by_key(lambda n: T(n)), "mask of torch.float32; give a boolean"),
    ("token_mask", by_key(lambda n: [True]), r"mask of shape \(1,\)"),
    ("token_mask", [True], "return a mapping"),
    (
        "token_weights",
        by_key(lambda n: -T(n)),
        r"sample \(0,\) of prompt 'data/0' weights with -1 at place 0; .*at least 0",
    ),
    ("token_weights", by_key(lambda n: T(n) * math.nan), "weights with nan"),
    ("token_weights", by_key(lambda n: T(n, 1)), r"weights of shape \(3, 1\)"),
    ("token_weights", by_key(lambda n: "aaa"), "weights as 'aaa'"),
    ("chunks", [Chunk(0, 2), Chunk(3, 6)], r"cuts sample \(1,\) of prompt 'data/1' .*without a gap from 0 to 6"),
    ("chunks", [Chunk(0, 3)], "without a gap"),
    ("chunks", [Chunk(0, 6, -1.0)], "weights of 0 or more"),
    ("chunks", [(0, 6)], r"returns .*return a sequence of lit_grpo.update.plugin.Chunk"),
    (
        "examples",
        [example(observed=False)],
        r"sample \(0,\) of prompt 'sft/1' tokens that are trained on by advantages",
    ),
    ("examples", [example(weights=False)], "no ce_weights, so nothing is imitated"),
    ("examples", None, "return a sequence of lit_grpo.types.Rollout"),
    ("loss_term", 0.5, "return a lit_grpo.update.plugin.Term or None"),
    ("loss_term", Term, "return a lit_grpo.update.plugin.Term or None"),
    ("token_loss", 1.0, "give a tensor on cpu"),
    ("token_loss", T(4), r"loss of shape \(4,\)"),
    ("token_loss", T(5), "loss without a gradient; compute it from tokens"),
    ("token_loss", TOKENS.logprobs_N + math.nan, "with nan at place 0"),
    ("proximal_logprobs", T(5), "log-probs with 1 at place 0"),
    ("proximal_logprobs", -T(4), r"of shape \(4,\)"),
    ("token_metrics", {"mine": torch.tensor(1.0)}, r"'mine' values of shape \(\); .*each of 5 tokens"),
    ("token_metrics", {"mine": 1.0}, "'mine' 1.0; give a tensor on cpu"),
    ("token_metrics", T(5), "return values of tokens by name"),
    ("step_scale", None, "must be a finite number of at least 0, not None"),
    ("step_scale", -0.5, "not -0.5"),
    ("step_scale", math.nan, "not nan"),
    ("step_scale", True, "not True"),
    ("entropy_coefficient", math.inf, "must be a finite number, not inf"),
    ("entropy_coefficient", "0.1", "not '0.1'"),
    ("num_parts", 0, "must be at least 1, not 0"),
    ("num_parts", 2.5, "must be a whole number of at least 1, not 2.5"),
    ("batch_size", None, "must be a whole number"),
    ("largest_chunk", -1, "must be at least 1"),
    ("first_rollout", -1, "must be at least 0"),
    ("prompt_candidates", 0, "must be at least 1"),
    ("num_recent", 1.5, "must be a whole number"),
    ("prompt_chance", 1.5, "of prompt 'data/0' must be from 0 to 1, not 1.5"),
    ("prompt_chance", math.nan, "of prompt 'data/0' must be from 0 to 1, not nan"),
    ("prompt_state", [1.0], "return numbers by name"),
    ("next_prompt_state", {"a": None}, "gives 'a' the value None; give one number"),
    ("first_round", [4], r"a list of one number for each of 2 prompts"),
    ("first_round", [4, 0], "must be at least 1, not 0"),
    ("shared_round", [1, -1], "must be at least 0, not -1"),
    ("shared_round", None, "each of 2 prompts"),
    ("next_round", None, "must be a whole number, not None"),
    ("rewrite", "1+1=", "for prompt 'data/0'; return a Prompt of the same prompt_id"),
    ("rewrite", replace(PROMPT, prompt_id="other"), "of the same prompt_id"),
    ("longest_rewrite", None, "returns None for prompt 'data/0'"),
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
    if hook.startswith(("token_m", "token_w", "old")) and isinstance(found, dict) and found.keys() == {*KEYS}:
        found = [found[key] for key in KEYS]
    assert expected is None or plain(found) == expected
    assert not any(each.requires_grad for each in (found if isinstance(found, list) else []) if torch.is_tensor(each))


@pytest.mark.parametrize(("hook", "returned", "message"), WRONG)
def test_what_cannot_be_read_is_refused_by_name(hook: str, returned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^Mine\.{hook} .*{message}"):
        ask(made(hook, returned), hook, *ARGUMENTS.get(hook, (BATCH,)))


@pytest.mark.parametrize(("several_steps", "version"), [(True, 0), (False, 3)])
def test_old_logprobs_are_needed_where_no_pass_computes_them(several_steps: bool, version: int) -> None:
    plugin, batch = made("old_logprobs", {}), replace(BATCH, version=version)
    with pytest.raises(ValueError, match=r"sample \(0,\) of prompt 'data/0' no log-prob \(NaN\) at place 0"):
        ask(plugin, "old_logprobs", batch, several_steps)
    for rollout in ROLLOUTS:
        rollout.kept = False  # none of these is trained on
    ask(plugin, "old_logprobs", batch, several_steps)


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
    assert found == ["writing.py longest_rewrite"]  # whose errors it tells first, and then reads it


# ---- in a run --------------------------------------------------------------------------------------------


class _Short(Plugin):
    def choose_rollouts(self, batch: Any) -> Any:
        return [True]

    def token_weights(self, rollouts: Sequence[Any], version: int) -> Any:
        return {each.completion.request.key: [-1.0] for each in rollouts}


def test_a_plug_in_of_a_data_set_is_named_too() -> None:
    rollouts = [replace(each, prompt=replace(each.prompt, dataset="data")) for each in ROLLOUTS]
    plugin = joined([restricted("short", _Short(), [name]) for name in ("data", "others")])
    assert plugin is not None
    with pytest.raises(ValueError, match=r"^_Short.choose_rollouts gives the batch choice of shape \(1,\)"):
        ask(plugin, "choose_rollouts", learning_batch(as_groups(rollouts)))
    with pytest.raises(ValueError, match=r"^_Short.token_weights gives sample \(0,\) of prompt 'data/0' weights"):
        ask(plugin, "token_weights", rollouts, 0)


def test_a_run_refuses_by_name_and_averages_values_of_tokens_right(policy_folder: Path) -> None:
    groups = random_groups(random_policy(), [[0.0, 1.0, 0.5, 1.0]], noise=0.0)
    with pytest.raises(ValueError, match=r"Mine.token_weights gives sample \(0,\) of prompt 'train/0' weights with -1"):
        weights = {each.completion.request.key: -torch.ones(each.completion.num_trained) for each in groups[0].rollouts}
        fit(make_module(policy_folder, [made("token_weights", weights)]), groups)
    with pytest.raises(ValueError, match=r"Mine.token_metrics gives 'mine' values of shape \(\)"):
        fit(make_module(policy_folder, [made("token_metrics", {"mine": torch.tensor(1.0)})]), groups)

    class Ones(Plugin):
        def token_metrics(self, tokens: Any) -> Any:
            return {"mine": torch.ones_like(tokens.logprobs_N)}

    module = make_module(policy_folder, [Ones()], max_tokens_per_micro_batch=20)
    fit(module, groups)
    assert float(module.trainer.callback_metrics["mine"]) == pytest.approx(1.0)


def test_a_rollout_without_a_reward_that_is_chosen_has_no_advantage(policy_folder: Path) -> None:
    groups = random_groups(random_policy(), [[0.0, math.nan, 0.5, 1.0]], noise=0.0)
    fit(make_module(policy_folder, [made("choose_rollouts", [True] * 4)]), groups)
    assert [math.isnan(rollout.advantage) for rollout in groups[0].rollouts] == [False, True, False, False]
