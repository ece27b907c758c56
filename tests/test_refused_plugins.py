"""Plug-ins that are refused before a run begins: a value of one, two of them together, or one beside the run's numbers.

That each field refuses what its annotation excludes is proved in ``test_limits.py`` for all classes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from lit_grpo.compatibility import ONE_TURN, Requirement
from lit_grpo.methods import make_plugins
from lit_grpo.plugins import Plugin, RunFacts
from lit_grpo.rollout.session import RolloutSession
from lit_grpo.tasks import Catch
from lit_grpo.tasks.calculator import calculate

OWN_PROMPTS = Requirement("a dataloader of your own", changes={"prompt_stream": "is asked for its batches alone"})
GAME = {"environments": {"factory": Catch}}


class First(Plugin):
    """Decides what rollouts are trained on with."""

    writes = frozenset({"advantage"})

    def on_batch(self, batch: Any) -> None: ...


class Second(First):
    """Decides it too."""


OWN = "lit_grpo.rollout.rules.RolloutMode"

MEANINGLESS = [
    ("no.such.Rule", r"cannot be loaded .No module named 'no'.; give one of"),
    ("math.floor", "or the class path of a Plugin"),
    ("aprill", "aprill: there is none; give one of .*april, .*sortedrl.*, or the class path of a Plugin"),
    ("april:batches=2", "april:batches=2: it has no field 'batches'; it has batches_in_work, refill"),
    ("april:unit=[", "april:unit=.: unit is set to '.', which is no value"),
    ({"april": {"staleness": 3}}, "april: it has no field 'staleness'; it has batches_in_work, refill"),
    ({"april": 3}, r"has \{'april': 3\}; give a name, or one name with its fields"),
    ({"april": {}, "greso": {}}, r"has \{'april': \{\}, 'greso': \{\}\}; give a name, or one name with its"),
    (First(), "has .*First.*; give a name, a class path, or"),
    (
        "april:max_staleness=0",
        "keep needs tokens of older .* max_staleness 0 never .*; give a max_staleness of 1 or mo",
    ),
    ("asynchronous:batches_in_work=4", "batches_in_work 4 is more than max_staleness 2 allows.*give at most 3"),
    ("april:leftovers=finish", "batches_in_work 2 needs .* unfinished .* leftovers finish allows none"),
    (f"{OWN}:unit=completion", "unit completion needs completions that may be unfinished .* finish allows none"),
    ("sortedrl:tokens_per_update=9", "but leftovers discard begins them again; take leftovers keep"),
    ("april:overlap=within", "overlap within needs every prompt .*, but leftovers keep keeps some"),
    (f"{OWN}:overlap=across", "overlap across needs unfinished completions to go on, but leftovers finish leaves none"),
    ("sortedrl:overlap=across", "overlap across needs unfinished completions .* leftovers discard begins them again"),
    ("chunked:overlap=across", "tokens_per_update 1024 needs rollouts that end, but overlap across never ends one"),
    ("april:at_sync=drain", "at_sync drain needs decoding .*, but overlap none stops it; take overlap across"),
    ("knapsack:budget=64,tokens=900", "budget 64 needs completions, but tokens 900 counts tokens; remove one of the"),
    ("balanced:passed=0,failed=0", "passed is 0 and failed is 0"),
    ("reference_hint:begin=0.95", r"begin must be at most most, 0\.9, not 0\.95\."),
    ("curriculum:raise_at=0.1", r"lower_at must be below raise_at, 0\.1, not 0\.1\."),
    ("goodput:least=9,most=4", "least must be at most most, 4, not 9"),
    ("copo:pattern=a", "has no group"),
    ("majority_vote:pattern=a", "has no group; put parentheses around the answer"),
    ({"majority_vote": {"pattern": "("}}, r"pattern '\(' is no regular expression"),
    ({"sdpo": {"template": "{prompt}"}}, "let it hold .prompt. and .solution. and .feedback., and nothing else"),
    ({"environments": {"factory": Catch, "calls": "yaml"}}, "calls must be qwen, .* or muse, not 'yaml'"),
]


@pytest.mark.parametrize(("spec", "sentence"), MEANINGLESS, ids=[str(spec) for spec, _ in MEANINGLESS])
def test_a_plug_in_that_means_nothing_is_refused(spec: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=rf"^rollout\.plugins .*{sentence}"):
        make_plugins([spec])


TOGETHER: list[tuple[Sequence[Any], str]] = [
    (["april", "april:max_staleness=2"], "has april twice; leave one out"),
    (["april", "chunked"], "april and chunked, which both decide when groups leave the buffer; take one"),
    (["knapsack", "balanced"], "knapsack and balanced, which both decide how many completions each prompt gets"),
    (["reference_hint", "strategy_hint"], "both decide what prompts are asked with; take one of them"),
    ([{"pods": {"keep": 4}}, {"d3s": {"keep": 4}}], "pods and d3s, which both decide which rollouts are trained on"),
    ([f"{__name__}.First", f"{__name__}.Second"], "which both decide what each rollout is trained on with; take one"),
    (["strategy_hint", "sdpo"], "strategy_hint and sdpo, which both decide what prompts are asked with"),
    (["sdft", {"agent": {"run": calculate}}], "sdft and agent, which both decide what prompts are asked with"),
    (["sdft", "gigpo"], "sdft and gigpo, which both decide what each turn is trained on"),
    (["sdpo", "sortedrl"], "sdpo needs complete groups .* sortedrl lets groups leave in parts; add unit=group"),
    (["gigpo", "mt_grpo"], "gigpo and mt_grpo, which both decide what each turn is trained on"),
    ([GAME, {"agent": {"run": calculate}}], "environments and agent, which both decide what turns are answered by"),
    (["swarm"], r"swarm: folder is empty; name a folder that all runs of the swarm can read and write"),
    (["swarm:folder=exchange", GAME], "swarm and environments, which both decide what turns are answered by"),
    (["swarm:folder=exchange", "april"], "swarm needs every group to be sampled completely .* april keeps"),
    (["balanced", "april"], r"balanced needs every group .* april keeps groups open"),
    (["replace_flat", "arrol:at=8"], r"replace_flat needs every group to be sampled .*plugins arrol"),
    (["greso", "sortedrl"], r"greso needs complete groups .* sortedrl lets groups leave in parts; add unit=group"),
    (["rlep", "chunked:tokens_per_update=5"], r"rlep needs complete groups .* add unit=group"),
    (["rlep", "sortedrl_partial"], r"rlep needs complete groups .*sortedrl_partial lets groups leave in parts"),
    (["reference_hint", "sortedrl"], "reference_hint needs complete groups .* sortedrl lets"),
    (["trace", "aepo"], "trace needs every completion to be sampled separately.* aepo lets comp"),
    (["treepo:segment=8", "arpo"], "treepo needs every completion to be sampled separately.* arpo lets comp"),
    (["eptree", "sortedrl"], "eptree needs complete groups in every update, but .* sortedrl lets"),
    (["eptree", "april"], "eptree needs every group to be sampled completely in one rollout"),
    (["aepo", "balanced"], "balanced needs every completion to be sampled separately"),
    (
        ["knapsack:budget=7"],
        "knapsack: budget is 7 completions for 4 prompts, which is less than 2 each; give at least 8",
    ),
    (["uniform:tokens=7"], "tokens is 7 tokens for 4 prompts, which is less than 2 each; give at least 8"),
    (["rollout_gdro:budget=5"], "budget is 5 completions for 4 prompts, which is less than 2 each"),
    (["dars_hardness:most=8"], "most is 8, and the first round has num_generations, 8, so there would be no second"),
    (["treepo:width=4"], "treepo: width is 4, and model.num_generations is 8, which is how many paths begin"),
    (["treepo:segment=64"], "treepo: segment is 64, and sampling.max_tokens is 64, so that no path would divide"),
    (["latr", "treepo:segment=8"], "latr needs every completion to be sampled separately.* treepo lets comp"),
    (["echo_tree", "eptree"], "echo_tree and eptree, which both decide what each turn is trained on"),
    (["latr:look_ahead=64"], "latr: look_ahead is 64, and sampling.max_tokens is 64, so no branch would be pruned"),
    (["arpo:width=7"], "arpo: width is 7, and model.num_generations is 8"),
    (["trace:width=7"], "trace: width is 7, and model.num_generations is 8"),
    (["arrol:at=64"], r"arrol: at is 64, and sampling\.max_tokens is 64: .* give less"),
    ([GAME], r"need room, and max_observed of model\.sampling or model\.eval_sampling is 0; set"),
]


@pytest.mark.parametrize(
    ("specs", "sentence"), TOGETHER, ids=[re.sub(" at 0x[0-9a-f]+", "", str(specs)) for specs, _ in TOGETHER]
)
def test_plug_ins_that_do_not_go_together_or_with_the_run_are_refused(specs: Sequence[Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=rf"^rollout\.plugins .*{sentence}"):
        RolloutSession(make_plugins(specs)).check(RunFacts(4, 8, 64, 1), [])


@pytest.mark.parametrize(
    ("specs", "part", "sentence"),
    [
        (["april"], OWN_PROMPTS, "april needs prompts from .*PromptDataModule, but a dataloader of your own"),
        (["sdft"], OWN_PROMPTS, "sdft needs prompts from .*PromptDataModule, but a dataloader of your own"),
        (["replace_flat"], OWN_PROMPTS, "replace_flat needs prompts from .*PromptDataModule, but a dataloader of your"),
        *(
            ([name], ONE_TURN, f"{name} needs .*, but this run has .*; add environments or agent to rollout.plugins")
            for name in ("arpo", "aepo", "trace", "gigpo", "mt_grpo", "return_to_go")
        ),
    ],
)
def test_a_plug_in_that_does_not_go_with_a_part_of_the_run_is_refused(specs: Any, part: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=rf"^rollout\.plugins .*{sentence}"):
        RolloutSession(make_plugins(specs)).check(RunFacts(4, 8, 64, 1), [part])
