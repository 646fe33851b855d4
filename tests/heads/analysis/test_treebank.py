"""CoNLL-U files: words and their heads, where they stand in the text, who is spoken of, and what bad lines are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard.heads.analysis.treebank import Mention, Sentence, Word, read, sentences

CATS = """
# sent_id = cats-1
# text = Cats don't swim.
1 Cats _ NOUN _ _ 4 nsubj _ _
2-3 don't _ _ _ _ _ _ _ _
2 do _ AUX _ _ 4 aux _ _
3 n't _ PART _ _ 4 advmod _ _
4 swim _ VERB _ _ 0 root _ SpaceAfter=No
5 . _ PUNCT _ _ 4 punct _ _
"""


def written(folder: Path, text: str) -> Path:
    """A file of columns divided by single spaces here, by tabs there; comments as they are."""
    path = folder / "some.conllu"
    lines = [line if line.startswith("#") else line.replace(" ", "\t") for line in text.strip("\n").split("\n")]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def one(folder: Path, text: str) -> Sentence:
    (sentence,) = read(written(folder, text))
    return sentence


# ----------------------------------------------------------------------------------------------------
# Words


def test_words_have_form_head_relation_part_of_speech_and_place(tmp_path: Path) -> None:
    sentence = one(tmp_path, CATS)
    assert sentence.words == (
        Word("Cats", 3, "nsubj", "NOUN", (0, 4)),
        Word("do", 3, "aux", "AUX", (5, 7)),
        Word("n't", 3, "advmod", "PART", (7, 10)),
        Word("swim", None, "root", "VERB", (11, 15)),
        Word(".", 3, "punct", "PUNCT", (15, 16)),
    )
    assert sentence.text == "Cats don't swim."
    assert sentence.name == "cats-1"
    assert sentence.mentions == ()


def test_text_is_rebuilt_from_tokens_where_the_file_has_none(tmp_path: Path) -> None:
    without = "\n".join(line for line in CATS.split("\n") if not line.startswith("# text"))
    assert one(tmp_path, without) == one(tmp_path, CATS)


def test_text_is_rebuilt_where_the_files_own_does_not_hold_its_tokens(tmp_path: Path) -> None:
    for other in ("Cats do not swim.", "All cats don't swim.", "Cats don't swim. No!", "Cats really don't swim."):
        assert one(tmp_path, CATS.replace("# text = Cats don't swim.", f"# text = {other}")).text == "Cats don't swim."


def test_wide_spaces_of_the_files_own_text_are_kept(tmp_path: Path) -> None:
    sentence = one(tmp_path, CATS.replace("Cats don't", "Cats   don't"))
    assert sentence.text == "Cats   don't swim."
    assert [sentence.text[slice(*word.span)] for word in sentence.words if word.span] == [
        "Cats",
        "do",
        "n't",
        "swim",
        ".",
    ]


def test_words_of_a_token_written_otherwise_have_no_place(tmp_path: Path) -> None:
    sentence = one(
        tmp_path,
        """
1 Fin _ NOUN _ _ 0 root _ _
2-3 du _ _ _ _ _ _ _ _
2 de _ ADP _ _ 4 case _ _
3 le _ DET _ _ 4 det _ _
4 jour _ NOUN _ _ 1 nmod _ _
""",
    )
    assert sentence.text == "Fin du jour"
    assert [word.span for word in sentence.words] == [(0, 3), None, None, (7, 11)]


def test_space_after_the_last_word_of_a_token_is_the_tokens(tmp_path: Path) -> None:
    sentence = one(
        tmp_path,
        """
1-2 don't _ _ _ _ _ _ _ SpaceAfter=No
1 do _ AUX _ _ 0 root _ SpaceAfter=No
2 n't _ PART _ _ 1 advmod _ _
3 ! _ PUNCT _ _ 1 punct _ _
""",
    )
    assert sentence.text == "don't!"


def test_empty_nodes_are_no_words_and_do_not_shift_heads(tmp_path: Path) -> None:
    sentence = one(
        tmp_path,
        """
