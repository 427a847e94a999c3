"""Job files: their functions, their constants, and what is said of bad ones."""

from __future__ import annotations

import math
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apportion.errors import ApportionError, OptionError, TargetError
from apportion.reading import check_batch, default_forward, read_target
from apportion.torch_private import tree_flatten

GOOD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

WIDTH = 4
RATE = 0.5
NAME = "plain"
LAYERS = (1, 2)

def model():
    return nn.Linear(3, WIDTH)

def data(split):
    if split != "train":
        return None
    return TensorDataset(torch.randn(10, 3), torch.arange(10) % 4)

def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])
"""


@pytest.fixture(autouse=True)
def own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading puts the folder of a file on `sys.path`; each test starts without."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(text: str, name: str = "job.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write_file


def test_a_job_file_gives_model_data_and_loss(write: Any) -> None:
    parts = read_target(write(GOOD))
    assert parts.name == "job"
    assert parts.data is not None
    assert parts.data("validation") is None
    batch = parts.example(4)
    assert [leaf.shape[0] for leaf in tree_flatten(batch)[0]] == [4, 4]
    assert parts.example(99)[0].shape == (10, 3)
    assert check_batch(parts, parts.model(), batch) == pytest.approx(math.log(4), rel=0.5)
    assert (parts.optimizer, parts.schedule, parts.metrics, parts.one_batch) == (None, None, None, False)


def test_the_same_seed_gives_the_same_weights_and_data_and_another_seed_others(write: Any) -> None:
    target = write(GOOD)
    first, again, other = (read_target(target, seed=seed) for seed in (1, 1, 2))
    torch.manual_seed(99)  # what the process drew before must not matter
    assert torch.equal(first.model().weight, again.model().weight)  # type: ignore[arg-type]
    assert torch.equal(first.example(3)[0], again.example(3)[0])
    assert not torch.equal(first.model().weight, other.model().weight)  # type: ignore[arg-type]
    assert not torch.equal(first.example(3)[0], other.example(3)[0])


def test_reading_leaves_the_random_states_as_they_were(write: Any) -> None:
    torch.manual_seed(5)
    random.seed(5)
    expected = (torch.rand(1), random.random())
    torch.manual_seed(5)
    random.seed(5)
    parts = read_target(write(GOOD))
    parts.model()
    parts.example(2)
    assert (torch.rand(1), random.random()) == expected


def test_set_changes_constants_before_the_functions_run(write: Any) -> None:
    target = write(GOOD)
    wide = read_target(target, overrides={"WIDTH": "7", "RATE": "1", "NAME": "odd", "LAYERS": "(3,)"})
    assert wide.model().weight.shape == (7, 3)  # type: ignore[union-attr]
    assert read_target(target).model().weight.shape == (4, 3)  # type: ignore[union-attr]
    assert wide.fingerprint != read_target(target).fingerprint
    assert read_target(target).fingerprint == read_target(target).fingerprint


@pytest.mark.parametrize(
    ("overrides", "what", "advice"),
    [
        ({"WIDHT": "7"}, "has no such constant", "did you mean 'WIDTH'?"),
        ({"WIDTH": "wide"}, "should be an integer", "WIDTH=4"),
        ({"WIDTH": "2.5"}, "should be an integer", "WIDTH=4"),
        ({"RATE": "fast"}, "should be a number", "RATE=0.5"),
        ({"LAYERS": "3"}, "should be a tuple", "LAYERS=(1, 2)"),
        ({"model": "3"}, "has no such constant", "constants: LAYERS, NAME, RATE, WIDTH"),
    ],
)
def test_a_bad_override_is_told_with_the_way_out(
    write: Any, overrides: dict[str, str], what: str, advice: str
) -> None:
    with pytest.raises(OptionError) as caught:
        read_target(write(GOOD), overrides=overrides)
    assert what in caught.value.what
    assert advice in caught.value.try_


def test_a_job_file_can_import_its_neighbour(write: Any) -> None:
    write("SIZE = 5\n", "neighbour_of_job.py")
    parts = read_target(write(GOOD.replace("WIDTH = 4", "from neighbour_of_job import SIZE as WIDTH")))
    assert parts.model().weight.shape == (5, 3)  # type: ignore[union-attr]


def test_a_dataset_of_a_job_file_pickles_to_a_process_that_never_read_it(write: Any) -> None:
    text = GOOD + "class Items:\n    def __len__(self):\n        return WIDTH\n"
    parts = read_target(write(text), overrides={"WIDTH": "6"})
    module = sys.modules[parts.loss.__module__]  # type: ignore[union-attr]
    pickled = pickle.dumps(module.Items())
    del sys.modules[module.__name__]
    copy = pickle.loads(pickled)
    assert sys.modules[module.__name__] is not module
    assert len(copy) == 6


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for folder, width in (("a", 5), ("b", 6)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "job.py").write_text(GOOD.replace("WIDTH = 4", f"WIDTH = {width}"))
    widths = [read_target(str(tmp_path / name / "job.py")).model().weight.shape[0] for name in "ab"]  # type: ignore[union-attr, index]
    assert widths == [5, 6]


def test_a_changed_file_is_read_anew(write: Any) -> None:
    target = write(GOOD)
    assert read_target(target).model().weight.shape == (4, 3)  # type: ignore[union-attr]
    write(GOOD.replace("WIDTH = 4", "WIDTH = 8"))
    assert read_target(target).model().weight.shape == (8, 3)  # type: ignore[union-attr]


def test_a_factory_names_the_model_function(write: Any) -> None:
    target = write(GOOD + "\ndef wide():\n    return nn.Linear(3, 9)\n")
    parts = read_target(f"{target}:wide")
    assert parts.model().weight.shape == (9, 3)  # type: ignore[union-attr]
    assert parts.name == "job:wide"


def test_a_module_of_the_import_path_is_a_target(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack_of_jobs").mkdir()
    (tmp_path / "pack_of_jobs" / "__init__.py").touch()
    write(GOOD, "pack_of_jobs/first.py")
    assert read_target("pack_of_jobs.first").example(2)[0].shape == (2, 3)
    with pytest.raises(TargetError, match=r"no module named 'pack_of_jobs\.second'"):
        read_target("pack_of_jobs.second")


@pytest.mark.parametrize(
    ("text", "what", "found"),
    [
        ("import torch\nx = 1 / 0\n", "cannot be imported", "ZeroDivisionError: division by zero ("),
        ("def model(:\n", "cannot be imported", "job.py:1)"),
        ("import sys\nsys.exit(3)\n", "cannot be imported", "SystemExit: 3 ("),
        ("import no_such_package_at_all\n", "cannot be imported", "No module named 'no_such_package_at_all'"),
        ("def modle(): pass\ndef data(split): pass\n", "has no function model()", "functions: data, modle"),
        ("def model(): pass\n", "has no function data()", "functions: model"),
        ("", "has no function model()", "functions: none"),
        (GOOD.replace("def model():", "def model(size):"), "should be callable as model()", "model(size)"),
        (GOOD.replace("def data(split):", "def data():"), "should be callable as data(split)", "data()"),
        (GOOD.replace("def loss(output, batch)", "def loss(a, b, c)"), "loss should take", "loss(a, b, c)"),
    ],
)
def test_a_file_that_cannot_be_a_job_is_told_why(write: Any, text: str, what: str, found: str) -> None:
    with pytest.raises(TargetError) as caught:
        read_target(write(text))
    assert what in caught.value.what
    assert found in caught.value.found
    assert caught.value.try_


def test_the_place_of_an_import_error_is_the_users_line(write: Any) -> None:
    with pytest.raises(TargetError) as caught:
        read_target(write("import torch\n\nx = torch.zeros(2) @ torch.zeros(3)\n"))
    assert caught.value.found.endswith("job.py:3)")


def test_a_missing_function_names_the_nearest(write: Any) -> None:
    with pytest.raises(TargetError, match=r"did you mean 'modle'\?"):
        read_target(write("def modle(): pass\ndef data(split): pass\n"))


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("no/such/file.py", "no file no/such/file.py"),
        ("nothing.py", "no file nothing.py"),
        ("gpt", "the recipe 'gpt' is not available"),
        ("not a target", "'not a target' is not a target"),
        ("no_such_module_at_all", "no module named 'no_such_module_at_all'"),
        (".", ". is a folder"),
        ("", "'' is not a target"),
    ],
)
def test_a_target_that_is_not_there(
    target: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError) as caught:
        read_target(target)
    assert what in caught.value.what
    assert caught.value.try_


def test_a_near_file_name_is_named(write: Any) -> None:
    target = write(GOOD)
    with pytest.raises(TargetError, match=r"did you mean 'job.py'\?"):
        read_target(target.replace("job.py", "jbo.py"))


@pytest.mark.parametrize(
    ("old", "new", "what", "found"),
    [
        ("return nn.Linear(3, WIDTH)", "raise ValueError('odd size')", "model() of", "ValueError: odd size ("),
        ("return nn.Linear(3, WIDTH)", "return [1]", "returned no nn.Module", "list(1)"),
        ("return nn.Linear(3, WIDTH)", "pass", "returned no nn.Module", "None"),
    ],
)
def test_a_model_function_that_fails(write: Any, old: str, new: str, what: str, found: str) -> None:
    parts = read_target(write(GOOD.replace(old, new)))
    with pytest.raises(TargetError) as caught:
        parts.model()
    assert what in caught.value.what
    assert found in caught.value.found


def test_an_error_on_the_meta_device_passes_as_it_is(write: Any) -> None:
    parts = read_target(write(GOOD.replace("return nn.Linear(3, WIDTH)", "return int(torch.ones(1).item())")))
    with torch.device("meta"), pytest.raises(RuntimeError, match="meta"):
        parts.model()
    with pytest.raises(TargetError, match="returned no nn"):
        parts.model()


DATA = "    return TensorDataset(torch.randn(10, 3), torch.arange(10) % 4)"


@pytest.mark.parametrize(
    ("line", "what", "found"),
    [
        ("    return []", "is empty for 'train'", "0 samples"),
        ("    return iter([])", "gives no sample for 'train'", ""),
        ("    return None", "returned no dataset for 'train'", "None"),
        ("    return 5", "returned no dataset for 'train'", "5"),
        ("    raise OSError('no such corpus')", "raised", "OSError: no such corpus ("),
        (
            "    return [torch.zeros(3), torch.zeros(4)]",
            "cannot be put together",
            "Tensor[3] float32 and Tensor[4]",
        ),
        ("    return [(torch.zeros(3), print)] * 2", "cannot be put together", "builtin_function_or_method"),
        ("    return (1 / 0 for _ in range(3))", "a sample of data('train')", "ZeroDivisionError"),
    ],
)
def test_data_that_cannot_be_used(write: Any, line: str, what: str, found: str) -> None:
    target = write(GOOD.replace(DATA, line))
    with pytest.raises(TargetError) as caught:
        read_target(target).example(2)
    assert what in caught.value.what
    assert found in caught.value.found


def test_iterable_data_are_built_anew_for_each_reading_and_datasets_once(write: Any) -> None:
    parts = read_target(write(GOOD.replace(DATA, "    return (torch.full((3,), float(i)) for i in range(5))")))
    assert torch.equal(parts.example(2), parts.example(2))
    parts = read_target(write(GOOD))
    assert parts.data is not None
    assert parts.data("train") is parts.data("train")


def test_tokens_per_sample_is_the_length_of_integer_sequences(write: Any) -> None:
    text = GOOD.replace(DATA, "    return [(torch.arange(6), torch.arange(6))] * 4")
    assert read_target(write(text)).tokens_per_sample == 6
    assert read_target(write(GOOD)).tokens_per_sample == 0
    with pytest.raises(OptionError, match="--seq-len 12 is for hf: targets"):
        read_target(write(text), seq_len=12)


class TestForward:
    """What a model gets of a batch."""

    class TwoNeeded(nn.Module):
        def forward(self, x: Any, y: Any, z: Any = None) -> Any:
            return x, y, z

    class Starred(nn.Module):
        def forward(self, *xs: Any) -> Any:
            return xs

    class Keyed(nn.Module):
        def forward(self, a: Any, b: Any = None) -> Any:
            return a, b

    class OpenKeyed(nn.Module):
        def forward(self, **keys: Any) -> Any:
            return keys

    class AllOptional(nn.Module):
        def forward(self, x: Any = None, y: Any = None) -> Any:
            return x, y

    @pytest.mark.parametrize(
        ("model", "batch", "expected"),
        [
            (TwoNeeded(), (1, 2, 3), (1, 2, None)),
            (TwoNeeded(), [1, 2], (1, 2, None)),
            (Starred(), (1, 2, 3), (1, 2, 3)),
            (AllOptional(), (1, 2), (1, None)),
            (Keyed(), {"a": 1, "b": 2, "c": 3}, (1, 2)),
            (Keyed(), {"b": 2, "a": 1}, (1, 2)),
            (OpenKeyed(), {"a": 1, "c": 3}, {"a": 1, "c": 3}),
            (nn.Identity(), "alone", "alone"),
        ],
    )
    def test_default_forward(self, model: nn.Module, batch: Any, expected: Any) -> None:
        assert default_forward(model, batch) == expected

    def test_keys_that_forward_does_not_take_are_an_error(self) -> None:
        with pytest.raises(TargetError) as caught:
            default_forward(self.Keyed(), {"x": 1})
        assert "forward takes a, b" in caught.value.found

    def test_wrappers_are_looked_through(self) -> None:
        parallel = nn.DataParallel(self.TwoNeeded())  # without GPUs it calls the module
        assert default_forward(parallel, (1, 2, 3)) == (1, 2, None)


OWN_LOSS = """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return {"loss": self.w * 2}
"""
LOSS = "    return nn.functional.cross_entropy(output, batch[1])"


class TestLoss:
    """What a loss may return, and what is said of one that cannot be used."""

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("    return output.sum() * 0 + 3", 3.0),
            ("    return output.sum() * 0 + 12, 4", 3.0),
            ("    return (output.sum() * 0 + 12, batch[1].numel())", 3.0),
            ("    return output.sum() * 0 + 12, torch.tensor(4)", 3.0),
        ],
    )
    def test_a_scalar_or_total_and_count(self, write: Any, line: str, expected: float) -> None:
        parts = read_target(write(GOOD.replace(LOSS, line)))
        assert check_batch(parts, parts.model(), parts.example(4)) == pytest.approx(expected)

    def test_a_loss_of_the_output_alone(self, write: Any) -> None:
        text = GOOD.replace("def loss(output, batch):", "def loss(output):").replace(
            LOSS, "    return output.mean() * 0 + 2"
        )
        parts = read_target(write(text))
        assert check_batch(parts, parts.model(), parts.example(4)) == 2.0

    @pytest.mark.parametrize(
        ("line", "what", "found"),
        [
            ("    return output", "not a scalar tensor", "Tensor[4, 4] float32"),
            ("    return output.sum(1)", "not a scalar tensor", "Tensor[4] float32"),
            ("    return 3.0", "not a scalar tensor", "3.0"),
            ("    return None", "not a scalar tensor", "None"),
            ("    return output.sum(), output", "not a scalar tensor", "tuple(Tensor[] float32, Tensor[4, 4]"),
            ("    return output.sum(), 0", "count of (total, count) is not positive", "0"),
            ("    return output.argmax()", "not a scalar tensor", "int64"),
            ("    return output.sum().detach()", "does not depend on any trainable parameter", ""),
            (
                "    return output.sum() * float('nan')",
                "the loss of the first batch is nan",
                "weights are finite",
            ),
            ("    return (output.sum() * 0).log()", "the loss of the first batch is -inf", "batch list("),
            ("    return batch['y']", "loss(output, batch) raised", "TypeError"),
            (
                "    return nn.functional.cross_entropy(output, batch[0][:2])",
                "loss(output, batch) raised",
                "batch list(",
            ),
        ],
    )
    def test_a_loss_that_cannot_be_used(self, write: Any, line: str, what: str, found: str) -> None:
        parts = read_target(write(GOOD.replace(LOSS, line)))
        with pytest.raises(TargetError) as caught:
            check_batch(parts, parts.model(), parts.example(4))
        assert what in caught.value.what
        assert found in caught.value.found
        if "not a scalar" in what:
            assert "(total, count)" in caught.value.try_

    def test_a_model_that_rejects_its_batch_is_shown_with_it(self, write: Any) -> None:
        parts = read_target(write(GOOD.replace("nn.Linear(3, WIDTH)", "nn.Linear(5, WIDTH)")))
        with pytest.raises(TargetError) as caught:
            check_batch(parts, parts.model(), parts.example(4))
        assert "rejects a batch" in caught.value.what
        assert "shapes cannot be multiplied" in caught.value.found
        assert "batch list(Tensor[4, 3] float32, Tensor[4] int64)" in caught.value.found

    def test_without_a_loss_the_output_must_carry_one(self, write: Any) -> None:
        bare = GOOD.replace("def loss(output, batch):\n" + LOSS, "")
        parts = read_target(write(bare))
        with pytest.raises(TargetError, match="carries none"):
            check_batch(parts, parts.model(), parts.example(4))
        own = bare + OWN_LOSS
        parts = read_target(write(own.replace("return nn.Linear(3, WIDTH)", "return Own()")))
        assert check_batch(parts, parts.model(), parts.example(4)) == 2.0

    def test_weights_that_are_not_finite_are_named(self, write: Any) -> None:
        parts = read_target(write(GOOD))
        module = parts.model()
        with torch.no_grad():
            module.bias.fill_(float("nan"))  # type: ignore[union-attr, operator]
        with pytest.raises(TargetError, match="parameter bias is not finite"):
            check_batch(parts, module, parts.example(4))


def test_every_error_has_three_lines(write: Any) -> None:
    with pytest.raises(ApportionError) as caught:
        read_target(write("x = 1 / 0\n"))
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("  found: ")
    assert lines[2].startswith("  try:   ")
