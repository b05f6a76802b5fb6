"""What the chapter says, claim by claim, in short: what each folder puts to the test."""

CHAPTER = {
    1: "KV = layers * 2 * KV width * bytes * context: a few hundred MB per thousand tokens",
    2: "Reserving the maximum contiguously leaves less than 40 % of KV memory live",
    3: "Paging makes waste almost zero and doubles concurrency (90 → 180; at the extreme 20 → 200)",
    4: "Block table: 35 tokens on blocks 7, 3, 9; growth takes 12, at the 36th token",
    5: "A shared system prompt is kept once: 20-40 % more capacity, and prefill is saved too",
    6: "A prefix must agree byte for byte: a careless change takes the hit rate from 90 to 10 %",
    7: "Many different prefixes fill the pool: sharing is not always a free lunch",
    8: "MoE models need it more: each +10 % of KV pool adds much concurrency",
    9: "The block table's indirect access costs far less than it gains",
    10: "block_size: large wastes tails, small costs table overhead; 16 is the usual default",
    11: "gpu_memory_utilization: too low starves, 0.95 and more risks OOM; keep 10 %",
    12: "max_model_len set too large wastes memory",
    13: "By hand: concurrency = pool / KV per request; 36 GB of pool on a card of 80 GB",
    14: "Indirect gain: a fuller pool allows larger batches, so throughput rises too",
    15: "Remedies in order: prefix caching, utilization, quantization, more cards",
    16: "Paging and continuous batching multiply: 1 + 1 > 2",
    17: "A bigger card does not remove fragmentation",
    18: "Pool usage, failed allocations and hit rate, watched live, show a regression in minutes",
    19: "Before going live: 10 % margin, sharing with an identical prefix, max_model_len that fits",
}
