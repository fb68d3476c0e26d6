"""A recipe's `drafter`: its kind and shape, its trainings, its PTQ and its window."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictInt, StrictStr

from qdc.recipe.fields import Checkpoint, Fields, NonNegative, Optimizer, Positive, PositiveReal, Ratio, Scheme, Word


class BlockDrafter(Fields):
    """Drafts a block at once from taps of the target (DFlash, arXiv 2602.06036; vLLM runs its kin by `kind`)."""

    kind: Literal["dflash", "dflash2", "dspark", "lilicorr", "xpress"]
    """`dflash` is trained here; its kin are served from a `checkpoint`."""
    draft_block_size: Annotated[StrictInt, Field(ge=2)]
    """Tokens a draft block: one anchor and the masks."""
    taps: Annotated[list[NonNegative], Field(min_length=1)]
    """Target layers whose outputs feed the drafter (z-lab convention: i is the output of layer i)."""
    mask_token: StrictStr | None = None
    """Special token of an empty slot. Or `mask_token_id`."""
    mask_token_id: NonNegative | None = None
    """Id of the token of an empty slot. Or `mask_token`."""
    layers: Positive | None = None
    """Decoder layers."""
    hidden_size: Positive | None = None
    """Width of the residual stream; the target's, unless `target_hidden_size` is given."""
    intermediate_size: Positive | None = None
    """Width of the feed-forward layers."""
    heads: Positive | None = None
    """Query heads."""
    kv_heads: Positive | None = None
    """Key and value heads; divides `heads`."""
    head_dim: Positive | None = None
    """Width of a head."""
    rope_theta: PositiveReal | None = None
    """Base of the rotary position embedding."""
    partial_rotary_factor: Ratio | None = None
    """Part of a head that is rotated; null is all of it."""
    max_position_embeddings: Positive | None = None
    """Longest position, in tokens."""
    init_range: PositiveReal | None = None
    """Standard deviation of the initial weights."""
    target_hidden_size: Positive | None = None
    """Width of the taps where it is not `hidden_size`."""
    draft_vocab_size: Positive | None = None
    """Rows of the drafter's own, smaller head; null shares the target's."""
    sample_from_anchor: bool = False
    """The anchor's slot drafts too, so that K may be the draft block size."""
    allow_k_mismatch: bool = False
    """K past the draft block on purpose, for an engine that extends it."""


class MtpDrafter(Fields):
    """The target's own multi-token-prediction head."""

    kind: Literal["mtp"]


class ModelDrafter(Fields):
    """Another trained proposer, served from a `checkpoint`."""

    kind: Literal["eagle", "eagle3", "peagle", "draft-model", "medusa", "mlp-speculator"]
    draft_vocab_size: Positive | None = None
    """Rows of the drafter's own, smaller head; null is the target's vocabulary."""


class NgramDrafter(Fields):
    """Copies what followed the last tokens earlier in the text."""

    kind: Literal["ngram"]
    prompt_lookup_min: Positive
    """Fewest tokens that must match."""
    prompt_lookup_max: Positive
    """Most tokens that are matched."""


class SuffixDrafter(Fields):
    """Copies from a tree of suffixes of this and earlier answers."""

    kind: Literal["suffix"]
    max_tree_depth: Positive
    """Longest match plus draft, in tokens."""
    max_cached_requests: NonNegative
    """Earlier answers kept; 0 drafts from the request alone."""
    max_spec_factor: PositiveReal
    """Draft tokens for each matched token, at most."""
    min_token_prob: Ratio
    """Least estimated probability of a drafted token."""


Architecture = Annotated[
    BlockDrafter | MtpDrafter | ModelDrafter | NgramDrafter | SuffixDrafter, Field(discriminator="kind")
]


class DraftSchedule(Fields):
    kind: Literal["cosine"]
    """Linear warm-up, then a half cosine to 0."""
    warmup_ratio: Ratio
    """Part of the steps that warm up."""


