"""`inspect`, `plan` and `report` through the command line, with bad input of every kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import apportion
from apportion.cli import main

JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

WIDTH = 16

def model():
    print("building")
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))

def data(split):
    if split != "train":
        return None
    return TensorDataset(torch.randn(64, 8), torch.arange(64) % 4)

def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])
"""
CASE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Linear(3, 2), (torch.randn(6, 3),), {}, lambda out: out.square().mean()
"""
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 2,
    "n_positions": 64,
    "vocab_size": 100,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture(autouse=True)
def quiet_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("APPORTION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "case.py").write_text(CASE)


def run_json(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    assert main([*words, "--json"]) == code
    captured = capsys.readouterr()
    return json.loads(captured.out)  # fails if there is anything beside the one document


def test_inspect_shows_the_components(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "job.py"]) == 0
    assert "212" in capsys.readouterr().out
    found = run_json(["inspect", "job.py", "--set", "WIDTH=32"], capsys)
    assert [component["fqn"] for component in found["components"]] == ["", "0", "1", "2"]
    assert found["components"][0]["parameters"] == 8 * 32 + 32 + 32 * 4 + 4


def test_plan_has_the_schema_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(["plan", "job.py", "--devices", "8xH100", "--batch-size", "64"], capsys)
    assert {
        "schema",
        "model",
        "cluster",
        "best",
        "candidates",
        "excluded",
        "searched",
        "search_seconds",
    } <= set(found)
    assert found["model"]["parameters"] == 212
    assert (found["cluster"]["devices"], found["cluster"]["kind"]) == (8, "H100")
    best = found["best"]
    assert {"name", "mesh", "micro_batch_size", "grad_accumulation", "zero_stage", "estimate", "why"} <= set(
        best
    )
    seconds = best["estimate"]["seconds"]
    assert sum(seconds.values()) == pytest.approx(best["estimate"]["step_seconds"])
    named = {item["name"] for item in found["excluded"]}
    assert {"pipeline", "tensor"} <= named


def test_plan_on_a_terminal_names_the_pick(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "job.py", "--devices", "8xH100", "--strategy", "fsdp"]) == 0
    out = capsys.readouterr().out
    assert "▶ fsdp" in out
    assert main(["plan", "job.py", "--devices", "8xH100", "-q"]) == 0
    assert capsys.readouterr().out == "building\n"  # the job file's own


def test_a_one_batch_job_is_planned_for_its_own_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(["plan", "case.py", "--devices", "local:2"], capsys)["batch_size"] == 6
    assert run_json(["plan", "case.py", "--devices", "local:2", "--batch-size", "4"], capsys)["batch_size"] == 4


def test_a_configuration_is_profiled_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="Hugging Face targets need transformers")
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    words = ["plan", f"hf:{tmp_path}", "--devices", "8xH100"]
    first = run_json(words, capsys)
    code = "import sys; from apportion.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    again = subprocess.run([sys.executable, "-c", code, *words, "--json"], capture_output=True, check=False)
    assert again.returncode == 0, "a kept profile must be enough to plan without torch"
    assert json.loads(again.stdout)["best"] == first["best"]
    other = run_json([*words, "--set", "n_layer=3"], capsys)
    assert other["model"]["parameters"] > first["model"]["parameters"]


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "job.py", "--devices", "2xH100", "--memory-limit", "1kB"]
    found = run_json(words, capsys, 3)
    assert found["best"] is None
    assert found["smallest_change"]
    assert main(words) == 3
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line != "building"]
    assert lines[0].startswith("error: job does not fit on 2 x H100")
    assert "bytes short" in lines[1]
    assert lines[2].startswith("  try: ")


BAD = [
    ("no such file", "missing.py", None, 1, "no file missing.py"),
    ("a near file", "jbo.py", None, 1, "did you mean 'job.py'?"),
    ("no such function", "job.py:modle", None, 1, "has no function modle()"),
    ("a recipe", "gpt", None, 1, "not available in this version"),
    ("no configuration", "hf:nowhere", None, 1, "hf:nowhere is not on this machine"),
    ("raises on import", "bad.py", "raise OSError('disk on fire')", 1, "OSError: disk on fire"),
    ("no functions", "bad.py", "x = 1", 1, "has no function model()"),
    (
        "raising model",
        "bad.py",
        JOB.replace('print("building")', "raise ValueError('odd')"),
        1,
        "ValueError: odd",
    ),
    (
        "no module",
        "bad.py",
        JOB.replace("    return nn.Seq", "    return 5\n    nn.Seq"),
        1,
        "returned no nn.Module",
    ),
    (
        "empty data",
        "bad.py",
        JOB.replace("return TensorDataset", "return []\n    TensorDataset"),
        1,
        "is empty",
    ),
    (
        "uneven items",
        "bad.py",
        JOB.replace("return TensorDataset", "return [torch.ones(2), torch.ones(3)]\n    TensorDataset"),
        1,
        "cannot be put together",
    ),
    (
        "rejected batch",
        "bad.py",
        JOB.replace("nn.Linear(8, WIDTH)", "nn.Linear(9, WIDTH)"),
        1,
        "rejects a batch of its own data",
    ),
    ("loss raises", "bad.py", JOB.replace("batch[1])", "batch['y'])"), 1, "loss(output, batch) raised"),
    ("no loss", "bad.py", JOB.partition("def loss")[0], 1, "the job has no loss()"),
    (
        "no scalar",
        "bad.py",
        JOB.replace("return nn.functional", "return output, nn.functional"),
        1,
        "(total, count)",
    ),
]


@pytest.mark.parametrize(("name", "target", "text", "code", "said"), BAD, ids=[row[0] for row in BAD])
def test_bad_targets(
    name: str,
    target: str,
    text: str | None,
    code: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if text is not None:
        (tmp_path / target).write_text(text)
    assert main(["plan", target, "--devices", "8xH100"]) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["plan", "job.py", "--devices", "8xH1000"], 1, "H1000"),
        (["plan", "job.py", "--devices", "nothing.toml"], 1, "nothing.toml"),
        (["plan", "job.py", "--devices", "8xH100", "--batch-size", "3", "--strategy", "ddp"], 1, "3"),
        (["plan", "job.py", "--set", "WIDHT=3"], 1, "did you mean 'WIDTH'?"),
        (["plan", "job.py", "--seq-len", "9"], 1, "--seq-len 9 is for hf: targets"),
        (["plan", "job.py", "--devices", "8xH100", "--strategy", "pipeline"], 3, "pipeline"),
        (["train", "job.py", "--devices", "8xH100"], 1, "not here"),
        (["train", "case.py", "--devices", "local:2"], 1, "no data to train on"),
        (["train", "job.py", "--devices", "local:2", "--plan", "ddq"], 1, "did you mean 'ddp'?"),
        (["train", "job.py", "--devices", "local:2", "--plan", "none.json"], 1, "none.json cannot be read"),
        (["train", "job.py", "--devices", "local:2", "--plan", "ddp", "--strategy", "fsdp"], 1, "contradicts"),
        (["train", "job.py", "--devices", "local:2", "--plan", "tensor"], 3, "tensor"),
        (["train", "job.py", "--devices", "local:2", "--batch-size", "1"], 1, "2 ranks"),
        (["verify", "case.py", "--devices", "local:2", "--batch-size", "7"], 1, "is more than case.py brings"),
        (["compare", "job.py", "--devices", "8xH100"], 1, "not here"),
        (["report", "nowhere"], 1, "nowhere is not a run directory"),
        (["report", "."], 1, "no plan.json in it"),
        (["calibrate", "--output", "no/such/folder/c.toml"], 1, "cannot be written"),
    ],
)
def test_bad_options(words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_a_saved_plan_must_be_of_this_model_and_these_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "job.py", "--devices", "local:2"]
    (tmp_path / "plan.json").write_text(json.dumps(run_json(words, capsys)))
    train = ["train", "job.py", "--dry-run", "--plan", "plan.json"]
    found = run_json([*train, "--devices", "local:2"], capsys)
    assert (found["processes"], found["job"]["batch_size"]) == (2, 32)
    assert not (tmp_path / "runs").exists()
    assert main([*train, "--devices", "local:4"]) == 1
    assert "was made for 2 devices" in capsys.readouterr().err
    assert main([*train, "--devices", "local:2", "--set", "WIDTH=17"]) == 1
    assert "was made for another model" in capsys.readouterr().err
    (tmp_path / "plan.json").write_text('{"modle": 1}')
    assert main([*train, "--devices", "local:2"]) == 1
    assert "did you mean 'model'?" in capsys.readouterr().err


def test_a_candidate_can_be_picked_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_json(["plan", "job.py", "--devices", "local:2"], capsys)
    name = plan["candidates"][1]["name"]
    assert name != plan["best"]["name"]
    found = run_json(["train", "job.py", "--devices", "local:2", "--plan", name, "--dry-run"], capsys)
    assert found["plan"]["best"]["name"] == name


def test_verify_of_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(["verify", "job.py", "--devices", "local:2", "--strategy", "pipeline"], capsys, 3)
    assert found["status"] == "refused"
    assert "pipeline" in found["reason"]
    assert set(found["relative_error"]) >= {"loss", "gradients", "weights", "buffers"}


def test_a_fault_of_our_own_shows_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(options: Any) -> Any:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("apportion.cli_plan.plan", broken)
    assert main(["plan", "job.py"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "this is a bug in Apportion" in err
    assert "ZeroDivisionError: oops" in err


def test_ctrl_c_ends_quietly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("apportion.cli_plan.plan", stopped)
    assert main(["plan", "job.py"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_importing_the_package_costs_nearly_nothing() -> None:
    code = (
        "import sys; import apportion; assert not {'torch', 'pydantic', 'rich'} & set(sys.modules);"
        "assert apportion.plan and apportion.Limits and apportion.describe; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    for name in apportion.__all__:
        assert getattr(apportion, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'paralellize'"):
        apportion.paralellize  # type: ignore[attr-defined]  # noqa: B018
