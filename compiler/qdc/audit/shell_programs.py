"""Programs that a script starts: wrappers, shells, scripts of the image, a few known ones, the engine, strangers.

A shell script of the image is read in turn. The engine and every program that is not known here are noted as
launches, with their words and environment; a stranger may have changed any file.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from qdc.audit.shell_pieces import Undecidable
from qdc.audit.shell_state import Launch, Place, State, Value, inherited, unknown
from qdc.audit.shell_tools import HARMLESS, Tools

if TYPE_CHECKING:
    from collections.abc import Mapping

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHELLS = {"bash": "bash", "dash": "dash", "sh": "sh", "ash": "sh"}
ENGINE_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main", "vllm")
# Options with a value of programs that only start another one; a tuple's second item counts plain words to skip.
WRAPPERS: Mapping[str, tuple[str, int]] = {
    "nohup": ("", 0), "setsid": ("", 0), "nice": ("-n", 0), "ionice": ("-c -n", 0), "stdbuf": ("-o -e -i", 0),
    "timeout": ("-k -s", 1), "tini": ("-p -e", 0), "dumb-init": ("-r", 0), "catatonit": ("", 0), "gosu": ("", 1),
    "su-exec": ("", 1), "numactl": ("-C -N -m -i -p", 0), "taskset": ("-c", 0), "time": ("-f -o", 0),
    "catchsegv": ("", 0), "unbuffer": ("", 0),
}  # fmt: skip


class Programs(Tools):
    """Needs `contained`, `adopt`, `run_script`, `look`, `content` and the rest from `shell.Shell`."""

    sh: str
    contained: Callable[..., State]
    adopt: Callable[..., None]
    run_script: Callable[..., None]
    settle: Callable[[bool | int | None], None]
    test: Callable[[list[Value], int], bool | int | None]

    # ---- from words to a program

    def process(self, words: tuple[Value, ...], environment: dict[str, Value], line: int) -> None:
        """Run a program to its end (or for ever)."""
        for _ in range(20):
            inner = self._unwrapped(words, environment, line)
            if inner is None:
                break
            words, environment = inner
        if not words:
            self.state.status = 0
            return
        if words[0].text is None:
            self.stranger(words, environment, line)
            return
        name = words[0].text
        base = posixpath.basename(name)
        script = self._script(words, environment, line)
        if script is not None:
            script()
        elif base in SHELLS:
            self._shell(SHELLS[base], base, words, environment, line)
        elif is_engine(words):
            self.launch(words, environment, line, engine=True)
        elif not self._known(base, words[1:], line):
            self.stranger(words, environment, line)

    def _unwrapped(
        self, words: tuple[Value, ...], environment: dict[str, Value], line: int
    ) -> tuple[tuple[Value, ...], dict[str, Value]] | None:
        """What a wrapper starts, or None if the first word is none."""
        if not words or words[0].text is None:
            return None
        base = posixpath.basename(words[0].text)
        if base == "env":
            return self._env(words[1:], dict(environment), line)
        if base not in WRAPPERS:
            return None
        options, skip = WRAPPERS[base]
        rest = list(words[1:])
        while rest and rest[0].text is not None and rest[0].text.startswith("-"):
            word = rest.pop(0).text
            if word == "--":
                break
            if word in options.split() and rest and base != "taskset":
                rest.pop(0)
        if base == "taskset":
            skip = 1
        if any(word.text is None for word in rest[: skip + 1]) or len(rest) <= skip:
            return None
        return tuple(rest[skip:]), environment

    def _env(
        self, words: tuple[Value, ...], environment: dict[str, Value], line: int
    ) -> tuple[tuple[Value, ...], dict[str, Value]] | None:
        rest = list(words)
        while rest:
            text = rest[0].text
            if text is None:
                match = re.match(r"([A-Za-z_]\w*)=", rest[0].prefix)
                if not match or rest[0].many:
                    return None
                environment[match[1]] = replace(rest.pop(0), prefix="").over(environment.get(match[1]))
            elif text in ("-", "-i", "--ignore-environment"):
                environment = {}
                rest.pop(0)
            elif text in ("-u", "--unset") and len(rest) > 1 and rest[1].text is not None:
                environment.pop(rest[1].text, None)
                del rest[:2]
            elif text.startswith("--unset="):
                environment.pop(rest.pop(0).text.partition("=")[2], None)  # type: ignore[union-attr]
            elif text == "--":
                rest.pop(0)
            elif text.startswith("-"):
                return None
            elif "=" in text:
                name, _, value = text.partition("=")
                word = rest.pop(0)
                environment[name] = replace(word, text=value, beat=()).over(environment.get(name))
            else:
                return tuple(rest), environment
        return (), environment

    def found(self, name: str, line: int) -> str | None:
        """The path of a program on PATH; None if it is not there or that is not known."""
        if "/" in name:
            kind, _ = self.look(Value(name, self.here(line)), line)
            return name if kind == "file" else None
        var = self.state.variables.get("PATH")
        search = var.value if var is not None else Value(PATH, Place("shell"))
        if not isinstance(search, Value) or search.text is None:
            return None
        for folder in search.text.split(":"):
            place = posixpath.join(folder or self.state.cwd.text or "", name)
            kind, _ = self.look(Value(place, self.here(line)), line)
            if kind == "file":
                return place
            if kind == "unknown":
                return None
        return None

    def _script(self, words: tuple[Value, ...], environment: dict[str, Value], line: int) -> Callable[[], None] | None:
        """How to read the shell script that the first word names; None if it names none."""
        name = words[0].text or ""
        base = posixpath.basename(name)
        if base in SHELLS or re.fullmatch(r"python[\d.]*", base) or ("/" not in name and base in HARMLESS):
            return None
        if self.state.lost is not None and "/" in name:
            return None
        place = self.found(name, line)
        if place is None:
            return None
        text = self.content(Value(place, self.here(line)), line)
        if text is None or text.text is None:
            return None
        source = text.text
        head = source.partition("\n")[0]
        real = self.path(Value(place, self.here(line))) or place
        given = Value(place, words[0].place)
        if head.startswith("#!"):
            parts = head[2:].split()
            if parts and posixpath.basename(parts[0]) == "env":
                parts = [part for part in parts[1:] if part != "-S"]
            interpreter = posixpath.basename(parts[0]) if parts else ""
            if interpreter in SHELLS:
                options = [Value(part, given.place) for part in parts[1:]]
                shell = (Value(parts[0], given.place), *options, given, *words[1:])
                return lambda: self._shell(SHELLS[interpreter], parts[0], shell, environment, line)
            if interpreter.startswith("python") and not is_engine(words):
                program = (*(Value(part, given.place) for part in parts), given, *words[1:])
                return lambda: self.stranger(program, environment, line)
            return None
        if source.isprintable() or re.fullmatch(r"[\x09-\x0d\x20-\x7e\x80-\U0010ffff]*", source):
            dialect = self.dialect
            return lambda: self._child(source, real, dialect, given, words[1:], environment, line)
        return None

    # ---- shells

    def _shell(
        self, dialect: str, name: str, words: tuple[Value, ...], environment: dict[str, Value], line: int
    ) -> None:
        """`bash [options] file args`, `sh -c text name args`."""
        if dialect == "sh":
            dialect = self.sh
        rest, options, command, login = list(words[1:]), set[str](), False, False
        letters = {"e": "errexit", "u": "nounset", "a": "allexport", "f": "noglob"}
        while rest and rest[0].text is not None and re.match(r"[-+].|-$", rest[0].text):
            word = str(rest.pop(0).text)
            if word in ("--", "-"):
                break
            if word.startswith("--"):
                login = login or word == "--login"
                if word not in ("--login", "--norc", "--noprofile", "--noediting", "--verbose"):
                    self._strange_shell(words, environment, line, f"the option {word} of {name}")
                    return
                continue
            for letter in word[1:]:
                if letter == "o" and rest:
                    options.add(str(rest.pop(0).text))
                elif letter in letters:
                    (options.add if word[0] == "-" else options.discard)(letters[letter])
                elif letter not in "cxvlhBpE":
                    self._strange_shell(words, environment, line, f"the option {word} of {name}")
                    return
            command, login = command or "c" in word[1:], login or "l" in word[1:]
        if not rest or rest[0].text is None:
            self._strange_shell(words, environment, line, "what the shell reads" + (f": {rest[0].why}" if rest else ""))
            return
        if command:
            source, path, first = rest[0].text, rest[0].place.path or "(the command line)", rest[0].place.line or 1
            zero, args = rest[1] if len(rest) > 1 else Value(name, rest[0].place), tuple(rest[2:])
        else:
            text = self.content(rest[0], line)
            if text is None:
                self.state.status = 127
                return
            if text.text is None:
                self._strange_shell(words, environment, line, text.why)
                return
            source, path, first = text.text, self.path(rest[0]) or rest[0].text, 1
            zero, args = rest[0], tuple(rest[1:])
        self._child(source, path, dialect, zero, args, environment, line, frozenset(options), login, first)

    def _strange_shell(self, words: tuple[Value, ...], environment: dict[str, Value], line: int, why: str) -> None:
        self.stranger((unknown(self.here(line), why), *words), environment, line)

    def _child(
        self, source: str, path: str, dialect: str, zero: Value, args: tuple[Value, ...],
        environment: dict[str, Value], line: int, options: frozenset[str] = frozenset(), login: bool = False,
        first: int = 1,
    ) -> None:  # fmt: skip
        """A shell as a process of its own: only what is exported gets there."""
        state = self.state
        own = ("IFS", "PWD", "OLDPWD", "SHLVL", "_")
        variables = inherited({name: value for name, value in environment.items() if name not in own})
        child = State(
            state.cwd, variables, args, zero, 0, options, {}, dict(state.files), state.lost, state.launches, state.out,
            state.stdin,
        )  # fmt: skip

        def run() -> None:
            self._begin(dialect, login, line)
            self.run_script(source, path, dialect, first)

        self.adopt(self.contained(child, run, fresh=True))

    def _begin(self, dialect: str, login: bool, line: int) -> None:
        """What a shell reads before its script."""
        names = self.state.variables
        if any(name.startswith("BASH_FUNC_") or name in ("SHELLOPTS", "BASHOPTS") for name in names):
            raise self.lost(line, "options or functions in the environment")
        files = []
        if login:
            home = self.get("HOME", line)
            if home is None or home.text is None:
                raise self.lost(line, "a login shell whose home is not known")
            names_of = (".bash_profile", ".bash_login", ".profile") if dialect == "bash" else (".profile",)
            own = [
                path
                for name in names_of
                if self.look(Value(path := f"{home.text}/{name}", self.here(line)), line)[0] != "gone"
            ]
            files += [Value("/etc/profile", self.here(line)), *(Value(path, self.here(line)) for path in own[:1])]
        if dialect == "bash" and "BASH_ENV" in names and not login:
            start = self.get("BASH_ENV", line)
            if start is not None and start.text != "":
                files.append(start)
        for file in files:
            text = self.content(file, line)
            if text is not None and text.text is None:
                raise Undecidable(text)
            if text is not None and text.text is not None:
                self.run_script(text.text, self.path(file) or "", dialect)

    # ---- launches

    def launch(self, words: tuple[Value, ...], environment: dict[str, Value], line: int, *, engine: bool) -> None:
        state = self.state
        item = Launch(words, environment, self.here(line), state.cwd, engine=engine,
                      files=(dict(state.files), state.lost))  # fmt: skip
        if not any(old.place == item.place and [w.text for w in old.words] == [w.text for w in words]
                   and {k: v.text for k, v in old.environment.items()} == {k: v.text for k, v in environment.items()}
                   for old in state.launches):  # fmt: skip
            state.launches = (*state.launches, item)
        name = posixpath.basename(words[0].text or "a program") if words else "a program"
        after = unknown(self.here(line), f"{name} ran")
        state.lost = state.lost or after
        state.status = None
        self.unsure = unknown(self.here(line), f"how {name} ends")
        self.emit(unknown(self.here(line), f"the output of {name}"))

    def stranger(self, words: tuple[Value, ...], environment: dict[str, Value], line: int) -> None:
        """A program that is not known: it may change files, and it may start the engine."""
        self.launch(words, environment, line, engine=False)


def is_engine(words: tuple[Value, ...]) -> bool:
    """Whether these words start vLLM's server."""
    return engine_words(words) is not None


def engine_words(words: tuple[Value, ...]) -> tuple[str, tuple[Value, ...]] | None:
    """(`serve` or `api_server`, the engine's own words) of a command that starts vLLM's server, else None."""
    texts = [word.text for word in words]
    base = posixpath.basename(texts[0] or "") if texts else ""
    if base == "vllm":
        return ("serve", words[2:]) if texts[1:2] == ["serve"] else None
    if not re.fullmatch(r"python[\d.]*", base):
        return None
    number = 1
    while number < len(texts) and (texts[number] or "").startswith("-") and texts[number] not in ("-m", "-c"):
        number += 2 if texts[number] in ("-W", "-X") else 1
    rest = texts[number:]
    if rest[:2] == ["-m", ENGINE_MODULES[0]]:
        return "api_server", words[number + 2 :]
    if rest[:1] == ["-m"] and len(rest) > 2 and rest[1] in ENGINE_MODULES and rest[2] == "serve":
        return "serve", words[number + 3 :]
    script = posixpath.basename(rest[0] or "") if rest else ""
    return ("serve", words[number + 2 :]) if script == "vllm" and rest[1:2] == ["serve"] else None
