"""The builtin commands of a shell, and redirections: what they do to variables, files and the rest of the script."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from qdc.audit import shell_words as tree
from qdc.audit.shell_expand import Dead, Undecidable, join
from qdc.audit.shell_state import Array, Content, State, Value, Var, unknown
from qdc.audit.shell_tests import Tests

if TYPE_CHECKING:
    from qdc.audit.shell import Frame

_OPTIONS = {"e": "errexit", "u": "nounset", "a": "allexport", "f": "noglob", "x": "", "v": "", "h": "", "b": "",
            "m": "", "B": "", "H": "", "E": "", "T": "", "p": ""}  # fmt: skip
_LONG = {"errexit": "errexit", "nounset": "nounset", "allexport": "allexport", "noglob": "noglob",
         "pipefail": "pipefail", "xtrace": "", "verbose": "", "monitor": "", "hashall": ""}  # fmt: skip
_STREAMS = ("/dev/null", "/dev/stdout", "/dev/stderr", "/proc/self/fd/1", "/proc/self/fd/2", "/proc/1/fd/1",
            "/proc/1/fd/2", "/dev/fd/1", "/dev/fd/2", "/dev/tty")  # fmt: skip
BUILTINS = {
    ".", ":", "[", "alias", "break", "builtin", "cd", "command", "continue", "declare", "dirs", "disown", "echo",
    "enable", "eval", "exec", "exit", "export", "false", "fg", "bg", "getopts", "hash", "jobs", "kill", "let", "local",
    "logout", "mapfile", "popd", "printf", "pushd", "pwd", "read", "readarray", "readonly", "return", "set", "shift",
    "shopt", "source", "test", "times", "trap", "true", "type", "typeset", "ulimit", "umask", "unalias", "unset",
    "wait",
}  # fmt: skip
_BASH_BUILTINS = {"source", "builtin", "declare", "typeset", "let", "mapfile", "readarray", "shopt", "pushd", "popd",
                  "dirs", "disown", "enable", "logout"}  # fmt: skip
_IDLE = {":": 0, "true": 0, "false": 1, "hash": None, "jobs": 0, "kill": None, "ulimit": None, "umask": None,
         "wait": None, "times": 0, "disown": None, "type": None, "fg": None, "bg": None, "unalias": None}  # fmt: skip


class Builtins(Tests):
    """Needs `fork`, `contained`, `process` and the rest from `shell.Shell`."""

    frames: list[Frame]
    ends: list[list[State]]
    end: Callable[[], None]
    fork: Callable[[list[Callable[[], None]], Value], None]
    settle: Callable[[bool | int | None], None]
    process: Callable[..., None]
    environment: Callable[[], dict[str, Value]]
    run_script: Callable[..., None]
    content: Callable[[Value, int], Value | None]
    path: Callable[[Value], str | None]
    assign: Callable[..., None]
    emit: Callable[[Value], None]
    found: Callable[[str, int], str | None]

    def builtin(self, name: str, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        if self.dialect != "bash" and name in _BASH_BUILTINS:
            if self.dialect == "dash":
                self.state.status = 127
                return
            raise self.lost(line, f"`{name}`, which not every sh has")
        if name in _IDLE:
            self.state.status = _IDLE[name]
            return
        handler = {".": "source", "[": "test", "typeset": "declare", "readarray": "mapfile"}.get(name, name)
        method: Callable[[list[Value], list[tree.Assign], int], None] | None = getattr(self, f"do_{handler}", None)
        if method is None:
            raise self.lost(line, f"`{name}`")
        if name == "[":
            if not args or args[-1].text != "]":
                self.state.status = None if any(arg.many for arg in args) else 2
                self.unsure = unknown(self.here(line), "a test without its end")
                return
            args = args[:-1]
        method(args, declared, line)

    def texts(self, args: list[Value], line: int, what: str) -> list[str]:
        """Arguments that must all be known. Raises Undecidable where they decide what the script does next."""
        for arg in args:
            if arg.text is None:
                raise Undecidable(replace(arg, why=f"{what} at {self.here(line)}: {arg.why}"))
        return [str(arg.text) for arg in args]

    # ---- conditions and output

    def do_test(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        self.settle(self.test(args, line))

    def do_echo(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        self.state.status = 0
        if self.state.out is None:
            return
        end, rest = "\n", list(args)
        while rest and rest[0].text is not None and re.fullmatch(r"-[neE]+", rest[0].text):
            if "e" in rest[0].text or (self.dialect != "bash" and rest[0].text != "-n"):
                self.emit(unknown(self.here(line), "echo with options"))
                return
            end = "" if "n" in rest[0].text else end
            rest.pop(0)
        values = [value for arg in rest for value in (Value(" ", self.here(line)), arg)][1:]
        text = join([*values, Value(end, self.here(line))], self.here(line))
        if text.text is not None and "\\" in text.text and self.dialect != "bash":
            text = unknown(self.here(line), "echo with a backslash")
        self.emit(text)

    def do_printf(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        self.state.status = 0
        if args and args[0].text == "-v":
            (name, *_) = self.texts(args[1:2], line, "printf -v") or [""]
            self.set(name, unknown(self.here(line), "printf -v"), line)
            return
        if self.state.out is not None:
            self.emit(self._formatted(args, line))

    def _formatted(self, args: list[Value], line: int) -> Value:
        if any(arg.text is None or arg.many for arg in args) or not args:
            return next((arg for arg in args if not arg.known), unknown(self.here(line), "printf"))
        template, words = str(args[0].text), [str(arg.text) for arg in args[1:]]
        pieces = re.findall(r"%%|%s|%d|\\n|\\t|\\\\|[^%\\]+|.", template, re.DOTALL)
        out: list[str] = []
        while True:
            took = False
            for piece in pieces:
                if piece in ("%s", "%d"):
                    word = words.pop(0) if words else ("0" if piece == "%d" else "")
                    took = True
                    if piece == "%d" and not re.fullmatch(r"-?(0|[1-9]\d{0,17})", word):
                        return unknown(self.here(line), "printf %d of what is no number")
                    out.append(word)
                elif piece[0] in "%\\" and piece not in ("%%", "\\n", "\\t", "\\\\"):
                    return unknown(self.here(line), f"the printf format {template[:40]}")
                else:
                    out.append({"%%": "%", "\\n": "\n", "\\t": "\t", "\\\\": "\\"}.get(piece, piece))
            if not words or not took:
                return Value("".join(out), self.here(line), parts=tuple(args[:20]))

    def do_pwd(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        self.state.status = 0
        self.emit(join([self.state.cwd, Value("\n", self.here(line))], self.here(line)))

    # ---- variables

    def do_export(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        self._declare(args, declared, line, export=True)

    def do_readonly(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        self._declare(args, declared, line)

    def do_declare(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        self._declare(args, declared, line, local=bool(self.state.local))

    def do_local(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        if not self.state.local:
            self.state.status = 1
            return
        self._declare(args, declared, line, local=True)

    def _declare(
        self, args: list[Value], declared: list[tree.Assign], line: int, *, export: bool = False, local: bool = False
    ) -> None:
        words = self.texts(args, line, "a name to declare")
        options = "".join(word[1:] for word in words if word.startswith("-"))
        if set(options) - set("xragp") or ("p" in options and (declared or "g" in options)):
            raise self.lost(line, f"the option -{options} of a declaration")
        local = local and "g" not in options
        for word in words:
            if word.startswith("-"):
                continue
            name, equals, text = word.partition("=")
            if not tree.NAME.fullmatch(name) or name.endswith("+"):
                raise self.lost(line, f"the declaration of {word[:40]}")
            self._save(name, local)
            if equals:
                self.set(name, Value(text, self.here(line)), line)
            elif local and self.dialect == "bash":
                outer = self.state.variables.get(name)
                self.state.variables[name] = Var(None, outer.exported if outer is not None else False)
            elif local and self.dialect == "sh" and name in self.state.variables:
                raise self.lost(line, f"`local {name}`, which keeps the outer value in some shells")
            if export or "x" in options:
                self._export(name, "n" not in options)
        self.state.status = 0
        for item in declared:
            if self.dialect != "bash" and isinstance(item.value, tree.Word):
                fields = self.word_fields(item.value)
                whole = self.one(item.value)
                if len(fields) > 1 or (fields and fields[0].text != whole.text):
                    raise self.lost(item.line, "a declaration of a value with blanks, which not every sh keeps whole")
            saved = self.state.variables.get(item.name)
            self._save(item.name, local)
            if local and saved is not None and not item.append:
                self.state.variables.pop(item.name, None)
                value = self._fresh(item, saved)
                self.set(item.name, value, item.line, export="x" in options or bool(saved.exported))
            else:
                self.assign(item, export=export or "x" in options)
        self.state.status = 0

    def _fresh(self, item: tree.Assign, saved: Var) -> Value | Array:
        """The value of `local NAME=..`, which may still read the outer NAME."""
        self.state.variables[item.name] = saved
        value: Value | Array
        if isinstance(item.value, tuple):
            value = tuple(self.fields(item.value))
        else:
            value = self.one(item.value)
        del self.state.variables[item.name]
        return value

    def _save(self, name: str, local: bool) -> None:
        if local and self.state.local and name not in self.state.local[-1]:
            self.state.local[-1][name] = self.state.variables.get(name)

    def _export(self, name: str, on: bool) -> None:
        var = self.state.variables.get(name) or Var(None)
        self.state.variables[name] = replace(var, exported=on)

    def do_unset(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        kind = "-v"
        for word in self.texts(args, line, "a name to unset"):
            if word in ("-v", "-f"):
                kind = word
            elif kind == "-f":
                self.state.functions.pop(word, None)
            elif not tree.NAME.fullmatch(word):
                raise self.lost(line, f"unset {word[:40]}")
            elif word not in self.state.variables and word in self.state.functions and self.dialect == "bash":
                self.state.functions.pop(word)
            elif any(word in frame for frame in self.state.local):
                raise self.lost(line, f"unset of the local {word}")
            else:
                self._forget(word)
        self.state.status = 0

    def _forget(self, name: str) -> None:
        """dash exports under `set -a` even what it unsets; bash does not."""
        self.state.variables.pop(name, None)
        if "allexport" in self.state.options and self.dialect == "dash":
            self.state.variables[name] = Var(None, True)
        elif "allexport" in self.state.options and self.dialect == "sh":
            self.state.options = self.state.options | {f"unset {name}"}

    def do_read(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        skip = False
        for word in self.texts(args, line, "the names of read"):
            if skip:
                skip = False
            elif word.startswith("-"):
                skip = word[-1] in "adinNptu" and word[-1] != "a"
            elif tree.NAME.fullmatch(word):
                self.set(word, unknown(self.here(line), "read", many=True), line)
        self.state.status = None
        self.unsure = unknown(self.here(line), "read")

    def do_mapfile(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        name = next((arg.text for arg in reversed(args) if arg.text and tree.NAME.fullmatch(arg.text)), "MAPFILE")
        self.set(name, (unknown(self.here(line), "mapfile", many=True),), line)
        self.state.status = None

    def do_let(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        raise self.lost(line, "let")

    def do_set(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        rest, options = list(args), set(self.state.options)
        replaced = False
        while rest:
            word = rest[0].text
            if word is None:
                raise Undecidable(replace(rest[0], why=f"set at {self.here(line)}: {rest[0].why}"))
            if word in ("--", "-"):
                replaced = word == "--" or len(rest) > 1
                rest = rest[1:]
                break
            if not re.fullmatch(r"[-+][A-Za-z]+", word):
                replaced = True
                break
            rest = rest[1:]
            for letter in word[1:]:
                name = _OPTIONS.get(letter)
                if letter == "o":
                    name = _LONG.get("".join(self.texts(rest[:1], line, "set -o")))
                    rest = rest[1:]
                if name is None or (letter == "p" and word[0] == "+"):
                    raise self.lost(line, f"set {word}")
                options = options | {name} if word[0] == "-" else options - {name}
        self.state.options = frozenset(options - {""})
        if replaced:
            self.state.positional = tuple(rest)
        self.state.status = 0

    def do_shopt(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        words = self.texts(args, line, "shopt")
        names = [word for word in words if not word.startswith("-")]
        globbing = {"nullglob", "failglob", "dotglob", "globstar", "nocaseglob", "extglob"}
        if any(name in globbing for name in names):
            self.state.options = self.state.options | {"pathname"}
        if any(name in ("expand_aliases", "lastpipe", "nocasematch", "sourcepath") for name in names) or "-o" in words:
            raise self.lost(line, f"shopt {' '.join(words)[:60]}")
        self.state.status = None if not names or "-q" in words else 0

    def do_shift(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        (count,) = self.texts(args[:1], line, "shift") or ["1"]
        if not count.isdigit():
            raise self.lost(line, f"shift {count}")
        number = int(count)
        if any(item.many for item in self.state.positional[:number]) or (
            number > len(self.state.positional) and any(item.many for item in self.state.positional)
        ):
            raise self.lost(line, "shift over an unknown number of arguments")
        if number > len(self.state.positional):
            if self.dialect != "bash":
                self.leave(line)
            self.state.status = 1
            return
        self.state.positional = self.state.positional[number:]
        self.state.status = 0

    # ---- flow

    def do_exit(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        if args:
            self.state.status = int(args[0].text) & 255 if args[0].text and args[0].text.isdigit() else None
        self.end()

    def do_return(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        frame = next((frame for frame in reversed(self.frames) if frame.kind != "loop"), None)
        if args:
            self.state.status = int(args[0].text) & 255 if args[0].text and args[0].text.isdigit() else None
        if frame is None:
            if self.dialect == "bash":
                raise self.lost(line, "return outside of a function")
            self.end()
            return
        frame.left.append(self.state.copy())
        raise Dead

    def _loop(self, args: list[Value], line: int) -> Frame:
        (count,) = self.texts(args[:1], line, "break") or ["1"]
        loops: list[Frame] = []
        for frame in reversed(self.frames):
            if frame.kind != "loop":
                break
            loops.append(frame)
        if not count.isdigit() or not 1 <= int(count) <= len(loops):
            raise self.lost(line, "break or continue outside of a loop")
        return loops[int(count) - 1]

    def do_break(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        frame = self._loop(args, line)
        self.state.status = 0
        frame.left.append(self.state.copy())
        raise Dead

    def do_continue(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        frame = self._loop(args, line)
        self.state.status = 0
        frame.again.append(self.state.copy())
        raise Dead

    def do_eval(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        text = " ".join(self.texts(args, line, "eval"))
        self.state.status = 0
        self.run_script(text, self.file, self.dialect, line)

    def do_source(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        if not args:
            self.state.status = 2
            return
        name = args[0]
        if name.text == "--" and len(args) > 1:
            name, args = args[1], args[1:]
        if name.text is None:
            raise Undecidable(replace(name, why=f"the file read at {self.here(line)} is not known: {name.why}"))
        if "/" not in name.text:
            place = self.found(name.text, line)
            if place is None and self.dialect == "bash":
                place = posixpath.join(self.state.cwd.text or "", name.text) if self.state.cwd.text else None
            name = replace(name, text=place or f"/nowhere/{name.text}")
        text = self.content(name, line)
        if text is None:
            if self.dialect != "bash":
                self.leave(line)
            self.state.status = 1
            return
        if text.text is None:
            raise Undecidable(replace(text, why=f"{name.text}, read at {self.here(line)}, is not known: {text.why}"))
        self._read(text.text, self.path(name) or str(name.text), args[1:], line)

    def _read(self, text: str, path: str, args: list[Value], line: int) -> None:
        from qdc.audit.shell import Frame

        frame = Frame("source")
        positional = self.state.positional
        given = bool(args) and self.dialect == "bash"
        if args and self.dialect == "sh":
            raise self.lost(line, "arguments of a sourced file, which not every sh passes on")
        if given:
            self.state.positional = tuple(args)
        self.frames.append(frame)
        self.state.status = 0
        try:
            self.run_script(text, path, self.dialect)
            frame.left.append(self.state)
        except Dead:
            if not frame.left:
                raise
        finally:
            self.frames.pop()
        self.state = self.mixed(frame.left, self.unsure)
        if given:
            self.state.positional = positional

    mixed: Callable[[list[State], Value], State]

    def do_trap(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        words = self.texts(args[1:], line, "trap")
        if any(word.removeprefix("SIG") in ("ERR", "DEBUG", "RETURN") for word in words):
            raise self.lost(line, "a trap that acts between commands")
        self.state.status = 0

    def do_cd(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        rest = [arg for arg in args if arg.text not in ("--", "-P", "-L")]
        target = rest[0] if rest else self.get("HOME", line) or unknown(self.here(line), "HOME")
        if target.many or target.text == "-" or "CDPATH" in self.state.variables:
            self.state.cwd, self.state.status = unknown(self.here(line), "cd"), None
            return
        kind, _ = self.look(target, line)
        if kind == "unknown" or target.text is None or self.state.cwd.text is None:
            self.unsure = target if not target.known else unknown(self.here(line), f"whether {target.text} is there")
            before = self.state.cwd
            new = posixpath.normpath(posixpath.join(before.text, target.text)) if before.text and target.text else None
            moved = replace(target, text=new) if new else unknown(target.place, target.why or before.why)

            def there() -> None:
                self.state.cwd, self.state.status = moved, 0

            def not_there() -> None:
                self.state.status = 1

            self.fork([there, not_there], self.unsure)
        elif kind == "dir":
            path = posixpath.normpath(posixpath.join(self.state.cwd.text, target.text))
            self.state.cwd = Value(path if not path.startswith("//") else path[1:], self.here(line))
            self.state.status = 0
        else:
            self.state.status = 1

    def do_command(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        if args and args[0].text in ("-v", "-V"):
            name = args[1].text if len(args) > 1 else None
            if name is None:
                self.state.status = None
            elif name in self.state.functions or name in BUILTINS:
                self.state.status = 0
                self.emit(
                    Value(f"{name}\n", self.here(line)) if args[0].text == "-v" else unknown(self.here(line), "-V")
                )
            else:
                place = self.found(name, line)
                self.state.status = 0 if place else None
                self.emit(
                    Value(f"{place}\n", self.here(line)) if place else unknown(self.here(line), f"where {name} is")
                )
            self.unsure = unknown(self.here(line), f"whether {name} is there")
            return
        args = args[1:] if args and args[0].text == "-p" else args
        self._again(args, declared, line)

    def do_builtin(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        self._again(args, declared, line)

    def _again(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        if not args:
            self.state.status = 0
            return
        (name,) = self.texts(args[:1], line, "a command")
        if name in BUILTINS:
            self.builtin(name, args[1:], declared, line)
        else:
            self.process(tuple(args), self.environment(), line)

    def do_exec(self, args: list[Value], declared: list[tree.Assign], line: int) -> None:
        environment, rest = self.environment(), list(args)
        while rest and rest[0].text in ("-a", "-c", "-l", "--"):
            if rest[0].text == "-c":
                environment = {}
            rest = rest[2:] if rest[0].text == "-a" else rest[1:]
        self.process(tuple(rest), environment, line)
        self.end()

    # ---- redirections

    def redirected(self, redirects: list[tree.Redirect], thunk: Callable[[], None], *, special: bool) -> None:
        """`thunk` with its input and output elsewhere. A file that cannot be opened is a failed command."""
        if not redirects:
            thunk()
            return
        stdin, out = self.state.stdin, self.state.out
        outputs: list[tuple[Value, bool]] = []
        stray: list[Value] = []
        to, sure = out, True
        for item in redirects:
            line = item.target.line
            self.redirecting = True
            try:
                target = self.one(item.body or item.target, tilde=item.op[:2] != "<<")
            finally:
                self.redirecting = False
            if item.op[:2] == "<<":
                ending = [Value("\n", self.here(line))] if item.op == "<<<" else []
                self.state.stdin = join([target, *ending], self.here(line))
            elif item.op == "<":
                text = self.content(target, line)
                if text is None:
                    self.state.stdin = stdin
                    self._refused(special, line)
                    return
                self.state.stdin = text
            elif item.op in (">&", "<&") and target.text is not None and re.fullmatch(r"\d*-?", target.text):
                if item.op == ">&" and item.fd in (None, 1):
                    outputs, to = [], None
            elif target.text in ("/dev/stdout", "/proc/self/fd/1", "/dev/fd/1"):
                continue
            else:
                opened = self._opened(target, line)
                if opened is False:
                    self.state.stdin = stdin
                    self._refused(special, line)
                    return
                sure = sure and opened is True
                if item.fd in (None, 1) or item.op in ("&>", "&>>", ">&"):
                    outputs.append((target, item.op in (">>", "&>>")))
                    to = ()
                else:
                    stray.append(target)
        line = redirects[0].target.line

        def go() -> None:
            self.state.out = to
            thunk()
            self._written(outputs, stray, line)
            self.state.out, self.state.stdin = (out if to is not out else self.state.out), stdin

        def fail() -> None:
            self.state.stdin = stdin
            self._refused(special, line)

        if sure:
            go()
        else:
            self.fork([go, fail], unknown(self.here(line), "whether a file can be written"))

    def _written(self, outputs: list[tuple[Value, bool]], stray: list[Value], line: int) -> None:
        text = join(list(self.state.out or ()), self.here(line))
        for number, (target, append) in enumerate(outputs):
            last = number == len(outputs) - 1
            self.write(target, text if last else Value("", self.here(line)), line, append=append)
        for target in stray:
            self.write(target, unknown(self.here(line), "messages of a program"), line)

    def _refused(self, special: bool, line: int) -> None:
        if special and self.dialect != "bash":
            self.leave(line)
        self.state.status = 1

    def _opened(self, target: Value, line: int) -> bool | None:
        """Whether a file can be opened for writing: its folder is there and it is none itself."""
        if target.text in _STREAMS:
            return True
        real = self.path(target)
        if real is None:
            return None
        kind, _ = self.look(target, line)
        folder, _ = self.look(Value(posixpath.dirname(real), target.place), line)
        if kind == "dir" or folder in ("gone", "file"):
            return False
        return True if folder == "dir" else None

    def write(self, target: Value, text: Value, line: int, *, append: bool = False) -> None:
        """Put `text` into the file that `target` names."""
        if target.text in _STREAMS:
            if target.text == "/dev/stdout":
                self.unsure = unknown(self.here(line), "output")
            return
        real = self.path(target)
        if real is None:
            self.state.lost = self.state.lost or (target if not target.known else unknown(self.here(line), "a file"))
            return
        if append:
            before = self.content(target, line)
            text = text if before is None else join([before, text], self.here(line))
        self.state.files[real] = Content("file", text)

    def redirect_shell(self, redirects: list[tree.Redirect], line: int) -> None:
        """`exec >file`: output of all that follows."""
        for item in redirects:
            if item.op in ("<", "<<", "<<-", "<<<"):
                self.state.stdin = unknown(self.here(line), "input that exec redirects")
                continue
            target = self.one(item.target)
            if item.op in (">&", "<&") and target.text is not None and re.fullmatch(r"\d*-?", target.text):
                continue
            process = any(isinstance(part, tree.Output) for part in item.target.parts)
            if process:
                continue
            if self._opened(target, line) is False:
                self.leave(line)
            self.write(target, unknown(self.here(line), "output of the script"), line)
        if self.state.out is not None:
            self.state.out = (unknown(self.here(line), "output that exec redirects"),)
        self.state.status = 0
