"""Predictions: texts that outputs are expected to resemble, which drafts copy."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.cli.options import DecoderOptions
from speculative_t5.decoding import LookupDrafter, Request, RowOptions, decode
from speculative_t5.decoding.drafters import MOST_LAG
from speculative_t5.decoding.lookup import Lookup
from speculative_t5.decoding.sampling import Sampler
from speculative_t5.generation import GenerationOptions
from speculative_t5.serve import Models, to_serve
from speculative_t5.serve.completions import num_in_common

import pytest
from conftest import KINDS, tiny_pair
from messages import check_message
from serving import serving, wait_until
from test_decoder import DRAFTERS, with_drafter
from test_serve_texts import LEARNERS

GIVEN = "max_tokens", "min_tokens", "temperature", "seed"
SAMPLERS = [Sampler(), Sampler(1.0), Sampler(0.7, top_k=3), Sampler(2.0, top_p=0.8)]


def proposed(
    prediction: Sequence[int], source: Sequence[int], output: Sequence[int], *, given: int = 1
) -> list[int]:
    lookup = Lookup(source, 1, 8, given)
    lookup.expect(prediction)
    return lookup.propose([*output], 3)


def test_the_first_tokens_are_those_of_the_prediction() -> None:
    assert proposed([5, 6, 7, 8], [9, 5, 9], [0]) == [5, 6, 7]
    assert proposed([5, 6], [9, 5, 9], [0]) == [5, 6], "and none of the source"
    assert proposed([5, 6], [], [20, 21, 22], given=3) == [5, 6]
    assert proposed([], [9, 5, 9], [0]) == []


def test_an_output_that_has_left_the_prediction_comes_back_to_it() -> None:
    prediction = [11, 12, 13, 14, 15, 16, 17]
    assert proposed(prediction, [], [0, 11, 12, 13]) == [14, 15, 16]
    assert proposed(prediction, [], [0, 11, 12, 30]) == [14, 15, 16], "one that was replaced"
    assert proposed(prediction, [], [0, 11, 12, 30, 31]) == [], "it may go on in any way"
    assert proposed(prediction, [], [0, 11, 12, 30, 31, 15]) == [16, 17]


def test_the_place_of_a_copy_is_counted_from_where_the_output_begins() -> None:
    prediction = [7, 1, 7, 2, 7, 3, 7, 4, 7, 5]
    prompt = [30, 31, 32, 33, 34, 35]
    for count in range(1, len(prediction)):
        alone = proposed(prediction, [], [0, *range(50, 49 + count), 7])
        assert proposed(prediction, [], [*prompt, *range(50, 49 + count), 7], given=6) == alone


def test_a_prediction_goes_before_the_source_of_a_copy() -> None:
    assert proposed([5, 6, 7], [5, 6, 8], [0, 5, 6]) == [7], "and not what stands behind it"
    assert proposed([9, 5, 6, 7], [5, 6, 8], [0, 5, 6]) == [7]
    assert proposed([4, 4, 4], [5, 6, 8], [0, 5, 6]) == [8]


@pytest.mark.parametrize("drafter", DRAFTERS[:3])
@pytest.mark.parametrize("kind", [*KINDS, "sharing", "blocks", "gpt2"])
def test_outputs_are_the_same_with_any_prediction(kind: str, drafter: str) -> None:
    """Rows with predictions of their own, right, nearly so and wrong, join and leave."""
    pair, draw = tiny_pair(kind, vocab_size=9), random.Random(0)
    decoder = with_drafter(pair, drafter)
    prompts = [[2 + draw.randrange(7) for _ in range(draw.randint(1, 6))] for _ in range(24)]

    def outputs(predictions: Sequence[Sequence[int]]) -> list[list[int]]:
        rows = zip(prompts, predictions, strict=True)
        requests = [
            Request(i, prompt, RowOptions(SAMPLERS[i % 4], 12, seed=i, prediction=tuple(expected)))
            for i, (prompt, expected) in enumerate(rows)
        ]
        found: list[list[int]] = [[] for _ in prompts]
        for done in decode(pair[0], requests, decoder.engine.plan(expects=True), batch_size=5):
            found[done.index] += done.tokens
        return found

    plain = outputs([()] * len(prompts))
    assert len({*map(tuple, plain)}) > 8
    for _ in range(3):
        predictions = [[*each] for each in plain]
        for i, each in enumerate(predictions):
            for _ in range(i % 4 and each and draw.randint(0, 3) or 0):
                each[draw.randrange(len(each))] = draw.randrange(9)
            if i % 5 == 0:
                each.clear()
        assert outputs(predictions) == plain


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 4}])
def test_a_right_prediction_takes_as_many_passes_as_drafts_are_long(options: Any) -> None:
    decoder = SpeculativeDecoder.from_pretrained("correct-base", num_draft=4)
    rounds, usual_rounds = 0, 0
    for prompt in LEARNERS[:6]:
        usual = decoder.generate(prompt, **options)
        for prediction in (usual.text, usual.tokens):
            done = decoder.generate(prompt, prediction=prediction, **options)
            assert done.tokens == usual.tokens
            least = -(-done.stats.emitted // 5)
            # Where ids do not end with EOS, the model has to draft that.
            assert least <= done.stats.rounds <= least + (prediction == usual.tokens)
            rounds, usual_rounds = rounds + done.stats.rounds, usual_rounds + usual.stats.rounds
        wrong = decoder.generate(prompt, prediction="Quite another text.", **options)
        assert wrong.tokens == usual.tokens
    assert rounds < usual_rounds


def test_a_prediction_ends_with_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next prompt in its place has none, and its draft is the model's."""
    target, draft = tiny_pair("t5", vocab_size=9)
    decoder = SpeculativeDecoder(target, draft, num_draft=3)

    looked_up, find = [], LookupDrafter.find

    def counted(drafter: LookupDrafter, *given: Any) -> list[list[int]]:
        looked_up.append(given)
        return find(drafter, *given)

    monkeypatch.setattr(LookupDrafter, "find", counted)
    requests = [
        Request(i, [3, 4, 1], RowOptions(max_tokens=9, prediction=expected))
        for i, expected in enumerate([(5, 6, 5, 6, 5), (), (5, 6), ()])
    ]
    plan = decoder.engine.plan(expects=True)
    found = {done.index: done.stats for done in decode(target, requests, plan, batch_size=1)}
    assert len(looked_up) == sum(num > 0 for i in (0, 2) for num in found[i].num_draft)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_has_read_nearly_all_that_was_copied(temperature: float) -> None:
    """Else a round, for all rows, would wait until it has read an output of any length."""
    target, draft = tiny_pair("t5", vocab_size=9)
    decoder = SpeculativeDecoder(target, draft, num_draft=3)
    options = GenerationOptions(max_tokens=120, min_tokens=120, temperature=temperature, seed=2)
    own, plan = decoder.engine.bind(options), decoder.engine.plan(expects=True)
    alone = decoder.generate([3, 4, 1], **{each: getattr(options, each) for each in GIVEN}).tokens
    drafter: Any = plan.drafter
    known = replace(own, prediction=tuple(alone))
    lags, found = [], list[int]()
    for done in decode(target, [Request(0, [3, 4, 1], known)], plan, batch_size=1):
        found += done.tokens
        lags.append(drafter._model.lag([[0, *found]]))
    assert found == alone and len(lags) < 40
    assert max(lags) <= MOST_LAG + 4


