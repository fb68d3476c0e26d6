"""The command line: `qdc VERB ...`. Each verb is one small file that parses, calls and prints.

This module finds the verb, and turns every failure into a message and an exit code. It imports nothing heavy:
a build that has nothing to do must answer in a blink.
"""

from __future__ import annotations

import importlib
import os
import sys

VERBS = {
    "validate": "check a recipe without running anything",
    "explain": "print what a finding means and how to fix it",
    "lock": "resolve every source to file digests beside the recipe, and fetch it",
    "plan": "say what a build would run, and why",
    "build": "run what is stale and name the image",
    "why": "say why a stage is fresh, stale or waiting",
    "show": "print a recipe, manifest, build record or the list of builds",
    "keep": "let an earlier output stand after a refactoring, with a reason",
    "import": "take a folder made elsewhere as a stage's output, with a reason",
    "diff": "compare two recipes, builds or images in domain words",
    "audit": "prove or refute from its bytes what an image claims",
    "gate": "start an image and check that it answers, is lossless and fits",
    "export": "write an image as an OCI layout or an archive, into a container engine or a registry",
    "store": "verify the store, let go of what no build needs, share it",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    try:
        return _main(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def _main(given: list[str]) -> int:
    from qdc.cli.common import fail
    from qdc.core.errors import COULD_NOT, QdcError

    try:
        code = _run(given)
        sys.stdout.flush()
        return code
    except QdcError as error:
        return fail(error, "--json" in given)
    except KeyboardInterrupt:
        stopped = QdcError(
            "interrupted", "interrupted; finished stages are kept", exit_code=130, hint="run the same command to go on"
        )
        return fail(stopped, "--json" in given)
    except BrokenPipeError:
        _give_up_unwritten()
        return COULD_NOT
    except UnicodeError as error:
        text = QdcError("cli.text", f"an argument or a file name is not text: {error}", hint="use names in UTF-8")
        return fail(text, "--json" in given)
    except OSError as error:
        wrapped = QdcError(
            "disk",
            f"{error.strerror or error}",
            file=error.filename,
            exit_code=COULD_NOT,
            hint="what was finished is kept; free the cause and run the same command again",
        )
        _give_up_unwritten()
        return fail(wrapped, "--json" in given)


def _run(given: list[str]) -> int:
    from qdc import __version__
    from qdc.core.errors import WRONG_USE, QdcError

    if not given or given[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if given else WRONG_USE
    if given[0] == "--version":
        print(f"qdc {__version__}")
        return 0
    if given[0] not in VERBS:
        from qdc.core.spelling import suggestion

        raise QdcError("cli.verb", f"there is no verb `{given[0]}`", hint=suggestion(given[0], VERBS, "verbs"))
    module = {"import": "import_"}.get(given[0], given[0])
    return int(importlib.import_module(f"qdc.cli.{module}").main(given[1:]))


def _give_up_unwritten() -> None:
    """Where stdout takes no more, let what is left of the answer go, so that the end is not a second failure."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb.ljust(width)}  {what}" for verb, what in VERBS.items()]
    return "\n".join(["usage: qdc VERB ...   (qdc VERB --help)", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
