"""Kernels between the products of a layer: their numbers by Triton's interpreter, launches, and runs without them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy, table_rows
from on_gpu import off, sample, started
from test_fused_decoder import make

from benchmarks.decode_launches import LaunchCase
from benchmarks.processes import measured
from lit_grpo.rollout.slots import binding
from lit_grpo.rollout.slots.copies import LoweredWeights
from lit_grpo.rollout.slots.forward import together
from tests.doubles.compile_only import SHARED_MEMORY
from tests.doubles.layer_kernels import PlainKernels
from tests.doubles.pretend_cuda import pretend_cuda

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What comes of each case that the selected tests look at, all in one process."""
    pytest.importorskip("triton")
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params["case"] for item in items if "interpreted" in item.fixturenames]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "tests/cuda/layer_kernels_case.py", *cases]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


PIECES = ["pieces-float32-float32", "pieces-bfloat16-bfloat16", "pieces-bfloat16-float32"]
DECODED = ["decoded-Qwen3", "decoded-Qwen2", "decoded-Llama"]


@pytest.mark.parametrize("case", table_rows(["rows-2", "rows-12"], ["rows-2"]))  # a step takes some seconds
def test_rows_that_come_grow_and_go_attend_as_by_the_shelves(case: str, interpreted: dict[str, Any]) -> None:
    assert interpreted[case] < 1e-5


@pytest.mark.nightly  # decode steps, below, run through all of them
@pytest.mark.parametrize("case", PIECES)
def test_each_kernel_computes_what_torch_does(case: str, interpreted: dict[str, Any]) -> None:
    gaps = interpreted[case]
    assert len(gaps) == 5 and max(gaps.values()) <= (3e-7 if "-float32-" in case else 0)


@pytest.mark.parametrize("case", table_rows(DECODED, DECODED[:1]))
def test_decode_steps_by_kernels_are_as_near_to_float32_as_those_by_operations(
    case: str, interpreted: dict[str, Any]
) -> None:
    gaps = interpreted[case]
    assert gaps["float32, kernels"][0] <= 1e-6
    assert gaps["autocast, kernels"] == gaps["autocast, operations"]
    assert gaps["bfloat16, kernels"][1] <= 1.2 * gaps["bfloat16, operations"][1]  # the mean; single numbers differ


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)], ids=["A100", "RTX 40 and L4", "H100"])
@pytest.mark.parametrize(("mixed", "drafted", "most"), [(True, False, 11), (False, False, 14), (True, True, 12)])
def test_a_layer_of_qwen3_is_a_few_launches_of_binaries(
    capability: tuple[int, int], mixed: bool, drafted: bool, most: int
) -> None:
    pytest.importorskip("triton")
    case = LaunchCase(capability, mixed, by_kernels=True, is_drafted=drafted)
    figures = measured("benchmarks.decode_launches", case)
    assert figures["a layer"] <= most and figures["besides"] <= 12
    own = {"_add_and_norm": 2, "_norm_and_rotate": 1, "_attend": 1, "_merge": 1, "_silu_and_multiply": 1}
    own |= {"_write": 1} if drafted else {}
    assert {name: figures["launches of a layer"][name] for name in own} == own
    assert {name.partition(" ")[0] for name in figures["binaries"]} == own.keys()
    for binary in figures["binaries"].values():
        assert binary["binary_bytes"] > 0 and binary["shared_bytes"] <= SHARED_MEMORY[capability]


@pytest.mark.parametrize("family", ["Qwen3", "Qwen2"])  # the second one has biases
def test_copies_of_layers_with_one_input_are_one_matrix_that_is_refreshed_in_place(family: str) -> None:
    model = make(family)
    with pretend_cuda() as gpu, torch.no_grad():
        layer = model.to("cuda").model.layers[0]
        lowered = LoweredWeights(model, torch.bfloat16)
        for parent, names in (layer.self_attn, ("q_proj", "k_proj", "v_proj")), (layer.mlp, ("gate_proj", "up_proj")):
            modules, places = [getattr(parent, name) for name in names], set[int]()
            hidden = torch.randn(3, 32, device="cuda", dtype=torch.bfloat16)
            for factor in (1.0, 1.5):
                for weight in parent.parameters():
                    weight.mul_(factor)
                lowered.refresh()
                gpu.reset()
                with lowered.in_place():
                    actual = together(hidden, *modules)
                    places.add(modules[0].weight.data_ptr())
                assert gpu.launches == 1
                for module, found in zip(modules, actual, strict=True):
                    expected = module(hidden.float()).cpu()
                    torch.testing.assert_close(found.float().cpu(), expected, rtol=2e-2, atol=2e-2)
            assert len(places) == 1


