"""A GPU that is not there: tensors say ``cuda:0``, their numbers stay on the host, and what a GPU would do is counted.

Within :func:`pretend_cuda` every tensor has a *place*: the host, pinned memory of the host, or the GPU. A dispatch mode
sees each operation and does three things. It refuses tensors of different places in one operation, as CUDA does. It
notes what a GPU would be asked for: kernels, copies from the host, and everything that the host would wait for. And it
notes the place of each result. The arithmetic is the CPU's, so results can be compared with those of a run on the CPU.

A copy to pinned memory that nobody waits for has arrived once the host has waited for an event recorded after it:
until then the memory holds garbage.

A CUDA graph is a list of operations: what is recorded can be replayed without the code that made it, on the tensors
that it had then. Waits and copies from the host are refused during a recording, as CUDA refuses them.

Four things are the CPU's. Autocast casts by the CPU's list of operations. Torch's kernels for attention are plain
operations (``flash_kernels.py``), and count as one launch forward and one backward. FlexAttention is not compiled: its
mask is made as on a GPU, and attention is computed from that mask with all scores at once. And there is no memory to
run out of: what the allocator says is given.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lit_grpo.rollout.slots import binding
from tests.doubles import flash_kernels
from tests.doubles.layer_kernels import PlainKernels
from tests.doubles.row_attention import attend_by_tables

aten = torch.ops.aten
GPU = torch.device("cuda", 0)
Place = Literal["host", "pinned", "gpu"]
Kind = Literal["wait", "pinned copy", "unpinned copy"]
"""What is noted beside kernels: the host waits; a copy from pinned memory that nothing waits for; any other copy."""
_NOTE = "pretended_place"  # of a storage

_READS = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default),
    *(aten._unique2.default, aten.unique_consecutive.default, aten.is_nonzero.default, aten.bincount.default),
    aten.repeat_interleave.Tensor,
}
"""Operations whose result, or its shape, is read from the device."""
_NO_KERNEL = {
    *(aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.new_empty_strided.default),
    *(aten.empty_like.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.lift_fresh.default),
    *(aten.set_.source_Tensor, aten.resize_.default),
}
_ATTENTION = {
    aten._flash_attention_forward.default: "forward",
    aten._flash_attention_backward.default: "backward",
    aten._efficient_attention_forward.default: "efficient_forward",
    aten._efficient_attention_backward.default: "efficient_backward",
}
"""Operations whose kernels are plain operations of ``flash_kernels.py``."""
_INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


@dataclass
class Ledger:
    """Operations of the pretended GPU since :meth:`reset`.

    ``launches`` counts kernels, and a replay of a graph as one. ``noted`` counts each kind of thing by the operation
    and the line of this project that it came from. ``tape`` is there while a graph is recorded, and nothing is noted
    while ``compiled`` code runs, which on a GPU would be one kernel.
    """

    launches: int = 0
    replays: int = 0
    noted: Counter[tuple[Kind, str, str]] = field(default_factory=Counter)
    tape: list[Callable[[], None]] | None = None
    compiled: bool = False
    sent: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Copies to pinned memory that are on their way: where to, and what."""
    order: list[str] = field(default_factory=list)
    """Replays of graphs and waits, as they came."""

    def reset(self) -> None:
        self.launches = self.replays = 0
        self.noted.clear()
        self.order.clear()

    def count(self, kind: Kind) -> int:
        """Return how often something of a kind was noted."""
        return sum(count for (noted, _, _), count in self.noted.items() if noted == kind)

    def lines(self, kind: Kind) -> list[str]:
        """Say where it was noted."""
        return [f"{count} x {name} at {line}" for (noted, name, line), count in self.noted.items() if noted == kind]

    def note(self, kind: Kind, name: str) -> None:
        """Note something.

        Raises:
            RuntimeError: A graph is being recorded.
        """
        if self.compiled:
            return
        line = _line()
        if self.tape is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {name} at {line}")
        self.noted[kind, name, line] += 1
        if kind == "wait":
            self.order.append(f"wait at {line}")


