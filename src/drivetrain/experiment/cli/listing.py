"""`drivetrain ls` and `tag`: many runs in a table with what varies between them, conditions on them, and remarks.

A condition reads `lr<0.1 and (state=finished or tag=base)`: comparisons joined by `and`, `or` and brackets.
"""

import argparse
import itertools
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from operator import eq, ge, gt, le, lt, ne

from drivetrain.core.display import shortened
from drivetrain.core.errors import ExperimentError, ParameterError, unknown_name
from drivetrain.core.types import Settings
from drivetrain.experiment.cli.output import STATE_STYLES, Column, print_fitting_table, print_json, print_lines
from drivetrain.experiment.cli.runs import (
    Objective,
    RunLine,
    common_direction,
    find_all_runs,
    read_lines,
    varying,
)
from drivetrain.experiment.command_line import JSON, argument
from drivetrain.experiment.directions import best_places, read_directions
from drivetrain.experiment.records import DEFAULT_PLACE, STATES, change_remarks, find_runs, short_id
from drivetrain.experiment.reports.gather import differs, short

COMPARISON = re.compile(r"[<>=~]")
LONGEST_TAG = 40
DIRECTION_HELP = "which values of a metric are better; may be repeated"
DIRECTION = argument("--direction", action="append", default=[], metavar="NAME=min|max", help=DIRECTION_HELP)
OBJECTIVE_HELP = (
    "the metric, or entry of the returned dict, to show (default: that of the sweep, else the most informative)"
)
OBJECTIVE = argument("--objective", metavar="NAME", help=OBJECTIVE_HELP)
SEVERAL_HELP = "run folders or short ids; a folder that holds runs means all of them"
WORDS_HELP = f"where to look (default: {DEFAULT_PLACE}), and which runs to list: 'lr<0.1 and state=finished'"
STATUS_HELP = "only runs in this state; lost: its status is running, but no process holds its lock"

ARGUMENTS = {
    "ls": [
        argument("words", nargs="*", metavar="DIR or CONDITION", help=WORDS_HELP),
        argument("--status", choices=STATES, help=STATUS_HELP),
        argument("--experiment", help="only runs of this experiment"),
        argument("--sort", metavar="NAME", help="a parameter, metric or column; for a metric, the best comes first"),
        argument("--reverse", action="store_true", help="reverse the order"),
        argument("-n", type=int, metavar="N", dest="limit", help="only the first N runs"),
        OBJECTIVE,
        DIRECTION,
        JSON,
    ],
    "tag": [
        argument("runs", nargs="+", metavar="RUN", help=SEVERAL_HELP),
        argument("--add", action="append", default=[], metavar="TAG", help="add a tag; may be repeated"),
        argument("--remove", action="append", default=[], metavar="TAG", help="remove a tag; may be repeated"),
        argument("--note", metavar="TEXT", help="set the note; an empty text removes it"),
        JSON,
    ],
}


def ls(arguments: argparse.Namespace) -> None:
    """List runs."""
    places = list(itertools.takewhile(os.path.isdir, arguments.words))
    words = arguments.words[len(places) :]
    if words and not places and not COMPARISON.search(words[0]):
        raise ExperimentError(
            f"there is no folder {words[0]}. Give the --output-dir of your runs, by default {DEFAULT_PLACE}."
        )
    condition = " ".join(words)
    found = {record.folder.resolve(): record for place in places or [DEFAULT_PLACE] for record in find_runs(place)}
    if arguments.limit is not None and arguments.limit < 1:
        raise ParameterError(f"-n {arguments.limit}: expected at least 1 run.")
    records = [
        record
        for record in sorted(found.values(), key=lambda record: (record.started, record.folder.name), reverse=True)
        if arguments.status in (None, record.state) and arguments.experiment in (None, record.experiment)
    ]
    lines = read_lines(records, read_directions(arguments.direction), arguments.objective)
    if condition:
        holds, names = read_condition(condition)
        values = [line.values() for line in lines]
        check_names(names, values)
        lines = [line for line, own in zip(lines, values) if holds(own)]
    if arguments.sort is not None:
        lines = _sorted(lines, arguments.sort)
    if arguments.reverse:
        lines.reverse()
    lines = lines[: arguments.limit]
    if arguments.json:
        varied = varying(lines)
        print_json([_as_data(line, place, varied) for place, line in enumerate(lines)])
    elif not lines:
        print_lines(f"no runs in {' '.join(places) or DEFAULT_PLACE}" + (f" with {condition}" if condition else ""))
    else:
        _print_lines(lines)


