"""``python -m lit_grpo report``: makes one HTML file of the folders of one run or of several."""

from __future__ import annotations

import shutil
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from lit_grpo.cli.parsing.sentences import SentenceParser
from lit_grpo.process.files import replace_file
from lit_grpo.process.terminal import say
from lit_grpo.tools.dashboard.report import default_path, read_folders, write_report

ABOUT = (
    "Write one HTML file with the metrics, memory, timelines, lengths, completions and settings in a run's folder, "
    "even while the run goes on. Several runs are compared: their final figures, the settings that differ, and their "
    "curves in common charts. The file needs no network. With --text the report is printed as text."
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
    parser.add_argument(
        "--text",
        action="store_true",
        help="Print figures, curves, completions and advice as text, as wide as the terminal (or COLUMNS); no file is "
        "written but that of --output.",
    )
    options = parser.parse_args(arguments)
    if options.text and options.open:
        parser.error("--text prints the report, and --open shows the HTML file in a browser; leave one of them out.")
    try:
        if options.text:
            return _print_text(options.runs, options.output)
        path = write_report(options.runs, options.output)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        path = str(options.output or default_path(options.runs))
        parser.error(f"The report {path!r} cannot be written ({error.strerror}); choose another --output.")
    say(f"The report is in {path}.")
    if options.open:
        webbrowser.open(path.resolve().as_uri())


def _print_text(folders: Sequence[Path], output: Path | None) -> None:
    """Print the report as text, or write it into a file."""
    from lit_grpo.tools.dashboard.report.text import BLOCKS, report_text

    encoding = "utf-8" if output is not None else getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        f"{BLOCKS}─".encode(encoding)
        ascii_only = False
    except UnicodeError:
        ascii_only = True
    width = shutil.get_terminal_size((100, 24)).columns
    text = report_text(read_folders(folders), width, ascii_only)
    if output is None:
        say(text.encode(encoding, "backslashreplace").decode(encoding).rstrip("\n"))
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(output, text.encode("utf-8", "backslashreplace"))
    say(f"The report is in {output}.")
