"""Small traces made by `workloads.samples.make_samples`; none is taken from anywhere."""

from pathlib import Path

CONVERSATION = Path(__file__).with_name("conversation.jsonl")
"""The workload of ``kvsim`` without ``--trace``: 1,000 chats behind one system prompt."""
