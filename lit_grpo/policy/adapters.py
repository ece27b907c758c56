"""LoRA adapters of the policy, by peft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import torch
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from lit_grpo.compatibility import SHARDS, Requirement, check_together
from lit_grpo.limits import Limit, Positive, check_fields
from lit_grpo.policy.architecture.vision import frozen_layers, image_features, sees, small_image
from lit_grpo.policy.weights import active_adapters, adapted_parameter, is_adapter, lora_layers
from lit_grpo.process.packages import require
from lit_grpo.ranks import Ranks
from lit_grpo.types import Pictures

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel


MOST_RANK = 8192
"""The highest rank of an adapter; policies have layers of so many features and more."""


@dataclass(frozen=True)
class LoraSettings:
    """Train low-rank adapters (LoRA, arXiv 2106.09685) and keep the weights of the policy frozen."""

    r: Annotated[int, Limit(ge=1, le=MOST_RANK, remedy="a higher rank adapts all weights")] = 16
    """Rank of the adapters."""
    alpha: Positive = 32.0
    """The adapters' output is scaled by ``alpha / r``. Keep it if you change ``r``: the best learning rate then hardly
    depends on the rank ("LoRA Without Regret", Thinking Machines Lab, 2025).
    """
    target_modules: list[str] | str = "all-linear"
    """Names of the linear layers and embeddings that get an adapter, such as ``[q_proj, v_proj]``, or of a module or
    parameter that holds all experts of a layer (``experts``); or a regular expression of whole names. ``all-linear`` is
    all linear layers except the head and those on which no adapter can be trained, such as ``out_proj`` of Mamba 2;
    ``peft-default`` is what peft takes for the policy's family if no names are given, often q_proj and v_proj alone. An
    adapter of the head or the embedding unties the two.
    """
    rslora: bool = False
    """Scale by ``alpha / sqrt(r)`` instead (arXiv 2312.03732)."""
    base: Literal["nf4"] | None = None
    """``nf4`` keeps the frozen linear layers in four bits (QLoRA, arXiv 2305.14314); needs bitsandbytes. Sampling and
    exports then use the rounded weights with adapters.
    """

    def __post_init__(self) -> None:
        check_fields(self, "model.lora.")
        if not self.target_modules:
            raise ValueError("model.lora.target_modules is empty; name layers, or take all-linear.")


PEFT_DEFAULT = "peft-default"
_PROBE_TOKENS = 4


def add_adapters(policy: PreTrainedModel, settings: LoraSettings) -> None:
    """Add adapters, which change nothing yet, and freeze everything else.

    Raises:
        ValueError: peft is not installed, no layer has one of the names, or a layer cannot have an adapter.
    """
    require("peft", "model.lora needs peft; install the extra lit_grpo[lora].")
    from peft import LoraConfig

    passed_over = _passed_over(policy)
    targets, parameters = _found(policy, _wanted(policy, settings), passed_over)
    odd = [*_odd_linears(policy), *passed_over, *frozen_layers(policy)]
    if targets == "all-linear" and (forbidden := _forbidden(policy)):
        odd += forbidden
        names = " and ".join(sorted({name.rpartition(".")[2] for name in forbidden}))
        Ranks().warn(
            f"lora.target_modules all-linear leaves out {names}, which peft gives {type(policy).__name__} no adapters "
            "for, because fused kernels on a GPU read the weight without calling the layer."
        )
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,  # pyrefly: ignore[bad-argument-type]
        target_modules=targets,
        target_parameters=parameters or None,
        exclude_modules=odd or None,
        use_rslora=settings.rslora,
        lora_dropout=0.0,  # the trainer's log-probs must be the generator's
        task_type="CAUSAL_LM",
    )
    try:
        policy.add_adapter(config)
    except (ValueError, NotImplementedError, TypeError) as error:
        raise ValueError(
            f"lora.target_modules is {settings.target_modules!r}, which peft gives {type(policy).__name__} no adapters "
            f"for ({' '.join(str(error).split())}); name other layers."
        ) from error
    check_adapters(policy)


def _wanted(policy: PreTrainedModel, settings: LoraSettings) -> list[str] | str:
    """Return the target names of the settings: one name as a list, ``peft-default`` as peft's names for the family."""
    if settings.target_modules != PEFT_DEFAULT:
        targets = settings.target_modules
        return [targets] if isinstance(targets, str) and targets.isidentifier() else targets
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as NAMES

    family = str(policy.config.model_type)
    if family not in NAMES:
        raise ValueError(
            f"lora.target_modules is {PEFT_DEFAULT}, but peft has no default for the family {family}; name layers, or "
            "take all-linear."
        )
    return names if isinstance(names := NAMES[family], str) else list(names)


