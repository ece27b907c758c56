"""docs/migration.md, made of the tables: ``python -m lit_grpo.tools.migration.page > docs/migration.md``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from lit_grpo.tools.migration.table import SFT, TRL, VERL, Counterpart

HEAD = """# From TRL and verl

`python -m lit_grpo from-trl CONFIG.yaml` converts a config for `trl grpo --config` (TRL 1.16) to a config of lit_grpo.
Comments at its top name the fields that have another meaning here. `--rows N` is the number of training prompts, for a
config that counts epochs; `--devices N` is the number of devices of the run; `--output FILE` is the file to write. No
field is dropped silently: a field that TRL does not have, or that would change the training and is not supported, is
refused in one sentence. Fields that are left out have TRL's defaults.
With `--sft` the file is one for `trl sft --config`, and the result a run on examples alone, of the [plug-in
`sft`](update.md).

This page is made from the table that the command uses."""
TITLES = {
    "taken": "Fields of TRL 1.16 that have a counterpart",
    "none": "Fields that have no counterpart, and need none",
    "refused": "Fields that are refused if they are set",
}


def migration_page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *_sections(), ""])


def _sections() -> Iterator[str]:
    taken = {name: row for name, row in TRL.items() if row.kind in ("same", "changed")}
    yield from _table(TITLES["taken"], "TRL", taken)
    for kind in ("none", "refused"):
        yield f"\n## {TITLES[kind]}\n\n| TRL | reason |\n|---|---|"
        reasons: dict[str, list[str]] = {}
        for name, row in TRL.items():
            if row.kind == kind:
                reasons.setdefault(row.note, []).append(name)
        yield from (f"| {_codes(names)} | {note} |" for note, names in reasons.items())
    own = {name: row for name, row in SFT.items() if row != TRL.get(name)}
    taken = {name: row for name, row in own.items() if row.kind in ("same", "changed")}
    yield from _table("Fields of SFTConfig, with --sft, that differ from these", "TRL", taken)
    yield "\n| TRL, without a counterpart | reason |\n|---|---|"
    reasons = {}
    for name, row in own.items():
        if name not in taken:
            reasons.setdefault(("refused: " if row.kind == "refused" else "") + row.note, []).append(name)
    yield from (f"| {_codes(names)} | {note} |" for note, names in reasons.items())
    yield from _table("The main fields of verl", "verl", VERL)


def _table(title: str, trainer: str, rows: Mapping[str, Counterpart]) -> Iterator[str]:
    yield f"\n## {title}\n\n| {trainer} | lit_grpo | note |\n|---|---|---|"
    alike: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for name, row in rows.items():
        alike.setdefault((row.fields, row.note), []).append(name)
    for (fields, note), names in alike.items():
        yield f"| {_codes(names)} | {_codes(fields)} | {_beside(fields, note)} |"


def _beside(fields: Sequence[str], note: str) -> str:
    """Return a note without the field name that it begins with, because the table has that in its own column."""
    return re.sub(rf"^(?:{'|'.join(map(re.escape, fields))})(?:[:,;] |$)", "", note)


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(migration_page(), end="")
