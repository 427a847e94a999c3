"""From the books of a run to the records: sums over subtrees, copies of repeated blocks, the cut level."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ..records import Component, Method, Profile
from .blocks import cut_level
from .fake import Run, Subject
from .fingerprint import combine
from .operators import tensors_in
from .trace import Cost, Trace

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What the caller says about the profile: names, sample counts, how it was found, remarks."""

    name: str
    batch_samples: int
    tokens_per_sample: int
    method: Method
    notes: tuple[str, ...]
    scale: float = 1.0


def assemble(run: Run, subject: Subject, fingerprints: Mapping[str, str], labels: Labels) -> Profile:
    """Return the profile of a finished run; per-batch numbers are multiplied by `labels.scale`."""
    trace = run.trace
    modules = dict(zip(trace.names, trace.modules, strict=True))
    _copy_repeated(trace)
    costs = [_scaled(cost, labels.scale) for cost in trace.costs]
    components = _components(modules, costs, _full_fingerprints(trace, fingerprints), fingerprints)
    forward = components[0].forward_flops
    pointwise = sum(cost.pointwise_flops for cost in costs)
    parameters = dict(subject.module.named_parameters())
    held = [p.numel() * p.element_size() for p in parameters.values()]
    return Profile(
        name=labels.name,
        components=components,
        batch_samples=labels.batch_samples,
        tokens_per_sample=labels.tokens_per_sample,
        batch_bytes=round(sum(t.nbytes for t in tensors_in(subject.batch)) * labels.scale),
        loss_bytes=round(trace.loss_bytes * labels.scale),
        matmul_fraction=forward / (forward + pointwise) if forward else 0.0,
        method=labels.method,
        shared_parameters=_shared(subject.module),
        batch_norms=tuple(name for name, module in modules.items() if isinstance(module, BATCH_NORMS)),
        sparse_parameters=_sparse(modules),
        scalar_parameters=tuple(name for name, p in parameters.items() if p.dim() == 0),
        unused_parameters=_unused(run, modules),
        largest_tensor_bytes=max([round(trace.largest_bytes * labels.scale), *held]),
        notes=(*labels.notes, *_remarks(run)),
    )


def _remarks(run: Run) -> tuple[str, ...]:
    if run.no_backward:
        return ("The loss does not depend on any trainable parameter: there is no backward to count.",)
    return ()


def _copy_repeated(trace: Trace) -> None:
    """Give each block that was answered for the costs of the block it repeats, all submodules included."""
    if trace.repeats is None:
        return
    index = {name: i for i, name in enumerate(trace.names)}
    for target, source in trace.repeats.sources.items():
        head = trace.names[source]
        for i, name in enumerate(trace.names):
            if name == head or name.startswith(f"{head}."):
                twin = index[trace.names[target] + name[len(head) :]]
                trace.costs[twin] = dataclasses.replace(trace.costs[i])
                trace.signatures[twin] = trace.signatures[i]


def _scaled(cost: Cost, scale: float) -> Cost:
    if scale == 1.0:
        return cost
    values = {field.name: round(getattr(cost, field.name) * scale) for field in dataclasses.fields(cost)}
    return Cost(**(values | {"calls": cost.calls}))


def _full_fingerprints(trace: Trace, fingerprints: Mapping[str, str]) -> list[str]:
    return [
        combine(fingerprints[name], signature)
        for name, signature in zip(trace.names, trace.signatures, strict=True)
    ]


