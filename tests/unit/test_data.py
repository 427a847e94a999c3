"""The loader: every sample once, the same batches on any number of ranks, exact resumes, errors that name."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from apportion.errors import OptionError, RankError, TargetError
from apportion.running.data import Loader, LoaderSettings, Portion

# torch's own advice about this machine; not what is tested
MORE_WORKERS_THAN_CORES = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Augmented(Dataset[dict[str, Any]]):
    """Item i with draws of all three default generators, nested."""

    def __init__(self, size: int, bad: int = -1) -> None:
        self.size = size
        self.bad = bad

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.bad:
            raise ValueError("the planted fault")
        draws = (random.random(), float(np.random.rand()), float(torch.rand(())))
        return {
            "index": index,
            "more": (torch.full((2,), float(index)), torch.tensor(draws, dtype=torch.float64)),
        }


class Stream(IterableDataset[dict[str, Any]]):
    """The same as a stream that (as torch's tutorial says) divides itself among the workers it sees."""

    def __init__(self, size: int, bad: int = -1) -> None:
        self.source = Augmented(size, bad)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, len(self.source), step):
            yield self.source[index]


def settings(batch_size: int = 6, micro_batch_size: int = 2, **more: Any) -> LoaderSettings:
    return LoaderSettings(batch_size=batch_size, micro_batch_size=micro_batch_size, **more)


def rows(portion: Portion) -> list[tuple[int, list[float]]]:
    """(index, draws) of the samples that count."""
    out = []
    for micro in portion.micro_batches:
        if micro.start < micro.stop:
            assert len(micro.batch["index"]) == micro.stop - micro.start
            out += zip(micro.batch["index"].tolist(), micro.batch["more"][1].tolist(), strict=True)
    return out


def epoch_of(dataset: Any, num_ranks: int, **more: Any) -> list[list[tuple[int, list[float]]]]:
    """The global batches of one epoch, put together from all ranks."""
    loaders = [Loader(dataset, settings(rank=rank, num_ranks=num_ranks, **more)) for rank in range(num_ranks)]
    batches = []
    for portions in zip(*loaders, strict=True):
        assert len({(len(p.micro_batches), p.total, p.epoch, p.index) for p in portions}) == 1
        assert portions[0].index == len(batches)
        batch = [row for portion in portions for row in rows(portion)]
        assert len(batch) == portions[0].total
        batches.append(batch)
    return batches


@pytest.mark.parametrize("kind", [Augmented, Stream])
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_any_number_of_ranks_gives_the_same_samples_and_draws(kind: type[Any], num_ranks: int) -> None:
    single = epoch_of(kind(20), 1)
    assert epoch_of(kind(20), num_ranks) == single
    assert sorted(index for batch in single for index, _ in batch) == list(range(20))
    assert [len(batch) for batch in single] == [6, 6, 6, 2]
    draws = [tuple(numbers) for batch in single for _, numbers in batch]
    assert len(set(draws)) == 20


def test_draws_change_with_the_epoch_and_the_seed() -> None:
    loader = Loader(Augmented(6), settings())
    (first,), (second,) = ([dict(rows(portion)) for portion in loader] for _ in range(2))
    (other,) = (dict(rows(portion)) for portion in Loader(Augmented(6), settings(seed=1)))
    assert first.keys() == second.keys() == other.keys()
    assert all(first[index] != second[index] and first[index] != other[index] for index in first)


def test_loading_leaves_the_process_generators_alone() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random.random(), np.random.rand(), torch.rand(2).tolist()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    for kind in (Augmented, Stream):
        assert len(list(Loader(kind(20), settings()))) == 4
    assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == before


