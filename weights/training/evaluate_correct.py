"""Measure the correction pair on held-out sentences, greedy and in float32.

    python weights/training/evaluate_correct.py --data deu.txt.xz

Prints the quality, compared with an unchanged input, whether speculative output equals plain output
token for token, and the pair's acceptance rate. Needs the extra `train`.

Of the corrections, precision is the share that is right of those made, recall the share made of
those that are right, and F0.5 counts precision twice as much as recall, as is usual for grammatical
error correction (Ng et al. 2014, "The CoNLL-2014 shared task"). For single sentences they are given
again for several least probabilities: a sentence stays as it is if a token of its output has less,
as with `document --min-probability`. `--json` adds the model's figures to a file of several models.
"""

import json
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated

from speculative_t5 import Generation, SpeculativeDecoder
from speculative_t5.decoding import Sampler, pair_probabilities

import mlx.core as mx
import sacrebleu
import typer
from corruption import PREFIX, DataOption, held_out_examples, word_errors
from learner_errors import held_out_texts

LEAST = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # probabilities
IDENTITY = "single sentences"  # the kind that is decoded at several draft lengths


@dataclass(frozen=True)
class Corrections:
    """How good a model's corrections are, as shares, and how many right texts it left alone."""

    precision: float
    recall: float
    f05: float
    unchanged: int
    right: int  # texts that were right before


def main(
    data: DataOption,
    model: Annotated[str, typer.Option(help="Target.")] = "correct-base",
    draft_model: Annotated[str, typer.Option(help="Draft, or empty for none.")] = "correct-small",
    count: Annotated[int, typer.Option(help="Examples of each kind.")] = 1000,
    identity: Annotated[int, typer.Option(help="Examples to decode at four draft lengths.")] = 200,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="File to add the figures to, by model.")
    ] = None,
) -> None:
    decoder = SpeculativeDecoder.from_pretrained(
        model, draft_model or None, num_draft=4, dtype=mx.float32
    )
    kinds = {
        IDENTITY: held_out_examples(data, count),
        "one to four sentences": held_out_examples(data, count, single=False),
        "learners' errors, single sentences": held_out_texts(data, count, single=True),
        "learners' errors, one to eight sentences": held_out_texts(data, count),
    }
    figures = {}
    for kind, examples in kinds.items():
        sources = [source for source, _ in examples]
        texts = [source.removeprefix(PREFIX) for source in sources]
        references = [reference for _, reference in examples]
        outputs = decoder.generate_batch(sources, batch_size=32)
        print(f"{count} held-out examples, {kind}:")
        report("left as they are", texts, references)
        written = [output.text for output in outputs]
        exact = report(model, written, references)
        print(f"  {corrections_line(texts, written, references)}")
        found = corrections_of(texts, written, references)
        figures[kind] = {"exact": exact} | asdict(found)
        if "single" in kind:
            print_by_probability(decoder, texts, outputs, references)
        if draft_model:
            rate = sum(o.stats.accepted for o in outputs) / sum(o.stats.drafted for o in outputs)
            emitted = sum(o.stats.emitted for o in outputs)
            rounds = sum(o.stats.rounds for o in outputs)
            print(f"  acceptance at num_draft 4: {rate:.3f}, {emitted / rounds:.2f} tokens/round")
        if draft_model and kind == IDENTITY:
            check_identity(decoder, sources[:identity])
    if as_json:
        known = json.loads(as_json.read_text()) if as_json.exists() else {}
        known[Path(model).name] = {"examples": count, "kinds": figures}
        as_json.write_text(json.dumps(known, indent=2) + "\n")


def report(name: str, hypotheses: list[str], references: list[str]) -> float:
    """Print how near outputs are to references; return the share that is exactly right."""
    pairs = list(zip(hypotheses, references, strict=True))
    exact = sum(h == r for h, r in pairs) / len(pairs)
    errors = sum(word_errors(h, r) for h, r in pairs) / sum(len(r.split()) for r in references)
    chrf = sacrebleu.corpus_chrf(hypotheses, [references]).score
    print(
        f"  {name:18} exact {exact:.1%}  wrong words per 100: {100 * errors:.1f}  chrF {chrf:.1f}"
    )
    return exact


def corrections_line(texts: list[str], outputs: list[str], references: list[str]) -> str:
    """Say how good the corrections are, and how many of the right texts came back unchanged."""
    found = corrections_of(texts, outputs, references)
    return (
        f"corrections: precision {found.precision:.1%}, recall {found.recall:.1%}, F0.5 "
        f"{found.f05:.1%}; {found.unchanged} of {found.right} right texts unchanged"
    )


def corrections_of(texts: list[str], outputs: list[str], references: list[str]) -> Corrections:
    """Compare what was corrected with what had to be."""
    made = right = both = 0
    unchanged = []
    for text, output, reference in zip(texts, outputs, references, strict=True):
        ours, wanted = corrections(text, output), corrections(text, reference)
        made, right, both = made + len(ours), right + len(wanted), both + len(ours & wanted)
        if not wanted:
            unchanged.append(not ours)
    precision, recall = both / max(made, 1), both / max(right, 1)
    score = 1.25 * precision * recall / max(0.25 * precision + recall, 1e-9)
    return Corrections(precision, recall, score, sum(unchanged), len(unchanged))


def print_by_probability(
    decoder: SpeculativeDecoder,
    texts: list[str],
    outputs: list[Generation],
    references: list[str],
) -> None:
    """Print how good the corrections are where unsure ones are not made, by least probability."""
    lowest = []
    for text, output in zip(texts, outputs, strict=True):
        if output.text == text:
            lowest.append(1.0)
            continue
        source, sampler = decoder.encode(PREFIX + text), Sampler(temperature=0)
        found = pair_probabilities(decoder.model, None, source, output.tokens, sampler)
        lowest.append(min(p for p, _ in found))
    for least in LEAST:
        kept = [
            output.text if p >= least else text
            for text, output, p in zip(texts, outputs, lowest, strict=True)
        ]
        print(f"  at least {least}: {corrections_line(texts, kept, references)}")


def corrections(text: str, output: str) -> set[tuple[int, int, tuple[str, ...]]]:
    """Return what was replaced: the first word, the one after the last, and the words instead."""
    before, after = text.split(), output.split()
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    return {
        (i, j, tuple(after[k:m])) for kind, i, j, k, m in matcher.get_opcodes() if kind != "equal"
    }


def check_identity(decoder: SpeculativeDecoder, sources: list[str]) -> None:
    """Compare speculative with plain outputs, one prompt at a time."""
    plain = [decoder.generate(source, speculative=False) for source in sources]
    for num_draft in (1, 3, 5, 8):
        engine = SpeculativeDecoder(
            decoder.model, decoder.draft, decoder.tokenizer, num_draft=num_draft
        )
        outputs = [engine.generate(source) for source in sources]
        pairs = zip(outputs, plain, strict=True)
        same = sum((a.tokens, a.finish_reason) == (b.tokens, b.finish_reason) for a, b in pairs)
        print(f"  num_draft {num_draft}: {same} of {len(sources)} outputs equal plain ones")


if __name__ == "__main__":
    typer.run(main)
