"""Our counterpart of each setting of TRL 1.16 and of the main ones of verl; docs/migration.md is made from this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["same", "changed", "none", "refused"]


@dataclass(frozen=True)
class Counterpart:
    """Our counterpart of a field of another trainer.

    Args:
        kind: ``same`` takes the value over; ``changed`` turns it into ``fields`` as ``note`` says; ``none`` has no
            counterpart and needs none, for the reason in ``note``; ``refused`` would change the training and is not
            supported.
        default: The field's default in the other trainer.
        fields: Names of the settings of lit_grpo that correspond to the field.
        note: Difference of the meaning, or the reason why there is no counterpart.
    """

    kind: Kind
    default: Any = None
    fields: tuple[str, ...] = ()
    note: str = ""


def _same(field: str, default: Any = None, note: str = "") -> Counterpart:
    return Counterpart("same", default, (field,), note)


def _changed(note: str, default: Any = None, *fields: str) -> Counterpart:
    return Counterpart("changed", default, fields, note)


def _none(note: str, **defaults: Any) -> dict[str, Counterpart]:
    return {name: Counterpart("none", default, (), note) for name, default in defaults.items()}


def _refused(note: str, **defaults: Any) -> dict[str, Counterpart]:
    return {name: Counterpart("refused", default, (), note) for name, default in defaults.items()}


BATCH = (
    "TRL counts completions per device, here prompts are counted: data.batch_size = per_device_train_batch_size x "
    "steps_per_generation / num_generations; model.num_minibatches = steps_per_generation / "
    "gradient_accumulation_steps; micro-batches are counted in tokens and change no gradient"
)
BATCH_FIELDS = ("data.batch_size", "model.num_minibatches", "model.max_tokens_per_micro_batch")
LOSS = (
    "bnpo is dapo here; with importance_sampling_level sequence a token-normalized loss becomes gspo, in which "
    "sequences count alike"
)
TRUNCATED = "log-probs of truncated sampling are not those that the update computes; set it in model.eval_sampling"
SCHEDULE = "model.lr_scheduler: WarmupDecayLR, stepped once per optimizer step"
SERVER = "servers are started by the run, or named in model.generator.urls (python -m lit_grpo serve)"
CORRECTION = "only where vLLM decodes: the slots' log-probs are the trainer's"
REWARDS = (
    "accuracy_reward is math_equivalence, think_format_reward format_match, get_soft_overlong_punishment "
    "soft_overlong_penalty; any other is named by its import path, and called with TRL's signature"
)
EVALUATION = "the policy is validated before the first update, and then every trainer.val_check_interval batches"
SAVING = "checkpoint.every_n_updates; last.ckpt and best.ckpt are kept"
METRICS = "every batch is a row of metrics.csv, and of TensorBoard; with several optimizer steps it has their means"
HUB = "the trained policy is a Hugging Face folder, runs/NAME/policy; upload it with hf upload"
LIGHTNING = "Lightning decides this; the Trainer's fields are in fit --help-all"

TRL: dict[str, Counterpart] = {
    # What is trained
    "model_name_or_path": _same("model.policy"),
    "dtype": _changed("float32 or bfloat16 weights; auto is float32", "float32", "model.dtype"),
    "use_peft": _changed("model.lora, if it is true", False, "model.lora"),
    "lora_r": _same("model.lora.r", 16),
    "lora_alpha": _same("model.lora.alpha", 32),
    "lora_target_modules": _same("model.lora.target_modules", None, "if TRL has none: peft-default, as TRL trains"),
    "use_rslora": _same("model.lora.rslora", False),
    "load_in_4bit": _changed("model.lora.base: nf4", False, "model.lora.base"),
    **_none("adapters have no dropout: log-probs would not be those sampled with", lora_dropout=0.05),
    **_none("NF4's own constants are not quantized again, which takes 0.4 bits a weight", use_bnb_nested_quant=False),
    **_none("implied by the model and by model.lora.base", lora_task_type="CAUSAL_LM", bnb_4bit_quant_storage=None),
    **_refused(
        "only LoRA on linear layers is trained, over full or NF4 weights",
        lora_target_parameters=None, lora_modules_to_save=None, use_dora=False, load_in_8bit=False,
        bnb_4bit_quant_type="nf4",
    ),
    **_refused("download that revision, and give its folder as model.policy", model_revision="main"),
    **_refused("no remote code is run", trust_remote_code=False),
    **_refused("set the model's config.json, or give lit_grpo.train a loaded model", model_init_kwargs=None),
    **_refused("mixtures of experts are trained without a router loss", router_aux_loss_coef=None),
    **_none("attention is transformers' sdpa, or torch's flash kernels over shared prompts", attn_implementation=None),
    **_none("dropout is always off", disable_dropout=False),
    **_none("logits are float32 always", cast_lm_head_to_fp32=False),
    **_none("tokens are packed, not padded", pad_to_multiple_of="auto"),
    # Batches and steps
    "num_generations": _same("model.num_generations", 8),
    "per_device_train_batch_size": _changed(BATCH, 8, *BATCH_FIELDS),
    "gradient_accumulation_steps": _changed(BATCH, 1, *BATCH_FIELDS),
    "steps_per_generation": _changed(BATCH, None, *BATCH_FIELDS),
    "generation_batch_size": _changed(BATCH, None, *BATCH_FIELDS),
    "num_iterations": _same("model.num_iterations", 1),
    "max_steps": _same("trainer.max_steps", -1, "optimizer steps in both"),
    "num_train_epochs": _changed(
        "runs end after trainer.max_steps; from-trl --rows N works them out of the number of prompts", 3.0,
        "trainer.max_steps",
    ),
    "max_grad_norm": _same("model.max_grad_norm", 1.0),
    "gradient_checkpointing": _same("model.gradient_checkpointing", True),
    "bf16": _changed("trainer.precision: bf16-mixed unless it is false", None, "trainer.precision"),
    "seed": _same("seed_everything", 42),
    "use_cpu": _changed("trainer.accelerator: cpu", False, "trainer.accelerator"),
    **_refused("float16 underflows without a loss scale; take bf16", fp16=False),
    **_refused("take --trainer.strategy ddp, or fsdp2, which shards the policy", deepspeed=None, fsdp=None,
               fsdp_config=None, parallelism_config=None),
    **_none("there is one seed", data_seed=None),
    **_none("of no use without deepspeed", ds3_gather_for_generation=True),
    # Optimizer
    "learning_rate": _same("model.optimizer.lr", 1e-6),
    "optim": _changed("adamw_* is AdamW, *_8bit AdamW8bit, sgd SGD; others by class path", "adamw_torch_fused",
                      "model.optimizer"),
    "weight_decay": _same("model.optimizer.weight_decay", 0.0),
    "adam_beta1": _changed("model.optimizer.betas, the first", 0.9, "model.optimizer.betas"),
    "adam_beta2": _changed("model.optimizer.betas, the second", 0.999, "model.optimizer.betas"),
    "adam_epsilon": _same("model.optimizer.eps", 1e-8),
    "lr_scheduler_type": _changed(SCHEDULE, "linear", "model.lr_scheduler"),
    "warmup_steps": _changed(SCHEDULE, 0, "model.lr_scheduler.warmup_steps"),
    **_refused("give the optimizer's own arguments as model.optimizer.NAME", optim_args=None,
               optim_target_modules=None),
    "lr_scheduler_kwargs": _changed("only for warmup_stable_decay: num_decay_steps is decay_steps; min_lr_ratio is 0",
                                    None, "model.lr_scheduler"),
    # Sampling
    "max_completion_length": _same("model.sampling.max_tokens", 512),
    "temperature": _same("model.sampling.temperature", 1.0),
    "generation_kwargs": _changed("only stop, as model.sampling.stop", None, "model.sampling.stop"),
    "chat_template_kwargs": _same("data.chat_template_kwargs"),
    **_refused(TRUNCATED, top_p=1.0, top_k=0, min_p=None),
    **_refused("a penalty changes the distribution that completions are sampled from", repetition_penalty=1.0),
    **_refused("completions are free text", vllm_structured_outputs_regex=None),
    **_refused("set max_turns of the plug-in environments in rollout.plugins", max_tool_calling_iterations=None),
    **_none("the embedded generator has a cache and a scheduler of its own", cache_implementation=None,
            use_transformers_continuous_batching=False, transformers_continuous_batching_config=None,
            use_transformers_paged=False),
    "use_vllm": _changed("model.generator: vllm or vllm_server; else slots", False, "model.generator"),
    "vllm_mode": _changed("colocate is vllm, server is vllm_server; " + SERVER, "colocate", "model.generator"),
    "vllm_enable_sleep_mode": _changed("model.generator.sleep_level: 1, or 0", False, "model.generator.sleep_level"),
    "vllm_max_model_length": _changed("max_model_len of vLLM's arguments", None, "model.generator.engine_args"),
    "vllm_server_timeout": _changed("how long a server may take to start", 240.0,
                                    "model.generator.start_timeout_s"),
    **_none(SERVER, vllm_server_base_url=None, vllm_server_host="0.0.0.0", vllm_server_port=8000,
            vllm_group_port=51216),
    **_none("model.generator.kv_memory auto takes what the update leaves", vllm_gpu_memory_utilization=0.3),
    **_refused("in this process vLLM has one device; for several set server_args of vllm_server",
               vllm_tensor_parallel_size=1),
    **_refused("set model_impl in model.generator.engine_args", vllm_model_impl="vllm"),
    # Objective
    "loss_type": _changed(LOSS, "dapo", "model.objective.loss"),
    "importance_sampling_level": _changed(LOSS, "token", "model.objective.ratio"),
    "epsilon": _same("model.objective.epsilon", 0.2, "for the losses that clip"),
    "epsilon_high": _same("model.objective.epsilon_high", None, "cispo's largest weight; must be given for it"),
    "delta": _same("model.objective.delta"),
    "sapo_temperature_neg": _same("model.objective.parameters.temperature_negative", 1.05),
    "sapo_temperature_pos": _same("model.objective.parameters.temperature_positive", 1.0),
    "vespo_k_pos": _same("model.objective.parameters.k_positive", 2.0),
    "vespo_lambda_pos": _same("model.objective.parameters.lambda_positive", 3.0),
    "vespo_k_neg": _same("model.objective.parameters.k_negative", 3.0),
    "vespo_lambda_neg": _same("model.objective.parameters.lambda_negative", 2.0),
    "beta": _same("model.objective.kl.beta", 0.0),
    "use_bias_correction_kl": _changed("if there is a KL term", True, "model.objective.kl.importance_weighted"),
    "sync_ref_model": _changed("the plug-in tr_dpo, if it is true", False, "rollout.plugins"),
    "ref_model_mixup_alpha": _changed("mixup_alpha of the plug-in tr_dpo", 0.6, "rollout.plugins"),
    "ref_model_sync_steps": _changed("sync_steps of the plug-in tr_dpo", 512, "rollout.plugins"),
    "scale_rewards": _same("model.advantages.scale", "group"),
    "multi_objective_aggregation": _changed("normalize_then_sum is the estimator gdpo", "sum_then_normalize",
                                            "model.advantages.estimator"),
    "mask_truncated_completions": _same("model.objective.mask_truncated", False),
    "top_entropy_quantile": _same("model.objective.top_entropy_quantile", 1.0),
    "off_policy_mask_threshold": _same("model.objective.off_policy_threshold"),
    "entropy_coef": _same("model.objective.entropy.coefficient", 0.0),
    "use_adaptive_entropy": _changed("the plug-in entropy_target, if it is true", False, "rollout.plugins"),
    "entropy_target": _changed("target of the plug-in entropy_target", 0.2, "rollout.plugins"),
    "entropy_coef_delta": _changed("delta of the plug-in entropy_target", 0.005, "rollout.plugins"),
    "entropy_coef_min": _changed("min_coefficient of the plug-in entropy_target", 0.0, "rollout.plugins"),
    "entropy_coef_max": _changed("max_coefficient of the plug-in entropy_target", 1.0, "rollout.plugins"),
    "vllm_importance_sampling_correction": _changed(CORRECTION, True, "model.objective.correction.mode"),
    "vllm_importance_sampling_mode": _changed(CORRECTION, "sequence_mask", "model.objective.correction.mode"),
    "vllm_importance_sampling_clip_max": _changed(CORRECTION, 3.0, "model.objective.correction.high"),
    "vllm_importance_sampling_clip_min": _changed(CORRECTION, None, "model.objective.correction.low"),
    "vllm_importance_sampling_cap": _changed(CORRECTION, None, "model.objective.correction.high"),
    # Data and rewards
    "dataset_name": _changed("a file, a folder or a hub id", None, "data.train"),
    "dataset_config": _changed("HubRows: name", None, "data.train"),
    "dataset_train_split": _changed("HubRows: split", "train", "data.train"),
    "dataset_test_split": _changed("HubRows: split; used where eval_strategy is not no", "test", "data.validation"),
    "shuffle_dataset": _same("data.shuffle", True),
    "reward_funcs": _changed(REWARDS, None, "model.rewards"),
    "reward_weights": _changed("the weight of each reward", None, "model.rewards"),
    **_refused("add the reward reward_model with its argument model", reward_model_name_or_path=None),
    **_refused("name one dataset_name, or write a RowSource that mixes", datasets=None, test_split_size=None),
    **_none("rows are read as a whole", dataset_streaming=False, streaming=False),
    **_none("every column reaches the rewards", remove_unused_columns=False),
    # Evaluation, checkpoints and logs
    "eval_strategy": _changed(EVALUATION, "no", "data.validation"),
    "eval_steps": _changed(EVALUATION, None, "trainer.val_check_interval"),
    "num_generations_eval": _same("model.eval_num_generations", None, "num_generations by default"),
    "per_device_eval_batch_size": _changed("here prompts are counted", 8, "data.eval_batch_size"),
    "output_dir": _changed("run.dir and run.name; an earlier run there is moved aside", None, "run.name", "run.dir"),
    "report_to": _changed("wandb is run.wandb: online", "none", "run.wandb"),
    "project": _changed("run.wandb_project", "huggingface", "run.wandb_project"),
    "save_strategy": _changed(SAVING, "steps", "checkpoint.every_n_updates"),
    "save_steps": _changed(SAVING, 500, "checkpoint.every_n_updates"),
    "num_completions_to_print": _same("sample_logger.num_samples", None, "4 by default"),
    **_none(SAVING, save_total_limit=None, save_only_model=False, save_on_each_node=False, enable_jit_checkpoint=False,
            load_best_model_at_end=False, metric_for_best_model=None, greater_is_better=None),
    **_none("resume with --ckpt_path runs/NAME/checkpoints/last.ckpt", resume_from_checkpoint=None,
            ignore_data_skip=False, restore_callback_states_from_checkpoint=False),
    **_none("samples are shown, and written to samples.jsonl, every sample_logger.every_n_updates; those of "
            "validations to val_samples.jsonl",
            log_completions=False, log_multimodal=True, log_unique_prompts=False, log_completions_hub_repo=None),
    **_none(METRICS, logging_strategy="steps", logging_steps=10, logging_first_step=False, log_on_each_node=True,
            logging_nan_inf_filter=True, include_num_input_tokens_seen="no", log_level="passive",
            log_level_replica="warning", disable_tqdm=None, run_name=None, trackio_space_id=None,
            trackio_bucket_id=None, trackio_static_space_id=None),
    **_none(HUB, push_to_hub=False, hub_token=None, hub_private_repo=None, hub_model_id=None,
            hub_strategy="every_save", hub_always_push=False, hub_revision=None),
    **_none(EVALUATION, eval_delay=0, eval_on_start=False, prediction_loss_only=False, eval_do_concat_batches=True,
            eval_use_gather_object=False, eval_accumulation_steps=None, include_for_metrics=[],
            batch_eval_metrics=False, do_train=False, do_eval=False, do_predict=False),
    **_none(LIGHTNING, average_tokens_across_devices=True, bf16_full_eval=False, fp16_full_eval=False, tf32=None,
            torch_compile=False, torch_compile_backend=None, torch_compile_mode=None, torch_empty_cache_steps=None,
            full_determinism=False, accelerator_config=None, dataloader_drop_last=False, dataloader_num_workers=0,
            dataloader_pin_memory=True, dataloader_persistent_workers=False, dataloader_prefetch_factor=None,
            dataloader_multiprocessing_context=None, dataloader_in_order=True, label_names=None,
            train_sampling_strategy="random", length_column_name="length", ddp_find_unused_parameters=None,
            ddp_bucket_cap_mb=None, ddp_broadcast_buffers=None, ddp_static_graph=None, ddp_backend=None,
            ddp_timeout=1800, debug="", skip_memory_metrics=True, local_rank=-1, gradient_checkpointing_kwargs=None),
    **_none("the head is computed in blocks without it", use_liger_kernel=False, liger_kernel_config=None),
    **_none("decoding has a cache of its own", use_cache=False),
    **_none("memory that runs out halves model.max_tokens_per_micro_batch: auto", auto_find_batch_size=False),
    **_none("has no meaning in GRPO", ignore_bias_buffers=False),
    **_refused("GRPO's loss has none", label_smoothing_factor=0.0, neftune_noise_alpha=None),
}  # fmt: skip
"""By the field of TRL 1.16: GRPOConfig, ModelConfig, and the script's own arguments."""

