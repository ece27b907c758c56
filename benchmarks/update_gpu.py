"""The update phase beside TRL's on one GPU: a Qwen3-1.7B configuration in bfloat16 with gradient checkpointing.

The works are those of ``update_vs_trl``, with the vocabulary of Qwen3. Run it with ``--device cuda``; ``--quick`` takes
a tiny policy and runs anywhere.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from benchmarks.report import Claim, Options, Row, finish, parse_options
from benchmarks.update_case import Case
from benchmarks.update_vs_trl import QUICK, WORKS, Sizes, compare, settings

VOCAB_SIZE = 151_936
SIZES = Sizes((16_384, 32_768), (8, 16))


def main(options: Options) -> int:
    """Measure all works.

    Raises:
        ValueError: The full size is asked for on a CPU.
    """
    if options.device != "cuda" and not options.quick:
        raise ValueError("update_gpu takes --device cuda; on a CPU only --quick.")
    policy, sizes, repeats = ("smallest", Sizes((16_384,), (8,)), 1) if options.quick else ("Qwen3-1.7B", SIZES, 3)
    big = {name: replace(work, vocab_size=VOCAB_SIZE) for name, work in WORKS.items()}
    works = {"quick": QUICK} if options.quick else big
    case = Case("lit_grpo", 0, next(iter(works.values())), policy, options.device, checkpointing=True)
    rows: list[Row] = []
    claims: list[Claim] = []
    for name, work in works.items():
        more_rows, more_claims = compare(name, replace(case, work=work), sizes, repeats)
        rows += more_rows
        claims += more_claims
    return finish("update_gpu", options, settings(case, repeats), rows, claims)


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