1 Ann _ PROPN _ _ 2 nsubj _ _
2 likes _ VERB _ _ 0 root _ _
3 tea _ NOUN _ _ 2 obj _ _
3.1 likes _ VERB _ _ _ _ 2:conj _
4 too _ ADV _ _ 2 advmod _ _
""",
    )
    assert [(word.form, word.head) for word in sentence.words] == [("Ann", 1), ("likes", None), ("tea", 1), ("too", 1)]
    assert sentence.text == "Ann likes tea too"


def test_an_empty_node_may_come_first(tmp_path: Path) -> None:
    assert [word.form for word in one(tmp_path, "0.1 I _ PRON _ _ _ _ _ _\n1 Go _ VERB _ _ 0 root _ _").words] == ["Go"]


def test_words_without_a_tree_have_no_head(tmp_path: Path) -> None:
    assert one(tmp_path, "1 Hello _ _ _ _ _ _ _ _").words == (Word("Hello", None, "_", "_", (0, 5)),)


def test_several_sentences_of_several_documents(tmp_path: Path) -> None:
    word = "1 Yes _ INTJ _ _ 0 root _ _"
    path = written(tmp_path, f"# newdoc id = a\n{word}\n\n\n{word}\n\n# newdoc\n# sent_id = c\n{word}\n\n# the end\n")
    assert [(s.document, s.name) for s in read(path)] == [(0, ""), (0, ""), (1, "c")]
    assert read(path, limit=2) == list(sentences(path))[:2]


def test_sentences_come_one_at_a_time(tmp_path: Path) -> None:
    path = written(tmp_path, "1 Yes _ INTJ _ _ 0 root _ _\n\n1 No")
    assert next(sentences(path)).text == "Yes"  # what is wrong comes later


def test_windows_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = written(tmp_path, CATS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read(path) == [one(tmp_path, CATS)]


def test_an_empty_file_has_no_sentences(tmp_path: Path) -> None:
    assert read(written(tmp_path, "")) == []


# ----------------------------------------------------------------------------------------------------
# Mentions

HE = """
# newdoc
# global.Entity = eid-etype-head-other
1 The _ DET _ _ 2 det _ Entity=(e1-person-2-
2 son _ NOUN _ _ 7 nsubj _ _
3 of _ ADP _ _ 5 case _ _
4 his _ PRON _ _ 5 nmod:poss _ Entity=(e2-person-2-(e3-person-1-)
5 friend _ NOUN _ _ 2 nmod _ Entity=e2)e1)
6 has _ AUX _ _ 7 aux _ _
7 left _ VERB _ _ 0 root _ _
"""


def test_nested_mentions(tmp_path: Path) -> None:
    assert one(tmp_path, HE).mentions == (
        Mention("e1", (0, 1, 2, 3, 4), 1),
        Mention("e3", (3,), 3),
        Mention("e2", (3, 4), 4),
    )


@pytest.mark.parametrize("fields", ["eid-etype-other", "eid-etype-minspan"])
def test_the_tree_says_the_head_where_the_brackets_do_not(tmp_path: Path, fields: str) -> None:
    with_heads = one(tmp_path, HE).mentions
    assert one(tmp_path, HE.replace("eid-etype-head-other", fields)).mentions == with_heads
    assert one(tmp_path, HE.replace("-person-2-", "").replace("-person-1-", "")).mentions == with_heads


def test_the_brackets_say_the_head_before_the_tree(tmp_path: Path) -> None:
    assert one(tmp_path, HE.replace("(e1-person-2-", "(e1-person-5-")).mentions[0] == Mention("e1", (0, 1, 2, 3, 4), 4)


def test_the_entity_may_stand_elsewhere_in_the_brackets(tmp_path: Path) -> None:
    sentence = one(
        tmp_path,
        """
# global.Entity = etype-GRP
1 Ann _ PROPN _ _ 0 root _ Entity=(person-7
2 Lee _ PROPN _ _ 1 flat _ Entity=person-7)
""",
    )
    assert sentence.mentions == (Mention("7", (0, 1), 0),)


def test_crossing_mentions(tmp_path: Path) -> None:
    sentence = one(
        tmp_path,
        """
