"""``python -m lit_grpo finish``: makes a folder of a run that others can use, with a model card and GGUF files."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_grpo.cli.parsing.sentences import SentenceParser, exit_with
from lit_grpo.process.signals import exit_on_signals
from lit_grpo.process.terminal import say

if TYPE_CHECKING:
    import argparse

    from lit_grpo.tools.dashboard.report.folder import RunRecords
    from lit_grpo.tools.finishing.comparison import Cost
    from lit_grpo.tools.finishing.origin import Origin
    from lit_grpo.tools.finishing.vocabulary import Vocabulary

ABOUT = (
    "Make a folder of a run that other people can use: the policy as safetensors with its tokenizer (a LoRA adapter "
    "merged, and alone), GGUF files for llama.cpp, and a model card with the run's settings, curves and samples. "
    "Nothing leaves this machine without --push."
)
FORMATS = ("f32", "f16", "bf16", "q8_0", "none")
DEFAULT = "q8_0"
ADAPTER_FILES = {"peft": "adapter_config.json", "llama.cpp": "*.gguf"}
_NAME = re.compile(r"[\w+][\w.+-]*( [\w.+-]+)*")
_ROOM = 64 * 2**20
"""Bytes for the card, the picture, the tokenizer and what a file system takes."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the folder, and push it if asked; a mistake ends with one sentence and exit code 2."""
    parser = SentenceParser(prog="python -m lit_grpo finish", description=ABOUT, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="The run's folder, such as runs/arithmetic.")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="The folder to make. Default: RUN/finished; it must not exist."
    )
    parser.add_argument(
        "--checkpoint",
        choices=("last", "best"),
        default="last",
        help="The policy at the end of the run, or that with the highest held-out pass@1. Default: last.",
    )
    parser.add_argument(
        "--gguf",
        nargs="+",
        choices=FORMATS,
        help=f"Kinds of GGUF files; none for no file. Default: {DEFAULT}, if the package gguf is installed.",
    )
    parser.add_argument("--name", help="Name of the model. Default: the run's name.")
    parser.add_argument(
        "--license",
        metavar="LICENSE",
        help="License of the model, such as apache-2.0. Default: that of the base, where it is known.",
    )
    parser.add_argument("--push", metavar="OWNER/NAME", help="Send the folder to this repository of the hub.")
    parser.add_argument("--public", action="store_true", help="Let everybody see a repository that --push creates.")
    options = parser.parse_args(arguments)
    exit_on_signals()
    try:
        _finish(options)
    except ValueError as error:
        exit_with(str(error))
    except OSError as error:
        remedy = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "choose another --output"
        exit_with(f"The folder could not be written ({error.strerror or error}), and nothing is left of it; {remedy}.")


def _finish(options: argparse.Namespace) -> None:
    """Check everything, then write the folder, then push it.

    Raises:
        ValueError: A mistake, in one sentence; nothing is written then, unless it was made by the hub.
        OSError: The disk is full, or not writable.
    """
    from lit_grpo.tools.dashboard.report.folder import read_folder
    from lit_grpo.tools.finishing.origin import find_origin
    from lit_grpo.tools.finishing.push import Hub
    from lit_grpo.tools.finishing.vocabulary import check_name

    run = read_folder(options.run)
    if "config.yaml" in run.problems:
        raise ValueError(run.problems["config.yaml"])
    if run.running:
        raise ValueError(f"The run in {str(options.run)!r} still goes on; stop it, or wait until it ends.")
    output: Path = options.output or options.run / "finished"
    if output.exists() or output.is_symlink():
        raise ValueError(f"{str(output)!r} exists already; remove it, or choose another --output.")
    has_gguf = find_spec("gguf") is not None
    asked = options.gguf or [DEFAULT if has_gguf else "none"]
    kinds = [] if asked == ["none"] else list(dict.fromkeys(asked))
    if "none" in kinds:
        raise ValueError("--gguf has none and other kinds; give one or the other.")
    if options.name is None:
        options.name = options.run.resolve().name
    if not _NAME.fullmatch(options.name):
        raise ValueError(
            f"The model's name would be {options.name!r}; give one of letters, digits, spaces and . _ + - as --name."
        )
    if kinds and not has_gguf:
        raise ValueError("--gguf needs gguf; install the extra lit_grpo[smollm2], or leave GGUF out with --gguf none.")
    if kinds:
        check_name(options.name)
    if options.public and options.push is None:
        raise ValueError("--public is about a repository that --push creates; give --push OWNER/NAME too.")
    origin = find_origin(str((run.config.get("model") or {}).get("policy") or "policy"))
    origin = origin if options.license is None else origin.under(options.license)
    if options.push is not None and not origin.license:
        raise ValueError(
            f"The license of the base model {origin.name} is not known, so it may not be allowed to pass it on; "
            "find it out and give it, as in --license apache-2.0, or leave --push out."
        )
    hub = None if options.push is None else Hub(options.push, options.public)
    said = _write(options, run, origin, kinds, output)
    said += [f"  {sentence}" for sentence in run.problems.values()]
    if not options.gguf and not has_gguf:
        said.append("  A GGUF file needs gguf, which the extra lit_grpo[smollm2] installs.")
    say("\n".join([f"The finished model is in {output}.", *said]))
    if hub is not None:
        address = hub.push(output)
        say(f"It is on the hub, {'public' if options.public else 'private'} if it was not there before: {address}")