def _own_tensors(modules: Mapping[str, nn.Module]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Return each module's own parameters and buffers; a shared one is counted on its first owner."""
    seen: set[int] = set()
    parameters: list[list[Tensor]] = []
    buffers: list[list[Tensor]] = []
    for module in modules.values():
        for found, tensors in (
            (parameters, module.parameters(recurse=False)),
            (buffers, module.buffers(recurse=False)),
        ):
            own = [tensor for tensor in tensors if id(tensor) not in seen]
            seen.update(id(tensor) for tensor in own)
            found.append(own)
    return parameters, buffers


def _components(
    modules: Mapping[str, nn.Module],
    costs: Sequence[Cost],
    full: Sequence[str],
    static: Mapping[str, str],
) -> tuple[Component, ...]:
    parameters, buffers = _own_tensors(modules)
    names = list(modules)
    index = {name: i for i, name in enumerate(names)}
    sums = [_Sums.of(*own) for own in zip(costs, parameters, buffers, strict=True)]
    for i in range(len(names) - 1, 0, -1):
        sums[index[names[i].rpartition(".")[0]]].add(sums[i])
    blocks = set(cut_level(modules, static, _weights(names, sums)))
    firsts: dict[str, str] = {}
    return tuple(
        _component(
            name,
            type(modules[name]).__name__,
            costs[i],
            sums[i],
            fingerprint=full[i],
            repeats="" if (first := firsts.setdefault(full[i], name)) == name else first,
            block=name in blocks and (sums[i].parameters > 0 or sums[i].buffer_bytes > 0 or sums[i].called),
        )
        for i, name in enumerate(names)
    )


def _weights(names: Sequence[str], sums: Sequence[_Sums]) -> dict[str, float]:
    parameters, flops = max(sums[0].parameters, 1), max(sums[0].forward_flops, 1)
    return {
        name: max(total.parameters / parameters, total.forward_flops / flops)
        for name, total in zip(names, sums, strict=True)
    }


@dataclasses.dataclass(slots=True)
class _Sums:
    """Numbers of a module with its children. Units as in `Component`."""

    parameters: int
    parameter_bytes: int
    trainable_parameters: int
    trainable_bytes: int
    buffer_bytes: int
    forward_flops: int
    backward_flops: int
    saved_bytes: int
    traffic_bytes: int
    called: bool
    dtypes: Counter[str]

    @classmethod
    def of(cls, cost: Cost, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> _Sums:
        trained = [p for p in parameters if p.requires_grad]
        dtypes: Counter[str] = Counter()
        for p in parameters:
            dtypes[str(p.dtype).removeprefix("torch.")] += p.numel()
        return cls(
            parameters=sum(p.numel() for p in parameters),
            parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
            trainable_parameters=sum(p.numel() for p in trained),
            trainable_bytes=sum(p.numel() * p.element_size() for p in trained),
            buffer_bytes=sum(b.numel() * b.element_size() for b in buffers),
            forward_flops=cost.forward_flops,
            backward_flops=cost.backward_flops,
            saved_bytes=cost.saved_bytes,
            traffic_bytes=cost.traffic_bytes,
            called=cost.calls > 0,
            dtypes=dtypes,
        )

    def add(self, child: _Sums) -> None:
        for field in dataclasses.fields(self):
            if field.name not in ("called", "dtypes"):
                setattr(self, field.name, getattr(self, field.name) + getattr(child, field.name))
        self.called = self.called or child.called
        self.dtypes.update(child.dtypes)


def _component(
    fqn: str, kind: str, cost: Cost, sums: _Sums, *, fingerprint: str, repeats: str, block: bool
) -> Component:
    return Component(
        fqn=fqn,
        kind=kind,
        depth=fqn.count(".") + 1 if fqn else 0,
        parameters=sums.parameters,
        parameter_bytes=sums.parameter_bytes,
        trainable_parameters=sums.trainable_parameters,
        trainable_bytes=sums.trainable_bytes,
        buffer_bytes=sums.buffer_bytes,
        forward_flops=sums.forward_flops,
        backward_flops=sums.backward_flops,
        saved_activation_bytes=sums.saved_bytes,
        input_bytes=cost.input_bytes,
        output_bytes=cost.output_bytes,
        memory_traffic_bytes=sums.traffic_bytes,
        calls=cost.calls,
        fingerprint=fingerprint,
        repeats=repeats,
        block=block,
        dtypes=dict(sums.dtypes),
    )


def _shared(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _sparse(modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    return tuple(
        f"{name}.weight" if name else "weight"
        for name, module in modules.items()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    )


def _unused(run: Run, modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Return the unused parameters; a block that was answered for uses what the block it repeats uses."""
    sources = run.trace.repeats.sources if run.trace.repeats is not None else {}
    copied = {run.trace.names[target]: run.trace.names[source] for target, source in sources.items()}
    unused = set(run.unused)
    found = []
    for owner, module in modules.items():
        for name, _ in module.named_parameters(prefix=owner, recurse=False):
            if (_twin(name, copied) or name) in unused:
                found.append(name)
    return tuple(found)


def _twin(name: str, copied: Mapping[str, str]) -> str | None:
    """Return the name in the copied block for a parameter of a block that was answered for."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        head = ".".join(parts[:end])
        if head in copied:
            return ".".join([copied[head], *parts[end:]])
    return None
