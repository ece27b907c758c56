"""Random numbers that depend on a request's seed and a token's position alone."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch


def draw_by_position(runner: Any) -> bool:
    """Have one of vLLM's model runners seed every draw; say if it can, or does so by itself.

    vLLM's newer model runner, the default on GPUs, does so by itself. The older one draws from a generator for each
    request, which is seeded anew here before every draw.
    """
    sampler, batch = getattr(runner, "sampler", runner), getattr(runner, "input_batch", None)
    if sampler is None or hasattr(getattr(sampler, "sampling_states", None), "seeds"):
        return True  # one of several workers that does not sample, or the newer runner
    parts = {"generators", "num_tokens_no_spec", "req_ids"}
    if not (hasattr(runner, "_sample") and all(hasattr(batch, part) for part in parts)):
        return False
    if not hasattr(runner, "sample_as_it_was"):
        runner.sample_as_it_was = runner._sample
        runner._sample = lambda *args, **options: _seed_rows(runner) or runner.sample_as_it_was(*args, **options)
    return True


class _SeededGenerator(torch.Generator):
    """Is seeded before every draw, and so has no state to go back in, as vLLM does after prefilling a part of a prompt.

    That of a CPU could not.
    """

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


def _seed_rows(runner: Any) -> None:
    """Seed the generators of all rows for the positions that come next."""
    batch = runner.input_batch
    for row, generator in list(batch.generators.items()):
        if not isinstance(generator, _SeededGenerator):
            generator = batch.generators[row] = _SeededGenerator(generator.device)
        seed, position = runner.requests[batch.req_ids[row]].sampling_params.seed, batch.num_tokens_no_spec[row]
        key = blake2b(b"%d %d" % (seed, position), digest_size=8)
        generator.manual_seed(int.from_bytes(key.digest(), "little", signed=True))
