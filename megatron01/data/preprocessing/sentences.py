"""Cutting English prose into sentences by rules: no model to download, several megabytes per second.

A ``.``, ``!``, ``?`` or ellipsis ends a sentence if what follows can begin one and the word before it is not an
abbreviation. Blank lines always end one; a single line break does unless the text is wrapped to a line width.
"""

# ruff: noqa: SIM905, RUF001 - word lists are easier to read as text; typographic quotes are meant

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import accumulate

from megatron01.config.commands import Lang

# Never the last word of a sentence: a name or an example follows.
_NEVER_LAST = frozenset(
    "mr mrs ms mx dr prof rev hon messrs mme mlle mt ft gen col maj capt cpt cmdr lt sgt cpl pvt adm sen rep gov pres"
    " supt det insp vs viz e.g i.e cf ca approx eds trans".split()
)
# Abbreviations only in front of a number; otherwise words like any other.
_BEFORE_NUMBER = frozenset("no nos p pp vol vols ch chap chaps sec fig figs eq eqs art par pl tab op ver c bk".split())
# May end a sentence; they do if a word follows that commonly begins one.
_MAY_BE_LAST = frozenset(
    "inc ltd co corp llc jr sr esq etc al ave blvd rd st bros dept univ ibid a.m p.m b.c a.d b.c.e c.e".split()
)
# Likewise, but only when capitalised: "ill" and "mass" are words.
_MAY_BE_LAST_CAPITALISED = frozenset(
    "Ala Ariz Ark Calif Colo Conn Fla Ga Ill Ind Kan Ky La Mass Md Mich Minn Miss Mo Mont Neb Nev Okla Ore Pa Penn"
    " Tenn Tex Va Vt Wash Wis Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec No Fig Vol".split()
)
_STARTERS = frozenset(
    "the a an this that these those he she it they we you i his her its their our my your there here in on at by for"
    " from with without after before during when while where as if although though since because but and or so yet"
    " however moreover nevertheless then thus therefore hence also another some many most several both each every no"
    " not all one two it's he's she's what who why how which to of under over upon between through until unless once"
    " according among despite instead perhaps".split()
)

_OPENERS = "\"'“‘«([{—–-"
_CLOSERS = "\"'”’»)\\]}"
_MARKS = ".!?…"
# A run of marks is matched once, from its first on: a million dots must not take quadratic time.
_END = re.compile(
    rf"(?<![{_MARKS}])(?P<mark>[{_MARKS}]++)(?P<close>[{_CLOSERS}]*+)(?:\s++|$)|(?P<wide>[。！？]++[」』”’）]*+)\s*+"
)
_LAST_WORD = re.compile(r"[^\s\"“‘«(\[{—–]+$")
_FIRST_WORD = re.compile(r"[\w.'’]+")
_DOTTED = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]")  # U.S, p.m, e.g
_ENUMERATOR = re.compile(r"\d{1,3}|[ivxlc]{1,5}|[IVXLC]{1,5}|[a-zA-Z]")
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")
_WORD = re.compile(r"\S+")
_ANY_LINE_END = re.compile(r"\r\n|\r|\n")
_WIDEST_WRAP = 120  # characters; text with a longer line is not wrapped


def split_sentences(text: str, *, lang: Lang = "english", keep_newlines: bool = False) -> list[str]:
    """The sentences of a text, in order, none empty.

    Args:
        lang: ``english`` for the rules of this module, ``lines`` for text in which each line is a sentence already.
        keep_newlines: keep the whitespace after and inside each sentence, so that the concatenated sentences are the
            text (without leading whitespace); else sentences are stripped.
    """
    sentences = _cut_english(text) if lang == "english" else _stripped(_ANY_LINE_END.split(text))
    return _with_space(text, sentences) if keep_newlines else sentences


