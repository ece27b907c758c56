"""What a server must be before it decodes for a policy: the same model, and sampling that nothing else changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.vllm.http import ServerClient, ServerError

_COMPARED = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_REQUIRED: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "logprobs_mode": ("model_config", ("processed_logprobs",), "start it with --logprobs-mode processed_logprobs"),
    "generation_config": ("model_config", ("vllm",), "start it with --generation-config vllm"),
    "override_generation_config": ("model_config", ({}, None), "start it without --override-generation-config"),
    "watermark_config": ("", (None,), "start it without --watermark-config"),
    "kv_transfer_config": ("", (None,), "start it without --kv-transfer-config, which keeps what old weights made"),
}
"""Where vLLM tells a setting, what it may be, and what to do otherwise."""


@dataclass(frozen=True)
class Offer:
    """The most tokens of a request, and the memory for keys and values, in tokens and in blocks of ``block``."""

    context: int
    kv_tokens: int | None
    block: int


class Introduction:
    """Compares servers with a policy.

    Args:
        policy: What they are to decode for.
        rank: Of the adapters that they are to take; 0 for none.
    """

    def __init__(self, policy: PolicySpec, rank: int) -> None:
        config, tokenizer = policy.config.get_text_config(), policy.tokenizer
        self.rank = rank
        self._fields = {name: getattr(config, name) for name in _COMPARED}
        self._text = str(tokenizer.decode(list(range(min(config.vocab_size, 200))), skip_special_tokens=True))
        self._ids: list[int] = tokenizer.encode(self._text, add_special_tokens=False)

    def of(self, client: ServerClient) -> Offer:
        """Take a server for this run, after checking what it serves, and how; return what it offers.

        Raises:
            ValueError: It serves another model, or another way of sampling, or not for us.
        """
        try:
            client.take()
            config = client.get("/server_info", config_format="json")["vllm_config"]
            _check_settings(client.url, config)
            model = client.get("/v1/models")["data"][0]
            client.model = model["id"]
            tokens = client.post("/tokenize", {"prompt": self._text, "add_special_tokens": False})["tokens"]
            client.post("/init_weight_transfer_engine", {"init_info": {"fields": self._fields}})
        except ServerError as error:
            raise ValueError(f"{error} Start it with the policy's model, as python -m lit_grpo serve does.") from error
        if tokens != self._ids:
            raise ValueError(
                f"The server at {client.url} has another tokenizer than the policy; start it with the policy's."
            )
        self._check_rank(client)
        cache = config["cache_config"]
        block = int(cache["block_size"])
        blocks = cache["num_gpu_blocks"]
        return Offer(int(model["max_model_len"]), None if blocks is None else (int(blocks) - 1) * block, block)

    def _check_rank(self, client: ServerClient) -> None:
        try:
            largest = min(int(rank) for rank in client.ask_workers("max_adapter_rank")) if self.rank else 0
        except ServerError:
            largest = 0
        if largest < self.rank:
            raise ValueError(
                f"The server at {client.url} does not take LoRA adapters of rank {self.rank}; start it with "
                f"--max-lora-rank {self.rank}, or take adapters: merged."
            )


def _check_settings(url: str, config: Mapping[str, Any]) -> None:
    """Check that nothing else than the request decides what is sampled, and that its log-probs are told.

    Raises:
        ValueError: A setting is another.
    """
    for name, (part, allowed, remedy) in _REQUIRED.items():
        holder = config.get(part) if part else config
        value = holder.get(name, allowed[0]) if isinstance(holder, Mapping) else allowed[0]
        if value not in allowed:
            raise ValueError(
                f"The server at {url} has {name} {value!r}, which changes what is sampled or told of it; {remedy}."
            )
