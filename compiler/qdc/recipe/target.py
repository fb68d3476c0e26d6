"""A recipe's `target`: the teacher, its quantization grid, and QAD."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictInt, StrictStr, Tag

from qdc.recipe.fields import (
    AdamW,
    Checkpoint,
    Fields,
    HubSource,
    NonNegative,
    Optimizer,
    PathSource,
    Positive,
    PositiveReal,
    Ratio,
    Scheme,
    UrlSource,
    WheelSource,
    Word,
    tagged,
)


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
    """Key and query heads."""
    value_heads: Positive
    """Value heads; a multiple of `key_heads`."""
    head_dim: Positive
    """Width of a key head and of a value head."""
    conv_kernel: Positive
    """Width of the causal depthwise convolution, in tokens."""


class TargetArchitecture(Fields):
    kind: Literal["qwen3_5"]
    """Model family (`model_type` of its configuration)."""
    hidden_size: Positive
    """Width of the residual stream."""
    intermediate_size: Positive
    """Width of the feed-forward layers."""
    layers: Annotated[list[Literal["linear_attention", "full_attention"]], Field(min_length=1)]
    """Kind of each decoder layer, first to last."""
    attention: Attention
    """Of the `full_attention` layers."""
    linear_attention: LinearAttention
    """Of the `linear_attention` layers."""
    rope_theta: PositiveReal
    """Base of the rotary position embedding."""
    max_position_embeddings: Positive
    """Longest position, in tokens."""
    init_range: PositiveReal
    """Standard deviation of the initial weights."""


class Tokenizer(Fields):
    kind: Literal["byte-bpe"]
    """Byte-level byte-pair encoding, trained on the prompts of the training."""
    vocab_size: Annotated[StrictInt, Field(ge=300)]
    """Entries with the 256 bytes and the special tokens; also the rows of the embedding."""
    mask_token: StrictStr
    """Special token that stands for a token still to be drafted."""


class ScratchSchedule(Fields):
    kind: Literal["cosine"]
    """Linear warm-up, then a half cosine."""
    warmup_steps: NonNegative
    """Optimizer steps of warm-up."""
    final_ratio: Ratio
    """Learning rate at the last step, as a part of the peak."""


class ScratchBatch(Fields):
    sequences: Positive
    """Sequences a step."""
    sequence_length: Positive
    """Tokens a sequence."""


class ScratchTraining(Fields):
    data: Word
    """Name of a prompt set under `data:`; trained on its prompts with their reference answers."""
    steps: Positive
    """Optimizer steps."""
    batch: ScratchBatch
    """Sequences of one optimizer step."""
    optimizer: Optimizer
    """Kind and settings."""
    schedule: ScratchSchedule
    """Course of the learning rate."""
    prompt_loss_weight: Ratio
    """Weight of the loss on tokens that are not the assistant's."""
    grad_clip: PositiveReal
    """Limit of the global norm of the mean gradient."""
    precision: Literal["float32", "bf16-autocast"]
    """Precision of matrix products; weights and optimizer stay FP32."""
    seed: NonNegative
    """Of initial weights and of the order of the data."""


class Scratch(Fields):
    """A small model that the recipe itself trains."""

    architecture: TargetArchitecture
    """Kind of layers and their sizes."""
    tokenizer: Tokenizer
    """Trained with the model."""
    training: ScratchTraining
    """Next-token training."""


class ScratchSource(Fields):
    scratch: Scratch
    """The teacher is trained by this recipe."""


Base = Annotated[
    Annotated[ScratchSource, Tag("scratch")]
    | Annotated[HubSource, Tag("hf")]
    | Annotated[PathSource, Tag("path")]
    | Annotated[UrlSource, Tag("url")]
    | Annotated[WheelSource, Tag("wheel")],
    tagged("scratch", "hf", "path", "url", "wheel"),
]


