"""Dates in many English forms, and in French and German: as many pairs as one wants, no download.

    en "the 3rd of May 2024"   fr "3 mai 2024"   de "3. Mai 2024"   iso "2024-05-03"

Names and orders are those of the Unicode CLDR, by way of Babel. A target says what its source says:
the weekday stands in it only where it stands in the English. Every English form has one meaning:
with slashes the month comes first, with dots the day; two digits of a year mean 1950 to 2049. No
date of a held-out record, in whatever form, is in training.
"""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any, ClassVar

import numpy as np

from clearhead.data.made import Maker
from clearhead.data.readers import Record
from clearhead.errors import ClearheadError, require

FORMS = (
    *("short", "medium", "long", "full"),
    *("d MMMM y", "d MMM y", "dd MMM yy", "MMM d y", "MMMM d y", "d-MMM-y", "MMMM d, yy"),
    *("y-MM-dd", "MM/dd/y", "M/d/y", "dd.MM.y", "d.M.yy"),
    *("EEEE, d MMMM y", "EEE d MMM y", "EEE, MMM d, y", "EEEE d MMMM y"),
    *("'the' {} 'of' MMMM y", "MMMM {}, y", "EEEE 'the' {} 'of' MMMM y"),
)
"""How English writes them: CLDR's own and more patterns; {} is the day with its ending, 3rd."""

WINDOW = (1950, 2049)  # what a year of two digits means


@dataclasses.dataclass(frozen=True)
class Dates(Maker, kind="dates"):
    """Dates of the Gregorian calendar, all equally likely."""

    first: int = 1900
    """The first year."""
    last: int = 2099
    """The last year."""

    columns: ClassVar[tuple[str, ...]] = ("en", "fr", "de", "iso")

    def __post_init__(self) -> None:
        require(
            self.first >= 1000 and self.first + 9 <= self.last <= 9999,
            f"dates: ten or more years between 1000 and 9999, not {self.first} to {self.last}.",
        )
        _babel()

    def version(self) -> str:
        return str(_babel().__version__)

    def shape(self, dice: np.random.Generator) -> tuple[Any, bool]:
        form = FORMS[dice.integers(len(FORMS))]
        first, last = self.first, self.last
        if form == "short" or "yy" in form:
            first, last = max(first, WINDOW[0]), min(last, WINDOW[1])
            if last - first < 9:  # too little of the window is asked for
                form, first, last = "long", self.first, self.last
        days = datetime.date(first, 1, 1).toordinal(), datetime.date(last, 12, 31).toordinal()
        return (form, *days), False

    def draw(self, shape: Any, dice: np.random.Generator) -> Any:
        return datetime.date.fromordinal(int(dice.integers(shape[1], shape[2] + 1)))

    def key(self, item: Any) -> str:
        return str(item.isoformat())

    def write(self, shape: Any, item: Any) -> Record:
        return in_form(item, shape[0])


def in_form(day: datetime.date, form: str) -> Record:
    """A date in one English form, and its translations."""
    write = _babel().dates.format_date
    length = "full" if form == "full" or "EEE" in form else "long"
    return {
        "en": write(day, form.replace("{}", f"'{ordinal(day.day)}'"), locale="en_US"),
        "fr": write(day, length, locale="fr"),
        "de": write(day, length, locale="de"),
        "iso": day.isoformat(),
    }


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th, 21st."""
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number // 10 == 1 else endings.get(number % 10, 'th')}"


def _babel() -> Any:
    try:
        import babel
        import babel.dates
    except ImportError as error:
        raise ClearheadError(
            'The data set "dates" is made with Babel: pip install "clearhead[data]", or babel '
            "alone."
        ) from error
    return babel
