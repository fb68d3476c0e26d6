"""Reads a shell script as a shell would run it, without running it: which programs it starts, with what words.

A stated subset of POSIX sh and bash. What a script computes elsewhere (programs, machines, run-time files) is an
unknown value that remembers its line; after a condition that is not known, both ways are read and what they agree
on stays known. Where even that is not possible, reading ends with `Undecidable`. Programs of coreutils are taken to
be where PATH finds them; an unknown program may change any file but no variable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qdc.audit import shell_tree as tree
from qdc.audit.shell_builtins import BUILTINS, Builtins
from qdc.audit.shell_files import Files
from qdc.audit.shell_paths import MAX_DEPTH, Frame, Paths
from qdc.audit.shell_pieces import Dead, Undecidable, join
from qdc.audit.shell_programs import Programs
from qdc.audit.shell_state import Place, State, Value, same, unknown

MAX_ROUNDS = 2_000
SPECIAL_BUILTINS = {".", ":", "eval", "exec", "exit", "export", "readonly", "return", "set", "shift", "trap", "unset",
                    "break", "continue", "times"}  # fmt: skip


class Shell(Paths, Programs, Builtins):
    """`run_script` and `process` read; `self.ends` has the states in which the ways through it ended.

    `root`: whether it runs as root; `sh`: which shell /bin/sh is.
    """

    def __init__(self, image: Files, state: State, *, root: bool = True, sh: str = "sh") -> None:
        self.image, self.state, self.root, self.sh = image, state, root, sh
        self.file, self.dialect = "", "bash"
        self.guard = self.steps = self.depth = 0
        self.frames: list[Frame] = []
        self.ends: list[list[State]] = [[]]
        self.unsure = unknown(Place("shell"), "a condition")

    # ---- commands

    def run(self, node: Any) -> None:
        self.tick(getattr(node, "line", 0))
        handler: Callable[[Any], None] = getattr(self, f"run_{type(node).__name__.lower()}")
        handler(node)

    def run_seq(self, node: tree.Seq) -> None:
        for item, background in node.items:
            if background:
                self.adopt(self.contained(self.state.copy(), lambda item=item: self.run(item)), background=True)  # type: ignore[misc]
            else:
                self.run(item)

    def run_andor(self, node: tree.AndOr) -> None:
        self.guarded(node.first)
        for number, (operator, item) in enumerate(node.rest):
            final = number == len(node.rest) - 1
            go = None if self.state.status is None else (self.state.status == 0) == (operator == "&&")
            go_on: Callable[[Any], None] = self.run if final else self.guarded

            def skip(operator: str = operator) -> None:
                if self.state.status is None:
                    self.state.status = 0 if operator == "||" else None

            def enter(item: Any = item, operator: str = operator, go_on: Callable[[Any], None] = go_on) -> None:
                if operator == "&&":
                    self.state.status = 0
                go_on(item)

            self.either(go, enter, skip)

    def run_pipe(self, node: tree.Pipe) -> None:
        if len(node.stages) == 1:
            self.guarded(node.stages[0])
        else:
            self._pipeline(node)
        if node.negated:
            status = self.state.status
            self.state.status = None if status is None else int(status == 0)
        else:
            self.check()

    def _pipeline(self, node: tree.Pipe) -> None:
        stdin, out, statuses = self.state.stdin, self.state.out, []
        guard, self.guard = self.guard, self.guard + (1 if node.negated else 0)
        for number, stage in enumerate(node.stages):
            child = self.state.copy()
            child.stdin = stdin
            child.out = () if number < len(node.stages) - 1 else out
            end = self.contained(child, lambda stage=stage: self.run(stage))  # type: ignore[misc]
            self.adopt(end)
            stdin = join(list(end.out or ()), self.here(node.line))
            statuses.append(end.status)
        self.guard = guard
        self.state.out = self.state.out if out is not None else None
        if "pipefail" in self.state.options:
            bad = [status for status in statuses if status != 0]
            self.state.status = 0 if not bad else None if None in statuses else bad[-1]

    def run_if(self, node: tree.If) -> None:
        self._clauses(node.clauses, node.otherwise)

    def _clauses(self, clauses: list[tuple[tree.Seq, tree.Seq]], otherwise: tree.Seq | None) -> None:
        if not clauses:
            self.state.status = 0
            if otherwise is not None:
                self.run(otherwise)
            return
        (condition, body), *rest = clauses
        self.either(self.truth(condition), lambda: self.run(body), lambda: self._clauses(rest, otherwise))

    def run_case(self, node: tree.Case) -> None:
        subject = self.one(node.word)
        self._arms(node.arms, subject, node.line)

    def _arms(self, arms: list[tuple[list[tree.Word], tree.Seq, str]], subject: Value, line: int) -> None:
        if not arms:
            self.state.status = 0
            return
        (patterns, body, end), *rest = arms
        if end in (";&", ";;&"):
            raise self.lost(line, f"`{end}` in case")
        self.either(
            self._matches(patterns, subject), lambda: self._arm(body), lambda: self._arms(rest, subject, line)
        )  # fmt: skip

    def _arm(self, body: tree.Seq) -> None:
        if not body.items:
            self.state.status = 0
        self.run(body)

    def _matches(self, patterns: list[tree.Word], subject: Value) -> bool | None:
        answer: bool | None = False
        for word in patterns:
            pieces = self.pieces(word.parts, word.line, tilde=True)
            found = self.pattern(pieces)
            if found is not None and found.pattern == ".*":
                return True
            if subject.text is None or found is None:
                self.unsure = subject if subject.text is None else unknown(self.here(word.line), "a pattern")
                answer = None
            elif found.fullmatch(subject.text):
                return True if answer is False else None
        return answer

    def run_block(self, node: tree.Block) -> None:
        if not node.subshell:
            self.run(node.body)
            return
        self.adopt(self.contained(self.state.copy(), lambda: self.run(node.body)))
        self.check()

    def run_function(self, node: tree.Function) -> None:
        self.state.functions[node.name] = (node.body, self.file)
        self.state.status = 0

    def run_test(self, node: tree.Test) -> None:
        self.settle(self.double(node))
        self.check()

    def run_arithmetic(self, node: tree.Arithmetic) -> None:
        self.settle(self.arithmetic(node))
        self.check()

    def run_redirected(self, node: tree.Redirected) -> None:
        self.redirected(node.redirects, lambda: self.run(node.body), special=False)

    # ---- loops

    def run_for(self, node: tree.For) -> None:
        items = list(self.state.positional) if node.words is None else self.fields(node.words)
        frame = Frame("loop")
        self.frames.append(frame)
        if not items:
            self.state.status = 0
        try:
            for item in items:
                self.tick(node.line)
                if item.many:
                    self._some(lambda item=item: self._round_for(node, frame, replace(item, many=False)), item)  # type: ignore[misc]
                else:
                    self._round_for(node, frame, item)
        except Dead:
            if not frame.left:
                raise
            self.state = self.mixed(frame.left, self.unsure)
            return
        finally:
            self.frames.pop()
        if frame.left:
            self.state = self.mixed([*frame.left, self.state], self.unsure)

    def _round_for(self, node: tree.For, frame: Frame, item: Value) -> None:
        self.set(node.name, item, node.line)
        self._round(node.body, frame)

    def _round(self, body: tree.Seq, frame: Frame) -> None:
        """Once through a loop's body; goes on with what reached its end or `continue`."""
        frame.again = []
        try:
            self.run(body)
            alive = [self.state]
        except Dead:
            alive = []
        alive += frame.again
        frame.again = []
        if not alive:
            raise Dead
        self.state = self.mixed(alive, self.unsure)

    def _some(self, step: Callable[[], None], why: Value) -> None:
        """A step that happens an unknown number of times, none included."""
        for _ in range(8):
            before = self.state.copy()
            self.fork([step, lambda: None], why)
            if same(before, self.state):
                return
        raise Undecidable(replace(why, why=f"a loop over what is not known: {why.why}"))

    def run_loop(self, node: tree.Loop) -> None:
        frame = Frame("loop")
        self.frames.append(frame)
        done: list[State] = []
        try:
            self._rounds(node, frame, done)
        except Dead:
            pass
        finally:
            self.frames.pop()
        done += frame.left
        if not done:
            raise Dead
        self.state = self.mixed(done, self.unsure)

    def _rounds(self, node: tree.Loop, frame: Frame, done: list[State]) -> None:
        """Adds to `done` each state in which the condition ends the loop."""
        status: int | None = 0
        for _ in range(MAX_ROUNDS):
            self.tick(node.line)
            before = self.state.copy()
            answer = self.truth(node.condition)
            if answer is None:
                self._unsure_rounds(node, frame, done)
                return
            if answer == node.until:
                self.state.status = status
                done.append(self.state)
                return
            self._round(node.body, frame)
            status = self.state.status
            if same(before, self.state):
                self.ends[-1].append(self.state.copy())  # it goes round for ever, or until something outside ends it
                raise Dead
        raise self.lost(node.line, "a loop of many rounds")

    def _unsure_rounds(self, node: tree.Loop, frame: Frame, done: list[State]) -> None:
        why = self.unsure
        for _ in range(8):
            stay = self.state.copy()
            stay.status = 0
            done.append(stay)
            before = self.state.copy()
            self._round(node.body, frame)
            self.truth(node.condition)
            self.state = self.mixed([before, self.state], why)
            if same(before, self.state):
                stay = self.state.copy()
                stay.status = 0
                done.append(stay)
                return
        raise Undecidable(replace(why, why=f"a loop whose end is not known: {why.why}"))

    # ---- simple commands

    def run_simple(self, node: tree.Simple) -> None:
        words = self.fields([word for word in node.words if isinstance(word, tree.Word)])
        if not node.words or not words:
            self._assignments(node)
            return
        name = words[0]
        if name.text is None:
            raise Undecidable(replace(name, why=f"the command at {self.here(node.line)} is not known: {name.why}"))
        declared = [word for word in node.words if isinstance(word, tree.Assign)]
        special = name.text in SPECIAL_BUILTINS
        if name.text == "exec" and len(words) == 1:
            self.redirect_shell(node.redirects, node.line)
            return
        self.redirected(
            node.redirects, lambda: self._command(node, name.text or "", words, declared), special=special
        )  # fmt: skip
        self.check()

    def _assignments(self, node: tree.Simple) -> None:
        self.substituted = False
        for assign in node.assigns:
            self.assign(assign)
        if not self.substituted:
            self.state.status = 0
        if node.redirects:
            self.redirected(node.redirects, lambda: None, special=False)
        self.check()

    def assign(self, item: tree.Assign, *, export: bool = False) -> None:
        """`NAME=value`, `NAME+=value`, `NAME=(..)`, `NAME[0]=value`."""
        line = item.line
        if isinstance(item.value, tuple):
            values = tuple(self.fields(item.value))
            old = self.state.variables.get(item.name)
            before = old.value if old is not None and item.append else ()
            held = before if isinstance(before, tuple) else (before,) if before is not None else ()
            self.set(item.name, (*held, *values), line, export=export)
            return
        value = self.assigned(item.value)
        old = self.state.variables.get(item.name)
        if item.index is not None or (old is not None and isinstance(old.value, tuple)):
            raise self.lost(line, f"one element of the array {item.name}")
        if item.append and old is not None and isinstance(old.value, Value):
            value = join([old.value, value], self.here(line))
        self.set(item.name, value, line, export=export)

    def _command(self, node: tree.Simple, name: str, words: list[Value], declared: list[tree.Assign]) -> None:
        function = self.state.functions.get(name)
        if function is None and name not in BUILTINS:
            environment = self.environment()
            for assign in node.assigns:
                if not isinstance(assign.value, tree.Word) or assign.append:
                    raise self.lost(assign.line, "an unusual assignment before a command")
                value = self.assigned(assign.value)
                old = environment.get(assign.name)
                environment[assign.name] = value.over(old)
            self.process(tuple(words), environment, node.line)
            return
        if not node.assigns:
            self._internal(function, name, words, declared, node.line)
            return
        if self.dialect != "bash" and (function is not None or name in SPECIAL_BUILTINS):
            raise self.lost(node.line, "an assignment before a function or a special builtin")
        saved = {assign.name: self.state.variables.get(assign.name) for assign in node.assigns}
        for assign in node.assigns:
            self.assign(assign, export=True)
        self._internal(function, name, words, declared, node.line)
        for key, var in saved.items():
            if var is None:
                self.state.variables.pop(key, None)
            else:
                self.state.variables[key] = var

    def _internal(self, function: Any, name: str, words: list[Value], declared: list[tree.Assign], line: int) -> None:
        if function is not None:
            self.call(function, words[1:], line)
        else:
            self.builtin(name, words[1:], declared, line)

    def call(self, function: tuple[Any, str], arguments: list[Value], line: int) -> None:
        """A function of the script."""
        body, path = function
        frame = Frame("function")
        positional, file = self.state.positional, self.file
        self.state.positional, self.file = tuple(arguments), path
        self.state.local = (*self.state.local, {})
        self.frames.append(frame)
        self.depth += 1
        try:
            if self.depth > MAX_DEPTH:
                raise self.lost(line, "functions inside functions, too deep")
            self.run(body)
            frame.left.append(self.state)
        except Dead:
            if not frame.left:
                raise
        finally:
            self.depth -= 1
            self.frames.pop()
            self.file = file
        self.state = self.mixed(frame.left, self.unsure)
        *rest, names = self.state.local
        for name, var in names.items():
            if var is None:
                self.state.variables.pop(name, None)
            else:
                self.state.variables[name] = var
        self.state.local, self.state.positional = tuple(rest), positional

    def environment(self) -> dict[str, Value]:
        """What a program that is started now finds in its environment."""
        found = {}
        for name, var in self.state.variables.items():
            if var.exported is None and var.value is not None:
                place = self.here(0) if isinstance(var.value, tuple) else var.value.place
                found[name] = unknown(place, f"whether {name} is exported is not known", many=True)
            elif var.exported and isinstance(var.value, Value):
                found[name] = var.value
            elif var.exported and isinstance(var.value, tuple) and var.value and var.value[0].many:
                found[name] = var.value[0]
        return found
