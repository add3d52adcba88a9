"""What each of several processes runs that share a model; prints a JSON object of what it found.

FOLDER is loaded whole, and split among the processes; both must give the same.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import product
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.models import T5, shard

import mlx.core as mx
from mlx.utils import tree_flatten

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", metavar="FOLDER")
parser.add_argument("draft", metavar="DRAFT")
parser.add_argument("--sharing", metavar="DRAFT", help="one that shares the encoder")
parser.add_argument("--prompts", type=int, default=16)
parser.add_argument("--batch-size", type=int, default=5)
parser.add_argument("--round-differently", action="store_true", help="all but the first process")
given = parser.parse_args()

KINDS: dict[str, tuple[str | None, bool]] = {  # draft, and whether there is a lookup beside it
    "none": (None, False),
    "lookup": ("lookup", False),
    "draft": (given.draft, False),
    "draft and lookup": (given.draft, True),
}
if given.sharing:
    KINDS["sharing draft"] = given.sharing, False
PENALTIES = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}


def main() -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    (whole, _), (part, _), (split, _) = (load(given.folder, group=g) for g in (None, group, None))
    assert isinstance(whole, T5) and isinstance(part, T5) and isinstance(split, T5)
    shard(split, group)
    source, target = mx.array([[5, 17, 9, 1], [7, 1, 0, 0]]), mx.array([[0, 9, 4], [0, 3, 8]])
    named, others = (tree_flatten(model.parameters()) for model in (part, split))
    found: dict[str, Any] = {
        "rank": group.rank(),
        "size": group.size(),
        "gap": float(mx.abs(whole(source, target) - part(source, target)).max()),
        "scale": float(mx.abs(whole(source, target)).max()),
        "differ": [n for (n, a), (_, b) in zip(named, others, strict=True) if not same(a, b)],
        "share": size(part) / size(whole),
        "same": {},
        "outputs": {},
    }
    rng = random.Random(0)
    ids = range(3, min(whole.info.vocab_size, 100))
    lengths = [rng.choice((rng.randint(1, 9), 40)) for _ in range(given.prompts)]  # 40: in groups
    prompts = [[*rng.choices(ids, k=length), 1] for length in lengths]
    if given.round_differently and group.rank():
        disturb(part)
    settings: list[tuple[str, str, float, dict[str, Any]]] = [
        (kind, rule, temperature, {})
        for kind, (rule, temperature) in product(
            KINDS, (("token", 0.0), ("token", 1.0), ("block", 1.0))
        )
    ]
    settings += [("draft", "token", temperature, PENALTIES) for temperature in (0.0, 1.0)]
    settings += [("none", "token", 0.0, {"num_beams": 3})]
    for kind, rule, temperature, more in settings:
        options = {"max_tokens": 16, "temperature": temperature, "seed": 7} | more
        both = []
        for model in (whole, part):
            draft, lookup = KINDS[kind]
            if draft not in (None, "lookup"):
                loaded, _ = load(str(draft), target=model)
                if given.round_differently and group.rank() and model is part:
                    disturb(loaded)
                draft = loaded  # type: ignore[assignment]
            decoder = SpeculativeDecoder(
                model,
                draft,
                num_draft=3,
                verify=rule,
                lookup=lookup,  # type: ignore[arg-type]
            )
            results = decoder.generate_batch(prompts, batch_size=given.batch_size, **options)
            results.append(decoder.generate(prompts[0], **options))
            both.append([result.tokens for result in results])
        name = f"{kind}, {rule}, {temperature:g}, {more}"
        found["same"][name] = sum(a == b for a, b in zip(*both, strict=True))
        found["outputs"][name] = both[1]
    print(json.dumps(found))


def disturb(model: Any) -> None:
    """Change what a model computes after the last sum: the norm before the output head."""
    norm = model.decoder.norm
    noise = mx.random.normal(norm.weight.shape, key=mx.random.key(5))
    norm.weight = norm.weight * (1 + 0.5 * noise)
    model.recompile()


def same(one: Any, other: Any) -> bool:
    return bool(mx.array_equal(one, other))


def size(model: T5) -> int:
    return sum(weight.size for _, weight in tree_flatten(model.parameters()))


main()