def _sorted(lines: list[RunLine], name: str) -> list[RunLine]:
    """Return runs in order of one value: numbers before text, the best first where the direction is known, missing ones last."""
    values = {id(line): line.values() for line in lines}
    check_names([name], values.values())
    tag = name
    if name in ("last", "best"):
        tags = {objective.tag for line in lines if (objective := line.objective()) is not None}
        tag = tags.pop() if len(tags) == 1 else name
    sign = -1 if common_direction(lines, tag) == "max" else 1

    def key(line: RunLine) -> tuple[int, float, str]:
        value = values[id(line)].get(name)
        if isinstance(value, int | float) and not math.isnan(value):
            return 0, sign * value, ""
        return (2, 0.0, "") if value is None or isinstance(value, float) else (1, 0.0, str(value))

    return sorted(lines, key=key)


def _as_data(line: RunLine, place: int, varied: dict[str, list[object]]) -> Settings:
    objective = line.objective()
    parameters = {name: values[place] for name, values in varied.items()}
    return line.facts() | {"metric": objective and objective.tag, "parameters": parameters, "tags": list(line.tags)}


def _print_lines(lines: list[RunLine]) -> None:
    records = [line.record for line in lines]
    objectives = [line.objective() for line in lines]
    tags = {objective.tag for objective in objectives if objective is not None}
    experiments = [record.experiment for record in records]
    columns = [Column("id", [line.id for line in lines]), Column("state", [record.state for record in records])]
    columns += [Column("experiment", experiments, rank=2 if differs(experiments) else 5)]
    columns += [Column("age", [_age(line.age) for line in lines], rank=4)]
    columns += [Column("steps", [record.status.get("step") for record in records], rank=3)]
    columns += [Column(name, values, rank=2) for name, values in varying(lines).items()]
    title = shortened(next(iter(tags)), LONGEST_TAG) if len(tags) == 1 else "last"
    columns += [Column(f"{title} (best)", _cells(lines, objectives))]
    if any(line.tags for line in lines):
        columns.append(Column("tags", [", ".join(line.tags) for line in lines], rank=1))
    if any(line.note for line in lines):
        columns.append(Column("note", [line.note for line in lines], rank=5))
    columns.append(Column("folder", [str(record.folder) for record in records], rank=6))
    print_fitting_table(columns, styles=STATE_STYLES)


def _cells(lines: list[RunLine], objectives: list[Objective | None]) -> list[str]:
    """Return last and best values, the best of all runs with a star."""
    tags = {objective.tag for objective in objectives if objective is not None}
    stars: set[int] = set()
    if len(tags) == 1:
        best = [objective and objective.best for objective in objectives]
        stars = best_places(best, common_direction(lines, next(iter(tags))))
    cells = []
    for place, objective in enumerate(objectives):
        if objective is None:
            cells.append("–")
            continue
        name = "" if len(tags) == 1 else f"{shortened(objective.tag, LONGEST_TAG)} "
        extreme = "" if objective.best is None else f" ({short(objective.best)})"
        cells.append(f"{name}{short(objective.last)}{extreme}{' *' if place in stars else ''}")
    return cells


def _age(seconds: float | None) -> str:
    """Return an age in its largest unit.

    >>> _age(90), _age(200_000)
    ('1 min', '2 d')
    """
    if seconds is None:
        return "–"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def tag(arguments: argparse.Namespace) -> None:
    """Change or show the tags and the note of runs."""
    found = []
    for record in find_all_runs(arguments.runs):
        tags, note = change_remarks(record.folder, add=arguments.add, remove=arguments.remove, note=arguments.note)
        found.append({"id": short_id(record.folder), "tags": tags, "note": note, "folder": str(record.folder)})
    if arguments.json:
        print_json(found)
    else:
        rows = [(entry["id"], ", ".join(entry["tags"]), entry["note"]) for entry in found]
        names = ("id", "tags", "note")
        print_fitting_table([Column(name, list(cells)) for name, cells in zip(names, zip(*rows))])


