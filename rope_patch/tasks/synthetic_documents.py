"""Synthetic encyclopaedia: articles on people and towns that no model has read, without end.

After the synthetic biographies of Allen-Zhu and Li (Physics of Language Models 3.1,
arXiv:2309.14316): attributes drawn at random, in sentences of varied wording and order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass


def _list(words: str) -> list[str]:
    return words.split(",")


_FIRST = {
    "she": "Ada,Berta,Clara,Delia,Edith,Flora,Greta,Hilda,Ines,Judith,Klara,Lydia,Martha,Nora,Olga,"
    "Petra,Rosa,Selma,Thea,Ursula,Vera,Wilma",
    "he": "Albin,Bruno,Conrad,Daniel,Edgar,Felix,Gustav,Hector,Ivan,Jasper,Kaspar,Leopold,Magnus,"
    "Norbert,Oscar,Piers,Quentin,Rufus,Silas,Tobias,Victor,Walter",
}
_MIDDLE = _list(
    "Abel,Bryce,Corin,Dale,Esmond,Fay,Garth,Hollis,Iver,Jules,Keane,Lorne,Merrit,Noel,Orrin,Paige,"
    "Reese,Shea,Tully,Vance,Wynn,Yates"
)
_LAST = [
    start + end
    for start in _list("Alder,Barn,Cald,Dun,Elm,Farl,Grims,Hather,Ister,Kest,Lang,Marl,Nor,Ost")
    for end in _list("by,croft,den,feld,gate,holm,lock,man,ridge,sen")
]
_TOWN = [
    _list(
        "Amber,Black,Cold,Dray,East,Fen,Gold,High,Iron,Jack,Kings,Lark,Mill,North,Oak,Pine,Raven,"
        "Stone,Thorn,Upper,White,Wolf,Yarrow,Ash,Birch,Crow,Dove,Elder,Fox,Green,Hawk,Ivy,Juniper,"
        "Kite,Long,Moor,New,Otter,Plum,Rush"
    ),
    _list(
        "al,bar,cor,den,el,far,gil,hal,ing,ker,lan,mar,nel,or,pen,ros,sel,tor,ul,win,bel,cam,dor,"
        "fin,gar,hol,jas,kil,lor,mel,nan,ot,per,quin,rem,sul,tam,var,wes,yel"
    ),
    _list("bury,cliff,combe,dale,field,ford,ham,haven,hurst,ley,mouth,port,stead,ton,wick,worth"),
]
_COUNTY = [
    start + end
    for start in _list("Arden,Brook,Corwen,Dorn,Elder,Fallow,Garn,Hazel,Lorn,Moss,Rother,Wend")
    for end in ("shire", "mark", "land", " Vale")
]
_SUBJECT = _list(
    "botany,geometry,metallurgy,law,theology,veterinary medicine,astronomy,music theory,"
    "agricultural chemistry,naval architecture,ancient history,civil engineering,dentistry,"
    "linguistics,mineralogy,optics"
)
_COMPANY = [
    f"{name} {kind}"
    for name in _list("Anchor,Beacon,Crescent,Dovetail,Falcon,Juniper,Lantern,Meridian,Pelican")
    for kind in _list("Foundry,Glassworks,Shipping Line,Insurance,Paper Mills,Telegraph")
]
_INSTRUMENT = _list(
    "the cello,the bassoon,the harp,the organ,the trumpet,the viola,the oboe,the accordion,"
    "the French horn,the clarinet,the mandolin,the zither"
)
_MONTH = _list(
    "January,February,March,April,May,June,July,August,September,October,November,December"
)
_TRADE = _list("salt,clocks,lace,barrels,bells,saddles,pottery,rope,cider,tin,wool,bricks")

# Each sentence of an article is one of several wordings, chosen anew for every article.
_BORN = (
    "{name} was born in {town} on {date}.",
    "On {date}, {name} was born in the town of {town}.",
    "{name} (born in {town} on {date}) was the second of four children.",
)
_LIFE = (
    (
        "After school {they} took a degree in {subject}, against the wish of the family.",
        "At the university {they} chose {subject} and finished with honours.",
        "A scholarship allowed {them} to study {subject} for three years.",
    ),
    (
        "For most of a long career {they} worked for {company}.",
        "{They} then joined {company} and stayed there until retirement.",
        "A post at {company} became the work of {their} life.",
    ),
    (
        "In the evenings {they} played {instrument}, often in front of friends.",
        "{They} was also known locally for playing {instrument}.",
        "A gifted amateur, {they} played {instrument} in a small orchestra.",
    ),
    (
        "Neighbours remembered {them} as patient, modest and fond of long walks.",
        "Letters that were found later show a dry sense of humour and a love of maps.",
        "{They} kept a diary for many years, which a local library still holds.",
    ),
)
_PLACE = (
    "{town} is a town in the county of {county}.",
    "The town of {town} lies in the county of {county}.",
    "{town}, a small town, belongs to the county of {county}.",
)
_TOWN_LIFE = (
    (
        "It has about {people} inhabitants, fewer than a century ago.",
        "At the last count {people} people lived there, most of them near the old market.",
    ),
    (
        "For generations it was known for its {trade}, sold all over the country.",
        "Its wealth came from {trade}, made in workshops along the river.",
    ),
    (
        "The town hall was finished in {year} and burned down twice.",
        "A stone bridge from {year} still carries the main road across the water.",
    ),
    (
        "Every autumn a fair fills the square for a week, with music and a race of carts.",
        "The railway came late, and the station stands half an hour's walk from the centre.",
    ),
)
_QUESTIONS = {
    "town": "In which town was {name} born?",
    "date": "On which date was {name} born?",
    "subject": "Which subject did {name} study?",
    "company": "Which company did {name} work for?",
    "instrument": "Which instrument did {name} play?",
}
_DESCRIBING = ("subject", "company", "instrument")
_RESEMBLING = 0.25
_DESCRIPTION_QUESTION = (
    "In which town was the person born who studied {subject}, worked for {company} and played "
    "{instrument}?"
)
_COUNTY_QUESTION = "In which county lies the town where {name} was born?"


@dataclass(frozen=True, kw_only=True)
class DocumentQuestion:
    """A question over documents.

    Attributes:
        question: The words of the question.
        answers: The right answers; any of them counts.
        documents: The documents that the answer takes; the last one holds it.
    """

    question: str
    answers: list[str]
    documents: list[str]


class Encyclopaedia:
    """Articles without end, each of another person or town.

    Args:
        rng: The source of all random choices.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        women, men = (
            _scattered_combinations(rng, [_list(names), _MIDDLE, _LAST], " ")
            for names in _FIRST.values()
        )
        self._people = {"she": women, "he": men}
        self._towns = _scattered_combinations(rng, _TOWN, "")
        self._described: list[dict[str, str]] = []  # what tells a person who is asked for

    def one_hop(self) -> DocumentQuestion:
        """Return a question for one attribute of a new person."""
        person = self._person()
        attribute = self._rng.choice(list(_QUESTIONS))
        answers = [person[attribute]]
        if attribute == "date":
            day, month, year = person["date"].split()
            answers.append(f"{month} {day}, {year}")
        elif attribute == "instrument":
            answers.append(person["instrument"].removeprefix("the "))
        question = _QUESTIONS[attribute].format(**person)
        return DocumentQuestion(
            question=question, answers=answers, documents=[self._biography(person)]
        )

    def two_hops(self) -> DocumentQuestion:
        """Return a question for the county of a new person's birth town, described elsewhere."""
        person, county = self._person(), self._rng.choice(_COUNTY)
        documents = [self._biography(person), self._about_town(person["town"], county)]
        question = _COUNTY_QUESTION.format(**person)
        return DocumentQuestion(question=question, answers=[county], documents=documents)

    def by_description(self) -> DocumentQuestion:
        """Return a question for the town of a new person, who is told by three things, unnamed.

        A quarter of the persons of distractors share two of these, and none shares all.
        """
        person = self._person()
        self._described.append({name: person[name] for name in _DESCRIBING})
        return DocumentQuestion(
            question=_DESCRIPTION_QUESTION.format(**person),
            answers=[person["town"]],
            documents=[self._biography(person)],
        )

    def distractors(self) -> Iterator[str]:
        """Yield articles of people and towns that no question is about, without end."""
        while True:
            yield self._biography(self._resembling(self._person()))
            yield self._about_town(next(self._towns), self._rng.choice(_COUNTY))

    def _person(self) -> dict[str, str]:
        rng = self._rng
        they = rng.choice(("she", "he"))
        date = f"{rng.randint(1, 28)} {rng.choice(_MONTH)} {rng.randint(1790, 1960)}"
        person = {"they": they, "name": next(self._people[they]), "date": date}
        person |= {"town": next(self._towns), "subject": rng.choice(_SUBJECT)}
        person |= {"company": rng.choice(_COMPANY), "instrument": rng.choice(_INSTRUMENT)}
        return self._person() if self._is_described(person) else person

    def _resembling(self, person: dict[str, str]) -> dict[str, str]:
        """Return the person, in a quarter of cases with two of three things of one asked for."""
        if not self._described or self._rng.random() >= _RESEMBLING:
            return person
        other = self._rng.choice(self._described)
        changed = person | {name: other[name] for name in self._rng.sample(_DESCRIBING, 2)}
        return person if self._is_described(changed) else changed

    def _is_described(self, person: dict[str, str]) -> bool:
        return {name: person[name] for name in _DESCRIBING} in self._described

    def _biography(self, person: dict[str, str]) -> str:
        them, their = {"she": ("her", "her"), "he": ("him", "his")}[person["they"]]
        words = person | {"They": person["they"].capitalize(), "them": them, "their": their}
        return self._article(_BORN, _LIFE, words)

    def _about_town(self, town: str, county: str) -> str:
        rng = self._rng
        words = {"town": town, "county": county, "people": str(rng.randint(11, 199) * 100)}
        words |= {"trade": rng.choice(_TRADE), "year": str(rng.randint(1500, 1780))}
        return self._article(_PLACE, _TOWN_LIFE, words)

    def _article(
        self, opening: tuple[str, ...], body: tuple[tuple[str, ...], ...], words: dict[str, str]
    ) -> str:
        rest = [self._rng.choice(wordings) for wordings in body]
        self._rng.shuffle(rest)
        return " ".join([self._rng.choice(opening), *rest]).format(**words)


def _scattered_combinations(
    rng: random.Random, parts: list[list[str]], joint: str
) -> Iterator[str]:
    """Yield every combination of the parts once, in a scattered order, before any repeats."""
    count = math.prod(map(len, parts))
    # A step without a common factor visits all; near the golden section it scatters them.
    step = next(s for s in range(int(count * 0.618), count) if math.gcd(s, count) == 1)
    at = rng.randrange(count)
    while True:
        rest, name = at, []
        for part in parts:
            rest, which = divmod(rest, len(part))
            name.append(part[which])
        yield joint.join(name)
        at = (at + step) % count