def test_padding_micro_batches_hold_a_real_sample_and_count_nothing() -> None:
    data = [{"index": index, "more": (0, torch.zeros(1))} for index in range(7)]
    last = [list(Loader(data, settings(rank=rank, num_ranks=3, shuffle=False)))[-1] for rank in range(3)]
    spans = [[(micro.start, micro.stop) for micro in portion.micro_batches] for portion in last]
    assert spans == [[(0, 1)], [(1, 1)], [(1, 1)]]
    assert [portion.micro_batches[0].batch["index"].tolist() for portion in last] == [[6], [6], [6]]
    assert {portion.total for portion in last} == {1}


@pytest.mark.parametrize("kind", [Augmented, Stream])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 1)])
def test_resume_in_mid_epoch_with_other_ranks(kind: type[Any], before: int, after: int) -> None:
    expected = epoch_of(kind(20), 1)
    loader = Loader(kind(20), settings(num_ranks=before))
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    loader.close()
    assert (state["epoch"], state["position"]) == (0, 12)
    rest: list[list[tuple[int, list[float]]]] = []
    resumed = [Loader(kind(20), settings(rank=rank, num_ranks=after)) for rank in range(after)]
    for other in resumed:
        other.load_state_dict(state)
    for portions in zip(*resumed, strict=True):
        assert portions[0].index == 2 + len(rest)
        rest.append([row for portion in portions for row in rows(portion)])
    assert rest == expected[2:]
    assert (resumed[0].epoch, resumed[0].position) == (1, 0)


def test_state_after_the_last_batch_is_the_start_of_the_next_epoch() -> None:
    loader = Loader(Augmented(12), settings())
    iterator = iter(loader)
    next(iterator), next(iterator)
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)
    assert list(iterator) == []
    assert (loader.epoch, loader.position, len(loader)) == (1, 0, 2)
    next(iter(loader))
    loader.set_epoch(1)
    assert loader.position == 6
    loader.set_epoch(4)
    assert (loader.epoch, loader.position) == (4, 0)


@pytest.mark.parametrize(
    ("change", "name"), [({"seed": 3}, "seed"), ({"shuffle": False}, "shuffle"), ({}, "num_samples")]
)
def test_a_position_in_other_data_is_refused(change: dict[str, Any], name: str) -> None:
    state = Loader(Augmented(20), settings()).state_dict()
    with pytest.raises(OptionError, match=name):
        Loader(Augmented(20 if change else 21), settings(**change)).load_state_dict(state)


def test_a_stream_that_ends_before_the_saved_position() -> None:
    loader = Loader(Stream(20), settings())
    state = {**loader.state_dict(), "position": 18}
    shorter = Loader(Stream(10), settings())
    shorter.load_state_dict(state)
    with pytest.raises(TargetError, match="ends after 10 samples"):
        list(shorter)


def test_whole_gives_plain_global_batches_on_every_rank() -> None:
    def pad(items: list[dict[str, Any]]) -> torch.Tensor:
        width = max(item["index"] for item in items)
        return torch.tensor([[item["index"]] * width for item in items])

    for kind in (Augmented, Stream):
        ranks = [
            list(Loader(kind(8), settings(rank=rank, num_ranks=2, whole=True, shuffle=False), collate=pad))
            for rank in range(2)
        ]
        assert [tuple(batch.shape) for batch in ranks[0]] == [(6, 5), (2, 7)]
        assert all(torch.equal(one, other) for one, other in zip(*ranks, strict=True))


def test_drop_last() -> None:
    assert [portion.total for portion in Loader(Augmented(20), settings(drop_last=True))] == [6, 6, 6]
    assert [portion.total for portion in Loader(Stream(20), settings(drop_last=True))] == [6, 6, 6]
    assert len(Loader(Augmented(20), settings(drop_last=True))) == 3


def test_plain_lists_and_tuples_load() -> None:
    tensors = TensorDataset(torch.arange(4.0), torch.arange(4))
    portion = next(iter(Loader(tensors, settings(4, 4, shuffle=False))))
    values, labels = portion.micro_batches[0].batch
    assert values.tolist() == labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [Augmented, Stream])
