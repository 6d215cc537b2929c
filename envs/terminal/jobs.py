"""The jobs: the files that are there, what is to be done, how a perfect player does it, the files that are right."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Files = dict[str, str]
"""Text by path, relative to the working folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job.

    Example:
        ``Job(text="Count the lines of mill-312/a.txt. Write the number into mill-312/count.txt.",
        before={"mill-312/a.txt": "x\\ny\\n"}, command="wc -l < mill-312/a.txt > mill-312/count.txt",
        after={"mill-312/a.txt": "x\\ny\\n", "mill-312/count.txt": "2\\n"})``
    """

    text: str
    before: Files
    command: str
    after: Files
    """The files of the job that have to be there in the end, those that must not change included."""
    gone: Sequence[str] = ()
    """Paths where nothing may be in the end."""


_WORDS = [
    word
    for line in (
        "amber anchor basil beacon birch canyon cedar cobalt comet coral ember falcon fern garnet harbor hazel indigo",
        "island jasper juniper kelp lagoon lantern lotus maple meadow mint nickel oasis olive onyx opal orchid pebble",
        "pepper pine plum poppy quartz quill raven reef ridge river rose saffron sage silver slate spruce summit teal",
        "thistle topaz tulip umber velvet violet walnut willow yarrow zephyr",
    )
    for word in line.split()
]
_CITIES = ("Bern", "Cairo", "Lagos", "Lima", "Oslo", "Quito", "Seoul", "Turin")
_MARKS = ("ERROR", "WARNING", "RETRY", "DENIED")


def _create(rng: random.Random, folder: str) -> Job:
    path = f"{folder}/{rng.choice(_WORDS)}/{rng.choice(_WORDS)}.txt"
    line = " ".join(rng.sample(_WORDS, 4))
    return Job(
        text=f"Create the file {path} with the one line: {line}",
        before={},
        command=f"mkdir -p {path.rpartition('/')[0]} && echo '{line}' > {path}",
        after={path: f"{line}\n"},
    )


def _move(rng: random.Random, folder: str) -> Job:
    names = rng.sample(_WORDS, 6)
    moved = rng.randint(2, 4)
    before = {
        f"{folder}/{name}.{'log' if i < moved else rng.choice(('txt', 'csv', 'logs'))}": _sentence(rng)
        for i, name in enumerate(names)
    }
    target = f"{folder}/{rng.choice(('archive', 'old', 'done'))}"
    logs = {path: text for path, text in before.items() if path.endswith(".log")}
    kept = {path: text for path, text in before.items() if path not in logs}
    return Job(
        text=f"Move all files of {folder} that end in .log into the new folder {target}.",
        before=_shuffled(rng, before),
        command=f"mkdir {target} && mv {folder}/*.log {target}/",
        after={**kept, **{path.replace(folder, target, 1): text for path, text in logs.items()}},
        gone=list(logs),
    )


def _count(rng: random.Random, folder: str) -> Job:
    mark = rng.choice(_MARKS)
    before = {}
    for name in rng.sample(_WORDS, 3):
        lines = [f"{number:04d} {rng.choice(_MARKS)} {rng.choice(_WORDS)}" for number in range(rng.randint(12, 30))]
        before[f"{folder}/{name}.log"] = "".join(f"{line}\n" for line in lines)
    count = sum(f" {mark} " in line for text in before.values() for line in text.splitlines())
    return Job(
        text=f"Count the lines with {mark} in all files of {folder}. Write the number into {folder}/count.txt.",
        before=before,
        command=f"cat {folder}/*.log | grep -c {mark} > {folder}/count.txt",
        after={**before, f"{folder}/count.txt": f"{count}\n"},
    )


def _extract(rng: random.Random, folder: str) -> Job:
    table, rows = _table(rng)
    city = rng.choice([row[1] for row in rows])
    names = [name for name, where, _ in rows if where == city]
    return Job(
        text=f"Write the names of those in {folder}/table.csv whose city is {city} into {folder}/names.txt, "
        "one per line, in the order of the table.",
        before={f"{folder}/table.csv": table},
        command=f"awk -F, '$2 == \"{city}\" {{print $1}}' {folder}/table.csv > {folder}/names.txt",
        after={f"{folder}/table.csv": table, f"{folder}/names.txt": "".join(f"{name}\n" for name in names)},
    )


def _sum(rng: random.Random, folder: str) -> Job:
    table, rows = _table(rng)
    return Job(
        text=f"Write the sum of the column amount of {folder}/table.csv into {folder}/total.txt.",
        before={f"{folder}/table.csv": table},
        command=f"awk -F, 'NR > 1 {{s += $3}} END {{print s}}' {folder}/table.csv > {folder}/total.txt",
        after={f"{folder}/table.csv": table, f"{folder}/total.txt": f"{sum(amount for _, _, amount in rows)}\n"},
    )


def _fix(rng: random.Random, folder: str) -> Job:
    keys = rng.sample(_WORDS, 6)
    values = {key: rng.randint(1000, 9999) for key in keys}
    text = "".join(f"{key} = {value}\n" for key, value in values.items())
    key, new = rng.choice(keys), rng.randint(100, 999)
    path = f"{folder}/settings.ini"
    return Job(
        text=f"In {path}, change the value of {key} to {new}. Change nothing else.",
        before={path: text},
        command=f"sed -i 's/^{key} = .*/{key} = {new}/' {path}",
        after={path: text.replace(f"{key} = {values[key]}\n", f"{key} = {new}\n")},
    )


def _deduplicate(rng: random.Random, folder: str) -> Job:
    lines = rng.sample(_WORDS, 8)
    text = [*lines, *rng.choices(lines, k=6)]
    rng.shuffle(text)
    path = f"{folder}/list.txt"
    return Job(
        text=f"Remove from {path} every line that occurred before; keep the order of the others.",
        before={path: "".join(f"{line}\n" for line in text)},
        command=f"awk '!seen[$0]++' {path} > {path}.new && mv {path}.new {path}",
        after={path: "".join(f"{line}\n" for line in dict.fromkeys(text))},
    )


def _sort(rng: random.Random, folder: str) -> Job:
    before, after = {}, {}
    for name in rng.sample(_WORDS, 5):
        year, text = rng.randint(2018, 2021), _sentence(rng)
        before[f"{folder}/{year}-{name}.txt"] = text
        after[f"{folder}/{year}/{name}.txt"] = text
    return Job(
        text=f"Sort the files of {folder} into a folder for each year: {folder}/YEAR-NAME.txt becomes "
        f"{folder}/YEAR/NAME.txt.",
        before=_shuffled(rng, before),
        command=f"for f in {folder}/*-*.txt; do n=${{f##*/}}; y=${{n%%-*}}; mkdir -p {folder}/$y; "
        f"mv $f {folder}/$y/${{n#*-}}; done",
        after=after,
        gone=list(before),
    )


def _find(rng: random.Random, folder: str) -> Job:
    code = f"{rng.choice(_WORDS)}-{rng.randint(10_000, 99_999)}"
    paths = [f"{folder}/{a}/{b}.txt" for a in rng.sample(_WORDS, 3) for b in rng.sample(_WORDS, 3)]
    before = {path: _sentence(rng) for path in paths}
    before[rng.choice(paths)] += f"code: {code}\n"
    return Job(
        text=f"One file somewhere below {folder} has a line that begins with 'code: '. Write what follows on that line "
        f"into {folder}/code.txt.",
        before=before,
        command=f"grep -rh '^code: ' {folder} | cut -c 7- > {folder}/code.txt",
        after={**before, f"{folder}/code.txt": f"{code}\n"},
    )


KINDS: Mapping[str, Callable[[random.Random, str], Job]] = {
    "create": _create,
    "move": _move,
    "count": _count,
    "extract": _extract,
    "sum": _sum,
    "fix": _fix,
    "deduplicate": _deduplicate,
    "sort": _sort,
    "find": _find,
}
"""How a job of each kind is drawn, given its folder."""


def draw(rng: random.Random, count: int) -> list[tuple[str, Job]]:
    """Jobs of different kinds, each in a folder of its own."""
    kinds = rng.sample(list(KINDS), count)
    return [
        (kind, KINDS[kind](rng, f"{word}-{rng.randint(100, 999)}"))
        for kind, word in zip(kinds, rng.sample(_WORDS, count), strict=True)
    ]


def _table(rng: random.Random) -> tuple[str, list[tuple[str, str, int]]]:
    """Rows of a name, a city and an amount; no name and no amount occurs twice."""
    count = rng.randint(12, 20)
    names, amounts = rng.sample(_WORDS, count), rng.sample(range(10, 1000), count)
    rows = [(name.capitalize(), rng.choice(_CITIES), amount) for name, amount in zip(names, amounts, strict=True)]
    return "name,city,amount\n" + "".join(f"{name},{city},{amount}\n" for name, city, amount in rows), rows


def _sentence(rng: random.Random) -> str:
    return " ".join(rng.sample(_WORDS, 5)) + "\n"


def _shuffled(rng: random.Random, files: Files) -> Files:
    return dict(rng.sample(list(files.items()), len(files)))
