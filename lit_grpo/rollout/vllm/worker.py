"""A weight transfer backend for vLLM that works on any device: tensors of this process, or files in shared memory.

vLLM loads :func:`register` in each of its processes, by the entry point ``vllm.general_plugins``. What a worker has
received it proves with the digest of every tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from lit_grpo.policy.weights import checkpoint_name, digest
from lit_grpo.rollout.weights.files import rebuild
from lit_grpo.rollout.weights.tensors import Parcel, WeightSyncError

BACKEND = "lit_grpo"


def register() -> None:
    """Make the backend known to vLLM in this process."""
    with suppress(ValueError):  # it is known already
        WeightTransferEngineFactory.register_engine(BACKEND, DigestingTransfer)


@dataclass
class Hello(WeightTransferInitInfo):
    """What the sender's model is: fields of its text configuration."""

    fields: dict[str, Any]


@dataclass
class Update(WeightTransferUpdateInfo):
    """Where the tensors are: a ``parcel`` of the same process, or the ``path`` of a file.

    A file is of :mod:`lit_grpo.rollout.weights.files`; with ``patches_follow`` the worker keeps what it holds on the
    host, for later files that tell only what changed. The digests of what it received each worker writes to
    ``receipt``-RANK.json.
    """

    parcel: Parcel | None = None
    path: str = ""
    receipt: str = ""
    patches_follow: bool = False


class DigestingTransfer(WeightTransferEngine[Hello, Update]):
    """Loads all tensors in one update, and fails where a parameter of the model got none."""

    init_info_cls = Hello
    update_info_cls = Update

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, torch.Tensor] = {}

    def init_transfer_engine(self, init_info: Hello) -> None:
        """Compare the models.

        Raises:
            ValueError: They differ.
        """
        config = self.model_config.hf_text_config
        for name, expected in init_info.fields.items():
            if (served := getattr(config, name, None)) != expected:
                raise ValueError(f"another model is served: its {name} is {served!r}, the policy's is {expected!r}")

    def start_weight_update(self) -> None:
        """Begin a layer by layer reload."""
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

    def receive_weights(self, update_info: Update) -> None:
        """Load the tensors into the model, and note their digests.

        Raises:
            WeightSyncError: Parameters of the model were not among what arrived.
        """
        if update_info.parcel is not None:
            self._load(update_info.parcel)
            return
        with safe_open(update_info.path, framework="pt") as file:
            tensors = rebuild(file, self._held)
            parcel = Parcel(self._keep(tensors) if update_info.patches_follow else tensors)
            self._load(parcel)
        Path(f"{update_info.receipt}-{self.parallel_config.rank}.json").write_text(json.dumps(parcel.digests))

    def _keep(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self._held[name] = tensor if name in self._held else tensor.clone()
            yield name, self._held[name]

    def _load(self, parcel: Parcel) -> None:
        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in parcel.tensors:
                parcel.digests[name] = digest(tensor)
                parcel.num_bytes += tensor.nbytes
                yield name, tensor

        expected = {checkpoint_name(name) for name, _ in self.model.named_parameters()}  # of layers that take adapters
        loaded: Any = self.model.load_weights(noted())  # pyright: ignore[reportCallIssue]
        tied = {"lm_head.weight"} if self._ties_head else set()
        if missing := expected - set(loaded) - tied:
            raise WeightSyncError(
                f"{len(missing)} of {len(expected)} parameters of vLLM's model got no weight, {min(missing)!r} among "
                "them."
            )

    def finish_weight_update(self) -> None:
        """Finish the reload."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self._ties_head and self.device.type == "cpu":
            # A head that is tied got no weight of its own, and on CPU it computes with a packed copy of the old one.
            head: Any = self.model.lm_head
            head.quant_method.process_weights_after_loading(head)

    @property
    def _ties_head(self) -> bool:
        return bool(self.model_config.hf_text_config.tie_word_embeddings) and hasattr(self.model, "lm_head")

    def shutdown(self) -> None:
        """Nothing is held open."""
