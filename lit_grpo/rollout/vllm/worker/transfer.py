"""How weights reach one of vLLM's workers: a backend of vLLM's weight transfer, and the proof of what arrived.

They come as tensors of the same process, in files, or over the network. From 0.24 to 0.33 vLLM has two interfaces for
backends. In the first, a worker begins and ends a reload itself and passes the function that loads tensors; a backend
is given only the parallel configuration and the model. In the second, from 0.25 on, a backend does all of this and is
given the whole configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from lit_grpo.policy.weights import checkpoint_name, digest
from lit_grpo.rollout.weights.files import read
from lit_grpo.rollout.weights.network import Link, LinkError, Meeting
from lit_grpo.rollout.weights.shipments import rebuild
from lit_grpo.rollout.weights.tensors import WeightSyncError

if TYPE_CHECKING:
    from lit_grpo.rollout.weights.tensors import Named

BACKEND = "lit_grpo"


def register() -> None:
    """Make the backend known to vLLM in this process."""
    with suppress(ValueError):  # it is known already
        WeightTransferEngineFactory.register_engine(BACKEND, DigestingTransfer)


@dataclass
class Hello(WeightTransferInitInfo):
    """Fields of the text configuration of the sender's model, and where to meet the sender, if anywhere."""

    fields: dict[str, Any]
    meeting: dict[str, Any] | None = None


@dataclass
class Update(WeightTransferUpdateInfo):
    """Where the tensors of a :class:`~lit_grpo.rollout.weights.shipments.Shipment` are.

    They are the ``tensors`` themselves in the same process, in a file at ``path``, or come over the link (``linked``).
    The shipment is of all weights or of ``changes``; with ``keeps`` the worker keeps a copy of the weights on the host,
    which later changes are applied to.
    """

    tensors: Iterable[Named] | None = None
    path: str = ""
    linked: bool = False
    keeps: bool = False
    changes: bool = False


class Arrived(NamedTuple):
    """A tensor as it was received."""

    digest: str
    shape: torch.Size
    dtype: torch.dtype