GRPO_ALONE = frozenset(
    {
        *("disable_dropout", "cast_lm_head_to_fp32", "num_generations", "steps_per_generation", "num_iterations"),
        *("generation_batch_size", "ds3_gather_for_generation", "max_completion_length", "temperature", "top_p"),
        *("top_k", "min_p", "repetition_penalty", "generation_kwargs", "chat_template_kwargs", "cache_implementation"),
        *("max_tool_calling_iterations", "use_transformers_continuous_batching", "use_transformers_paged"),
        *("transformers_continuous_batching_config", "use_vllm", "importance_sampling_level", "epsilon"),
        *("epsilon_high", "delta", "beta", "use_bias_correction_kl", "sync_ref_model", "scale_rewards"),
        *("multi_objective_aggregation", "mask_truncated_completions", "top_entropy_quantile", "reward_funcs"),
        *("off_policy_mask_threshold", "entropy_coef", "use_adaptive_entropy", "entropy_target", "reward_weights"),
        *("reward_model_name_or_path", "num_generations_eval", "num_completions_to_print"),
        *(name for name in TRL if name.startswith(("vllm_", "sapo_", "vespo_", "ref_model_", "entropy_coef_", "log_"))),
    }
    - {"log_level", "log_level_replica", "log_on_each_node"}
)
"""Fields of GRPOConfig that SFTConfig does not have."""
EXAMPLES = (
    "the plug-in sft: a data set of prompts and completions, or with assistant_only_loss of messages; prompts are "
    "masked, so whole texts are not trained on"
)
SFT: dict[str, Counterpart] = {name: row for name, row in TRL.items() if name not in GRPO_ALONE} | {
    "learning_rate": _same("model.optimizer.lr", 2e-5),
    "per_device_train_batch_size": _changed(
        "data.batch_size = per_device_train_batch_size x gradient_accumulation_steps; micro-batches are counted in "
        "tokens and change no gradient", 8, "data.batch_size", "model.max_tokens_per_micro_batch",
    ),
    "gradient_accumulation_steps": _changed(
        "data.batch_size = per_device_train_batch_size x gradient_accumulation_steps; micro-batches are counted in "
        "tokens and change no gradient", 1, "data.batch_size", "model.max_tokens_per_micro_batch",
    ),
    "per_device_eval_batch_size": _changed("the prompts of a validation batch", 8, "data.eval_batch_size"),
    "max_length": _changed(
        "sequences are never cut; one longer than the policy's context is refused, or left out with "
        "data.unusable_rows: drop", 1024, "data.max_prompt_tokens", "model.max_tokens_per_micro_batch",
    ),
    "completion_only_loss": _changed(EXAMPLES, None, "rollout.plugins"),
    "assistant_only_loss": _changed(EXAMPLES, False, "rollout.plugins", "data.prompt_column", "data.cut_answers"),
    "loss_type": _changed("nll alone", "nll", "rollout.plugins"),
    **_none(EXAMPLES, dataset_text_field="text"),
    **_none("examples are shuffled in each epoch", shuffle_dataset=False),
    **_none("rows are packed without padding, and an update has a number of examples", padding_free=False,
            packing_strategy="bfd", eval_packing=None, truncation_mode="keep_start", pad_token=None),
    **_none("rows are read in one process", dataset_num_proc=None),
    **_none("every column is kept", remove_unused_columns=True),
    **_none("model.gradient_checkpointing saves more", activation_offloading=False),
    **_none("has no meaning here", ignore_bias_buffers=False),
    **_refused("rows are packed anyway; leave it out, and count examples in per_device_train_batch_size",
               packing=False),
    **_refused("put the template into the policy's folder", chat_template_path=None),
    **_refused("set it in the tokenizer of the policy's folder", eos_token=None),
    **_refused("rows are rendered by the run", dataset_kwargs=None),
    **_refused("the loss has none", label_smoothing_factor=0.0, neftune_noise_alpha=None),
}  # fmt: skip
"""By the field of TRL 1.16: SFTConfig, ModelConfig, and the script's own arguments."""

