# /// script
# requires-python = ">=3.11"
# dependencies = ["lit_grpo", "galore-torch==1.0", "torch>=2.11"]
# [tool.uv.sources]
# lit_grpo = { path = "..", editable = true }
# ///
"""GaLore (arXiv 2403.03507) by its authors' package ``galore-torch``. ``python examples/galore.py``.

In a run by its class path: ``--model.optimizer examples.galore.GaLore --model.optimizer.rank 128``.
"""

from collections.abc import Iterable
from typing import Any

import torch
from galore_torch import GaLoreAdamW
from galore_torch.galore_projector import GaLoreProjector

import lit_grpo
from lit_grpo.tasks import ArithmeticRows


class GaLore(GaLoreAdamW):
    """AdamW whose moments of matrices are kept in a space of ``rank`` dimensions, which is renewed every so many steps.

    A matrix with a side of at most ``rank`` is updated as by AdamW. Needs whole weights: no ``trainer.strategy fsdp2``.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-5,
        rank: int = 128,
        update_proj_gap: int = 200,
        weight_decay: float = 0.0,
    ) -> None:
        weights = list(params)
        low_rank = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": 0.25, "proj_type": "std"}
        is_low_rank = [weight.ndim == 2 and min(weight.shape) > rank for weight in weights]
        of_low_rank = [weight for weight, low in zip(weights, is_low_rank, strict=True) if low]
        others = [weight for weight, low in zip(weights, is_low_rank, strict=True) if not low]
        groups: list[Any] = [{"params": of_low_rank, **low_rank}, {"params": others}]
        given = [group for group in groups if group["params"]]
        super().__init__(given, lr=lr, weight_decay=weight_decay, no_deprecation_warning=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with each projector as its matrix: checkpoints hold tensors and numbers alone."""
        state = super().state_dict()
        for number, own in state["state"].items():
            if "projector" in own:
                state["state"][number] = {**own, "projector": own["projector"].ortho_matrix}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for own in (self.state[weight] for weight in group["params"] if "projector" in self.state[weight]):
                settings = (group["rank"], False, group["update_proj_gap"], group["scale"], group["proj_type"])
                matrix, own["projector"] = own["projector"], GaLoreProjector(*settings)
                own["projector"].ortho_matrix = matrix


if __name__ == "__main__":
    run = lit_grpo.train("tiny", ArithmeticRows(8), ["exact_match"], max_steps=2, batch_size=4, optimizer=GaLore)
    print("Metrics of two updates by GaLore are in", run.folder / "metrics.csv")
