"""Correct sentences with the shipped pair, interleaving plain and speculative decoding."""

from typing import Annotated

from speculative_t5 import Generation, SpeculativeDecoder
from speculative_t5.cli.examples import SENTENCES_TO_CORRECT
from speculative_t5.cli.terminal import give_tips

import typer


def main(
    repeats: Annotated[int, typer.Option(help="How often each sentence is corrected.")] = 5,
    num_draft: Annotated[int, typer.Option(help="Tokens to draft for each target pass.")] = 5,
    draft: Annotated[str, typer.Option(help="The draft's folder or name.")] = "correct-small",
) -> None:
    decoder = SpeculativeDecoder.from_pretrained("correct-base", draft, num_draft=num_draft)
    runs: dict[bool, list[Generation]] = {False: [], True: []}
    for speculative in runs:  # warm up
        decoder.generate(SENTENCES_TO_CORRECT[0], speculative=speculative)
    for repeat in range(repeats):
        for sentence in SENTENCES_TO_CORRECT:
            for speculative, done in runs.items():
                done.append(decoder.generate(sentence, speculative=speculative))
            if repeat == 0:
                print(sentence.removeprefix("correct: "))
                print(f"  -> {runs[True][-1].text}")
    same = sum(a.tokens == b.tokens for a, b in zip(runs[False], runs[True], strict=True))
    print(f"\n{same} of {len(runs[True])} speculative outputs equal those of plain decoding")
    speeds = {}
    for speculative, done in runs.items():
        tokens, rounds, drafted, accepted = (
            sum(getattr(run.stats, name) for run in done)
            for name in ("emitted", "rounds", "drafted", "accepted")
        )
        speeds[speculative] = tokens / sum(run.stats.seconds for run in done)
        line = f"{'speculative' if speculative else 'plain':12}{speeds[speculative]:6.0f} tokens/s"
        line += f"  {tokens / rounds:.2f} tokens per round"
        print(line + (f"  acceptance {accepted / drafted:.0%}" if drafted else ""))
    print(f"speculative decoding is {speeds[True] / speeds[False]:.2f} times as fast here")
    give_tips()


if __name__ == "__main__":
    typer.run(main)
