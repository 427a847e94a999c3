"""Options, config files, help texts and what is said of a command line that is not understood."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from apportion.cli import COMMANDS, main
from apportion.cli_cache import kept_profile, profile_key
from apportion.cli_jobs import limits_of, port_of, with_torchrun_flags
from apportion.cli_options import UsageError, parse_options
from apportion.cli_schema import PlanOptions, TrainOptions, VerifyOptions
from apportion.errors import OptionError
from apportion.records import Checkpointing, DeviceType, Precision, Schedule, Strategy

NAMES = [command.name for command in COMMANDS]


class TestHelp:
    """One screen, with examples, without torch."""

    @pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in NAMES)])
    def test_it_fits_one_screen(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(words) == 0
        out = capsys.readouterr().out
        assert "examples:" in out
        assert len(out.splitlines()) <= 40
        assert max(map(len, out.splitlines())) <= 100

    @pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
    def test_help_all_explains_every_option(self, command: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([command.name, "--help-all"]) == 0
        out = capsys.readouterr().out
        for field, info in command.options.model_fields.items():
            key = info.alias or field
            assert key == "target" or f"--{key.replace('_', '-')}" in out
            assert info.description

    def test_every_example_is_understood(self) -> None:
        for command in COMMANDS:
            for example in command.examples:
                words = example.split("apportion ", 1)[1].split()
                chosen = next(other for other in COMMANDS if other.name == words[0])
                parse_options(words[0], chosen.options, words[1:])

    def test_help_and_usage_errors_import_no_torch(self) -> None:
        code = (
            "import sys; from apportion.cli import main; main(['--help']); main(['train', '--help']);"
            "main(['plan', '--nope']); sys.exit('torch' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--version"]) == 0
        assert capsys.readouterr().out.startswith("apportion 0.")

    def test_no_command_shows_the_commands_and_is_a_usage_error(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "usage: apportion COMMAND" in captured.err


@pytest.mark.parametrize(
    ("words", "code", "texts"),
    [
        (["pln"], 2, ["there is no command 'pln'", "did you mean 'plan'?"]),
        (["--json"], 2, ["there is no command", "commands: inspect"]),
        (["plan"], 2, ["needs a TARGET"]),
        (["report"], 2, ["needs the directory of a run"]),
        (["plan", "x.py", "--devcies", "2"], 2, ["no option --devcies", "did you mean --devices?"]),
        (["plan", "x.py", "--devcies=2"], 2, ["no option --devcies", "did you mean --devices?"]),
        (["train", "x.py", "--nproc_per_nod", "2"], 2, ["did you mean --nproc-per-node?"]),
        (["plan", "x.py", "-z"], 2, ["no option -z", "--help-all"]),
        (["plan", "x.py", "--steps", "3"], 2, ["plan has no option --steps"]),
        (["plan", "x.py", "y.py"], 2, ["takes no argument 'y.py'"]),
        (["plan", "x.py", "--seq-len"], 2, ["--seq-len", "expected one argument"]),
        (["plan", "x.py", "--batch", "3"], 2, ["no option --batch", "did you mean --batch-size?"]),
        (["plan", "x.py", "--strategy", "fdsp"], 1, ["--strategy cannot be 'fdsp'", "did you mean fsdp?"]),
        (["plan", "x.py", "--precision", "int8"], 1, ["choices: fp32, tf32, fp16, bf16, fp8"]),
        (["plan", "x.py", "--schedule", "1f1"], 1, ["did you mean 1f1b?"]),
        (
            ["plan", "x.py", "--batch-size", "0"],
            1,
            ["--batch-size cannot be '0'", "greater than or equal to 1"],
        ),
        (["plan", "x.py", "--batch-size", "few"], 1, ["--batch-size cannot be 'few'", "integer"]),
        (["plan", "x.py", "--tp", "1.5"], 1, ["--tp cannot be '1.5'"]),
        (["plan", "x.py", "--zero", "4"], 1, ["--zero cannot be '4'", "less than or equal to 3"]),
        (["plan", "x.py", "--seed", "-1"], 1, ["--seed cannot be '-1'"]),
        (["plan", "x.py", "--memory-limit", "80GX"], 1, ["--memory-limit cannot be '80GX'", "80GiB"]),
        (["plan", "x.py", "--inter-node", "400"], 1, ["is not a bandwidth", "400Gb/s"]),
        (["plan", "x.py", "--sequence-parallel", "maybe"], 1, ["--sequence-parallel cannot be 'maybe'"]),
        (["plan", "x.py", "--set", "n_layer"], 1, ["'n_layer' is not NAME=VALUE"]),
        (["train", "x.py", "--lr", "-1"], 1, ["--lr cannot be '-1'"]),
        (["train", "x.py", "--engine", "slurm"], 1, ["--engine cannot be 'slurm'", "choices: local"]),
        (["train", "x.py", "--nnodes", "2"], 1, ["--nnodes 2", "one node"]),
        (["train", "x.py", "--nproc-per-node", "two"], 1, ["--nproc-per-node two"]),
        (
            ["train", "x.py", "--nproc-per-node", "2", "--devices", "local:3"],
            1,
            ["contradicts --devices local:3"],
        ),
        (["doctor", "--port", "70000"], 1, ["--port cannot be '70000'"]),
    ],
)
def test_a_command_line_that_cannot_be_used(
    words: list[str], code: int, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert len(captured.err.splitlines()) <= 3
    assert "Traceback" not in captured.err
    for text in texts:
        assert text in captured.err
    if "--json" not in words:
        assert captured.out == ""


def test_with_json_an_error_is_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "x.py", "--json", "--tp", "0"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["what"] == "--tp cannot be '0'"
    assert json.loads(captured.out)["error"]["exit_code"] == 1
    assert captured.err.startswith("error: --tp")


def test_verbose_adds_the_traceback_below_the_three_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "x.py", "-v", "--tp", "0"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: --tp cannot be '0'")
    assert "Traceback" in err


def test_flags_become_typed_options() -> None:
    words = (
        "job.py --set a=1 --set b=x=y --batch-size 64 --strategy fsdp --dp-shard 4 --tp=2 --zero 3 "
        "--schedule 1f1b --activation-checkpointing full --sequence-parallel on --precision bf16 "
        "--memory-limit 40GiB -q"
    )
    options = parse_options("plan", PlanOptions, words.split())
    assert options.set == {"a": "1", "b": "x=y"}
    assert options.quiet
    limits = limits_of(options, 64)
    assert limits.strategy is Strategy.FSDP
    assert limits.mesh == {"dp_shard": 4, "tp": 2}
    assert (limits.zero_stage, limits.schedule) == (3, Schedule.ONE_F_ONE_B)
    assert (limits.activation_checkpointing, limits.precision) == (Checkpointing.FULL, Precision.BF16)
    assert (limits.sequence_parallel, limits.memory_bytes, limits.batch_size) == (True, 40 * 2**30, 64)


def test_what_is_not_given_is_left_to_the_search() -> None:
    limits = limits_of(parse_options("plan", PlanOptions, ["job.py", "--strategy", "auto"]), 32)
    assert (limits.strategy, dict(limits.mesh), limits.zero_stage, limits.precision) == (None, {}, None, None)


@pytest.mark.parametrize("flag", ["--nproc-per-node", "--nproc_per_node"])
def test_torchrun_flags_in_both_spellings(flag: str) -> None:
    words = [
        "job.py",
        f"{flag}=2",
        "--nnodes",
        "1:1",
        "--max_restarts",
        "3",
        "--rdzv_endpoint",
        "localhost:29501",
    ]
    options = parse_options("train", TrainOptions, words)
    assert with_torchrun_flags(options).devices == "local:2"
    assert (options.max_restarts, port_of(options)) == (3, 29501)
    auto = parse_options("train", TrainOptions, ["job.py", flag, "gpu"])
    assert with_torchrun_flags(auto).devices == "local"


@pytest.mark.parametrize(
    "endpoint", ["localhost", "elsewhere.example:29500", "localhost:port", "localhost:99999"]
)
def test_a_meeting_place_that_cannot_be_used(endpoint: str) -> None:
    with pytest.raises(OptionError, match="--rdzv-endpoint"):
        port_of(parse_options("train", TrainOptions, ["job.py", "--rdzv-endpoint", endpoint]))


def test_switches_of_training() -> None:
    plain = parse_options("train", TrainOptions, ["job.py"])
    assert (plain.resume, plain.check, plain.compile) == (True, True, False)
    other = parse_options("train", TrainOptions, ["job.py", "--resume", "off", "--check", "off", "--compile"])
    assert (other.resume, other.check, other.compile) == (False, False, True)


class TestConfig:
    """TOML and YAML, one schema, flags win."""

    TOML = """
