"""An offline W&B run, read back: records of protobuf in the blocks of a LevelDB log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HEADER_BYTES, _BLOCK_BYTES, _RECORD_HEADER_BYTES = 7, 32768, 7
_FULL, _FIRST, _LAST = 1, 2, 4


@dataclass
class WandbRun:
    """What a run has told W&B.

    ``rows`` are those of its history, ``summaries`` the rule of each metric that has one, ``ended`` whether its end is
    in the file.
    """

    id: str = ""
    ended: bool = False
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summaries: dict[str, set[str]] = field(default_factory=dict)


def read_wandb(path: Path) -> WandbRun:
    """Read a ``.wandb`` file."""
    from wandb.proto import wandb_internal_pb2

    run = WandbRun()
    for data in _records(path.read_bytes()):
        record: Any = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.id, run.tags = record.run.run_id, list(record.run.tags)
        updates = record.run.config.update if kind == "run" else record.config.update if kind == "config" else ()
        run.config |= {update.key: json.loads(update.value_json) for update in updates if update.key}
        run.ended |= kind == "exit"
        if kind == "metric":
            rules = {rule.name for rule, on in record.metric.summary.ListFields() if on}
            run.summaries[record.metric.name or record.metric.glob_name] = rules
        if kind == "history":
            run.rows.append(
                {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    return run


def _records(data: bytes) -> Iterator[bytes]:
    """Put the parts of each record together; a block's last bytes are padding where no header fits."""
    place, parts = _HEADER_BYTES, b""
    while place + _RECORD_HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _RECORD_HEADER_BYTES:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        start = place + _RECORD_HEADER_BYTES
        part, place = data[start : start + length], start + length
        parts = part if kind in (_FULL, _FIRST) else parts + part
        if kind in (_FULL, _LAST):
            yield parts
