"""What a recipe may say: every field, its type, unit and range.

Unknown fields are errors, numbers are strict, nothing that changes the product has a silent default.
Rules over several fields live in `qdc.rules`; this module does not know them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, GetJsonSchemaHandler, StrictInt, StrictStr, Tag
from pydantic_core import CoreSchema

Positive = Annotated[StrictInt, Field(gt=0)]
NonNegative = Annotated[StrictInt, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveReal = Annotated[float, Field(gt=0.0)]
Name = Annotated[StrictStr, Field(pattern=r"^[a-z0-9]+([._-][a-z0-9]+)*$", max_length=48)]
Word = Annotated[StrictStr, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=48)]


class Fields(BaseModel):
    """The base of all: extra fields forbidden, strict types, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema with the text under each field as its description: read here, because only the schema needs it."""
        made = handler(core_schema)
        properties = handler.resolve_ref_schema(made).get("properties", {})
        for name, text in _texts(cls).items():
            properties[cls.model_fields[name].alias or name]["description"] = text
        return made


def _texts(model: type[BaseModel]) -> dict[str, str]:
    """Field -> the string under it in the class's source."""
    import ast
    import inspect

    (definition,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


class Attention(Fields):
    heads: Positive
    """Query heads."""
    kv_heads: Positive
    """Key and value heads; divides `heads`."""
    head_dim: Positive
    """Width of a head."""


class LinearAttention(Fields):
    """Gated DeltaNet. vLLM 0.32's CPU prefill kernel takes 64 or 128 for `head_dim` only."""

    key_heads: Positive
    value_heads: Positive
    head_dim: Positive
    """Width of a key head and of a value head."""
    conv_kernel: Positive
    """Width of the causal depthwise convolution, in tokens."""


class TargetArchitecture(Fields):
    kind: Literal["qwen3_5"]
    hidden_size: Positive
    intermediate_size: Positive
    layers: Annotated[list[Literal["linear_attention", "full_attention"]], Field(min_length=1)]
    """Kind of each decoder layer, first to last."""
    attention: Attention
    linear_attention: LinearAttention
    rope_theta: PositiveReal
    max_position_embeddings: Positive
    init_range: PositiveReal
    """Standard deviation of the initial weights."""


class Tokenizer(Fields):
    kind: Literal["byte-bpe"]
    vocab_size: Annotated[StrictInt, Field(ge=300)]
    """Entries with the 256 bytes and the special tokens; also the rows of the embedding."""
    mask_token: StrictStr
    """Special token that stands for a token still to be drafted."""


class Muon(Fields):
    """Muon on matrices (update matched to AdamW's RMS), AdamW on all else."""

    kind: Literal["muon"]
    lr: PositiveReal
    momentum: Ratio
    betas: Annotated[list[Ratio], Field(min_length=2, max_length=2)]
    weight_decay: Annotated[float, Field(ge=0.0)]


class AdamW(Fields):
    kind: Literal["adamw"]
    lr: PositiveReal
    betas: Annotated[list[Ratio], Field(min_length=2, max_length=2)]
    weight_decay: Annotated[float, Field(ge=0.0)]


Optimizer = Annotated[Muon | AdamW, Field(discriminator="kind")]


class ScratchSchedule(Fields):
    kind: Literal["cosine"]
    warmup_steps: NonNegative
    final_ratio: Ratio
    """Learning rate at the last step, as a part of the peak."""


class ScratchBatch(Fields):
    sequences: Positive
    sequence_length: Positive
    """Tokens a sequence."""


class ScratchTraining(Fields):
    data: Word
    """Name of a prompt set under `data:`; trained on its prompts with their reference answers."""
    steps: Positive
    batch: ScratchBatch
    optimizer: Optimizer
    schedule: ScratchSchedule
    prompt_loss_weight: Ratio
    """Weight of the loss on tokens that are not the assistant's."""
    grad_clip: PositiveReal
    """Limit of the global norm of the mean gradient."""
    precision: Literal["float32", "bf16-autocast"]
    seed: NonNegative


class Scratch(Fields):
    """A small model that the recipe itself trains."""

    architecture: TargetArchitecture
    tokenizer: Tokenizer
    training: ScratchTraining


class ScratchSource(Fields):
    scratch: Scratch


class PathSource(Fields):
    path: StrictStr
    """Folder with a Hugging Face checkpoint, relative to the recipe file; pinned by its content digest."""


def _source_tag(value: Any) -> str:
    if isinstance(value, dict):
        return "path" if "path" in value and "scratch" not in value else "scratch"
    return "path" if isinstance(value, PathSource) else "scratch"


Source = Annotated[
    Annotated[ScratchSource, Tag("scratch")] | Annotated[PathSource, Tag("path")], Discriminator(_source_tag)
]


class Scheme(Fields):
    bits: Literal[4]
    group_size: Literal[32, 64, 128]
    """Input columns that share a scale (quantization group)."""
    symmetric: Literal[True]


class TargetCalibration(Fields):
    data: Word
    """Name of a corpus under `data:`."""
    conversations: Positive
    damp: PositiveReal
    """Part of the Hessian's mean diagonal added to it."""


class RtnGrid(Fields):
    method: Literal["rtn"]


class GptqGrid(Fields):
    method: Literal["gptq"]
    calibration: TargetCalibration


Grid = Annotated[RtnGrid | GptqGrid, Field(discriminator="method")]


class Quantization(Fields):
    grid: Grid
    """Where codes and scales come from."""
    scheme: Scheme
    ignore: list[StrictStr]
    """Linear modules that stay BF16: exact names, or `re:` patterns matched from the start."""


class Loss(Fields):
    kind: Literal["forward-kl"]
    temperature: PositiveReal


class QadSchedule(Fields):
    kind: Literal["cosine"]
    warmup_ratio: Ratio
    steps: Positive
    """Optimizer steps."""


class QadBatch(Fields):
    effective: Positive
    """Sequences an optimizer step, over all devices and accumulation steps."""
    sequence_length: Positive


class Select(Fields):
    metric: Literal["heldout-kl"]


class Checkpoints(Fields):
    every: Positive
    """Optimizer steps between checkpoints."""
    select: Select


class Qad(Fields):
    """Quantization-aware distillation on a frozen grid."""

    data: Word
    """Name of a corpus under `data:`, made by the teacher."""
    trainable: Literal["quantized-weights", "all"]
    loss: Loss
    optimizer: AdamW
    schedule: QadSchedule
    batch: QadBatch
    heldout_ratio: Annotated[float, Field(gt=0.0, lt=1.0)]
    """Part of the corpus kept for choosing the checkpoint."""
    grad_clip: PositiveReal
    checkpoints: Checkpoints
    seed: NonNegative


class Target(Fields):
    base: Source
    quantization: Quantization
    qad: Qad | None = None


class Synthetic(Fields):
    kind: Literal["arithmetic-chat"]
    count: Positive
    """Rows kept after removing duplicates and excluded prompts."""
    seed: NonNegative


class PromptSet(Fields):
    synthetic: Synthetic
    exclude: list[Word] = []
    """Prompt sets whose prompts (by normalised text) must not occur here."""


class Sampling(Fields):
    temperature: Annotated[float, Field(ge=0.0)]
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]
    top_k: NonNegative
    """0 is no limit."""
    max_tokens: Positive
    seed: NonNegative


