"""Predicted step times beside published ones (`tests/tables/published_steps.csv`)."""

from __future__ import annotations

import csv
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from apportion.costing import Layout, estimate, summarize
from apportion.describing import describe
from apportion.records import Checkpointing, Cluster, Mesh, Precision, Strategy
from published import Shape, transformer_profile

TABLE = Path(__file__).parents[1] / "tables" / "published_steps.csv"
with TABLE.open(encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))
# Rows differ in kernels (2023 Triton attention to 2025 compiled): within a quarter each, a tenth in the middle.
ROW_TOLERANCE = 0.25
MEDIAN_TOLERANCE = 0.10


def cluster_of(row: dict[str, str]) -> Cluster:
    kind = f"A100-{row['gpu_mem_gb']}GB" if row["gpu"] == "A100" else row["gpu"]
    num_devices = int(row["n_gpus"])
    per_device = f"{int(row['node_gbit_s']) // 8}Gb/s" if row["node_gbit_s"] else None
    return describe(f"{num_devices // 8}x8x{kind}", inter_node=per_device)


def predicted_seconds(row: dict[str, str], cluster: Cluster) -> float:
    shape = Shape(
        name=row["model"],
        layers=int(row["n_layers"]),
        hidden=int(row["hidden"]),
        heads=int(row["n_heads"]),
        kv_heads=int(row["n_kv_heads"]),
        ffn=int(row["ffn_hidden"]),
        vocab=int(row["vocab"]),
        tokens=int(row["seq_len"]),
        gated=row["model"].startswith("Llama"),
        tied=row["model"].startswith("MPT"),
    )
    ranks, micro, passes = int(row["n_gpus"]), int(row["micro_batch"]), int(row["grad_accum"])
    layout = Layout(
        strategy=Strategy.FSDP,
        mesh=Mesh(dp_shard=ranks),
        batch_size=ranks * micro * passes,
        micro_batch_size=micro,
        grad_accumulation=passes,
        num_devices=ranks,
        checkpointing=Checkpointing(row["act_ckpt"]),
        precision=Precision.BF16,
    )
    return estimate(summarize(transformer_profile(shape)), cluster, layout).step_seconds


def error_of(row: dict[str, str], cluster: Cluster) -> float:
    return predicted_seconds(row, cluster) / float(row["step_time_s"]) - 1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["row_id"])
def test_step_time_is_near_the_published_one(row: dict[str, str]) -> None:
    assert abs(error_of(row, cluster_of(row))) <= ROW_TOLERANCE


def test_the_middle_row_is_nearer() -> None:
    assert statistics.median(abs(error_of(row, cluster_of(row))) for row in ROWS) <= MEDIAN_TOLERANCE


def test_a_wrong_device_does_not_pass() -> None:
    def halved(cluster: Cluster) -> Cluster:
        node = cluster.nodes[0]
        peaks = {name: rate / 2 for name, rate in node.device.peak_flops_per_second.items()}
        device = replace(node.device, peak_flops_per_second=peaks)
        return replace(cluster, nodes=(replace(node, device=device),))

    errors = [error_of(row, halved(cluster_of(row))) for row in ROWS]
    assert min(errors) > ROW_TOLERANCE
