"""Names of data entries, what learns from what, and what measures."""

from __future__ import annotations

from collections.abc import Iterator

from qdc.core.spelling import suggestion
from qdc.recipe.data import Corpus, DatasetPrompts, PromptSet
from qdc.recipe.load import Loaded
from qdc.recipe.reading import Path_
from qdc.rules.registry import Found, Severity, Topic
from qdc.tables import tasks

TOPIC = Topic()


@TOPIC.rule(
    "YML09",
    "error",
    summary="A name stands for no entry, or for one of the wrong kind, or the names form a circle.",
    why="A stage would have nothing to read, or would wait for itself.",
    fix="Write the name of an entry of `data` (or of an earlier training, for `from`).",
    evidence="Follows from the definition of the fields.",
    failing="target: {qad: {data: teacher_corpsu}}",
    passing="target: {qad: {data: teacher_corpus}}",
    final="nothing can be built from it",
)
def names_exist(loaded: Loaded) -> Iterator[Found]:
    data = loaded.model.data
    for path, name, kind in _uses(loaded):
        what, listed = ("a prompt set", "prompt sets") if kind is PromptSet else ("a corpus", "corpora")
        names = [known for known, entry in data.items() if isinstance(entry, kind)]
        if name not in data:
            yield Found(path, f"`data` has no entry `{name}`", suggestion(name, names, listed))
        elif not isinstance(data[name], kind):
            message = f"`{name}` is not {what}"
            yield Found(path, message, suggestion(name, names, listed), also=(("data", name), "this is `" + name + "`"))
    yield from _circles(loaded)
    drafter = loaded.model.drafter
    seen: list[str] = []
    for index, training in enumerate(drafter.trainings if drafter else []):
        if training.from_ is not None and training.from_ not in seen:
            path = ("drafter", "training", index, "from")
            hint = suggestion(training.from_, seen, "earlier trainings")
            yield Found(path, f"`{training.from_}` is not an earlier training", hint)
        seen.append(training.name)


def _uses(loaded: Loaded) -> Iterator[tuple[Path_, str, type[PromptSet] | type[Corpus]]]:
    """Every place that names a data entry: path, name, kind."""
    model = loaded.model
    for name, entry in model.data.items():
        if isinstance(entry, PromptSet):
            for index, other in enumerate(entry.exclude):
                yield ("data", name, "exclude", index), other, PromptSet
        else:
            yield ("data", name, "prompts"), entry.prompts, PromptSet
    base = model.target.base
    if hasattr(base, "scratch"):
        yield ("target", "base", "scratch", "training", "data"), base.scratch.training.data, PromptSet
    if (calibration := model.target.quantization.calibration) is not None:
        yield ("target", "quantization", "calibration", "data"), calibration.data, Corpus
    if model.target.qad:
        yield ("target", "qad", "data"), model.target.qad.data, Corpus
    if model.drafter:
        for index, training in enumerate(model.drafter.trainings):
            yield ("drafter", "training", index, "data"), training.data, Corpus
        if model.drafter.ptq:
            yield ("drafter", "ptq", "calibration", "data"), model.drafter.ptq.calibration.data, Corpus
    for part in ("quality", "acceptance"):
        if (wanted := getattr(getattr(model.evaluate, part), "data", None)) is not None:
            yield ("evaluate", part, "data"), wanted, PromptSet


def _circles(loaded: Loaded) -> Iterator[Found]:
    data = loaded.model.data
    for name in data:
        seen, front = set(), [name]
        while front:
            entry = data.get(front.pop())
            for other in entry.exclude if isinstance(entry, PromptSet) else []:
                if other == name:
                    path = ("data", name, "exclude")
                    yield Found(path, f"`{name}` excludes itself in a circle", "remove one name of the circle")
                    return
                if other not in seen:
                    seen.add(other)
                    front.append(other)


@TOPIC.rule(
    "DAT03",
    "warning",
    summary="Two prompt sets come from one dataset, and neither excludes the other.",
    why="Two trainings may see the same prompts, so that what the second one gains cannot be read.",
    fix="Name one of the sets under `exclude` of the other.",
    evidence="Follows from what a draw is.",
    failing="data: {prompts_b: {exclude: []}}",
    passing="data: {prompts_b: {exclude: [prompts_a]}}",
)
def draws_are_apart(loaded: Loaded) -> Iterator[Found]:
    sets = [(name, entry) for name, entry in loaded.model.data.items() if isinstance(entry, DatasetPrompts)]
    for index, (name, entry) in enumerate(sets):
        for other, earlier in sets[:index]:
            same = entry.hf_dataset.lower() == earlier.hf_dataset.lower()
            if same and other not in entry.exclude and name not in earlier.exclude:
                listed = ", ".join([*entry.exclude, other])
                message = f"`{name}` and `{other}` may hold the same prompts of {entry.hf_dataset}"
                hint = f"write `exclude: [{listed}]` in `{name}`"
                yield Found(("data", name, "hf_dataset"), message, hint, also=(("data", other, "hf_dataset"), other))


@TOPIC.rule(
    "DAT04",
    "error",
    summary="A prompt set excludes one whose rows are named in another way.",
    why="A hash of the text is never a dataset's own id, so nothing would be excluded.",
    fix="Write the same `id` on both sets.",
    evidence="A public generator has both kinds of id: https://github.com/nota-github/adaptfm-quant-dflash "
    "(src/data_generator/README.md)",
    failing="data: {prompts_b: {id: text}}",
    passing="data: {prompts_b: {id: uuid}}",
    final="nothing would be excluded",
)
def ids_can_match(loaded: Loaded) -> Iterator[Found]:
    data = loaded.model.data
    for name, entry in data.items():
        for index, other in enumerate(entry.exclude if isinstance(entry, PromptSet) else []):
            known = data.get(other)
            if isinstance(known, PromptSet) and isinstance(entry, PromptSet) and known.id != entry.id:
                message = f"rows of `{name}` are named by {entry.id}, rows of `{other}` by {known.id}: none would match"
                where = ("data", other, "id"), f"of `{other}`"
                yield Found(("data", name, "exclude", index), message, _one_id(name, entry, other, known), also=where)


