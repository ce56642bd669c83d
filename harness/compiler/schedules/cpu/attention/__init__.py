"""Builds scaled dot-product attention, which never stores the full score matrix; softmax is exact.

Scores are stored transposed, as a strip [keys, queries] of a block of keys and of queries, so that the steps per query
(maximum, exponentials, their sum) are vectorized over queries and need no reduction across lanes:

    strip[key, query] = score_mod(Σ_d key[key, d] · (scale · query[query, d]))
    factor = exp(maximum before - maximum),  strip = exp(strip - maximum)
    sum = factor · sum + Σ_key strip
    result[query, c] = factor · result[query, c] + Σ_key strip[key, query] · value[key, c]

and result / sum at the end. The exponentials of a chunk of keys are computed just before the product takes the chunk. A
query whose keys are all masked gives zero, as in PyTorch.

Two schedules pass blocks of queries past blocks of keys (`block.py`): tasks that each copy the keys and values of a
head (`per_head.py`), and keys and values that are packed a block at a time for all queries (`streaming.py`). For a few
queries, keys are divided among tasks, which read them in place (`few_queries.py`).
"""

from harness.compiler.schedules.cpu.attention.lowering import key_layers, lower_attention

__all__ = ["key_layers", "lower_attention"]
