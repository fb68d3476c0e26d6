"""How a corpus is rendered and cut, against how its model is served and measured."""

from __future__ import annotations

from collections.abc import Iterator

from qdc.recipe.data import Corpus
from qdc.recipe.load import Loaded
from qdc.recipe.reading import Path_
from qdc.recipe.serving import AcceptanceTasks, QualityTasks
from qdc.rules.registry import Found, Topic

TOPIC = Topic()
_CLOSED = "</think>"


@TOPIC.rule(
    "DAT02",
    "warning",
    summary="Cut answers stay, and the template closes the think block that they did not close.",
    why="A trace that was cut becomes an answer after an empty think block, which no model would write.",
    fix="Write `truncated: drop`, or `unclosed_think: trace` to keep the trace inside its block.",
    evidence="Disputed. One team keeps such rows as valid for drafters: "
    "https://github.com/nota-github/adaptfm-quant-dflash (src/data_generator/README.md); that they are rendered as "
    "answers follows from the template.",
    failing="data: {target_corpus: {unclosed_think: null}}",
    passing="data: {target_corpus: {unclosed_think: trace}}",
)
def cut_traces_stay_traces(loaded: Loaded) -> Iterator[Found]:
    for name, entry in loaded.model.data.items():
        if not isinstance(entry, Corpus) or entry.truncated != "keep" or entry.unclosed_think is not None:
            continue
        template = _template(loaded, name)
        if _CLOSED in template and _closes(template, entry.thinking):
            message = f"a cut answer of `{name}` has no `{_CLOSED}`, so that the template writes it as an answer after "
            message += "an empty think block (disputed: whether drafters mind)"
            path = ("data", name, "truncated")
            yield Found(path, message, f"write `truncated: drop`, or add `unclosed_think: trace` to `{name}`")


def _template(loaded: Loaded, corpus: str) -> str:
    """The text of the template that renders a corpus."""
    return loaded.templates.get(f"data.{corpus}", loaded.chat_template)


def _closes(template: str, thinking: bool | None) -> bool:
    """Whether the template closes a think block before an answer that has no closing tag; false if it cannot tell."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    answer = "an answer that was cut"
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
    switch = {} if thinking is None else {"enable_thinking": thinking}
    try:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        text = environment.from_string(template).render(messages=turns, add_generation_prompt=False, **switch)
    except (TemplateError, TypeError, ValueError, ArithmeticError):
        return False
    before, found, _ = text.partition(answer)
    return bool(found) and _CLOSED in before


@TOPIC.rule(
    "DAT06",
    "warning",
    summary="The drafter learns from a corpus that is rendered by another template than is served.",
    why="It meets other tokens around every turn than it was trained on, which may cost acceptance.",
    fix="Render the corpus with the served template: leave `chat_template` out of it.",
    evidence="Another template moved a benchmark from 0.43 to 0.68: https://github.com/PraveenAShukla/adaptfm "
    "(submission/README.md); a mismatch is suspected where acceptance collapsed: "
    "https://github.com/SafeAILab/EAGLE/issues/227",
    failing="data: {target_corpus: {chat_template: templates/qwen-think-switch.jinja}}",
    passing="data: {target_corpus: {chat_template: templates/chatml.jinja}}",
)
def the_drafter_learns_what_is_served(loaded: Loaded) -> Iterator[Found]:
    drafter = loaded.model.drafter
    for name in dict.fromkeys(training.data for training in (drafter.trainings if drafter else [])):
        entry = loaded.model.data.get(name)
        if isinstance(entry, Corpus) and _template(loaded, name) != loaded.chat_template:
            served = loaded.model.serve.chat_template
            message = f"the drafter learns from `{entry.chat_template}`, and `{served}` is served"
            where = ("serve", "chat_template"), "what is served"
            hint = f"remove it from `{name}`, or write `chat_template: {served}`"
            yield Found(("data", name, "chat_template"), message, hint, also=where)


@TOPIC.rule(
    "DAT07",
    "note",
    summary="A corpus was written with thinking and a task is measured without, or the reverse.",
    why="Acceptance depends on the mode, so a figure counts for its own mode only.",
    fix="Measure in the mode of the corpus as well, or read the figure as one of the other mode.",
    evidence="Disputed. Without thinking acceptance was better: https://github.com/z-lab/dflash/issues/133; with it: "
    "https://github.com/z-lab/dflash/issues/60",
    failing="evaluate: {acceptance: {thinking: false}}",
    passing="evaluate: {quality: null, acceptance: {thinking: true}}",
)
def modes_are_alike(loaded: Loaded) -> Iterator[Found]:
    data, tasks = loaded.model.data, list(_tasks(loaded))
    for name in _learnt(loaded):
        entry = data.get(name)
        thinking = entry.thinking if isinstance(entry, Corpus) else None
        others = [(path, task) for path, task, mode in tasks if thinking is not None and mode != thinking]
        if others:
            path, _ = others[0]
            words = ("with", "without") if thinking else ("without", "with")
            measured = ", ".join(task for _, task in others)
            message = f"`{name}` is written {words[0]} thinking; measured {words[1]} it: {measured} "
            message += "(disputed: which of the two helps acceptance)"
            where = ("data", name, "thinking"), "the corpus"
            yield Found(
                path, message, f"write `thinking: {str(thinking).lower()}` to measure the same mode", also=where
            )
            return


def _learnt(loaded: Loaded) -> list[str]:
    """The corpora that the drafter learns from, the last training's first, then QAD's."""
    model = loaded.model
    names = [training.data for training in reversed(model.drafter.trainings)] if model.drafter else []
    return list(dict.fromkeys([*names, model.target.qad.data] if model.target.qad else names))


def _tasks(loaded: Loaded) -> Iterator[tuple[Path_, str, bool]]:
    """Tasks with a thinking switch: path of the switch, name, value."""
    evaluate = loaded.model.evaluate
    if isinstance(evaluate.acceptance, AcceptanceTasks):
        yield ("evaluate", "acceptance", "thinking"), "acceptance", evaluate.acceptance.thinking
    if isinstance(evaluate.quality, QualityTasks):
        for name, task in evaluate.quality.tasks.items():
            yield ("evaluate", "quality", "tasks", name, "thinking"), f"`{name}`", task.thinking


@TOPIC.rule(
    "DAT08",
    "warning",
    summary="Latency is measured on longer requests than the drafter was trained on, and it has no window.",
    why="Past the lengths of its training a drafter's acceptance usually falls.",
    fix="Raise `max_length` of the last training, or give the drafter a window (`swa`).",
    evidence="Acceptance on long contexts: https://github.com/vllm-project/speculators/issues/613",
    failing="drafter: {swa: null}",
    passing="drafter: {swa: {window: 1024}}",
)
def training_is_as_long_as_what_is_measured(loaded: Loaded) -> Iterator[Found]:
    drafter, latency = loaded.model.drafter, loaded.model.evaluate.latency
    if drafter is None or latency is None or drafter.swa is not None or not drafter.trainings:
        return
    lengths = [sum(map(int, regime.split("/"))) for regime in latency.regimes]
    index, longest = len(drafter.trainings) - 1, max(lengths)
    given = drafter.trainings[index].max_length
    if given < longest:
        message = f"trained on up to {given} tokens, measured at {longest}, where acceptance usually falls"
        where = ("evaluate", "latency", "regimes", lengths.index(longest)), "the longest request"
        hint = f"write `max_length: {longest}`, or give the drafter a window: `swa: {{window: ...}}`"
        yield Found(("drafter", "training", index, "max_length"), message, hint, also=where)
