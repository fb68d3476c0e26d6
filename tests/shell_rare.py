"""Commands that entrypoints use now and then, for the random cases of `shell_cases`; one of them for `maker`."""

from __future__ import annotations

from typing import Any


def rare(maker: Any) -> str:
    n, m, root = maker.name(), maker.name(), maker.case.root
    t, a = maker.test(), maker.assign()
    forms = [
        *_flow(n, m, t, a), *_words(n, m), *_files(n, m, root, t, a), *_tests(n, m, root, a),
        *_functions(n, m, a, root),
        *(_sums(n) if maker.chance(0.3) else ()),
    ]  # fmt: skip
    if maker.bash:
        forms += _bash(n, m, root, t, a)
    text: str = maker.pick(*forms)
    return text


def _flow(n: str, m: str, t: str, a: str) -> list[str]:
    return [
        f"for i in 1 2; do for j in a b; do {n}=$i$j; {t} && break 2; done; done",
        f'for i in 1 2 3; do {t} && continue; {n}="${{{n}:-}}$i"; done',
        "trap 'echo bye' EXIT TERM",
        f"({n}=sub; exit 4) || {m}=$?",
        f"false | true && {n}=pipe || {n}=nopipe",
        f'case "${{{n}:-}}" in *[!0-9]*|"") {m}=nan ;; *) {m}=num ;; esac',
        f'case ${n} in $EXTRA) {m}=same;; "$K"*) {m}=pre;; esac',
        f"case x$1 in x--*) {n}=opt;; x) {n}=none;; esac",
        f"false; case $? in 0) {n}=zero;; *) {n}=$?;; esac",
        f"if ! {t}; then {a}; fi", f"! {t} || {a}", f"{{ {t}; }} && {a}", f"({t}) && {a}",
        f"if ( {t} ); then {a}; fi", f"while :; do {a}; break; done",
        f'i=0; until [ $i -ge 2 ]; do i=$((i+1)); {n}="$i$i"; done',
        f"set -- a b c; while [ $# -gt 0 ]; do {n}=$1; shift; done",
        f"set -e; {t} || true; set +e", f"set -u; {n}=${{{m}:-u}}; set +u",
        f"true & false || {n}=bg", "wait", "sleep 0 & wait $!", f"({a}) & wait", "umask 022",
        f"{n}=x | {m}=y | cat", f"echo 'k=v' | while read -r line; do {n}=$line; done",
        f"sh -c '{n}=9; echo $0 $1' a b", f"sh -ec 'false; vllm serve no' || {n}=failed",
    ]  # fmt: skip


def _words(n: str, m: str) -> list[str]:
    return [
        f'{n}=$( {m}=inner; echo "${m}" )', f'{n}="$(printf \'%s-%s\' "${{{m}:-}}" z)"',
        f"{n}='a\nb'\nset -- ${n}", f"set -- one 'two three' ; {n}=\"$*\"; {m}=$#",
        f'set -- "${{{n}:-}}" "${{{m}:-}}"; shift; {n}=$1', f"{n}=${{{m}#*=}}", f"{n}=${{{m}%%-*}}",
        f"{n}=${{{m}##*.}}", f"{n}=${{{m}%[0-9]}}", f"{n}=${{{m}#?}}", f'{n}="${{{m}#"${{{n}:-}}"}}"',
        f"{n}=${{{m}%'.c'}}", f"{n}=${{{m}:-${{TAG:-deep}}}}", f"{n}=${{{m}:+${{{m}}}x}}",
        f'{n}=1; {n}="${{{n}}}2" {m}="${n}3"', f"{n}=$1 {m}=${{3:-}}", f"{n}=$@", f'{n}="$@"', f'{n}="a$*b"',
        "set -- \"$@\" \"\" ''", 'set -- $@ $* "$*"', "set --", f"{n}=${{#}}", f"{n}=~; {m}=~/x", f'{n}="~"',
        f"{n}=a:~", f"{n}=\\$K", f'{n}="\\$K \\\\ \\" \\x"', f"{n}='it'\\''s'", f"{n}=a\\\nb", f"{n}=#no",
        f"{n}=a#b # comment", "# comment ' \" $(", f"{n}=$K$LEN;{m}=$K'$LEN'\"$LEN\"", f"export {n} {m}",
        f"export {n}=1 {m}=2", f"readonly RO=1; {n}=$RO", f"unset -v {n}", "unset -f f0",
        f'{n}={m}\neval "{n}=\\${{{m}:-none}}"', f"eval 'set -- \"$@\" {n.lower()}'",
    ]  # fmt: skip


