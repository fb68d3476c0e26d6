"""What `qdc explain` says about each finding of a recipe's text and shape.

A finding's id is stable and never reused. Rules that compare fields are in `qdc.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """`summary`: what fires it; `evidence`: what is known, in own words, with its source.

    `failing` and `passing`: parts of a recipe. `final`: why a recipe cannot accept it; None where it can.
    """

    id: str
    severity: Literal["error", "warning", "note"]
    summary: str
    why: str
    fix: str
    evidence: str
    failing: str
    passing: str
    final: str | None = None


_TEXT = "the recipe could be read in two ways"
_SHAPE = "a value is not what the field takes"

FINDINGS = [
    Finding(
        "YML01",
        "error",
        "A number field holds quoted text.",
        "Text that looks like a number is compared and added wrongly, and an optimizer meets it late.",
        "Write the number without quotes; `2e-6`, `1E5` and `.5` are numbers here, as in YAML 1.2.",
        "Readers of YAML 1.1 take an unquoted `2e-6` as text, so people quote it: "
        "https://github.com/hiyouga/LlamaFactory/issues/4014",
        'serve: {k: "7"}',
        "serve: {k: 7}",
        _SHAPE,
    ),
    Finding(
        "YML02",
        "error",
        "One mapping has the same key twice.",
        "Most readers keep the last value without a word, so what you see first is not what is built.",
        "Delete one of the two lines.",
        "A doubled `max_length` became 262144 instead of 1024: https://github.com/snowflakedb/ArcticTraining/issues/85",
        "serve: {k: 7, k: 5}",
        "serve: {k: 7}",
        _TEXT,
    ),
    Finding(
        "YML03",
        "error",
        "A field is not one that the recipe has at that place.",
        "A reader that drops unknown fields uses the default instead, and nobody sees it.",
        "Write the nearest field's name, move the field to where it belongs, or remove it.",
        "A reader that drops unknown fields hides misspelt ones: https://github.com/UMEP-dev/SUEWS/issues/1647",
        "serve: {kk: 7}",
        "serve: {k: 7}",
        _SHAPE,
    ),
    Finding(
        "YML04",
        "error",
        "An unquoted word is `y`, `n`, `yes`, `no`, `on` or `off`, in any case.",
        "YAML 1.1 reads a boolean and YAML 1.2 a word, so two readers see two recipes.",
        "Write `true` or `false` for the truth value, or put the word in quotes.",
        "A configuration server stored `NO` as false: https://github.com/alibaba/nacos/issues/12969",
        "name: no",
        'name: "no"',
        _TEXT,
    ),
    Finding(
        "YML05",
        "error",
        "A mapping has the merge key `<<`.",
        "Merge keys are in YAML 1.1 only; checkers that do not know them skip what they bring in.",
        "Write the fields out.",
        "Schema checks and merge keys disagree: https://github.com/redhat-developer/vscode-yaml/issues/241",
        "x: &x {k: 7}\nserve: {<<: *x}",
        "serve: {k: 7}",
        _TEXT,
    ),
    Finding(
        "YML06",
        "error",
        "A version is a number.",
        "As a number `0.30` is `0.3`, another release.",
        "Put the version in quotes.",
        "`3.10` became 3.1 in many build files: https://github.com/actions/setup-python/issues/198",
        "serve: {engine: {vllm: 0.32}}",
        'serve: {engine: {vllm: "0.32.0"}}',
        _SHAPE,
    ),
    Finding(
        "YML07",
        "error",
        "A commit or a digest is a number.",
        "A hash of digits only, or of digits around an `e`, is read as a number, and its digits are lost.",
        "Put the hash in quotes.",
        "A commit of digits only became a number in a workflow: "
        "https://github.com/github/codeql-variant-analysis-action/pull/845",
        "target: {base: {revision: 4225332178759948e04347560002921719079454}}",
        'target: {base: {revision: "4225332178759948e04347560002921719079454"}}',
        _SHAPE,
    ),
    Finding(
        "YML08",
        "error",
        "The recipe is not one readable UTF-8 document whose top level is a mapping.",
        "A default in place of a recipe that cannot be read would build another model under your name.",
        "Give the path of an existing UTF-8 file with one document in it.",
        "A public serving script returns its defaults when its file is missing: "
        "https://github.com/nota-github/adaptfm-quant-dflash (src/serving/config.py)",
        "- version: 1",
        "version: 1",
        _TEXT,
    ),
    Finding(
        "YML10",
        "error",
        "The text is not YAML.",
        "Nothing can be known of the section where the reader lost its way; the others are still checked.",
        "Close the bracket or quote, or indent the line as its neighbours are.",
        "YAML 1.2.2, chapters 7 and 8: https://yaml.org/spec/1.2.2/",
        "serve: {k: 7",
        "serve: {k: 7}",
        _TEXT,
    ),
    Finding(
        "YML11",
        "error",
        "A number has a leading zero.",
        "YAML 1.1 reads `0644` as octal 420, YAML 1.2 as 644, and `08` as text.",
        "Drop the zero, or put the value in quotes if it is text.",
        "Measured with two readers of YAML: `0644` is 420 in one and 644 in the other.",
        "serve: {k: 07}",
        "serve: {k: 7}",
        _TEXT,
    ),
    Finding(
        "YML12",
        "error",
        "A line is indented with a tab.",
        "YAML does not allow it, and how deep a tab is depends on the editor.",
        "Indent with spaces.",
        "YAML 1.2.2, section 6.1: https://yaml.org/spec/1.2.2/",
        "serve:\n\tk: 7",
        "serve:\n  k: 7",
        _TEXT,
    ),
    Finding(
        "YML13",
        "error",
        "A line is a merge conflict marker.",
        "Two versions of the recipe are in the file, and only you know which one is meant.",
        "Keep one side and delete the marker lines.",
        "Follows from how version control writes conflicts.",
        "<<<<<<< ours\nname: a\n=======\nname: b\n>>>>>>> theirs",
        "name: a",
        _TEXT,
    ),
    Finding(
        "YML14",
        "error",
        "The file holds what no reader can keep: too much, too deep, itself, or half a letter.",
        "An alias can stand for billions of values, and half of a surrogate pair cannot be written as UTF-8.",
        "Write the values out, and only as many as a recipe needs.",
        "Follows from the limits: 1 MiB, 64 levels, 100,000 values, what a 64-bit float can hold.",
        "name: &x [*x]",
        "name: x",
        _TEXT,
    ),
    Finding(
        "YML15",
        "error",
        "A value has an explicit tag.",
        "Some readers obey a tag and some drop it, so that `!!str 7` is text to one and a number to another.",
        "Write the value alone: quotes make it text, none leave it what it looks like.",
        "YAML 1.2.2, section 6.8.2: https://yaml.org/spec/1.2.2/",
        "serve: {k: !!str 7}",
        "serve: {k: 7}",
        _TEXT,
    ),
    Finding(
        "SCH01",
        "error",
        "A field that the recipe needs is missing.",
        "What changes the product has no hidden default.",
        "Add the field; the help says what it takes.",
        "Follows from the design: two people who read the recipe must see the same product.",
        "deploy: {hardware: cpu}",
        "deploy: {hardware: cpu, contract: adaptfm}",
        _SHAPE,
    ),
    Finding(
        "SCH02",
        "error",
        "A value is of another type than its field.",
        "Numbers, text, lists and mappings are not converted into each other: the conversion would be a guess.",
        "Write a value of the type that the message names.",
        "Follows from the schema, schema/recipe.schema.json.",
        "serve: {k: seven}",
        "serve: {k: 7}",
        _SHAPE,
    ),
    Finding(
        "SCH03",
        "error",
        "A value is not one of those that its field takes.",
        "Every alternative is another product, so a near miss cannot be guessed.",
        "Write one of the values that the message names.",
        "Follows from the schema, schema/recipe.schema.json.",
        "target: {quantization: {scheme: {group_size: 48}}}",
        "target: {quantization: {scheme: {group_size: 32}}}",
        _SHAPE,
    ),
    Finding(
        "SCH04",
        "error",
        "A value is out of its field's range or form.",
        "The stage that reads it could not do what it says, or would do it only after hours.",
        "Write a value within the limit that the help names.",
        "Follows from the schema, schema/recipe.schema.json.",
        "serve: {max_num_seqs: 0}",
        "serve: {max_num_seqs: 4}",
        _SHAPE,
    ),
    Finding(
        "SRC01",
        "error",
        "A source of a hub has no commit.",
        "A branch or a tag may name other bytes tomorrow, so the build could not be repeated.",
        "Write the 40 hex digits of the commit as `revision`, then `qdc lock`.",
        "Fourteen loads of models without a commit had to be pinned later: "
        "https://github.com/NVIDIA/NeMo-Retriever/pull/1499",
        "target: {base: {revision: main}}",
        "target: {base: {revision: 851bf6e806efd8d0a36b00ddf55e13ccb7b8cd0a}}",
        "it could not be built twice",
    ),
    Finding(
        "SRC02",
        "error",
        "The base image of a registry is not named by its digest.",
        "A tag can be moved, and tags of releases have been.",
        "Write `NAME@sha256:` and the 64 hex digits of the digest.",
        "A release's tag was published again with other content: https://github.com/NetApp/trident/issues/1177",
        "image: {base: {ref: docker.io/vllm/vllm-openai:v0.25.1}}",
        "image:\n  base:\n    ref: docker.io/vllm/vllm-openai@sha256:" + "1f" * 32,
        "it could not be built twice",
    ),
    Finding(
        "SRC03",
        "error",
        "A file at a URL or in a wheel has no SHA-256.",
        "A URL promises nothing about its bytes.",
        "Write the SHA-256 of the file, 64 hex digits, as `sha256`.",
        "Follows from what a URL is.",
        "target: {quantization: {grid: {url: https://example.org/grid.tar}}}",
        "target:\n  quantization:\n    grid:\n      url: https://example.org/grid.tar\n      sha256: " + "1f" * 32,
        "it could not be built twice",
    ),
    Finding(
        "QAD01",
        "error",
        "It is not said which weights QAD trains.",
        "The paper of the method and the code published with it differ, and so do their products.",
        "Write `trainable: quantized-weights` (the paper) or `trainable: all` (the code: all but the scales).",
        "Disputed. The paper trains the quantized weights only: https://arxiv.org/abs/2607.04244; its code freezes the "
        "scales only: https://github.com/nota-github/adaptfm-quant-dflash (src/qad/train_cyankiwi_v2.py)",
        "target: {qad: {trainable: null}}",
        "target: {qad: {trainable: quantized-weights}}",
        _SHAPE,
    ),
    Finding(
        "DAT01",
        "error",
        "It is not said what happens to answers that `max_tokens` cut.",
        "Of long answers a third to a half are cut, so that size and content of the corpus depend on it.",
        "Write `truncated: keep` or `truncated: drop`.",
        "35 % of a public corpus was cut at 2048 tokens: https://github.com/vllm-project/speculators/pull/835",
        "data: {teacher_corpus: {truncated: null}}",
        "data: {teacher_corpus: {truncated: drop}}",
        _SHAPE,
    ),
    Finding(
        "SRC12",
        "error",
        "The chat template cannot be read, or is not below the recipe's folder.",
        "The image's manifest names its path and digest, so it must travel with the recipe.",
        "Copy the template beside the recipe and name it relative to the recipe's folder.",
        "Follows from the design: a recipe and its folder are all that a build needs.",
        "serve: {chat_template: /etc/hostname}",
        "serve: {chat_template: templates/chatml.jinja}",
        "nothing can be built from it",
    ),
]
