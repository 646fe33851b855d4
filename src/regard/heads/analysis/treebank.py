"""Read CoNLL-U files: sentences whose words are linked to their head words, and mentions of entities.

One line is one word, in ten columns divided by tabs; an empty line ends a sentence; lines that begin with # are
comments on the sentence (https://universaldependencies.org/format.html). What is read:

    1     words                     form, part of speech, head and relation
    3-4   multiword tokens          written as one, made of several words ("don't": do, n't)
    5.1   empty nodes               words that were not written: no part of the sentence, but a mention may hold them
    # text, SpaceAfter=No           where in the text each word is
    # newdoc                        where a document begins
    # global.Entity, Entity=(e1-person-2 ... e1)      mentions and their entities, as CorefUD writes them

Words are numbered from 0 here, from 1 in the file. Every error names the file and the line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from reprlib import repr as short
from typing import NamedTuple

from regard.errors import bad_type, bad_value
from regard.models.files import open_regular

__all__ = ["Mention", "Sentence", "Word", "read", "sentences"]

COLUMNS = 10
DEEPEST = 256  # mentions around one word: each stores all its words
ENTITY_FIELDS = ("eid", "etype", "head", "other")  # CorefUD's, if the file does not say

_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_RANGE = re.compile(r"([1-9][0-9]{0,8})-([1-9][0-9]{0,8})")
_EMPTY_NODE = re.compile(r"[0-9]{1,9}\.[1-9][0-9]{0,8}")
_BRACKET = re.compile(r"\((?P<opened>[^()]+)(?P<closed>\))?|(?P<closes>[^()]+)\)")
_PART = re.compile(r"\[(\d+)/(\d+)\]")


class Word(NamedTuple):
    """A word and its head.

    Attributes:
        form: as it is written.
        head: index of its head word; None for the root, and if the file does not say.
        relation: its relation to the head, such as "nsubj".
        upos: its part of speech, such as "NOUN".
        span: where it is in the text, `text[start:end]`. None for a word of a multiword token that is not the
            concatenation of its words (French "du", of de and le).
    """

    form: str
    head: int | None
    relation: str
    upos: str
    span: tuple[int, int] | None


class Mention(NamedTuple):
    """Words that refer to an entity.

    Attributes:
        entity: its name; the same name within one document is the same entity.
        words: their indices. They may have a gap; mentions may nest or cross.
        head: index of the head word; None if that word was not written.
    """

    entity: str
    words: tuple[int, ...]
    head: int | None


@dataclass(frozen=True)
class Sentence:
    """A sentence.

    Attributes:
        words: see `Word`.
        text: as it was written.
        mentions: of entities, in order of their first words. Empty if the file has none.
        document: number of its document in the file.
        name: its `sent_id`, or "".
    """

    words: tuple[Word, ...]
    text: str
    mentions: tuple[Mention, ...] = ()
    document: int = 0
    name: str = ""


def read(path: str | os.PathLike[str], limit: int | None = None) -> list[Sentence]:
    """All sentences of a CoNLL-U file, or the first `limit`. See `sentences`."""
    if limit is not None:
        if type(limit) is not int:
            raise bad_type("limit", expected="a positive integer, or None for all", received=repr(limit))
        if limit < 1:
            raise bad_value("limit", expected="a positive integer, or None for all", received=limit)
    return list(islice(sentences(path), limit))


def sentences(path: str | os.PathLike[str]) -> Iterator[Sentence]:
    r"""The sentences of a CoNLL-U file, one after another.

    Raises:
        ValueError: if a line is malformed, with the path and the number of the line.

    >>> import pathlib, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = pathlib.Path(folder.name, "one.conllu")
    >>> columns = (
    ...     "1 Birds _ NOUN _ _ 2 nsubj _ _",
    ...     "2 sing _ VERB _ _ 0 root _ SpaceAfter=No",
    ...     "3 ! _ PUNCT _ _ 2 punct _ _",
    ... )
    >>> _ = path.write_text("\n".join(line.replace(" ", "\t") for line in columns))
    >>> (sentence,) = sentences(path)
    >>> sentence.text, sentence.words[0].head, sentence.words[0].relation
    ('Birds sing!', 1, 'nsubj')
    >>> folder.cleanup()
    """
    reader = _Reader(path)
    with open_regular(path) as file:  # bytes, so that the error for a line that is no UTF-8 has its number
        for raw in file:
            reader.line += 1
            try:
                line = raw.decode("utf-8-sig" if reader.line == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise reader.error("text in UTF-8", f"byte {error.object[error.start]:#04x}") from None
            if line.startswith("#"):
                reader.read_comment(line)
            elif line.strip():
                reader.read_row(line)
            else:
                yield from reader.finish_sentence()
    yield from reader.finish_sentence()


# ----------------------------------------------------------------------------------------------------
# From lines to a sentence


class _Row(NamedTuple):
    """A line of a word, or of an empty node (then `word` is None)."""

    line: int
    word: int | None
    form: str
    upos: str
    head: str
    relation: str
    misc: dict[str, str]


class _Token(NamedTuple):
    """What is written as one, and the words it is made of."""

    form: str
    words: range
    space_after: bool


@dataclass
class _Reader:
    """The state of reading a file: the line, the document, and the lines of the current sentence."""

    path: str | os.PathLike[str]
    line: int = 0
    document: int = 0
    entity_fields: tuple[str, ...] = ENTITY_FIELDS
    any_sentence: bool = False
    rows: list[_Row] = field(default_factory=list)
    tokens: list[_Token] = field(default_factory=list)
    words: int = 0
    text: str | None = None
    name: str = ""

    def error(self, expected: str, received: object, line: int | None = None) -> ValueError:
        """The error for a line, by default the current one."""
        return bad_value(f"{os.fspath(self.path)}, line {line or self.line}", expected=expected, received=received)

    def read_comment(self, line: str) -> None:
        key, _, value = (side.strip() for side in line[1:].partition("="))
        if key == "text":
            self.text = value
        elif key == "sent_id":
            self.name = value
        elif key == "global.Entity":
            self.entity_fields = tuple(value.split("-"))
        elif key.split(" ")[0] == "newdoc" and self.any_sentence:
            self.document += 1

    def read_row(self, line: str) -> None:
        columns = line.split("\t")
        if len(columns) != COLUMNS:
            raise self.error(f"{COLUMNS} columns divided by tabs", len(columns))
        number, form, _, upos, _, _, head, relation, _, misc_column = columns
        misc = dict(item.split("=", 1) for item in misc_column.split("|") if "=" in item)
        space_after = misc.get("SpaceAfter") != "No"
        if token := _RANGE.fullmatch(number):
            first, last = int(token[1]), int(token[2])
            if first != self.words + 1 or last < first or self._inside_token():
                raise self.error(f"a token that begins with word {self.words + 1}, after those before it", number)
            self.tokens.append(_Token(form, range(first - 1, last), space_after))
        elif _EMPTY_NODE.fullmatch(number):
            self.rows.append(_Row(self.line, None, form, upos, head, relation, misc))
        elif _NUMBER.fullmatch(number):
            if int(number) != self.words + 1:
                raise self.error(f"word {self.words + 1}", number)
            if not self._inside_token():
                self.tokens.append(_Token(form, range(self.words, self.words + 1), space_after))
            self.rows.append(_Row(self.line, self.words, form, upos, head, relation, misc))
            self.words += 1
        else:
            raise self.error("the number of a word (3), a token (3-4) or an empty node (3.1)", short(number))

    def _inside_token(self) -> bool:
        """Whether the next word belongs to the last multiword token."""
        return bool(self.tokens) and self.tokens[-1].words.stop > self.words

    def finish_sentence(self) -> Iterator[Sentence]:
        """The sentence of the lines so far, if there are any; raises if they do not fit together."""
        if self.rows:
            self.any_sentence = True
            yield self._sentence()
        self.rows, self.tokens, self.words, self.text, self.name = [], [], 0, None, ""

    def _sentence(self) -> Sentence:
        last_line = self.rows[-1].line
        if self._inside_token():
            token = self.tokens[-1]
            raise self.error(f"words up to {token.words.stop}, of token {token.form!r}", f"{self.words}", last_line)
        if not self.words:
            raise self.error("at least one word in a sentence", "none", last_line)
        rows = [row for row in self.rows if row.word is not None]
        heads = [self._head(row) for row in rows]
        self._check_tree(heads, rows)
        text, spans = _text_and_spans(self.tokens, [row.form for row in rows], self.text)
        triples = zip(rows, heads, spans, strict=True)
        words = tuple(Word(row.form, head, row.relation, row.upos, span) for row, head, span in triples)
        return Sentence(words, text, _Mentions(self, heads).read(), self.document, self.name)

    def _head(self, row: _Row) -> int | None:
        """Index of a word's head."""
        if row.head in ("0", "_"):
            return None
        if not _NUMBER.fullmatch(row.head) or int(row.head) > self.words:
            raise self.error(f"a head from 0 to {self.words}, the words of the sentence", short(row.head), row.line)
        if int(row.head) - 1 == row.word:
            raise self.error("a head other than the word itself", row.head, row.line)
        return int(row.head) - 1

    def _check_tree(self, heads: list[int | None], rows: list[_Row]) -> None:
        """Raise if words depend on each other in a circle."""
        visited = [False] * len(heads)
        for start in range(len(heads)):
            path: list[int] = []
            word: int | None = start
            while word is not None and not visited[word]:
                visited[word] = True
                path.append(word)
                word = heads[word]
            if word is not None and word in path:
                circle = [str(member + 1) for member in path[path.index(word) :]]
                raise self.error(
                    "a tree: no word that depends on itself through others",
                    f"words {short(circle)} in a circle",
                    rows[word].line,
                )


