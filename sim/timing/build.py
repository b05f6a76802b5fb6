"""Put a step time together: which kernels a deployment runs, and what prices each of them."""

from sim.config import TimingConfig
from sim.timing.attention import Cost
from sim.timing.basis import Basis, Deployment
from sim.timing.build_attention import AttentionPricing
from sim.timing.kernels import CudaGraphs, KernelStepTime, PricedCall
from sim.timing.layers import COLLECTIVES, Call, calls_of
from sim.timing.roofline import SMALL_KERNELS
from sim.timing.table import TimingTable
from sim.timing.table_costs import (
    curve_of,
    expert_rows,
    experts_of,
    of_dtype,
    product_of,
    transfer_of,
)
from workloads.record import PS_PER_S

_NAMES = {"all_gather": "gather of logits", "lm_head": "lm_head", "sampler": "sampler"}
"""Kernels of one term that may have different sources."""


def kernel_step_time(timing: TimingConfig, deployment: Deployment) -> KernelStepTime:
    """Answer the step time of *deployment* from a timing table and, for the rest, from the fits.

    Raises:
        ConfigError: the table is of another GPU, model or size, or has no such heads; or something
            is in neither.
    """
    basis = Basis(timing, deployment)
    file = basis.read_table()
    pricing = AttentionPricing(basis)
    attention, fallback = pricing.price()
    calls = [
        priced
        for call in calls_of(
            basis.model,
            deployment.tensor_parallel_size,
            enable_expert_parallel=deployment.enable_expert_parallel,
        )
        if call.op not in pricing.in_block and (priced := _priced(basis, call)) is not None
    ]
    overhead = timing.host_overhead
    if overhead:
        basis.note("host overhead", "assumed", f"{overhead} s a step")
    graphs = CudaGraphs()
    if not timing.enforce_eager:
        graphs = CudaGraphs.default(deployment.max_num_seqs)
    return KernelStepTime(
        num_layers=basis.model.num_hidden_layers,
        calls=calls,
        attention=attention,
        fallback=fallback,
        sources=basis.sources,
        table=file,
        graphs=graphs,
        host_overhead_ps=overhead * PS_PER_S,
    )


def _priced(basis: Basis, call: Call) -> PricedCall | None:
    """Answer *call* with its price; None for one that is part of another."""
    cost = None if basis.table is None else _from_table(basis, basis.table, call)
    if cost is not None:
        fallback = basis.from_fits(call) if basis.may_fall_back else None
        return PricedCall(call.term, call.op, call.launches, cost, fallback)
    if call.op == "gate" and basis.has_layers:
        return None  # part of the measured block
    cost = basis.from_fits(call)
    name = _NAMES.get(call.op, call.term)
    if call.bytes_per_token and call.op not in COLLECTIVES:
        basis.note(name, "assumed", SMALL_KERNELS)
    else:
        fits = basis.needed_fits(call.op)
        section = fits.section(call.op, basis.deployment.tensor_parallel_size)
        basis.note_fit(name, fits, section)
    return PricedCall(call.term, call.op, call.launches, cost)


def _from_table(basis: Basis, table: TimingTable, call: Call) -> Cost | None:
    cost: Cost | None = None
    rows = table.where(op=call.op)
    if call.op in COLLECTIVES:
        rows = rows.where(num_gpus=basis.deployment.tensor_parallel_size)
        if len(rows):
            cost = transfer_of(rows, call.bytes_per_token)
    elif call.op == "moe":
        rows = of_dtype(expert_rows(rows, basis.experts, call.k))
        if len(rows):
            cost = experts_of(rows, basis.experts)
    elif len(rows):
        cost = curve_of(rows, "num_tokens")
    elif call.n:
        rows = table.where(op="gemm")
        cost = product_of(rows, call.n, call.k) if len(rows) else None
    if cost is not None:
        basis.note_table(_NAMES.get(call.op, call.term), rows)
    return cost
