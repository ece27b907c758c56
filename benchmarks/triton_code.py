"""The attention of packed groups on GPUs that are not there: its Triton code compiled, run, and counted.

Torch's Inductor makes masks and attention of the update, forward and backward, for three capabilities, and Triton
makes binaries of them with its own ``ptxas`` (``compile_only``); a kernel that needs more shared memory than a GPU has
is refused as its driver refuses it. Triton's interpreter then runs the same code in float32 on the CPU, and output and
gradients are held against each response with its prompt by itself, in float64. Over 100 packed rows of other shapes it
is counted how often they are compiled. Nothing runs on a GPU, and nothing here says how fast it is.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.processes import measured
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.triton_code_case import Case

CAPABILITIES = {(8, 0): "A100", (8, 9): "RTX 40, L4", (9, 0): "H100"}
HEAD_SIZES = (64, 128)
WINDOWS = (None, 20)
MOST_COMPILATIONS, LARGEST_GAP = 6, 1e-5
SHOWN = "flex_attention"


def main(options: Options) -> int:
    """Compile, run and count, each case in a process of its own."""
    rows: list[Row] = []
    claims: list[Claim] = []
    cases = [Case(capability, size, "bfloat16", None) for capability in CAPABILITIES for size in HEAD_SIZES]
    for case in cases[2:3] if options.quick else cases:
        kernels = _figures(case)["kernels"]
        gpu = f"sm_{case.capability[0]}{case.capability[1]} ({CAPABILITIES[case.capability]})"
        for kernel in kernels:
            if SHOWN in kernel["name"] and kernel["shared_bytes"]:
                row: Row = {"gpu": gpu, "head": case.head_size, "kernel": kernel["name"].partition("fused_")[2]}
                rows.append(row | {name: kernel[name] for name in ("shared_bytes", "warps", "stages", "binary_bytes")})
        claims.append(Claim(f"{gpu}, heads of {case.head_size}: kernels compiled", float(len(kernels)), ">=", 8))
    for window in WINDOWS[-1:] if options.quick else WINDOWS:
        gaps = _figures(Case((8, 0), 16, "float32", window, interpreted=True))["gaps"]
        text = f"interpreted, window {window}: largest gap to float64, row by row"
        claims.append(Claim(text, max(gaps.values()), "<=", LARGEST_GAP))
    num_rows = 2 if options.quick else 100
    for what, count in _figures(Case((9, 0), 64, "bfloat16", None, rows=num_rows))["compilations"].items():
        claims.append(Claim(f"compilations of {what} over {num_rows} rows", float(count), "<=", MOST_COMPILATIONS))
    settings: Row = {"heads": "4 and 2 KV", "tokens": 194, "compiled in": "bfloat16", "interpreted in": "float32"}
    return finish("triton_code", options, settings, rows, claims)


def _figures(case: Case) -> dict[str, Any]:
    note(str(case))
    return measured("benchmarks.triton_code_case", case)


if __name__ == "__main__":
    sys.exit(main(parse_options(__doc__ or "")))