# ----------------------------------------------------------------------------------------------------
# Where the words are in the text


def _text_and_spans(
    tokens: list[_Token], forms: list[str], text: str | None
) -> tuple[str, list[tuple[int, int] | None]]:
    """The text and the span of each word: the file's own text if its tokens are found in it, else the tokens joined."""
    spans = None if text is None else _token_spans(tokens, text)
    if text is None or spans is None:
        text = "".join(token.form + " " * token.space_after for token in tokens[:-1]) + tokens[-1].form
        spans = _token_spans(tokens, text)
        assert spans is not None
    return text, [place for token, span in zip(tokens, spans, strict=True) for place in _word_spans(token, span, forms)]


def _token_spans(tokens: list[_Token], text: str) -> list[tuple[int, int]] | None:
    """The span of each token in a text of tokens and spaces; None if the text holds anything else."""
    spans, end = [], 0
    for token in tokens:
        start = text.find(token.form, end)
        if start < 0 or text[end:start].strip():
            return None
        end = start + len(token.form)
        spans.append((start, end))
    return None if text[end:].strip() else spans


def _word_spans(token: _Token, span: tuple[int, int], forms: list[str]) -> Iterator[tuple[int, int] | None]:
    """The spans of a token's words; None for each if the token is not their concatenation."""
    of_token = [forms[word] for word in token.words]
    if len(of_token) == 1:
        yield span
        return
    concatenated, end = "".join(of_token) == token.form, span[0]
    for form in of_token:
        start, end = end, end + len(form)
        yield (start, end) if concatenated else None