class Corpus(Fields):
    prompts: Word
    by: Literal["teacher", "target"]
    """Which model writes the answers."""
    sampling: Sampling
    truncated: Literal["keep", "drop"]
    """What happens to an answer cut by `max_tokens`."""


def _data_tag(value: Any) -> str:
    if isinstance(value, dict):
        return "corpus" if "by" in value or "prompts" in value else "prompts"
    return "corpus" if isinstance(value, Corpus) else "prompts"


Data = Annotated[Annotated[PromptSet, Tag("prompts")] | Annotated[Corpus, Tag("corpus")], Discriminator(_data_tag)]


class DrafterArchitecture(Fields):
    """DFlash (arXiv 2607.04244, section 3): taps enter as extra keys and values of every layer."""

    kind: Literal["dflash"]
    layers: Positive
    hidden_size: Positive
    intermediate_size: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    draft_block_size: Annotated[StrictInt, Field(ge=2)]
    """Tokens a draft block: one anchor and the masks."""
    taps: Annotated[list[NonNegative], Field(min_length=1)]
    """Target layers whose outputs feed the drafter (z-lab convention: i is the output of layer i)."""
    mask_token: StrictStr
    rope_theta: PositiveReal
    max_position_embeddings: Positive
    init_range: PositiveReal


class DraftSchedule(Fields):
    kind: Literal["cosine"]
    warmup_ratio: Ratio