1 a _ X _ _ 2 dep _ Entity=(e1
2 b _ X _ _ 0 root _ Entity=(e2
3 c _ X _ _ 2 dep _ Entity=e1)(e3
4 d _ X _ _ 3 dep _ Entity=e3)e2)
""",
    )
    assert sentence.mentions == (Mention("e1", (0, 1, 2), 1), Mention("e2", (1, 2, 3), 1), Mention("e3", (2, 3), 2))


def test_mentions_of_one_entity_within_each_other(tmp_path: Path) -> None:
    sentence = one(
        tmp_path,
        """
1 a _ X _ _ 3 dep _ Entity=(e1-x-3(e1-x-1
2 b _ X _ _ 1 dep _ Entity=e1)
3 c _ X _ _ 0 root _ Entity=e1)
""",
    )
    assert set(sentence.mentions) == {Mention("e1", (0, 1, 2), 2), Mention("e1", (0, 1), 0)}


def test_a_mention_in_parts(tmp_path: Path) -> None:
    sentence = one(
        tmp_path,
        """
1 a _ X _ _ 5 dep _ Entity=(e1[1/3]-x-4
2 b _ X _ _ 5 dep _ Entity=e1[1/3])
3 c _ X _ _ 5 dep _ _
4 d _ X _ _ 5 dep _ Entity=(e1[2/3]-x-4)
5 e _ X _ _ 0 root _ Entity=(e2)
6 f _ X _ _ 5 dep _ Entity=(e1[3/3]-x-4)
""",
    )
    assert sentence.mentions == (Mention("e1", (0, 1, 3, 5), 5), Mention("e2", (4,), 4))


def test_a_mention_whose_head_was_not_written_has_none(tmp_path: Path) -> None:
    sentence = one(
        tmp_path,
        """
