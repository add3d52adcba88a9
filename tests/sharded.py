"""What each of several processes runs that share a model; prints a JSON object of what it found.

    sharded.py FOLDER [DRAFT] [--prompts N]

FOLDER is loaded whole, and split among the processes; both must give the same.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from speculative_t5 import SpeculativeDecoder, load

import mlx.core as mx
from mlx.utils import tree_flatten

folder, draft, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
group = mx.distributed.init(strict=True, backend="ring")
(whole, _), (part, _) = load(folder), load(folder, group=group)
split, _ = load(folder)
split.shard(group)
rng = random.Random(0)
prompts = [
    [*rng.choices(range(3, min(whole.vocab_size, 100)), k=rng.randint(1, 9)), 1]
    for _ in range(count)
]
source, target = mx.array([[5, 17, 9, 1], [7, 1, 0, 0]]), mx.array([[0, 9, 4], [0, 3, 8]])
found: dict[str, Any] = {
    "rank": group.rank(),
    "size": group.size(),
    "gap": float(mx.abs(whole(source, target) - part(source, target)).max()),
    "scale": float(mx.abs(whole(source, target)).max()),
    "differ": [
        name
        for (name, weight), (_, other) in zip(
            tree_flatten(part.parameters()), tree_flatten(split.parameters()), strict=True
        )
        if not mx.array_equal(weight, other)
    ],
    "share": sum(weight.size for _, weight in tree_flatten(part.parameters()))
    / sum(weight.size for _, weight in tree_flatten(whole.parameters())),
}
outputs: dict[str, list[Any]] = {}
for kind in ("none", "lookup", "draft"):
    given = {"none": None, "lookup": "lookup", "draft": draft}[kind]
    for rule in ("token", "block"):
        for temperature in (0.0, 1.0):
            both = []
            for model in (whole, part):
                other = load(given, target=model)[0] if kind == "draft" else given
                decoder = SpeculativeDecoder(model, other, num_draft=3, verify=rule)
                options = {"max_tokens": 16, "temperature": temperature, "seed": 7}
                results = decoder.generate_batch(prompts, batch_size=5, **options)
                results.append(decoder.generate(prompts[0], **options))
                both.append([result.tokens for result in results])
            name = f"{kind} {rule} {temperature:g}"
            found[name] = sum(a == b for a, b in zip(*both, strict=True))
            outputs[name] = both[1]
found["outputs"] = outputs
print(json.dumps(found))