def _line() -> str:
    """Return the innermost line of this project."""
    for frame in reversed(traceback.extract_stack()):
        _, found, path = frame.filename.rpartition("/lit_grpo/")
        if found and "/site-packages/" not in path:
            return f"{path}:{frame.lineno}"
    return "elsewhere"


def place_of(tensor: torch.Tensor) -> Place:
    """Return where the storage of a tensor is."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    try:
        return getattr(tensor.untyped_storage(), _NOTE, "host")
    except (NotImplementedError, RuntimeError):  # it has none
        return "host"


def _put(tensors: Any, place: Place) -> None:
    for tensor in tree_leaves(tensors):
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
            setattr(tensor.untyped_storage(), _NOTE, place)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    _put(copy, "pinned")
    return copy


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write


class _Mode(TorchDispatchMode):
    """Sees every operation.

    ``goes`` is set while a tensor is copied to another place, to ``host`` or ``gpu``, and ``in_backward`` where
    autograd makes tensors for operations of the GPU.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger, self.in_backward = ledger, False
        self.goes: Place | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func._can_decompose():
            with self:
                done = func.decompose(*args, **kwargs)
            if done is not NotImplemented:
                return done
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        there = [each for each in tensors if place_of(each) == "gpu"]
        device, pins = kwargs.get("device"), kwargs.get("pin_memory")
        asks = device is not None and torch.device(device).type == "cuda"
        if asks:
            kwargs["device"] = torch.device("cpu")
        if pins:
            kwargs["pin_memory"] = False
        arrives = func is aten._to_copy.default and self.goes == "gpu"
        if not (there or asks or arrives or (self.in_backward and not tensors)):
            result = func(*args, **kwargs)
            if pins:
                _put(result, "pinned")
            return result
        on_host = self._note(func, args, kwargs, there, [each for each in tensors if place_of(each) != "gpu"])
        result = _computed(func, args, kwargs)
        if self.ledger.sent and args and args[0] is self.ledger.sent[-1][0]:
            args[0].view(torch.uint8).fill_(0xA5)
        if on_host:
            return result
        if self.ledger.tape is not None:
            self.ledger.tape.append(_again(func, args, kwargs, result))
        _put(result, "gpu")
        return result

    def _note(
        self, func: Any, args: Any, kwargs: Any, there: Sequence[torch.Tensor], here: Sequence[torch.Tensor]
    ) -> bool:
        """Note an operation of the GPU; return whether its result is on the host."""
        name, ledger = str(func).removeprefix("aten."), self.ledger
        if func is aten._to_copy.default and self.goes == "host":
            ledger.note("wait", "copy to the host")
            return True
        if func is aten.copy_.default and place_of(args[0]) != "gpu":
            if not (_is_asynchronous(args, kwargs) and place_of(args[0]) == "pinned"):
                ledger.note("wait", "copy to the host")
            else:
                ledger.sent.append((args[0], args[1].clone()))
            return True
        if func in (aten._to_copy.default, aten.copy_.default) and here:
            asynchronous = _is_asynchronous(args, kwargs)
            pinned = asynchronous and place_of(here[-1]) == "pinned"
            ledger.note("pinned copy" if pinned else "unpinned copy", name)
            if not asynchronous:
                ledger.note("wait", "copy from the host")
        elif func in _INDEXED:
            for index in args[1]:
                if index is not None and (index.dtype in (torch.bool, torch.uint8) or place_of(index) != "gpu"):
                    ledger.note("wait", f"{name} by {index.dtype} of the {place_of(index)}")
        elif there and any(each.dim() for each in here):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"({name} at {_line()})"
            )
        if func in _READS and kwargs.get("output_size") is None:
            ledger.note("wait", name)
        ledger.launches += not (_is_view(func) or func in _NO_KERNEL or ledger.compiled)
        return False


