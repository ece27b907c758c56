"""Types and bounds of TRL's fields: a value is what its field expects before anything is computed with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import TypedDict

from lit_grpo.process.inputs import typed

if TYPE_CHECKING:
    from lit_grpo.tools.migration.table import Counterpart

LARGEST = 2**53
"""The largest whole number that a float holds exactly; no field means more."""
FREE = ("save_steps", "scale_rewards", "lr_scheduler_type", "eval_strategy", "save_strategy", "report_to")
"""Fields of several types, which are compared with words, and never computed with."""


def typed_fields(given: Mapping[str, Any], table: Mapping[str, Counterpart]) -> dict[str, Any]:
    """Return fields of TRL in the types that it gives them; a number may be written as text, as in ``1e-5`` of YAML.

    Raises:
        ValueError: A value has another type, is not finite, or is out of bounds.
    """
    import pydantic

    read = pydantic.BeforeValidator(_number)
    whole: Any = Annotated[int, read, pydantic.Field(ge=-LARGEST, le=LARGEST)]
    count: Any = Annotated[int, read, pydantic.Field(ge=1, le=LARGEST)]
    number: Any = Annotated[pydantic.FiniteFloat, read, pydantic.Field(ge=-LARGEST, le=LARGEST)]
    positive: Any = Annotated[pydantic.FiniteFloat, read, pydantic.Field(ge=0, le=LARGEST)]
    texts: Any = Annotated[
        list[str], pydantic.BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
    ]
    of_defaults = {bool: bool, int: whole, float: number, str: str}
    own: dict[str, Any] = {
        **dict.fromkeys(("num_generations", "num_iterations", "gradient_accumulation_steps", "lora_r"), count),
        **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "max_completion_length"), count),
        **dict.fromkeys(("ref_model_sync_steps", "steps_per_generation", "generation_batch_size"), count | None),
        **dict.fromkeys(("num_generations_eval", "vllm_max_model_length", "max_length"), count | None),
        **dict.fromkeys(("num_completions_to_print",), whole | None),
        **dict.fromkeys(("epsilon_high", "delta", "off_policy_mask_threshold"), number | None),
        **dict.fromkeys(("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"), number | None),
        **dict.fromkeys(("vllm_importance_sampling_cap",), number | None),
        **dict.fromkeys(("warmup_steps", "num_train_epochs"), positive),
        "lora_alpha": number,
        "eval_steps": positive | None,
        "bf16": bool | None,
        "completion_only_loss": bool | None,
        "seed": Annotated[int, read, pydantic.Field(ge=0, lt=2**32)],
        **dict.fromkeys(("model_name_or_path", "dataset_name", "dataset_config", "output_dir"), str | None),
        **dict.fromkeys(("lr_scheduler_kwargs", "generation_kwargs", "chat_template_kwargs"), dict[str, Any] | None),
        "lora_target_modules": texts | None,
        "reward_funcs": Annotated[list[str | dict[str, Any]], *texts.__metadata__],
        "reward_weights": list[number] | None,
    }
    forms = {
        name: own.get(name) or of_defaults.get(type(table[name].default), Any) if table[name].kind != "none" else Any
        for name in given
        if name not in FREE
    }
    form = TypedDict("Fields", forms, total=False)  # pyrefly: ignore[invalid-argument, name-mismatch]
    checked = typed(dict(given), form, "A field", "correct it, or leave it out")
    return dict(given) | dict(checked)


def _number(value: Any) -> Any:
    """Return the number that a text is; other values stay."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
