"""Launches of a decode step of Qwen3-1.7B's configuration on a GPU that is not there, by compiled binaries.

Run by ``device_counts`` and by tests, in a process of its own: tensors are fake, so there are no weights and nothing is
computed. Triton makes a binary of each kernel of its own with ``ptxas`` (``tests/doubles/compile_only.py``); operations
of torch that are neither views nor allocations count as one launch each, and so does ``rms_norm``, of which torch's
CUDA build has a kernel.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from benchmarks.processes import read_case, tell
from tests.doubles.compile_only import begin


@dataclass(frozen=True)
class LaunchCase:
    """The step that is counted.

    Args:
        capability: Of the GPU: major and minor.
        mixed: Weights in float32 under autocast; or else weights in bfloat16, which are read in place.
        by_kernels: With the kernels between products; or else by operations of torch.
        num_rows: Rows of the step.
        is_drafted: Whether some of them are drafted tokens.
    """

    capability: tuple[int, int]
    mixed: bool
    by_kernels: bool
    num_rows: int = 8
    is_drafted: bool = False


def main() -> None:
    """Count a step of the configuration, and of one with a layer less."""
    told: dict[str, Any] = read_case()
    told["capability"] = tuple(told["capability"])
    case = LaunchCase(**told)
    begin(case.capability)
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from benchmarks.random_policies import QWEN3_1_7B, random_qwen3

    binaries: dict[str, dict[str, int]] = {}
    counts = list[Counter[str]]()
    for layers in (QWEN3_1_7B.layers, QWEN3_1_7B.layers - 1):
        with FakeTensorMode(), torch.no_grad():
            dtype = torch.float32 if case.mixed else torch.bfloat16
            policy: Any = random_qwen3(replace(QWEN3_1_7B, layers=layers), dtype=dtype)
            for module in policy.modules():  # fake parameters cannot be moved by ``to``
                for held in (module._parameters, module._buffers):
                    held.update({name: each.to("cuda") for name, each in held.items() if each is not None})
            counts.append(_launches(policy, case, binaries))
    layer = counts[0] - counts[1]
    tell(
        {
            "a layer": layer.total(),
            "besides": counts[0].total() - QWEN3_1_7B.layers * layer.total(),
            "launches of a layer": dict(layer),
            "binaries": binaries,
        }
    )


def _launches(policy: Any, case: LaunchCase, binaries: dict[str, dict[str, int]]) -> Counter[str]:
    """Return the launches of a step by name; add the binaries of kernels."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from triton.runtime.jit import JITFunction, MockTensor

    from lit_grpo.policy.architecture.attention import AttentionCall, Sight
    from lit_grpo.rollout.slots import forward
    from lit_grpo.rollout.slots.attention import KVLayer, KVShape
    from lit_grpo.rollout.slots.copies import LoweredWeights
    from lit_grpo.rollout.slots.forward import FusedDecoder
    from lit_grpo.rollout.slots.kernels import LayerKernels
    from lit_grpo.rollout.slots.kv.kernel import attend_rows
    from lit_grpo.rollout.slots.kv.tables import RowTables
    from tests.doubles.pretend_cuda import _NO_KERNEL, _is_view

    found = Counter[str]()
    run = JITFunction.run

    def compiled(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        real = [MockTensor(each.dtype) if isinstance(each, torch.Tensor) else each for each in arguments]
        made: Any = run(kernel, *real, grid=grid, warmup=True, **options)
        name = kernel.fn.__name__
        found[name] += 1
        kinds = "-".join(str(each.dtype).removeprefix("torch.") for each in arguments if isinstance(each, torch.Tensor))
        figures = {"shared_bytes": made.metadata.shared, "binary_bytes": len(made.asm["cubin"])}
        binaries[f"{name} {kinds} {sorted(options.items())}"] = figures
        return made

    def one_kernel(*arguments: Any) -> torch.Tensor:
        before = found.copy()
        normed = torch.nn.functional.rms_norm(*arguments)
        found.clear()
        found.update(before + Counter({"rms_norm": 1}))
        return normed

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not (_is_view(func) or func in _NO_KERNEL or func is torch.ops.prim.device.default):
                found[str(func)] += 1
            return func(*args, **kwargs or {})

    config = policy.config
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    lowered = torch.bfloat16
    call = AttentionCall(heads, kv_heads, size, size, lowered, size**-0.5, Sight(), None, False)
    shape = KVShape((KVLayer(kv_heads, size, size),) * config.num_hidden_layers, lowered, policy.device)
    tables = RowTables(shape, case.num_rows, attend_rows)
    tables.is_drafted = case.is_drafted
    with mock.patch.object(torch, "allclose", lambda *_, **__: True):  # fake tensors have no numbers to compare
        kernels = LayerKernels() if case.by_kernels else None
        decoder: Any = FusedDecoder(policy, [call] * config.num_hidden_layers, kernels)
    tokens = torch.zeros(case.num_rows, dtype=torch.int64, device="cuda")
    with ExitStack() as stack:
        if case.mixed:
            stack.enter_context(torch.autocast("cuda", lowered, cache_enabled=False))
            stack.enter_context(LoweredWeights(policy, lowered).in_place())
        decoder.tabulate(1024, decoder.embed(tokens))
        stack.enter_context(mock.patch.object(JITFunction, "run", compiled))
        stack.enter_context(mock.patch.object(forward, "rms_norm", one_kernel))
        stack.enter_context(Counting())
        decoder(tokens, tokens, 1, tables)
    assert (decoder.kernels is None) == (kernels is None), "a kernel could not be compiled"
    return found


if __name__ == "__main__":
    main()
