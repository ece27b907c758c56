"""``python -m lit_grpo``."""

import gc
import os
import sys


def main() -> None:
    """Run the command line; a mistake in the input, or a package that is missing, ends it with one sentence."""
    try:
        start()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as error:
        if os.environ.get("LIT_GRPO_TRACEBACK"):
            raise
        missing = f"The package {error.name} is not installed" if error.name else str(error).splitlines()[0].rstrip(".")
        print(f"error: {missing}; install it, or lit_grpo with all that it needs.", file=sys.stderr)
        sys.exit(2)


def start() -> None:
    """Run the part that is asked for; each imports what it needs itself."""
    if sys.argv[1:2] == ["simulate"]:  # needs no torch, whose import would take most of the time
        from lit_grpo.cli.simulate import main as simulate

        simulate(sys.argv[2:])
        return
    if sys.argv[1:2] == ["report"]:
        from lit_grpo.cli.report import main as report

        report(sys.argv[2:])
        return
    if sys.argv[1:2] == ["serve"]:
        from lit_grpo.cli.serve import main as serve

        serve(sys.argv[2:])
        return
    if sys.argv[1:2] == ["dashboard"]:
        from lit_grpo.cli.dashboard import main as dashboard

        dashboard(sys.argv[2:])
        return
    if sys.argv[1:] == ["--version"]:
        from lit_grpo import __version__

        print(f"lit_grpo {__version__}")
        return
    if sys.argv[1:2] == ["from-trl"]:
        from lit_grpo.cli.from_trl import main as from_trl

        from_trl(sys.argv[2:])
        return
    from lit_grpo.cli.parsing.early import check_early

    check_early(sys.argv[1:])
    _announce(sys.argv[1:])
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM's CPU build tells of its memory binding
    if sys.argv[1:2] == ["export"]:
        from lit_grpo.cli.export import main as export

        export(sys.argv[2:])
        return
    if sys.argv[1:2] == ["doctor"]:
        from lit_grpo.cli.doctor import main as examine

        examine(sys.argv[2:])
    if sys.argv[1:2] == ["fit-check"]:
        from lit_grpo.cli.fit_check import main as fit_check

        fit_check(sys.argv[2:])
        return
    gc.disable()  # nothing of what is imported becomes garbage, and looking for it takes a third of the time
    from lit_grpo.cli.command_line import run

    gc.enable()  # not frozen as well: triton's bindings tell of every object that is left at the end
    run()


def _announce(arguments: list[str]) -> None:
    """Say at once which version trains, on the first rank: what it needs takes seconds to import."""
    ranks = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
    asks = any(argument.startswith(("--print_config", "--help", "-h")) for argument in arguments)
    if arguments[:1] == ["fit"] and not asks and all(os.environ.get(name, "0") == "0" for name in ranks):
        from lit_grpo import __version__

        print(f"lit_grpo {__version__}, loading ...", flush=True)


if __name__ == "__main__":
    main()
