"""Parts of the peak memory of an update: weights, gradients, moments, and activations by layer.

One step of a real fit on given groups, after one that has made gradients and moments, is followed tensor by tensor
(torch's MemTracker), so that the figures are of tensors and not of an allocator. Activations are told apart by the kind
of module in whose forward pass autograd saves them, in the micro-batch that saves most; what is alive at the peak
beside all these is what selective checkpointing keeps, and intermediate results.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.processes import quiet_trainer
from benchmarks.random_policies import TO_UPDATE, save_random_policy
from benchmarks.report import ROOT, Claim, Options, Row, finish, parse_options
from benchmarks.update_work import Work
from lit_grpo.module import GRPOModule
from lit_grpo.rewards import RewardSpec
from lit_grpo.types import PromptBatch, SamplingParams

PICTURE = ROOT / "docs" / "pictures" / "update_peak.svg"
MIB = 2**20
SETTINGS: dict[str, Any] = {"none": False, "selective": "selective", "all": True}
"""Gradient checkpointing."""
STATE = ("weights", "moments", "gradients")
KINDS = {"attn": "attention", "mlp": "MLP", "norm": "norms", "embed": "embeddings", "rotary": "positions"}
WORK, POLICY, TOKENS = Work(512, 128, 16, max_tokens=512), "34M", 4096
QUICK_WORK, QUICK_POLICY, QUICK_TOKENS = Work(24, 12, 8, vocab_size=512), "smallest", 256


class Saved:
    """Counts what autograd saves, by the kind of the innermost module that runs; each storage once."""

    def __init__(self, policy: torch.nn.Module) -> None:
        self.bytes: Counter[str] = Counter()
        self._known: set[int] = {each.untyped_storage().data_ptr() for each in policy.parameters()}
        self._running = ["head and loss"]
        self._handles = []
        for name, module in policy.named_modules():
            kind = next((kind for part, kind in KINDS.items() if part in name.rpartition(".")[2]), None)
            if kind is not None:
                self._handles.append(module.register_forward_pre_hook(partial(self._enter, kind)))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, kind: str, *_: Any) -> None:
        self._running.append(kind)

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that is saved."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self.bytes[self._running[-1]] += storage.nbytes()
        return tensor

    def end(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


class Watch(pl.Callback):
    """Follows the second step, and what each of its micro-batches saves."""

    def __init__(self) -> None:
        self.peak: Counter[str] = Counter()
        self.saved: Counter[str] = Counter()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin with the second."""
        if batch_idx == 1:
            add_gradient = pl_module.add_gradient

            def watched(compute_loss: Any, exchange: bool) -> None:
                saved = Saved(pl_module.policy)

                def compute() -> torch.Tensor:
                    with saved_tensors_hooks(saved.pack, lambda tensor: tensor):
                        return compute_loss()

                add_gradient(compute, exchange)
                saved.end()
                self.saved = max(self.saved, saved.bytes, key=lambda each: each.total())

            pl_module.add_gradient = watched
        elif batch_idx == 2:
            self._tracker = MemTracker()
            self._tracker.track_external(pl_module.policy, trainer.optimizers[0])
            self._tracker.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Read the peak."""
        if hasattr(self, "_tracker"):
            self._tracker.__exit__(None, None, None)
            snapshots = self._tracker.get_tracker_snapshot("peak").values()
            self.peak = Counter()
            for snapshot in snapshots:
                self.peak.update({str(getattr(kind, "value", kind)): size for kind, size in snapshot.items()})


def main(options: Options) -> int:
    """Measure each kind of checkpointing, draw, and check that the parts add up."""
    work, policy, tokens = (QUICK_WORK, QUICK_POLICY, QUICK_TOKENS) if options.quick else (WORK, POLICY, TOKENS)
    rows = [_measure(name, work, policy, tokens) for name in SETTINGS]
    if options.output is not None or not options.quick:  # a quick run leaves the docs' picture as it is
        draw(rows, PICTURE if options.output is None else options.output.with_suffix(".svg"))
    settings: Row = {"policy": f"random Qwen3, {policy}", "micro-batch": tokens, "groups": str(work), "threads": 1}
    assert all(float(row[name]) > 0 for row in rows for name in STATE[:2]), "the tracker names kinds otherwise"
    activations = {str(row["checkpointing"]): _activations(row) for row in rows}
    claims = [
        Claim("beside the state, selective over none", activations["selective"] / activations["none"], "<=", 0.8),
        Claim("beside the state, checkpointing over none", activations["all"] / activations["none"], "<=", 0.4),
    ]
    return finish("update_peak", options, settings, rows, claims)


def _activations(row: Row) -> float:
    return float(row["peak_mib"]) - sum(float(row[name]) for name in STATE)


def _measure(name: str, work: Work, policy: str, tokens: int) -> Row:
    torch.set_num_threads(1)
    groups, watch = work.groups(), Watch()

    class Batches:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Any:
            for _ in range(3):
                batch = PromptBatch([group.prompt for group in groups])
                batch.groups = groups
                yield batch

    with tempfile.TemporaryDirectory() as folder:
        save_random_policy(Path(folder), replace(TO_UPDATE[policy], vocab_size=work.vocab_size))
        module = GRPOModule(
            policy=folder,
            rewards=[RewardSpec("lit_grpo.rewards.exact_match")],
            num_generations=work.group_size,
            sampling=SamplingParams(max_tokens=work.limit),
            max_tokens_per_micro_batch=tokens,
            gradient_checkpointing=SETTINGS[name],
            optimizer=partial(torch.optim.AdamW, fused=True),
        )
        trainer = quiet_trainer("cpu", [watch], precision="32-true", max_epochs=1)
        trainer.fit(module, train_dataloaders=Batches())
    total = watch.peak["Total"] / MIB
    parts = {kind: watch.peak[kind] / MIB for kind in ("Parameter", "Gradient", "Optstate")}
    saved = {f"saved by {kind}": num_bytes / MIB for kind, num_bytes in sorted(watch.saved.items())}
    rest = total - sum(parts.values()) - sum(saved.values())
    named = {"weights": parts["Parameter"], "gradients": parts["Gradient"], "moments": parts["Optstate"]}
    return {"checkpointing": name, "peak_mib": total, **named, **saved, "kept by checkpointing, or intermediate": rest}


def draw(rows: list[Row], path: Path) -> None:
    """Draw a bar for each kind of checkpointing, part upon part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    parts = list(dict.fromkeys(name for row in rows for name in row if name not in ("checkpointing", "peak_mib")))
    left = [0.0] * len(rows)
    for part in parts:
        values = [max(float(row.get(part, 0.0)), 0.0) for row in rows]
        axis.barh([f"checkpointing: {row['checkpointing']}" for row in rows], values, left=left, label=part)
        left = [begin + value for begin, value in zip(left, values, strict=True)]
    axis.invert_yaxis()
    axis.set(xlabel="MiB at the peak of a step", title="What the update's peak consists of")
    axis.legend(loc="upper center", bbox_to_anchor=(0.4, -0.2), fontsize="small", ncols=2)
    figure.savefig(path)


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
