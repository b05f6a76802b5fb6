"""Run a trace on Vidur with its own interpreter, as `tests.benchmarks.peers` asks.

Its scheduler with chunked prefill (Sarathi) has both limits, of sequences and of tokens a step. Its
predictors of step time fetch profiles from a hub; a constant stands in for them, which saves Vidur
the time of predicting. Request and batch metrics are kept; plots and chrome traces are not made.
"""

import csv
import importlib
import json
import sys
import tempfile
import time
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any


class _ConstantTime:
    """Every step of a pipeline stage takes *step_ms*."""

    step_ms = 0.0

    def __init__(self, **_: Any) -> None:
        native = importlib.import_module("vidur._native.entities")
        self._time = native.ExecutionTime(1, *[0.0] * 3, self.step_ms, *[0.0] * 10)

    def get_execution_time(self, *_: Any) -> Any:
        return self._time


def _config(trace: Path, folder: str, settings: dict[str, Any]) -> Any:
    config: Any = importlib.import_module("vidur.config.config")
    registry = importlib.import_module("vidur.execution_time_predictor")
    dummy = importlib.import_module("vidur.types").ExecutionTimePredictorType.DUMMY
    _ConstantTime.step_ms = 1e3 * settings["step_seconds"]
    registry.ExecutionTimePredictorRegistry.register(dummy, _ConstantTime)
    predictor = make_dataclass(
        "Constant",
        [],
        bases=(config.BaseExecutionTimePredictorConfig,),
        namespace={"get_type": staticmethod(lambda: dummy)},
    )
    return config.SimulationConfig(
        cluster_config=config.ClusterConfig(
            replica_config=config.ReplicaConfig(num_pipeline_stages=1, tensor_parallel_size=1),
            cache_config=config.CacheConfig(
                block_size=settings["block_size"],
                num_blocks=settings["num_blocks"],
                watermark_blocks_fraction=0.0,
            ),
            replica_scheduler_config=config.SarathiSchedulerConfig(
                batch_size_cap=settings["max_num_seqs"],
                chunk_size=settings["max_num_batched_tokens"],
            ),
        ),
        request_generator_config=config.TraceRequestGeneratorConfig(
            trace_file=str(trace),
            date="all",
            prefill_scale_factor=1,
            decode_scale_factor=1,
            time_scale_factor=1,
            max_tokens=settings["max_model_len"],
        ),
        execution_time_predictor_config=predictor(),
        metrics_config=config.MetricsConfig(
            output_dir=folder,
            enable_chrome_trace=False,
            store_plots=False,
            store_utilization_metrics=False,
        ),
    )


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        with trace.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["Date", "Time", "PromptTokenCount", "CompletionTokenCount"])
            for row in rows:
                writer.writerow(
                    ["all", row["arrival_time"], row["input_length"], row["output_len"]]
                )
        simulator = importlib.import_module("vidur.simulator").Simulator(
            _config(trace, folder, json.loads(sys.argv[2]))
        )
        # Its result files are left out, as are everybody's.
        simulator._write_output = lambda: None
        requests = [event._request for _, event in simulator._event_queue]
        start = time.perf_counter()
        simulator.run()
        seconds = time.perf_counter() - start
    done = sum(request.completed for request in requests)
    print(json.dumps({"seconds": seconds, "done": done}))


main()