def _write(options: argparse.Namespace, run: RunRecords, origin: Origin, kinds: list[str], output: Path) -> list[str]:
    """Write the folder aside and give it its name at the end; return lines about it."""
    from lit_grpo.policy.architecture.vision import has_tower
    from lit_grpo.policy.tokenizers import loading_class
    from lit_grpo.process.files import new_folder
    from lit_grpo.process.terminal import may_fail
    from lit_grpo.tools.finishing import record
    from lit_grpo.tools.finishing.card import Contents, carried_sentence, cost_sentence, write_card
    from lit_grpo.tools.finishing.comparison import PolicyLogprobs
    from lit_grpo.tools.finishing.picture import draw_curves
    from lit_grpo.tools.finishing.source import RunPolicy

    name = options.name
    source = RunPolicy.find(options.run, options.checkpoint, int(run.steps[-1]))
    sizes = {kind: source.gguf_bytes(kind) for kind in kinds}
    _check_room(output, source.num_bytes + sum(sizes.values()) + _ROOM)
    version, num_weights = source.version, source.num_weights
    said: list[str] = []
    drawn = False
    with new_folder(output) as folder:
        num_carried = source.export(folder)
        del source  # its memory is for the models that are compared
        _name_base(folder, origin)
        for text in origin.texts():
            shutil.copy(text, folder)
        texts = [
            f"{row.get('prompt') or ''}{row.get('completion') or ''}"
            for _, rows in record.sampled(run, version)
            for row in rows
        ]
        reference = PolicyLogprobs(folder, texts) if kinds else None
        files: dict[str, tuple[str, int, Cost]] = {}
        written: Vocabulary | None = None
        for kind in kinds:
            from lit_grpo.tools.finishing.gguf_writer import write_gguf

            assert reference is not None
            path = folder / f"{name.replace(' ', '-')}-{kind}.gguf"
            written = write_gguf(folder, path, kind, name, origin.license.get("license"))
            files[kind] = path.name, path.stat().st_size, reference.cost(path, kind)
            said.append(f"  {path.name}: {cost_sentence(files[kind][2])}.")
        left_out = [] if written is None else _for_ollama(folder, name, origin, files, written)
        said += [f"  {sentence}" for sentence in left_out]
        with may_fail("curves.png", "the run's metrics.csv has the figures"):
            drawn = draw_curves(run, folder / "curves.png", version)
        contents = Contents(
            name=name,
            version=version,
            checkpoint=options.checkpoint,
            num_weights=num_weights,
            adapter_for=[kind for kind, file in ADAPTER_FILES.items() if [*folder.glob(f"adapter/{file}")]],
            has_picture=drawn,
            gguf=files,
            has_chat=written is not None and written.has_chat,
            left_out=left_out,
            place=options.push or ".",
            tokenizer_class=loading_class(str(folder)),
            model_class="AutoModelForImageTextToText" if has_tower(folder) else "AutoModelForCausalLM",
            num_carried=num_carried,
        )
        (folder / "README.md").write_text(write_card(run, origin, contents), encoding="utf-8")
    if num_carried:
        said.append(f"  {carried_sentence(num_carried, bool(kinds))}")
    found = record.progress(run, version)
    if found is not None and not found.has_improved:
        said.append(f"  {str(found).replace('**', '')}")
    if not origin.license:
        said.append("  The card says that the license of the base is not known; --license names it.")
    return said


def _for_ollama(
    folder: Path, name: str, origin: Origin, files: Mapping[str, tuple[str, int, Cost]], written: Vocabulary
) -> list[str]:
    """Write the Modelfile, and a LoRA adapter alone as GGUF with a Modelfile of its own; say what is left out."""
    from lit_grpo.tools.finishing.gguf_writer import write_adapter
    from lit_grpo.tools.finishing.ollama import write_modelfile

    write_modelfile(folder / "Modelfile", [f"FROM ./{next(iter(files.values()))[0]}"], folder, written)
    if not (adapter := folder / "adapter").is_dir():
        return [*written.left_out]
    path, base = adapter / f"{name.replace(' ', '-')}-adapter.gguf", re.sub(r"[^\w.+-]+", "-", origin.name)
    try:
        write_adapter(folder, path, name, origin.license.get("license"))
    except ValueError as error:
        return [*written.left_out, str(error)]
    about = "# A GGUF file of the base, which is not in this folder:"
    write_modelfile(adapter / "Modelfile", [about, f"FROM ./{base}.gguf", f"ADAPTER ./{path.name}"], folder, written)
    return [*written.left_out]


def _check_room(output: Path, needed: int) -> None:
    """Refuse a disk without room.

    Raises:
        ValueError: There is less room than the folder needs.
    """
    place = next(parent for parent in output.resolve().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ValueError(
            f"The folder {str(output)!r} needs {needed / 1e9:.2f} GB, and the disk has {free / 1e9:.2f} GB left; make "
            "room, choose another --output, or fewer kinds of --gguf."
        )


def _name_base(folder: Path, origin: Origin) -> None:
    """Write into an adapter's configuration what its base is called, not where it is on this machine."""
    path = folder / "adapter" / "adapter_config.json"
    if not path.is_file():
        return
    config: dict[str, Any] = json.loads(path.read_text())
    if Path(str(config.get("base_model_name_or_path"))).is_absolute():
        config["base_model_name_or_path"] = origin.name
        path.write_text(json.dumps(config, indent=2) + "\n")
