"""Statistics of the global batch: batch-norm, and the counts under torch's mean losses.

Note [Weights]
Each part's loss is multiplied by its share of the samples, n_part / N, and gradients are summed over parts.
Batch-norm's sums are exchanged in forward and backward, so that factor reaches every gradient once.
A mean loss over a data-dependent count (ignored tokens, class weights) returns
total_part / count_global * N / n_part, whose weighted sum over the parts is total / count of the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from .exchange import Exchange, LocalExchange, Part


class _GlobalBatchNorm(Function):
    """Normalise over all parts.

    Shapes: x (N, C, ...), weight and bias (C). Returns y, mean, biased variance and the global count.
    Model:  Ioffe and Szegedy 2015, section 3; sums are exchanged in float64, so that one exchange suffices.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, part: Part, exchange: Exchange
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        dims = [d for d in range(x.dim()) if d != 1]
        live = 1.0 if part.num_samples else 0.0
        wide = x.double()
        sums = torch.stack(
            [wide.sum(dims), wide.square().sum(dims), torch.full_like(wide.sum(dims), x.numel() / x.size(1))]
        )
        total = exchange.sum(sums * live)
        count = total[2].amax()
        mean = total[0] / count
        var = (total[1] / count - mean.square()).clamp_min_(0)
        invstd = (var + eps).rsqrt()
        shape = [1, -1] + [1] * (x.dim() - 2)
        compute = torch.float64 if x.dtype == torch.float64 else torch.float32
        normed = (x.to(compute) - mean.to(compute).view(shape)) * invstd.to(compute).view(shape)
        y = normed
        if weight is not None:
            y = y * weight.view(shape)
        if bias is not None:
            y = y + bias.view(shape)
        ctx.save_for_backward(normed, invstd, weight)
        ctx.exchange, ctx.count, ctx.has_bias, ctx.live = exchange, count, bias is not None, live
        ctx.mark_non_differentiable(mean, var, count)
        return y.to(x.dtype), mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normed, invstd, weight = ctx.saved_tensors
        dy = grads[0].to(normed.dtype)
        dims = [d for d in range(dy.dim()) if d != 1]
        shape = [1, -1] + [1] * (dy.dim() - 2)
        sum_dy, sum_dy_xhat = dy.double().sum(dims), (dy * normed).double().sum(dims)
        grad_weight = sum_dy_xhat.to(weight.dtype) if weight is not None else None
        grad_bias = sum_dy.to(grads[0].dtype) if ctx.has_bias else None
        total = ctx.exchange.sum(torch.stack([sum_dy, sum_dy_xhat]) * ctx.live) / ctx.count
        scale = invstd if weight is None else invstd * weight.double()
        centred = dy - total[0].to(dy.dtype).view(shape) - normed * total[1].to(dy.dtype).view(shape)
        grad_x = centred * scale.to(dy.dtype).view(shape) * ctx.live
        return grad_x.to(grads[0].dtype), grad_weight, grad_bias, None, None, None