def test_rows_beyond_what_a_draft_reads_are_decoded_without_it() -> None:
    """A draft's context may be shorter than its target's; some rows copy, and some do not."""
    target, draft = tiny_pair("gpt2", vocab_size=9)
    draft.info = replace(draft.info, max_context=6)
    decoder = SpeculativeDecoder(target, draft, num_draft=3)
    prompts = [[2, 3, 4, 5, 6, 7, 8, 2], [3, 4, 5, 6, 7, 8, 2, 3]]
    plain = [decoder.generate(each, max_tokens=9, speculative=False).tokens for each in prompts]
    for known in ([plain[0], []], [[], plain[1]], [plain[0], plain[0]]):
        requests = [
            Request(i, prompt, RowOptions(max_tokens=9, prediction=tuple(own)))
            for i, (prompt, own) in enumerate(zip(prompts, known, strict=True))
        ]
        found: list[list[int]] = [[], []]
        plan = decoder.engine.plan(expects=True)
        for done in decode(target, requests, plan, batch_size=2):
            found[done.index] += done.tokens
        assert found == plain


def test_wrong_predictions_are_refused() -> None:
    target, draft = tiny_pair("t5", vocab_size=9)
    decoder = SpeculativeDecoder(target, draft, num_draft=3)
    with pytest.raises(ValueError) as error:
        decoder.generate([3, 4, 1], prediction="text")
    check_message(str(error.value), "text")
    with pytest.raises(ValueError) as error:
        decoder.generate([3, 4, 1], prediction=[3, 9])
    check_message(str(error.value), "9")
    with pytest.raises(ValueError) as error:
        GenerationOptions(num_beams=2, prediction="text")
    check_message(str(error.value), "2")
    wrong: list[Any] = [7, [-1], [1.5], ["a"], b"abc"]
    for each in wrong:
        with pytest.raises(ValueError) as error:
            GenerationOptions(prediction=each)
        check_message(str(error.value), str(each[0]) if isinstance(each, list) else str(each))


