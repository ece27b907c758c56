"""``python -m lit_grpo``."""

import gc
import os
import sys
from importlib import import_module

from lit_grpo.process.terminal import first_line
from lit_grpo.tools.commands import TOOLS


def main() -> None:
    """Run the command line; a mistake in the input or a missing package ends it with one sentence."""
    try:
        start()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as error:
        if os.environ.get("LIT_GRPO_TRACEBACK"):
            raise
        missing = f"The package {error.name} is not installed" if error.name else first_line(error)
        print(f"error: {missing}; install it, or lit_grpo with all that it needs.", file=sys.stderr)
        sys.exit(2)


def start() -> None:
    """Run the command that is asked for; each command imports what it needs."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        from lit_grpo import __version__

        print(f"lit_grpo {__version__}")
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM's CPU build would print its memory binding
    tool = TOOLS.get(arguments[0]) if arguments else None
    if tool is not None and not tool.has_settings_of_a_run:
        import_module(tool.module).main(arguments[1:])
        return
    from lit_grpo.cli.parsing.early import check_early

    check_early(arguments)
    _announce(arguments)
    if tool is not None:
        import_module(tool.module).main(arguments[1:])
        return
    gc.disable()  # imports leave no garbage, and looking for it takes a third of their time
    from lit_grpo.cli.command_line import run

    gc.enable()  # without gc.freeze(): triton's bindings would report every object that is left at the end
    run()


def _announce(arguments: list[str]) -> None:
    """Print the version at once, on the first rank, because imports take seconds."""
    ranks = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
    asks = any(
        argument.startswith(("--print_config", "--help", "-h")) or argument.split("=")[0].endswith(".help")
        for argument in arguments
    )
    if arguments[:1] in (["fit"], ["sft"]) and not asks and all(os.environ.get(name, "0") == "0" for name in ranks):
        from lit_grpo import __version__

        print(f"lit_grpo {__version__}, loading ...", flush=True)


if __name__ == "__main__":
    main()