def _found(
    policy: PreTrainedModel, targets: list[str] | str, passed_over: list[str]
) -> tuple[list[str] | str, list[str]]:
    """Divide target names into those of layers, and those of parameters that hold all experts of a layer."""
    if isinstance(targets, str):  # all-linear, or a regular expression; peft reports one that nothing matches
        return targets, []
    modules, odd = dict(policy.named_modules()), _odd_linears(policy)
    layers, parameters = list[str](), list[str]()
    for target in targets:
        called = [module for name, module in modules.items() if _is_called(name, target)]
        stacks = {kind for module in called for kind, one in module.named_parameters(recurse=False) if one.ndim == 3}
        if refused := [name for name in odd if _is_called(name, target)]:
            raise ValueError(
                f"lora.target_modules names {target!r}, but {refused[0]} is a {type(modules[refused[0]]).__name__}, "
                "which does more than multiply by its weight, so an adapter could not be merged into the weight; leave "
                f"{target} out."
            )
        if unheard := [name for name in passed_over if _is_called(name, target)]:
            raise ValueError(
                f"lora.target_modules names {target!r}, but {type(policy).__name__} reads the weight of {unheard[0]} "
                f"without calling it, so an adapter there would compute nothing; leave {target} out."
            )
        if stacks:
            parameters += [f"{target}.{kind}" for kind in sorted(stacks)]
        elif called:
            layers.append(target)
        elif any(_is_called(name, target) for name, one in policy.named_parameters() if one.ndim == 3):
            parameters.append(target)
        else:
            raise ValueError(_unknown_target(policy, target))
    return layers, parameters


def _is_called(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _unknown_target(policy: PreTrainedModel, target: str) -> str:
    linear = {name for name, module in policy.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)}
    known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
    stacks = sorted({name.rpartition(".")[2] for name, one in policy.named_parameters() if one.ndim == 3})
    beside = f", and its parameters of all experts {', '.join(stacks)}" if stacks else ""
    return (
        f"lora.target_modules names {target!r}, which no layer of {type(policy).__name__} is called; its linear layers "
        f"are {known}{beside}."
    )


def _odd_linears(policy: PreTrainedModel) -> list[str]:
    """Return the linear layers that compute more than a product, such as a router that also chooses experts.

    Layers in four bits compute a product like others.
    """
    return [
        name
        for name, module in policy.named_modules()
        if isinstance(module, torch.nn.Linear)
        and type(module).forward is not torch.nn.Linear.forward
        and not type(module).__module__.startswith("bitsandbytes.")
    ]


def _passed_over(policy: PreTrainedModel) -> list[str]:
    """Return the linear layers that a forward pass never calls: other code reads their weights, or none does.

    An adapter of such a layer, for example Jamba's ``dt_proj``, would be merged into an export and have no part in
    training. A layer counts as called if a layer of the same name is called, because the few tokens here do not reach
    every expert. A vision tower sees a small image. An outline without weights cannot be run: no layer is returned.
    """
    linear = {name: one for name, one in policy.named_modules() if isinstance(one, torch.nn.Linear | Conv1D)}
    if not linear or any(weight.is_meta for weight in policy.parameters()):
        return []
    called = set[str]()
    hooks = [
        module.register_forward_hook(lambda *_, name=name: called.add(name.rpartition(".")[2]))
        for name, module in linear.items()
    ]
    try:
        with torch.no_grad():
            policy(input_ids=torch.arange(_PROBE_TOKENS, device=policy.device)[None], use_cache=False)
            if sees(policy):
                image_features(policy, [Pictures((small_image(),), b"")])
    finally:
        for hook in hooks:
            hook.remove()
    return [name for name in linear if name.rpartition(".")[2] not in called]


