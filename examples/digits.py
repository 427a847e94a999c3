"""A small ResNet and a small vision transformer on scikit-learn's 1,797 handwritten digits (8 x 8 pixels).

An ordinary PyTorch file. `model` is the ResNet, whose batch-norms make it the harder one to split exactly;
`digits.py:vit` names the transformer instead.

    apportion train examples/digits.py --devices local:2 --epochs 8 --batch-size 32
    apportion train examples/digits.py:vit --devices local:2 --epochs 20 --batch-size 32

Nothing is downloaded: the digits come with scikit-learn (Alpaydin and Kaynak 1998, UCI repository).
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset

width = 16  # channels of the ResNet's first part
n_layer = 3
n_embd = 64
n_head = 4
patch = 2  # pixels on a side
dropout = 0.05  # in the transformer

lr = 3e-3
weight_decay = 0.05
half_life = 200
num_validation = 360  # a fifth


class Residual(nn.Module):
    """Two 3x3 convolutions with batch-norm, added to the input (He et al. 2015)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Three residual blocks, each but the first at half the resolution and twice the channels of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(
            [Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)]
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(image)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Encoder(nn.Module):
    """Attention between the patches and a two-layer network, each added to its normalised input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(n_embd)
        self.attention = nn.MultiheadAttention(n_embd, n_head, bias=False, batch_first=True)
        self.norm2 = nn.LayerNorm(n_embd)
        self.up = nn.Linear(n_embd, 2 * n_embd)
        self.down = nn.Linear(2 * n_embd, n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, y, need_weights=False)[0])
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class ViT(nn.Module):
    """Patches as words (Dosovitskiy et al. 2020), classified from their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, n_embd, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn((8 // patch) ** 2, n_embd))
        self.blocks = nn.ModuleList(Encoder() for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.embed(image).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def model() -> nn.Module:
    return ResNet()


def vit() -> nn.Module:
    return ViT()


def data(split: str) -> Dataset[tuple[torch.Tensor, ...]]:
    """Return (image (1, 8, 8) from -1 to 1, digit) pairs; the split is the same every time."""
    digits = load_digits()
    image = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    label = torch.tensor(digits.target)
    order = torch.randperm(len(label), generator=torch.Generator().manual_seed(0))
    chosen = order[:num_validation] if split == "validation" else order[num_validation:]
    return TensorDataset(image[chosen], label[chosen])


def forward(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return model(batch[0])


def loss(output: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


def metrics(output: torch.Tensor, batch: list[torch.Tensor]) -> dict[str, float]:
    return {"accuracy": (output.argmax(-1) == batch[1]).double().mean().item()}


def optimizer(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Half the rate after `half_life` steps, a third after twice as many, and so on."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / half_life))