TOKEN = re.compile(r"""\s*(?:(<=|>=|!=|==|=|<|>|~)|([()])|"([^"]*)"|'([^']*)'|([^\s<>=!~()"']+))""")
LONGEST, MOST_BRACKETS = 2000, 50
"""Characters and opening brackets of a condition."""
EXPECTED = "Expected comparisons such as lr<0.1 or state=finished, joined by and, or and brackets; ~ is 'contains'."

SIGNS = dict(zip("= == != < <= > >=".split(), (eq, eq, ne, lt, le, gt, ge), strict=True))

Values = Mapping[str, object]
Condition = Callable[[Values], bool]


def read_condition(text: str) -> tuple[Condition, set[str]]:
    """Return a condition on the named values of a run, and the names it uses.

    >>> holds, names = read_condition("lr<0.1 and state=finished")
    >>> holds({"lr": 0.01, "state": "finished"}), holds({"lr": 0.01, "state": "failed"}), sorted(names)
    (True, False, ['lr', 'state'])
    """
    if len(text) > LONGEST:
        raise ParameterError(f"the condition has {len(text)} characters; at most {LONGEST} are read.")
    if (brackets := text.count("(")) > MOST_BRACKETS:
        raise ParameterError(f"the condition has {brackets} opening brackets; at most {MOST_BRACKETS} are read.")
    tokens, names = deque(_tokens(text)), set[str]()

    def problem() -> ParameterError:
        rest = " ".join(word for _, word in tokens)
        where = f"from {rest!r} on" if rest else "at its end"
        return ParameterError(f"cannot parse the condition {text!r} {where}. {EXPECTED}")

    def take(*kinds: str, words: tuple[str, ...] = ()) -> str | None:
        """Return the next token and move on if it is of these kinds, and one of these words where some are given."""
        if not tokens or tokens[0][0] not in kinds or (words and tokens[0][1] not in words):
            return None
        return tokens.popleft()[1]

    def read() -> Condition:
        """Read comparisons joined by `and`, and such groups joined by `or`."""
        groups = [[read_one()]]
        while word := take("word", words=("and", "or")):
            if word == "or":
                groups.append([])
            groups[-1].append(read_one())
        return lambda values: any(all(part(values) for part in group) for group in groups)

    def read_one() -> Condition:
        """Read one comparison, or a condition in brackets."""
        if take("bracket", words=("(",)):
            inner = read()
            if not take("bracket", words=(")",)):
                raise problem()
            return inner
        name = take("word", "text")
        sign = None if name is None else take("sign")
        wanted = None if sign is None else take("text", "word")
        if name is None or sign is None or wanted is None:
            raise problem()
        names.add(name)
        return lambda values: compare(values.get(name), sign, wanted)

    condition = read()
    if tokens:
        raise problem()
    return condition, names


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """Yield kind and text of each token."""
    position = 0
    while position < len(text.rstrip()):
        found = TOKEN.match(text, position)
        if found is None:
            raise ParameterError(f"cannot parse the condition {text!r} from {text[position:]!r} on. {EXPECTED}")
        sign, bracket, double, single, word = found.groups()
        kind = "sign" if sign else "bracket" if bracket else "word" if word else "text"
        yield kind, sign or bracket or word or double or single or ""
        position = found.end()


def check_names(names: Iterable[str], runs: Iterable[Values]) -> None:
    """Raise for a name that no run has."""
    runs = list(runs)
    known = dict.fromkeys(name for run in runs for name in run)
    for name in names:
        if runs and name not in known:
            raise ParameterError(unknown_name("name of a run's values", name, list(known)))


def compare(value: object, sign: str, wanted: str) -> bool:
    """Compare one value with a text: as numbers where both are, else as text; of a list one entry must match.

    >>> compare(0.1, "<", "2e-1"), compare("adam", "~", "ad"), compare(None, "<", "1"), compare(["a", "b"], "=", "b")
    (True, True, False, True)
    """
    if isinstance(value, list | tuple):
        found = [compare(item, "=" if sign == "!=" else sign, wanted) for item in value]
        return not any(found) if sign == "!=" else any(found)
    if sign == "~":
        return value is not None and wanted.lower() in _text(value).lower()
    number = None
    with suppress(ValueError):
        number = float(wanted)
    if isinstance(value, int | float) and not isinstance(value, bool) and number is not None:
        return bool(SIGNS[sign](value, number))
    same = _text(value) == (wanted.lower() if value is None or isinstance(value, bool) else wanted)
    return same if sign in ("=", "==") else not same if sign == "!=" else False


def _text(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
