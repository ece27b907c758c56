"""The studies of :mod:`benchmarks.learning`: what is trained, what is compared, and what is claimed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.learning_callbacks import ServersApart, ShortFirst, StaleSlots
from lit_grpo.methods.hints import Reference
from lit_grpo.tasks.arithmetic import Remainder, working
from lit_grpo.types import Prompt

if TYPE_CHECKING:
    import lightning.pytorch as pl

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class System:
    """A line of the table: ``fields`` and ``configs`` on top of the task's, or another ``config`` in its place.

    ``before`` are the tokens that were sampled for its runs before they began, and the seconds which that took.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    configs: tuple[str, ...] = ()
    callbacks: tuple[type[pl.Callback], ...] = ()
    alone: bool = False
    before: tuple[int, float] = (0, 0.0)


@dataclass(frozen=True)
class Task:
    """A configuration, the fields of all its runs, and the systems that are compared on it."""

    config: str
    systems: Mapping[str, System]
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bound:
    """A claim on a column, for all systems or those in ``of``, or for the best of them.

    ``less`` subtracts, and ``over`` divides by, the column ``of_other`` (by default the same one) of another system.
    Of several in ``over`` the best counts.
    """

    text: str
    column: str
    relation: Literal["<=", ">="]
    limit: float
    of: tuple[str, ...] = ()
    less: str | None = None
    over: str | tuple[str, ...] | None = None
    of_other: str = ""
    best: bool = False


