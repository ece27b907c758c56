"""Converts a config of TRL's GRPO into one of ours, field by field."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lit_grpo.tools.migration.forms import typed_fields
from lit_grpo.tools.migration.table import BATCH, TRL, Counterpart

PEFT_DEFAULT = "peft-default"
"""That of :mod:`lit_grpo.policy.adapters`, which imports torch."""
CLIPPED = ("grpo", "dr_grpo", "dapo", "bnpo", "luspo")
PARAMETERS = {
    **dict.fromkeys(CLIPPED, ("epsilon", "epsilon_high", "delta")),
    "cispo": ("epsilon_high",),
    "sapo": ("sapo_temperature_pos", "sapo_temperature_neg"),
    "vespo": ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
}
"""The fields that each loss of TRL reads."""
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "AdamW"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "AdamW8bit"),
    "sgd": "SGD",
}
SHAPES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {
        "function": "math_equivalence",
        "name": "accuracy_reward",
        "args": {"answer_column": "solution"},
    },
    "reasoning_accuracy_reward": {"function": "trl.rewards.reasoning_accuracy_reward"},
    "think_format_reward": {
        "function": "format_match",
        "name": "think_format_reward",
        "args": {"pattern": "<think>(?!.*<think>)(.*?)</think>.*"},
    },
    "get_soft_overlong_punishment": {
        "function": "soft_overlong_penalty",
        "name": "get_soft_overlong_punishment",
        "args": {"buffer": 256, "max_tokens": 1280},
    },
}


MOST_PROBLEMS = 20
"""The most problems that are told; a file of another program may have thousands of fields."""
ROWS = (".jsonl", ".json", ".csv", ".parquet")
"""Suffixes of files with rows."""
Part = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Returns fields of ours, by their dotted names, of all fields of TRL with their values."""
OLD = {
    "max_seq_length": "give max_length",
    "warmup_ratio": "give warmup_steps, a fraction of the run if it is below 1, such as warmup_steps: 0.1",
    "max_prompt_length": "leave it out, and give fit --data.max_prompt_tokens; rows with longer prompts are refused, "
    "or left out with --data.unusable_rows drop, and no prompt is cut",
    "environment_factory": "leave it out, and give fit --rollout.plugins environments:factory=my_env.py:Game",
    "tools": "leave it out, and set rollout.plugins to [{environments: {tools: [my_tools.py:search]}}]",
    "rollout_func": "user-defined rollouts are not supported; write an environment, which has respond(text) for a turn",
    **dict.fromkeys(
        ("max_staleness", "max_inflight_tasks", "weight_sync_steps", "queue_maxsize"),
        "it is one of AsyncGRPO, which is not converted; convert the rest, and set rollout.plugins to asynchronous",
    ),
}
"""Fields of earlier versions of TRL and of its other trainers, and what to do instead."""


@dataclass(frozen=True)
class Converted:
    """Our config, and notes on fields that have another meaning here."""

    config: dict[str, Any]
    notes: list[str]


def convert_trl(given: Mapping[str, Any], rows: int | None = None, devices: int = 1, drop: bool = False) -> Converted:
    """Convert the fields of a YAML file for ``trl grpo --config``.

    Args:
        given: The fields; those left out have TRL's defaults.
        rows: The number of training prompts, to turn epochs into steps.
        devices: The number of devices of the run, each with a process.
        drop: Leave out the fields that have no counterpart here, and name each in a note.

    Raises:
        ValueError: TRL has no such field, or its value is not supported.
    """
    parts = (run_of, partial(_batches, rows, devices), model_of, _generator, _objective, _plugins, data_of, _rewards)
    made = converted(given, TRL, "GRPO", parts, drop)
    sampled = made.config["data"]["batch_size"] * made.config["model"]["num_generations"]
    _add(made.config, {"model.generator.init_args.num_slots": min(256 if given.get("use_vllm") else 64, sampled)})
    return made


