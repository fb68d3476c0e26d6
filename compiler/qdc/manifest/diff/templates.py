"""What changed between two chat templates: how many lines, and what became of the think block.

Templates are parsed and never rendered.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

MAX_TEMPLATE = 1 << 20
_WORDS = {
    ("none", "always"): "think block now there",
    ("none", "conditional"): "think block now there, conditional",
    ("always", "none"): "think block gone",
    ("conditional", "none"): "think block gone",
    ("always", "conditional"): "think block now conditional",
    ("conditional", "always"): "think block now unconditional",
}


def template_words(was: str, now: str) -> str:
    """`think block now conditional, 14 lines`: lines added and removed."""
    codes = difflib.SequenceMatcher(None, was.splitlines(), now.splitlines()).get_opcodes()
    lines = sum(stop - start + end - begin for tag, start, stop, begin, end in codes if tag != "equal")
    counted = f"{lines} line{'' if lines == 1 else 's'}" if lines else "line ends alone"
    states = (think_block(was), think_block(now))
    found = _WORDS.get((states[0] or "", states[1] or ""))
    return f"{found}, {counted}" if found else counted


def think_block(text: str) -> str | None:
    """Where an answer begins, is there a `<think>`: `none`, `always`, or `conditional` (a test on a name that says

    `think`)? None where the text is no template.
    """
    from jinja2 import Environment, TemplateError, nodes

    try:
        tree = Environment().parse(text[:MAX_TEMPLATE])
        starts = [node for node in tree.find_all(nodes.If) if "add_generation_prompt" in _names(node.test)]
        tested = [inside for start in starts for inside in _emitted(start.body, False)]
        tested = tested if starts else list(_emitted(tree.body, False))
    except (TemplateError, RecursionError):
        return None
    return "none" if not tested else "conditional" if any(tested) else "always"


def _emitted(body: Sequence[object], tested: bool) -> Iterator[bool]:
    """For each `<think>` that `body` prints, whether a test on thinking stands above it."""
    from jinja2 import nodes

    for node in body:
        if isinstance(node, nodes.If):
            inner = tested or any("think" in name for name in _names(node.test))
            yield from _emitted(node.body, inner)
            yield from _emitted(node.elif_, inner)
            yield from _emitted(node.else_, inner)
        elif isinstance(node, nodes.For):
            yield from _emitted([*node.body, *node.else_], tested)
        elif isinstance(node, nodes.Output):
            texts = [part.data for part in node.find_all(nodes.TemplateData)]
            texts += [str(part.value) for part in node.find_all(nodes.Const)]
            yield from (tested for text in texts if "<think>" in text)


def _names(test: object) -> set[str]:
    from jinja2 import nodes

    if isinstance(test, nodes.Name):
        return {test.name}
    return {name.name for name in test.find_all(nodes.Name)} if isinstance(test, nodes.Node) else set()
