"""Amount of code that one update runs through, and of all code, compared with an earlier commit.

A run of the command line makes three updates; the third is traced in the main thread, from the start of the rollout to
the end of the weight sync. In Python 3.11 each comprehension is a function of its own, so functions are counted with
and without comprehensions and lambdas. A class counts if one of its methods runs. A return is a move, in
the order of first calls, into a file that has been visited before.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.earlier_commit import earlier_commit
from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options

BEFORE = "23f661f"
CONFIGS = ("arithmetic", "calculator")
TRACED = r"""
import json, sys
from lit_grpo import callbacks
from lit_grpo.cli.command_line import run
from lit_grpo.data import PromptDataModule

functions, classes, first_calls, num_updates = {}, set(), {}, 0
scheduler, sync = callbacks.RolloutScheduler, callbacks.WeightSync
places = (sys.argv[1] + "/lit_grpo/", sys.argv[1] + "/callbacks/")
set_up, begin, end = PromptDataModule.setup, scheduler.on_train_batch_start, sync.on_train_batch_end

def note_first(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(places):
        first_calls.setdefault(frame.f_globals["__name__"] + "." + code.co_qualname)

def trace(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(places):
        functions.setdefault((code.co_filename, code.co_qualname))
        owner = frame.f_locals.get("self")
        if type(owner).__module__.split(".")[0] in ("lit_grpo", "callbacks"):
            classes.add(type(owner))

def on_setup(self, *arguments, **options):
    sys.setprofile(note_first)
    return set_up(self, *arguments, **options)

def on_start(self, *arguments, **options):
    global num_updates
    num_updates += 1
    sys.setprofile({1: note_first, 3: trace}.get(num_updates))
    return begin(self, *arguments, **options)

def on_end(self, *arguments, **options):
    ended = end(self, *arguments, **options)
    sys.setprofile(None)
    return ended

PromptDataModule.setup, scheduler.on_train_batch_start, sync.on_train_batch_end = on_setup, on_start, on_end
run(sys.argv[2:])
named = [name for _, name in functions if not name.rpartition(".")[2].startswith("<")]
order = [file for file, _ in functions]
moves = [file for file, last in zip(order, [None, *order]) if file != last]
counts = [len(set(order)), len(functions), len(named), len(classes), len(moves) - len(set(order))]
print(json.dumps([counts, list(first_calls)]))
"""


def main(options: Options) -> int:
    """Trace both commits, and count their lines."""
    rows: list[Row] = []
    with earlier_commit(BEFORE) as before:
        for config in CONFIGS[:1] if options.quick else CONFIGS:
            for side, root in (("then", before), ("now", ROOT)):
                if root is not None:
                    rows.append({"config": config, "commit": side, **traced(config, root)[0]})
                    note(str(rows[-1]))
        if before is not None:
            rows += [{"config": "all", "commit": "then", **sizes(before)}]
        rows += [{"config": "all", "commit": "now", **sizes(ROOT)}]
    by_name = {(row["config"], row["commit"]): row for row in rows}
    demo = by_name["arithmetic", "now"]
    claims = [
        Claim(f"{noun} that one update of the demo runs through", float(demo[noun] or 0), "<=", bound)
        for noun, bound in (("files", 60), ("functions", 540), ("classes", 68))
    ]
    if (tools := by_name.get(("calculator", "now"))) is not None:
        for noun, bound in (("files", 9), ("classes", 13)):  # one of each was on the demo's own path until 2026-11-29
            more = float(tools[noun] or 0) - float(demo[noun] or 0)
            claims.append(Claim(f"{noun} that an environment adds", more, "<=", bound))
    return finish("update_trace", options, {"before": BEFORE}, rows, claims)


def traced(config: str, root: Path, **more: object) -> tuple[dict[str, int], list[str]]:
    """Return the number of files, functions (named: without comprehensions), classes and returns of the third update.

    Also return the functions of the run up to the end of its first update, in the order of their first calls.

    Args:
        config: Name of a file in ``configs``.
        root: The repository.
        **more: More settings, with ``__`` for their points.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = {"trainer.max_steps": 3, "trainer.val_check_interval": 3, "data.batch_size": 4}
        settings |= {"model.num_generations": 4, "run.dir": folder}
        settings |= {name.replace("__", "."): value for name, value in more.items()}
        command = [sys.executable, "-c", TRACED, str(root), "fit", "--config", str(root / f"configs/{config}.yaml")]
        command += [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        environment = os.environ | {"PYTHONPATH": str(root)}
        told = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=900)
    if told.returncode:
        raise SystemExit(told.stdout + told.stderr)
    counts, first_calls = json.loads(told.stdout.splitlines()[-1])
    return dict(zip(("files", "functions", "named_functions", "classes", "returns"), counts, strict=True)), first_calls


def sizes(root: Path) -> dict[str, int | float]:
    """Return the files, lines, functions, classes and the mean length of a function of the package."""
    paths = [*(root / "lit_grpo").rglob("*.py"), *(root / "callbacks").rglob("*.py")]
    trees = [ast.parse(path.read_text()) for path in paths]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    lengths = [
        (node.end_lineno or 0) - node.lineno + 1
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {
        "files": len(paths),
        "lines": sum(len(path.read_text().splitlines()) for path in paths),
        "functions": len(lengths),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "mean_lines_of_a_function": round(sum(lengths) / len(lengths), 2),
    }


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
