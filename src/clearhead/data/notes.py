"""Notes about made-up people and places: names to tag, and questions to answer from the note.

    On 3 May Clara Dalston meets Omar Belwicz in Port Elham at half past nine.
    O  B-DATE I-DATE B-PER I-PER O ...      "Who meets Omar Belwicz?" -> "Clara Dalston", at 9

A note is one sentence or more; every question names somebody or something of its sentence, and no
name stands in two sentences of a note, so there is one answer. Surnames, places and firms are put
together from syllables, often the same ones: Lindham is who lives there, or where. Which of
them validate and test is decided by a hash: no surname, place or firm of a held-out note is in
training. First names, and words such as Bank and Port, are in all splits.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from clearhead.data.dates import ordinal
from clearhead.data.holdout import split_of
from clearhead.data.made import Maker
from clearhead.data.readers import Record
from clearhead.errors import require


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Each sentence with its questions, and the slot that answers each. The first letter of a slot says
# what stands in it: a person, a location, an organisation, a date, a time, or any number.
SENTENCES: dict[str, tuple[tuple[str, str], ...]] = {
    "On {d} {p1} meets {p2} in {l} at {t}.": (
        ("Who meets {p2}?", "p1"),
        ("Whom does {p1} meet?", "p2"),
        ("Where does {p1} meet {p2}?", "l"),
        ("On which day does {p1} meet {p2}?", "d"),
        ("At what time does {p2} meet {p1}?", "t"),
    ),
    "{p1} was born in {l1} and has lived in {l2} since {d}.": (
        ("Where was {p1} born?", "l1"),
        ("Where does {p1} live?", "l2"),
        ("Since when has {p1} lived in {l2}?", "d"),
    ),
    "The train to {l1} leaves {l2} at {t} from platform {n}.": (
        ("Where does the train to {l1} leave from?", "l2"),
        ("Where does the train from {l2} go?", "l1"),
        ("At what time does the train to {l1} leave?", "t"),
    ),
    "{p1} may call {p2} on {d} about the {n} chairs.": (
        ("Who may call {p2}?", "p1"),
        ("Whom may {p1} call?", "p2"),
        ("On which day may {p1} call?", "d"),
    ),
    "{o} moved its office from {l1} to {l2}.": (
        ("Who moved to {l2}?", "o"),
        ("Where was the office of {o} before?", "l1"),
        ("Where did {o} move?", "l2"),
    ),
    "Lunch with {p} at {t}, room {n}.": (
        ("Who comes to lunch at {t}?", "p"),
        ("At what time is lunch with {p}?", "t"),
    ),
    "{p1} works for {o} in {l}.": (
        ("Who works for {o}?", "p1"),
        ("Whom does {p1} work for?", "o"),
        ("Where does {p1} work?", "l"),
    ),
    "At {t} {p1} was seen in {l} with {n} dogs.": (
        ("Who was seen in {l}?", "p1"),
        ("Where was {p1} seen?", "l"),
        ("At what time was {p1} seen?", "t"),
    ),
    "{p1} sold {n} paintings to {o} on {d}.": (
        ("Who sold paintings to {o}?", "p1"),
        ("To whom did {p1} sell paintings?", "o"),
        ("On which day did {p1} sell paintings?", "d"),
    ),
    "Please tell {p1} that {p2} will be late.": (
        ("Who will be late, as {p1} must know?", "p2"),
        ("Who must know that {p2} will be late?", "p1"),
    ),
    "Nobody in {l} remembers {p1}, who left on {d}.": (
        ("Where does nobody remember {p1}?", "l"),
        ("Whom does nobody in {l} remember?", "p1"),
        ("On which day did {p1} leave?", "d"),
    ),
    "{o} will close on {d}, says {p1}.": (
        ("Who says that {o} will close?", "p1"),
        ("What will close, as {p1} says?", "o"),
        ("On which day will {o} close?", "d"),
    ),
    "From {l1} to {l2} it is {n} miles.": (
        ("The way to {l2} begins where?", "l1"),
        ("The way from {l1} ends where?", "l2"),
    ),
    "{p1} of {o} rang at {t}.": (
        ("Who of {o} rang?", "p1"),
        ("Which firm does {p1} belong to?", "o"),
        ("At what time did {p1} ring?", "t"),
    ),
    "The letter that {p1} wrote in {l} reached {p2} on {d}.": (
        ("Who wrote to {p2}?", "p1"),
        ("Whom did the letter of {p1} reach?", "p2"),
        ("Where did {p1} write the letter?", "l"),
        ("On which day did the letter reach {p2}?", "d"),
    ),
    "{l} lies {n} miles north of {l2}, where {p1} keeps bees.": (
        ("What lies north of {l2}?", "l"),
        ("Where does {p1} keep bees?", "l2"),
        ("Who keeps bees in {l2}?", "p1"),
    ),
    "On {d}, {o} hired {p1} and {n} others.": (
        ("Who hired {p1}?", "o"),
        ("Whom did {o} hire?", "p1"),
        ("On which day did {o} hire {p1}?", "d"),
    ),
    "Ask {p1}: the keys of {o} are in {l}.": (
        ("Who is to be asked for the keys of {o}?", "p1"),
        ("Where are the keys of {o}?", "l"),
        ("Whose keys are in {l}?", "o"),
    ),
    "{p1} and {p2} married in {l} on {d}.": (
        ("Whom did {p1} marry?", "p2"),
        ("Who married {p2}?", "p1"),
        ("Where did {p1} and {p2} marry?", "l"),
        ("On which day did {p2} marry {p1}?", "d"),
    ),
    "The shop in {l} opens at {t1} and closes at {t2}.": (
        ("At what time does the shop in {l} open?", "t1"),
        ("At what time does the shop in {l} close?", "t2"),
    ),
    "{p1} owes {p2} {n} pounds.": (
        ("Who owes {p2} money?", "p1"),
        ("Whom does {p1} owe money?", "p2"),
    ),
    "After {d} {p1} will teach at {o}.": (
        ("Who will teach at {o}?", "p1"),
        ("Where will {p1} teach?", "o"),
        ("After which day will {p1} teach?", "d"),
    ),
    "Because of the snow in {l}, {p1} stayed until {t}.": (
        ("Where did it snow, so that {p1} stayed?", "l"),
        ("Who stayed because of the snow in {l}?", "p1"),
        ("Until when did {p1} stay?", "t"),
    ),
    "{o1} bought {o2} for {n} million on {d}.": (
        ("Who bought {o2}?", "o1"),
        ("What did {o1} buy?", "o2"),
        ("On which day was {o2} bought?", "d"),
    ),
    "March to {l1}, said {p1}, and not to {l2}.": (
        ("Where did {p1} want them to march?", "l1"),
        ("Where did {p1} not want them to march?", "l2"),
        ("Who said to march to {l1}?", "p1"),
    ),
    "Wake {p1} at {t}; the boat to {l} will not wait.": (
        ("Who is to be woken for the boat to {l}?", "p1"),
        ("At what time is {p1} to be woken?", "t"),
        ("Where does the boat of {p1} go?", "l"),
    ),
    "Is {p1} still in {l}, or back at {o}?": (
        ("Who may be back at {o}?", "p1"),
        ("Where may {p1} still be?", "l"),
    ),
    "{p1} lost {n} games to {p2} before {t}.": (
        ("Who lost to {p2}?", "p1"),
        ("Who won against {p1}?", "p2"),
        ("Before what time did {p1} lose?", "t"),
    ),
    "Born on {d1}, {p1} joined {o} on {d2}.": (
        ("On which day was {p1} born?", "d1"),
        ("On which day did {p1} join {o}?", "d2"),
        ("What did {p1} join?", "o"),
        ("Who joined {o}?", "p1"),
    ),
    "The bridge at {l} is {n} years old.": (("Where is the bridge that is {n} years old?", "l"),),
    "{p1} flew from {l1} to {l2} on {d}.": (
        ("Who flew to {l2}?", "p1"),
        ("Where did {p1} fly from?", "l1"),
        ("Where did {p1} fly?", "l2"),
        ("On which day did {p1} fly?", "d"),
    ),
    "It was {p1} who found the ring of {p2} in {l}.": (
        ("Who found the ring of {p2}?", "p1"),
        ("Whose ring did {p1} find?", "p2"),
        ("Where was the ring of {p2} found?", "l"),
    ),
}

TAGS = {"p": "PER", "l": "LOC", "o": "ORG", "d": "DATE", "t": "TIME"}
SLOT = re.compile(r"\{(\w+)\}")
WORD = re.compile(r"\w+(?:[:'/-]\w+)*|[^\w\s]")

FIRST = _words("""
    Ada Amir Anna Aoife April August Bela Boris Carla Chen Clara Dario David Dina Elif Emil Erik
    Esra Femi Franz Gita Greta Hana Hugo Ines Ivan Jana Jonas Juan June Kaito Karin Lars Leila Luca
    Maja Marco Mei Mina Nadia Nils Nora Olga Omar Paula Pavel Petra Quentin Rosa Ruth Samir Sara
    Sven Tara Tomas Uma Vera Viktor Wanda Xenia Yara Yusuf Zoe
