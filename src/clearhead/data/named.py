"""Named data sets: what each is, where its files come from, and its own splits.

tinyshakespeare  text                    one text; the last tenth of its characters validates
multi30k         en, de, fr              captions of pictures; test is test_2016_flickr
fra_eng          en, fr                  short sentences (Tatoeba)
sst2             text, label             film reviews, positive or negative
trec             text, label, fine       questions by what they ask for; test, no valid
stsb             first, second, score    pairs of sentences, alike from 0 to 5
manual           text                    Python's manual, from the running Python
dates            en, fr, de, iso         made; so are:
notes            words, tags; context,   notes to tag, and to ask about
                 question, answer, start
copy reverse sort add                    source, target
"""

from __future__ import annotations

import csv
import functools
import heapq
import re
from collections.abc import Callable, Iterator

from clearhead.data.dates import Dates
from clearhead.data.download import Progress, Remote, locate
from clearhead.data.files import File
from clearhead.data.holdout import mark
from clearhead.data.made import Add, Copy, Maker, Reverse, Sort, read_settings
from clearhead.data.manual import open_manual
from clearhead.data.notes import Notes
from clearhead.data.readers import Record, Rows, Stream, open_parallel, open_rows, open_texts
from clearhead.errors import ClearheadError, did_you_mean, require

MAKERS: dict[str, type[Maker]] = {
    maker.kind: maker for maker in (Dates, Copy, Reverse, Sort, Add, Notes)
}
HELD = 1000  # sentences of fra_eng that validate, and as many that test

_GITHUB = "https://raw.githubusercontent.com"


def is_named(source: str) -> bool:
    """Whether this is the name of a set, with or without settings behind a colon."""
    return source.partition(":")[0] in (*SETS, *MAKERS)


def named_sets() -> tuple[str, ...]:
    """The names of all sets."""
    return (*SETS, *MAKERS)


def open_maker(source: str) -> Maker | None:
    """The maker that a name like "copy" or "copy:longest=30" stands for; None for other sets."""
    name, _, settings = source.partition(":")
    return read_settings(MAKERS[name], settings) if name in MAKERS else None


def open_named(source: str, progress: Progress | None = None) -> dict[str, Stream]:
    """The splits of a set whose data are files, or the manual."""
    name, colon, _ = source.partition(":")
    require(
        name in SETS,
        f'There is no data set "{name}".{did_you_mean(name, named_sets())} There are: '
        f"{', '.join(named_sets())}.",
    )
    require(not colon, f'The data set "{name}" has no settings: leave away what follows its name.')
    return SETS[name](progress)


# --- one function a set ---


def _tinyshakespeare(progress: Progress | None) -> dict[str, Stream]:
    remote = Remote(
        "input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        f"{_GITHUB}/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    )
    return {"train": open_texts([locate("tinyshakespeare", remote, "", progress)])}


MULTI30K = {
    "train.en": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "train.de": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.fr": "622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c",
    "val.en": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "val.de": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.fr": "ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9",
    "test_2016_flickr.en": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
    "test_2016_flickr.de": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    "test_2016_flickr.fr": "6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90",
}


def _multi30k(progress: Progress | None) -> dict[str, Stream]:
    def side(part: str, language: str) -> File:
        name = f"{part}.{language}"
        url = f"{_GITHUB}/multi30k/dataset/master/data/task1/raw/{name}.gz"
        return locate("multi30k", Remote(f"{name}.gz", MULTI30K[name], url), "", progress)

    languages = ("en", "de", "fr")
    parts = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
    return {
        split: open_parallel([side(part, language) for language in languages], languages)
        for split, part in parts.items()
    }


def _fra_eng(progress: Progress | None) -> dict[str, Stream]:
    about = "It is the French-English file of manythings.org/anki, made from Tatoeba's sentences."
    archive = locate("fra_eng", Remote("fra-eng.zip"), about, progress)
    file = File(archive.path, "fra.txt")
    held = _held_lines(file)
    return {
        split: open_rows(functools.partial(_read_side, file, held, split), f"fra_eng ({split})")
        for split in ("train", "valid", "test")
    }


def _held_lines(file: File) -> dict[int, str]:
    """Line -> "valid" or "test", for the sentences with the smallest hashes.

    Of such a sentence the first translation alone is asked for; the others are in no split ("").
    "Run!" is held out with "Run.": capitals, blanks and marks do not count.
    """
    lines: dict[str, list[int]] = {}
    for number, record in enumerate(_read_pairs(file)):
        lines.setdefault(re.sub(r"[\W_]+", "", record["en"].casefold()), []).append(number)
    chosen = heapq.nsmallest(2 * HELD, lines, key=mark)
    require(len(lines) > 2 * HELD, f"{file.name} has too few sentences to hold some out.")
    held = {number: "" for key in chosen for number in lines[key]}
    return held | {
        lines[key][0]: "test" if place < HELD else "valid" for place, key in enumerate(chosen)
    }