class TargetCalibration(Fields):
    data: Word
    """Name of a corpus under `data:`, made by the teacher."""
    conversations: Positive
    """Conversations read."""
    damp: PositiveReal | None = None
    """GPTQ: part of the Hessian's mean diagonal added to it. AWQ has none."""


class Quantization(Fields):
    grid: Checkpoint | None = None
    """A published quantized checkpoint whose codes and scales are taken as they are. Or `method`."""
    method: Literal["rtn", "gptq", "awq"] | None = None
    """How a grid is made here: round to nearest, GPTQ, or AWQ. Or `grid`."""
    calibration: TargetCalibration | None = None
    """What GPTQ and AWQ look at."""
    scheme: Scheme
    """Of all quantized modules."""
    ignore: list[StrictStr]
    """Linear modules that stay BF16: exact names, or `re:` patterns matched from the start."""


class Loss(Fields):
    kind: Literal["forward-kl"]
    """KL of teacher || student, mean over tokens."""
    temperature: PositiveReal
    """Divides both models' logits."""


class QadSchedule(Fields):
    kind: Literal["cosine"]
    """Linear warm-up, then a half cosine to 0."""
    warmup_ratio: Ratio
    """Part of the steps that warm up."""
    steps: Positive
    """Optimizer steps."""


class QadBatch(Fields):
    effective: Positive
    """Sequences an optimizer step, over all devices and accumulation steps."""
    sequence_length: Positive
    """Tokens a sequence."""


class Select(Fields):
    metric: Literal["heldout-kl", "mean-accuracy"] | None = None
    """Choose the checkpoint with the lowest held-out KL, or the highest mean accuracy over `tasks`. Or `step`."""
    tasks: Annotated[list[StrictStr], Field(min_length=1)] | None = None
    """lm-eval tasks of `mean-accuracy`."""
    step: Positive | None = None
    """Take the checkpoint of this step, as a published recipe names it. Or `metric`."""


class Checkpoints(Fields):
    every: Positive
    """Optimizer steps between checkpoints."""
    select: Select | None = None
    """Which checkpoint is packed."""


class Qad(Fields):
    """Quantization-aware distillation on a frozen grid."""

    data: Word
    """Name of a corpus under `data:`, made by the teacher."""
    trainable: Literal["quantized-weights", "all"]
    """What is trained: quantized weights only (arXiv 2607.04244), or everything but the scales (the code published
    with it)."""
    loss: Loss
    """What the student minimizes."""
    optimizer: AdamW
    """Kind and settings."""
    schedule: QadSchedule
    """Course of the learning rate."""
    batch: QadBatch
    """Sequences of one optimizer step."""
    heldout_ratio: Annotated[float, Field(gt=0.0, lt=1.0)]
    """Part of the corpus kept for choosing the checkpoint."""
    grad_clip: PositiveReal
    """Limit of the gradient's global norm."""
    clip_of: Literal["mean", "sum"]
    """What `grad_clip` limits: the mean over the batch, or the sum over its sequences, as the published code does,
    which clips at 1 / `batch.effective` of the mean."""
    kl_chunk_tokens: Positive | None = None
    """Tokens whose logits are held at once; null is a whole sequence."""
    checkpoints: Checkpoints
    """When they are written, and which one is taken."""
    seed: NonNegative
    """Of the order of the data and of the held-out part."""


class Eos(Fields):
    """Token ids that end an answer, where they differ from the base's on purpose."""

    generation_config: list[NonNegative]
    """`eos_token_id` of generation_config.json."""
    config: list[NonNegative]
    """`eos_token_id` of config.json."""


class Target(Fields):
    base: Base
    """The teacher: what is quantized, and what QAD learns from."""
    quantization: Quantization
    """The grid and what it leaves out."""
    qad: Qad | None = None
    """Distillation on the grid; null serves the grid as it is."""
    eos: Eos | None = None
    """End-of-answer ids; null keeps the base's."""