""")
STEMS = _words("""
    Ash Bel Bran Cal Car Dal Dor El Fal Gal Gar Hal Har Hol Kal Kes Lan Lin Lor Mal Mel Mor Nor Ol
    Or Pel Per Quin Ral Ros Sal Sel Sten Tal Tor Ul Val Ver Wal Wen Wil Yar Zel
""")
MIDDLES = ("", "a", "d", "en", "er", "in", "o")
BOTH = ("ham", "ley", "ford", "ton", "berg", "wick")
ENDINGS = {
    "p": (*BOTH, "son", "sen", "man", "ini", "ova", "ez", "wicz", "stein", "ard"),
    "l": (*BOTH, "burg", "ville", "haven", "mouth", "stad", "port", "minster", "ia", "ona"),
    "o": (*BOTH, "ex", "on", "tec", "ia", "son"),
}
BEFORE = ("San", "New", "Port", "Upper", "Lake", "Old")
FIRMS = (
    *("{} Bank", "{} & Sons", "{} Ltd", "{} Museum", "{} Brothers", "{} Institute"),
    *("University of {}", "Bank of {}", "{} Railways", "{}"),
)
TITLES = ("Dr", "Mrs", "Mr", "Professor")
MONTHS = _words(
    "January February March April May June July August September October November December"
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
HOURS = _words("one two three four five six seven eight nine ten eleven twelve")
NUMBERS = (*HOURS[1:], *map(str, range(2, 100)))


@dataclasses.dataclass(frozen=True)
class Notes(Maker, kind="notes"):
    """Short notes, with a tag for each word and a question with its answer."""

    sentences: int = 2
    """Of the longest note; every number is equally likely."""

    columns: ClassVar[tuple[str, ...]] = (
        *("words", "tags"),
        *("context", "question", "answer", "start"),
    )

    def __post_init__(self) -> None:
        most = len(SENTENCES)
        require(
            1 <= self.sentences <= most,
            f"notes: a note has 1 to {most} sentences, not {self.sentences}.",
        )

    def version(self) -> str:
        return str(sorted(SENTENCES.items()))

    def make(self, split: str, dice: np.random.Generator) -> Record:
        """A note; all its made-up names are of that split."""
        count = int(dice.integers(1, self.sentences + 1))
        chosen = [list(SENTENCES)[i] for i in dice.choice(len(SENTENCES), count, replace=False)]
        used: set[str] = set()
        filled = [_fill(sentence, split, dice, used) for sentence in chosen]
        pieces: list[tuple[str, str]] = []  # texts, each with what it is
        asked = int(dice.integers(count))
        question, slot = _pick(SENTENCES[chosen[asked]], dice)
        start = 0
        for number, (sentence, values) in enumerate(zip(chosen, filled, strict=True)):
            pieces += [(" ", "")] if pieces else []
            for text, name in _pieces(sentence, values):
                if number == asked and name == slot:
                    start = sum(len(before) for before, _ in pieces)
                pieces.append((text, name))
        words, tags = _tagged(pieces)
        values = filled[asked]
        return {
            "words": words,
            "tags": tags,
            "context": "".join(text for text, _ in pieces),
            "question": SLOT.sub(lambda found: values[found[1]], question),
            "answer": values[slot],
            "start": start,
        }


def _fill(sentence: str, split: str, dice: np.random.Generator, used: set[str]) -> dict[str, str]:
    """Something for each slot, none of which is in the note yet."""
    values: dict[str, str] = {}
    for slot in SLOT.findall(sentence):
        while True:
            value, mark = FILLERS[slot[0]](split, dice)
            if mark not in used:
                break
        used.add(mark)
        values[slot] = value
    return values


def _pieces(sentence: str, values: dict[str, str]) -> list[tuple[str, str]]:
    """A sentence as texts, each with its slot, if it fills one."""
    parts = SLOT.split(sentence)
    return [(values[part], part) if i % 2 else (part, "") for i, part in enumerate(parts) if part]


def _tagged(pieces: list[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """All words and marks, and the tag of each."""
    words: list[str] = []
    tags: list[str] = []
    for text, slot in pieces:
        found = WORD.findall(text)
        kind = TAGS.get(slot[:1])
        words += found
        tags += [f"{'I' if i else 'B'}-{kind}" if kind else "O" for i in range(len(found))]
    return words, tags


# --- what stands in a slot: a text, and what of it must not come twice in a note ---


def _person(split: str, dice: np.random.Generator) -> tuple[str, str]:
    word = _pick(made_names("p", split), dice)
    form = dice.integers(8)
    if form == 0:
        return f"{_pick(TITLES, dice)} {word}", word
    if form == 1:
        return word, word
    first = _pick(FIRST, dice)
    middle = f" {chr(65 + int(dice.integers(26)))}" if form == 2 else ""
    return f"{first}{middle} {word}", word


def _location(split: str, dice: np.random.Generator) -> tuple[str, str]:
    word = _pick(made_names("l", split), dice)
    return (f"{_pick(BEFORE, dice)} {word}" if dice.integers(4) == 0 else word), word


def _organisation(split: str, dice: np.random.Generator) -> tuple[str, str]:
    word = _pick(made_names("o", split), dice)
    return _pick(FIRMS, dice).format(word), word


def _date(split: str, dice: np.random.Generator) -> tuple[str, str]:
    day, month = int(dice.integers(1, 29)), int(dice.integers(12))
    year, weekday = int(dice.integers(1950, 2050)), _pick(DAYS, dice)
    name = MONTHS[month]
    forms = (
        *(f"{day} {name}", f"{name} {day}", f"the {ordinal(day)} of {name}", weekday),
        *(f"{day} {name} {year}", f"{weekday}, {day} {name}", f"{day}/{month + 1}/{year}"),
        f"{year}-{month + 1:02}-{day:02}",
    )
    text = _pick(forms, dice)
    return text, text


def _time(split: str, dice: np.random.Generator) -> tuple[str, str]:
    hour, minute = int(dice.integers(24)), int(dice.integers(12)) * 5
    word = HOURS[hour % 12 - 1]
    forms = (
        *(f"{hour}:{minute:02}", f"{hour % 12 or 12} {'pm' if hour > 11 else 'am'}"),
        *(f"half past {word}", f"a quarter to {word}", f"{word} o'clock", f"ten past {word}"),
        *("noon", "midnight"),
    )
    text = _pick(forms, dice)
    return text, text


def _number(split: str, dice: np.random.Generator) -> tuple[str, str]:
    text = _pick(NUMBERS, dice)
    return text, text


FILLERS: dict[str, Callable[[str, np.random.Generator], tuple[str, str]]] = {
    "p": _person,
    "l": _location,
    "o": _organisation,
    "d": _date,
    "t": _time,
    "n": _number,
}


def _pick(items: Any, dice: np.random.Generator) -> Any:
    return items[int(dice.integers(len(items)))]


@functools.cache
def made_names(kind: str, split: str) -> tuple[str, ...]:
    """All made-up names that people ("p"), locations or organisations have in a split."""
    every = {a + b + c for a in STEMS for b in MIDDLES for c in ENDINGS[kind]}
    return tuple(sorted(name for name in every if split_of(f"name {name}") == split))