target = "job.py"
batch-size = 64
strategy = "fsdp"
lr = 0.1
resume = false
[set]
a = 1
b = "x"
"""
    YAML = "target: job.py\nbatch_size: 64\nstrategy: fsdp\nlr: 0.1\nresume: off\nset: {a: 1, b: x}\n"

    @pytest.mark.parametrize(("name", "text"), [("c.toml", TOML), ("c.yaml", YAML), ("c.yml", YAML)])
    def test_both_forms_say_the_same(self, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        words = ["--config", str(tmp_path / name)]
        options = parse_options("train", TrainOptions, words)
        assert (options.target, options.batch_size, options.strategy) == ("job.py", 64, Strategy.FSDP)
        assert (options.lr, options.resume, options.set) == (0.1, False, {"a": "1", "b": "x"})
        more = parse_options(
            "train", TrainOptions, [*words, "other.py", "--batch-size", "8", "--set", "a=2", "--set", "c=3"]
        )
        assert (more.target, more.batch_size, more.lr) == ("other.py", 8, 0.1)
        assert more.set == {"a": "2", "b": "x", "c": "3"}

    @pytest.mark.parametrize(
        ("name", "text", "what", "more"),
        [
            ("c.toml", "batch_sise = 3\n", "unknown key 'batch_sise'", "did you mean 'batch_size'?"),
            ("c.yaml", "zzz: 3\n", "unknown key 'zzz'", "keys are"),
            ("c.toml", "batch_size = \n", "cannot be understood", "line 1"),
            ("c.yaml", "a: [1\n", "cannot be understood", "line 2"),
            ("c.yaml", "- a\n", "holds no options", "list"),
            ("c.toml", 'batch_size = "few"\n', "--batch-size cannot be 'few'", "integer"),
            ("c.toml", 'strategy = "fdsp"\n', "--strategy cannot be 'fdsp'", "did you mean fsdp?"),
            ("c.json", "{}", "neither TOML nor YAML", ".toml"),
            ("c.toml", 'config = "d.toml"\n', "unknown key 'config'", ""),
        ],
    )
    def test_a_bad_file(self, tmp_path: Path, name: str, text: str, what: str, more: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(OptionError) as caught:
            parse_options("train", TrainOptions, ["job.py", "--config", str(tmp_path / name)])
        assert what in caught.value.what
        assert more in str(caught.value)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match="cannot be read"):
            parse_options("plan", PlanOptions, ["--config", str(tmp_path / "none.toml")])

    def test_print_config_is_a_config_again(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["verify", "job.py", "--steps", "5", "--set", "a=1", "--precision", "bf16", "--print-config"]
        assert main(words) == 0
        printed = json.loads(capsys.readouterr().out)
        (tmp_path / "c.yaml").write_text(json.dumps(printed))  # JSON is YAML
        again = parse_options("verify", VerifyOptions, ["--config", str(tmp_path / "c.yaml")])
        assert (again.target, again.steps, again.set, again.precision) == (
            "job.py",
            5,
            {"a": "1"},
            Precision.BF16,
        )


def test_usage_errors_exit_with_2_and_values_with_1() -> None:
    with pytest.raises(UsageError) as usage:
        parse_options("plan", PlanOptions, ["--nope"])
    with pytest.raises(OptionError) as value:
        parse_options("plan", PlanOptions, ["--tp", "x"])
    assert (usage.value.exit_code, value.value.exit_code) == (2, 1)


class TestKeptProfiles:
    """A profile is found again only for what it was made of."""

    def key(self, fingerprint: str = "f", batch: int = 8, torch: str = "2.13") -> str:
        return profile_key(
            fingerprint, batch_samples=batch, device_type=DeviceType.CPU, versions={"torch": torch}
        )

    def test_the_key_depends_on_everything(self) -> None:
        keys = {self.key(), self.key("g"), self.key(batch=9), self.key(torch="2.14")}
        assert len(keys) == 4
        assert self.key() == self.key()

    def test_it_is_made_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile_record: Any
    ) -> None:
        monkeypatch.setenv("APPORTION_CACHE", str(tmp_path))
        made = []

        def make() -> Any:
            made.append(1)
            return profile_record

        assert kept_profile("k", make) == kept_profile("k", make) == profile_record
        assert len(made) == 1
        next(tmp_path.rglob("*.json")).write_text("{broken")
        assert kept_profile("k", make) == profile_record
        assert len(made) == 2
        monkeypatch.setenv("APPORTION_CACHE", "off")
        kept_profile("k", make)
        assert len(made) == 3

    def test_a_folder_that_cannot_be_written_is_no_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile_record: Any
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("APPORTION_CACHE", str(tmp_path / "file"))
        assert kept_profile("k", lambda: profile_record) == profile_record

    @pytest.fixture
    def profile_record(self) -> Any:
        from apportion.records import Component, Method, Profile

        root = Component(
            fqn="", kind="Net", depth=0, parameters=3, parameter_bytes=12, trainable_parameters=3,
            trainable_bytes=12, buffer_bytes=0, forward_flops=6, backward_flops=12, saved_activation_bytes=4,
            input_bytes=4, output_bytes=4, memory_traffic_bytes=20, calls=1, fingerprint="x",
        )  # fmt: skip
        return Profile(
            name="net", components=(root,), batch_samples=8, tokens_per_sample=0, batch_bytes=4, loss_bytes=4,
            matmul_fraction=1.0, method=Method.FAKE,
        )  # fmt: skip
