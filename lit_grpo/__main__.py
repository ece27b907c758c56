"""``python -m lit_grpo``."""

import os


def main() -> None:
    """Run the command line; a mistake in the input ends it with one sentence."""
    # Threads that wait must not spin: beside another busy process a spinning pair of them is many times slower
    # than one alone. OpenMP reads this when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from lit_grpo.cli import run

    run()


if __name__ == "__main__":
    main()