def _files(n: str, m: str, root: str, t: str, a: str) -> list[str]:
    return [
        f"cd {root}/bin\n{n}=$(pwd)\ncd ..", f"cd {root}/nope || {n}=nocd", f"cd /\n. {root}/conf_a.sh",
        f"[ -f conf_a.sh ] && {n}=here", f"{n}=conf_*.sh; set -- ${n}", f"set -- {root}/conf_a.* {root}/zz*",
        f"set -- {root}/st[a-z]rt.sh; {n}=$1", f"set -f; set -- ${n} *; set +f", "exec 3>/dev/null", "exec 2>&1",
        f"{t} > /dev/null 2>&1 && {a}", f'echo hi > {root}/o.txt && {n}="$(cat {root}/o.txt)"',
        f"echo hi > {root}/nodir/o.txt || {n}=nofile", f"cat {root}/none 2>/dev/null || {n}=nocat",
        f"printf '%s\\n' '{n}=p1' '{m}=p2' > {root}/p.sh; . {root}/p.sh",
        f"cat > {root}/h.sh << 'X Y'\n{n}='$K'\nX Y\n. {root}/h.sh",
        f"cat > {root}/h.sh <<E1\n{n}=`echo z`$(echo y)\\\nq\nE1\n. {root}/h.sh",
        f"tee {root}/t.sh >/dev/null <<EOF\n{n}=tee\nEOF\n. {root}/t.sh",
        f"command -v vllm >/dev/null 2>&1 && {n}=found",
        f'[ -n "$(cat {root}/none 2>/dev/null)" ] && {a}', f"mv {root}/conf_b.sh {root}/moved.sh && . {root}/moved.sh",
    ]  # fmt: skip


def _tests(n: str, m: str, root: str, a: str) -> list[str]:
    return [
        f'test "${{{n}:-a}}" = "${{{m}:-a}}" && {a}', f'[ ! "${n}" ] && {a}', f'[ "${n}" ] || {a}',
        f'[ "${{{n}:-0}}" -le 15 -a -f {root}/conf_a.sh ] && {a}', f"[ ${n} ] && {a}", f"[ -n ${n} ] && {a}",
        f'[ "(" = "${n}" ] || {a}', f'[ "${{{n}:-x}}" -eq 4 ] 2>/dev/null || {a}',
    ]  # fmt: skip


def _functions(n: str, m: str, a: str, root: str) -> list[str]:
    return [
        f"g() {{ for i in x y; do {n}=$i; [ $i = x ] && return 3; done; }}\ng || {m}=$?",
        f"h() {{ echo out; return 1; }}\n{n}=$(h) || {m}=failed",
        f"h() {{ {n}=glob; }}\nh; h2() {{ h; {m}=2; h; }}\nh2",
        f"h() {{ local {n}; {n}=l; {a}; }}\nh", f"h() {{ set -- p q; {n}=$2; }}\nh z; {m}=$1",
        f"h() (\n {n}=subsh\n exit 2\n)\nh || {m}=$?", f"false\neval '{n}=$?'", f"false; . {root}/conf_b.sh; {n}=$?",
    ]  # fmt: skip


def _sums(n: str) -> list[str]:
    return [f"{n}=$((5%3+2*2))", f"{n}=$(( (2 > 1) ? 7 : 9 ))", f"{n}=$((0x10 + 010))", f"{n}=$((${{K:-4}}*2-1))",
            f"{n}=$((-7/2))", f'{n}="$((1 << 4 | 3))"']  # fmt: skip


def _bash(n: str, m: str, root: str, t: str, a: str) -> list[str]:
    return [
        f'[[ $K = "${n}" ]] && {a}', f"[[ -z ${n} || ${m} == *a* ]] || {a}", f"[[ ${{{n}:-0}} == [0-9]* ]] && {a}",
        f"[[ -v {n} ]] && {a}", f"[[ ! -f {root}/x && ( -n $K || -n $LEN ) ]] && {a}", f"(( i = 3, i++ )); {n}=set",
        f'A=("$@"); {n}=${{A[0]:-}}; {m}=${{#A[@]}}', 'A=(x "y z" $K); set -- "${A[@]}"',
        f'A=(); A+=(--a "${{{n}:-}}"); A+=(b); set -- "${{A[@]:1}}"',
        f'A=(a b); for z in "${{A[@]}}"; do {n}+=$z; done',
        f'A=(a b c); {n}="${{A[*]}}"; {m}=${{A[1]}}', f"{n}=${{{m}//a/X}}", f"{n}=${{{m}/./_}}", f"{n}=${{{m}:1}}",
        f"{n}=${{{m}:1:2}}", f"{n}=${{{m}: -2}}", f"{n}=${{{m}^}}", f"P={m}; {n}=${{!P}}",
        f'{n}=$\'x\\ny\'; set -- "${n}"',
        f'cat <<< "${n}" > {root}/s.txt; {m}=$(cat {root}/s.txt)', f"function ff {{ {n}=ff; }}\nff",
        f"declare {n}=d; declare -r RR=1", f"set -o pipefail; false | true || {n}=pf; set +o pipefail", f"{n}+=more",
        f"source {root}/conf_b.sh a1 a2; {m}=$1", f"{n}=1 {m}=2 eval 'TAG=${n}'", "IFS=, ; x=1; unset IFS",
        f"if [[ \"${{{n}:-}}\" =~ ^[a-z]+$ ]]; then {a}; fi", f"{t} && declare -x {n}=dx",
        f"echo -n abc > {root}/e.txt; {n}=$(cat {root}/e.txt)",
    ]  # fmt: skip