def global_batch_norm(
    part: Part,
    exchange: Exchange,
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`F.batch_norm` in training over the global batch; running statistics are updated once."""
    y, mean, var, count = _GlobalBatchNorm.apply(x, weight, bias, eps, part, exchange)  # type: ignore[no-untyped-call]
    if bool(count <= 1):
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}"
        )
    with torch.no_grad():
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
        if running_var is not None:
            unbiased = var * (count / (count - 1))
            running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    result: torch.Tensor = y
    return result


def weighted_mean_loss(
    func: Any, part: Part, exchange: Exchange, args: Any, kwargs: Any
) -> torch.Tensor | None:
    """Return a mean cross-entropy over the global count (see Note [Weights]), or None where it is not one.

    The count is that of torch: the class weights of the targets that are not ignored
    (torch.nn.CrossEntropyLoss, formula for reduction 'mean').
    """
    names = _LOSS_ARGUMENTS[func]
    values = dict(zip(names, args, strict=False)) | dict(kwargs)
    if values.get("reduction", "mean") != "mean" or values.get("reduce") is False:
        return None
    if values.get("size_average") is False or values["target"].is_floating_point():
        return None
    target, weight = values["target"], values.get("weight")
    total = func(**(values | {"reduction": "sum", "size_average": None, "reduce": None}))
    kept = target != values.get("ignore_index", -100)
    count = kept.sum() if weight is None else (weight[target.clamp_min(0)] * kept).sum()
    live = 1.0 if part.num_samples else 0.0
    counts = exchange.sum(count.to(torch.float64) * live)
    share = part.total / max(1, part.num_samples)
    result: torch.Tensor = total * (share / counts).to(total.dtype)
    return result


_LOSS_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.cross_entropy: (
        "input",
        "target",
        "weight",
        "size_average",
        "ignore_index",
        "reduce",
        "reduction",
        "label_smoothing",
    ),
    F.nll_loss: ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
}


_SUMS = frozenset({torch.sum, torch.Tensor.sum})
_MEANS = frozenset({torch.mean, torch.Tensor.mean})
_MASKS = frozenset({torch.masked_select, torch.Tensor.masked_select, torch.nonzero, torch.Tensor.nonzero})
_SELECTS = frozenset(
    _MASKS
    | {
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.__bool__,
        torch.Tensor.__index__,
    }
)


def _is_full_reduction(func: Any, args: Any, kwargs: Any) -> bool:
    if func not in _SUMS and func not in _MEANS:
        return False
    return len(args) == 1 and kwargs.get("dim") is None and args[0].dim() > 0


def weighted_reduction(func: Any, part: Part, exchange: Exchange, args: Any, kwargs: Any) -> torch.Tensor:
    """Return a full sum or mean inside a loss such that a weighted mean over parts gives that of the batch.

    What carries no gradient (a count of valid tokens) becomes the global value on every rank; what carries
    gradient stays the part's own, scaled by N / n_part (see Note [Weights]).
    """
    x = args[0]
    live = 1.0 if part.num_samples else 0.0
    total = x.sum(dtype=kwargs.get("dtype"))
    if not total.requires_grad:
        return _global_reduction(func, total, x.numel(), live=live, exchange=exchange)
    share = part.total / max(1, part.num_samples)
    if func in _SUMS:
        scaled: torch.Tensor = total * share
        return scaled
    numel = exchange.sum(torch.tensor(x.numel() * live, dtype=torch.float64, device=x.device))
    mean: torch.Tensor = total * (share / numel).to(total.dtype)
    return mean


def _global_reduction(
    func: Any, total: torch.Tensor, numel: int, *, live: float, exchange: Exchange
) -> torch.Tensor:
    pair = torch.stack([total.detach().double(), torch.full_like(total, numel, dtype=torch.float64)])
    sums = exchange.sum(pair * live)
    result = sums[0] if func in _SUMS else sums[0] / sums[1]
    return result.to(total.dtype)


class GlobalStatistics(TorchFunctionMode):
    """Takes batch-norm and, when `weighted`, sums, means and mean cross-entropies over the global batch.

    With `watch` nothing is changed: `num_norms` counts batch-norms in training, `counts` tells that a loss
    divides by a count over the data (`cross`: that of a mean cross-entropy), `selects` that data chose
    elements (`masks`: by a mask) or became Python numbers.
    `losses` holds what weighted_mean_loss returned.
    """

    def __init__(self, part: Part, exchange: Exchange, *, weighted: bool, watch: bool = False) -> None:
        super().__init__()
        self.part, self.exchange, self.weighted, self.watch = part, exchange, weighted, watch
        self.num_norms = 0
        self.counts = False
        self.cross = False
        self.selects = False
        self.masks = False
        self.made: list[tuple[str, tuple[torch.Size, ...], torch.Size]] = []
        self.losses: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm and _is_training(args, kwargs):
            self.num_norms += 1
            if not self.watch and not isinstance(self.exchange, LocalExchange):
                return global_batch_norm(self.part, self.exchange, *args, **kwargs)
            return func(*args, **kwargs)
        if self.watch:
            self._note(func, args, kwargs)
            result = func(*args, **kwargs)
            self._note_shapes(func, args, kwargs, result)
            return result
        if self.weighted:
            if func in _LOSS_ARGUMENTS:
                made = weighted_mean_loss(func, self.part, self.exchange, args, kwargs)
                if made is not None:
                    self.losses.append(made)
                    return made
            elif _is_full_reduction(func, args, kwargs):
                return weighted_reduction(func, self.part, self.exchange, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        if func in _LOSS_ARGUMENTS:
            made = weighted_mean_loss(func, self.part, LocalExchange(), args, kwargs)
            self.counts |= made is not None
            self.cross |= made is not None
        elif _is_full_reduction(func, args, kwargs):
            self.counts |= not args[0].requires_grad
        elif func in _SELECTS or (func is torch.Tensor.__getitem__ and _has_mask(args[1])):
            self.selects = True
            self.masks |= func in _MASKS or func is torch.Tensor.__getitem__

    def _note_shapes(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note what is made of data alone, except by the full reductions, which can be taken over all parts."""
        taken = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if not isinstance(result, torch.Tensor) or not taken or _is_full_reduction(func, args, kwargs):
            return
        if not result.requires_grad and not any(tensor.requires_grad for tensor in taken):
            name = getattr(func, "__name__", "")
            self.made.append((name, tuple(tensor.shape for tensor in taken), result.shape))

    def collapses(self, shorter: GlobalStatistics) -> bool:
        """Whether a value without gradient is made over the batch dimension: its shape is that of `shorter`'s.

        (A count taken with `dim=`, the largest label: no rule but the whole batch is sure to have it.)
        """
        pairs = zip(self.made, shorter.made, strict=False)
        return any(a[1] != b[1] and a[2] == b[2] for a, b in pairs if a[0] == b[0])


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


def _is_training(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("training", args[5] if len(args) > 5 else False))
