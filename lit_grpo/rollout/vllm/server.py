"""vLLM servers over HTTP: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from lit_grpo.compatibility import Clash, check_clashes
from lit_grpo.limits import Limit, Positive, checks_arguments
from lit_grpo.policy.sharding import is_scattered
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.process.packages import require
from lit_grpo.process.terminal import counted, warn
from lit_grpo.rollout.generator import GenerationError, StepEvents
from lit_grpo.rollout.vllm.fleet import Fleet, Server
from lit_grpo.rollout.vllm.generator import EngineGenerator, Room, Slots, Travel
from lit_grpo.rollout.vllm.http import Arrival, HttpReceiver, ServerError
from lit_grpo.rollout.vllm.images import shown
from lit_grpo.rollout.vllm.streams import DraftCount, EngineRequest, NotAsAsked
from lit_grpo.rollout.weights.tensors import SyncReport, WeightSyncError

_NONE_LEFT = "No vLLM server is left; start them again and resume from the last checkpoint."
_RETRIES = 3  # of one completion, as long as its server is well


class VLLMServerGenerator(EngineGenerator):
    """Decode on one or more vLLM servers, started here on loopback or named by URL.

    A completion goes to the server with the fewest predicted tokens to decode. A server that dies or hangs is left out,
    and its completions go on from their last tokens on the other servers. If this run has started it, it is started
    again, at once if it has ended; it comes back with a sync that finds it well.

    Servers answer only to requests with their token, and belong to one run at a time. Tokens of a server that was
    restarted, or whose weights somebody else has changed, are not taken.

    Args:
        num_slots: Number of completions that each server decodes at a time (vLLM's ``max_num_seqs``).
        num_servers: Number of servers that each rank starts; with ``urls`` it starts none.
        devices: The GPUs of each server that is started, as ``CUDA_VISIBLE_DEVICES`` names them: ``["1", "2,3"]``.
        urls: Servers that run already, each started with ``python -m lit_grpo serve`` as this user (with
            ``--max-lora-rank`` for adapters alone). The environment variable ``LIT_GRPO_SERVER_TOKEN`` holds their
            token, which that command prints. Of several ranks each takes its share of the servers.
        transfer: Content of a sync: ``full``, all weights, or ``changes``, only the elements that differ from those
            last sent, for which trainer and server each keep a copy of the weights in host memory.
        adapters: Way of sending LoRA adapters: ``merged`` into the weights, all of which are sent at every sync; or
            ``alone``: the base weights are sent once, then only adapters, which vLLM applies itself. ``auto`` is
            ``alone``, except on a CPU (where vLLM decodes three times as fast with ``merged``), with ``urls`` or
            ``transfer: changes``, if the KV cache is kept over a sync, or if vLLM does not support the adapters.
        transport: Transport of weights to servers: in ``files``, or over ``nccl``, from GPU to GPU with vLLM's weight
            transfer, for which each rank and each worker needs a GPU of its own. If a server is lost during a transfer
            over NCCL, the run ends.
        weights_folder: Folder for files of weights, readable by all servers; shared memory by default. Adapters are
            sent in files with both transports.
        timeout_s: Max seconds without a token or an answer of a server, after which it counts as hung (five times as
            long while it takes weights). A server of several that does not answer, or whose engine does not, is left
            out after 8 s (20 s before its first token), or after three times the longest time that such an answer took
            so far, since an engine answers between two steps.
        start_timeout_s: Seconds that a server may take to start.
        server_args: Any other argument of vLLM's servers, such as ``dtype`` or ``tensor_parallel_size``.
        restarts: Max number of restarts per run of servers that this run started: those that have ended, and those that
            have hung and still do not answer at the next sync. The other servers decode meanwhile. If no server is up,
            a sync waits for the starting ones, at most ``start_timeout_s``. A rollout whose last server ends waits too,
            and its completions resume on the restarted server if the policy is still the one that was sent. A sharded
            policy cannot be sent within a rollout, so the run then ends.
        ray: Starts each server in an actor of Ray, wherever its cluster has room, with these options of actors, such as
            ``{num_gpus: 1}``. Ray starts an actor again that has died, as often as ``max_restarts`` among them says, or
            else ``restarts``. By default servers are processes on this machine.
    """

    @checks_arguments()
    def __init__(
        self,
        num_slots: Slots = 64,
        num_servers: Annotated[int, Limit(ge=1, le=1024)] = 1,
        devices: list[str] | None = None,
        urls: list[str] | None = None,
        transfer: Literal["full", "changes"] = "full",
        adapters: Travel = "auto",
        transport: Literal["files", "nccl"] = "files",
        weights_folder: str | None = None,
        timeout_s: Positive = 60.0,
        start_timeout_s: Positive = 300.0,
        server_args: dict[str, Any] | None = None,
        restarts: Annotated[int, Limit(ge=0, remedy="with 0, servers that end are left out")] = 3,
        ray: dict[str, Any] | None = None,
    ) -> None:
        remedies = "raise server_args.max_model_len", "raise server_args.kv_cache_memory_bytes"
        if urls:
            larger = "start the servers with a larger"
            remedies = f"{larger} --max-model-len", f"{larger} --kv-cache-memory-bytes"
        super().__init__(num_slots, adapters, server_args, not urls and transfer == "full", remedies)
        self.abilities |= {"own_devices"}
        if urls:
            self.abilities -= {"policy_dtype"}  # who has started them has chosen it
        if devices is not None and len(devices) != num_servers:
            named = counted(len(devices), "server")
            raise ValueError(f"devices names the GPUs of {named}, but num_servers is {num_servers}.")
        if urls and len(set(urls)) < len(urls):
            raise ValueError(f"urls names a server twice: {', '.join(urls)}; name each once.")
        if ray is not None:
            require("ray", "ray is given, but Ray is not installed; install lit_grpo[ray], or leave it out.")
        check_clashes(
            [
                Clash(
                    "weights_folder needs weights that are sent in files",
                    f"transport {transport} sends them from process to process",
                    found=weights_folder is not None and transport != "files" and adapters == "merged",
                    remedy="take transport files",
                ),
                Clash(
                    "transfer changes needs weights that are sent at every sync",
                    "adapters alone sends them once",
                    found=transfer == "changes" and adapters == "alone",
                    remedy="take transfer full",
                ),
                Clash(
                    f"devices {devices} needs servers on chosen devices",
                    "ray chooses the device of each actor",
                    found=devices is not None and ray is not None,
                    remedy="set num_gpus in ray",
                ),
                Clash(
                    "ray needs servers that this run starts itself",
                    f"urls {urls} names running servers",
                    found=ray is not None and urls is not None,
                ),
            ]
        )
        self.weights_folder, self.transport = weights_folder, transport
        self._fleet = Fleet(
            num_slots=num_slots,
            num_servers=num_servers,
            devices=devices,
            urls=urls,
            sends_changes=transfer == "changes",
            over_nccl=transport == "nccl",
            weights_folder=weights_folder,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            ray=ray,
            restarts=restarts,
        )
        self._pump = HttpReceiver(self._fleet.loop)
        self._at: dict[EngineRequest, Server] = {}
        self._num_resumed = 0  # rollouts that were resumed on a restarted server since a completion ended
        self._num_due = 0.0  # the part of a step that tokens have come for, but no step was counted

    # ---- life -------------------------------------------------------------------------------------

    def _make(self, policy: PolicySpec, lora: Mapping[str, Any]) -> None:
        if self.transport == "nccl" and policy.device.type != "cuda":
            raise ValueError(f"transport nccl is for GPUs, and the policy is on {policy.device}; take files.")
        self._fleet.start(policy, {**lora, **self.arguments})

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        return self._fleet.load_weights(weights, version)

    def _exchange(self, folder: Path, version: int) -> dict[str, str]:
        return self._fleet.exchange(folder, version)

    def _score(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        return self._fleet.score(sequences, self._salt)

    def _lacks_base(self) -> bool:
        return self._fleet.lacks_base()

    def invalidate_weights(self) -> None:
        super().invalidate_weights()
        self._fleet.forget_weights()

    def sleep(self) -> dict[str, float]:
        """Do nothing: servers have devices of their own."""
        return {}

    def close(self) -> None:
        """End what is in flight. The servers end with this object, or serve another ``start``."""
        super().close()
        self._pump.close()
        self._fleet.release()

    # ---- requests ---------------------------------------------------------------------------------

    def _room(self) -> Room:
        alive = self._fleet.alive
        block = max((server.block for server in alive), default=1)  # the largest where they differ
        return Room(self._fleet.context, [server.kv_tokens for server in alive], block)

    def _ask(self, stream: EngineRequest) -> None:
        """Ask the server that has the least to do."""
        if not self._fleet.alive:
            raise GenerationError(_NONE_LEFT)
        ahead, count = (dict.fromkeys(self._fleet.alive, 0.0) for _ in range(2))
        for other, server in self._at.items():
            if server.up:
                ahead[server] += max(other.expected - len(other.token_ids), 1.0)
                count[server] += 1
        free = [server for server in ahead if count[server] < self.num_slots] or ahead
        server = self._at[stream] = min(free, key=lambda server: ahead[server])
        stream.engine = f"the vLLM server at {server.client.url}"
        assert stream.ticket is not None
        fields = self._fields(stream, server.keyed)
        self._pump.begin(stream.ticket, server.client, stream.prompt, fields, stream.salt, shown(stream))

    def _withdraw(self, streams: Sequence[EngineRequest]) -> None:
        for stream in streams:
            self._at.pop(stream, None)
            self._pump.cancel(self._streams.take_ticket(stream))

    def _receive(self, events: StepEvents) -> None:
        """Wait for tokens and take all that have come; a GenerationError if no server is left to decode."""
        arrivals: list[Arrival] = []
        while not arrivals:
            arrivals = self._pump.arrivals(1.0)
        for arrival in arrivals:
            if isinstance(arrival.content, DraftCount):
                events.num_drafted += arrival.content.num_drafted
                events.accepted["vllm"] += arrival.content.num_accepted
                continue
            stream = self._streams.of_ticket(arrival.ticket)
            if stream is None:
                continue  # it has been withdrawn
            if isinstance(arrival.content, ServerError):
                self._fail(stream, arrival.content)
                continue
            try:
                self._take(stream, arrival.content, events)
            except NotAsAsked as error:
                url = self._at[stream].client.url
                self._fail(stream, ServerError(f"The vLLM server at {url} {error}.", "nonsense"))
                continue
            if stream.ticket is None:
                self._at.pop(stream, None)
                self._num_resumed = 0
        self._num_due += (events.num_tokens - events.accepted.total()) / events.num_active
        events.num_steps = max(int(self._num_due), 0)
        self._num_due -= events.num_steps

    def _fail(self, stream: EngineRequest, error: ServerError) -> None:
        """Go on with a completion whose server failed.

        It goes on there if only the connection broke. Otherwise the server is left out, and all its completions move,
        without the tokens of a server that sends what cannot be true.
        """
        server = self._at[stream]
        if error.kind == "refuses" and not stream.num_begun:  # no server has added anything to the prompt
            raise ValueError(str(error))
        is_false = error.kind in ("nonsense", "foreign", "refuses")
        may_stay = stream.num_failures < _RETRIES and not (error.kind == "hung" or is_false)
        if may_stay and server.client.answers() and server.client.is_ours():
            stream.num_failures += 1
            lost = [stream]
        else:
            server.lose()
            lost = [other for other, at in self._at.items() if at is server]
            if is_false:
                for each in lost:
                    each.drop_new()  # of all of them, since nobody knows from which token on
            alive = len(self._fleet.alive)
            why = f"{error}{server.kept_log()}"
            said = f"{why} Its {counted(len(lost), 'completion')} will go on from there"
            if not alive:
                self._resume_lost(lost, why)
                warn(f"{said} on a server that was started again.", stacklevel=2)
                return
            left = "server that is" if alive == 1 else f"{alive} servers that are"
            warn(f"{said} on the {left} left.", stacklevel=2)
        self._withdraw(lost)
        for each in lost:
            self._send(each)

    def _resume_lost(self, lost: Sequence[EngineRequest], why: str) -> None:
        """Send the weights again to servers that were started again, and ask these for all completions."""
        assert self._policy is not None
        self._withdraw(lost)
        self._num_resumed += 1
        if self._num_resumed > _RETRIES:
            raise GenerationError(f"{why} {_NONE_LEFT}")
        try:
            if is_scattered(self._policy.module):
                raise WeightSyncError("other ranks have shards of it")
            before = self._arrived
            self._bring(self.weights(), self.version)
            if any(self._arrived.get(name) != digest for name, digest in before.items()):
                raise WeightSyncError("the policy has changed since it was sent")
        except WeightSyncError:
            raise GenerationError(f"{why} {_NONE_LEFT}") from None
        for stream in self._streams:
            stream.salt = self._salt
            self._send(stream)
