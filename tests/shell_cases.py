"""Random entrypoints in the stated subset of sh and bash, run by the real shells and read by the audit.

A case is a folder of scripts with an image's ENTRYPOINT, CMD and ENV and a `docker run` line. `real` runs it with a
stub engine that notes its words and environment; `read` asks the audit. The image has the same absolute paths as the
folder on disk, so that no root and no chroot are needed.
"""

from __future__ import annotations

import os
import random
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shell_rare import rare

from qdc.audit.container import Start, run_arguments, start
from qdc.audit.effective import Trace, trace
from qdc.audit.shell_files import ImageFiles
from qdc.formats.overlay import Overlay
from qdc.formats.tar import Member

NAMES = ["K", "LEN", "MODE", "SPEC", "EXTRA", "TAG"]
WORDS = ["4", "15", "007", "dflash", "ngram", "a b", "", "x=1", "--fast", "v1.2-rc", "a.b.c", '{"k":4,"m":"n"}', "[8]",
         "don't", "/opt/m", "two  gaps", "*.sh", "$K", "-n", "~", "0"]  # fmt: skip
SH = "dash" if os.path.basename(os.path.realpath("/bin/sh")) == "dash" else "sh"
STUB = """#!/bin/dash
{ printf '%s\\0' "$#" "$@"; env -0; printf '\\0'; } >> "${0%/bin/vllm}/launches"
"""


class Tree:
    """Files by absolute path as an image: what `ImageFiles` needs of one."""

    def __init__(self, files: dict[str, bytes], executable: set[str]) -> None:
        self.data = list(files.values())
        self.overlay = Overlay()
        self.overlay.add(0, [
            Member(path.strip("/"), "file", number, len(data), 0o755 if path in executable else 0o644)
            for number, (path, data) in enumerate(files.items())
        ])  # fmt: skip

    def read(self, path: str) -> bytes:
        entry = self.overlay.resolve(path)
        assert entry is not None
        return self.data[entry.offset]


