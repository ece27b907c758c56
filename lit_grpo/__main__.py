"""``python -m lit_grpo``."""

import os
import sys
from types import ModuleType


def main() -> None:
    """Run the command line; a mistake in the input ends it with one sentence."""
    if sys.argv[1:2] == ["simulate"]:  # needs no torch, whose import would take most of the time
        from lit_grpo.cli.simulate import main as simulate

        simulate(sys.argv[2:])
        return
    if sys.argv[1:2] == ["serve"]:
        from lit_grpo.cli.serve import main as serve

        serve(sys.argv[2:])
        return
    # Threads that wait must not spin: beside another busy process a spinning pair of them is many times slower
    # than one alone. OpenMP reads this when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM's CPU build tells of its memory binding
    if sys.argv[2:] in (["--help"], ["-h"]):
        _help()
    else:
        _run()


def _run() -> None:
    from lit_grpo.cli.command_line import run

    run()


def _help() -> None:
    """Print a subcommand's help, without what only a run needs: it would take more than half of the time.

    torchmetrics imports transformers' models for a metric that nobody asked for, and to look for annotations
    jsonargparse imports them again; no argument has such a type. Leaving at once saves taking modules apart.
    """
    sys.modules["transformers"] = _StandIn("transformers")
    try:
        _run()
    except SystemExit as end:
        if end.code:
            raise
        sys.stdout.flush()
        os._exit(0)


class _StandIn(ModuleType):
    """A module that has every class, each an empty one."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


if __name__ == "__main__":
    main()
