"""Fixed records for the tests of `reporting`: invented, small, with every kind of row in them."""

from __future__ import annotations

import math
from dataclasses import replace

from apportion.records import (
    Candidate,
    Checkpointing,
    CheckStatus,
    ClusterSummary,
    CompareRow,
    Comparison,
    Component,
    Estimate,
    Excluded,
    MachineCheck,
    Memory,
    Mesh,
    Method,
    ModelSummary,
    Parity,
    ParityErrors,
    ParityStatus,
    Plan,
    Precision,
    Profile,
    Seconds,
    Stage,
    StepRecord,
    Strategy,
    Worst,
)

GIB = 2**30
MIB = 2**20


def candidate(name: str = "ddp", *, strategy: Strategy = Strategy.DDP, slower: float = 1.0) -> Candidate:
    """Return a data-parallel layout of four ranks; `slower` scales its exchange."""
    seconds = Seconds(compute=0.080, recompute=0.012, dp_exposed=0.020 * slower, optimizer=0.006, other=0.002)
    step = 0.100 + 0.020 * slower
    memory = Memory(
        parameters=475 * MIB,
        gradients=475 * MIB,
        optimizer=950 * MIB,
        activations=6 * GIB,
        communication=100 * MIB,
        other=500 * MIB,
        peak=6 * GIB + 2500 * MIB,
        peak_rank=0,
    )
    return Candidate(
        name=name,
        strategy=strategy,
        mesh=Mesh(dp_replicate=4),
        micro_batch_size=8,
        grad_accumulation=2,
        activation_checkpointing=Checkpointing.SELECTIVE,
        precision=Precision.BF16,
        estimate=Estimate(
            step_seconds=step,
            samples_per_second=64 / step,
            tokens_per_second=64 * 1024 / step,
            tflops_per_device=101.5 / slower,
            mfu=0.325 / slower,
            seconds=seconds,
            memory_bytes=memory,
            cost_per_million_tokens=0.0123 * slower,
        ),
        why=(f"{name} keeps a whole copy on every rank and exchanges gradients once per step",),
    )


def fsdp() -> Candidate:
    """Return a sharded layout that is slower and smaller."""
    base = candidate("fsdp", strategy=Strategy.FSDP, slower=3.0)
    memory = Memory(parameters=119 * MIB, gradients=119 * MIB, optimizer=238 * MIB, activations=6 * GIB)
    estimate = replace(base.estimate, memory_bytes=replace(memory, peak=6 * GIB + 476 * MIB))
    return replace(
        base,
        mesh=Mesh(dp_shard=4),
        zero_stage=3,
        estimate=estimate,
        why=("saves 2.0 GiB that are not needed, and gathers every weight twice per step",),
    )


def plan() -> Plan:
    """Return a plan with a pick, three others and two excluded strategies."""
    best = replace(candidate(), why=(*candidate().why, "the fastest of 4 that fit, by 14 %"))
    zero1 = replace(candidate("zero1", strategy=Strategy.ZERO1, slower=2.0), zero_stage=1)
    return Plan(
        model=ModelSummary(name="gpt", parameters=124_439_808, components=98),
        cluster=ClusterSummary(devices=4, nodes=1, kind="A10G", device_memory_bytes=24 * GIB),
        best=best,
        candidates=(best, zero1, fsdp(), candidate("hsdp 2x2", strategy=Strategy.HSDP, slower=5.0)),
        excluded=(
            Excluded(
                name="single",
                reason="one device cannot hold the activations of 64 samples",
                short_by_bytes=3 * GIB,
                try_="--micro-batch-size 8",
            ),
            Excluded(name="pipeline", reason="not offered by this version"),
        ),
        batch_size=64,
        warnings=("the rates of A10G come from its data sheet; run apportion calibrate for measured ones",),
        searched=96,
        search_seconds=0.0213,
    )


def impossible_plan() -> Plan:
    """Return a plan in which nothing fits."""
    whole = plan()
    return replace(
        whole,
        best=None,
        candidates=(),
        smallest_change="16 devices instead of 4 (fsdp then needs 21.3 GiB of 24.0 GiB)",
        warnings=(),
    )


def component(fqn: str, kind: str, **numbers: int | str | bool) -> Component:
    """Return a component whose figures follow from its parameters unless given."""
    size = int(numbers.pop("parameters", 0))
    fingerprint = str(numbers.pop("fingerprint", fqn))
    block = bool(numbers.pop("block", False))
    return Component(
        fqn=fqn,
        kind=kind,
        depth=len(fqn.split(".")) if fqn else 0,
        parameters=size,
        parameter_bytes=4 * size,
        trainable_parameters=size,
        trainable_bytes=4 * size,
        buffer_bytes=0,
        forward_flops=2 * 1024 * size,
        backward_flops=4 * 1024 * size,
        saved_activation_bytes=40 * size,
        input_bytes=MIB,
        output_bytes=MIB,
        memory_traffic_bytes=0,
        calls=1,
        fingerprint=fingerprint,
        block=block,
        dtypes={"float32": size},
    )


