"""Collectives, compute, memory and whole estimates against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from apportion.costing import (
    OPTIMIZERS,
    STRATEGIES,
    Group,
    Layout,
    all_gather_seconds,
    all_reduce_seconds,
    broadcast_seconds,
    estimate,
    find_optimizer,
    reduce_scatter_seconds,
    summarize,
    weakest_device,
)
from apportion.describing import describe
from apportion.describing.machine import GLOO_LINK, cpu_cluster
from apportion.errors import OptionError
from apportion.records import (
    Checkpointing,
    Cluster,
    Component,
    Estimate,
    Link,
    Mesh,
    Precision,
    Profile,
    Strategy,
)
from published import Shape, transformer_profile

TINY = Shape(
    name="tiny", layers=4, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=1000, tokens=128, tied=False
)
GPT2 = Shape(name="gpt2", layers=12, hidden=768, heads=12, kv_heads=12, ffn=3072, vocab=50257, tokens=1024)
CPU = cpu_cluster(
    2, peaks={"fp32": 2e11, "bf16": 4e11}, memory_rate=2e10, link=GLOO_LINK, cores=2, memory_bytes=2**35
)
FAST = Link(kind="measured", bandwidth_bytes_per_second=100.0, latency_seconds=1.0)
SLOW = Link(kind="measured", bandwidth_bytes_per_second=10.0, latency_seconds=3.0)
MESHES = {
    Strategy.SINGLE: Mesh(),
    Strategy.DP: Mesh(dp_replicate=8),
    Strategy.DDP: Mesh(dp_replicate=8),
    Strategy.ZERO1: Mesh(dp_replicate=8),
    Strategy.ZERO2: Mesh(dp_shard=8),
    Strategy.FSDP: Mesh(dp_shard=8),
    Strategy.HSDP: Mesh(dp_replicate=2, dp_shard=4),
    Strategy.NAIVE: Mesh(pp=8),
}


def layout_of(strategy: Strategy, *, local_batch: int = 8, passes: int = 1, **options: object) -> Layout:
    mesh = MESHES[strategy]
    return Layout(  # type: ignore[arg-type]
        strategy=strategy,
        mesh=mesh,
        batch_size=local_batch * mesh.num_data_ranks,
        micro_batch_size=local_batch // passes,
        grad_accumulation=passes,
        num_devices=1 if strategy is Strategy.SINGLE else 8,
        **options,
    )


def priced(profile: Profile, cluster: Cluster, layout: Layout) -> Estimate:
    return estimate(summarize(profile), cluster, layout)


def test_rings_within_a_node() -> None:
    group = Group(num_nodes=1, ranks_per_node=4, intra_node=FAST, inter_node=SLOW)
    assert all_gather_seconds(400.0, group) == pytest.approx(0.75 * 4 + 3)
    assert reduce_scatter_seconds(400.0, group) == all_gather_seconds(400.0, group)
    assert all_reduce_seconds(400.0, group) == pytest.approx(2 * (0.75 * 4 + 3))
    assert broadcast_seconds(400.0, group) == pytest.approx(4 + 3)


def test_rings_across_nodes_take_the_slower_stage() -> None:
    group = Group(num_nodes=2, ranks_per_node=4, intra_node=FAST, inter_node=SLOW)
    between = 0.5 * 400 / 4 / 10
    assert between > 0.75 * 4
    assert all_gather_seconds(400.0, group) == pytest.approx(between + 3 * 1 + 1 * 3)


def test_one_rank_sends_nothing() -> None:
    alone = Group(num_nodes=1, ranks_per_node=1, intra_node=FAST, inter_node=SLOW)
    for collective in (all_gather_seconds, reduce_scatter_seconds, all_reduce_seconds, broadcast_seconds):
        assert collective(1e9, alone) == 0.0
    with pytest.raises(ValueError, match="at least one rank"):
        Group(num_nodes=0, ranks_per_node=1, intra_node=FAST, inter_node=SLOW)


def test_links_reach_less_than_their_rate() -> None:
    nvlink = replace(FAST, kind="nvlink", latency_seconds=0.0)
    measured = replace(FAST, latency_seconds=0.0)
    slow = Group(num_nodes=1, ranks_per_node=2, intra_node=nvlink, inter_node=SLOW)
    plain = Group(num_nodes=1, ranks_per_node=2, intra_node=measured, inter_node=SLOW)
    assert all_gather_seconds(100.0, slow) > all_gather_seconds(100.0, plain)


def test_gloo_gathers_no_faster_than_it_reduces() -> None:
    group = Group(num_nodes=1, ranks_per_node=2, intra_node=GLOO_LINK, inter_node=GLOO_LINK)
    assert all_gather_seconds(2**24, group) == pytest.approx(all_reduce_seconds(2**24, group))
    assert reduce_scatter_seconds(2**24, group) > all_reduce_seconds(2**24, group)


def test_equal_blocks_are_counted_once() -> None:
    workload = summarize(transformer_profile(GPT2))
    assert len(workload.fqns) == 15
    assert sorted(block.count for block in workload.blocks) == [1, 1, 1, 12]
    held = sum(block.parameter_bytes * block.count for block in workload.blocks)
    assert held + workload.rest.parameter_bytes == workload.parameter_bytes


def test_tied_tensors_belong_to_the_rest() -> None:
    tied = summarize(transformer_profile(GPT2))
    free = summarize(transformer_profile(replace(GPT2, tied=False)))
    table = 4 * GPT2.vocab * GPT2.hidden
    assert tied.rest.parameter_bytes == table
    assert free.rest.parameter_bytes == 0
    assert free.parameter_bytes - tied.parameter_bytes == table


def test_profiles_scale_with_the_batch() -> None:
    assert summarize(transformer_profile(TINY, samples=1)).forward_flops == pytest.approx(
        summarize(transformer_profile(TINY, samples=8)).forward_flops
    )


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("cluster", [describe("8xH100"), describe("2x4xA100-40GB")], ids=["node", "nodes"])
def test_parts_add_up(strategy: Strategy, cluster: Cluster) -> None:
    found = priced(transformer_profile(GPT2), cluster, layout_of(strategy, precision=Precision.BF16))
    parts = [getattr(found.seconds, field.name) for field in fields(found.seconds)]
    assert sum(parts) == pytest.approx(found.step_seconds, rel=1e-12)
    assert min(parts) >= 0
    memory = found.memory_bytes
    names = ("parameters", "gradients", "optimizer", "activations", "communication", "other")
    assert sum(getattr(memory, name) for name in names) == memory.peak
    assert min(getattr(memory, name) for name in names) >= 0


def test_one_device_by_hand() -> None:
    profile = transformer_profile(TINY, samples=8)
    found = priced(profile, CPU, layout_of(Strategy.SINGLE, local_batch=8))
    root = profile.root
    device = CPU.device
    flops = (root.forward_flops + root.backward_flops) / device.peak_flops_per_second["fp32"]
    traffic = 3 * root.memory_traffic_bytes / device.memory_bytes_per_second
    assert found.seconds.compute == pytest.approx(flops + traffic, rel=1e-6)
    memory = found.memory_bytes
    assert memory.parameters == root.parameter_bytes
    assert memory.optimizer == 2 * root.parameter_bytes
    assert (memory.gradients, memory.communication) == (0, 0)
    assert memory.activations == root.saved_activation_bytes + profile.loss_bytes


def test_the_optimizer_step_can_be_the_peak() -> None:
    profile = replace(transformer_profile(replace(TINY, tokens=1)), loss_bytes=0)
    memory = priced(profile, CPU, layout_of(Strategy.SINGLE, local_batch=1)).memory_bytes
    assert memory.gradients == profile.root.trainable_bytes
    assert memory.activations == 0
    assert memory.optimizer > 2 * profile.root.trainable_bytes


def frozen_but_head(profile: Profile) -> Profile:
    """Return the profile with all but the head frozen."""

    def freeze(component: Component) -> Component:
        if component.fqn == "head":
            return component
        head = profile.components[-1]
        own = component.depth == 0
        return replace(
            component,
            trainable_parameters=head.parameters if own else 0,
            trainable_bytes=head.parameter_bytes if own else 0,
            backward_flops=head.backward_flops if own else 0,
        )

    return replace(profile, components=tuple(freeze(component) for component in profile.components))


@pytest.mark.parametrize("strategy", [Strategy.SINGLE, Strategy.DDP, Strategy.FSDP])
def test_only_trainable_parameters_have_gradients_and_state(strategy: Strategy) -> None:
    whole, frozen = transformer_profile(TINY), frozen_but_head(transformer_profile(TINY))
    layout = layout_of(strategy, local_batch=2, passes=2)
    full, part = priced(whole, CPU, layout), priced(frozen, CPU, layout)
    share = whole.components[-1].parameters / whole.root.parameters
    assert part.memory_bytes.optimizer == pytest.approx(full.memory_bytes.optimizer * share, rel=1e-3)
    assert part.memory_bytes.gradients == pytest.approx(full.memory_bytes.gradients * share, rel=1e-3)
    assert part.memory_bytes.parameters == full.memory_bytes.parameters
    assert part.step_seconds < full.step_seconds


def test_sharding_divides_what_it_should() -> None:
    profile = transformer_profile(replace(TINY, tied=False))
    single = priced(profile, CPU, layout_of(Strategy.SINGLE)).memory_bytes
    found = {s: priced(profile, CPU, layout_of(s)).memory_bytes for s in STRATEGIES}
    assert found[Strategy.DDP].parameters == single.parameters
    assert found[Strategy.DDP].optimizer == single.optimizer
    assert found[Strategy.ZERO1].parameters == single.parameters
    assert found[Strategy.ZERO1].optimizer < single.optimizer / 4
    for sharded in (Strategy.ZERO2, Strategy.FSDP):
        assert found[sharded].parameters == pytest.approx(single.parameters / 8, abs=1)
        assert found[sharded].optimizer == pytest.approx(single.optimizer / 8, abs=1)
    assert found[Strategy.HSDP].parameters == pytest.approx(single.parameters / 4, abs=1)
    assert found[Strategy.FSDP].communication < found[Strategy.ZERO2].communication


def test_zero1_is_as_uneven_as_its_largest_parameter() -> None:
    wide = transformer_profile(replace(TINY, vocab=100_000, layers=1))
    found = priced(wide, CPU, layout_of(Strategy.ZERO1, local_batch=1)).memory_bytes
    assert found.optimizer >= 2 * 4 * 100_000 * TINY.hidden


def test_checkpointing_trades_memory_for_time() -> None:
    profile = transformer_profile(GPT2)
    cluster = describe("8xA100-80GB")
    none, selective, full = (
        priced(profile, cluster, layout_of(Strategy.DDP, checkpointing=mode)) for mode in Checkpointing
    )
    assert none.memory_bytes.activations > selective.memory_bytes.activations > full.memory_bytes.activations
    assert none.seconds.recompute == 0.0
    assert 0 < selective.seconds.recompute < full.seconds.recompute
    assert none.mfu > selective.mfu > full.mfu, "mfu counts no recomputation"


def test_accumulation_repeats_passes_and_keeps_gradients() -> None:
    profile, cluster = transformer_profile(GPT2), describe("8xH100")
    once = priced(profile, cluster, layout_of(Strategy.SINGLE))
    four = priced(profile, cluster, layout_of(Strategy.SINGLE, passes=4))
    assert four.step_seconds > once.step_seconds, "weights are read four times"
    assert four.memory_bytes.activations == pytest.approx(once.memory_bytes.activations / 4, rel=0.01)
    assert four.memory_bytes.gradients == profile.root.trainable_bytes


def test_a_short_last_pass_costs_what_it_runs() -> None:
    cluster = describe("8xH100")
    profile = transformer_profile(GPT2)
    even = replace(layout_of(Strategy.SINGLE, local_batch=12, passes=2))
    uneven = replace(even, micro_batch_size=8)
    assert priced(profile, cluster, uneven).seconds.compute == priced(profile, cluster, even).seconds.compute
    assert priced(profile, cluster, uneven).memory_bytes.peak > priced(profile, cluster, even).memory_bytes.peak


def test_16_bit_arithmetic_is_faster_and_keeps_fp32_weights() -> None:
    profile, cluster = transformer_profile(GPT2), describe("8xH100")
    full = priced(profile, cluster, layout_of(Strategy.DDP))
    half = priced(profile, cluster, layout_of(Strategy.DDP, precision=Precision.BF16))
    assert half.step_seconds < full.step_seconds
    assert half.memory_bytes.parameters == full.memory_bytes.parameters
    assert half.memory_bytes.activations < full.memory_bytes.activations
    copies = 2 * profile.root.parameters
    assert half.memory_bytes.activations > copies


def test_communication_hides_on_gpus_and_not_on_cpus() -> None:
    profile = transformer_profile(GPT2)
    gpu = priced(profile, describe("8xH100"), layout_of(Strategy.DDP, precision=Precision.BF16))
    cpu = priced(profile, CPU, layout_of(Strategy.DDP))
    whole = all_reduce_seconds(
        profile.root.trainable_bytes,
        Group(num_nodes=4, ranks_per_node=2, intra_node=GLOO_LINK, inter_node=GLOO_LINK),
    )
    assert gpu.seconds.dp_exposed < 0.1 * gpu.step_seconds
    assert cpu.seconds.dp_exposed > 0.9 * whole


def test_slow_networks_show() -> None:
    profile = transformer_profile(GPT2)
    for strategy in (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.FSDP):
        layout = layout_of(strategy, local_batch=1, precision=Precision.BF16)
        fast = priced(profile, describe("2x4xH100"), layout)
        slow = priced(profile, describe("2x4xH100", inter_node="1Gb/s"), layout)
        assert slow.seconds.dp_exposed > 10 * fast.seconds.dp_exposed, strategy
        assert slow.seconds.compute == fast.seconds.compute, strategy


def test_hsdp_spares_the_network() -> None:
    profile = transformer_profile(replace(GPT2, layers=48))
    cluster = describe("2x4xH100", inter_node="10Gb/s")
    fsdp = priced(profile, cluster, layout_of(Strategy.FSDP, local_batch=1))
    hsdp = priced(profile, cluster, layout_of(Strategy.HSDP, local_batch=1))
    assert hsdp.seconds.dp_exposed < fsdp.seconds.dp_exposed


def test_unequal_devices_wait_for_the_slowest() -> None:
    fast, slow = describe("1x4xH100"), describe("1x4xA100-40GB")
    mixed = replace(fast, nodes=(*fast.nodes, *slow.nodes))
    weakest = weakest_device(mixed)
    assert weakest.memory_bytes == slow.device.memory_bytes
    assert weakest.peak_flops_per_second["bf16"] == slow.device.peak_flops_per_second["bf16"]
    assert "fp8" not in weakest.peak_flops_per_second
    assert weakest_device(fast) is fast.device


def test_cost_per_million_tokens() -> None:
    cluster = describe("aws:p5.48xlarge")
    found = priced(transformer_profile(GPT2), cluster, layout_of(Strategy.DDP, precision=Precision.BF16))
    assert found.cost_per_million_tokens == pytest.approx(55.04 / 3600 / found.tokens_per_second * 1e6)
    free = priced(transformer_profile(GPT2), describe("8xH100"), layout_of(Strategy.DDP))
    assert free.cost_per_million_tokens is None


def test_mfu_is_over_the_dense_peak_of_the_devices_in_use() -> None:
    profile = transformer_profile(GPT2)
    found = priced(profile, describe("8xH100"), layout_of(Strategy.DDP, precision=Precision.BF16))
    flops = (profile.root.forward_flops + profile.root.backward_flops) * 64
    assert found.mfu == pytest.approx(flops / found.step_seconds / (8 * 989.5e12))
    assert found.tflops_per_device == pytest.approx(found.mfu * 989.5)
    assert found.samples_per_second == pytest.approx(64 / found.step_seconds)


def test_optimizers_are_found_by_name() -> None:
    assert find_optimizer("AdamW") is OPTIMIZERS["adamw"]
    with pytest.raises(OptionError, match="adamw"):
        find_optimizer("adamww")
    profile = transformer_profile(TINY)
    adamw = priced(profile, CPU, layout_of(Strategy.SINGLE)).memory_bytes.optimizer
    sgd = priced(profile, CPU, layout_of(Strategy.SINGLE, optimizer="sgd")).memory_bytes.optimizer
    assert adamw == 2 * sgd