class DigestingTransfer(WeightTransferEngine[Hello, Update]):
    """Loads all tensors in one update, and fails where a parameter of the model got none.

    ``arrived`` are the tensors of the last update, by the sender's names.
    """

    init_info_cls = Hello
    update_info_cls = Update

    def __init__(self, *context: Any) -> None:
        super().__init__(*context)
        self._held: dict[str, torch.Tensor] = {}
        self.link: Link | None = None
        self.version = ""
        self.arrived: dict[str, Arrived] = {}

    def init_transfer_engine(self, init_info: Hello) -> None:
        """Compare the models, and meet the sender where it says so.

        Raises:
            ValueError: They differ.
            LinkError: The sender was not met.
        """
        for name, expected in init_info.fields.items():
            if (served := getattr(self._text_config, name, None)) != expected:
                raise ValueError(f"another model is served: its {name} is {served!r}, the policy's is {expected!r}")
        if init_info.meeting is not None:
            parallel = self.parallel_config
            before = getattr(parallel, "data_parallel_index", 0) * parallel.world_size
            self.link = Link(Meeting(**init_info.meeting), 1 + before + parallel.rank)

    def start_weight_update(self) -> None:
        """Begin a layer by layer reload, which asks for the names of the functions that load tensors."""
        for parameter in self.model.parameters():
            loader = getattr(parameter, "weight_loader", None)
            if isinstance(loader, partial) and not hasattr(loader, "__name__"):  # MiniMax M2's, for example
                setattr(loader, "__name__", "partial")  # noqa: B010
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take the tensors; they are in place when this returns."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self.finish_weight_update()  # so that a later update finds every layer in order
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update, load_weights: Any = None) -> None:
        """Load the tensors into the model, and note their digests.

        Args:
            update_info: Where they are.
            load_weights: What loads them, where vLLM says so; else the model's own.

        Raises:
            WeightSyncError: Parameters of the model were not among what arrived.
            LinkError: The sender broke off.
        """
        self.version = ""
        tensors = update_info.tensors
        try:
            self._load(self._sent(update_info) if tensors is None else tensors, load_weights or self.model.load_weights)
        except BaseException:
            self.shutdown()  # the sender sees it
            raise

    def _sent(self, update_info: Update) -> Iterator[Named]:
        if update_info.linked and self.link is None:
            raise LinkError("Weights are to come over a link, and there is no link.")
        tensors = self.link.receive() if update_info.linked and self.link is not None else read(update_info.path)
        whole = rebuild(tensors, self._held, update_info.changes)
        return self._keep(whole) if update_info.keeps else whole

    def _keep(self, tensors: Iterable[Named]) -> Iterator[Named]:
        for name, tensor in tensors:
            self._held[name] = tensor if name in self._held else tensor.clone()
            yield name, self._held[name]

    def _load(self, tensors: Iterable[Named], load_weights: Any) -> None:
        self.arrived.clear()
        _let_reloads_pack_experts(self.model)

        def noted() -> Iterator[Named]:
            for name, tensor in tensors:
                self.arrived[name] = Arrived(digest(tensor), tensor.shape, tensor.dtype)
                yield name, tensor

        expected: dict[int, set[str]] = {}  # a parameter that two modules share has two names, and is loaded by one
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            expected.setdefault(id(parameter), set()).add(checkpoint_name(name))  # of layers that take adapters
        loaded: Any = set(load_weights(noted())) | ({"lm_head.weight"} if self._ties_head else set())
        if missing := [min(names) for names in expected.values() if not names & loaded]:
            raise WeightSyncError(
                f"{len(missing)} of {len(expected)} parameters of vLLM's model got no weight, {min(missing)!r} among "
                f"them: its {type(self.model).__name__} is not built as transformers builds the policy; take another "
                "generator or policy."
            )

    def finish_weight_update(self) -> None:
        """Finish the reload."""
        finalize_layerwise_reload(self.model, self.model_config)

    def settle(self, version: str) -> None:
        """Note the version, after the reload.

        A tied head got no weight of its own, and on a CPU it computes with a packed copy of the old weight. So the new
        weight is packed here.
        """
        head: Any = getattr(self.model, "lm_head", None)
        if self._ties_head and next(self.model.parameters()).device.type == "cpu":
            head.quant_method.process_weights_after_loading(head)
        self.version = version

    @property
    def _text_config(self) -> Any:
        """The configuration of the model, which vLLM does not give to backends of the first interface."""
        config: Any = getattr(self, "model_config", None)
        return self.model.config if config is None else config.hf_text_config

    @property
    def _ties_head(self) -> bool:
        return bool(self._text_config.tie_word_embeddings) and hasattr(self.model, "lm_head")

    def shutdown(self) -> None:
        """Leave the link."""
        if self.link is not None:
            self.link.close()
            self.link = None

    @staticmethod
    def trainer_send_weights(*args: Any, **options: Any) -> None:
        """Unused: vLLM 0.24 wants every backend to bring a sender."""
        raise NotImplementedError("lit_grpo's fleet sends its weights itself.")


def _let_reloads_pack_experts(model: Any) -> None:
    """Let every reload pack experts for a CPU, as the first load does.

    vLLM 0.32 packs them once. After a reload its kernel would read experts that are not packed as if they were.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if hasattr(experts, "process_weights_after_loading") and not hasattr(method, "processed_as_it_was"):
            method.processed_as_it_was = method.process_weights_after_loading
            method.process_weights_after_loading = partial(_process_and_pack, method)


def _process_and_pack(method: Any, layer: Any) -> None:
    """Process a layer's weights as vLLM does, and pack its experts if that has not packed them."""
    kernel = method.moe_kernel
    pack, packed = kernel.fused_experts.process_weights_after_loading, list[Any]()
    kernel.fused_experts.process_weights_after_loading = lambda layer: (packed.append(layer), pack(layer))
    try:
        method.processed_as_it_was(layer)
    finally:
        del kernel.fused_experts.process_weights_after_loading
    if method.moe_kernel is kernel and not packed and next(layer.parameters()).device.type == "cpu":
        pack(layer)
