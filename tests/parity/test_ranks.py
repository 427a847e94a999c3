"""The helper that starts gloo processes reports results in order, and failures with their cause."""

from __future__ import annotations

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from ranks import RankFailed, RankPool, run_ranks

pytestmark = pytest.mark.slow


def total(rank: int, start: float) -> torch.Tensor:
    value = torch.tensor([start + rank])
    dist.all_reduce(value)
    return torch.cat([value, torch.tensor([float(rank), float(torch.get_num_threads())])])


def fail(rank: int, how: str) -> None:
    if rank == 1:
        if how == "raise":
            raise ValueError("the planted fault")
        if how == "warn":
            warnings.warn("a planted warning", stacklevel=1)
        if how == "die":
            os._exit(7)
        time.sleep(60)
    dist.barrier()


def test_results_come_in_rank_order_and_the_pool_survives_a_failure() -> None:
    with RankPool(2) as pool:
        first = pool.run(total, 10.0)
        assert [row.tolist() for row in first] == [[21.0, 0.0, 1.0], [21.0, 1.0, 1.0]]
        for how, message in (
            ("raise", "the planted fault"),
            ("warn", "a planted warning"),
            ("die", "exit code 7"),
        ):
            with pytest.raises(RankFailed, match=f"rank 1 of 2 failed first:[^~]*{message}"):
                pool.run(fail, how)
        assert pool.run(total, 0.0)[0].tolist() == [1.0, 0.0, 1.0]


def test_a_hung_rank_is_stopped() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"no answer within 6 s|imed out"):
        run_ranks(fail, 2, "hang", timeout_s=6.0)
    assert time.monotonic() - start < 20
