"""The installed version of all that ``lit_grpo[dev]`` needs; ``make pins`` puts them into constraints.txt."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
REMOVED = {"torchvision", "torchaudio", "torchcodec"}
"""What vLLM asks for and `make install` takes away again."""


def installed(root: str = "lit_grpo[dev]") -> tuple[dict[str, Version], list[str]]:
    """Go from package to package along what each says that it needs here.

    Returns:
        The version of each package but the first, without its local label (``+cpu``), and what is wrong: one line for
        each package that is missing or too old or new for another.
    """
    versions: dict[str, Version] = {}
    wrong: list[str] = []
    todo, seen = [("", Requirement(root))], set[tuple[str, str]]()
    while todo:
        asker, asked = todo.pop()
        name = canonicalize_name(asked.name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if name not in REMOVED:
                wrong.append(f"{asker} needs {asked}, which is not installed")
            continue
        version = Version(found.version)
        if not asked.specifier.contains(version, prereleases=True):
            wrong.append(f"{asker} needs {asked}, but {version} is installed")
        versions[name] = Version(version.public)
        for extra in {"", *asked.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                needs = map(Requirement, found.requires or ())
                todo += [(name, need) for need in needs if not need.marker or need.marker.evaluate({"extra": extra})]
    del versions[canonicalize_name(Requirement(root).name)]
    return dict(sorted(versions.items())), wrong


def pinned() -> dict[str, Version]:
    """What constraints.txt says."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {name: Version(version) for name, version in (line.split("==") for line in lines)}


if __name__ == "__main__":
    for name, version in installed()[0].items():
        print(f"{name}=={version}")
