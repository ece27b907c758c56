"""Gradient checkpointing: which activations are kept, and which are computed again in the backward pass."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch._higher_order_ops import inductor_compiled_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Checkpointing = bool | Literal["selective"]

_aten = torch.ops.aten
KEPT = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._flash_attention_forward.default,
    _aten._efficient_attention_forward.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
    inductor_compiled_code,  # FlexAttention again, compiled as in ``prefix.flex``
]
"""What is dear to compute and small to keep: matrix products and attention."""


def checkpoint_layers(model: PreTrainedModel, checkpointing: Checkpointing) -> None:
    """Have the layers of a model compute activations again in the backward pass.

    ``True`` keeps what each layer begins from, and runs whole layers twice: a third more work. ``selective`` keeps the
    results of matrix products and of attention too, and computes again what is cheap (V. Korthikanti et al., arXiv
    2205.05198, section 5, with the choice the other way round; torch's selective checkpointing).
    """
    if not checkpointing:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT)
    model.gradient_checkpointing_enable(options)


class KeptBytes(TorchDispatchMode):
    """Counts the bytes that selective checkpointing keeps of what runs inside."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Stand aside while torch compiles, and see what it has compiled."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        result = func(*args, **(kwargs or {}))
        if func in KEPT:
            results = result if isinstance(result, tuple) else (result,)
            self.num_bytes += sum(tensor.nbytes for tensor in results if isinstance(tensor, torch.Tensor))
        return result