def test_a_sample_that_raises_is_named(kind: type[Any]) -> None:
    with pytest.raises(
        TargetError, match=r"sample 7 of the dataset[^~]*ValueError: the planted fault \("
    ) as caught:
        list(Loader(kind(20, bad=7), settings()))
    assert isinstance(caught.value.__cause__, ValueError)


def test_samples_that_do_not_collate_are_named() -> None:
    data = [torch.zeros(1), torch.zeros(2)]
    with pytest.raises(TargetError, match="samples 0, 1 cannot be collated"):
        list(Loader(data, settings(2, 2, shuffle=False)))


def test_bad_settings_and_data() -> None:
    with pytest.raises(TargetError, match="empty"):
        Loader([], settings())
    with pytest.raises(TargetError, match="empty"):
        list(Loader(Stream(0), settings()))
    with pytest.raises(TargetError, match="no full batch of 6"):
        Loader(Augmented(5), settings(drop_last=True))
    with pytest.raises(TargetError, match="no full batch of 6"):
        list(Loader(Stream(5), settings(drop_last=True)))
    with pytest.raises(TargetError, match="int, which is no dataset"):
        Loader(3, settings())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="2 samples is smaller than the 3 ranks"):
        Loader(Augmented(20), settings(batch_size=2, num_ranks=3))
    with pytest.raises(OptionError, match="stream cannot be shuffled"):
        Loader(Stream(5), settings(shuffle=True))
    with pytest.raises(TypeError, match="no length"):
        len(Loader(Stream(5), settings()))


def test_a_dataset_smaller_than_the_ranks_is_a_last_batch() -> None:
    assert [len(batch) for batch in epoch_of(Augmented(3), 5)] == [3]


def test_an_iterator_gives_one_epoch_only() -> None:
    loader = Loader(iter(Augmented(5)[index] for index in range(5)), settings())
    assert [portion.total for portion in loader] == [5]
    with pytest.raises(TargetError, match="once only"):
        list(loader)


class TellsEpoch(Stream):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_stream_that_shuffles_by_itself_is_told_the_epoch() -> None:
    dataset = TellsEpoch(8)
    loader = Loader(dataset, settings())
    seen = []
    for _ in range(3):
        assert sum(portion.total for portion in loader) == 8
        seen.append(dataset.epoch)
    assert seen == [0, 1, 2]


@pytest.mark.slow
@MORE_WORKERS_THAN_CORES
@pytest.mark.parametrize("kind", [Augmented, Stream])
def test_data_workers_change_nothing(kind: type[Any]) -> None:
    expected = epoch_of(kind(20), 1)
    loader = Loader(kind(20), settings(num_workers=3))
    assert [rows(portion) for portion in loader] == expected
    iterator = iter(loader)
    next(iterator)
    assert (loader.epoch, loader.position) == (1, 6)
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 12})
    assert [rows(portion) for portion in loader] == expected[2:]
    loader.close()


@pytest.mark.slow
@MORE_WORKERS_THAN_CORES
@pytest.mark.parametrize("kind", [Augmented, Stream])
def test_an_error_in_a_data_worker_arrives_unchanged(kind: type[Any]) -> None:
    loader = Loader(kind(20, bad=7), settings(num_workers=2))
    with pytest.raises(TargetError, match=r"^sample 7 of the dataset cannot be read") as caught:
        list(loader)
    assert "the planted fault" in caught.value.found
    assert "__getitem__" in caught.value.__notes__[0]


class Dies(Augmented):
    def __getitem__(self, index: int) -> dict[str, Any]:
        os._exit(3)


@pytest.mark.slow
@MORE_WORKERS_THAN_CORES
def test_a_data_worker_that_dies_is_told() -> None:
    with pytest.raises(RankError, match=r"a data worker died[^~]*exited unexpectedly"):
        list(Loader(Dies(20), settings(num_workers=1)))