TRAINER: dict[str, Counterpart] = {
    "model": _same("policy", None, "a name, a folder, a loaded model, or a pair of it and its tokenizer"),
    "reward_funcs": _changed(
        'functions, paths, or with a weight and a name {"function": score, "weight": 0.1, "name": "score"}', None,
        "rewards",
    ),
    "args": _changed("lit_grpo.train(..., **train_arguments(config)), of lit_grpo.tools.commands.from_trl, or each "
                     "setting by itself", None, "settings"),
    "train_dataset": _same("train", None, "a datasets.Dataset, a list of dicts, a file or an id"),
    "eval_dataset": _same("validation", None, "as train; one of them, not several by name"),
    "processing_class": _same("tokenizer", None, "of a loaded model; otherwise that of policy"),
    "peft_config": _changed('{"r": 8, "alpha": 16, "target_modules": "all-linear"}', None, "lora"),
    "optimizers": _changed(
        "functions of the parameters and of the optimizer, such as functools.partial(torch.optim.AdamW, lr=1e-6)",
        None, "optimizer", "lr_scheduler",
    ),
    "callbacks": _changed("Lightning callbacks, or the settings of ours by name", None, "callbacks"),
    "tools": _same("tools"),
    "environment_factory": _same("environment", None, "a class, or classes by name"),
    "quantization_config": _changed('{"base": "nf4"}', None, "lora"),
    "reward_processing_classes": _changed(
        "the reward reward_model loads the tokenizer of its model", None, "rewards"
    ),
    "rollout_func": _changed("write an environment, which has respond(text) for a turn", None, "environment"),
}  # fmt: skip
"""The arguments of TRL's GRPOTrainer, and those of ``lit_grpo.train``."""

