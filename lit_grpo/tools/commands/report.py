"""``python -m lit_grpo report``: makes one HTML file of a run's folder."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from lit_grpo.cli.parsing.sentences import SentenceParser
from lit_grpo.tools.dashboard.report import write_report

ABOUT = (
    "Write one HTML file with the metrics, memory, timelines, lengths, completions and settings in a run's folder, "
    "even while the run goes on. The file needs no network."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the report; a mistake ends with one sentence and exit code 2."""
    parser = SentenceParser(prog="python -m lit_grpo report", description=ABOUT, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="The run's folder, such as runs/arithmetic.")
    parser.add_argument("--output", type=Path, metavar="FILE", help="The file to write. Default: RUN/report.html.")
    parser.add_argument("--open", action="store_true", help="Show it in the browser.")
    options = parser.parse_args(arguments)
    try:
        path = write_report(options.run, options.output)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        path = str(options.output or options.run / "report.html")
        parser.error(f"The report {path!r} cannot be written ({error.strerror}); choose another --output.")
    print(f"The report is in {path}.")
    if options.open:
        webbrowser.open(path.resolve().as_uri())