def _with_space(text: str, sentences: list[str]) -> list[str]:
    """The spans of ``text`` that hold the sentences, each with the whitespace that follows it."""
    # Sentences and text differ in whitespace only: starts are found by counting the other characters.
    firsts = list(accumulate((sum(map(len, sentence.split())) for sentence in sentences), initial=0))[:-1]
    starts: list[int] = []
    seen = 0
    for word in _WORD.finditer(text):
        while len(starts) < len(firsts) and firsts[len(starts)] < seen + len(word[0]):
            starts.append(word.start() + firsts[len(starts)] - seen)
        seen += len(word[0])
    return [text[start:end] for start, end in zip(starts, [*starts, len(text)][1:], strict=True)]


def _cut_english(text: str) -> list[str]:
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    sentences: list[str] = []
    for paragraph in _paragraphs(text):
        start = 0
        for match in _END.finditer(paragraph):
            if match.end() < len(paragraph) and not _ends_sentence(paragraph, start, match):
                continue
            sentences.append(paragraph[start : match.end()])
            start = match.end()
        sentences.append(paragraph[start:])
    return _stripped(sentences)


def _stripped(sentences: Iterable[str]) -> list[str]:
    return [stripped for sentence in sentences if (stripped := sentence.strip())]


def _paragraphs(text: str) -> list[str]:
    """Paragraphs, which no sentence crosses, with wrapped lines joined."""
    if "\n" not in text:
        return [text]
    lines = text.split("\n")
    width = max(len(line.rstrip()) for line in lines)
    if width > _WIDEST_WRAP:
        return lines
    paragraphs: list[list[str]] = []  # lines of each, to be joined once
    for block in _BLANK_LINES.split(text):
        previous = ""
        for line in block.split("\n"):
            if previous and _continues(previous, line, width):
                paragraphs[-1].append(line.strip())
            else:
                paragraphs.append([line])
            previous = line
    return [" ".join(paragraph) for paragraph in paragraphs]


def _continues(line: str, following: str, width: int) -> bool:
    """True if a line was wrapped: the next word did not fit, or the next line begins in lower case."""
    words = following.split(maxsplit=1)
    if not words:
        return False
    return words[0][0].islower() or len(line.rstrip()) + 1 + len(words[0]) > width


def _ends_sentence(text: str, start: int, match: re.Match[str]) -> bool:
    """Whether the mark found in ``text`` ends the sentence that began at ``start``; more text follows."""
    if match["wide"]:
        return True
    following = text[match.end() : match.end() + 40].lstrip(_OPENERS + " ")
    if not following or following[0].islower():
        return False
    if match["mark"] != ".":
        return True
    word_match = _LAST_WORD.search(text, max(start, match.start() - 40), match.start())
    if word_match is None:
        return True
    word = word_match[0]
    if word_match.start() == start and _ENUMERATOR.fullmatch(word):
        return False  # "1. Introduction"
    next_match = _FIRST_WORD.match(following)
    next_word = next_match[0].lower().rstrip(".") if next_match else ""
    if match["close"]:
        return True
    before = text[max(start, word_match.start() - 40) : word_match.start()].rstrip()
    return _period_ends_sentence(word, next_word, before[-1:])


def _period_ends_sentence(word: str, next_word: str, before: str) -> bool:
    """Whether a single period after ``word`` ends a sentence.

    Args:
        word, next_word: without quotes or brackets around them; the next one in lower case.
        before: the last character before ``word``, without space.
    """
    lowered = word.lower()
    if lowered in _NEVER_LAST or (lowered in _BEFORE_NUMBER and next_word[:1].isdigit()):
        return False
    if lowered in _MAY_BE_LAST or word in _MAY_BE_LAST_CAPITALISED or _DOTTED.fullmatch(word):
        return next_word in _STARTERS
    if len(word) == 1 and word.isupper():
        # An initial, or a letter that names something: "J. Smith" against "to plan B. The end", "So did I. Then".
        return next_word in _STARTERS or (word == "I" and before.islower())
    return True