@dataclass(frozen=True)
class Study:
    """Tasks, seeds, the metrics that become columns (a metric, and how it is summed up), bounds and a picture.

    Of a ``level`` of held-out exact match the table says when each seed first comes to it.
    """

    tasks: Mapping[str, Task]
    bounds: tuple[Bound, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    baseline: str | None = None
    logged: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    picture: tuple[str, ...] = ()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    quick: tuple[str, ...] = ()
    level: float | None = None


AXES = {
    "samples": ("samples_U", 1, "completions trained on", "exact_U"),
    "seconds": ("wall_s_U", 1, "seconds of rollouts and updates", "exact_U"),
    "tokens": ("tokens_U", 1000, "thousands of generated tokens", "exact_U"),
    "reward": ("update", 1, "update", "reward_U"),
}
"""Of pictures: the curve that is the abscissa, its unit and label, and the curve that is drawn."""
PLUGINS, END_FACTOR = "rollout.plugins", "model.lr_scheduler.init_args.end_factor"
HELD_OUT, NUM_ROWS = "data.validation.init_args.num_rows", "data.train.init_args.num_rows"
QUICK = {
    "trainer.max_steps": 2,
    "trainer.val_check_interval": 1,
    "data.batch_size": 2,
    "model.num_generations": 4,
    HELD_OUT: 4,
}
SERVER = {"model.generator.num_servers": 1, "model.generator.num_slots": 64}
SERVERS = "generators/vllm_servers"


def _length(updates: int, every: int, prompts: int, group: int) -> dict[str, Any]:
    """Updates of a run and from one validation to the next, prompts of a batch and completions of each."""
    return {
        "trainer.max_steps": updates,
        "trainer.val_check_interval": every,
        "model.lr_scheduler.init_args.total_iters": updates,
        "data.batch_size": prompts,
        "model.num_generations": group,
    }


def _plugins(*specs: Any, **fields: Any) -> System:
    return System({PLUGINS: json.dumps(specs)} | {name.replace("__", "."): value for name, value in fields.items()})


# ---- rollout modes ------------------------------------------------------------------------------------

SYNCHRONOUS, NO_LOADING, SORTED_AFTERWARDS = "synchronous", "sortedrl:refill=always", "sorted afterwards"
SHARE_OF_TIME, SHARE_OF_SAMPLES = 0.7, 0.6
LOADING = 4
"""Batches of a loading of SortedRL."""


def _modes(*names: str) -> dict[str, System]:
    return {SYNCHRONOUS: _plugins()} | {name.partition(":")[0]: _plugins(name) for name in names}


def _of_one_device(limit: int) -> dict[str, System]:
    """The modes of one device, for completions of at most ``limit`` tokens."""
    chunk, midway = f"chunked:tokens_per_update={limit // 4}", f"arrol:at={limit // 6}"
    return _modes("april", "sortedrl", "sortedrl_partial", chunk, midway)


MODES = Study(
    tasks={
        "arithmetic": Task("arithmetic", _of_one_device(128)),
        "knights": Task("knights", _of_one_device(700)),
    },
    fields=_length(40, 5, 8, 16) | {HELD_OUT: 128},
    baseline=SYNCHRONOUS,
    picture=("samples", "seconds"),
    bounds=(
        Bound(
            f"exact match by {SHARE_OF_TIME} of the synchronous seconds, less the synchronous end, best mode",
            "by_wall_s", ">=", 0.0, less=SYNCHRONOUS, of_other="final", best=True,
        ),
        Bound(
            f"exact match by {SHARE_OF_SAMPLES} of the synchronous samples, less the synchronous end",
            "by_samples", ">=", 0.0, of=("sortedrl",), less=SYNCHRONOUS, of_other="final",
        ),
    ),
)  # fmt: skip
SORTED = {
    "model.num_minibatches": LOADING,
    "data.batch_size": 8 * LOADING,
    "trainer.val_check_interval": 1,
}
"""All completions of a loading are sampled at once, and updates train on them, groups of short completions first."""
SORTED_LEARNING = replace(
    MODES,
    tasks={
        "arithmetic": Task(
            "arithmetic",
            _modes("sortedrl", "sortedrl_partial")
            | {
                SORTED_AFTERWARDS: System({PLUGINS: "[]"} | SORTED, callbacks=(ShortFirst,)),
                NO_LOADING: _plugins(NO_LOADING),
            },
        )
    },
    bounds=(
        *MODES.bounds,
        Bound(
            "end, less the synchronous end (SortedRL found both ablations below it)",
            "final", "<=", 0.0, of=(NO_LOADING, SORTED_AFTERWARDS), less=SYNCHRONOUS,
        ),
    ),
    quick=(SYNCHRONOUS, SORTED_AFTERWARDS, "sortedrl"),
)  # fmt: skip
OVERLAP_LEARNING = replace(
    MODES,
    tasks={
        "arithmetic, with a server": Task(
            "arithmetic",
            {
                name: replace(
                    mode, fields=mode.fields | SERVER, configs=(SERVERS,), callbacks=(ServersApart,), alone=True
                )
                for name, mode in _modes("periodic", "asynchronous").items()
            },
        )
    },
)

# ---- objectives, with tokens that were sampled 16 updates ago -----------------------------------------

LAG, FAR = 16, "1.0e+6"
PLAIN = {"epsilon": "1", "epsilon_high": FAR}
"""Ratios are from 0 up: nothing is clipped."""
TRUNCATE = {"correction.mode": "token_truncate"}
OBJECTIVES = {
    "plain": PLAIN,
    "clipped": {},
    "token_truncate": TRUNCATE,
    "token_mask": {"correction.mode": "token_mask"},
    "sequence_mask": {"correction.mode": "sequence_mask"},
    "a3po": TRUNCATE,
    "f_tis": TRUNCATE | {"correction.high": "2", "off_policy_kl": "50"},
    "vcpo": PLAIN | {"correction.mode": "sequence_truncate", "correction.high": "8"},
}
"""The compared objectives, by the fields of ``model.objective``; ``a3po`` and ``vcpo`` are plug-ins too."""
STABILITY = Study(
    tasks={
        "arithmetic": Task(
            "arithmetic",
            {
                name: System(
                    {f"model.objective.{each}": value for each, value in fields.items()}
                    | ({PLUGINS: json.dumps([name])} if name in ("a3po", "vcpo") else {})
                )
                for name, fields in OBJECTIVES.items()
            },
        )
    },
    fields={
        "model.generator": f"{StaleSlots.__module__}.{StaleSlots.__name__}",
        "model.generator.lag": LAG,
        "trainer.max_steps": 96,
        "trainer.limit_val_batches": 0,
        "model.num_generations": 8,
        "model.optimizer.lr": 2e-3,
        END_FACTOR: 1.0,
        "data.batch_size": 8,
    },
    picture=("reward",),
    bounds=(
        Bound("updates between sampling a token and training on it, at the end", "staleness", ">=", LAG),
        Bound("reward at its best, less that at the end", "reward_fall", ">=", 0.1, of=("plain",)),
        Bound(
            "reward at its best, less that at the end", "reward_fall", "<=", 0.05,
            of=tuple(name for name in OBJECTIVES if name not in ("plain", "clipped")),
        ),
    ),
    quick=("plain", "token_truncate"),
)  # fmt: skip

# ---- budgets ------------------------------------------------------------------------------------------

UNIFORM, TWO_ROUNDS = "uniform", "uniform in two rounds"
TOGETHER = "greso, balanced and PODS (configs/budget.yaml)"
BALANCED_FEW = "pods:keep=4,statistics=group"


@dataclass
class Working(Reference):
    """The beginning of an exercise's working."""

    def text(self, prompt: Prompt, share: float) -> str:
        """The whole working."""
        number, divisor = prompt.text.rstrip("=").split("%")
        return working(Remainder(int(number), int(divisor)))


def _rules(tokens: int) -> dict[str, System]:
    """The compared rules; uniform groups take about ``tokens`` per update; rules with rounds begin with 8."""
    first = {"model__num_generations": 8}
    return {
        UNIFORM: _plugins(),
        TWO_ROUNDS: _plugins("balanced:rounds=2,passed=1000000", **first),
        "greso": _plugins("greso"),
        "near_half": _plugins("near_half"),
        "phases": _plugins("phases:batches=3"),
        "knapsack": _plugins("knapsack"),
        "knapsack of tokens": _plugins(f"knapsack:tokens={tokens}"),
        "variance": _plugins("variance"),
        "buckets": _plugins("buckets:most=16"),
        "dars_equal": _plugins("dars_equal", **first),
        "dars_hardness": _plugins("dars_hardness", **first),
        "balanced": _plugins("balanced", BALANCED_FEW, **first),
        "positive": _plugins("balanced:passed=1,failed=0", **first),
        "replace_flat": _plugins("replace_flat:most=16"),
        "PODS": _plugins("pods:keep=4"),
        "D3S": _plugins("d3s:keep=8,first_keep=4,tokens=0.8,first_tokens=0.2"),
        "max_entropy": _plugins("max_entropy:keep=4"),
        "random": _plugins("random_members:keep=4"),
        "rlep": _plugins("rlep"),
        "repo": _plugins("repo"),
        TOGETHER: _plugins("greso", "balanced:rounds=3,passed=2,failed=2", BALANCED_FEW, **first),
    }


BUDGETS = Study(
    tasks={
        "arithmetic": Task(
            "arithmetic",
            _rules(6000) | {"reference": _plugins(f"{Working.__module__}.Working")},
            _length(32, 4, 16, 16) | {NUM_ROWS: 256},
        ),
        "knights": Task("knights", _rules(16_000), _length(16, 4, 16, 16) | {NUM_ROWS: 64}),
    },
    fields={HELD_OUT: 256},
    baseline=UNIFORM,
    logged={"flat": ("frac_reward_zero_std", "mean")},
    picture=("tokens", "seconds"),
    groups={
        "which prompts, and with what": (TOGETHER, "greso", "near_half", "phases", "reference"),
        "how many, divided": (TOGETHER, "knapsack", "knapsack of tokens", "variance", "buckets"),
        "how many, in rounds": (TOGETHER, "dars_equal", "dars_hardness", "balanced", "positive", "replace_flat"),
        "which are trained on": (TOGETHER, "PODS", "D3S", "max_entropy", "random", "rlep", "repo"),
    },
    bounds=(
        Bound(
            "generated tokens to where uniform ends, over uniform's own, best rule",
            "tokens_to_level", "<=", 0.5, over=UNIFORM, best=True,
        ),
        Bound(
            "seconds to where uniform ends, over uniform's own, best rule",
            "wall_s_to_level", "<=", 1.0, over=UNIFORM, best=True,
        ),
        Bound("seconds over those of one round", "wall_s", "<=", 1.1, of=(TWO_ROUNDS,), over=UNIFORM),
    ),
    quick=(UNIFORM, TWO_ROUNDS, TOGETHER),
)  # fmt: skip

# ---- methods ------------------------------------------------------------------------------------------

CAPO_NORMS = Study(
    tasks={
        name: Task(name, {"grpo": _plugins(), "capo": _plugins("capo")}, _length(12, 12, 8, 8))
        for name in ("arithmetic", "knights")
    },
    fields={"model.optimizer.init_args.lr": 1.5e-5, END_FACTOR: 1.0, HELD_OUT: 8, "data.eval_batch_size": 8},
    seeds=(0,),
    logged={"grad_norm": ("grad_norm", "mean"), "kept_share": ("update/kept_share", "least")},
    bounds=(
        Bound("gradient norm before clipping over grpo's, mean", "grad_norm", ">=", 0.9, over="grpo"),
        Bound("gradient norm before clipping over grpo's, mean", "grad_norm", "<=", 1.1, over="grpo"),
        Bound("least share of tokens that is kept (the paper cuts less than 8%)", "kept_share", ">=", 0.92, ("capo",)),
    ),
)
"""At the learning rate of CAPO's paper; until a token is cut, both runs are the same."""
CATCH = {"environments": {"factory": "lit_grpo.tasks.Catch", "tool_timeout_s": 10}}
CATCH_CREDIT = Study(
    tasks={
        "catch": Task(
            "catch",
            {"grpo": _plugins(CATCH)} | {name: _plugins(CATCH, name) for name in ("gigpo", "mt_grpo", "return_to_go")},
            {
                "trainer.max_steps": 16,
                "trainer.val_check_interval": 8,
                "model.lr_scheduler.init_args.total_iters": 16,
            },
        )
    },
    bounds=(
        Bound("held-out catches after the last update, less those of grpo", "final", ">=", 0.0, less="grpo"),
        Bound("catches in training, mean of all updates, less those of grpo", "reward", ">=", 0.0, less="grpo"),
    ),
    quick=("grpo", "gigpo", "mt_grpo", "return_to_go"),
)
"""Rules of credit for single turns, which are told how much nearer each move has brought the paddle."""

# ---- layers with recurrent states ---------------------------------------------------------------------

HYBRID = Study(
    tasks={
        "arithmetic": Task(
            "arithmetic", {name: System({"model.policy": name}) for name in ("tiny", "tiny_hybrid")}, {HELD_OUT: 256}
        )
    },
    picture=("samples",),
    bounds=(Bound("held-out exact match, end less start", "gain", ">=", 0.3),),
)
"""The demo with its policy, which has attention alone, and with one of recurrent layers and attention."""

# ---- a pretrained chat model, and generators ----------------------------------------------------------

TOOL_CALLS = {
    name: (f"environments/{name}", "per completion") for name in ("tool_calls", "tool_failures", "broken_calls")
}
TOOL_USE = Study(
    tasks={
        "word_problems": Task(
            "word_problems",
            {"tool": System(config="word_problems_tool", alone=True), "plain": System(alone=True)},
            {
                "trainer.max_steps": 3,
                "trainer.val_check_interval": 3,
                "model.lr_scheduler.init_args.total_iters": 3,
                "data.batch_size": 4,
                HELD_OUT: 32,
                "data.eval_batch_size": 32,
            },
        )
    },
    seeds=(0,),
    logged=TOOL_CALLS,
    bounds=(
        Bound("held-out accuracy before training, less that without the tool", "start", ">=", 0.1, less="plain"),
        Bound("held-out accuracy, end less start", "gain", ">=", 0.0, of=("tool",)),
    ),
)
GAPS = {
    "sync_gap": ("sync/logprob_gap", "largest"),
    "sampling_gap": ("sampling/logprob_gap_mean", "largest"),
}


def _generators(noise: float, fields: dict[str, Any], **tasks: tuple[str, tuple[str, ...]]) -> Study:
    """A configuration with each generator, compared with the slots by held-out accuracy after the same updates."""
    kinds = {
        "slots": System(alone=True),
        "vLLM": System(configs=("generators/vllm",), alone=True),
        "vLLM server": System({"model.generator.num_servers": 1}, configs=(SERVERS,), alone=True),
        "two vLLM servers": System(configs=(SERVERS,), alone=True),
    }
    return Study(
        tasks={name: Task(config, {kind: kinds[kind] for kind in of}, fields) for name, (config, of) in tasks.items()},
        seeds=(0,),
        logged=GAPS,
        bounds=(
            Bound("held-out accuracy at the end, less that with slots", "final", ">=", -noise, less="slots"),
            Bound("largest log-prob gap of a weight verification", "sync_gap", "<=", 1e-3),
            Bound("largest mean log-prob gap of a batch", "sampling_gap", "<=", 1e-3),
        ),
    )


VLLM_LEARNING = _generators(0.03, {}, demo=("arithmetic", ("slots", "vLLM", "two vLLM servers")))
REAL_MODEL_GENERATORS = _generators(
    0.08,
    {"trainer.max_steps": 10, "trainer.val_check_interval": 10, "model.lr_scheduler.init_args.total_iters": 10},
    weights=("word_problems", ("slots", "vLLM", "vLLM server")),
    LoRA=("word_problems_lora", ("slots", "vLLM")),
)
"""Three seeds of TRL ended 0.51 to 0.78, and ours 0.71 to 0.73, in ``real_model_learning``."""

# ---- adapters -----------------------------------------------------------------------------------------

ALL_WEIGHTS, RATE, TARGETS = "all weights", "model.optimizer.init_args.lr", "model.lora.target_modules"
ATTENTION = json.dumps(["q_proj", "k_proj", "v_proj", "o_proj"])


def _trained(rate: float, **kinds: tuple[int, ...]) -> dict[str, System]:
    """All weights, and adapters of each kind and rank, at a learning rate and at ten times that."""
    targets = {"all_linear": "all-linear", "attention": ATTENTION}
    return {ALL_WEIGHTS: System({RATE: rate}), f"{ALL_WEIGHTS}, 10 x": System({RATE: 10 * rate})} | {
        f"{kind.replace('_', '-')}, rank {rank}, {time} x": System(
            {RATE: time * rate, TARGETS: targets[kind], "model.lora.r": rank, "model.lora.alpha": 32}
        )
        for time in (1, 10)
        for kind, ranks in kinds.items()
        for rank in ranks
    }


def _as_all_weights(noise: float, *ranks: int) -> tuple[Bound, ...]:
    """What "LoRA Without Regret" (Thinking Machines, 2025) finds, and that full training's own rate is too low."""
    text = "held-out accuracy at the end, less that of all weights"
    at_ten = tuple(f"all-linear, rank {rank}, 10 x" for rank in ranks)
    return (
        Bound(text, "final", ">=", -noise, of=at_ten, less=ALL_WEIGHTS),
        Bound(text, "final", "<=", -noise, of=tuple(name.replace("10 x", "1 x") for name in at_ten), less=ALL_WEIGHTS),
    )


WORD_PROBLEMS_LORA = Study(
    tasks={
        "word_problems": Task(
            "word_problems",
            _trained(2e-5, all_linear=(1, 32), attention=(32,)),
            {"trainer.max_steps": 10, "trainer.val_check_interval": 10, "model.lr_scheduler.init_args.total_iters": 10},
        )
    },
    bounds=_as_all_weights(0.08, 1, 32),
)
"""Adapters of all linear layers or of attention alone, at one and ten times the rate of all weights.

The seeds of this task differ by 0.02 (``real_model_learning``).
"""

STUDIES = {
    "modes_learning": MODES,
    "sorted_learning": SORTED_LEARNING,
    "overlap_learning": OVERLAP_LEARNING,
    "stability": STABILITY,
    "budgets": BUDGETS,
    "capo_norms": CAPO_NORMS,
    "catch_credit": CATCH_CREDIT,
    "hybrid_learning": HYBRID,
    "tool_use": TOOL_USE,
    "vllm_learning": VLLM_LEARNING,
    "real_model_generators": REAL_MODEL_GENERATORS,
    "lora_word_problems": WORD_PROBLEMS_LORA,
}
