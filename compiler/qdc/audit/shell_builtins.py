"""The builtin commands of a shell, and redirections: what they do to variables, files and the rest of the script."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from qdc.audit import shell_tree as tree
from qdc.audit.shell_pieces import Dead, Undecidable, join
from qdc.audit.shell_state import State, Value, unknown
from qdc.audit.shell_variables import Variables

if TYPE_CHECKING:
    from qdc.audit.shell_paths import Frame

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


class Builtins(Variables):
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
        from qdc.audit.shell_paths import Frame

        frame = Frame("source")
        positional = self.state.positional
        given = bool(args) and self.dialect == "bash"
        if args and self.dialect == "sh":
            raise self.lost(line, "arguments of a sourced file, which not every sh passes on")
        if given:
            self.state.positional = tuple(args)
        self.frames.append(frame)
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