def test_weights_that_lie_apart_are_read_in_place_by_products_of_their_own() -> None:
    layer, hidden = make("Qwen2").model.layers[0].self_attn, torch.randn(3, 32)
    modules = [layer.q_proj, layer.k_proj, layer.v_proj]
    for module, found in zip(modules, together(hidden, *modules), strict=True):
        assert torch.equal(found, module(hidden))


# ---- runs without the kernels -----------------------------------------------------------------------------


class Failing(PlainKernels):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def silu_and_multiply(self, gate: torch.Tensor, up: torch.Tensor) -> Any:
        raise self.error


class Wrong(PlainKernels):
    def silu_and_multiply(self, gate: torch.Tensor, up: torch.Tensor) -> Any:
        return gate * up


def compilers_failures() -> list[Exception]:
    found: list[Exception] = [RuntimeError("Failed to find C compiler. Please specify via CC environment variable")]
    found += [FileNotFoundError("ptxas"), subprocess.CalledProcessError(1, "gcc"), ImportError("cannot open libcuda")]
    if binding.find_spec("triton") is not None:
        from triton.runtime.errors import PTXASError

        found.append(PTXASError("Feature '.bf16' requires .target sm_80 or higher"))
    return found


FAILURES = compilers_failures()


@pytest.mark.parametrize(
    "failure", table_rows(FAILURES, [FAILURES[0], FAILURES[-1]]), ids=lambda each: type(each).__name__
)
def test_a_compilation_that_fails_is_told_in_a_line_and_ends_no_run(
    failure: Exception, policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = sample(started(random_policy(), policy_folder), max_tokens=6)
    with pretend_cuda(), monkeypatch.context() as patch:
        patch.setattr(binding, "layer_kernels", lambda shape: Failing(failure))
        with pytest.warns(UserWarning, match="Qwen3ForCausalLM is decoded without Triton kernels between .*longer: "):
            generator = started(random_policy().to("cuda"), policy_folder)  # pyrefly: ignore[bad-argument-type]
        assert generator._fused is not None and generator._fused.kernels is None and generator._graphs is not None
        actual, _ = sample(generator, max_tokens=6)
    assert off(actual, expected) < 1e-4


def test_kernels_that_compute_something_else_are_left_out(policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_cuda(), monkeypatch.context() as patch:
        patch.setattr(binding, "layer_kernels", lambda shape: Wrong())
        with pytest.warns(UserWarning, match="without Triton kernels between products, .*: the hidden states come out"):
            generator = started(random_policy().to("cuda"), policy_folder)  # pyrefly: ignore[bad-argument-type]
    assert generator._fused is not None and generator._fused.kernels is None


@pytest.mark.parametrize(
    "failure", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: an illegal memory access")]
)
def test_a_failing_device_ends_the_run(
    failure: Exception, policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretend_cuda(), monkeypatch.context() as patch:
        patch.setattr(binding, "layer_kernels", lambda shape: Failing(failure))
        with pytest.raises(type(failure)) as raised:
            started(random_policy().to("cuda"), policy_folder)  # pyrefly: ignore[bad-argument-type]
    assert raised.value is failure


def _old_card(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))


def _no_triton(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(binding, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_old_card, "Triton needs a GPU of compute capability 8.0, and this one has 7.5"),
        (_no_triton, "Triton is not installed for it"),
    ],
)
def test_a_gpu_without_triton_decodes_without_graphs_and_the_run_says_why(
    spoil: Callable[[pytest.MonkeyPatch], None], said: str, policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretend_cuda(), monkeypatch.context() as patch:
        spoil(patch)
        with pytest.warns(UserWarning, match=f"decoded without CUDA graphs, .*: {said}"):
            generator = started(random_policy().to("cuda"), policy_folder)  # pyrefly: ignore[bad-argument-type]
    assert generator._graphs is None


def test_the_run_says_once_a_dtype_which_way_it_goes(policy_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pretend_cuda():
        generator = started(random_policy().to("cuda"), policy_folder)  # pyrefly: ignore[bad-argument-type]
        for _ in range(2):
            sample(generator, max_tokens=6, autocast=torch.bfloat16)
    said = [line for line in capsys.readouterr().out.splitlines() if "Triton kernels between products" in line]
    assert ["float32" in line for line in said] == [True, False] and "the first step took" in said[0]
