"""A GPU for which Inductor and Triton compile, and on which nothing runs, in a process of its own.

:func:`begin` has to come before ``import torch``. After it, fake tensors may be on ``cuda``, ``torch.compile`` makes
Triton kernels for the capability that was asked for, and Triton's own ``ptxas`` makes binaries of them. Where the
environment says ``TRITON_INTERPRET=1``, Triton's interpreter runs each kernel instead, on numbers that a :class:`Twins`
holds on the CPU for the fake tensors.

It stands on what torch and Triton keep to themselves, and so on their versions.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

SOURCE = Path(__file__).with_name("no_op_cuda.cpp")
SHARED_MEMORY = {(8, 0): 166_912, (8, 9): 101_376, (9, 0): 232_448}
"""The most bytes of shared memory that a block of threads may have, by capability (CUDA's programming guide)."""
THREADS = {(8, 0): 2048, (8, 9): 1536, (9, 0): 2048}
"""The most threads of a multiprocessor, likewise."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that was compiled.

    Args:
        name: Inductor's.
        shared_bytes: The shared memory that a block of its threads takes.
        warps: In a block.
        stages: Of its pipeline; 1 for none.
        binary_bytes: Of the code for the GPU.
    """

    name: str
    shared_bytes: int
    warps: int
    stages: int
    binary_bytes: int


class Twins:
    """Numbers on the CPU for fake tensors, by their storages; the interpreter runs on them."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}
        self._kept: list[Any] = []

    def fake(self, real: Any) -> Any:
        """Return a fake tensor on the GPU for a contiguous tensor."""
        with _real():
            numbers = real.detach().clone()
        return self._pair(numbers, real.requires_grad)

    def empty(self, size: Any, stride: Any, dtype: Any) -> Any:
        """Return a fake tensor on the GPU with numbers that a kernel has to write: NaN, or the least integers."""
        import torch

        with _real():
            numbers = torch.empty_strided(size, stride, dtype=dtype)
            numbers.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min)
        return self._pair(numbers, False)

    def real(self, fake: Any) -> Any:
        """Return the numbers of a fake tensor."""
        numbers = self._storages[fake.untyped_storage()._cdata]
        with _real():
            return numbers.as_strided(fake.size(), fake.stride(), fake.storage_offset())

    def _pair(self, real: Any, requires_grad: bool) -> Any:
        import torch

        fake = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device="cuda")
        self._storages[fake.untyped_storage()._cdata] = real
        self._kept.append(fake.detach())  # no other tensor is given this storage's address
        return fake.requires_grad_(requires_grad)


def _real() -> Any:
    """Within a mode of fake tensors, go without it."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def begin(capability: tuple[int, int]) -> tuple[Twins, list[Kernel]]:
    """Make torch believe in a GPU of a capability; return the numbers of its tensors, and a list for its kernels.

    Raises:
        RuntimeError: There is no g++, or torch has been imported.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch has been imported, and knows what devices there are.")
    _load_device()
    import torch

    properties = _properties(capability)
    twins, kernels = Twins(), list[Kernel]()
    for name, value in _torch_patches(properties, capability).items():
        mock.patch(name, value, create=True).start()
    _patch_triton(properties, capability)
    _patch_inductor(twins, kernels, properties.shared_memory_per_block_optin)
    torch._dynamo.reset()
    return twins, kernels


def _load_device() -> None:
    """Build the device that does nothing, and load it before torch asks what devices there are."""
    found = find_spec("torch")
    compiler = shutil.which("g++")
    if found is None or found.origin is None or compiler is None:
        raise RuntimeError("torch and g++ are needed.")
    torch_folder = Path(found.origin).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "no_op_cuda.so"
        include, libraries = torch_folder / "include", torch_folder / "lib"
        command = [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{include}", str(SOURCE)]
        command += [f"-I{include}/torch/csrc/api/include", f"-L{libraries}", "-lc10", "-ltorch_cpu", "-o", str(library)]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(libraries / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))


def _properties(capability: tuple[int, int]) -> Any:
    class Properties:
        name, gcnArchName = "no-op", ""
        major, minor = capability
        multi_processor_count, warp_size, total_memory, L2_cache_size = 108, 32, 80 << 30, 40 << 20
        regs_per_multiprocessor, max_threads_per_block = 65_536, 1024
        max_threads_per_multi_processor = THREADS[capability]
        shared_memory_per_block, shared_memory_per_block_optin = 48 << 10, SHARED_MEMORY[capability]
        shared_memory_per_multiprocessor = SHARED_MEMORY[capability] + 1024

    return Properties


def _torch_patches(properties: Any, capability: tuple[int, int]) -> dict[str, Any]:
    import torch

    return {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.is_initialized": lambda: True,
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.set_device": lambda device: None,
        "torch.cuda._exchange_device": lambda device: 0,
        "torch.cuda._maybe_exchange_device": lambda device: 0,
        "torch.cuda._get_device_properties": lambda device: properties,
        "torch.cuda.get_device_capability": lambda device=None: capability,
        "torch.cuda.get_rng_state": lambda device=0: torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": lambda state, device=0: None,
        "torch._C._cuda_getDevice": lambda: 0,
        "torch._C._cuda_getCurrentRawStream": lambda device: 0,
    }


def _patch_triton(properties: Any, capability: tuple[int, int]) -> None:
    """Have Triton's driver say what it compiles for."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Utilities:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {
                "max_shared_mem": properties.shared_memory_per_block_optin,
                "multiprocessor_count": properties.multi_processor_count,
                "warpSize": properties.warp_size,
            }

    class Driver:
        utils = Utilities()

        @staticmethod
        def get_current_target() -> GPUTarget:
            return GPUTarget("cuda", 10 * capability[0] + capability[1], properties.warp_size)

        @staticmethod
        def get_current_device() -> int:
            return 0

        @staticmethod
        def get_current_stream(device: int) -> int:
            return 0

        @staticmethod
        def get_active_torch_device() -> torch.device:
            return torch.device("cuda", 0)

    driver.set_active(Driver())  # type: ignore[arg-type]


