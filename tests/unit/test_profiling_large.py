"""Hugging Face models: a tiny one against a real run, a large one within its limits of time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from apportion.profiling import profile_module
from apportion.records import DeviceType, Method

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SEVEN_BILLION = """
import json, resource, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from apportion.profiling import profile_parts
from apportion.reading.parts import JobParts

config = LlamaConfig(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000
)

def example(n):
    ids = torch.zeros(n, 2048, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

parts = JobParts(
    name="llama", target="hf:llama", model=lambda: LlamaForCausalLM(config), example=example,
    forward=lambda model, batch: model(**batch), loss=None, tokens_per_sample=2048,
)
start = time.perf_counter()
found = profile_parts(parts, batch_samples=1)
print(json.dumps({
    "seconds": time.perf_counter() - start,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "method": found.method.value,
    "parameters": found.root.parameters,
    "forward_flops": found.root.forward_flops,
    "layers": sum(block.kind == "LlamaDecoderLayer" for block in found.blocks),
}))
"""


@pytest.mark.slow
def test_seven_billion_parameters_in_ten_seconds_and_two_gigabytes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SEVEN_BILLION], capture_output=True, text=True, check=True, timeout=120
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["method"] == "fake"
    assert found["parameters"] == 6_738_415_616
    assert found["layers"] == 32
    matmuls = 2 * 2048 * (found["parameters"] - 32000 * 4096 - 65 * 4096)
    attention = 32 * 4 * 2048 * 2048 * 4096
    assert found["forward_flops"] == pytest.approx(matmuls + attention, rel=1e-3)
    assert found["seconds"] < 10
    assert found["peak_bytes"] < 2 * 10**9


def tiny() -> tuple[Any, dict[str, Tensor]]:
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    ids = torch.randint(3, 128, (4, 16))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    return transformers.LlamaForCausalLM(config), batch


@pytest.mark.slow
def test_a_tiny_llama_keeps_what_a_real_run_keeps() -> None:
    module, batch = tiny()
    found = profile_module(
        module,
        batch,
        forward=lambda model, inputs: model(**inputs),
        loss=None,
        batch_samples=4,
        name="llama",
        device_type=DeviceType.CPU,
    )
    assert found.method is Method.FAKE
    given = [*module.parameters(), *module.buffers(), *batch.values()]
    skip = {id(t.untyped_storage()): t.untyped_storage() for t in given}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in skip:
            kept[id(storage)] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        module.lm_head(output.last_hidden_state)
    real = sum(storage.nbytes() for storage in kept.values())
    assert found.root.saved_activation_bytes == pytest.approx(real, rel=0.001)
    rows = (
        2 * 4 * 16 * sum(p.numel() for n, p in module.named_parameters() if p.dim() == 2 and "embed" not in n)
    )
    assert found.root.forward_flops == rows + 4 * 4 * 16 * 16 * 32 * 4
    assert found.root.backward_flops == 2 * found.root.forward_flops