def converted(
    given: Mapping[str, Any], table: Mapping[str, Counterpart], trainer: str, parts: Sequence[Part], drop: bool
) -> Converted:
    """Convert the fields of one of TRL's trainers.

    Raises:
        ValueError: The trainer has no such field, or its value is not supported.
    """
    given = _with_model_arguments(given)
    without = dict(_without_counterpart(given, table, trainer))
    problems = [] if drop else list(without.values())
    known = {name: value for name, value in given.items() if name in table and name not in without}
    try:
        given = typed_fields(known, table)
    except ValueError as error:
        raise ValueError("\n".join(first_of([*problems, str(error)]))) from error
    taken = {name: row.default for name, row in (TRL | dict(table)).items()} | dict(given)
    config: dict[str, Any] = {"seed_everything": taken["seed"]}
    for part in parts:
        try:
            _add(config, part(taken))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        names = "" if drop else ", ".join(first_of(list(without)))
        raise ValueError(
            "\n".join(first_of(problems)) + (f" With --drop the rest is converted without {names}." if names else "")
        )
    _add(config, {"run.wandb_project": given.get("project")})
    own = {name: table[name] for name, value in given.items() if value != table[name].default}
    notes = [f"{name}: {row.note}" for name, row in own.items() if row.kind in ("changed", "none")]
    return Converted(config, [*(f"Left out: {sentence}" for sentence in without.values()), *_merged(notes)])


def first_of(listed: list[str]) -> list[str]:
    """Return the first of a long list, and how many more there are."""
    more = len(listed) - MOST_PROBLEMS
    return listed if more <= 0 else [*listed[:MOST_PROBLEMS], f"and {more:,} more"]


