"""Sentences whose words are tied to each other: a treebank, as a CoNLL-U file holds it.

One line is one word, in ten columns divided by tabs; an empty line ends a sentence; what begins with # is said of the
whole sentence (https://universaldependencies.org/format.html). Read here are:

    1     words        form, part of speech, head and relation
    3-4   a token      written as one and made of several words ("don't": do, n't)
    5.1   an empty node: a word that was not written. It is in no sentence here, but a mention may hold it
    # text, SpaceAfter=No           where in the text each word stands
    # newdoc                        which sentences belong together
    # global.Entity, Entity=(e1-person-2 ... e1)      which mentions speak of the same, as CorefUD writes it

Words are numbered from 0 here, from 1 in the file.
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

_COLUMNS = 10
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_RANGE = re.compile(r"([1-9][0-9]{0,8})-([1-9][0-9]{0,8})")
_EMPTY = re.compile(r"[0-9]{1,9}\.[1-9][0-9]{0,8}")
_DEEPEST = 256  # mentions around one word: each holds all its words
_BRACKET = re.compile(r"\((?P<opened>[^()]+)(?P<closed>\))?|(?P<closes>[^()]+)\)")
_PART = re.compile(r"\[(\d+)/(\d+)\]")
_ENTITY_FIELDS = ("eid", "etype", "head", "other")  # what CorefUD writes, where the file does not say


class Word(NamedTuple):
    """A word and what it depends on.

    Attributes:
        form: as it is written.
        head: number of the word that it depends on; None for the root, and where the file does not say.
        relation: its relation to that word, such as "nsubj".
        upos: its part of speech, such as "NOUN".
        span: where it stands in the text, `text[start:end]`. None for a word within a token that is not simply its
            words in a row (French "du", of de and le).
    """

    form: str
    head: int | None
    relation: str
    upos: str
    span: tuple[int, int] | None


class Mention(NamedTuple):
    """Words that speak of an entity.

    Attributes:
        entity: who; the same name within one document is the same entity.
        words: their numbers. They may have a gap, and mentions may lie within each other or cross.
        head: number of the word that leads them; None where that word was not written.
    """

    entity: str
    words: tuple[int, ...]
    head: int | None


@dataclass(frozen=True)
class Sentence:
    """Words in a row.

    Attributes:
        words: see `Word`.
        text: as it was written.
        mentions: of entities, in order of their first words. Empty where the file has none.
        document: number of the document in the file that it belongs to.
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
        ValueError: where a line is malformed, with the path and the number of the line.

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
    page = _Page(path)
    started = _Lines()
    with open_regular(path) as file:  # (bytes: a line that is no UTF-8 has a number too)
        for raw in file:
            page.line += 1
            try:
                line = raw.decode("utf-8-sig" if page.line == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise page.wrong("text in UTF-8", f"byte {error.object[error.start]:#04x}") from None
            if line.startswith("#"):
                started.comment(line, page)
            elif line.strip():
                started.row(line, page)
            else:
                if started.rows:
                    yield started.finish(page)
                started = started.next()
    if started.rows:
        yield started.finish(page)


# ----------------------------------------------------------------------------------------------------
# From lines to a sentence


@dataclass
class _Page:
    """Where we are: which line of which file, in which document, and what its entities' brackets say."""

    path: str | os.PathLike[str]
    line: int = 0
    document: int = 0
    entity_fields: tuple[str, ...] = _ENTITY_FIELDS

    def wrong(self, expected: str, received: object, line: int | None = None) -> ValueError:
        """The error for a line, by default the one being read."""
        return bad_value(f"{os.fspath(self.path)}, line {line or self.line}", expected=expected, received=received)


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
    """What is written in one piece, and the words it is made of."""

    form: str
    words: range
    space: bool


@dataclass
class _Lines:
    """The lines of one sentence as they come."""

    rows: list[_Row] = field(default_factory=list)
    tokens: list[_Token] = field(default_factory=list)
    count: int = 0  # of words
    text: str | None = None
    name: str = ""
    seen_any: bool = False  # whether a sentence came before

    def next(self) -> _Lines:
        return _Lines(seen_any=self.seen_any or bool(self.rows))

    def comment(self, line: str, page: _Page) -> None:
        key, _, value = (part.strip() for part in line[1:].partition("="))
        if key == "text":
            self.text = value
        elif key == "sent_id":
            self.name = value
        elif key == "global.Entity":
            page.entity_fields = tuple(value.split("-"))
        elif key.split(" ")[0] == "newdoc" and self.seen_any:
            page.document += 1

    def row(self, line: str, page: _Page) -> None:
        columns = line.split("\t")
        if len(columns) != _COLUMNS:
            raise page.wrong(f"{_COLUMNS} columns divided by tabs", len(columns))
        number, form, _, upos, _, _, head, relation, _, misc = columns
        about = dict(part.split("=", 1) for part in misc.split("|") if "=" in part)
        space = about.get("SpaceAfter") != "No"
        if several := _RANGE.fullmatch(number):
            first, last = int(several[1]), int(several[2])
            if first != self.count + 1 or last < first or self._inside_token():
                raise page.wrong(f"a token that begins with word {self.count + 1}, after those before it", number)
            self.tokens.append(_Token(form, range(first - 1, last), space))
        elif _EMPTY.fullmatch(number):
            self.rows.append(_Row(page.line, None, form, upos, head, relation, about))
        elif _NUMBER.fullmatch(number):
            if int(number) != self.count + 1:
                raise page.wrong(f"word {self.count + 1}", number)
            if not self._inside_token():
                self.tokens.append(_Token(form, range(self.count, self.count + 1), space))
            self.rows.append(_Row(page.line, self.count, form, upos, head, relation, about))
            self.count += 1
        else:
            raise page.wrong("the number of a word (3), a token (3-4) or an empty node (3.1)", short(number))

    def _inside_token(self) -> bool:
        """Whether the next word belongs to a token that was announced."""
        return bool(self.tokens) and self.tokens[-1].words.stop > self.count

    def finish(self, page: _Page) -> Sentence:
        """The sentence; raises where its lines do not fit each other."""
        last = self.rows[-1].line
        if self._inside_token():
            raise page.wrong(
                f"words up to {self.tokens[-1].words.stop}, of token {self.tokens[-1].form!r}", f"{self.count}", last
            )
        if not self.count:
            raise page.wrong("at least one word in a sentence", "none", last)
        written = [row for row in self.rows if row.word is not None]
        heads = [_head(row, self.count, page) for row in written]
        _check_tree(heads, written, page)
        text, spans = _placed(self.tokens, [row.form for row in written], self.text)
        words = tuple(
            Word(row.form, head, row.relation, row.upos, span)
            for row, head, span in zip(written, heads, spans, strict=True)
        )
        return Sentence(words, text, _mentions(self.rows, heads, page), page.document, self.name)


def _head(row: _Row, count: int, page: _Page) -> int | None:
    """Number of the word that a word depends on."""
    if row.head in ("0", "_"):
        return None
    if not _NUMBER.fullmatch(row.head) or int(row.head) > count:
        raise page.wrong(f"a head from 0 to {count}, the words of the sentence", short(row.head), row.line)
    if int(row.head) - 1 == row.word:
        raise page.wrong("a head other than the word itself", row.head, row.line)
    return int(row.head) - 1


def _check_tree(heads: list[int | None], rows: list[_Row], page: _Page) -> None:
    """Raise where words depend on each other in a circle: from each one there is a way to a root."""
    known = [False] * len(heads)
    for start in range(len(heads)):
        way, word = [], start
        while not known[word]:
            known[word] = True
            way.append(word)
            up = heads[word]
            if up is None:
                break
            word = up
        else:
            if way and word in way:
                circle = [str(one + 1) for one in way[way.index(word) :]]
                raise page.wrong(
                    "a tree: no word that depends on itself through others",
                    f"words {short(circle)} in a circle",
                    rows[word].line,
                )


# ----------------------------------------------------------------------------------------------------
# Where in the text the words are


def _placed(tokens: list[_Token], forms: list[str], text: str | None) -> tuple[str, list[tuple[int, int] | None]]:
    """The text and where each word is in it: the file's own text if its tokens are found there, else one of tokens."""
    spans = None if text is None else _found(tokens, text)
    if text is None or spans is None:
        text = "".join(token.form + " " * token.space for token in tokens[:-1]) + tokens[-1].form
        spans = _found(tokens, text)
        assert spans is not None
    return text, [place for token, span in zip(tokens, spans, strict=True) for place in _divided(token, span, forms)]


def _found(tokens: list[_Token], text: str) -> list[tuple[int, int]] | None:
    """Where each token is in a text that holds them and spaces; None if it holds anything else."""
    spans, end = [], 0
    for token in tokens:
        start = text.find(token.form, end)
        if start < 0 or text[end:start].strip():
            return None
        end = start + len(token.form)
        spans.append((start, end))
    return None if text[end:].strip() else spans


def _divided(token: _Token, span: tuple[int, int], forms: list[str]) -> Iterator[tuple[int, int] | None]:
    """Where the words of a token are. None for each if it is not written as they are."""
    parts = [forms[word] for word in token.words]
    simple = len(parts) == 1 or "".join(parts) == token.form
    end = span[0]
    for part in parts:
        start, end = end, (span[1] if len(parts) == 1 else end + len(part))
        yield (start, end) if simple else None


# ----------------------------------------------------------------------------------------------------
# Who is spoken of


class _Opened(NamedTuple):
    """A bracket that was opened: at which row, and what it says."""

    row: int
    fields: list[str]
    line: int


def _mentions(rows: list[_Row], heads: list[int | None], page: _Page) -> tuple[Mention, ...]:
    """The mentions in the brackets of a sentence.

    Brackets of one entity close in the order last opened, first closed; those of different entities may cross. A
    mention in n parts has the brackets e1[1/n] to e1[n/n].
    """
    names = page.entity_fields
    which = next((names.index(name) for name in ("eid", "GRP") if name in names), 0)
    leads = names.index("head") if "head" in names else None
    opened: dict[tuple[str, str], list[_Opened]] = {}  # by entity and part
    parts: dict[str, list[int]] = {}  # rows of the parts so far, by entity
    found: list[tuple[int, Mention]] = []
    depth = 0
    for at, row in enumerate(rows):
        brackets = row.misc.get("Entity", "")
        if not any(mark in brackets for mark in "()"):
            continue  # (a tag of another scheme)
        for bracket in _brackets(brackets, row, page):
            inside = bracket["opened"] or bracket["closes"]
            part = _PART.search(inside)
            fields = _PART.sub("", inside).split("-")
            entity = fields[which] if which < len(fields) else fields[0]
            key = entity, part[0] if part else ""
            if bracket["opened"]:
                opened.setdefault(key, []).append(_Opened(at, fields, row.line))
                depth += 1
                if depth > _DEEPEST:
                    raise page.wrong(f"at most {_DEEPEST} mentions around one word", "more", row.line)
            if not bracket["opened"] or bracket["closed"]:
                if not opened.get(key):
                    raise page.wrong(f"a bracket of {entity!r} opened before it is closed", repr(brackets), row.line)
                start = opened[key].pop()
                depth -= 1
                held = list(range(start.row, at + 1))
                if part:
                    parts[entity] = held = [*parts.get(entity, []), *held]
                    if part[1] != part[2]:
                        continue  # more is to come
                    del parts[entity]
                said = start.fields[leads] if leads is not None and leads < len(start.fields) else ""
                found.append((held[0], _mention(entity, held, said, rows, heads, page, start.line)))
    for (entity, _), left in opened.items():
        if left:
            raise page.wrong(f"the bracket of {entity!r} closed in the same sentence", "none", left[-1].line)
    if parts:
        raise page.wrong(
            "the other parts of a mention in the same sentence", f"some of {next(iter(parts))!r}", rows[-1].line
        )
    found.sort(key=lambda place: place[0])
    return tuple(mention for _, mention in found)


def _brackets(text: str, row: _Row, page: _Page) -> list[re.Match[str]]:
    """`(e1-person(e2-place)` as its brackets, with nothing left between them."""
    found = list(_BRACKET.finditer(text))
    if "".join(bracket[0] for bracket in found) != text:
        raise page.wrong("brackets of entities such as (e1-person ... e1)", repr(text), row.line)
    return found


def _mention(
    entity: str, held: list[int], said: str, rows: list[_Row], heads: list[int | None], page: _Page, line: int
) -> Mention:
    """The mention of some rows. `said` is which of them leads, from 1 on; the tree decides where it is not a number."""
    words = tuple(word for at in held if (word := rows[at].word) is not None)
    if _NUMBER.fullmatch(said):
        if int(said) > len(held):
            raise page.wrong(f"a head from 1 to {len(held)}, the words of {entity!r}", said, line)
        return Mention(entity, words, rows[held[int(said) - 1]].word)
    return Mention(entity, words, next((word for word in words if heads[word] not in words), None))
