"""Every real-life case gives a profile, and is left as it was."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apportion.profiling import profile_module
from apportion.records import Method

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "tests" / "cases", ROOT.parent / "shared" / "cases")
FOLDER = next((folder for folder in FOLDERS if folder.is_dir()), None)
NAMES = [path.stem for path in sorted(FOLDER.glob("case*.py"))] if FOLDER is not None else []

MEASURED = {"case56", "case65"}
"""Cases whose forward picks rows by values (`nonzero`), which no run without values can follow."""

pytestmark = pytest.mark.skipif(
    not NAMES, reason="the folder of cases is absent: tests/cases or ../shared/cases"
)


def load(name: str) -> Any:
    assert FOLDER is not None
    spec = importlib.util.spec_from_file_location(f"profiled_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def call(module: nn.Module, batch: Any) -> Any:
    args, kwargs = batch
    return module(*args, **kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_case_is_profiled(name: str) -> None:
    module, args, kwargs, loss = load(name).build()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    attributes = [sorted(vars(below)) for below in module.modules()]
    found = profile_module(
        module,
        (args, kwargs),
        forward=call,
        loss=lambda output, batch: loss(output),
        batch_samples=8,
        name=name,
    )
    assert (found.method is Method.MEASURED) == (name in MEASURED) == bool(found.notes)
    assert found.root.parameters == sum(p.numel() for p in module.parameters())
    assert found.root.forward_flops > 0
    assert found.root.backward_flops > 0
    assert found.root.saved_activation_bytes + found.loss_bytes > 0
    assert sum(block.parameters for block in found.blocks) <= found.root.parameters
    assert attributes == [sorted(vars(below)) for below in module.modules()]
    assert all(parameter.grad is None for parameter in module.parameters())
    after = module.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
