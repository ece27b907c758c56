"""A policy in shards of two GPUs that are not there: fake tensors refuse to mix devices, and fake ranks say nothing.

Run in a process of its own by ``test_sharded_policy.py``, with the rank as its argument.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from tests.doubles.compile_only import begin


class _Order:
    """Streams and events of a GPU on which nothing runs: everything has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self


def main(rank: int) -> None:
    """Shard, gather, compute, take a step, save and restore; tell where everything was."""
    begin((9, 0))
    import torch
    from conftest import random_policy
    from torch import distributed
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from lit_grpo.policy.sharding import compute, gather, is_scattered, scatter, shard

    patches: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, _Order) for name in ("Stream", "Event")),
        *((torch.cuda, name, lambda *_: _Order()) for name in ("current_stream", "default_stream")),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
    ]
    for owner, name, value in patches:
        setattr(owner, name, value)
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    mesh = init_device_mesh("cuda", (2,))
    found: dict[str, list[str]] = {}

    def tell(when: str, tensors: Any) -> None:
        found[when] = sorted({f"{type(tensor).__name__} on {tensor.device}" for tensor in tensors})

    with FakeTensorMode():
        with torch.device("cpu" if rank == 0 else "meta"):
            policy: Any = random_policy()
        tell("loaded", policy.parameters())
        shard(policy, mesh)
        assert is_scattered(policy)
        tell("sharded", policy.parameters())
        gather(policy)
        tell("gathered", policy.parameters())
        scatter(policy)
        optimizer = torch.optim.AdamW(policy.parameters(), foreach=True)
        ids = torch.zeros((2, 10), dtype=torch.int64, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = compute(policy, lambda: policy(ids, use_cache=False).logits.float().square().mean())
        loss.backward()
        tell("gradients", (parameter.grad for parameter in policy.parameters()))
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        tell("moments", (state["exp_avg"] for state in optimizer.state.values()))
        saved = get_model_state_dict(policy, options=StateDictOptions(cpu_offload=True))
        tell("saved", saved.values())
        set_model_state_dict(policy, saved)
        tell("restored", policy.parameters())
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
