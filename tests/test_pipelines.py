"""`pipeline`: the calls of transformers 4's pipelines, against transformers' own generation.

What transformers 4.57.1 returned for 40 calls with a tiny T5 was the same; transformers 5 has no
such pipelines, but generates alike.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, device, pipeline
from speculative_t5.generation.pipelines import TextPipeline

import pytest
from checkpoints import refused
from conftest import V1_1, edit_json, write_checkpoint

TEXTS = ["He go home.", "She", "I am late for the train and she is not."]
TASKS = {
    "summarization": {
        "prefix": "sum: ",
        "num_beams": 2,
        "max_length": 12,
        "min_length": 3,
        "no_repeat_ngram_size": 3,
    },
    "translation_en_to_de": {"prefix": "to German: ", "max_length": 9},
    "translation_en_to_fr": {"prefix": "to French: "},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> Path:
    place = tmp_path_factory.mktemp("models") / "tiny"
    place.mkdir()
    write_checkpoint(place, V1_1, spiece)
    edit_json(place / "config.json", task_specific_params=TASKS, tie_word_embeddings=False)
    return place


@pytest.fixture(scope="module")
def generated(folder: Path) -> Any:
    """What transformers generates: the texts of each prompt."""
    import torch
    from transformers import AutoTokenizer, T5ForConditionalGeneration

    model = T5ForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def texts(prompt: str, **options: Any) -> list[str]:
        source = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            found = model.generate(**source, **options)
        return tokenizer.batch_decode(found, skip_special_tokens=True)

    return texts


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("summarization", {}),
    ("summarization", {"num_beams": 1}),
    ("summarization", {"max_length": 8}),
    ("summarization", {"max_new_tokens": 9, "min_new_tokens": 7}),
    ("summarization", {"max_length": 9, "min_length": 8, "num_beams": 1}),
    ("summarization", {"num_beams": 3, "num_return_sequences": 2}),
    ("summarization", {"repetition_penalty": 3.0, "num_beams": 1}),
    ("summarization", {"length_penalty": 2.0, "early_stopping": True, "num_beams": 4}),
    ("translation_en_to_de", {}),
    ("translation_en_to_fr", {"max_new_tokens": 6}),
    ("text2text-generation", {"max_new_tokens": 7}),
    ("text2text-generation", {"max_new_tokens": 7, "num_beams": 4, "bad_words_ids": [[5], [6]]}),
    ("text2text-generation", {"max_new_tokens": 7, "begin_suppress_tokens": [4, 8]}),
]


@pytest.mark.parametrize(("task", "options"), CALLS)
def test_calls_return_what_transformers_generates(
    task: str, options: dict[str, Any], folder: Path, generated: Any
) -> None:
    made = pipeline(task, model=folder)
    own = dict(TASKS.get(task, {}))
    prefix = own.pop("prefix", "")
    if "max_new_tokens" in options:
        own.pop("max_length", None)
    if "min_new_tokens" in options:
        own.pop("min_length", None)
    name = made.return_name
    expected = [
        [{name: text} for text in generated(prefix + text, **own | options)] for text in TEXTS
    ]
    assert [made(text, **options) for text in TEXTS] == expected
    single = len(expected[0]) == 1
    in_a_list = [records[0] for records in expected] if single else expected
    for size in (None, 1, 2):
        assert made(TEXTS, batch_size=size, **options) == in_a_list
        assert [*made((text for text in TEXTS), batch_size=size, **options)] == expected
    assert pipeline(task, str(folder), batch_size=2, **options)(TEXTS) == in_a_list


def test_lists_and_datasets(folder: Path) -> None:
    made = pipeline("summarization", folder, num_beams=1)
    assert made([]) == []
    assert made(TEXTS[:1]) == made(TEXTS[0])

    class Dataset:
        def __len__(self) -> int:
            return len(TEXTS)

        def __getitem__(self, index: int) -> str:
            return TEXTS[index]

    assert [*made(Dataset())] == [[record] for record in made(TEXTS)]
    read = []

    def endless() -> Iterator[str]:
        for text in TEXTS * 10:
            read.append(text)
            yield text

    results = iter(made(endless(), batch_size=2))
    assert not read
    assert next(results) == made(TEXTS[0]) and len(read) == 2


def test_a_translation_takes_the_first_pair_of_a_checkpoint(folder: Path) -> None:
    made = pipeline("translation", folder)
    assert made(TEXTS) == pipeline("translation_en_to_de", folder)(TEXTS)
    french = pipeline("translation_en_to_fr", folder)(TEXTS)
    assert made(TEXTS, src_lang="en", tgt_lang="fr", max_new_tokens=256) == french
    assert made(TEXTS, prefix="to French: ", max_new_tokens=256) == french
    with refused("is not among the model's languages"):
        made("a", tgt_lang="it", src_lang="en")


def test_an_empty_text_has_an_output(folder: Path, generated: Any) -> None:
    made = pipeline("text2text-generation", folder, max_new_tokens=5)
    assert made("") == [{"generated_text": generated("", max_new_tokens=5)[0]}]


def test_samples_depend_on_the_seed(folder: Path) -> None:
    made = pipeline("text2text-generation", folder, do_sample=True, max_new_tokens=8)
    decoder = SpeculativeDecoder.from_pretrained(folder)
    special = decoder.tokenizer.vocabulary.special  # type: ignore[union-attr]
    for options in ({}, {"temperature": 0.5, "top_k": 5}):
        texts = []
        for seed in (0, 1):
            ours: Any = {"temperature": 1.0, "top_k": 50, "max_tokens": 8, "seed": seed}
            tokens = decoder.generate(TEXTS[0], **ours | options).tokens
            kept = [token for token in tokens if token not in special]
            texts.append(decoder.tokenizer.decode(kept))  # type: ignore[union-attr]
            assert made(TEXTS[0], seed=seed, **options) == [{"generated_text": texts[-1]}]
        assert len({*texts}) == 2
    assert len(made(TEXTS[0], num_return_sequences=3)) == 3


def test_long_texts_are_read_whole_with_a_warning_or_cut(folder: Path, generated: Any) -> None:
    edit_json(folder / "config.json", n_positions=16)
    try:
        made = pipeline("text2text-generation", folder, max_new_tokens=6)
    finally:
        edit_json(folder / "config.json", n_positions=None)
    long = " ".join(TEXTS)
    with pytest.warns(UserWarning, match="more than the 16 that the model is made for"):
        assert made(long) == [{"generated_text": generated(long, max_new_tokens=6)[0]}]
    cut = made.decoder.encode(long)[:15] + [1]
    expected = made.decoder.generate(cut, max_tokens=6).tokens
    (record,) = made(long, truncation=True)
    special = made.decoder.tokenizer.vocabulary.special  # type: ignore[union-attr]
    kept = [token for token in expected if token not in special]
    assert record["generated_text"] == made.decoder.tokenizer.decode(kept)  # type: ignore


def test_a_decoder_of_ones_own_may_be_given(folder: Path) -> None:
    decoder = SpeculativeDecoder.from_pretrained(folder, "lookup", num_draft=3)
    options: Any = {"max_new_tokens": 8}
    ours = pipeline("text2text-generation", decoder, **options)
    assert isinstance(ours, TextPipeline)
    assert ours(TEXTS) == pipeline("text2text-generation", folder, **options)(TEXTS)
    with refused("leave draft and dtype out"):
        pipeline("text2text-generation", decoder, draft="lookup")
    again = pipeline("text2text-generation", decoder, tokenizer=decoder.tokenizer, **options)
    assert again(TEXTS) == ours(TEXTS)
    assert again.decoder.drafts, "the decoder's own options hold"


def test_clean_up_removes_spaces_before_punctuation(folder: Path) -> None:
    made = pipeline("text2text-generation", folder, max_new_tokens=3)
    decode = made.decoder.tokenizer.decode  # type: ignore[union-attr]
    made.decoder.tokenizer.decode = lambda ids: "No , he did n't ."  # type: ignore
    try:
        assert made("a") == [{"generated_text": "No , he did n't ."}]
        cleaned = made("a", clean_up_tokenization_spaces=True)
        assert cleaned == [{"generated_text": "No, he didn't."}]
    finally:
        made.decoder.tokenizer.decode = decode  # type: ignore[union-attr]


def test_what_cannot_be_done_is_refused_in_a_line(folder: Path) -> None:
    made: Any = pipeline("summarization", folder)
    for wrong in (5, None, ("a", "b"), b"a", {"a": 1}):
        with refused("inputs must be a text, a list of texts or an iterable"):
            made(wrong)
    for wrong in ([5], [["a"]], [{"text": "a"}]):
        with refused("inputs must be texts"):
            made(wrong)
    with refused("inputs must be texts"):
        [*made(iter([5]))]
    for options, message in (
        ({"junk": 1}, "no option 'junk': leave it out"),
        ({"max_lenght": 1}, "write max_length if you meant that"),
        ({"return_tensors": True}, "return_tensors is not offered"),
        ({"max_new_tokens": 0}, "max_tokens must be"),
        ({"num_beams": 0}, "num_beams must be"),
        ({"num_return_sequences": 2, "num_beams": 1}, "greedy decoding has only one output"),
        ({"penalty_alpha": 0.6}, "asked for penalty_alpha 0.6, which is not offered"),
    ):
        with refused(message):
            made("a", **options)
        with refused(message):
            pipeline("summarization", folder, **options)
    with refused("there is no pipeline for the task 'fill-mask'"):
        pipeline("fill-mask", folder)
    with refused("a pipeline has no model of its own"):
        pipeline("summarization")
    with refused("device is"):
        pipeline("summarization", folder, device="cuda" if device.on_cpu() else "cpu")
    assert pipeline("summarization", folder, device="cpu" if device.on_cpu() else 0)


def test_programs_over_pipelines_find_what_they_ask_for(folder: Path) -> None:
    """As langchain-huggingface and txtai 9.0 do: names, and options that mean nothing here."""
    found = pipeline("summarization", model=folder)
    assert found.task == "summarization" and found.model.name_or_path == folder.name
    assert found.tokenizer is found.decoder.tokenizer
    options: dict[str, Any] = {"max_length": 9, "min_length": 3, "truncation": True}
    plain = found(TEXTS, **options)
    assert found(TEXTS, num_workers=0, max_new_tokens=None, **options) == plain
