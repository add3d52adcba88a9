"""The command `repl`: prompts and options one after another."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..generation import SpeculativeDecoder
from .options import DecoderOptions, SamplingOptions, draft_of, in_output, model_name, with_groups
from .shaping import UNSHOWN, ShapingOptions, choose
from .terminal import SOME_FAILED, failure, is_terminal, note, one_line


@with_groups(changes={"num_return_sequences": {"hidden": True}, **UNSHOWN})
def repl(
    ctx: typer.Context,
    *,
    options: DecoderOptions,
    sampling: SamplingOptions,
    shaping: ShapingOptions,
    show_drafts: Annotated[
        bool, in_output(help="On a terminal, colour tokens by where they came from.")
    ] = True,
    history: Annotated[
        Path | None,
        in_output(
            help="Keep the lines typed on a terminal, prompts included, in this file, and find "
            "them again in later sessions.",
            show_default="they are not kept",
        ),
    ] = None,
) -> None:
    """Try prompts and options one after another, on models that are loaded once.

    Each line is a prompt, or a command that begins with a slash; /help lists the commands. On a
    terminal, exit, quit and help also work without the slash.
    """
    from .conversation import Conversation, Settings, typed_lines

    chosen = choose(ctx, options, sampling, shaping)
    options, keywords = chosen.models, chosen.keywords
    own = {name: keywords.pop(name) for name in vars(sampling)}
    first = options.load()

    def remake(wanted: Settings) -> SpeculativeDecoder:
        return replace(
            options, num_draft=wanted.num_draft, delta=wanted.delta, verify=wanted.verify,
            prefix=wanted.prefix,
        ).remake(first)  # fmt: skip

    settings = Settings(
        options.num_draft, options.delta, options.verify, **own,
        show_drafts=show_drafts, prefix=first.prefix,
    )  # fmt: skip
    typed, failed = is_terminal(sys.stdin), False
    conversation = Conversation(remake, settings, keywords, typed=typed)
    if typed:
        draft = draft_of(options.model, options.draft_model)
        drafts = f", {model_name(draft)} drafts" if draft else ""
        note(f"{model_name(options.model)}{drafts}; prefix {first.prefix!r}; "
             "/help lists the commands, Ctrl-D leaves")  # fmt: skip
    for line in typed_lines(history):
        try:
            if not conversation.handle(line):
                break
        except ValueError as error:
            failed = True
            note(f"error: {one_line(str(error))}")
        except (RuntimeError, MemoryError) as error:
            failed = True
            note(f"error: {one_line(failure(error))}")
        except KeyboardInterrupt:
            if not typed:
                raise
            note("stopped")
    if failed and not typed:  # whoever typed has seen the errors
        raise typer.Exit(SOME_FAILED)
