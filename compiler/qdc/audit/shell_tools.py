"""Programs whose effect is known: those that only read and print, and those that make, copy and remove files."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

from qdc.audit.shell_expand import Expander
from qdc.audit.shell_pieces import join, plain
from qdc.audit.shell_state import Content, Value, unknown

HARMLESS = {
    "nvidia-smi", "sleep", "ls", "cat", "grep", "egrep", "fgrep", "head", "tail", "wc", "sort", "uniq", "tr", "cut",
    "date", "hostname", "id", "whoami", "uname", "df", "free", "nproc", "lscpu", "stat", "du", "which", "basename",
    "dirname", "seq", "printenv", "md5sum", "sha256sum", "tty", "stty", "getent", "ps", "pgrep", "uptime", "arch",
    "readlink", "realpath", "envsubst", "expr", "test", "clear", "sync", "rev", "od", "nvcc", "lsof", "netstat", "ss",
    "ip", "locale", "file", "tree", "groups", "logger", "cmp", "diff", "comm", "true", "false", "echo", "printf", "jq",
    "renice", "chown", "chgrp", "nc", "ping",
}  # fmt: skip


_QUIET_CURL = re.compile(
    r"-[sSfLkIm]+|--(silent|fail|show-error|location|insecure|head|max-time|retry|connect-timeout)"
)


class Tools(Expander):
    """Needs `look`, `content`, `path`, `write` and `emit` from `shell.Shell`."""

    unsure: Value
    look: Callable[[Value, int], tuple[str, str]]
    content: Callable[[Value, int], Value | None]
    path: Callable[[Value], str | None]
    write: Callable[..., None]
    emit: Callable[[Value], None]

    def _known(self, base: str, args: tuple[Value, ...], line: int) -> bool:
        handler: Callable[[tuple[Value, ...], int], bool] | None = getattr(self, f"_run_{base.replace('-', '_')}", None)
        if handler is not None and handler(args, line):
            return True
        texts = plain(args)
        quiet = base == "sed" and texts is not None and not any(re.match(r"-[a-zA-Z]*i|--in-place", t) for t in texts)
        if base == "curl" and texts is not None:
            quiet = all(not text.startswith("-") or _QUIET_CURL.fullmatch(text) for text in texts)
        if base not in HARMLESS and not quiet:
            return False
        self.state.status = None
        self.unsure = unknown(self.here(line), f"how {base} ends")
        number = base == "nproc" and not args
        self.emit(unknown(self.here(line), f"the output of {base}", number=number))
        return True

    def _run_cat(self, args: tuple[Value, ...], line: int) -> bool:
        values: list[Value] = []
        self.state.status = 0
        for arg in args or (Value("-", self.here(line)),):
            if arg.text is not None and arg.text.startswith("-") and arg.text != "-":
                return False
            text = self.state.stdin if arg.text == "-" else self.content(arg, line)
            if text is None:
                self.state.status = 1 if arg.text != "-" else None
                self.unsure = unknown(self.here(line), "standard input")
            values.append(text or unknown(self.here(line), "standard input or a file that is not there"))
        self.emit(join(values, self.here(line)))
        return True

    def _run_tee(self, args: tuple[Value, ...], line: int) -> bool:
        texts = plain(args)
        if texts is None:
            return False
        text = self.state.stdin or unknown(self.here(line), "standard input")
        for name, arg in zip(texts, args, strict=True):
            if not name.startswith("-"):
                self.write(arg, text, line, append="-a" in texts or "--append" in texts)
        self.emit(text)
        self.state.status = None
        self.unsure = unknown(self.here(line), "how tee ends")
        return True

    def _run_mkdir(self, args: tuple[Value, ...], line: int) -> bool:
        texts = plain(args)
        if texts is None or any(text.startswith("-") and text not in ("-p", "--") for text in texts):
            return False
        status: int | None = 0
        for arg in args:
            if (arg.text or "").startswith("-"):
                continue
            real = self.path(arg)
            if real is None:
                return False
            kind, _ = self.look(arg, line)
            parent, _ = self.look(Value(posixpath.dirname(real), arg.place), line)
            if kind in ("dir", "file"):
                status = status if kind == "dir" and "-p" in texts else 1
            elif kind == "unknown" or parent == "unknown":
                status = None
                self.state.files[real] = Content("unknown", unknown(self.here(line), "mkdir"))
            elif parent == "dir" or "-p" in texts:
                folder = real
                while folder != "/" and self.look(Value(folder, arg.place), line)[0] == "gone":
                    self.state.files[folder] = Content("dir", Value("", self.here(line)))
                    folder = posixpath.dirname(folder)
            else:
                status = 1
        self.unsure = unknown(self.here(line), "how mkdir ends")
        self.state.status = status
        return True

    def _run_rm(self, args: tuple[Value, ...], line: int) -> bool:
        texts = plain(args)
        if texts is None:
            return False
        status = 0
        for arg in args:
            if (arg.text or "").startswith("-"):
                continue
            kind, real = self.look(arg, line)
            if kind not in ("file", "gone") or self.image.link(arg.text or ""):
                return False
            if kind == "gone" and not any(re.fullmatch(r"-[a-zA-Z]*f[a-zA-Z]*|--force", text) for text in texts):
                status = 1
            elif kind == "file":
                self.state.files[real] = Content("gone", Value("", self.here(line)))
        self.state.status = status
        return True

    def _run_touch(self, args: tuple[Value, ...], line: int) -> bool:
        if plain(args) is None or any((arg.text or "-").startswith("-") for arg in args):
            return False
        for arg in args:
            kind, real = self.look(arg, line)
            folder, _ = self.look(Value(posixpath.dirname(real), arg.place), line)
            if kind == "unknown" or folder != "dir":
                return False
            if kind == "gone":
                self.state.files[real] = Content("file", Value("", self.here(line)))
        self.state.status = 0
        return True

    def _run_cp(self, args: tuple[Value, ...], line: int) -> bool:
        texts = plain(args)
        if texts is None or len(texts) != 2 or any(text.startswith("-") for text in texts):
            return False
        text = self.content(args[0], line)
        kind, real = self.look(args[1], line)
        if kind == "dir":
            real = posixpath.join(real, posixpath.basename(texts[0]))
            kind, _ = self.look(Value(real, args[1].place), line)
        folder, _ = self.look(Value(posixpath.dirname(real), args[1].place), line)
        if text is None or kind not in ("file", "gone") or folder != "dir":
            return False
        self.state.files[real] = Content("file", text)
        self.state.status = 0
        return True

    def _run_mv(self, args: tuple[Value, ...], line: int) -> bool:
        kind, real = self.look(args[0], line) if args else ("unknown", "")
        if kind != "file" or self.image.link(args[0].text or "") or not self._run_cp(args, line):
            return False
        if self.path(args[1]) != real:
            self.state.files[real] = Content("gone", Value("", self.here(line)))
        return True

    def _run_chmod(self, args: tuple[Value, ...], line: int) -> bool:
        for arg in args[1:]:
            kind, real = self.look(arg, line)
            text = self.content(arg, line)
            if kind != "file" or text is None:
                return False
            self.state.files[real] = Content("file", text)
        self.state.status = 0
        return True

    def _run_sed(self, args: tuple[Value, ...], line: int) -> bool:
        texts = plain(args)
        if texts is None or not any(re.match(r"-[a-zA-Z]*i|--in-place", text) for text in texts):
            return False
        for arg in args:
            kind, real = self.look(arg, line)
            if kind in ("file", "unknown") and not (arg.text or "").startswith("-"):
                self.state.files[real] = Content("unknown", unknown(self.here(line), f"sed changes {real}"))
        self.state.status = None
        return True

    def _run_basename(self, args: tuple[Value, ...], line: int) -> bool:
        return self._name(args, line, lambda text: posixpath.basename(text.rstrip("/")) or "/")

    def _run_dirname(self, args: tuple[Value, ...], line: int) -> bool:
        return self._name(
            args, line, lambda text: posixpath.dirname(text.rstrip("/")) or ("/" if text[0] == "/" else ".")
        )

    def _name(self, args: tuple[Value, ...], line: int, change: Callable[[str], str]) -> bool:
        args = args[1:] if args and args[0].text == "--" else args
        if len(args) != 1 or not args[0].text or args[0].text.startswith("-") or "//" in args[0].text:
            return False
        self.emit(Value(f"{change(args[0].text)}\n", self.here(line), parts=(args[0],)))
        self.state.status = 0
        return True