def test_usage_says_how_much_of_a_prediction_came() -> None:
    assert num_in_common(Counter([5, 6, 6, 7, 1]), [6, 5, 8, 1]) == 3
    assert num_in_common(Counter([5, 6]), [6, 6, 6]) == 1
    assert num_in_common(Counter(), [6]) == num_in_common(Counter([6]), []) == 0


def test_requests_have_predictions_as_openai_does(place: Path) -> None:
    target, draft = str(place / "weights" / "target"), str(place / "weights" / "draft")
    decoder = SpeculativeDecoder.from_pretrained(target, draft, num_draft=3)
    options = DecoderOptions(model=target)
    model = to_serve("tiny", target, options, lambda: decoder, batch_size=4, max_queue=9)
    usual = decoder.generate("The old man", max_tokens=12)
    with serving(Models([model])) as server:
        wait_until(lambda: server.client.get("/health").status_code == 200)

        def ask(prediction: Any, **fields: Any) -> Any:
            chat = {"messages": [{"role": "user", "content": "The old man"}], "max_tokens": 12}
            return server.post("/v1/chat/completions", **chat, prediction=prediction, **fields)

        contents: list[Any] = [usual.text, [{"type": "text", "text": usual.text}], "The sea"]
        for content in contents:
            answer = ask({"type": "content", "content": content}).json()
            assert answer["choices"][0]["message"]["content"] == usual.text
            details = answer["usage"]["completion_tokens_details"]
            accepted, rejected = details.values()
            assert [*details] == ["accepted_prediction_tokens", "rejected_prediction_tokens"]
            text = content if isinstance(content, str) else usual.text
            assert accepted + rejected == len(decoder.engine.predicted(text))
            assert (accepted > rejected) == (text == usual.text)
        long = ask({"type": "content", "content": "The old man and the sea. " * 3000})
        assert long.json()["choices"][0]["message"]["content"] == usual.text
        expected = {"type": "content", "content": usual.text}
        streamed = ask(expected, stream=True, stream_options={"include_usage": True}).text
        assert "accepted_prediction_tokens" in streamed
        assert "completion_tokens_details" not in ask(None).json()["usage"]
        for wrong in ("text", {"type": "other"}, {"type": "content", "content": 7}, [1]):
            refused = ask(wrong)
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert error["param"].startswith("prediction")
            check_message(error["message"])