def _forbidden(policy: PreTrainedModel) -> list[str]:
    """Return the linear layers that peft refuses to give adapters in this family, such as ``out_proj`` of Mamba2."""
    from peft import LoraConfig, LoraModel

    found = list[str]()
    for name, module in policy.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and ".lora_" not in name:
            try:
                LoraModel._check_target_module_compatiblity(
                    cast(Any, None), LoraConfig(), policy, name.rpartition(".")[2]
                )
            except ValueError:
                found.append(name)
    return found


_UNMERGEABLE = (
    *("use_dora", "lora_bias", "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "use_qalora"),
    *("kasa_config", "monteclora_config", "velora_config", "use_bdlora", "layer_replication", "megatron_config"),
)
"""Settings of peft's LoraConfig that make an adapter more than a product of two matrices added to a weight."""


def check_config(config: Any, name: str = "model.policy") -> None:
    """Refuse peft's configuration of an adapter that is no plain LoRA, before its weights are loaded."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    remedy = "merge it into its base with peft's merge_and_unload, save that, and give the folder as model.policy"
    if kind != "LORA":
        raise ValueError(f"{name} is an adapter of peft_type {kind}, and only LORA can be trained; {remedy}.")
    for setting in _UNMERGEABLE:
        if value := getattr(config, setting, None):
            raise ValueError(
                f"{name} is an adapter with {setting} {value!r:.60}, which cannot be merged into the weights that a "
                f"generator and an export get; {remedy}, or train the adapter without {setting}."
            )


def check_adapters(policy: PreTrainedModel) -> None:
    """Refuse adapters that cannot be merged into the weights; untie embedding and head if one has an adapter."""
    known: set[int] = set()
    for path, layer in lora_layers(policy):
        if isinstance(base := layer.get_base_layer(), _ConvNd):  # whose weight layers with states read without a call
            raise ValueError(
                f"{path} is a {type(base).__name__}, and adapters are trained on linear layers, embeddings and experts "
                "alone; leave it out of lora.target_modules."
            )
        for name in active_adapters(layer):
            for matrices in (layer.lora_A, layer.lora_B):
                known |= {id(matrices[name].weight)} if name in matrices else set()
            for matrices in (layer.lora_embedding_A, layer.lora_embedding_B):
                known |= {id(matrices[name])} if name in matrices else set()
    for name, weight in policy.named_parameters():
        if weight.requires_grad and is_adapter(name) and id(weight) not in known:
            raise ValueError(
                f"The adapter trains {name}, which cannot be merged into the weights that a generator and an export "
                "get; take an adapter of LoRA without DoRA, biases of its own (lora_bias) and trained tokens."
            )
    _untie(policy)
    adapted: dict[int, str] = {}
    for name, layer in lora_layers(policy):
        first = adapted.setdefault(id(adapted_parameter(layer)), name)
        if first != name:
            raise ValueError(
                f"{first} and {name} have one weight, so their two adapters cannot both be merged into it; name other "
                "layers in lora.target_modules."
            )


def _untie(policy: PreTrainedModel) -> None:
    """Give a head that is tied to the embedding its own weight, if one of the two has an adapter.

    peft adds the adapter to the output of the one, and not to the weight that both share.
    """
    embedding, head = cast("list[Any]", [policy.get_input_embeddings(), policy.get_output_embeddings()])
    if head is None or embedding is head or not any(hasattr(end, "base_layer") for end in (embedding, head)):
        return
    bare_embedding, bare_head = (
        end.get_base_layer() if hasattr(end, "base_layer") else end for end in (embedding, head)
    )
    if bare_head.weight is not bare_embedding.weight:
        return
    weight = bare_head.weight
    bare_head.weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    for config in {id(one): one for one in (policy.config, policy.config.get_text_config())}.values():
        config.tie_word_embeddings = False
    state: Any = policy
    state.all_tied_weights_keys = {}


def check_can_be_shards(policy: PreTrainedModel) -> None:
    """Refuse adapters of parameters that hold all experts of a layer, which peft replaces during a forward pass."""
    for name, layer in lora_layers(policy):
        if (parameter := getattr(layer, "parameter_name", None)) is not None:
            trained = f"model.lora on {name}.{parameter}, all experts of a layer in one parameter or their router,"
            remedy = "name other layers in model.lora.target_modules"
            check_together([Requirement(trained, frozenset({"unsharded_weights"}), remedy=remedy), SHARDS])


def has_adapters(policy: PreTrainedModel) -> bool:
    return bool(getattr(policy, "_hf_peft_config_loaded", False))


def own_adapter(policy: PreTrainedModel) -> LoraConfig:
    settings: Any = policy
    (name,) = policy.active_adapters()
    return settings.peft_config[name]


def go_on_with(policy: PreTrainedModel, settings: LoraSettings | None) -> None:
    """Prepare the adapter that a policy came with for training; settings, if given, must agree with it.

    Raises:
        ValueError: The adapter differs from ``settings``, or is of a kind that cannot be trained.
    """
    names, state = policy.active_adapters(), cast(Any, policy)
    if len(names) != 1:
        raise ValueError(f"model.policy has the active adapters {', '.join(names)}; activate the one to be trained.")
    config = own_adapter(policy)
    check_config(config)
    if any(layer.merged for _, layer in lora_layers(policy)):
        raise ValueError(
            "model.policy has its adapter merged into its weights; call unmerge_adapter first, or merge_and_unload to "
            "train the result."
        )
    if settings is not None:
        _check_same(policy, config, settings)
    config.inference_mode = False
    for name, weight in policy.named_parameters():
        weight.requires_grad_(is_adapter(name) and f".{names[0]}" in name)
    for module in policy.modules():
        if hasattr(module, "modules_to_save") and names[0] in cast(Any, module).modules_to_save:
            cast(Any, module).modules_to_save[names[0]].requires_grad_(True)
    state.peft_config[names[0]] = config
    check_adapters(policy)


def _check_same(policy: PreTrainedModel, config: LoraConfig, settings: LoraSettings) -> None:
    there = {layer_name for layer_name, _ in lora_layers(policy)}
    linear = {
        name.replace(".base_layer", "")
        for name, module in policy.named_modules()
        if isinstance(module, torch.nn.Linear) and ".lora_" not in name
    } - {name for name, module in policy.named_modules() if module is policy.get_output_embeddings()}
    linear -= {*_odd_linears(policy), *_passed_over(policy), *_forbidden(policy), *frozen_layers(policy)}
    wanted = _wanted(policy, settings)
    if wanted == "all-linear":
        same = linear <= there
    elif isinstance(wanted, str):
        same = wanted == config.target_modules
    else:
        below = {name for name, _ in policy.named_modules() if ".lora_" not in name}
        below = {".".join(part for part in name.split(".") if part != "base_layer") for name in below}
        same = there == {name for name in below if any(_is_called(name, one) for one in wanted)}
    own = config.target_modules if isinstance(config.target_modules, str | None) else sorted(config.target_modules)
    values = {
        "r": (config.r, settings.r),
        "alpha": (config.lora_alpha, settings.alpha),
        "rslora": (config.use_rslora, settings.rslora),
        "target_modules": (own, own if same else wanted),
    }
    if differing := {name: pair for name, pair in values.items() if pair[0] != pair[1]}:
        there_is = ", ".join(f"{name} {pair[0]}" for name, pair in differing.items())
        other = ", ".join(f"lora.{name} {pair[1]}" for name, pair in differing.items())
        raise ValueError(
            f"model.policy is an adapter with {there_is}, but model.lora asks for {other}; leave model.lora out to go "
            "on training the adapter that is there, or merge it into its base (peft's merge_and_unload), save that, "
            "and give the folder as model.policy for a new adapter."
        )
