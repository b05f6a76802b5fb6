"""A discrete-event simulator of KV-cache allocators under a continuous-batching scheduler."""