def _patch_inductor(twins: Twins, kernels: list[Kernel], most_shared: int) -> None:
    """Compile in this process, note each kernel, and launch none; or run them all in the interpreter."""
    import torch
    import torch._dynamo.device_interface as interfaces
    import torch._higher_order_ops.wrap as regions
    import torch._inductor.fx_passes.joint_graph as joint_graph
    from torch._inductor import config
    from torch._inductor.runtime import triton_heuristics as heuristics
    from triton.runtime.errors import OutOfResources

    def make_launcher(result: Any) -> Any:
        made, name = result.kernel, result.inductor_meta["kernel_name"]
        kernel = Kernel(
            name, made.metadata.shared, result.config.num_warps, result.config.num_stages, len(made.asm["cubin"])
        )
        if kernel.shared_bytes > most_shared:  # as the driver says when it loads such a binary
            raise OutOfResources(kernel.shared_bytes, most_shared, "shared memory")
        kernels.append(kernel)

        def launch(*_: Any, **__: Any) -> None: ...

        kept = {"cache_hash": "", "store_cubin": False, "n_regs": 0, "n_spills": 0, "shared": kernel.shared_bytes}
        vars(launch).update(config=result.config, **kept)
        return launch

    def first_of_all(kernel: Any, *_: Any, **__: Any) -> dict[Any, float]:
        return {launch: float(place) for place, launch in enumerate(kernel.launchers)}

    def of_region(region: Any) -> Any:
        return lambda *inputs: region.compiled_callable([*inputs])

    run = heuristics.CachingAutotuner.run

    def interpreted(kernel: Any, *given: Any, stream: Any, **options: Any) -> Any:
        real = [twins.real(each) if isinstance(each, torch.Tensor) else each for each in given]
        with _real():
            return run(kernel, *real, stream=stream, **options)

    config.compile_threads = 1
    config.fx_graph_cache = config.use_static_triton_launcher = config.triton.autotune_at_compile_time = False
    config.joint_graph_constant_folding = False  # it computes on the GPU, as do the patterns of lazy_init
    guards = vars(torch._C)["_dynamo"].guards
    patches: list[tuple[Any, str, Any]] = [
        (joint_graph, "lazy_init", lambda *_: None),
        (heuristics.triton_helpers, "set_driver_to_gpu", lambda: None),
        (heuristics.TritonCompileResult, "make_launcher", make_launcher),
        (heuristics.CachingAutotuner, "benchmark_all_configs", first_of_all),
        (guards, "_empty_strided_cuda", twins.empty),
        (guards, "_reinterpret_tensor", torch.as_strided),
        # Fake tensors would go through the graph that was compiled, not through what was made of it.
        (regions.InductorCompiledCallable, "original_gm", property(of_region, lambda region, graph: None)),
        *((interfaces.DeviceGuard, name, lambda *_: None) for name in ("__init__", "__enter__", "__exit__")),
    ]
    if os.environ.get("TRITON_INTERPRET") == "1":
        patches.append((heuristics.CachingAutotuner, "run", interpreted))
    for owner, name, value in patches:
        setattr(owner, name, value)