def _is_asynchronous(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute on the CPU, which lacks products whose result is in another dtype, and histograms of integers."""
    if func is aten.bmm.dtype:
        left, right, dtype = args
        if left.dtype != right.dtype or left.dtype not in (torch.bfloat16, torch.float16) or dtype != torch.float32:
            raise RuntimeError(f"bmm of {left.dtype} and {right.dtype} has no result in {dtype} on a GPU")
        return torch.bmm(left.float(), right.float())
    if func is aten.histc.default:
        return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    attends = _ATTENTION.get(func)
    return func(*args, **kwargs) if attends is None else getattr(flash_kernels, attends)(*args, **kwargs)


def _again(func: Any, args: Any, kwargs: Any, result: Any) -> Callable[[], None]:
    """Return a function that computes once more, into the tensors that came out now."""

    def compute() -> None:
        for before, now in zip(tree_leaves(result), tree_leaves(_computed(func, args, kwargs)), strict=True):
            if isinstance(before, torch.Tensor) and before.data_ptr() != now.data_ptr():
                before.copy_(now)

    return compute


# ---- what tensors say -----------------------------------------------------------------------------------


def _tensor_methods(mode: _Mode) -> dict[str, Any]:
    """Methods of tensors whose own answer would be the CPU's."""
    own = {name: getattr(torch.Tensor, name) for name in ("device", "to", "numpy", "tolist", "__array__", "type_as")}

    def is_there(tensor: torch.Tensor) -> bool:
        return place_of(tensor) == "gpu"

    def device(tensor: torch.Tensor) -> torch.device:
        return GPU if is_there(tensor) else own["device"].__get__(tensor)

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        copy = kwargs.pop("copy", False)
        wanted, dtype, asynchronous, layout = torch._C._nn._parse_to(*args, **kwargs)
        more = {} if layout is None else {"memory_format": layout}
        kind = "cuda" if is_there(tensor) else "cpu"
        if tensor.is_meta or wanted is None or wanted.type == kind or wanted.type not in ("cpu", "cuda"):
            return (
                own["to"](tensor, *args, **kwargs, copy=copy)
                if kind == "cpu"
                else own["to"](tensor, dtype or tensor.dtype, copy=copy, **more)
            )
        mode.goes = "gpu" if wanted.type == "cuda" else "host"
        try:
            return own["to"](tensor, dtype or tensor.dtype, non_blocking=asynchronous, copy=True, **more)
        finally:
            mode.goes = None

    def only_of_the_host(name: str) -> Callable[..., Any]:
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_there(tensor):
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
            return own[name](tensor, *args, **kwargs)

        return method

    return {
        "device": property(device),
        "is_cuda": property(is_there),
        "is_cpu": property(lambda tensor: not is_there(tensor)),
        "to": to,
        "cpu": lambda tensor: tensor.to("cpu"),
        "cuda": lambda tensor, *_, **__: tensor.to(GPU),
        "tolist": lambda tensor: own["tolist"](tensor.to("cpu") if is_there(tensor) else tensor),
        "type_as": lambda tensor, other: tensor.to(other),
        "pin_memory": _pinned,
        "is_pinned": lambda tensor: place_of(tensor) == "pinned",
        "numpy": only_of_the_host("numpy"),
        "__array__": only_of_the_host("__array__"),
    }


# ---- torch.cuda -----------------------------------------------------------------------------------------


class _Graph:
    """A CUDA graph: what was recorded, in its order, and how many kernels that launches."""

    ledger: Ledger
    launches: int = 0
    tape: Sequence[Callable[[], None]] = ()

    def replay(self) -> None:
        self.ledger.launches += 1
        self.ledger.replays += 1
        self.ledger.order.append("replay")
        with _disable_current_modes(), torch.no_grad():
            for compute in self.tape:
                compute()


class _Event:
    """An event, with which all arrives that was on its way when it was recorded."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._sent = ledger, [*ledger.sent]

    def synchronize(self) -> None:
        """Wait for it."""
        self._ledger.note("wait", "event")
        with _disable_current_modes(), torch.no_grad():
            for place, values in self._sent:
                place.copy_(values)
        self._ledger.sent = [copy for copy in self._ledger.sent if not any(copy is own for own in self._sent)]


class _Stream:
    """A stream, of which there is one alone."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def record_event(self) -> _Event:
        """Record an event."""
        return _Event(self._ledger)

    def wait_stream(self, other: _Stream) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


def _cuda_functions(ledger: Ledger, free: int, total: int) -> dict[str, Any]:
    @contextmanager
    def graph(recorded: _Graph, pool: object = None, **_: object) -> Iterator[None]:
        ledger.tape, before = [], ledger.launches
        try:
            yield
        finally:
            recorded.launches = ledger.launches - before
            recorded.ledger, recorded.tape, ledger.tape = ledger, ledger.tape, None

    def synchronize(*_: object) -> None:
        ledger.note("wait", "synchronize")

    stream = _Stream(ledger)
    numbers = {"mem_get_info": (free, total), "device_count": 1, "current_device": 0, "get_device_name": "pretended"}
    numbers |= dict.fromkeys(("memory_reserved", "memory_allocated", "max_memory_allocated"), 0)
    numbers |= {"is_available": True, "is_bf16_supported": True, "is_initialized": True}
    numbers |= {"get_device_capability": (9, 0), "memory_stats": {}, "graph_pool_handle": (0, 0)}
    nothing = ("_lazy_init", "reset_peak_memory_stats", "empty_cache", "set_device", "manual_seed_all", "set_rng_state")
    functions = {name: lambda *_, value=value, **__: value for name, value in numbers.items()}
    functions |= {name: lambda *_, **__: None for name in nothing}
    return functions | {
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "synchronize": synchronize,
        "CUDAGraph": _Graph,
        "graph": graph,
        "Stream": lambda *_, **__: stream,
        "current_stream": lambda *_: stream,
        "stream": lambda _: nullcontext(),
    }


def _as_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a kind of device that takes ``cuda`` for ``cpu``."""
    return lambda kind, *args: function("cpu" if kind == "cuda" else kind, *args)


def _by_way_of_the_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that makes a tensor of numbers on the host, and copies it to where it is to be."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        wanted = torch.empty(0).device if device is None else device  # `with torch.device(...)` sets a default
        with torch._C.DisableTorchFunction():
            tensor = make(*args, **kwargs)
        return tensor.to(wanted) if torch.device(wanted).type == "cuda" or device is not None else tensor

    return made


def _autocast_init(own: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        own(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return init


def _dense_attention(
    query: Any, key: Any, value: Any, mask: Any, scaling: float, cap: float | None = None, sinks_H: Any = None
) -> torch.Tensor:
    """Attend under a FlexAttention mask with all scores at once, which are not capped, and have no sinks."""
    assert cap is None and sinks_H is None
    query_T1 = torch.arange(query.shape[2], device=query.device)[:, None]
    key_1T = torch.arange(key.shape[2], device=query.device)[None]
    sees = mask.mask_mod(0, 0, query_T1, key_1T)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=sees, scale=scaling, enable_gqa=True
    )


def _has_flash(asked: Any) -> bool:
    """Return whether torch's flash kernels take queries and keys."""
    return asked.query.dtype in (torch.float16, torch.bfloat16) and asked.query.shape[-1] <= 256


def _has_efficient(asked: Any) -> bool:
    """Return whether torch's memory-efficient kernels take queries and keys."""
    multiples = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}
    same = asked.query.shape == asked.key.shape and not asked.enable_gqa
    return same and asked.query.dtype in multiples and asked.query.shape[-1] % multiples[asked.query.dtype] == 0