def _read_pairs(file: File) -> Iterator[Record]:
    for number, line in enumerate(file.lines(), 1):
        parts = line.rstrip("\r\n").split("\t")
        require(len(parts) >= 2, f"{file.name}, line {number} is no pair: a tab is missing.")
        yield {"en": parts[0].strip(), "fr": parts[1].strip()}


def _read_side(file: File, held: dict[int, str], split: str) -> Iterator[Record]:
    for number, record in enumerate(_read_pairs(file)):
        if held.get(number, "train") == split:
            yield record


SST2 = {
    "train": ("train.tsv", "ec192f833a64da08f475488a77b0d0b47db47acd0f458bd18433fc793b569920"),
    "valid": ("dev.tsv", "eddea6b39e601dd4e7a672b53cc40fdf6019fa80522f351206c24340ca5d9359"),
    "test": ("test.tsv", "831169c7e2e429d6026e1bdbb542f33b636e3e596caad9602ebc953c205928b7"),
}


def _sst2(progress: Progress | None) -> dict[str, Stream]:
    base = f"{_GITHUB}/clairett/pytorch-sentiment-classification/master/data/SST2"
    return _each("sst2", SST2, base, _read_sst2, progress)


def _read_sst2(file: File) -> Iterator[Record]:
    names = {"0": "negative", "1": "positive"}
    for number, line in enumerate(file.lines(), 1):
        text, _, label = line.strip().rpartition("\t")
        require(
            bool(text) and label in names,
            f"{file.name}, line {number} is not a sentence, a tab, and 0 or 1.",
        )
        yield {"text": text, "label": names[label]}


STSB = {
    "train": (
        "stsb-en-train.csv",
        "e1e84fec60bbb598735552f54a35f4949904a484750fd2cb11e2720e49f63da6",
    ),
    "valid": (
        "stsb-en-dev.csv",
        "d29586e96558c4eb52cf5ea5d14e9c24d3bf0e44f111b017caba43a5adc33226",
    ),
    "test": (
        "stsb-en-test.csv",
        "11523b625219e94e9ca05d2816b5f02cac1614c5894fe657376fa0806378d053",
    ),
}


def _stsb(progress: Progress | None) -> dict[str, Stream]:
    base = f"{_GITHUB}/PhilipMay/stsb-multi-mt/main/data"
    return _each("stsb", STSB, base, _read_stsb, progress)


def _read_stsb(file: File) -> Iterator[Record]:
    rows = csv.reader(file.lines())
    for row in rows:
        try:
            first, second, score = row
            yield {"first": first, "second": second, "score": float(score)}
        except ValueError:
            raise ClearheadError(
                f"{file.name}, line {rows.line_num} is not two sentences and a score."
            ) from None


TREC = {"train": ("train_5500.label", ""), "test": ("TREC_10.label", "")}


def _trec(progress: Progress | None) -> dict[str, Stream]:
    return _each("trec", TREC, "", _read_trec, progress)


def _read_trec(file: File) -> Iterator[Record]:
    """LABEL:fine, a blank, the question. One line has a byte that is no text, for a blank."""
    for number, line in enumerate(b"".join(file.blocks()).splitlines(), 1):
        text = line.replace(b"\xf0", b" ").decode("latin-1")
        labels, _, question = text.partition(" ")
        label, colon, fine = labels.partition(":")
        require(
            bool(colon and question.strip()),
            f"{file.name}, line {number} is not LABEL:fine and a question.",
        )
        yield {"text": question.strip(), "label": label, "fine": f"{label}:{fine}"}


def _each(
    name: str,
    files: dict[str, tuple[str, str]],
    base: str,
    read: Callable[[File], Iterator[Record]],
    progress: Progress | None,
) -> dict[str, Stream]:
    """One file a split, each read the same way."""
    streams: dict[str, Stream] = {}
    for split, (file, digest) in files.items():
        remote = Remote(file, digest, f"{base}/{file}" if base else "")
        found = locate(name, remote, ABOUT.get(name, ""), progress)
        streams[split] = open_rows(functools.partial(read, found), found.name)
    return streams


def _manual(progress: Progress | None) -> dict[str, Stream]:
    streams: dict[str, Rows] = open_manual()
    return dict(streams)


ABOUT = {
    "trec": "It is the question classification data of Li and Roth (2002): train_5500.label "
    "and TREC_10.label."
}

SETS: dict[str, Callable[[Progress | None], dict[str, Stream]]] = {
    "tinyshakespeare": _tinyshakespeare,
    "multi30k": _multi30k,
    "fra_eng": _fra_eng,
    "sst2": _sst2,
    "trec": _trec,
    "stsb": _stsb,
    "manual": _manual,
}
