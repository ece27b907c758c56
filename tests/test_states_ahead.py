"""Several tokens of a row in one step, through layers with states, beside one token after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import table_rows

from lit_grpo.policy.architecture.decoder import hidden_states
from lit_grpo.policy.architecture.states import RowStates, state_layers, state_shape
from lit_grpo.rollout.slots.drafts.draft import Draft
from lit_grpo.rollout.slots.drafts.states import StatesAhead
from tests.doubles.small_models import small_model

ROWS_N = np.array([0, 1, 2, 3, 0, 0, 1, 3, 3, 3])
AHEAD_N = np.array([0, 0, 0, 0, 1, 2, 1, 1, 2, 3])
ACCEPTED_B = np.array([2, 0, 0, 1])
FAMILIES = ("mamba2", "mamba", "falcon_mamba")  # whose layers have nothing but states


@pytest.mark.parametrize("family", table_rows(FAMILIES, ["mamba2", "mamba"]))
@torch.inference_mode()
def test_states_go_as_far_as_tokens_are_accepted(family: str) -> None:
    model: Any = small_model(family, {}).eval()
    layers, shape = state_layers(model), state_shape(model)
    assert shape is not None
    drawn = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(4, 90, (4, 11), generator=drawn)
    ahead = RowStates(shape)
    hidden_states(model, tokens_BT[:, :7], **ahead.arguments(4))
    ahead.take()
    plain = RowStates(shape, {name: tensor.clone() for name, tensor in ahead.tensors.items()})
    expected, after = [], []
    for place in range(7, 11):
        positions_B1 = torch.full((4, 1), place)
        own = plain.arguments(4)
        expected.append(hidden_states(model, tokens_BT[:, place : place + 1], position_ids=positions_B1, **own)[:, 0])
        plain.take()
        after.append({name: tensor.clone() for name, tensor in plain.tensors.items()})
    counts_B = np.array([2, 1, 0, 3])
    draft = Draft.of([[5] * count for count in counts_B], counts_B, 96)
    assert draft is not None and (draft.rows_N == ROWS_N).all() and (draft.ahead_N == AHEAD_N).all()
    step = StatesAhead(layers, ahead, draft)
    queries_N1 = tokens_BT[torch.from_numpy(ROWS_N), torch.from_numpy(7 + AHEAD_N)][:, None]
    with step.in_layers():
        positions_N1 = torch.from_numpy(7 + AHEAD_N)[:, None]
        actual_ND = hidden_states(model, queries_N1, position_ids=positions_N1, **ahead.arguments(step.num_rows))[:, 0]
    ahead.take()
    for query, (row, place) in enumerate(zip(ROWS_N, AHEAD_N, strict=True)):
        assert torch.allclose(actual_ND[query], expected[place][row], atol=1e-5)
    step.take(ACCEPTED_B)
    for name, tensor in ahead.tensors.items():
        for row, accepted in enumerate(ACCEPTED_B):
            assert torch.allclose(tensor[row], after[accepted][name][row], atol=1e-5)
            assert not torch.allclose(tensor[row], after[accepted + 1][name][row], atol=1e-3)
    assert not any("forward" in vars(layer.module) for layer, _ in layers)
