"""What a token of a micro-batch is said to keep is what torch's own tracker of memory finds, in every precision."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from conftest import random_policy
from torch.distributed._tools.mem_tracker import MemTracker

from lit_grpo.policy import load_policy
from lit_grpo.update.micro_batch_size import kept_bytes

SIZES = (
    {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
    {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_key_value_heads": 4},
    {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32},
)
PRECISIONS = {
    "32-true": (torch.float32, False),
    "bf16-mixed": (torch.float32, True),
    "bf16-true": (torch.bfloat16, False),
}


def tracked_bytes(policy: Any, num_tokens: int, mixed: bool) -> int:
    """Activations, in the tracker's count, when the decoder has run forward."""
    tracker = MemTracker()
    tracker.track_external(policy)
    with tracker, torch.autocast("cpu", torch.bfloat16, enabled=mixed, cache_enabled=False):
        tokens = torch.ones((1, num_tokens), dtype=torch.int64)
        output = policy.model(input_ids=tokens, use_cache=False).last_hidden_state
        held = Counter[str]()
        for snapshot in tracker.get_tracker_snapshot("current").values():
            held.update({str(getattr(kind, "value", kind)): size for kind, size in snapshot.items()})
    assert output.shape[1] == num_tokens  # it lives until here
    return held["Activation"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes['num_hidden_layers']} x {sizes['hidden_size']}")
def test_bytes_of_a_token_are_those_of_torchs_tracker(sizes: dict[str, Any], precision: str) -> None:
    dtype, mixed = PRECISIONS[precision]
    policy = random_policy(**sizes).to(dtype).train()  # pyrefly: ignore[bad-argument-type]
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed, cache_enabled=False):
        said = kept_bytes(policy, shares_prefix=False).of_token
    tracked = (tracked_bytes(policy, 256, mixed) - tracked_bytes(policy, 128, mixed)) / 128
    output = sizes["hidden_size"] * dtype.itemsize  # which the tracker counts, and autograd does not keep
    assert said + output == pytest.approx(tracked, rel=0.01)


def test_recurrent_layers_which_compute_whole_chunks_of_tokens_are_measured_over_several() -> None:
    policy: Any = load_policy("tiny_hybrid").train()
    tracked = (tracked_bytes(policy, 1024, False) - tracked_bytes(policy, 512, False)) / 512
    for shares_prefix in (False, True):
        said = kept_bytes(policy, shares_prefix)
        assert said.of_token == pytest.approx(tracked, rel=0.05) and said.fixed < 100 * said.of_token
