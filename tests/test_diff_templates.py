"""What a changed chat template means for the think block, in words; templates are parsed and never rendered."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdc.manifest.diff.templates import template_words, think_block

LOOP = "{% for m in messages %}{{ m.role }}: {{ '<think>' + m.content }}{% endfor %}"
NONE = LOOP + "{% if add_generation_prompt %}assistant:{% endif %}"
ALWAYS = LOOP + "{% if add_generation_prompt %}assistant:\n<think>\n{% endif %}"
SWITCH = (
    LOOP + "{% if add_generation_prompt %}assistant:\n{% if enable_thinking is defined and enable_thinking %}"
    "{{- '<think>\\n' }}\n{% else %}{{- '<think>\\n\\n</think>\\n\\n' }}\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "found"),
    [(NONE, "none"), (ALWAYS, "always"), (SWITCH, "conditional"), ("<think>{{ x }}", "always"), ("{% if", None),
     ("{% if add_generation_prompt and not thinking %}{% else %}<think>{% endif %}", "none")],
)  # fmt: skip
def test_where_an_answer_begins_is_there_a_think_block(text: str, found: str | None) -> None:
    assert think_block(text) == found


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        (ALWAYS, SWITCH, "think block now conditional, 5 lines"),
        (SWITCH, ALWAYS, "think block now unconditional, 5 lines"),
        (NONE, ALWAYS, "think block now there, 4 lines"),
        (ALWAYS, NONE, "think block gone, 4 lines"),
        (ALWAYS, ALWAYS.replace("assistant:", "model:"), "2 lines"),
        ("a\nb", "a\r\nb", "line ends alone"),
        ("{% if", "{% if\n", "line ends alone"),
    ],
)
def test_a_change_in_words(was: str, now: str, words: str) -> None:
    assert template_words(was, now) == words


def test_the_template_of_the_recipes_is_conditional(root: Path) -> None:
    assert think_block((root / "recipes/templates/qwen-think-switch.jinja").read_text()) == "conditional"


@given(st.text("{%}-<think>if \n'x"), st.text("{%}-<think>if \n'x"))
def test_no_text_is_too_odd(was: str, now: str) -> None:
    assert think_block(was) in (None, "none", "always", "conditional")
    assert template_words(was, now).count(",") <= 1
