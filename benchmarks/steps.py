"""The step of a session against the hand-written PyTorch loop that does the same, side by side in one run.

    python benchmarks/steps.py            # a table: seconds per step, ratio, peak memory

Two gloo processes with one thread each hold both, and take turns in short rounds: the hand-written loop (DDP or
`fully_shard`, loss averaged over ranks for the log, clipping by the global norm, AdamW) and `session.step`.
The ratio is the median over rounds of the ratios of their median steps. Peak memory comes from processes of
their own, one for each side: the largest resident set above that before the model was built.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import apportion

ROUNDS, STEPS, WARM_UP = 9, 4, 3
RANKS = 2
Step = Callable[[], float]


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(a))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    def __init__(self, dropout: float = 0.0, width: int = 256, depth: int = 6, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


CASES = {
    "decoder, ddp": ("ddp", 0.0),
    "decoder, fsdp": ("fsdp", 0.0),
    "decoder with dropout, ddp": ("ddp", 0.1),
}


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 256, (16, 129), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _hand_written(strategy: str, dropout: float) -> Step:
    torch.manual_seed(0)
    model: nn.Module = Decoder(dropout)
    if strategy == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        wrapped: nn.Module = fully_shard(model, reshard_after_forward=False)
    else:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    rows = 16 // RANKS
    batch = tuple(t[dist.get_rank() * rows :][:rows] for t in _batch())

    def step() -> float:
        value = loss(wrapped(batch[0]), batch)
        value.backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        shown = value.detach().clone()
        dist.all_reduce(shown)
        return float(shown) / RANKS

    return step


def _session(strategy: str, dropout: float) -> Step:
    torch.manual_seed(0)
    model = Decoder(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    example = _batch()
    session = apportion.parallelize(model, optimizer, loss=loss, example=example, plan=strategy, clip_norm=1.0)
    return lambda: session.step(example).loss


def _timed(step: Step, count: int) -> float:
    seconds = []
    for _ in range(count):
        dist.barrier()
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _start(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)


def _race(rank: int, port: int, case: tuple[str, float], answers: Any) -> None:
    _start(rank, port)
    hand, session = _hand_written(*case), _session(*case)
    _timed(hand, WARM_UP), _timed(session, WARM_UP)
    rounds = []
    for index in range(ROUNDS):
        first, second = (hand, session) if index % 2 == 0 else (session, hand)
        a, b = _timed(first, STEPS), _timed(second, STEPS)
        rounds.append((a, b) if index % 2 == 0 else (b, a))
    if rank == 0:
        answers.put(rounds)
    dist.destroy_process_group()


def _weigh(rank: int, port: int, build: Callable[..., Step], case: tuple[str, float], answers: Any) -> None:
    _start(rank, port)
    # Both sides have the other's libraries loaded, so that only the model and its step are weighed.

    import apportion.running.parallel  # noqa: F401

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = build(*case)
    for _ in range(WARM_UP + STEPS):
        step()
    if rank == 0:
        answers.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    dist.destroy_process_group()


def _in_ranks(work: Callable[..., None], port: int, *arguments: Any) -> Any:
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, args=(port, *arguments, answers), nprocs=RANKS)
    return answers.get()


def main() -> int:
    print(f"{'case':28}  {'by hand':>9}  {'session':>9}  {'ratio':>6}  {'spread':>13}  {'memory ratio':>12}")
    for index, (name, case) in enumerate(CASES.items()):
        port = 29600 + 3 * index
        rounds = _in_ranks(_race, port, case)
        ratios = sorted(b / a for a, b in rounds)
        hand, session = (statistics.median(r[i] for r in rounds) for i in (0, 1))
        weights = [_in_ranks(_weigh, port + 1 + i, b, case) for i, b in enumerate((_hand_written, _session))]
        print(
            f"{name:28}  {hand * 1e3:6.1f} ms  {session * 1e3:6.1f} ms  {statistics.median(ratios):6.3f}  "
            f"{ratios[1]:.3f} - {ratios[-2]:.3f}  {weights[1] / weights[0]:12.3f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
