"""``python -m lit_grpo report``: makes one HTML file of the folders of one run or of several."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from lit_grpo.cli.parsing.sentences import SentenceParser
from lit_grpo.tools.dashboard.report import default_path, write_report

ABOUT = (
    "Write one HTML file with the metrics, memory, timelines, lengths, completions and settings in a run's folder, "
    "even while the run goes on. Several runs are compared: their final figures, the settings that differ, and their "
    "curves in common charts. The file needs no network."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the report; a mistake ends with one sentence and exit code 2."""
    parser = SentenceParser(prog="python -m lit_grpo report", description=ABOUT, allow_abbrev=False)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="The run's folder, such as runs/arithmetic, or several."
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="The file to write. Default: report.html in RUN; for several runs, in the folder that holds the first.",
    )
    parser.add_argument("--open", action="store_true", help="Show it in the browser.")
    options = parser.parse_args(arguments)
    try:
        path = write_report(options.runs, options.output)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        path = str(options.output or default_path(options.runs))
        parser.error(f"The report {path!r} cannot be written ({error.strerror}); choose another --output.")
    print(f"The report is in {path}.")
    if options.open:
        webbrowser.open(path.resolve().as_uri())
