"""Redirections: where a command reads and writes, and what files hold afterwards."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

from qdc.audit import shell_tree as tree
from qdc.audit.shell_pieces import join
from qdc.audit.shell_state import Content, Value, unknown
from qdc.audit.shell_tests import Tests

_STREAMS = ("/dev/null", "/dev/stdout", "/dev/stderr", "/proc/self/fd/1", "/proc/self/fd/2", "/proc/1/fd/1",
            "/proc/1/fd/2", "/dev/fd/1", "/dev/fd/2", "/dev/tty")  # fmt: skip


class Redirects(Tests):
    """Needs `fork`, `content` and `path` from `shell.Shell`."""

    fork: Callable[[list[Callable[[], None]], Value], None]
    content: Callable[[Value, int], Value | None]
    path: Callable[[Value], str | None]

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
