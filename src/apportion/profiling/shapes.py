"""What the common operators return on meta tensors, without torch's own Python rules.

Torch's rules for the meta device are written in Python: their first use imports `torch._dynamo` and sympy
(longer than `import torch` itself) and each call takes about 0.1 ms. The rules here cover the plain cases of
the operators that training uses most; every other case is answered `NotImplemented`, and torch is asked.
`tests/unit/test_profiling_shapes.py` compares each rule with torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import shapes_layers as layers
from . import shapes_pointwise as pointwise

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}

UNARY = ("relu", "gelu", "silu", "tanh", "sigmoid", "exp", "neg", "cos", "sin", "rsqrt", "sqrt", "log", "abs")
BINARY = ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum", "minimum", "rsub.Scalar")
BINARY_SCALAR = ("pow.Tensor_Scalar", "mul.Scalar", "div.Scalar", "add.Scalar", "sub.Scalar")
COMPARE = ("eq", "ne", "lt", "gt", "le", "ge")
IN_PLACE = (
    "add_.Tensor",
    "sub_.Tensor",
    "mul_.Tensor",
    "div_.Tensor",
    "mul_.Scalar",
    "div_.Scalar",
    "relu_",
    "sigmoid_",
    "tanh_",
    "silu_",
    "zero_",
    "fill_.Scalar",
    "fill_.Tensor",
    "masked_fill_.Scalar",
    "bernoulli_.float",
    "normal_",
    "uniform_",
)


def _register() -> None:
    for names, rule in (
        (UNARY, pointwise.unary),
        (BINARY + BINARY_SCALAR, pointwise.binary),
        (IN_PLACE, pointwise.in_place),
        (tuple(f"{name}.{kind}" for name in COMPARE for kind in ("Scalar", "Tensor")), pointwise.compare),
        (("sum.dim_IntList", "mean.dim"), pointwise.reduce),
        (("sum", "mean"), pointwise.reduce_all),
        (("_softmax", "_log_softmax", "_safe_softmax"), layers.softmax),
        (("_softmax_backward_data", "_log_softmax_backward_data"), layers.softmax_backward),
        (("gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward"), layers.like_both),
        (("threshold_backward",), layers.like_both),
        (("zeros_like", "ones_like", "empty_like"), pointwise.filled_like),
        (("zeros", "ones", "empty.memory_format"), pointwise.factory),
        (("new_zeros", "new_ones", "new_empty", "new_full"), pointwise.new),
        (("arange", "arange.start", "arange.start_step"), pointwise.arange),
        (("slice_backward", "select_backward"), pointwise.input_sizes),
        (("mm", "bmm"), layers.mm),
        (("_ctc_loss", "_ctc_loss.Tensor"), layers.ctc),
        (("_ctc_loss_backward", "_ctc_loss_backward.Tensor"), layers.ctc_backward),
    ):
        RULES.update(dict.fromkeys(names, rule))
    RULES.update(_SINGLE)


_SINGLE: dict[str, Rule] = {
    "where.self": pointwise.where,
    "masked_fill.Scalar": pointwise.masked_fill,
    "clone": pointwise.clone,
    "addmm": layers.addmm,
    "_grouped_mm": layers.grouped_mm,
    "native_layer_norm": layers.layer_norm,
    "native_layer_norm_backward": layers.layer_norm_backward,
    "native_batch_norm": layers.batch_norm,
    "native_batch_norm_backward": layers.batch_norm_backward,
    "convolution": layers.convolution,
    "convolution_backward": layers.convolution_backward,
    "embedding": layers.embedding,
    "embedding_dense_backward": layers.embedding_backward,
    "nll_loss_forward": layers.nll,
    "nll_loss_backward": layers.nll_backward,
    "cat": pointwise.cat,
    "stack": pointwise.stack,
    "_unsafe_view": pointwise.unsafe_view,
    "unsafe_split.Tensor": pointwise.unsafe_split,
    "new_empty_strided": pointwise.new_strided,
    "scalar_tensor": pointwise.scalar,
    "native_dropout": layers.dropout,
    "native_dropout_backward": layers.dropout_backward,
    "_scaled_dot_product_flash_attention_for_cpu": layers.attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": layers.attention_backward,
}
_register()


def infer(operator: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what the operator (`aten` name with its overload, `.default` left out) gives on meta tensors.

    `NotImplemented` means that no rule here covers the case.
    """
    rule = RULES.get(operator)
    return NotImplemented if rule is None else rule(*args, **kwargs)
