"""The configuration: one frozen model a concern, whose field descriptions are the CLI's help.

Names, meanings and defaults are vLLM 0.33.0's where it has them (``config/cache.py``,
``config/scheduler.py``, ``engine/arg_utils.py``); what is only ours says so.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
"""A count; the bound keeps the product of two of them within 64 bits."""

Reservation = Literal["max", "pow2", "oracle"]
NumBytes = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Share = Annotated[float, Meta(gt=0, le=1)]
Gib = Annotated[float, Meta(gt=0, le=65536)]
Linger = Annotated[float, Meta(ge=0, le=1e6)] | Literal["inf"]
Port = Annotated[int, Meta(ge=0, le=65535)]
Speed = Annotated[float, Meta(gt=0, le=1e9)]
RequestRate = Annotated[float, Meta(gt=0, le=1e9)] | Literal["inf"]


class _Concern(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one concern."""


class LoadConfig(_Concern, frozen=True):
    """What arrives."""

    trace: Annotated[
        str | None,
        Meta(
            description="Trace to replay: a file, a folder of files, - for standard input, or a "
            "specification (.toml) of one to generate "
            "[default: a small shipped workload]."
        ),
    ] = None
    trace_format: Annotated[
        str | None,
        Meta(
            description="Format of the trace, and options of it as NAME:KEY=VALUE,KEY=VALUE "
            "[default: detected from its content]."
        ),
    ] = None
    request_rate: Annotated[
        RequestRate | None,
        Meta(
            description="Requests a second on average: the gaps between the trace's arrivals are "
            "all multiplied by one factor; inf is all at once [default: as recorded]."
        ),
    ] = None
    closed_loop: Annotated[
        bool,
        Meta(
            description="The next turn of a session arrives its think time after the turn before "
            "has ended, not at its recorded time (kvsim only)."
        ),
    ] = False
    max_concurrency: Annotated[
        PositiveInt | None,
        Meta(
            description="Most requests under way; others are sent as those end [default: no limit]."
        ),
    ] = None
    goodput: Annotated[
        str | None,
        Meta(
            description="Report goodput: requests within all of these milliseconds, like "
            "'ttft:500 tpot:50' (ttft, tpot, e2el)."
        ),
    ] = None
    seed: Annotated[
        int,
        Meta(
            ge=0,
            le=2**63 - 1,
            description="Of the requests that a specification (--trace FILE.toml) generates; "
            "replaying a trace draws nothing.",
        ),
    ] = 0


