"""What the verbs share: options, where the store is, printing answers and errors."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from qdc.core.errors import WRONG_USE, QdcError

if TYPE_CHECKING:
    from qdc.store.store import Store

ANSWER_SCHEMA = 1


class Parser(argparse.ArgumentParser):
    """argparse with qdc's errors in place of its own exits."""

    def error(self, message: str) -> NoReturn:
        raise QdcError(
            "cli.usage", message, hint=f"{self.format_usage().strip()}; see `{self.prog} --help`", exit_code=WRONG_USE
        )


def parser(verb: str, about: str, *, sets: bool = False) -> Parser:
    """A verb's parser with the common options."""
    result = Parser(prog=f"qdc {verb}", description=about, allow_abbrev=False)
    result.add_argument("--store", metavar="DIR", help="the store (default: QDC_STORE, or artifacts/ near the recipe)")
    result.add_argument("--json", action="store_true", help="one JSON object on stdout")
    level = result.add_mutually_exclusive_group()
    level.add_argument("--quiet", action="store_true", help="no progress")
    level.add_argument("--verbose", action="store_true", help="more detail")
    if sets:
        result.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="PATH=VALUE",
            dest="sets",
            help="change a field of the recipe, e.g. serve.k=5 (repeatable)",
        )
    return result


def add_executor(options: Parser) -> None:
    """The options that say where stages run."""
    options.add_argument(
        "--executor", metavar="WHERE", help="local, or ray: training stages on a cluster (default: QDC_EXECUTOR)"
    )
    options.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the cluster's head (default: QDC_RAY_ADDRESS; none: one of its own here)",
    )


def open_store(option: str | None, near: Path | None = None) -> Store:
    """The store: the option, QDC_STORE, the nearest `artifacts` folder above the recipe, or one beside it."""
    from qdc.store.store import Store

    chosen = option or os.environ.get("QDC_STORE")
    if chosen:
        return Store(Path(chosen).absolute())
    start = near.absolute().parent if near is not None else Path.cwd()
    for folder in (start, *start.parents):
        if (folder / "artifacts").is_dir():
            return Store(folder / "artifacts")
    return Store(start / "artifacts")


def answer(value: dict[str, Any]) -> None:
    """Print a verb's `--json` object."""
    print(json.dumps({"schema": ANSWER_SCHEMA, **value}, ensure_ascii=False))


def note(text: str) -> None:
    """A line for the person, beside the answer."""
    print(painted(text, sys.stderr), file=sys.stderr)


def painted(text: str, stream: TextIO) -> str:
    """`text` with its findings in colour where `stream` is a terminal that may show it."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return text
    return "\n".join(_painted(line) for line in text.split("\n"))


def _painted(line: str) -> str:
    for severity, colour in (("error", 31), ("warning", 33), ("note", 36), ("accepted", 32)):
        where, mark, message = line.partition(f": {severity}[")
        if mark and ":" in where and " | " not in where:
            rule, _, said = message.partition("]: ")
            return f"\x1b[1m{where}: \x1b[{colour}m{severity}[{rule}]\x1b[39m: {said}\x1b[0m"
    gutter, mark, rest = line.partition("|")
    if mark and not gutter.strip(" .") and rest.strip(" ")[:1] == "^" and not rest.strip(" ^"):
        return f"\x1b[34m{gutter}|\x1b[31m{rest}\x1b[0m"
    if mark and (not gutter.strip() or gutter.strip().isdigit()):
        return f"\x1b[34m{gutter}|\x1b[0m{rest}"
    return f"\x1b[36mhelp\x1b[0m{line[4:]}" if line.startswith("help: ") else line


def fail(error: QdcError, as_json: bool, *, reference: str | None = None) -> int:
    """Print a failure; returns its exit code, whether or not stdout takes the answer.

    `reference`: the one of several things on the command line that it is about.
    """
    if as_json:
        with contextlib.suppress(OSError):
            answer({"error": error.as_json(), **({} if reference is None else {"reference": reference})})
    text = str(error)
    note(text if text.startswith("error") or ": error[" in text else f"error: {text}")
    return error.exit_code
