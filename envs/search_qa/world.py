"""The invented world: entities with facts and links to each other, and an article about each."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

COUNTS = {"town": 30, "person": 90, "building": 60, "guild": 30, "book": 60}
"""Entities of each kind."""


def _words(text: str) -> list[str]:
    return [word.replace("_", " ") for word in text.split()]


_STARTS = _words("Ael Bar Cor Dun Eld Fen Gar Hol Ister Jor Kel Lor Mar Nar Ost Pel Quen Rav Sel Tor Ulm Ver Wen Yar")
_MIDDLES = _words("a e i o u an en il or um al er")
_TOWN_ENDS = _words("wick mouth stead brook haven ford moor gate cliff dale")
_FIRST_ENDS = _words("na ra lin dis vo mir ta sk ren do las bet")
_LAST_ENDS = _words("sen vane holt mark dor quist bury lock rell thorne")
_GUILD_ENDS = _words("ic ane ard ule ost")
_SIGNS = _words(
    "Amber Anvil Ash Bell Birch Cinder Copper Crane Dawn Dove Elm Ember Falcon Feather Fox Glass Hawthorn Heron Iron "
    "Ivy Juniper Kestrel Lantern Lark Lily Marten Moss Moth Nettle Otter Owl Pearl Raven Reed Salt Sparrow Thistle "
    "Trout Walnut Willow"
)
_BUILDINGS = _words("Arcade Bridge Granary Hall Library Lighthouse Mill Observatory Theatre Tower")
_BOOKS = _words("Ballad Chronicle Garden Letters Map Mirror Orchard Riddle Song Voyage")
_MATERIALS = _words("basalt brick cedar copper granite limestone marble oak sandstone slate")
_PRODUCTS = _words("anchors candles cheese clocks dyes glass honey kites lenses paper rope saddles")
_TRADES = _words("botanist cartographer engraver judge mason painter physician pilot printer weaver")
_RIVERS = _words("Adra Brine Corrow Dulse Esker Fallow Gild Harrow Inver Jasper Kirrin Lode")
_DISHES = _words("barley_soup nettle_pie pear_cake pickled_beets plum_tart rye_dumplings salted_almonds smoked_eel")

_ARTICLES = {
    "town": (
        "{name} is a town on the river {river}. It was founded in {founded} and has {population} inhabitants. "
        "Its mayor is {mayor}.",
        "The town of {name}, founded in {founded}, lies on the river {river}. {mayor} is its mayor. "
        "Of late, {population} people were counted there.",
    ),
    "person": (
        "{name} was born in {born} in {birthplace} and became a {trade}. {name} was a pupil of {teacher} "
        "and was fond of {dish}.",
        "{name} was a {trade} from {birthplace}, born in {born}. The teacher of {name} was {teacher}. "
        "{name} liked {dish} best.",
    ),
    "first person": (
        "{name} was born in {born} in {birthplace} and became a {trade}. {name} had no teacher and was fond of {dish}.",
        "{name} was a {trade} from {birthplace}, born in {born}. {name} was self-taught and liked {dish} best.",
    ),
    "building": (
        "{name} stands in {town}. It was designed by {architect}, built of {material}, and finished in {year}.",
        "{name} was finished in {year}. The building, which stands in {town}, is made of {material}. "
        "Its architect was {architect}.",
    ),
    "guild": (
        "{name} makes {product}. It was founded by {founder} in {year} and has its seat in {seat}.",
        "In {year}, {founder} founded {name}. It is known for its {product}; its seat is in {seat}.",
    ),
    "book": (
        "{name} is a book about {about}. It was written by {author}, appeared in {year} and has {pages} pages.",
        "{author} wrote {name}, a book of {pages} pages that appeared in {year}. It tells of {about}.",
    ),
}
"""Wordings. Fields: the name, the facts and the links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entity:
    """Something that has an article.

    Example:
        ``Entity(kind="book", name="The Heron Voyage", facts={"year": "1412", "pages": "231"},
        links={"author": "Kelana Marholt", "about": "Dunowick"}, article="The Heron Voyage is a book ...")``
    """

    kind: str
    name: str
    facts: Mapping[str, str]
    """What can be asked for: numbers, materials, rivers ..."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Names of other entities."""
    article: str