# ----------------------------------------------------------------------------------------------------
# Mentions of entities


class _Opened(NamedTuple):
    """A bracket that was opened: the index and line of its row, and its fields."""

    row: int
    fields: list[str]
    line: int


class _Mentions:
    """Reads the entity brackets of one sentence.

    Brackets of one entity close in the order last opened, first closed; those of different entities may cross. A
    mention in n parts has the brackets e1[1/n] to e1[n/n].
    """

    def __init__(self, reader: _Reader, heads: list[int | None]) -> None:
        self.rows, self.error, self.heads = reader.rows, reader.error, heads
        names = reader.entity_fields
        self.entity_field = next((names.index(name) for name in ("eid", "GRP") if name in names), 0)
        self.head_field = names.index("head") if "head" in names else None
        self.opened: dict[tuple[str, str], list[_Opened]] = {}  # by entity and part
        self.depth = 0  # brackets that are open now
        self.parts: dict[str, list[int]] = {}  # by entity: the rows of the parts so far
        self.mentions: list[tuple[int, Mention]] = []  # with the index of their first row

    def read(self) -> tuple[Mention, ...]:
        for at, row in enumerate(self.rows):
            brackets = row.misc.get("Entity", "")
            if any(mark in brackets for mark in "()"):  # else it is a tag of another scheme
                self._read_brackets(at, row, brackets)
        for (entity, _), left in self.opened.items():
            if left:
                raise self.error(f"the bracket of {entity!r} closed in the same sentence", "none", left[-1].line)
        if self.parts:
            some = f"some of {next(iter(self.parts))!r}"
            raise self.error("the other parts of a mention in the same sentence", some, self.rows[-1].line)
        self.mentions.sort(key=lambda mention: mention[0])
        return tuple(mention for _, mention in self.mentions)

    def _read_brackets(self, at: int, row: _Row, brackets: str) -> None:
        """Read brackets such as `(e1-person(e2-place)` or `e1)e2)`."""
        matches = list(_BRACKET.finditer(brackets))
        if "".join(match[0] for match in matches) != brackets:
            raise self.error("brackets of entities such as (e1-person ... e1)", repr(brackets), row.line)
        for match in matches:
            content = match["opened"] or match["closes"]
            part = _PART.search(content)
            fields = _PART.sub("", content).split("-")
            entity = fields[self.entity_field] if self.entity_field < len(fields) else fields[0]
            opened = self.opened.setdefault((entity, part[0] if part else ""), [])
            if match["opened"]:
                opened.append(_Opened(at, fields, row.line))
                self.depth += 1
                if self.depth > DEEPEST:
                    raise self.error(f"at most {DEEPEST} mentions around one word", "more", row.line)
            if match["closes"] or match["closed"]:
                if not opened:
                    raise self.error(f"a bracket of {entity!r} opened before it is closed", repr(brackets), row.line)
                self.depth -= 1
                self._close(entity, opened.pop(), at, part)

    def _close(self, entity: str, start: _Opened, at: int, part: re.Match[str] | None) -> None:
        """A bracket closes at a row: the mention is complete, unless it has more parts."""
        rows = list(range(start.row, at + 1))
        if part:
            self.parts[entity] = rows = [*self.parts.get(entity, []), *rows]
            if part[1] != part[2]:
                return
            del self.parts[entity]
        words = tuple(word for i in rows if (word := self.rows[i].word) is not None)
        given = self.head_field is not None and self.head_field < len(start.fields)
        number = start.fields[self.head_field] if given else ""  # type: ignore[index]
        if not _NUMBER.fullmatch(number):  # the tree decides
            head = next((word for word in words if self.heads[word] not in words), None)
        elif int(number) <= len(rows):
            head = self.rows[rows[int(number) - 1]].word
        else:
            raise self.error(f"a head from 1 to {len(rows)}, the words of {entity!r}", number, start.line)
        self.mentions.append((rows[0], Mention(entity, words, head)))