def _with_model_arguments(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return fields in which those of ``model_init_kwargs`` that ModelConfig has too stand by themselves."""
    arguments = given.get("model_init_kwargs")
    if not isinstance(arguments, Mapping):
        return given
    names = {"torch_dtype": "dtype", "revision": "model_revision"}
    arguments = {names.get(str(name), str(name)): value for name, value in arguments.items()}
    if not arguments.keys() <= {"dtype", "model_revision", "attn_implementation", "trust_remote_code", "use_cache"}:
        return given
    return {**{name: value for name, value in given.items() if name != "model_init_kwargs"}, **arguments}


def _without_counterpart(
    given: Mapping[str, Any], table: Mapping[str, Counterpart], trainer: str
) -> Iterator[tuple[str, str]]:
    """Yield each field that TRL does not have, or whose value is not supported here, with a sentence on it."""
    for name, value in given.items():
        if name == "env":
            yield name, "env sets variables of TRL's process; set them in the shell, and leave it out."
        elif name in OLD:
            yield name, f"{name} is {value!r:.60}, but TRL 1.16 has no such field: {OLD[name]}."
        elif name not in table:
            yield name, f"TRL 1.16 has no field {name!r:.60} for {trainer}; correct it, or leave it out."
        elif table[name].kind == "refused" and value not in (table[name].default, None):
            yield name, f"{name} is {value!r:.60}, which cannot be had: {table[name].note}."


def _merged(notes: list[str]) -> list[str]:
    """Join the notes of fields with the same text."""
    fields: dict[str, list[str]] = {}
    for text in notes:
        name, note = text.split(": ", 1)
        fields.setdefault(note, []).append(name)
    return [f"{', '.join(names)}: {note}" for note, names in fields.items()]


def _add(config: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Set fields by their dotted names; None leaves one out."""
    for name, value in fields.items():
        if value is not None:
            *path, last = name.split(".")
            place = config
            for part in path:
                place = place.setdefault(part, {})
            place[last] = value


def run_of(taken: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the run's folder, logs and precision."""
    folder = Path(taken["output_dir"] or "runs/grpo")
    reports = taken["report_to"] if isinstance(taken["report_to"], list) else [taken["report_to"]]
    saves = taken["save_steps"]
    if not isinstance(saves, int) or saves < 1:
        raise ValueError(f"save_steps is {saves!r}, a share of the run; give a number of steps.")
    return {
        "run.name": folder.name,
        "run.dir": str(folder.parent),
        "run.wandb": "online" if {"wandb", "all"} & set(reports) else None,
        "checkpoint.every_n_updates": 0 if taken["save_strategy"] == "no" else saves,
        "sample_logger.num_samples": taken["num_completions_to_print"],
        "trainer.precision": "32-true" if taken["bf16"] is False else "bf16-mixed",
        "trainer.accelerator": "cpu" if taken["use_cpu"] else None,
    }


def _batches(rows: int | None, devices: int, taken: Mapping[str, Any]) -> dict[str, Any]:
    each, accumulated = taken["per_device_train_batch_size"], taken["gradient_accumulation_steps"]
    group, per_generation = taken["num_generations"], taken["steps_per_generation"]
    completions = taken["generation_batch_size"] or each * devices * (per_generation or accumulated)
    if per_generation and taken["generation_batch_size"]:
        raise ValueError("steps_per_generation and generation_batch_size are both given; TRL takes one of them.")
    prompts, left = divmod(completions, group * devices)
    if left or not prompts:
        raise ValueError(
            f"A generation batch of TRL has {completions} completions, which make no whole number of prompts on each "
            f"of {devices} devices at num_generations {group}; change one of them, or give --devices. {BATCH}."
        )
    minibatches, left = divmod(completions, each * devices * accumulated)
    if left or not minibatches or prompts % minibatches:
        raise ValueError(
            f"A generation batch of {completions} completions is {completions / (each * devices * accumulated):g} "
            "optimizer steps in TRL, but here a step is made of whole prompts; make per_device_train_batch_size x "
            "gradient_accumulation_steps a multiple of num_generations that divides the generation batch."
        )
    iterations = taken["num_iterations"]
    steps = taken["max_steps"]
    if steps <= 0:
        batches = rows_of(taken, rows, "prompts") // (prompts * devices)
        steps = math.ceil(taken["num_train_epochs"] * batches * minibatches * iterations)
    interval = None
    if taken["eval_strategy"] != "no":
        interval = max(1, round((taken["eval_steps"] or 500) / (minibatches * iterations)))
    return {
        "data.batch_size": prompts,
        "data.eval_batch_size": max(1, taken["per_device_eval_batch_size"] // (taken["num_generations_eval"] or group)),
        "model.num_generations": group,
        "model.eval_num_generations": taken["num_generations_eval"] or group,
        "model.num_minibatches": minibatches,
        "model.num_iterations": iterations,
        "model.max_tokens_per_micro_batch": max(8192, each * taken["max_completion_length"]),
        **length_of(taken, steps, interval, devices),
    }


def rows_of(taken: Mapping[str, Any], rows: int | None, kind: str) -> int:
    """Return the number of training rows, which epochs are counted in.

    Raises:
        ValueError: It is not given.
    """
    if rows is None:
        raise ValueError(
            f"num_train_epochs is {taken['num_train_epochs']}, but a run ends after a number of optimizer steps; "
            f"give --rows N, the number of training {kind}, or max_steps."
        )
    return rows


def length_of(taken: Mapping[str, Any], steps: int, interval: int | None, devices: int) -> dict[str, Any]:
    """Return the fields of a run of so many steps, validated every ``interval`` batches."""
    return {
        "trainer.max_steps": steps,
        "trainer.val_check_interval": interval,
        "trainer.devices": devices if devices > 1 else None,
        "trainer.strategy": "ddp" if devices > 1 else None,
        "model.lr_scheduler": schedule_of(taken, steps),
    }


def schedule_of(taken: Mapping[str, Any], steps: int) -> dict[str, Any] | None:
    """Return the learning-rate schedule of a run of so many steps; None if the rate is constant."""
    shape, warmup, further = taken["lr_scheduler_type"], taken["warmup_steps"], taken["lr_scheduler_kwargs"] or {}
    warmup = math.ceil(warmup * steps) if 0 < warmup < 1 else int(warmup)
    settings = {"total_steps": steps, "warmup_steps": warmup}
    if shape == "warmup_stable_decay":
        settings |= _stable_decay(further, settings)
    elif shape not in SHAPES:
        raise ValueError(
            f"lr_scheduler_type is {shape!r}; take {', '.join(SHAPES)} or warmup_stable_decay, or give a class in "
            "model.lr_scheduler."
        )
    elif further:
        raise ValueError(
            f"lr_scheduler_kwargs has {', '.join(further)}, which {shape} cannot have here; leave it out, or give a "
            "schedule of your own as model.lr_scheduler."
        )
    elif shape == "constant":  # in transformers it has no warm-up
        return None
    else:
        settings["shape"] = SHAPES[shape]
    return {"class_path": "WarmupDecayLR", "init_args": settings}


def _stable_decay(further: Mapping[str, Any], settings: Mapping[str, int]) -> dict[str, Any]:
    """Return our arguments for those of transformers' ``get_wsd_schedule``."""
    only = {"decay_type": ("cosine", "linear"), "warmup_type": ("linear",), "min_lr_ratio": (0,), "num_cycles": (0.5,)}
    for name, value in further.items():
        if name in only and value not in only[name]:
            listed = " or ".join(map(str, only[name]))
            raise ValueError(
                f"lr_scheduler_kwargs has {name} {value!r}, which WarmupDecayLR cannot have; take {listed}, or give a "
                "schedule of your own as model.lr_scheduler."
            )
        if name not in (*only, "num_decay_steps", "num_stable_steps"):
            raise ValueError(f"lr_scheduler_kwargs has {name!r}, which transformers' get_wsd_schedule does not take.")
    if "num_decay_steps" not in further:
        raise ValueError(
            "lr_scheduler_type is warmup_stable_decay, and lr_scheduler_kwargs has no num_decay_steps, which TRL needs "
            "too; give it."
        )
    decay, stable = further["num_decay_steps"], further.get("num_stable_steps")
    total = settings["total_steps"] if stable is None else settings["warmup_steps"] + stable + decay
    return {"total_steps": total, "shape": further.get("decay_type", "cosine"), "decay_steps": decay}


def model_of(taken: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the policy and its optimizer."""
    if taken["model_name_or_path"] is None:
        raise ValueError("model_name_or_path is not given; TRL needs it too.")
    if taken["optim"] not in OPTIMIZERS:
        raise ValueError(
            f"optim is {taken['optim']!r}; take {', '.join(OPTIMIZERS)}, or give a class in model.optimizer."
        )
    optimizer = {"lr": float(taken["learning_rate"]), "weight_decay": float(taken["weight_decay"])}
    if OPTIMIZERS[taken["optim"]] != "SGD":
        optimizer |= {"betas": [taken["adam_beta1"], taken["adam_beta2"]], "eps": float(taken["adam_epsilon"])}
    targets = taken["lora_target_modules"] or PEFT_DEFAULT
    lora = {
        "r": taken["lora_r"],
        "alpha": float(taken["lora_alpha"]),
        # Of a list of one, TRL takes the item: a pattern, or all-linear.
        "target_modules": targets[0] if isinstance(targets, list) and len(targets) == 1 else targets,
        "rslora": taken["use_rslora"],
        "base": "nf4" if taken["load_in_4bit"] else None,
    }
    if taken["load_in_4bit"] and not taken["use_peft"]:
        raise ValueError("load_in_4bit is true without use_peft; weights in four bits cannot be trained themselves.")
    return {
        "model.policy": taken["model_name_or_path"],
        "model.dtype": "bfloat16" if taken["dtype"] == "bfloat16" else "float32",
        "model.lora": lora if taken["use_peft"] else None,
        "model.gradient_checkpointing": taken["gradient_checkpointing"],
        "model.max_grad_norm": float(taken["max_grad_norm"]),
        "model.optimizer": {"class_path": OPTIMIZERS[taken["optim"]], "init_args": optimizer},
        "model.sampling.temperature": float(taken["temperature"]),
        "model.sampling.max_tokens": taken["max_completion_length"],
        "model.sampling.stop": _stop(taken["generation_kwargs"] or {}),
    }


def _stop(settings: Mapping[str, Any]) -> list[str] | None:
    if others := set(settings) - {"stop"}:
        raise ValueError(f"generation_kwargs has {', '.join(sorted(others))}; only stop can be had.")
    stop = settings.get("stop")
    return [stop] if isinstance(stop, str) else stop


def _generator(taken: Mapping[str, Any]) -> dict[str, Any]:
    if not taken["use_vllm"]:
        return {"model.generator": {"class_path": "slots", "init_args": {}}}
    length = {"max_model_len": taken["vllm_max_model_length"]} if taken["vllm_max_model_length"] else None
    if taken["vllm_mode"] == "server":
        name, arguments = "vllm_server", {"start_timeout_s": float(taken["vllm_server_timeout"]), "server_args": length}
    else:
        name, arguments = "vllm", {"sleep_level": int(taken["vllm_enable_sleep_mode"]), "engine_args": length}
    given = {field: value for field, value in arguments.items() if value is not None}
    return {"model.generator": {"class_path": name, "init_args": given}}


def _objective(taken: Mapping[str, Any]) -> dict[str, Any]:
    loss = taken["loss_type"]
    if loss not in PARAMETERS:
        raise ValueError(f"loss_type is {loss!r}; TRL 1.16 has {', '.join(PARAMETERS)}.")
    sequence = taken["importance_sampling_level"] == "sequence"
    name = {"bnpo": "dapo"}.get(loss, loss)
    if sequence and name in ("grpo", "dapo", "dr_grpo"):
        name = "gspo"
    fields: dict[str, Any] = {"loss": name}
    for parameter in PARAMETERS[loss]:
        fields[TRL[parameter].fields[0].rsplit(".", 1)[1]] = taken[parameter]
    if loss in CLIPPED:
        fields["epsilon_high"] = taken["epsilon"] if taken["epsilon_high"] is None else taken["epsilon_high"]
    if loss == "cispo" and (taken["epsilon_high"] or 0) < 1:
        raise ValueError("loss_type is cispo, whose largest weight is epsilon_high; give it, such as 5.0.")
    if taken["beta"]:
        fields["kl.beta"] = float(taken["beta"])
        fields["kl.importance_weighted"] = bool(taken["use_bias_correction_kl"])
    fields |= {
        "mask_truncated": taken["mask_truncated_completions"],
        "top_entropy_quantile": float(taken["top_entropy_quantile"]),
        "off_policy_threshold": taken["off_policy_mask_threshold"],
        "entropy.coefficient": None if taken["use_adaptive_entropy"] else float(taken["entropy_coef"]),
    }
    if taken["use_vllm"] and taken["vllm_importance_sampling_correction"]:
        cap = taken["vllm_importance_sampling_cap"]
        fields["correction.mode"] = taken["vllm_importance_sampling_mode"]
        fields["correction.high"] = taken["vllm_importance_sampling_clip_max"] if cap is None else cap
        fields["correction.low"] = taken["vllm_importance_sampling_clip_min"]
    scale = {True: "group", False: "none"}.get(taken["scale_rewards"], taken["scale_rewards"])
    apart = taken["multi_objective_aggregation"] == "normalize_then_sum"
    advantages = {"estimator": "gdpo"} if apart else {"estimator": "grpo", "scale": scale}
    return {f"model.objective.{name}": value for name, value in fields.items()} | {"model.advantages": advantages}


def _plugins(taken: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plug-ins of what is a method here, with their fields."""
    plugins: list[dict[str, Any]] = []
    if taken["sync_ref_model"]:
        mixup = {"mixup_alpha": taken["ref_model_mixup_alpha"], "sync_steps": taken["ref_model_sync_steps"]}
        plugins.append({"tr_dpo": mixup})
    if taken["use_adaptive_entropy"]:
        names = {
            "target": "entropy_target",
            "coefficient": "entropy_coef",
            "delta": "entropy_coef_delta",
            "min_coefficient": "entropy_coef_min",
            "max_coefficient": "entropy_coef_max",
        }
        plugins.append({"entropy_target": {field: float(taken[name]) for field, name in names.items()}})
    return {"rollout.plugins": plugins or None}


def data_of(taken: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the data."""
    path = taken["dataset_name"]
    if path is None:
        raise ValueError("dataset_name is not given; TRL needs it too.")

    def split_of(split: str) -> Any:
        if Path(split).suffix in ROWS:
            return split
        if Path(path).is_file() or Path(path).suffix in ROWS:
            return path
        given = {"path": path, "name": taken["dataset_config"], "split": split}
        return {"class_path": "HubRows", "init_args": {name: value for name, value in given.items() if value}}

    validates = taken["eval_strategy"] != "no"
    if validates and split_of(taken["dataset_train_split"]) == split_of(taken["dataset_test_split"]):
        raise ValueError(
            f"eval_strategy is {taken['eval_strategy']!r}, but validation rows would be the training rows of {path!r}; "
            "set eval_strategy to no here, and give fit --data.validation a file of held-out rows, or name a dataset "
            "whose dataset_test_split is another split."
        )
    return {
        "data.train": split_of(taken["dataset_train_split"]),
        "data.validation": split_of(taken["dataset_test_split"]) if validates else None,
        "data.shuffle": taken["shuffle_dataset"],
        "data.chat_template_kwargs": taken["chat_template_kwargs"],
    }


def _rewards(taken: Mapping[str, Any]) -> dict[str, Any]:
    names = taken["reward_funcs"] or []
    names = [names] if isinstance(names, str) else names
    if not names:
        raise ValueError("reward_funcs is empty; name at least one.")
    named = [name for name in names if isinstance(name, str)]  # a script may give arguments too
    if unknown := [name for name in named if name not in REWARDS and "." not in name]:
        raise ValueError(f"reward_funcs has {unknown[0]!r}; TRL knows {', '.join(REWARDS)}, and import paths.")
    weights = taken["reward_weights"] or [1.0] * len(names)
    if len(weights) != len(names):
        raise ValueError(f"reward_weights has {len(weights)} weights for {len(names)} reward_funcs; give one each.")
    specs = [dict(REWARDS.get(name, {"function": name})) if isinstance(name, str) else name for name in names]
    weighed = [spec | {"weight": float(weight)} for spec, weight in zip(specs, weights, strict=True)]
    return {"model.rewards": weighed}
