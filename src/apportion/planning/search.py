"""Price every layout, keep the best of each strategy, pick the fastest that fits."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from ..costing import STRATEGIES, Layout, estimate
from ..errors import PlanError
from ..records import (
    Candidate,
    Checkpointing,
    Cluster,
    ClusterSummary,
    Excluded,
    Limits,
    ModelSummary,
    Plan,
    Profile,
    Stage,
    Strategy,
)
from .candidates import GENERATORS
from .change import find_change
from .explaining import reasons
from .situation import Situation, consider, memory_words

KEPT_PER_STRATEGY = 3
_ORDER = {strategy: place for place, strategy in enumerate(GENERATORS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found: candidates sorted by step time (those that fit first), and the leanest of all."""

    candidates: tuple[Candidate, ...]
    excluded: tuple[Excluded, ...]
    leanest: Candidate | None
    searched: int

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates and self.candidates[0].fits else None


def make_plan(profile: Profile, cluster: Cluster, limits: Limits) -> Plan:
    """Return the plan: every strategy a candidate or excluded with its reason; `best` the fastest that fits.

    If nothing fits, `best` is None and `smallest_change` says what would, found by searching.

    Raises: OptionError for values that cannot be used, such as a batch smaller than the ranks; PlanError for
    an asked strategy that this model or cluster cannot have.
    """
    start = time.perf_counter()
    situation = consider(profile, cluster, limits)
    found = search(situation)
    _refuse_impossible(situation, found)
    best = found.best
    candidates = found.candidates
    change = "" if best else find_change(situation, found.leanest, lambda other: search(other).best)
    if best is not None:
        candidates = reasons(situation, candidates, found.searched)
        best = candidates[0]
    return Plan(
        model=ModelSummary(
            name=profile.name,
            parameters=profile.root.parameters,
            components=len(situation.workload.fqns) or 1,
        ),
        cluster=ClusterSummary(
            devices=cluster.num_devices,
            nodes=cluster.num_nodes,
            kind=situation.device.kind,
            device_memory_bytes=situation.usable_bytes,
        ),
        best=best,
        candidates=candidates,
        excluded=found.excluded,
        smallest_change=change,
        batch_size=limits.batch_size,
        warnings=(*cluster.warnings, *_uneven(situation)),
        searched=found.searched,
        search_seconds=time.perf_counter() - start,
    )


def search(situation: Situation) -> Found:
    """Return the candidates and exclusions of a situation."""
    kept: list[Candidate] = []
    excluded: list[Excluded] = []
    leanest: list[Candidate] = []
    searched = 0
    for strategy, generate in GENERATORS.items():
        unwanted = _unwanted(situation, strategy)
        layouts = unwanted or generate(situation)
        if isinstance(layouts, Excluded):
            excluded.append(layouts)
            continue
        priced = [_price(situation, layout) for layout in layouts]
        searched += len(priced)
        fitting = sorted((c for c in priced if c.fits), key=_by_time)
        least = min(priced, key=lambda c: (c.estimate.memory_bytes.peak, _by_time(c)))
        leanest.append(least)
        kept += fitting[:KEPT_PER_STRATEGY]
        if not fitting:
            excluded.append(_too_large(situation, least))
            if situation.asked(strategy):
                kept.append(least)
    return Found(
        candidates=tuple(sorted(kept, key=lambda c: (not c.fits, _by_time(c)))),
        excluded=tuple(excluded),
        leanest=min(leanest, key=lambda c: c.estimate.memory_bytes.peak, default=None),
        searched=searched,
    )


def _by_time(candidate: Candidate) -> tuple[float, int, int]:
    return (
        candidate.estimate.step_seconds,
        _ORDER[candidate.strategy],
        candidate.estimate.memory_bytes.peak,
    )


def _unwanted(situation: Situation, strategy: Strategy) -> Excluded | None:
    """Return the exclusion of what the user did not ask for."""
    limits = situation.limits
    if limits.strategy is not None and limits.strategy is not strategy:
        if strategy not in STRATEGIES:
            return None
        return Excluded(
            name=strategy.value,
            reason=f"not asked for (--strategy {limits.strategy.value})",
            try_="--strategy auto",
        )
    stage = limits.zero_stage
    if stage is not None and strategy in STRATEGIES and STRATEGIES[strategy].zero_stage != stage:
        return Excluded(name=strategy.value, reason=f"is not ZeRO stage {stage} (--zero {stage})")
    return None


def _price(situation: Situation, layout: Layout) -> Candidate:
    priced = estimate(situation.workload, situation.cluster, layout)
    return Candidate(
        name=name_of(layout),
        strategy=layout.strategy,
        mesh=layout.mesh,
        micro_batch_size=layout.micro_batch_size,
        grad_accumulation=layout.grad_accumulation,
        activation_checkpointing=layout.checkpointing,
        zero_stage=STRATEGIES[layout.strategy].zero_stage,
        precision=layout.precision,
        stages=(_whole_model(situation),),
        fits=priced.memory_bytes.peak <= situation.usable_bytes,
        estimate=priced,
    )


def _whole_model(situation: Situation) -> Stage:
    return Stage(
        stage=0, components=situation.workload.fqns or ("",), parameters=situation.profile.root.parameters
    )


def name_of(layout: Layout) -> str:
    """Return a name that tells candidates apart: `fsdp x8 mb4x2 full` is 2 passes of 4 samples, recomputed."""
    degrees = f" x{layout.num_devices}"
    if layout.strategy is Strategy.HSDP:
        degrees = f" {layout.mesh.dp_replicate}x{layout.mesh.dp_shard}"
    if layout.strategy is Strategy.SINGLE:
        degrees = ""
    passes = f"x{layout.grad_accumulation}" if layout.grad_accumulation > 1 else ""
    words = [f"{layout.strategy.value}{degrees}", f"mb{layout.micro_batch_size}{passes}"]
    if layout.checkpointing is not Checkpointing.NONE:
        words.append(layout.checkpointing.value)
    return " ".join(words)


def _too_large(situation: Situation, least: Candidate) -> Excluded:
    peak = least.estimate.memory_bytes.peak
    return Excluded(
        name=least.strategy.value,
        reason=f"{memory_words(peak, situation.usable_bytes)} ({least.name}, its leanest layout)",
        short_by_bytes=peak - situation.usable_bytes,
    )


def _refuse_impossible(situation: Situation, found: Found) -> None:
    """A strategy asked for by name that has no layout at all is an error, not an empty plan."""
    if found.leanest is not None:
        return
    asked = situation.limits.strategy
    shown = [item for item in found.excluded if asked is None or item.name == asked.value]
    if asked is not None:
        item = shown[0]
        raise PlanError(f"{asked.value} is not possible here: {item.reason}", try_=item.try_)
    raise PlanError(
        "no strategy is left by what was fixed",
        found="; ".join(f"{item.name}: {item.reason}" for item in shown if item.name in _PRICED),
        try_="leave one of --zero, --dp-replicate, --dp-shard out",
    )


_PRICED = frozenset(strategy.value for strategy in STRATEGIES)


def _uneven(situation: Situation) -> Iterable[str]:
    batch, ranks = situation.limits.batch_size, situation.num_devices
    if situation.limits.strategy in (Strategy.SINGLE, Strategy.NAIVE) or batch % ranks == 0:
        return ()
    return (
        f"a batch of {batch} over {ranks} ranks gives some ranks {-(-batch // ranks)} samples and others less",
    )