@dataclass
class Case:
    root: str
    files: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    run: str = "IMAGE"

    def start(self) -> Start:
        return start(self.settings, run_arguments(self.run))

    def read(self) -> Trace:
        files = {path: text.encode() for path, text in self.files.items()}
        files[f"{self.root}/bin/vllm"] = b"#!/usr/bin/python3\n"
        tree = Tree(files, {path for path, text in self.files.items() if text.startswith("#!")})
        return trace(ImageFiles(tree), self.start(), sh=SH)  # type: ignore[arg-type]

    def write(self) -> None:
        """Put the files on disk. No process may begin meanwhile: it would hold a script open for writing."""
        for path, text in {**self.files, f"{self.root}/bin/vllm": STUB}.items():
            place = Path(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
            if text.startswith("#!"):
                place.chmod(0o755)

    def real(self) -> list[tuple[list[str], dict[str, str]]]:
        """Each start of the engine: its words and environment. The case is written before."""
        first = self.start()
        words = [str(value.text) for value in first.words]
        environment = {name: value.text for name, value in first.environment.items() if value.text is not None}
        subprocess.run(words, env=environment, cwd=str(first.cwd.text), stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=20, check=False)  # fmt: skip
        return launches(Path(self.root) / "launches")

    def shown(self) -> str:
        texts = [f"--- {path}\n{text}" for path, text in self.files.items()]
        return "\n".join([*texts, f"--- {self.settings}", f"--- docker run {self.run}"])


def launches(path: Path) -> list[tuple[list[str], dict[str, str]]]:
    """What the stub engine noted."""
    found = []
    items = path.read_bytes().decode().split("\0") if path.exists() else []
    while items and items[0]:
        count = int(items.pop(0))
        words, items = items[:count], items[count:]
        environment = {}
        while items[0]:
            name, _, value = items.pop(0).partition("=")
            environment[name] = value
        items.pop(0)
        found.append((words, environment))
    return found


def judge(case: Case) -> str:
    """`known`, `partly` or `undecided`; AssertionError where the audit says what the real shell does not.

    The case is written before.
    """
    answer, real = case.read(), case.real()
    if answer.undecided is not None:
        return "undecided"
    ways = [list(end.launches) for end in answer.ends]
    strangers = any(not item.engine for way in ways for item in way)
    reasons = []
    for way in ways:
        reason = _differs(way, real)
        if reason is None:
            sure = all(value.known for item in way for value in item.words) and not any(i.possible for i in way)
            sure = sure and not any(not value.known for item in way for name, value in item.environment.items()
                                    if name in NAMES)  # fmt: skip
            same = all(_differs(other, real) is None for other in ways)
            return "known" if sure and same and not strangers else "partly"
        reasons.append(reason)
    raise AssertionError(f"{reasons or ['no end']}\nreal: {real}\n{case.shown()}")


def _differs(way: list[Any], real: list[tuple[list[str], dict[str, str]]]) -> str | None:
    """Why the launches of one way through the script are not the real ones; a stranger may start the engine too."""
    strange = any(not item.engine for item in way)
    way = [item for item in way if item.engine]
    sure = [item for item in way if not item.possible]
    if strange:
        known = [item for item in sure if all(value.known for value in item.words)]
        missing = [
            item for item in known if [value.text for value in item.words][1:] not in [words for words, _ in real]
        ]
        return f"{[v.text for v in missing[0].words]} is not among the real starts" if missing else None
    if not len(sure) <= len(real) <= len(way):
        return f"{len(way)} starts of the engine ({len(sure)} sure), really {len(real)}"
    if len(way) != len(real):
        return None
    for item, (words, environment) in zip(way, real, strict=True):
        reason = _words(list(item.words)[1:], words)
        if reason:
            return reason
        for name in NAMES:
            value = item.environment.get(name)
            if value is not None and not value.known:
                continue
            told = value.text if value is not None else None
            if told != environment.get(name):
                return f"{name} is {told!r} in the environment, really {environment.get(name)!r}"
    return None


def _words(told: list[Any], real: list[str]) -> str | None:
    for number, value in enumerate(told):
        if value.many:
            return None
        if number >= len(real):
            return f"more words than {real}"
        if value.known and value.text != real[number]:
            return f"the word {value.text!r}, really {real[number]!r}"
        if not value.known and not real[number].startswith(value.prefix):
            return f"a word that begins {value.prefix!r}, really {real[number]!r}"
    return None if len(told) == len(real) else f"{[value.text for value in told]}, really {real}"


class Maker:
    """Writes random cases; `bash` or plain sh."""

    def __init__(self, seed: int, root: str) -> None:
        self.random = random.Random(seed)
        self.bash = self.random.random() < 0.6
        self.case = Case(root)
        self.functions: list[str] = []
        self.sourced = 0

    def pick(self, *items: Any) -> Any:
        return self.random.choice(items)

    def name(self) -> str:
        return self.pick(*NAMES)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def make(self) -> Case:
        case, root = self.case, self.case.root
        shell = "bash" if self.bash else "sh"
        shebang = self.pick(f"#!/bin/{shell}", f"#!/usr/bin/env {shell}") if self.bash else "#!/bin/sh"
        head = self.pick("", "set -e\n", "set -eu\n", "set -u\n", "set -a\n", "")
        if self.bash and self.chance(0.3):
            head += "set -euo pipefail\n"
        for name in ("a", "b"):
            case.files[f"{root}/conf_{name}.sh"] = self.config(name)
        case.files[f"{root}/start.sh"] = f"{shebang}\n{self.block(2)}{self.launch()}"
        body = self.block(self.random.randint(2, 6))
        case.files[f"{root}/entry.sh"] = f"{shebang}\n# starts the engine\n{head}{body}{self.final()}"
        environment = [f"PATH={root}/bin:/usr/bin:/bin", "HOME=/root"]
        environment += [f"{name}={self.pick(*WORDS)}" for name in NAMES if self.chance(0.5)]
        arguments = [self.pick(*WORDS[:12]) for _ in range(self.random.randint(0, 3))]
        entry = f"{root}/entry.sh"
        how = self.random.random()
        if how < 0.5:
            case.settings = {"Entrypoint": [entry], "Cmd": arguments}
        elif how < 0.8:
            case.settings = {"Entrypoint": ["/bin/bash" if self.bash else "/bin/sh", entry], "Cmd": arguments}
        elif how < 0.9:
            case.settings = {"Entrypoint": ["/bin/sh", "-c", f'exec {entry} "$@"', "sh"], "Cmd": arguments}
        else:
            case.settings = {"Cmd": [entry, *arguments]}
        case.settings |= {"Env": environment, "WorkingDir": root}
        line = [word for name in NAMES if self.chance(0.15) for word in ("-e", f"{name}={self.pick(*WORDS)}")]
        line.append("IMAGE")
        if self.chance(0.2):
            line += [entry] if "Entrypoint" not in case.settings else []
            line += ["serve", self.pick(*WORDS[:9])]
        case.run = shlex.join(line)
        return case

    # ---- words

    def value(self) -> str:
        """A word to assign or pass, quoted in some way."""
        name, other = self.name(), self.name()
        word = self.pick(*WORDS)
        forms = [
            shlex.quote(word), shlex.quote(word), f'"${name}"', f"${{{name}:-{shlex.quote(word)}}}",
            f'"${{{name}:-${other}}}"', f'"${{{name}-}}"', f'"${{{name}:-{self.pick("4", "d e", "7")}}}"',
            f'"${{{name}:+{self.pick("set", "--on")}}}"', f'"${{{name}%.*}}"', f'"${{{name}##*/}}"',
            f'"pre-${{{name}:-}}-post"', f'"${{#{name}}}"', f"$(( ${{{name}:-3}} + 1 ))" if self.chance(0.3) else '"9"',
            f'"$(echo "${{{name}:-none}}")"', f'"{{\\"k\\":${{{name}:-5}}}}"', f"'{{\"m\":\"'\"${{{name}:-}}\"'\"}}'",
            f'"${{{name}:=given}}"', f"`echo ${{{name}:-x}}`", f'"$(basename "/a/${{{name}:-b}}")"',
        ]  # fmt: skip
        if self.bash:
            forms += [f'"${{{name}/a/b}}"', f'"${{{name}:0:2}}"', f'"${{{name}^^}}"', f'"${{{name},,}}"', "$'a\\tb'"]
        return self.pick(*forms)

    def loose(self) -> str:
        """A word of a command, which may be split."""
        name = self.name()
        return self.pick(self.value(), self.value(), f"${name}", f"${{{name}:-}}", f"--{name.lower()}=${{{name}:-1}}",
                         '"$@"', "$*", '"$1"', "${2:-}", f'--n="${name}"', f"${{{name}:+--flag $K}}")  # fmt: skip

    def test(self) -> str:
        name, word = self.name(), self.pick(*WORDS)
        root = self.case.root
        forms = [
            f'[ -n "${{{name}:-}}" ]', f'[ -z "${name}" ]', f'[ "${{{name}:-}}" = {shlex.quote(word)} ]',
            f'[ "${name}" != dflash ]', f"[ -f {root}/conf_{self.pick('a', 'b', 'z')}.sh ]", f"[ -d {root}/bin ]",
            f'[ "${{{name}:-0}}" -gt 5 ]', f'test "${{{name}:-0}}" -eq 4', "true", "false", "[ $# -gt 1 ]",
            f"! [ -e {root}/none ]", f'[ -n "${{{name}:-}}" ] && [ "$K" = 4 ]', f'[ "${name}" = 4 -o "$K" = 15 ]',
            f"[ -x {root}/start.sh ]", "[ -e /proc/self/none ]", "grep -q Linux /proc/nothing", f"[ ${name} = 4 ]",
            f"[ -s {root}/made.sh ]", '[ "${1:-}" = serve ]', f"[ ! -f {root}/conf_a.sh ]",
        ]  # fmt: skip
        if self.bash:
            forms += [f'[[ -n "${{{name}:-}}" && $K != 15 ]]', f"[[ ${{{name}:-}} == d* ]]", "(( ${#K} > 1 ))",
                      f"[[ ${{{name}:-}} =~ ^[0-9]+$ ]]", f'[[ "${{{name}:-}}" == "$K" || -f {root}/none ]]',
                      f"[[ ! ${{{name}:-}} = *' '* ]]", f'[ "${{{name}:-}}" == ngram ]']  # fmt: skip
        return self.pick(*forms)

    # ---- commands

    def config(self, name: str) -> str:
        lines = ["# settings"]
        for _ in range(self.random.randint(1, 4)):
            lines.append(
                self.pick(self.assign(), f"export {self.name()}={self.value()}", f"{self.name()}={self.value()}")
            )
        if name == "a" and self.chance(0.4):
            lines.append(f". {self.case.root}/conf_b.sh")
        if self.chance(0.1):
            lines.append(f"{self.test()} && return 0")
            lines.append(self.assign())
        return "\n".join(lines) + "\n"

    def assign(self) -> str:
        name = self.name()
        forms = [
            f"{name}={self.value()}", f"{name}={self.value()}", f"export {name}={self.value()}",
            f": \"${{{name}:={self.pick('5', 'dflash', '--q')}}}\"", f"export {name}", f"unset {name}",
            f"{name}=1 {self.name()}={self.value()}", f"export {name}=${{{name}:-{self.pick('8', 'x')}}}",
        ]  # fmt: skip
        if self.bash:
            forms += [f"{name}+={self.value()}", f"declare -x {name}={self.value()}"]
        return self.pick(*forms)

    def source(self) -> str:
        root, name = self.case.root, self.pick("a", "b")
        path = f"{root}/conf_{name}.sh"
        word = "source" if self.bash and self.chance(0.6) else "."
        forms = [
            f"{word} {path}", f"[ -f {path} ] && {word} {path}", f"if [ -r {path} ]; then {word} {path}; fi",
            f"set -a; {word} {path}; set +a", f'CONF={root}\n{word} "$CONF/conf_{name}.sh"',
            f"cd {root} && . ./conf_{name}.sh", f"[ -f {root}/none ] && {word} {root}/none || true",
            f'{word} "$(dirname "$0")/conf_{name}.sh"',
        ]  # fmt: skip
        return self.pick(*forms)

    def written(self) -> str:
        root, name = self.case.root, self.name()
        word, inner = ".", self.pick("$K", "${LEN:-3}", "lit", "\\$K")
        forms = [
            f'cat > {root}/made.sh <<EOF\nexport {name}="{inner}"\nEOF\n{word} {root}/made.sh',
            f"cat <<'EOF' > {root}/made.sh\n{self.assign()}\nEOF\n{word} {root}/made.sh",
            f"echo \"{name}=made\" > {root}/made.sh\necho 'export TAG=late' >> {root}/made.sh\n{word} {root}/made.sh",
            f"printf '%s=%s\\n' {name} 12 > {root}/made.sh; {word} {root}/made.sh",
            f"mkdir -p {root}/new/dir\ncp {root}/conf_b.sh {root}/new/dir/c.sh\n{word} {root}/new/dir/c.sh",
            f"{{ echo 'K=21'; echo 'export {name}'; }} > {root}/made.sh\n{word} {root}/made.sh",
            f"cat <<-EOF | tee {root}/made.sh > /dev/null\n\tLEN=\"$K\"\n\tEOF\n{word} {root}/made.sh",
            f"rm -f {root}/conf_b.sh",
        ]  # fmt: skip
        return self.pick(*forms)

    def compound(self, depth: int) -> str:
        if self.chance(0.4):
            return rare(self)
        name = self.name()
        inner = self.block(self.random.randint(1, 2), depth + 1)
        other = self.block(1, depth + 1)
        forms = [
            f"if {self.test()}; then\n{inner}else\n{other}fi", f"if {self.test()}; then\n{inner}fi",
            f"if {self.test()}; then\n{inner}elif {self.test()}\nthen\n{other}else\n  {name}=else\nfi",
            f"case \"${{{name}:-}}\" in\n  4|15) {self.assign()} ;;\n"
            f"  d*|[a-n]gram) {self.assign()}\n {self.assign()};;\n"
            f"  \"\") {name}=empty ;;\n  *) {self.pick(':', self.assign())} ;;\nesac",
            f"for each in 1 two ${name}; do\n  {name}=$each\n  {self.test()} && break\ndone",
            f"{self.test()} && {self.simple()}", f"{self.test()} || {self.simple()}",
            f"{self.test()} && {self.assign()} || {self.assign()}", f"( {self.assign()}; {self.assign()} )",
            f"{{ {self.assign()}; }}", f'set -- "$@" {self.loose()}', f"set -- {self.loose()} {self.loose()}",
            f"n=0\nwhile [ $n -lt 3 ]; do\n  n=$((n + 1))\n  {name}=$n\ndone",
            "while [ $# -gt 0 ]; do\n  case \"$1\" in\n    --k) K=$2; shift 2 || shift ;;\n    serve) shift; break ;;\n"
            "    *) TAG=\"$TAG,$1\"; shift ;;\n  esac\ndone" if self.chance(0.5) else "[ $# -gt 0 ] && shift",
            f"eval \"{name}=\\${self.pick(*NAMES)}\"", f"until [ -e /proc/x ] || true; do {self.assign()}; done",
        ]  # fmt: skip
        if self.bash:
            forms += [f"ARGS=({self.loose()} {self.loose()})\nARGS+=({self.loose()})\n{name}=${{#ARGS[@]}}",
                      f"ARGS=()\n{self.test()} && ARGS+=(--x {self.value()})\nset -- \"${{ARGS[@]}}\"",
                      f"ARGS=(one)\n{name}=\"${{ARGS[0]}}\"", f"{name}=\"${{@:2}}\""]  # fmt: skip
        return self.pick(*forms)

    def function(self, depth: int) -> str:
        name = f"f{len(self.functions)}"
        body = self.block(2, depth + 1)
        keep = self.pick("", f"  local {self.name()}={self.value()}\n", f"  local {self.name()}\n")
        ending = self.pick("", f"  {self.test()} && return 1\n  {self.assign()}\n", "  return 0\n")
        self.functions.append(name)
        return f"{name}() {{\n{keep}{body}{ending}}}"

    def simple(self) -> str:
        forms = [self.assign(), self.assign(), self.assign(), ":", f'echo "k=${{{self.name()}:-}}"']
        if self.functions:
            forms += [f"{self.pick(*self.functions)} {self.loose()}", f"{self.pick(*self.functions)} || true"]
        if self.chance(0.1):
            forms += ["exit 3", "false", f"export {self.name()}=2; shift 2>/dev/null || true", "nproc > /dev/null"]
        return self.pick(*forms)

    def block(self, count: int, depth: int = 0) -> str:
        lines = []
        for _ in range(count):
            kind = self.random.random()
            if kind < 0.35 or depth > 2:
                lines.append(self.simple())
            elif kind < 0.5:
                lines.append(self.source())
            elif kind < 0.6:
                lines.append(self.written())
            elif kind < 0.7 and depth == 0:
                lines.append(self.function(depth))
            else:
                lines.append(self.compound(depth))
        return "".join(f"{line}\n" for line in lines)

    def launch(self) -> str:
        words = " ".join(self.loose() for _ in range(self.random.randint(0, 3)))
        name = self.name()
        forms = [
            f"exec vllm serve /m {words}", f"vllm serve /m {words}", f'exec vllm serve "$@" {words}',
            f"exec env {name}=9 vllm serve {words}", f"env -u {name} vllm serve {words}",
            f"vllm serve /m {words} &\nwait", f"exec nohup vllm serve \\\n  /m \\\n  {words}",
            f"vllm serve /m {words} 2>&1 | cat",
        ]  # fmt: skip
        if self.bash:
            forms += [f"{name}=3 exec vllm serve {words}", 'exec vllm serve "${ARGS[@]:-}" "$@"']
        else:
            forms += [f"{name}=3 vllm serve {words}"]
        return f"{self.pick(*forms)}\n"

    def final(self) -> str:
        root = self.case.root
        forms = [self.launch(), self.launch(), self.launch(), self.launch(), f'exec {root}/start.sh "$@"\n',
                 f"{self.name()}=5 {root}/start.sh {self.loose()}\n", 
                 f"if {self.test()}; then\n{self.launch()}fi\n{self.launch()}",
                 f"main() {{\n{self.block(1, 2)}{self.launch()}}}\nmain \"$@\"\n",
                 f"exec sh -c 'exec vllm serve \"$@\" --k \"$K\"' sh {self.loose()}\n",
                 f"bash -c \"K=3 vllm serve ${{{self.name()}:-}}\"\n"]  # fmt: skip
        return self.pick(*forms)


def made(seed: int, folder: Path) -> Case:
    """The case of a seed, in a folder of its own."""
    root = f"{os.path.realpath(folder)}/c{seed}"
    return Maker(seed, root).make()
