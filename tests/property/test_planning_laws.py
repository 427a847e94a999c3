"""Laws that every plan keeps, whatever the model, the machines and the limits."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.describing import cluster_from_toml, cluster_to_toml, describe
from apportion.describing.machine import GLOO_LINK, cpu_cluster
from apportion.planning import make_plan
from apportion.records import (
    Checkpointing,
    Cluster,
    Limits,
    Plan,
    Profile,
    Strategy,
    from_json_text,
    to_json_text,
)
from published import Shape, transformer_profile

LAWS = settings(max_examples=40, deadline=None)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """A transformer, sometimes with batch-norm."""
    heads = draw(st.sampled_from([2, 4, 8]))
    shape = Shape(
        name="drawn",
        layers=draw(st.integers(1, 24)),
        hidden=heads * draw(st.sampled_from([32, 64, 128])),
        heads=heads,
        kv_heads=draw(st.sampled_from([1, 2])),
        ffn=draw(st.integers(64, 4096)),
        vocab=draw(st.integers(16, 60000)),
        tokens=draw(st.sampled_from([1, 64, 1024])),
        gated=draw(st.booleans()),
        tied=draw(st.booleans()),
    )
    profile = transformer_profile(shape, samples=draw(st.integers(1, 4)))
    return replace(profile, batch_norms=("h.0.norm1",) if draw(st.booleans()) else ())


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """GPUs of the catalogue in some nodes, or CPU ranks."""
    if draw(st.booleans()):
        return cpu_cluster(
            draw(st.integers(1, 6)),
            peaks={"fp32": 2e11, "bf16": 4e11},
            memory_rate=2e10,
            link=GLOO_LINK,
            cores=4,
            memory_bytes=draw(st.integers(2**30, 2**37)),
        )
    kind = draw(st.sampled_from(["H100", "A100-40GB", "T4", "L4", "MI300X"]))
    return describe(f"{draw(st.integers(1, 3))}x{draw(st.sampled_from([1, 2, 4, 8]))}x{kind}")


@st.composite
def limits_for(draw: st.DrawFn, cluster: Cluster) -> Limits:
    return Limits(
        batch_size=cluster.num_devices * draw(st.integers(1, 8)) + draw(st.integers(0, 3)),
        activation_checkpointing=draw(st.sampled_from([None, *Checkpointing])),
        optimizer=draw(st.sampled_from(["adamw", "sgd", "adafactor"])),
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[Profile, Cluster, Limits]:
    cluster = draw(clusters())
    return draw(profiles()), cluster, draw(limits_for(cluster))


def with_memory(cluster: Cluster, factor: float) -> Cluster:
    nodes = tuple(
        replace(node, device=replace(node.device, memory_bytes=int(node.device.memory_bytes * factor)))
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


@LAWS
@given(situations(), st.floats(1.0, 16.0))
def test_more_memory_never_makes_a_plan_slower(
    situation: tuple[Profile, Cluster, Limits], factor: float
) -> None:
    profile, cluster, limits = situation
    less = make_plan(profile, cluster, limits).best
    more = make_plan(profile, with_memory(cluster, factor), limits).best
    if less is not None:
        assert more is not None
        assert more.estimate.step_seconds <= less.estimate.step_seconds


@LAWS
@given(situations())
def test_parts_add_up_and_what_fits_fits(situation: tuple[Profile, Cluster, Limits]) -> None:
    profile, cluster, limits = situation
    plan = make_plan(profile, cluster, limits)
    for candidate in plan.candidates:
        seconds, memory = candidate.estimate.seconds, candidate.estimate.memory_bytes
        parts = [getattr(seconds, field.name) for field in fields(seconds)]
        assert sum(parts) == pytest.approx(candidate.estimate.step_seconds, rel=1e-9)
        assert min(parts) >= 0
        named = ("parameters", "gradients", "optimizer", "activations", "communication", "other")
        assert sum(getattr(memory, name) for name in named) == memory.peak
        assert candidate.fits == (memory.peak <= cluster.device.memory_bytes)
        assert 0 < candidate.estimate.mfu < 1


@LAWS
@given(situations(), st.integers(2**28, 2**36))
def test_a_memory_limit_is_kept(situation: tuple[Profile, Cluster, Limits], limit: int) -> None:
    profile, cluster, limits = situation
    plan = make_plan(profile, cluster, replace(limits, memory_bytes=limit))
    for candidate in plan.candidates:
        assert candidate.estimate.memory_bytes.peak <= limit
    assert (plan.best is None) == (plan.smallest_change != "")


@LAWS
@given(situations())
def test_every_strategy_is_accounted_for(situation: tuple[Profile, Cluster, Limits]) -> None:
    plan = make_plan(*situation)
    shown = {candidate.strategy.value for candidate in plan.candidates}
    assert shown | {item.name for item in plan.excluded} == {strategy.value for strategy in Strategy}
    assert not shown & {item.name for item in plan.excluded}
    assert all(item.reason for item in plan.excluded)


@LAWS
@given(situations())
def test_every_layout_covers_the_batch(situation: tuple[Profile, Cluster, Limits]) -> None:
    profile, cluster, limits = situation
    for candidate in make_plan(profile, cluster, limits).candidates:
        local = -(-limits.batch_size // candidate.mesh.num_data_ranks)
        passes = candidate.grad_accumulation
        assert (passes - 1) * candidate.micro_batch_size < local <= passes * candidate.micro_batch_size
        assert passes == 1 or not profile.batch_norms
        assert candidate.mesh.num_ranks == cluster.num_devices


@LAWS
@given(situations())
def test_plans_and_clusters_round_trip(situation: tuple[Profile, Cluster, Limits]) -> None:
    plan = make_plan(*situation)
    assert from_json_text(Plan, to_json_text(plan)) == plan
    assert cluster_from_toml(cluster_to_toml(situation[1])) == situation[1]
