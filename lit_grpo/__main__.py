"""``python -m lit_grpo``."""


def main() -> None:
    """Run the command line; a mistake in the input ends it with one sentence."""
    from lit_grpo.cli import run

    run()


if __name__ == "__main__":
    main()
