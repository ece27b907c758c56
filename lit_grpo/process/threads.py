"""Threads that wait without spinning, because next to another busy process spinning threads are many times slower.

Thread libraries read from the environment how to wait when they are loaded, so the package sets the environment when it
is imported. If torch was imported before, :func:`wait_without_spinning` changes the loaded libraries.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from functools import cache
from pathlib import Path

from lit_grpo.process.terminal import warn

QUIET = {
    "OMP_WAIT_POLICY": "PASSIVE",
    # numpy's own threads spin as well, after each small product of the length predictor.
    "OPENBLAS_NUM_THREADS": "1",
}
CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables that decide how threads wait; if the user has set one, nothing is changed."""
BLAS_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)
_too_late = False


def prepare() -> None:
    """Set the environment for libraries that are loaded later, and for the processes that this one starts.

    Variables of the user are kept. If torch is loaded already, :func:`wait_without_spinning` does the rest in a run.
    """
    global _too_late
    _too_late = ("torch" in sys.modules or "numpy" in sys.modules) and not any(name in os.environ for name in CHOSEN)
    if "torch" not in sys.modules:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)


def wait_without_spinning() -> None:
    """Make the threads of torch and numpy wait without spinning if they were loaded before this package.

    An unknown thread library gives a warning.
    """
    if _too_late:
        _quieten_loaded()


@cache
def _quieten_loaded() -> None:
    loaded = _loaded_libraries()
    for path in (path for path in loaded if "openblas" in path.name):
        library = ctypes.CDLL(str(path))
        for setter in (getattr(library, name) for name in BLAS_SETTERS if hasattr(library, name)):
            setter(ctypes.c_int(1))
    gnu = [path for path in loaded if path.name.startswith("libgomp")]
    others = [path for path in loaded if re.match(r"lib(iomp5|omp)\b", path.name)]
    for path in gnu:
        _outnumber(ctypes.CDLL(str(path)))
    for path in others:
        ctypes.CDLL(str(path)).kmp_set_blocktime(ctypes.c_int(0))
    if "torch" in sys.modules and not gnu and not others:
        warn(
            "torch was imported before lit_grpo, so its threads spin while they wait, which is slow next to other busy "
            "processes; import lit_grpo first, or set OMP_WAIT_POLICY=PASSIVE before Python starts.",
            stacklevel=3,
        )


def _outnumber(gnu: ctypes.CDLL) -> None:
    """Start more threads of GNU's OpenMP than there are CPUs, after which it hardly spins.

    Its manual (GOMP_SPINCOUNT): "If there are more OpenMP threads than available CPUs, 1000 and 100 spins are used".
    Each thread runs ``free(NULL)`` once and then sleeps; a Python thread keeps them until the process ends.
    """
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
    num_threads = len(os.sched_getaffinity(0)) + 1
    there = threading.Event()

    def keep() -> None:
        gnu.GOMP_parallel(nothing, None, ctypes.c_uint(num_threads), ctypes.c_uint(0))
        there.set()
        threading.Event().wait()

    threading.Thread(target=keep, name="lit_grpo-openmp", daemon=True).start()
    there.wait()


def _loaded_libraries() -> list[Path]:
    """Return the loaded libraries of this process; on macOS, only the OpenMP library in torch's folder."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        found = {line.split(maxsplit=5)[5].strip() for line in maps.read_text().splitlines() if ".so" in line}
        return [Path(path) for path in sorted(found)]
    torch = sys.modules.get("torch")
    place = Path(torch.__file__).parent / "lib" if torch is not None and torch.__file__ else None
    return sorted(place.glob("libomp*.dylib")) if place is not None else []
