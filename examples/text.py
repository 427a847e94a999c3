"""A small GPT that learns the bytes of Python's own standard library.

An ordinary PyTorch file: functions that a training tool finds by name, and constants it can override.

    apportion train examples/text.py --devices local:2 --steps 200
    apportion plan examples/text.py --devices 8xH100 --set n_layer=48 --set n_embd=6144 --set n_head=48

Nothing is downloaded: the text is the standard library of the Python that runs this file.
"""

import math
import os
import sys
import sysconfig
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

n_layer = 3
n_embd = 160
n_head = 5
seq_len = 64
dropout = 0.0

lr = 1e-3
warmup_steps = 20
total_steps = 200

corpus_bytes = 4_000_000
vocab_size = 256
holdout = 20  # every 20th window is for validation


class Block(nn.Module):
    """Attention and a two-layer network, each added to its normalised input (GPT-2's order)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(n_embd)
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.proj = nn.Linear(n_embd, n_embd)
        self.norm2 = nn.LayerNorm(n_embd)
        self.up = nn.Linear(n_embd, 4 * n_embd)
        self.down = nn.Linear(4 * n_embd, n_embd)
        self.dropout = nn.Dropout(dropout)
        self.n_head = n_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attend(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Bytes (samples, positions) in, a score for each possible next byte (samples, positions, 256) out."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, n_embd)
        self.position = nn.Embedding(seq_len, n_embd)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        self.apply(init_weights)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def init_weights(module: nn.Module) -> None:
    """GPT-2's initialisation (Radford et al. 2019): normal with deviation 0.02, biases 0."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@cache
def corpus() -> torch.Tensor:
    """Return the standard library's top-level modules, in order of their names, as one tensor of bytes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= corpus_bytes:
            break
    return torch.frombuffer(text[:corpus_bytes], dtype=torch.uint8)


@cache
def unigram_entropy() -> float:
    """Return what the best guess that ignores the context would lose, in nats per byte."""
    counts = torch.bincount(corpus().long(), minlength=vocab_size).double()
    return torch.special.entr(counts / counts.sum()).sum().item()


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Consecutive windows of the corpus: `tokens` and, one byte further, `targets`, both (T)."""

    def __init__(self, split: str) -> None:
        count = (len(corpus()) - 1) // seq_len
        self.starts = [i * seq_len for i in range(count) if (i % holdout == 0) == (split == "validation")]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = self.starts[index]
        window = corpus()[start : start + seq_len + 1].long()
        return {"tokens": window[:-1], "targets": window[1:]}


def model() -> nn.Module:
    return GPT()


def data(split: str) -> Dataset[dict[str, torch.Tensor]]:
    if split == "train" and os.environ.get("RANK") == "0":
        facts = f"{len(corpus()):,} bytes, unigram entropy {unigram_entropy():.4f} nats per byte"
        print(f"corpus: {facts}", file=sys.stderr)
    return Windows(split)


def forward(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["tokens"])


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


def metrics(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    accuracy = (output.argmax(-1) == batch["targets"]).double().mean().item()
    return {"accuracy": accuracy, "unigram_entropy": unigram_entropy()}


def optimizer(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Linear warm-up, then a cosine down to a tenth at `total_steps`."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
