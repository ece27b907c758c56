"""One server of a fleet: what it holds, and how it is brought up to date."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lit_grpo.rollout.generator import WeightSyncError
from lit_grpo.rollout.vllm_adapters import joined
from lit_grpo.rollout.vllm_client import ServerClient, ServerError
from lit_grpo.rollout.vllm_process import ServerProcess


@dataclass(eq=False)
class Server:
    """A server, with its process where it is ours, and the policy version that it holds.

    With adapters alone, ``holds_base`` tells whether it has the weights that they stand beside, and ``adapter`` what it
    calls the one that it decodes with.
    """

    client: ServerClient
    process: ServerProcess | None = None
    version: int = -1
    up: bool = True
    holds_base: bool = False
    adapter: str = ""

    def is_well(self) -> bool:
        """Whether it runs and answers."""
        if self.process is not None and self.process.process.poll() is not None:
            return False
        return self.client.answers()

    def look(self) -> None:
        """Find out whether it is up, and whether it still holds what it was sent last."""
        self.up = self.is_well()
        if self.holds_base:
            self.holds_base = self.up and self._reported_version() == str(self.version)

    def _reported_version(self) -> str:
        try:
            return self.client.get("/weight_info")["weight_version"]
        except ServerError:
            return ""

    def update(self, path: Path, version: int, number: int, patches_follow: bool) -> dict[str, str]:
        """Load the weights of a file; return the digests that all workers have received."""
        self.version, self.holds_base = -1, False
        receipt = path.parent / f"receipt-{number}"
        info = {"path": str(path), "receipt": str(receipt), "patches_follow": patches_follow}
        self.client.post("/start_weight_update")
        self.client.post("/update_weights", {"update_info": info})
        self.client.post("/finish_weight_update", {"weight_version": str(version)})
        self._settle(version)
        receipts = [json.loads(file.read_text()) for file in path.parent.glob(f"{receipt.name}-*.json")]
        if not receipts or any(digests != receipts[0] for digests in receipts):
            raise WeightSyncError(f"The workers of the vLLM server at {self.client.url} have bound different weights.")
        self.version, self.holds_base = version, True
        return receipts[0]

    def exchange(self, folder: Path, version: int) -> dict[str, str]:
        """Take another adapter, by another name; return the digests of what the workers hold of it."""
        self.version = -1
        new, old = f"version-{version}-{folder.name}", self.adapter
        self.client.post("/v1/load_lora_adapter", {"lora_name": new, "lora_path": str(folder)})
        self.adapter = self.client.model = new
        if old:
            self.client.post("/v1/unload_lora_adapter", {"lora_name": old})
        self.client.post("/update_weight_version", {"new_version": str(version)})
        self._settle(version)
        held = self.client.post("/collective_rpc", {"method": "adapter_digests", "args": [str(folder)]})["results"]
        self.version = version
        return joined(held)

    def _settle(self, version: int) -> None:
        """Drop the prompts of old weights, and compare versions."""
        self.client.post("/reset_prefix_cache")
        reported = self.client.get("/weight_info")["weight_version"]
        if reported != str(version):
            raise WeightSyncError(
                f"The vLLM server at {self.client.url} says that its weights are version {reported}, where the "
                f"policy's are {version}."
            )

    def max_adapter_rank(self) -> int:
        """The largest rank of LoRA adapters that it takes; 0 where it takes none."""
        try:
            answer = self.client.post("/collective_rpc", {"method": "max_adapter_rank"})
            return min(int(rank) for rank in answer["results"])
        except ServerError:
            return 0