@lru_cache(maxsize=8)
def make_world(seed: int, split: str) -> Mapping[str, Entity]:
    """The entities of a world by name."""
    return _Maker(random.Random(f"search-qa/{seed}/{split}"), split).make()


def split_of(name: str) -> str:
    """The split in whose worlds something may have this name: one name in four is for validation."""
    return "validation" if zlib.crc32(name.encode()) % 4 == 0 else "train"


class _Maker:
    """Makes a world: towns, people (of whom the older may teach the younger), and what people made."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self.rng = rng
        self.split = split
        self.entities: dict[str, Entity] = {}
        self.towns = self._names("town", lambda: self._word(_TOWN_ENDS))
        self.people = self._names("person", lambda: f"{self._word(_FIRST_ENDS)} {self._word(_LAST_ENDS)}")
        self.born = dict(zip(self.people, sorted(rng.randint(1100, 1480) for _ in self.people), strict=True))

    def make(self) -> Mapping[str, Entity]:
        rng = self.rng
        for name in self.towns:
            facts = {
                "founded": _number(rng, 400, 1050),
                "river": rng.choice(_RIVERS),
                "population": _number(rng, 2000, 9999),
            }
            self._add("town", name, facts, {"mayor": rng.choice(self.people)})
        for name in self.people:
            self._add_person(name)
        for name in self._names("building", lambda: f"{rng.choice(_SIGNS)} {rng.choice(_BUILDINGS)}"):
            person = rng.choice(self.people)
            facts = {"year": self._work_number(person), "material": rng.choice(_MATERIALS)}
            self._add("building", name, facts, {"architect": person, "town": rng.choice(self.towns)})
        for name in self._names("guild", lambda: f"{self._word(_GUILD_ENDS)} Guild"):
            person = rng.choice(self.people)
            facts = {"year": self._work_number(person), "product": rng.choice(_PRODUCTS)}
            self._add("guild", name, facts, {"founder": person, "seat": rng.choice(self.towns)})
        for name in self._names("book", lambda: f"{rng.choice(_SIGNS)} {rng.choice(_BOOKS)}"):
            person = rng.choice(self.people)
            facts = {"year": self._work_number(person), "pages": str(rng.randint(101, 899))}
            self._add("book", name, facts, {"author": person, "about": rng.choice(self.towns)})
        return self.entities

    def _add_person(self, name: str) -> None:
        rng, born = self.rng, self.born[name]
        facts = {"born": str(born), "trade": rng.choice(_TRADES), "dish": rng.choice(_DISHES)}
        links = {"birthplace": rng.choice(self.towns)}
        older = [other for other in self.people if 20 <= born - self.born[other] <= 50]
        if older:
            links["teacher"] = rng.choice(older)
        self._add("person", name, facts, links, wording="person" if older else "first person")

    def _add(
        self, kind: str, name: str, facts: Mapping[str, str], links: Mapping[str, str], wording: str | None = None
    ) -> None:
        text = self.rng.choice(_ARTICLES[wording or kind]).format(name=name, **facts, **links)
        self.entities[name] = Entity(kind=kind, name=name, facts=facts, links=links, article=text)

    def _work_number(self, person: str) -> str:
        return _number(self.rng, self.born[person] + 22, self.born[person] + 60)

    def _word(self, ends: Sequence[str]) -> str:
        return self.rng.choice(_STARTS) + self.rng.choice(_MIDDLES) + self.rng.choice(ends)

    def _names(self, kind: str, draw: Callable[[], str]) -> list[str]:
        """So many names as there are entities of that kind, all of the split."""
        names: dict[str, None] = {}
        while len(names) < COUNTS[kind]:
            name = draw()
            if split_of(name) == self.split:
                names[name] = None
        return list(names)


def _number(rng: random.Random, first: int, last: int) -> str:
    return str(rng.randint(first, last))