VERL: dict[str, Counterpart] = {
    "actor_rollout_ref.model.path": _same("model.policy"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": _same("model.gradient_checkpointing"),
    "actor_rollout_ref.model.lora_rank": _same("model.lora.r"),
    "actor_rollout_ref.model.lora_alpha": _same("model.lora.alpha"),
    "algorithm.adv_estimator": _changed("grpo, rloo, ...", None, "model.advantages.estimator"),
    "algorithm.norm_adv_by_std_in_grpo": _changed("true is group, false none", None, "model.advantages.scale"),
    "algorithm.filter_groups": _changed(
        "metric acc is replace_flat, seq_reward is replace_flat:metric=reward", None, "rollout.plugins"
    ),
    "algorithm.use_kl_in_reward": _changed("true is reward, use_kl_loss is loss", None, "model.objective.kl.place"),
    "actor_rollout_ref.actor.kl_loss_coef": _same("model.objective.kl.beta"),
    "actor_rollout_ref.actor.kl_loss_type": _changed("low_var_kl is k3", None, "model.objective.kl.estimator"),
    "actor_rollout_ref.actor.entropy_coeff": _same("model.objective.entropy.coefficient"),
    "actor_rollout_ref.actor.clip_ratio_low": _same("model.objective.epsilon"),
    "actor_rollout_ref.actor.clip_ratio_high": _same("model.objective.epsilon_high"),
    "actor_rollout_ref.actor.clip_ratio_c": _same("model.objective.delta"),
    "actor_rollout_ref.actor.loss_agg_mode": _changed(
        "token-mean is dapo, seq-mean-token-mean grpo, seq-mean-token-sum-norm dr_grpo", None, "model.objective.loss"
    ),
    "actor_rollout_ref.actor.optim.lr": _same("model.optimizer.lr"),
    "actor_rollout_ref.actor.optim.weight_decay": _same("model.optimizer.weight_decay"),
    "actor_rollout_ref.actor.grad_clip": _same("model.max_grad_norm"),
    "data.train_batch_size": _changed("prompts of all devices; here of each", None, "data.batch_size"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": _changed(
        "num_minibatches = train_batch_size / ppo_mini_batch_size", None, "model.num_minibatches"
    ),
    "actor_rollout_ref.actor.ppo_epochs": _same("model.num_iterations"),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": _changed(
        "with use_dynamic_bsz; ppo_micro_batch_size_per_gpu counts sequences, and has no counterpart", None,
        "model.max_tokens_per_micro_batch",
    ),
    "actor_rollout_ref.rollout.n": _same("model.num_generations"),
    "actor_rollout_ref.rollout.name": _changed("vllm or vllm_server", None, "model.generator"),
    "actor_rollout_ref.rollout.max_num_seqs": _same("model.generator.num_slots"),
    "actor_rollout_ref.rollout.temperature": _same("model.sampling.temperature"),
    "actor_rollout_ref.rollout.val_kwargs": _changed("temperature, top_p, top_k", None, "model.eval_sampling"),
    "data.max_response_length": _same("model.sampling.max_tokens"),
    "data.max_prompt_length": _same("data.max_prompt_tokens"),
    "data.filter_overlong_prompts": _changed("true is drop", None, "data.unusable_rows"),
    "data.train_files": _same("data.train"),
    "data.val_files": _same("data.validation"),
    "data.prompt_key": _same("data.prompt_column"),
    "custom_reward_function.path": _changed("path.py:name", None, "model.rewards"),
    "trainer.total_epochs": _changed("optimizer steps are counted", None, "trainer.max_steps"),
    "trainer.test_freq": _same("trainer.val_check_interval"),
    "trainer.log_val_generations": _same("sample_logger.num_validation_samples"),
    "trainer.save_freq": _same("checkpoint.every_n_updates"),
    "trainer.n_gpus_per_node": _same("trainer.devices"),
    "trainer.experiment_name": _same("run.name"),
    "trainer.project_name": _same("run.wandb_project"),
}  # fmt: skip
"""The main fields of verl, by hand; there is no command for these."""
