"""Python processes that begin as forks of one that has imported what takes seconds.

They are processes like any others: children of who starts them, with a working directory, an environment, files and a
group of their own, that can be waited for, signaled and killed. What they do not do again is import torch,
transformers, Lightning and lit_grpo and make the parser of ``fit``, which takes most of the time of a short run. At
their end they do what a Python process does, but take no module apart: that is 1.5 seconds of looking at every object
of the imports.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import logging
import multiprocessing.util
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

IMPORTS = (
    *("lightning.pytorch.cli", "torchmetrics", "matplotlib.figure", "tensorboard.compat.proto.event_pb2"),
    *("transformers", "transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3"),
    *("lit_grpo.cli.command_line", "peft", "pandas", "hypothesis"),
)
VLLM = ("vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker", "vllm.entrypoints.openai.api_server")
"""What a process imports that has vLLM in itself, or in others."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""What is read when torch is imported, as ``python -m lit_grpo`` sets it."""
_PR_SET_CHILD_SUBREAPER = 36
_exec, _Popen = multiprocessing.util.spawnv_passfds, subprocess.Popen


class Origin:
    """The process that others are forks of, seen from the one whose children these become.

    Args:
        channel: The way to it; it ends when this is closed.
        process: It, where there is something to keep of it.
    """

    def __init__(self, channel: socket.socket, process: subprocess.Popen[Any] | None = None) -> None:
        self._channel, self._process, self._lock = channel, process, threading.Lock()

    def fork(self, task: Mapping[str, Any], files: Sequence[int]) -> int:
        """Begin a process with these files, standard input, output and error first; return its id."""
        with self._lock:
            _adopt(True)  # its parent ends at once, which makes it a child of this process
            try:
                socket.send_fds(self._channel, [json.dumps(task).encode()], files)
                return int(self._channel.recv(64))
            finally:
                _adopt(False)


@functools.cache
def origin(imports: Sequence[str] = ()) -> Origin:
    """One that has imported these modules as well; it ends with this process."""
    if Worker.nest and not imports:
        return Worker.nest
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    start = Forked if imports else _Popen
    with theirs:
        process = start(
            [sys.executable, __file__, *imports],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            env=os.environ | ENVIRONMENT,
            cwd=Path(__file__).parents[1],
        )
    return Origin(ours, process)


