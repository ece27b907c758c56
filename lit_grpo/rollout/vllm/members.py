"""A server of a fleet: what it must be before it decodes for a policy, and what it holds then."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.vllm.arguments import all_draw_by_position, check_version
from lit_grpo.rollout.vllm.http import ServerClient, ServerError
from lit_grpo.rollout.vllm.process import ServerProcess
from lit_grpo.rollout.weights.network import Link, LinkError, MeetingPoint
from lit_grpo.rollout.weights.tensors import WeightSyncError, joined

if TYPE_CHECKING:
    from lit_grpo.rollout.vllm.actors.server import ActorServer

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
            version = client.get("/version", lambda answer: str(answer["version"]))
            check_version(f"The server at {client.url}", version)
            config = client.get("/server_info", lambda answer: dict(answer["vllm_config"]), config_format="json")
            _check_settings(client.url, config)
            client.model, context = client.get(
                "/v1/models", lambda answer: (str(answer["data"][0]["id"]), int(answer["data"][0]["max_model_len"]))
            )
            client.vocab_size = int(self._fields["vocab_size"])
            text = {"prompt": self._text, "add_special_tokens": False}
            tokens = client.post("/tokenize", text, lambda answer: list(answer["tokens"]))
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
        return Offer(context, None if blocks is None else (int(blocks) - 1) * block, block)

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


@dataclass(eq=False)
class Server:
    """A server, with its process where it is ours, and the policy version that it holds.

    With adapters alone, ``holds_base`` tells whether it has the weights that they stand beside, and ``adapter`` what it
    calls the one that it decodes with. ``kv_tokens`` in blocks of ``block`` are its memory for keys and values, as far
    as it tells, and ``keyed`` says that it draws random numbers by position. It has ``hung`` where the last look got no
    answer.
    """

    client: ServerClient
    process: ServerProcess | ActorServer | None = None
    version: int = -1
    up: bool = True
    holds_base: bool = False
    adapter: str = ""
    context: int = 0
    kv_tokens: int | None = None
    block: int = 1
    keyed: bool = False
    hung: bool = False
    link: Link | None = None

    def is_well(self) -> bool:
        """Whether it runs, answers, and is as we left it."""
        return (self.process is None or self.process.runs) and self.client.answers() and self.client.is_ours()

    def look(self, introduction: Introduction, timeout_s: float) -> None:
        """Find out whether it is up, and still holds what it was sent last; introduce it anew where it began anew."""
        runs = self.process is None or self.process.runs
        self.up = runs and self.client.answers(timeout_s)
        self.hung = runs and not self.up
        try:
            if self.up and not self.client.is_ours():
                self.introduce(introduction)
            if self.holds_base:
                self.holds_base = self.up and self._reported_version() == str(self.version)
        except (ServerError, ValueError) as error:
            warnings.warn(f"A server is left out: {error}", stacklevel=2)
            self.up = False

    def introduce(self, introduction: Introduction) -> None:
        """Take it for this run, with nothing known of what it holds.

        Raises:
            ValueError: It serves another model, or not for us.
        """
        self.version, self.holds_base, self.adapter = -1, False, ""
        self._leave()
        offer = introduction.of(self.client)
        self.context, self.kv_tokens, self.block = offer.context, offer.kv_tokens, offer.block

    def lose(self) -> None:
        """Leave it out, until a look finds it well again."""
        self.up, self.version, self.holds_base = False, -1, False
        self._leave()

    def join(self, point: MeetingPoint) -> Link:
        """Meet its workers."""
        meeting = point.arrange(
            self.client.url, self.client.get("/get_world_size", lambda answer: int(answer["world_size"]))
        )
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(
                self.client.post,
                "/init_weight_transfer_engine",
                {"init_info": {"fields": {}, "meeting": asdict(meeting)}},
            )
            try:
                link = point.join(meeting)
            except LinkError as error:
                coming.result()
                raise ServerError(f"The vLLM server at {self.client.url} was not met: {error}") from error
            coming.result()
        return link

    def _leave(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None

    @property
    def log(self) -> str:
        """Where to read of a server of ours; one that has just broken off may not have ended yet."""
        return "" if self.process is None else f" What it said is in {self.process.log}."

    def _reported_version(self) -> str:
        """The version that all of its workers say they hold; nothing where they do not agree, or do not answer."""
        try:
            versions = set(self.client.ask_workers("held_version"))
        except ServerError:
            return ""
        return versions.pop() if len(versions) == 1 else ""

    def update(self, info: Mapping[str, Any], version: int) -> dict[str, str]:
        """Load the weights that ``info`` tells of; return the digests of what all workers hold."""
        self.version, self.holds_base = -1, False
        with self._paused():
            self.client.post("/start_weight_update", {})
            self.client.post("/update_weights", {"update_info": info})
            self.client.post("/finish_weight_update", {"weight_version": str(version)})
            held = self.client.ask_workers("settle", str(version))
        self._settle(version)
        self.version, self.holds_base = version, True
        return joined(held)

    def exchange(self, folder: str | None, version: int) -> dict[str, str]:
        """Take another adapter, by another name; return the digests of what the workers hold of it.

        Args:
            folder: Where it is; ``None`` where its files come over the link.
            version: The policy's.
        """
        self.version = -1
        folder = folder or next(filter(None, self.client.ask_workers("take_folder")))
        new, old = f"version-{version}-{Path(folder).name}", self.adapter
        self.client.post("/v1/load_lora_adapter", {"lora_name": new, "lora_path": folder})
        self.adapter = self.client.model = new
        if old:
            self.client.post("/v1/unload_lora_adapter", {"lora_name": old})
        self.client.ask_workers("compute_head_plainly")
        held = self.client.ask_workers("settle_adapter", folder, str(version))
        self._settle(version)
        self.version = version
        return joined(held)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Decode nothing for a while: what has been withdrawn may not have heard of it yet."""
        self.client.post("/pause?mode=abort&clear_cache=false")
        try:
            yield
        except ServerError as error:
            if not error.hung:
                with suppress(ServerError):
                    self.client.post("/resume")
            raise
        except BaseException:
            with suppress(ServerError):
                self.client.post("/resume")
            raise
        self.client.post("/resume")

    def _settle(self, version: int) -> None:
        """Compare versions, and see to random numbers, which a server that began anew draws in its own way."""
        try:
            self.keyed = all_draw_by_position(
                answer == "True" for answer in self.client.ask_workers("draw_by_position")
            )
        except ServerError:  # it has another worker_extension_cls, or none
            self.keyed = all_draw_by_position([False])
        reported = self._reported_version()
        if reported != str(version):
            raise WeightSyncError(
                f"The vLLM server at {self.client.url} says that its weights are version {reported or 'unknown'}, "
                f"where the policy's are {version}."
            )
