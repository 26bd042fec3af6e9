"""Results made by hand, for tests of what is done with them."""

from __future__ import annotations

from dataclasses import replace

from shoal.bench.cases import CASES, Case, Mode
from shoal.bench.figures import (
    Built,
    Collectives,
    ComputeRound,
    Gathers,
    Memory,
    OptimizerRound,
    summarise,
)
from shoal.bench.host import Host
from shoal.bench.results import Record, Results, Source, Status, describe_case

HOST = Host(
    torch="2.13.0",
    python="3.11.7",
    system="Linux x86_64",
    cpu="a CPU",
    num_cores=2,
    memory_gib=23.0,
    gpu="a GPU",
    gpu_memory_gib=50.0,
    cuda="13.0",
)
ON_GPU = Memory(allocated_gib=11.3, reserved_gib=17.1, resident_gib=None)


def make_built(
    *,
    memory: Memory = ON_GPU,
    collectives: Collectives | None = None,
    gathers: Gathers | None = None,
) -> Built:
    return Built(
        num_parameters=10,
        collectives=collectives,
        gathers=gathers,
        memory=memory,
        training_memory=memory,
    )


def make_record(
    engine: str,
    ms: float,
    *,
    case: str = "B4",
    device: str = "a GPU",
    mode: Mode = Mode.EAGER,
    gathers: Gathers = Gathers.KEPT,
) -> Record:
    compute = ComputeRound(
        forward_backward_ms=(ms, ms), wall_ms=(ms + 1, ms + 1), host_ms=(ms / 2,)
    )
    optimizer = OptimizerRound(optimizer_ms=(0.25,))
    collectives = Collectives(num_calls=74, num_bytes=1_500_000)
    built = make_built(
        memory=ON_GPU,
        collectives=collectives if engine != "plain" else None,
        gathers=gathers if engine != "plain" else None,
    )
    return Record(
        case=case,
        engine=engine,
        mode=mode,
        device=device,
        status=Status.OK,
        figures=summarise("cuda", built, [compute], [optimizer]),
        compute_rounds=(compute,),
        optimizer_rounds=(optimizer,),
        took_s=60.0,
    )


def make_missing(engine: str, status: Status, reason: str, mode: Mode = Mode.EAGER) -> Record:
    return Record(case="B4", engine=engine, mode=mode, device="a GPU", status=status, reason=reason)


def make_results(
    *records: Record, created: str = "2026-01-01T00:00:00+00:00", quick: bool = False
) -> Results:
    source = Source(command="shoal bench", created=created, host=HOST, settings={"quick": quick})
    names = dict.fromkeys(record.case for record in records)
    return Results(
        quick=quick,
        sources=(source,),
        cases={name: {"name": name, "title": f"what {name} is"} for name in names},
        records=records,
    )


H200 = "NVIDIA H200"
B1 = CASES[0]


def make_b1(engine: str, ms: float, *, mode: Mode = Mode.EAGER) -> Record:
    """A record of B1-8 on a device whose memory bandwidth is known."""
    record = make_record(engine, ms, case=B1.name, device=H200, mode=mode)
    assert record.figures is not None
    return replace(record, figures=replace(record.figures, num_parameters=928_057_344))


def make_b1_results(*records: Record, case: Case = B1) -> Results:
    return replace(make_results(*records), cases={B1.name: describe_case(case)})