def _uncompiled(ledger: Ledger, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, of block masks for example, that does without the compiler, and counts one kernel."""

    def computed(*args: Any, **options: Any) -> Any:
        ledger.launches += 1
        ledger.compiled = True
        try:
            return compute(*args, **options)
        finally:
            ledger.compiled = False

    return computed


def _grouped(group: Callable[..., dict[Any, Any]]) -> Callable[..., dict[Any, Any]]:
    """Return the function that groups tensors for optimizers, with the devices that they say."""

    def grouped(tensors: Any, *args: Any) -> dict[Any, Any]:
        device = tensors[0][0].device
        return {(device, dtype): value for (_, dtype), value in group(tensors, *args).items()}

    return grouped


def _engine(mode: _Mode, own: Callable[..., Any]) -> Callable[..., Any]:
    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        before, mode.in_backward = mode.in_backward, place_of(outputs[0]) == "gpu"
        try:
            return own(outputs, *args, **kwargs)
        finally:
            mode.in_backward = before

    return run


def _row_attention(ledger: Ledger) -> Callable[..., Any]:
    """Return what finds the kernels of a decode step: two, which are computed on the host from the same tables."""

    def attend(*args: Any) -> None:
        def run() -> None:
            with _disable_current_modes(), torch.no_grad():
                attend_by_tables(*args)

        run()
        ledger.launches += 2
        if ledger.tape is not None:
            ledger.tape.append(run)

    return lambda shape: attend if binding._no_kernels(shape) is None else None


def _layer_kernels(ledger: Ledger) -> Callable[..., Any]:
    """Return what finds the kernels between the products of a layer: each is one launch, computed on the host."""

    def launched(compute: Callable[..., Any], *args: Any) -> Any:
        def run(*_: Any, **__: Any) -> Any:
            with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
                return compute(*args)

        result = run()
        _put(result, "gpu")
        ledger.launches += 1
        if ledger.tape is not None:
            ledger.tape.append(_again(run, (), {}, result))
        return result

    return lambda shape: PlainKernels(launched) if binding._no_kernels(shape) is None else None


@contextmanager
def pretend_cuda(free_gib: float = 70, total_gib: float = 80) -> Iterator[Ledger]:
    """Have a GPU, for the code within; yields what it is asked for.

    Args:
        free_gib: Memory that the driver says is free.
        total_gib: Memory that it says there is.
    """
    import lit_grpo.rollout.slots.forward as forward
    import lit_grpo.rollout.slots.generator as generator
    import lit_grpo.update.prefix.flash as flash
    import lit_grpo.update.prefix.flex as flex
    import lit_grpo.update.prefix.sharing as sharing

    ledger = Ledger()
    mode = _Mode(ledger)
    flash._chosen.cache_clear()  # no trial has been on this GPU
    patched: dict[Any, dict[str, Any]] = {
        torch.Tensor: _tensor_methods(mode),
        torch.cuda: _cuda_functions(ledger, int(free_gib * 2**30), int(total_gib * 2**30)),
        torch.autocast: {"__init__": _autocast_init(torch.autocast.__init__)},
        torch: {
            **{name: _as_cpu(getattr(torch, name)) for name in ("is_autocast_enabled", "get_autocast_dtype")},
            **{name: _by_way_of_the_host(getattr(torch, name)) for name in ("tensor", "as_tensor", "asarray")},
        },
        torch.autograd: {"_engine_run_backward": _engine(mode, torch.autograd._engine_run_backward)},
        torch._C: {"_group_tensors_by_device_and_dtype": _grouped(torch._C._group_tensors_by_device_and_dtype)},
        binding: {
            "find_spec": lambda name: name,  # Triton's kernels have stand-ins
            **{"row_attention": _row_attention(ledger), "layer_kernels": _layer_kernels(ledger)},
        },
        generator: {"row_attention": _row_attention(ledger)},
        forward: {"rms_norm": _uncompiled(ledger, forward.rms_norm)},  # of which torch's CUDA build has a kernel
        flex: {"_compiled_mask": lambda: _uncompiled(ledger, flex.create_block_mask)},
        sharing: {"flex_prefix_attention": _dense_attention},
        flash: {"ThreadPoolExecutor": partial(ThreadPoolExecutor, initializer=mode.__enter__)},
        torch.backends.cuda: {"can_use_flash_attention": _has_flash, "can_use_efficient_attention": _has_efficient},
    }
    with ExitStack() as stack:
        # transformers would load weights in threads of its own, in which the mode is not
        stack.enter_context(mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))
        for owner, members in patched.items():
            for name, member in members.items():
                stack.enter_context(mock.patch.object(owner, name, member))
        stack.enter_context(mode)
        yield ledger
