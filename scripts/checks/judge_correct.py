"""Judge a correction model by texts that no rule made: learners' errors, and text that is right.

    python scripts/checks/judge_correct.py --model correct-base

A line of tests/learners.tsv and tests/learners-2.tsv has a text, a tab, and a good correction of
it. Where the two are equal, the text was right and must come back unchanged. Both files are judged
together, or those of --data. Greedy, in float32, without a draft; with --document as `document`
does it with a file of all texts: sentence by sentence, and without the changes that the guard
refuses.
Prints the counts, with precision and recall of the changes, each of which is right only if it is
that of the correction; then each output that is not the correction, for a reader to judge: there is
often another good one.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from speculative_t5 import SpeculativeDecoder

import mlx.core as mx
import typer

sys.path.append(str(Path(__file__).parents[2] / "weights" / "training"))

from corruption import word_errors
from evaluate_correct import corrections_line

TESTS = Path(__file__).parents[2] / "tests"
LEARNERS = (TESTS / "learners.tsv", TESTS / "learners-2.tsv")


@dataclass(frozen=True)
class Judged:
    """What a model made of a text."""

    text: str
    correction: str
    output: str

    @property
    def before(self) -> int:
        """The words that are wrong in the text."""
        return word_errors(self.text, self.correction)

    @property
    def after(self) -> int:
        """The words that are wrong in the output."""
        return word_errors(self.output, self.correction)


def main(
    model: Annotated[str, typer.Option(help="Model to judge.")] = "correct-base",
    data: Annotated[
        list[Path] | None, typer.Option(help="Texts and corrections; repeatable.")
    ] = None,
    document: Annotated[bool, typer.Option(help="As `document` does with a file.")] = False,
    outputs: Annotated[bool, typer.Option(help="Show the outputs, too.")] = True,
) -> None:
    pairs = [pair for path in data or LEARNERS for pair in read_pairs(path)]
    decoder = SpeculativeDecoder.from_pretrained(model, None, dtype=mx.float32)
    texts = [text for text, _ in pairs]
    if document:
        found = decoder.rewrite("\n\n".join(texts)).text.split("\n\n")
    else:
        found = [done.text for done in decoder.generate_batch(texts, batch_size=16)]
    judged = [Judged(*pair, output) for pair, output in zip(pairs, found, strict=True)]
    print("\n".join([*summary(judged), *(listing(judged) if outputs else [])]))


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """Read texts and their corrections."""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.count("\t") != 1:
            raise ValueError(
                f"line {number} of {path} has {line.count(chr(9))} tabs: "
                "write a text, a tab and its correction"
            )
        text, correction = line.split("\t")
        pairs.append((text, correction))
    return pairs


def summary(judged: Sequence[Judged]) -> list[str]:
    """Count what became of the texts with errors, and of those without."""
    wrong = [one for one in judged if one.before]
    right = [one for one in judged if not one.before]
    exact = sum(not one.after for one in wrong)
    better = sum(one.after < one.before for one in wrong)
    same = sum(one.output == one.text for one in wrong)
    worse = sum(one.after > one.before for one in wrong)
    other = len(wrong) - better - same - worse
    return [
        f"{len(wrong)} texts with errors: {exact} corrected exactly; "
        f"{better} improved, {same} unchanged, {other} as wrong in another way, {worse} worse",
        f"  wrong words: {sum(one.before for one in wrong)} before, "
        f"{sum(one.after for one in wrong)} after",
        f"{len(right)} right ones: {sum(one.output == one.text for one in right)} unchanged, "
        f"{sum(one.after for one in right)} wrong words after",
        corrections_line(
            [one.text for one in judged],
            [one.output for one in judged],
            [one.correction for one in judged],
        ),
    ]


def listing(judged: Sequence[Judged]) -> list[str]:
    """Show the outputs that are not the correction, with the number of wrong words."""
    lines = []
    for one in judged:
        if one.output != one.correction:
            lines += ["", f"   text  {one.text}"] if one.before else [""]
            lines += [f"   good  {one.correction}", f"{one.before} > {one.after}  {one.output}"]
    return lines


if __name__ == "__main__":
    typer.run(main)
