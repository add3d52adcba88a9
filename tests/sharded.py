"""What each of several processes runs that share a model; prints a JSON object of what it found.

    python tests/sharded.py FOLDER [DRAFT SHARING]

FOLDER is loaded whole, and split among the processes; both must give the same, with drafts, too.
"""

import json
import random
import sys
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.models import T5, shard

import mlx.core as mx
from mlx.utils import tree_flatten

FOLDER, *DRAFTS = sys.argv[1:]

SETTINGS: list[tuple[str, Any, float, dict[str, Any]]] = [  # draft, rule, temperature and others
    ("none", "token", 0.0, {"num_beams": 3}),
    ("lookup", "token", 0.0, {}),
    ("lookup", "token", 1.0, {}),
    ("draft", "token", 0.0, {}),
    ("draft", "token", 1.0, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}),
    ("both", "block", 1.0, {}),
    ("sharing", "token", 0.0, {}),
    ("sharing", "block", 1.0, {}),
]


def main() -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    (whole, _), (part, _), (split, _) = (load(FOLDER, group=g) for g in (None, group, None))
    assert isinstance(whole, T5) and isinstance(part, T5) and isinstance(split, T5)
    shard(split, group)
    source, target = mx.array([[5, 17, 9, 1], [7, 1, 0, 0]]), mx.array([[0, 9, 4], [0, 3, 8]])
    named, others = (tree_flatten(model.parameters()) for model in (part, split))
    same = [mx.array_equal(a, b).item() for (_, a), (_, b) in zip(named, others, strict=True)]
    expected = whole(source, target)
    found: dict[str, Any] = {
        "rank": group.rank(),
        "size": group.size(),
        "gap": float(mx.abs(expected - part(source, target)).max()),
        "scale": float(mx.abs(expected).max()),
        "differ": [name for (name, _), equal in zip(named, same, strict=True) if not equal],
        "share": size(part) / size(whole),
    }
    if DRAFTS:
        found["outputs"] = compare_outputs(whole, part, group.rank())
    print(json.dumps(found))


def compare_outputs(whole: T5, part: T5, rank: int) -> list[Any]:
    """Decode by the whole in the first process, and then by all; the others round differently."""
    rng = random.Random(0)
    ids = range(3, min(whole.info.vocab_size, 100))
    lengths = [rng.choice((rng.randint(1, 9), 40)) for _ in range(6)]  # 40: in groups
    prompts = [[*rng.choices(ids, k=length), 1] for length in lengths]
    decoders = decoders_of(part)
    if rank == 0:
        return [outputs(decoders_of(whole), prompts), outputs(decoders, prompts)]
    for decoder in decoders:
        disturb(decoder.draft or part)
    return [outputs(decoders, prompts)]


def decoders_of(model: T5) -> list[SpeculativeDecoder]:
    """Make a decoder for each of the settings; each draft is loaded once."""
    draft, sharing = (load(name, target=model)[0] for name in DRAFTS)
    drafts: dict[str, Any] = {"none": None, "lookup": "lookup", "sharing": sharing}
    return [
        SpeculativeDecoder(
            model, drafts.get(kind, draft), num_draft=3, verify=rule, lookup=kind == "both"
        )
        for kind, rule, *_ in SETTINGS
    ]


def outputs(decoders: list[SpeculativeDecoder], prompts: list[list[int]]) -> list[Any]:
    """Decode in batches, then one prompt alone, by all of the settings."""
    found = []
    for decoder, (_, _, temperature, more) in zip(decoders, SETTINGS, strict=True):
        options = {"max_tokens": 12, "temperature": temperature, "seed": 7} | more
        results = decoder.generate_batch(prompts, batch_size=4, **options)
        results.append(decoder.generate(prompts[0], **options))
        found.append([result.tokens for result in results])
    return found


def disturb(model: Any) -> None:
    """Change what a model computes after the last sum: the norm before the output head."""
    norm = model.decoder.norm
    noise = mx.random.normal(norm.weight.shape, key=mx.random.key(5))
    norm.weight = norm.weight * (1 + 0.5 * noise)
    model.recompile()


def size(model: T5) -> int:
    return sum(weight.size for _, weight in tree_flatten(model.parameters()))


main()