class DraftBatch(Fields):
    conversations: Positive
    """Conversations an optimizer step, over all devices and accumulation steps."""


class DraftTraining(Fields):
    name: Word
    """Name of this training; the stage is `draft-train:NAME`."""
    taps_from: Literal["teacher", "target"]
    """Whose taps the drafter sees: the BF16 teacher's, or the served target's (its dense twin)."""
    data: Word
    """Name of a corpus under `data:`."""
    from_: Word | None = Field(default=None, alias="from")
    """Earlier training whose weights (and nothing else) this one starts from."""
    init: Checkpoint | None = None
    """Published drafter whose weights (and nothing else) this one starts from."""
    steps: Positive | None = None
    """Optimizer steps. Or `epochs`."""
    epochs: Positive | None = None
    """Passes over the corpus. Or `steps`."""
    batch: DraftBatch
    """Conversations of one optimizer step."""
    anchors: Positive
    """Draft blocks drawn from each conversation a step."""
    loss_decay: PositiveReal
    """Gamma: weight of slot j is exp(-(j-1)/gamma)."""
    max_length: Positive
    """Tokens a conversation, cut at the right."""
    optimizer: Optimizer
    """Kind and settings."""
    schedule: DraftSchedule
    """Course of the learning rate."""
    grad_clip: PositiveReal
    """Limit of the global norm of the mean gradient."""
    seed: NonNegative
    """Of the order of the data and of the anchors."""


class Bucket(Fields):
    share: Ratio
    """Part of the conversations."""
    floor: NonNegative
    """Fewest conversations."""


class DrafterCalibration(Fields):
    data: Word
    """Name of a corpus under `data:`."""
    conversations: Positive
    """Conversations used, after those without room for a draft block are left out."""
    anchors: Positive
    """Draft blocks taken from each conversation."""
    mix: dict[Word, Bucket] | None = None
    """Kind of conversation -> how many; null takes them as they come."""
    seed: NonNegative
    """Of the draw."""


class DrafterPtq(Fields):
    method: Literal["rtn", "gptq", "awq"]
    """Round to nearest, GPTQ, or AWQ."""
    scheme: Scheme
    """Of all quantized modules."""
    ignore: list[StrictStr]
    """Linear modules that stay BF16: `re:` patterns matched against the engine's names (`model.fc`,
    `model.layers.{target layers + i}...`)."""
    calibration: DrafterCalibration
    """What GPTQ and AWQ look at."""
    damp: PositiveReal
    """GPTQ: part of the Hessian's mean diagonal added to it."""


class Swa(Fields):
    """Sliding window of the drafter's attention (never the target's)."""

    window: NonNegative
    """W: a query at position p sees keys from p-(W-1) to p+(W-1)."""
    semantics: Literal["symmetric-per-query", "anchor-left", "rotating-kv"]
    """What a window means: vLLM counts from each query, speculators trains from the anchor, z-lab's MLX evicts."""
    apply: Literal["always", "above-window"]
    """`always` is an engine's own window; `above-window` switches it on for long requests only, by a patch."""


class Drafter(Fields):
    architecture: Architecture
    """Kind and shape."""
    checkpoint: Checkpoint | None = None
    """A published drafter, served as it is. Or `training`."""
    training: Annotated[list[DraftTraining], Field(min_length=1)] | None = None
    """Trainings, first to last; the last one's drafter is quantized and served. Or `checkpoint`."""
    ptq: DrafterPtq | None = None
    """Quantization of the drafter; null serves it as it is."""
    swa: Swa | None = None
    """Sliding window; null is full attention."""

    @property
    def block(self) -> BlockDrafter | None:
        """The architecture where it drafts blocks from taps, else None."""
        return self.architecture if isinstance(self.architecture, BlockDrafter) else None

    @property
    def trainings(self) -> list[DraftTraining]:
        """Trainings, first to last; none for a drafter that is not trained here."""
        return self.training or []