def _one_id(name: str, entry: PromptSet, other: str, known: PromptSet) -> str:
    if isinstance(entry, DatasetPrompts) and isinstance(known, DatasetPrompts):
        return f"write `id: uuid` in `{name if entry.id == 'text' else other}`"
    return f"write `id: text` in `{name if entry.id == 'uuid' else other}`"


@TOPIC.rule(
    "DAT05",
    "warning",
    summary="A prompt set that something learns from may share prompts with one that measures it.",
    why="Prompts seen in training make the measured figure too good. For `evaluate.quality` under the contract "
    "`adaptfm` it is an error, because the contract forbids it.",
    fix="Name the measuring set under `exclude` of the set that is learnt from, or measure with another one; draw no "
    "prompts from the dataset of a task.",
    evidence="Part of a public drafter's training data were items of the benchmark that it reported: "
    "https://github.com/z-lab/dflash/issues/43; the contract's rule: "
    "https://adaptfm.gitlab.io/call-for-competition.html",
    failing="data: {prompts_a: {exclude: []}}",
    passing="data: {prompts_a: {exclude: [heldout]}}",
)
def heldout_is_heldout(loaded: Loaded) -> Iterator[Found]:
    model, data = loaded.model, loaded.model.data
    parts = {part: getattr(getattr(model.evaluate, part), "data", None) for part in ("quality", "acceptance")}
    measured = {name for name in parts.values() if name}
    strict = parts["quality"] if model.deploy.contract == "adaptfm" else None
    used = _used(loaded)
    for name in sorted(used):
        entry = data.get(name)
        for other in sorted(measured):
            severity: Severity | None = "error" if other == strict else None
            part = next(key for key, value in parts.items() if value == other)
            if name == other:
                message = f"`{name}` is both trained on and measured with"
                yield Found(("evaluate", part, "data"), message, "measure with a prompt set of its own", severity)
            elif isinstance(entry, PromptSet) and other not in entry.exclude:
                listed = ", ".join([*entry.exclude, other])
                yield Found(
                    ("data", name),
                    f"`{name}` may share prompts with the held-out `{other}`",
                    f"write `exclude: [{listed}]` in `{name}`",
                    severity,
                    key=True,
                )
    yield from _tasks_of(loaded, used)


def _used(loaded: Loaded) -> set[str]:
    """Prompt sets that something learns from or is calibrated with."""
    used = {entry.prompts for entry in loaded.model.data.values() if isinstance(entry, Corpus)}
    if hasattr(loaded.model.target.base, "scratch"):
        used.add(loaded.model.target.base.scratch.training.data)
    return used


def _tasks_of(loaded: Loaded, used: set[str]) -> Iterator[Found]:
    """Where prompts are drawn from the dataset of a task that measures."""
    evaluate, strict = loaded.model.evaluate, loaded.model.deploy.contract == "adaptfm"
    for name in sorted(used):
        entry = loaded.model.data.get(name)
        for part in ("quality", "acceptance"):
            named = getattr(getattr(evaluate, part), "tasks", [])
            hit = [
                task for task in named if isinstance(entry, DatasetPrompts) and tasks.dataset_is(task, entry.hf_dataset)
            ]
            for task in hit:
                message = f"`{name}` is drawn from the dataset of the task `{task}`, which measures {part}"
                index = task if isinstance(named, dict) else named.index(task)
                severity: Severity | None = "error" if strict and part == "quality" else None
                hint = "draw from another dataset, or measure by another task"
                where = ("evaluate", part, "tasks", index), "measured by"
                yield Found(("data", name, "hf_dataset"), message, hint, severity, also=where)


@TOPIC.rule(
    "DAT10",
    "error",
    summary="What makes the target learns from a corpus that the target writes.",
    why="The corpus waits for the target and the target for the corpus.",
    fix="Use a corpus with `by: teacher`.",
    evidence="Follows from the order of the stages.",
    failing="target: {qad: {data: target_corpus}}",
    passing="target: {qad: {data: teacher_corpus}}",
    final="nothing can be built from it",
)
def target_is_not_its_own_teacher(loaded: Loaded) -> Iterator[Found]:
    model = loaded.model
    makers: list[tuple[str, Path_, str]] = []
    if model.target.qad is not None:
        makers.append(("QAD", ("target", "qad", "data"), model.target.qad.data))
    quantization = model.target.quantization
    if quantization.calibration is not None:
        place = ("target", "quantization", "calibration", "data")
        makers.append((f"the target's {(quantization.method or 'PTQ').upper()}", place, quantization.calibration.data))
    teachers = [name for name, entry in model.data.items() if isinstance(entry, Corpus) and entry.by == "teacher"]
    for what, path, name in makers:
        entry = model.data.get(name)
        if isinstance(entry, Corpus) and entry.by == "target":
            yield Found(
                path,
                f"{what} cannot use `{name}`: the target that writes it is made from it",
                f"use a corpus with `by: teacher`{': ' + ', '.join(teachers) if teachers else ''}",
                also=(("data", name, "by"), f"who writes `{name}`"),
            )
