# /// script
# requires-python = ">=3.11"
# dependencies = ["lit_grpo", "galore-torch==1.0", "torch>=2.11"]
# [tool.uv.sources]
# lit_grpo = { path = "..", editable = true }
# ///
"""GaLore (arXiv 2403.03507) by its authors' package ``galore-torch``. ``python examples/galore.py``.

In a run by its class path: ``--model.optimizer examples.galore.GaLore --model.optimizer.rank 128``. ``DCT`` in place of
``GaLore`` projects on columns of the discrete cosine transform, which needs no singular value decomposition.
"""

import functools
import math
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
        betas: tuple[float, float] = (0.9, 0.999),
        scale: float = 0.25,
    ) -> None:
        weights = list(params)
        low_rank = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale, "proj_type": "std"}
        is_low_rank = [weight.ndim == 2 and min(weight.shape) > rank for weight in weights]
        of_low_rank = [weight for weight, low in zip(weights, is_low_rank, strict=True) if low]
        others = [weight for weight, low in zip(weights, is_low_rank, strict=True) if not low]
        groups: list[Any] = [{"params": of_low_rank, **low_rank}, {"params": others}]
        given = [group for group in groups if group["params"]]
        super().__init__(given, lr=lr, betas=betas, weight_decay=weight_decay, no_deprecation_warning=True)

    def projector(self, weight: torch.nn.Parameter, group: dict[str, Any]) -> GaLoreProjector:
        """Return the projector of a matrix without its projection."""
        return GaLoreProjector(group["rank"], False, group["update_proj_gap"], group["scale"], group["proj_type"])

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
            for weight in (weight for weight in group["params"] if "projector" in self.state[weight]):
                matrix = self.state[weight]["projector"]
                self.state[weight]["projector"] = self.projector(weight, group)
                self.state[weight]["projector"].ortho_matrix = matrix


class DCT(GaLore):
    """DCT-AdamW (arXiv 2505.17967): GaLore whose projections are columns of the orthogonal DCT matrix.

    At each renewal the ``rank`` columns are chosen on which the gradient has the largest sum of magnitudes, and the
    moments of columns that stay are kept. The state has the numbers of the columns, not a matrix. Without the paper's
    error feedback.
    """

    def __init__(
        self, params: Iterable[torch.nn.Parameter], update_proj_gap: int = 1, scale: float = 1.0, **settings: Any
    ) -> None:
        super().__init__(params, update_proj_gap=update_proj_gap, scale=scale, **settings)
        for group in self.param_groups:
            for weight in group["params"] if "rank" in group else ():
                self.state[weight]["projector"] = self.projector(weight, group)

    def projector(self, weight: torch.nn.Parameter, group: dict[str, Any]) -> GaLoreProjector:
        """Return a projector that carries the moments of a matrix over to other columns."""
        return DCTProjector(self.state[weight], group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned; torch has given numbers of columns the dtype of the weights."""
        super().load_state_dict(state_dict)
        for own in self.state.values():
            if "projector" in own and own["projector"].ortho_matrix is not None:
                own["projector"].ortho_matrix = own["projector"].ortho_matrix.long()


class DCTProjector(GaLoreProjector):
    """Projects on columns of the DCT matrix; ``ortho_matrix`` has their numbers."""

    def __init__(self, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().__init__(group["rank"], False, group["update_proj_gap"], group["scale"])
        self.state = state

    def project(self, full_rank_grad: torch.Tensor, iter: int) -> torch.Tensor:
        """Return the gradient's coefficients of the chosen columns; choose others at every renewal."""
        gradient = full_rank_grad
        self.side = int(gradient.shape[0] >= gradient.shape[1])  # of the two, on which the columns are
        self.basis = dct(min(gradient.shape), gradient.dtype, gradient.device)
        coefficients = gradient @ self.basis if self.side else self.basis.T @ gradient
        before: Any = self.ortho_matrix
        if iter % self.update_proj_gap == 0:
            columns = coefficients.abs().sum(1 - self.side).topk(self.rank).indices.sort().values
            for name in {"exp_avg", "exp_avg_sq"} & self.state.keys():
                of_all = torch.zeros_like(coefficients).index_copy_(self.side, before, self.state[name])
                self.state[name] = of_all.index_select(self.side, columns)
            self.ortho_matrix: Any = columns
            before = columns
        return coefficients.index_select(self.side, before)

    def project_back(self, low_rank_grad: torch.Tensor) -> torch.Tensor:
        """Return the matrix that has these coefficients, times the scale."""
        columns, coefficients = self.basis[:, self.ortho_matrix], low_rank_grad
        return self.scale * (coefficients @ columns.T if self.side else columns @ coefficients)


@functools.cache
def dct(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the orthogonal matrix of the DCT-III, whose rows are cosines of 0, 1, 2 ... half-periods."""
    number = torch.arange(size, dtype=torch.float64)
    matrix = math.sqrt(2 / size) * torch.cos(math.pi * number[:, None] * (2 * number + 1) / (2 * size))
    matrix[0] /= math.sqrt(2)
    return matrix.to(device, dtype)


if __name__ == "__main__":
    run = lit_grpo.train("tiny", ArithmeticRows(8), ["exact_match"], max_steps=2, batch_size=4, optimizer=GaLore)
    print("Metrics of two updates by GaLore are in", run.folder / "metrics.csv")