class DraftBatch(Fields):
    conversations: Positive


class DraftTraining(Fields):
    name: Word
    taps_from: Literal["teacher", "target"]
    data: Word
    from_: Word | None = Field(default=None, alias="from")
    """Earlier training whose weights (and nothing else) this one starts from."""
    steps: Positive
    batch: DraftBatch
    anchors: Positive
    """Draft blocks drawn from each conversation a step."""
    loss_decay: PositiveReal
    """Gamma: weight of slot j is exp(-(j-1)/gamma)."""
    max_length: Positive
    """Tokens a conversation, cut at the right."""
    optimizer: Optimizer
    schedule: DraftSchedule
    grad_clip: PositiveReal
    seed: NonNegative


class DrafterCalibration(Fields):
    data: Word
    conversations: Positive
    anchors: Positive
    """Draft blocks taken from each conversation."""
    seed: NonNegative


class DrafterPtq(Fields):
    method: Literal["rtn", "gptq"]
    scheme: Scheme
    ignore: list[StrictStr]
    calibration: DrafterCalibration
    damp: PositiveReal


class Swa(Fields):
    """Sliding window of the drafter's attention (never the target's)."""

    window: Positive
    """W: a query at position p sees keys from p-(W-1) to p+(W-1)."""
    semantics: Literal["symmetric-per-query"]
    apply: Literal["always"]
    """vLLM 0.32 applies a native window at every length."""


class Drafter(Fields):
    architecture: DrafterArchitecture
    training: Annotated[list[DraftTraining], Field(min_length=1)]
    ptq: DrafterPtq | None = None
    swa: Swa | None = None


class Engine(Fields):
    vllm: StrictStr
    """Version, quoted."""
    platform: Literal["cpu"]
    prefix_caching: Literal[False]
    """Speculation on a hybrid target needs it off (vLLM 0.32 CPU fails otherwise)."""
    patches: list[StrictStr]
    """Declared patches, by name; each is in the image and in the manifest by digest."""


class Serve(Fields):
    engine: Engine
    k: Positive | None = None
    """Draft tokens proposed a step (`num_speculative_tokens`)."""
    max_model_len: Positive
    """Tokens a request, prompt and answer."""
    max_num_seqs: Positive
    dtype: Literal["bfloat16"]
    chat_template: StrictStr
    """Jinja file, relative to the recipe."""


class SizeLimit(Fields):
    bytes: PositiveReal
    of: Literal["docker-save"]


class Deploy(Fields):
    hardware: Literal["cpu"]
    contract: Literal["adaptfm"]
    size_limit: SizeLimit | None = None


class DebianBase(Fields):
    debian: Literal["bookworm"]


class ScratchBase(Fields):
    scratch: Literal[True]
    """No base at all: the image is data that cannot start (for tests and audits)."""


def _image_tag(value: Any) -> str:
    if isinstance(value, dict):
        return "scratch" if "scratch" in value else "debian"
    return "scratch" if isinstance(value, ScratchBase) else "debian"


class Image(Fields):
    base: Annotated[
        Annotated[DebianBase, Tag("debian")] | Annotated[ScratchBase, Tag("scratch")], Discriminator(_image_tag)
    ]


class QualityEvaluation(Fields):
    data: Word
    """Prompt set that no training saw."""
    prompts: Positive
    max_tokens: Positive


class AcceptanceEvaluation(Fields):
    data: Word
    prompts: Positive
    max_tokens: Positive


class Evaluate(Fields):
    quality: QualityEvaluation | None = None
    acceptance: AcceptanceEvaluation | None = None


class Accept(Fields):
    rule: StrictStr
    because: Annotated[StrictStr, Field(min_length=8)]


class Recipe(Fields):
    """One served image, from nothing to its name."""

    version: Literal[1]
    name: Name
    target: Target
    data: dict[Word, Data]
    drafter: Drafter | None = None
    serve: Serve
    deploy: Deploy
    image: Image
    evaluate: Evaluate
    accept: list[Accept] = []