def profile(num_blocks: int = 12) -> Profile:
    """Return a small language model's tree with repeated blocks and a tied head."""
    blocks: list[Component] = []
    for i in range(num_blocks):
        blocks += [
            component(f"h.{i}", "Block", parameters=7_087_872, fingerprint="block", block=True),
            component(f"h.{i}.attn", "Attention", parameters=2_362_368, fingerprint="attn"),
            component(f"h.{i}.mlp", "MLP", parameters=4_722_432, fingerprint="mlp"),
        ]
    return Profile(
        name="gpt",
        components=(
            component("", "GPT", parameters=124_439_808),
            component("wte", "Embedding", parameters=38_597_376),
            *blocks,
            component("ln_f", "LayerNorm", parameters=1536),
            component("lm_head", "Linear", parameters=38_597_376),
        ),
        batch_samples=8,
        tokens_per_sample=1024,
        batch_bytes=65_536,
        loss_bytes=GIB,
        matmul_fraction=0.98,
        method=Method.FAKE,
        shared_parameters=(("wte.weight", "lm_head.weight"),),
        notes=("dropout is not counted",),
    )


def pipeline() -> Candidate:
    """Return a layout with stages of unlike size and tensor parallelism."""
    stages = tuple(
        Stage(stage=i, components=(f"h.{i}",), parameters=size) for i, size in enumerate((4, 2, 1, 1))
    )
    mesh = Mesh(dp_replicate=2, tp=2, pp=4)
    return replace(candidate("pp4 x tp2 x dp2", strategy=Strategy.HYBRID), mesh=mesh, stages=stages)


def steps(count: int, *, start: int = 1) -> tuple[StepRecord, ...]:
    """Return a falling loss with a slow first step and a little noise that is the same every time."""
    return tuple(
        StepRecord(
            step=i,
            epoch=i // 100,
            loss=1.2 + 3.3 * math.exp(-i / 40) + 0.05 * math.sin(i * 1.7),
            grad_norm=1.0 + 0.3 * math.sin(i),
            lr=3e-4 * min(1.0, i / 20),
            samples=64,
            seconds=1.5 if i == 1 else 0.126 + 0.004 * math.sin(i * 0.9),
            tokens_per_second=65_536 / 0.126,
            mfu=0.31,
            memory=9 * GIB,
            tflops=96.8,
        )
        for i in range(start, start + count)
    )


def equal_parity() -> Parity:
    """Return a run that gives the one-device answer."""
    errors = ParityErrors(loss=0.0, gradients=2.1e-7, weights=3.4e-8, buffers=0.0, optimizer=1.2e-7)
    return Parity(
        status=ParityStatus.EQUAL,
        relative_error=errors,
        worst=Worst(name="h.3.attn.qkv.weight", rank=1),
        strategy="ddp",
        world_size=4,
        steps=1,
    )


def wrong_parity() -> Parity:
    """Return a run that differs from one device."""
    return replace(
        equal_parity(),
        status=ParityStatus.WRONG,
        reason="the gradient of h.3.attn.qkv.weight is 4 times too small: a sum was averaged",
        relative_error=ParityErrors(loss=0.0, gradients=0.75, weights=2e-3),
        strategy="zero2",
    )


def refused_parity() -> Parity:
    """Return a run that was refused."""
    return Parity(
        status=ParityStatus.REFUSED,
        reason="batch statistics over micro-batches cannot be streamed",
        strategy="pipeline",
        world_size=4,
    )


def comparison() -> Comparison:
    """Return three strategies measured and one refused; the pick is second."""
    return Comparison(
        rows=(
            CompareRow(
                strategy="ddp",
                predicted_step_seconds=0.120,
                predicted_peak_bytes=9 * GIB,
                measured_step_seconds=0.126,
                measured_peak_bytes=9 * GIB + 300 * MIB,
                loss=2.34567,
            ),
            CompareRow(
                strategy="zero1",
                predicted_step_seconds=0.140,
                predicted_peak_bytes=8 * GIB,
                measured_step_seconds=0.121,
                measured_peak_bytes=8 * GIB,
                loss=2.34567,
            ),
            CompareRow(strategy="dp", reason="needs several GPUs in one process; this machine has none"),
        ),
        pick="ddp",
        best="zero1",
        regret=0.126 / 0.121 - 1,
    )


def checks() -> tuple[MachineCheck, ...]:
    """Return one check of each status."""
    return (
        MachineCheck(name="python", status=CheckStatus.OK, found="3.11.9"),
        MachineCheck(
            name="shared memory",
            status=CheckStatus.WARNING,
            found="64.0 MiB in /dev/shm; data-loading processes pass batches through it",
            fix="start the container with --shm-size=8g, or use --num-workers 0",
        ),
        MachineCheck(
            name="port", status=CheckStatus.PROBLEM, found="29500 is in use", fix="choose another with --port"
        ),
    )
