"""The attention of tables beside that of the shelves; ``test_layer_kernels.py`` runs its kernel."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")


def test_for_tables_nothing_moves_and_entries_that_are_freed_are_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the attention of tables in plain operations, beside shelves whose entries close up."""
    from lit_grpo.rollout.slots.kv.shelves import Shelf
    from tests.cuda.row_attention_case import largest_gap
    from tests.doubles.row_attention import attend_by_tables

    add, settle, in_holes, moved = Shelf.add, Shelf.settle, list[int](), list[int]()

    def adding(shelf: Shelf, *args: int) -> list[int]:
        in_holes.extend(shelf._holes[: args[0]])
        return add(shelf, *args)

    def settling(shelf: Shelf, slack: float | None = None) -> dict[int, int]:
        found = settle(shelf, slack)
        moved.append(len(found))
        return found

    monkeypatch.setattr(Shelf, "add", adding)
    monkeypatch.setattr(Shelf, "settle", settling)
    assert largest_gap("cpu", 100, attend_by_tables) < 1e-5
    assert len(in_holes) > 10 and sum(moved) > 10  # in tables, and on shelves
