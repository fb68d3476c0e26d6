"""Builtins that change variables, options and arguments of a shell."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from qdc.audit import shell_tree as tree
from qdc.audit.shell_expand import MAX_WORDS
from qdc.audit.shell_pieces import Undecidable
from qdc.audit.shell_redirects import Redirects
from qdc.audit.shell_state import Array, Value, Var, unknown

_OPTIONS = {"e": "errexit", "u": "nounset", "a": "allexport", "f": "noglob", "x": "", "v": "", "h": "", "b": "",
            "m": "", "B": "", "H": "", "E": "", "T": "", "p": ""}  # fmt: skip


_LONG = {"errexit": "errexit", "nounset": "nounset", "allexport": "allexport", "noglob": "noglob",
         "pipefail": "pipefail", "xtrace": "", "verbose": "", "monitor": "", "hashall": ""}  # fmt: skip


class Variables(Redirects):
    """Needs `assign` from `shell.Shell`."""

    assign: Callable[..., None]

    def texts(self, args: list[Value], line: int, what: str) -> list[str]:
        """Arguments that must all be known. Raises Undecidable where they decide what the script does next."""
        for arg in args:
            if arg.text is None:
                raise Undecidable(replace(arg, why=f"{what} at {self.here(line)}: {arg.why}"))
        return [str(arg.text) for arg in args]

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
            value = self.assigned(item.value)
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
        if len(rest) > MAX_WORDS:
            raise self.lost(line, f"more than {MAX_WORDS} words")
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
