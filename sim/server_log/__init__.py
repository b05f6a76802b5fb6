"""What a vLLM, SGLang or TensorRT-LLM server said of its memory when it started."""

from sim.server_log.findings import explain
from sim.server_log.reader import parse_server_log, read_server_log
from sim.server_log.records import Refusal, Said, ServerLog, Startup, Statistics, Word

__all__ = [
    "Refusal",
    "Said",
    "ServerLog",
    "Startup",
    "Statistics",
    "Word",
    "explain",
    "parse_server_log",
    "read_server_log",
]