class ModelConfig(_Concern, frozen=True):
    """Which model runs on which GPU."""

    model: Annotated[
        str,
        Meta(
            description="Model name, or the path of a config.json of Hugging Face or of its folder."
        ),
    ] = "meta-llama/Llama-3.1-8B"
    gpu: Annotated[
        str, Meta(description="GPU name, or a TOML file with the keys of sim/data/gpus.toml.")
    ] = "A100-40"
    gpu_memory_gib: Annotated[
        Gib | None,
        Meta(
            description="GiB that a program sees of the GPU, instead of what is known of it "
            "(kvsim only).",
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "half", "float16", "bfloat16", "float", "float32"],
        Meta(
            description="Type of weights that are not quantized, and of the KV cache unless "
            "--kv-cache-dtype says otherwise; auto is the model's."
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["fp8", "bitsandbytes"] | None,
        Meta(
            description="Quantize the weights of a 16-bit model while loading. Models that are "
            "quantized say so in their config.json and need no flag."
        ),
    ] = None
    tensor_parallel_size: Annotated[
        PositiveInt,
        Meta(
            description="GPUs that share the model by tensor parallelism; all are equal, and the "
            "KV pool is that of one."
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        PositiveInt,
        Meta(
            description="Stages of layers, each on GPUs of its own; the KV pool is that of the "
            "stage with least room (kvsim capacity only: runs have one stage)."
        ),
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        Meta(description="GPUs hold whole experts of a mixture, not a slice of each."),
    ] = False
    max_model_len: Annotated[
        PositiveInt | None,
        Meta(
            description="Longest prompt plus output, in tokens [default: the model's; 8192 for the "
            "shipped workload]."
        ),
    ] = None


class CacheConfig(_Concern, frozen=True):
    """How KV memory is sized and allocated."""

    allocator: Annotated[
        str | None,
        Meta(
            description="KV allocator (kvsim only): contiguous (also reserve-max, reserve-pow2, "
            "reserve-oracle), paged or prefix; `compare` takes a comma-separated list [default: by "
            "--enable-prefix-caching; compare: all]."
        ),
    ] = None
    reservation: Annotated[
        Reservation,
        Meta(
            description="What the contiguous allocator reserves (kvsim only): max_model_len, the "
            "prompt and the next power of two of the output, or exactly what will be written."
        ),
    ] = "max"
    placement: Annotated[
        Literal["first_fit", "buddy"],
        Meta(description="Where the contiguous allocator puts a reservation (kvsim only)."),
    ] = "first_fit"
    block_size: Annotated[PositiveInt, Meta(description="Tokens in a KV block.")] = 16
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"],
        Meta(
            description="Type of an element of the KV cache; auto is the model's. fp8_ds_mla is "
            "DeepSeek's layout of sparse latents, which fp8 means for them too."
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        Share | None,
        Meta(
            description="Share of GPU memory to use, weights and activations included "
            "[default: 0.92; 0.9 before vLLM 0.21].",
        ),
    ] = None
    vllm_version: Annotated[
        Literal["0.33", "0.19", "0.11"],
        Meta(
            description="vLLM whose accounting of memory sizes the pool (kvsim only); decisions "
            "are 0.33's."
        ),
    ] = "0.33"
    kv_cache_memory_bytes: Annotated[
        NumBytes | None,
        Meta(description="Bytes for the KV cache; overrides --gpu-memory-utilization."),
    ] = None
    num_gpu_blocks_override: Annotated[
        PositiveInt | None,
        Meta(
            description="Number of blocks, the null block included; overrides every other way to "
            "size the pool."
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        Meta(description="Share the KV of equal prefixes; picks the allocator if none is named."),
    ] = True

    @property
    def by_utilization(self) -> bool:
        """Whether the pool follows from utilization, and neither bytes nor blocks were given."""
        return self.kv_cache_memory_bytes is None and self.num_gpu_blocks_override is None


class SchedulerConfig(_Concern, frozen=True):
    """How steps are put together."""

    max_num_seqs: Annotated[
        PositiveInt | None,
        Meta(description="Most running requests [default: 1024 on large GPUs, else 256]."),
    ] = None
    max_num_batched_tokens: Annotated[
        PositiveInt | None,
        Meta(description="Most tokens a step [default: 8192 on large GPUs, else 2048]."),
    ] = None
    enable_chunked_prefill: Annotated[
        bool, Meta(description="Cut a prompt that does not fit the token budget into chunks.")
    ] = True
    long_prefill_token_threshold: Annotated[
        int,
        Meta(
            ge=0,
            le=2**31 - 1,
            description="Longest prompt chunk of one request a step; 0 is no limit.",
        ),
    ] = 0
    scheduler_reserve_full_isl: Annotated[
        bool,
        Meta(description="Admit a request only if all its present tokens fit, not just a chunk."),
    ] = True
    watermark: Annotated[
        float,
        Meta(
            ge=0,
            lt=1,
            description="Share of the pool that admissions leave free while others run.",
        ),
    ] = 0.0
    async_scheduling: Annotated[
        bool,
        Meta(
            description="Decide a step while the one before it runs; vLLM turns it on by default "
            "in real deployments."
        ),
    ] = False
    batching: Annotated[
        Literal["continuous", "static"],
        Meta(
            description="Who joins and leaves: anybody after any step, or a whole batch, which "
            "runs until its last member has finished (kvsim only)."
        ),
    ] = "continuous"


class TimingConfig(_Concern, frozen=True):
    """How long a step takes."""

    step_time: Annotated[
        str,
        Meta(
            description="Price of a step (kvsim only): roofline (fitted to the GPU's kernels), "
            "linear:BASE,PER_TOKEN,PER_CONTEXT_TOKEN or constant:SECONDS."
        ),
    ] = "roofline"
    timing_table: Annotated[
        str | None,
        Meta(
            description="Parquet file of measured kernel times (`kvsim tables`, kvsim only); what "
            "it has not is priced by the roofline [default: the GPU's in kernels/tables, if any]."
        ),
    ] = None
    timing_fallback: Annotated[
        Literal["error", "roofline"],
        Meta(
            description="Sizes and heads that the timing table has no rows for: refuse them, or "
            "price them by the roofline and say how many (kvsim only)."
        ),
    ] = "error"
    host_overhead: Annotated[
        float,
        Meta(
            ge=0,
            le=1000,
            description="Seconds that a step lasts beyond its kernels (kvsim only).",
        ),
    ] = 0.0
    enforce_eager: Annotated[
        bool,
        Meta(description="No CUDA graphs: tokens are not padded to the size of one."),
    ] = False


class OutputConfig(_Concern, frozen=True):
    """What is written, where. Decides nothing of the run."""

    output_dir: Annotated[
        str | None,
        Meta(
            description="Folder for result files "
            "[default: none for run, kvsim-results for compare]."
        ),
    ] = None
    format: Annotated[
        Literal["parquet", "csv"], Meta(description="Format of the request and step tables.")
    ] = "parquet"
    save_steps: Annotated[
        bool, Meta(description="Write one row a step with the requests scheduled, not one a run.")
    ] = False
    save_block_tables: Annotated[
        bool, Meta(description="Write the block ids of every scheduled request after each step.")
    ] = False
    single_step: Annotated[
        bool,
        Meta(
            description="Decide every step by itself, never a run of steps: slower, the same "
            "results (kvsim only)."
        ),
    ] = False
    json: Annotated[bool, Meta(description="Print the summary as JSON, not as text.")] = False
    live: Annotated[
        bool, Meta(description="Show a board in the terminal while it runs (kvsim only).")
    ] = False
    speed: Annotated[
        Speed | None,
        Meta(
            description="Simulated seconds a second, like 60x, for --live and --metrics-port "
            "(kvsim only) [default: as fast as it goes].",
        ),
    ] = None
    metrics_port: Annotated[
        Port | None,
        Meta(
            description="Serve vLLM's metrics for Prometheus, of kvsim run, not compare; 0 is any "
            "free port (kvsim only).",
        ),
    ] = None
    metrics_host: Annotated[
        str, Meta(description="Address to serve them at; 0.0.0.0 is all of them (kvsim only).")
    ] = "127.0.0.1"
    metrics_linger: Annotated[
        Linger,
        Meta(
            description="Seconds to serve the last metrics after the run; inf is until Ctrl-C "
            "(kvsim only)."
        ),
    ] = 15.0
    openmetrics: Annotated[
        str | None,
        Meta(
            description="File for the metrics over time, as promtool backfills them; of kvsim "
            "run, not compare (kvsim only)."
        ),
    ] = None
    openmetrics_interval: Annotated[
        float,
        Meta(ge=0.001, description="Simulated seconds between its samples (kvsim only)."),
    ] = 15.0
    openmetrics_epoch: Annotated[
        float,
        Meta(
            ge=0,
            le=10_000_000_000,
            description="Unix time, in seconds, of the trace's time zero there (kvsim only).",
        ),
    ] = 0.0


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides a run. Equal configurations and traces give equal results.

    As `sim.settings.resolve` answers it: nothing is left None that the run needs.
    """

    load: LoadConfig
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    timing: TimingConfig

    @property
    def label(self) -> str:
        """The allocator's name in tables and folders."""
        if self.cache.allocator == "contiguous":
            buddy = "-buddy" if self.cache.placement == "buddy" else ""
            return f"reserve-{self.cache.reservation}{buddy}"
        return str(self.cache.allocator)

    def flat(self) -> dict[str, Any]:
        """Answer every setting of the run by the name of its flag: a ``--config`` file repeats it.

        What only the contiguous allocator reads is left out for the others.
        """
        concerns = (self.load, self.model, self.cache, self.scheduler, self.timing)
        return {
            name: value
            for concern in concerns
            for name, value in msgspec.structs.asdict(concern).items()
            if name not in CONTIGUOUS_ONLY or self.cache.allocator == "contiguous"
        }


CONTIGUOUS_ONLY = ("reservation", "placement")
"""Settings of the contiguous allocator alone."""

CONCERNS: dict[str, type[_Concern]] = {
    "load": LoadConfig,
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "timing": TimingConfig,
    "output": OutputConfig,
}
"""Every concern by name: the groups of flags in ``--help``."""