1 Came _ VERB _ _ 0 root _ _
1.1 he _ PRON _ _ _ _ 1:nsubj Entity=(e1-person-1
2 alone _ ADJ _ _ 1 advcl _ Entity=e1)
""",
    )
    assert sentence.mentions == (Mention("e1", (1,), None),)


def test_tags_of_another_scheme_are_no_mentions(tmp_path: Path) -> None:
    assert one(tmp_path, "1 Rome _ PROPN _ _ 0 root _ Entity=B-LOC|Wiki=Rome").mentions == ()


# ----------------------------------------------------------------------------------------------------
# What is wrong


@pytest.mark.parametrize(
    "lines, number, said",
    [
        ("# text = x\n1 x _ X _ _ 0 root _", 2, "expected 10 columns divided by tabs, received 9"),
        ("1 x _ X _ _ 0 root _ _\n3 y _ X _ _ 1 dep _ _", 2, "expected word 2, received 3"),
        ("2 x _ X _ _ 0 root _ _", 1, "expected word 1, received 2"),
        ("one x _ X _ _ 0 root _ _", 1, r"expected the number of a word \(3\), a token .*, received 'one'"),
        ("1-1.2 x _ X _ _ 0 root _ _", 1, "expected the number of a word .*, received '1-1.2'"),
        (
            "1 x _ X _ _ 0 root _ _\n\n1 x _ X _ _ 2 dep _ _\n2 y _ X _ _ 3 dep _ _",
            4,
            "expected a head from 0 to 2, the words of the sentence, received '3'",
        ),
        ("1 x _ X _ _ up dep _ _", 1, "expected a head from 0 to 1, .*, received 'up'"),
        ("1 x _ X _ _ 1 dep _ _", 1, "expected a head other than the word itself, received 1"),
        ("2-3 xy _ _ _ _ _ _ _ _", 1, "expected a token that begins with word 1, .*received 2-3"),
        ("1-3 xyz _ _ _ _ _ _ _ _\n1 x _ X _ _ 0 root _ _\n2-3 yz _ _ _ _ _ _ _ _", 3, "expected a token that begins"),
        ("1-2 xy _ _ _ _ _ _ _ _\n1 x _ X _ _ 0 root _ _", 2, "expected words up to 2, of token 'xy', received 1"),
        ("0.1 x _ X _ _ _ _ _ _", 1, "expected at least one word in a sentence, received none"),
        ("1 x _ X _ _ 0 root _ Entity=e1)", 1, r"expected a bracket of 'e1' opened before .*, received 'e1\)'"),
        ("1 x _ X _ _ 0 root _ Entity=(e1\n2 y _ X _ _ 1 dep _ _", 1, "expected the bracket of 'e1' closed"),
        ("1 x _ X _ _ 0 root _ Entity=(e1[1/2])", 1, "expected the other parts of a mention .*received some of 'e1'"),
        ("1 x _ X _ _ 0 root _ Entity=(e1)e2", 1, "expected brackets of entities such as .*received '.e1.e2'"),
        ("1 x _ X _ _ 0 root _ Entity=(e1-x-2)", 1, "expected a head from 1 to 1, the words of 'e1', received 2"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_its_number(tmp_path: Path, lines: str, number: int, said: str) -> None:
    path = written(tmp_path, lines)
    with pytest.raises(ValueError, match=rf"some\.conllu, line {number}: {said}"):
        read(path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "some.conllu"
    path.write_bytes(b"# fine\n1\tcaf\xe9\n")
    with pytest.raises(ValueError, match=r"some\.conllu, line 2: expected text in UTF-8, received byte 0xe9"):
        read(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.conllu")


def test_limits_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit: expected a positive integer, or None for all, received 0"):
        read(written(tmp_path, CATS), limit=0)
    with pytest.raises(TypeError, match=r"limit: expected a positive integer, or None for all, received 2\.5"):
        read(written(tmp_path, CATS), limit=2.5)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------
# What no treebank holds


@pytest.mark.parametrize(
    "column, words",
    [
        ("number", r"expected the number of a word \(3\), a token \(3-4\) or an empty node \(3\.1\), received '999"),
        ("range", r"expected the number of a word .*, received '1-999"),
        ("empty", r"expected the number of a word .*, received '999.*\.1'"),
        ("head", r"expected a head from 0 to 1, the words of the sentence, received '999"),
        ("other digits", r"expected the number of a word .*, received '١'"),
    ],
)
def test_numbers_of_thousands_of_digits_are_told_with_their_line(tmp_path: Path, column: str, words: str) -> None:
    many = "9" * 5000
    number = {"number": many, "range": f"1-{many}", "empty": f"{many}.1", "other digits": "١"}.get(column, "1")
    head = many if column == "head" else "0"
    with pytest.raises(ValueError, match=rf"some\.conllu, line 2: {words}") as error:
        read(written(tmp_path, f"# text = x\n{number} x _ X _ _ {head} root _ _"))
    assert len(str(error.value)) < 400


def test_a_token_longer_than_its_sentence_takes_no_memory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 2: expected words up to 999999999, of token 'x', received 1"):
        read(written(tmp_path, "1-999999999 x _ _ _ _ _ _ _ _\n1 x _ X _ _ 0 root _ _"))


@pytest.mark.parametrize(
    "heads, line, circle",
    [
        ([2, 1], 1, "'1', '2'"),
        ([2, 3, 1], 1, "'1', '2', '3'"),
        ([0, 3, 4, 2], 2, "'2', '3', '4'"),
        ([2, 3, 4, 3], 3, "'3', '4'"),
    ],
)
def test_a_circle_is_no_tree(tmp_path: Path, heads: list[int], line: int, circle: str) -> None:
    lines = [f"{i} x _ X _ _ {head} dep _ _" for i, head in enumerate(heads, 1)]
    words = rf"line {line}: expected a tree: no word that depends on itself through others, received words \[{circle}\]"
    with pytest.raises(ValueError, match=words):
        read(written(tmp_path, "\n".join(lines)))


def test_a_long_chain_is_a_tree_and_several_roots_are_several_trees(tmp_path: Path) -> None:
    lines = [f"{i} x _ X _ _ {i + 1 if i < 3000 else 0} dep _ _" for i in range(1, 3001)]
    assert one(tmp_path, "\n".join(lines)).words[0].head == 1
    assert [word.head for word in one(tmp_path, "1 x _ X _ _ 0 a _ _\n2 y _ X _ _ _ b _ _").words] == [None, None]


def test_mentions_around_mentions_without_end_are_refused(tmp_path: Path) -> None:
    """Each holds all words within it: of n mentions around n words that is their square."""
    lines = [f"{i} x _ X _ _ 0 root _ Entity=(e{i}-person" for i in range(1, 301)]
    with pytest.raises(ValueError, match=r"line 257: expected at most 256 mentions around one word, received more"):
        read(written(tmp_path, "\n".join(lines)))