class Forked(subprocess.Popen):
    """A ``Popen``, which makes a fork where this Python is to run a module or a script, and may start more such.

    Args:
        args: The command.
        others: What a ``Popen`` takes.
        options: Likewise.
        imports: Modules that are imported before.
    """

    origin: Origin | None = None
    """What the children of a process are forks of that is one itself."""
    worker = False
    """Whether it starts others as any process does, and not as forks unless it says so."""

    def __init__(self, args: Any, *others: Any, imports: Sequence[str] = (), **options: Any) -> None:
        self._imports = tuple(imports)
        super().__init__(args, *others, **options)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *others: Any) -> None:
        _, pass_fds, cwd, env, _, _, shell, *pipes = others[:13]
        words = [] if isinstance(args, str | bytes) else [os.fsdecode(arg) for arg in args]
        unbuffered = words[1:2] == ["-u"]
        words = words[:1] + words[1 + unbuffered :]
        runs = len(words) > 1 and (words[1] == "-m" or words[1].endswith(".py"))
        runs = runs or (words[1:2] == ["-c"] and not Forked.origin)
        if shell or pass_fds or words[:1] != [sys.executable] or not runs:
            return super()._execute_child(args, executable, preexec_fn, *others)  # pyrefly: ignore[missing-attribute]
        task = {
            "words": words[1:],
            "cwd": os.fsdecode(cwd or os.getcwd()),
            "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in (env or os.environ).items()},
            "session": others[18],  # start_new_session
            "group": others[19] == 0,  # process_group
            "first": [preexec_fn.__module__, preexec_fn.__name__] if preexec_fn else None,
            "unbuffered": unbuffered,
            "worker": self.worker,
        }
        files = [own if file == -1 else file for own, file in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid = (Forked.origin or origin(self._imports)).fork(task, files)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # pyrefly: ignore[missing-attribute]


class Worker(Forked):
    """A worker of pytest-xdist, and what its own forks are made of: neither imports torch again."""

    worker = True
    nest: Origin | None = None
    """In a worker, what its forks are made of."""


def run(command: Sequence[str], timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run`` does, with output that is captured as text."""
    with Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            said, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, said, errors)


def _spawn(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Do what ``multiprocessing.util.spawnv_passfds`` does."""
    words = [os.fsdecode(arg) for arg in args]
    if Forked.origin is None or not any("spawn_main" in word for word in words):
        return _exec(path, args, passfds)
    task = {"words": words[words.index("-c") :], "cwd": os.getcwd(), "environment": dict(os.environ)}
    kept = sorted(map(int, passfds))
    return Forked.origin.fork(task | {"kept": kept}, [0, 1, 2, *kept])


def share_parsers(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have the runs of this process, and of its forks, share what the command line takes more than a second for.

    These are the parsers of the four subcommands, what jsonargparse finds out of classes and protocols, and the speed
    of this machine's products of matrices, which each run measures. Lightning moves each logged value to the device
    that it is on, which is a twelfth of a short run; that is left out.
    """
    import torch
    from jsonargparse import _typehints
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric

    from lit_grpo.callbacks import monitors  # pyrefly: ignore[missing-module-attribute]
    from lit_grpo.cli.command_line import GRPOCLI
    from lit_grpo.cli.parsing.help import SHORT

    if hasattr(_typehints.implements_protocol, "cache_info"):
        return
    made: dict[Any, dict[str, Any]] = {}
    make, move = GRPOCLI.setup_parser, _ResultMetric.to

    def setup_parser(cli: GRPOCLI, *args: Any) -> None:
        kind = (type(cli), *cli.subcommands())
        if kind not in made:
            make(cli, *args)
            names = ("parser", "_subcommand_parsers", "_subcommand_method_arguments")
            made[kind] = {name: getattr(cli, name) for name in names}
        vars(cli).update(made[kind])
        for parser in cli._subcommand_parsers.values():
            setattr(parser, SHORT, True)  # --help-all has taken it away

    def to(metric: Any, device: Any) -> Any:
        is_there = isinstance(metric.value, torch.Tensor) and metric.value.device == device
        return metric if is_there else move(metric, device)

    replace(_ResultMetric, "to", to)
    replace(GRPOCLI, "setup_parser", setup_parser)
    for module, name in ((_typehints, "implements_protocol"), (monitors, "_peak_flops")):
        replace(module, name, functools.cache(getattr(module, name)))


def main() -> None:
    """Be an origin until the other end of standard input is closed."""
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it lacks a kernel that none needs
    for name in (*IMPORTS, *sys.argv[1:]):
        importlib.import_module(name)
    share_parsers()
    sys.argv = ["python -m lit_grpo", "fit", "--config", "arithmetic", "--print_config"]
    with contextlib.suppress(SystemExit):  # after it has made the parser and looked at the classes of the fields
        command_line = importlib.import_module("lit_grpo.cli.command_line")
        command_line.GRPOCLI(command_line.RunFolder(), **command_line.cli_arguments(None))
    gc.freeze()  # no fork looks for garbage among what is imported
    atexit.register(gc.unfreeze)  # or triton's bindings tell of every object that is left at the end
    _serve(channel)


def _serve(channel: socket.socket) -> NoReturn:
    """Fork as told until the other end is closed."""
    while True:
        message, files, *_ = socket.recv_fds(channel, 2**20, 32)
        if not message:
            os._exit(0)
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            between = os.getpid()
            if child := os.fork():
                os.write(writing, str(child).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            _be(json.loads(message), files)
        os.waitpid(between, 0)
        channel.send(os.read(reading, 64))
        for file in (*files, reading, writing):
            os.close(file)


def _be(task: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    """Be the process of a task."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]  # above all that they are to be
    os.closerange(3, 1000)
    for number, file in zip((0, 1, 2, *task.get("kept", ())), high, strict=True):
        os.dup2(file, number)
        os.close(file)
    if task.get("session"):
        os.setsid()
    if task.get("group"):
        os.setpgid(0, 0)
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["environment"])
    rank_zero = importlib.import_module("lightning.fabric.utilities.rank_zero")
    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0  # as it is when Lightning is imported
    if task.get("unbuffered"):
        sys.stdout.reconfigure(write_through=True)  # pyrefly: ignore[missing-attribute]
    _nest(bool(task.get("worker")))
    try:
        _run(task["words"], task.get("first"))
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            raise
        _end(ended.code or 0)
    _end(0)


def _end(code: int) -> NoReturn:
    """End this process as Python does, but for its modules; with what cannot be written the whole way."""
    threading._shutdown()  # pyrefly: ignore[missing-attribute]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
    except OSError:
        sys.exit(code)
    os._exit(code)


def _nest(worker: bool) -> None:
    """Have this process start forks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        channel = theirs.fileno()
        for number in range(3):
            os.dup2(null, number)
        os.closerange(3, channel)
        os.closerange(channel + 1, 1000)
        _serve(theirs)
    theirs.close()
    if worker:  # whose tests import this file, which runs here as a script
        importlib.import_module(Path(__file__).stem).Worker.nest = Origin(ours)
        return
    Forked.origin, subprocess.Popen, multiprocessing.util.spawnv_passfds = Origin(ours), Forked, _spawn


def _run(words: Sequence[str], before: Sequence[str] | None) -> None:
    """Run a module, a script or a line of code to its end."""
    name, *arguments = words[words[0] in ("-m", "-c") :]
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[0:1] = [str(Path(name).resolve().parent) if name == words[0] else os.getcwd(), *path]
    sys.argv = [name, *arguments]
    if before is not None:
        getattr(importlib.import_module(before[0]), before[1])()
    match words[0]:
        case "-m":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case "-c":
            sys.argv[0] = "-c"
            exec(name, {"__name__": "__main__"})
        case _:
            runpy.run_path(name, run_name="__main__")


def _adopt(whether: bool) -> None:
    """Become the parent of orphans among the descendants of this process, or no more."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0)


if __name__ == "__main__":
    main()
