"""SortedRL's ablations: does it matter that a loading is grouped, and that it is sorted while it is sampled?

As :mod:`benchmarks.modes_learning`, on the demo's task: SortedRL beside itself without grouped loading
(``refill=always``), and beside sorting afterwards, in which all completions of four batches are sampled at once and
four updates learn from them, groups of short completions first. The paper found both below the baseline.
"""

from __future__ import annotations

import sys

from benchmarks.modes_learning import NO_LOADING, SORTED_AFTERWARDS, SYNCHRONOUS, Task, compare
from benchmarks.report import parse_options

TASKS = {"arithmetic": Task("arithmetic", (SYNCHRONOUS, SORTED_AFTERWARDS, "sortedrl", NO_LOADING, "sortedrl_partial"))}

if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(compare("sorted_learning", TASKS, parse_options(__doc__)))
