"""A recipe's `serve`, `deploy`, `image` and `evaluate`: how it runs, where, in what, and how it is measured."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictInt, StrictStr, Tag

from qdc.recipe.fields import Fields, Positive, PositiveReal, Ratio, Word, tagged


class Engine(Fields):
    vllm: StrictStr
    """Version, quoted."""
    platform: Literal["cpu", "cuda"]
    """Build of the engine."""
    runner: Literal["v1", "v2"] | None = None
    """vLLM's model runner; null is the version's default."""
    prefix_caching: bool
    """Reuse of the KV cache of equal prefixes. Speculation on a hybrid target needs it off on CPU, and has been
    corrupted by it on GPU."""
    patches: list[StrictStr]
    """Declared patches, by name; each is in the image and in the manifest by digest."""


class Serve(Fields):
    engine: Engine
    """Which engine, and what is changed in it."""
    k: Positive | None = None
    """Draft tokens proposed a step (`num_speculative_tokens`)."""
    max_model_len: Positive
    """Tokens a request, prompt and answer."""
    max_num_seqs: Positive
    """Requests at a time."""
    max_num_batched_tokens: Positive | None = None
    """Tokens a step, over all requests; null is the engine's default."""
    gpu_memory_utilization: Ratio | None = None
    """Part of the card's memory that the engine may use; required on a GPU, meaningless on CPU."""
    dtype: Literal["bfloat16", "float16", "float32"]
    """Of activations and unquantized weights."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"] = "auto"
    """Of the KV cache; `auto` is `dtype`."""
    state_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the recurrent state of linear attention (`mamba_ssm_cache_dtype`); `auto` is the model's."""
    attention_backend: StrictStr | None = None
    """Attention kernels of target and drafter; null lets the engine choose."""
    eager: bool = False
    """Without CUDA graphs."""
    cudagraph_capture_sizes: list[Positive] | None = None
    """Token counts with a CUDA graph; null writes every multiple of 1 + K up to `max_num_seqs`."""
    rejection: Literal["standard", "strict", "probabilistic", "block", "synthetic", "fly"] = "standard"
    """How drafts are accepted (`rejection_sample_method`)."""
    chat_template: StrictStr
    """Jinja file, relative to the recipe."""


class SizeLimit(Fields):
    bytes: PositiveReal
    """Largest size."""
    of: Literal["docker-save", "docker-save-gzip"]
    """What is weighed: the archive that `docker save` writes, or the same compressed."""


class Driver(Fields):
    cuda: Annotated[StrictStr, Field(pattern=r"^[0-9]+\.[0-9]+$")]
    """Highest CUDA version that the host's driver runs, quoted."""


class Deploy(Fields):
    hardware: StrictStr
    """Row of the hardware table: the card, or `cpu`."""
    contract: Literal["adaptfm", "sagemaker", "openai"]
    """What the image must answer to."""
    driver: Driver | None = None
    """The host's driver; null where it is not known."""
    size_limit: SizeLimit | None = None
    """Largest image that may be handed over; null is none."""


class DebianBase(Fields):
    debian: Literal["bookworm"]
    """A minimal Debian with Python, made here from its packages."""


class ScratchBase(Fields):
    scratch: Literal[True]
    """No base at all: the image is data that cannot start (for tests and audits)."""


class RefBase(Fields):
    """An image of a registry; `qdc lock` fetches it."""

    ref: Annotated[StrictStr, Field(pattern=r"^[a-z0-9][^\s@]*@sha256:[0-9a-f]{64}$")]
    """Image of a registry, `NAME@sha256:DIGEST`; it brings the engine."""


class OciBase(Fields):
    """An image in a folder."""

    oci: StrictStr
    """OCI layout folder, relative to the recipe; pinned by its content digest. It brings the engine."""


class ArchiveBase(Fields):
    """An image in a file."""

    archive: StrictStr
    """Archive as `docker save`, podman or skopeo write it, relative to the recipe; pinned by its content digest. It
    brings the engine."""


class Image(Fields):
    base: Annotated[
        Annotated[DebianBase, Tag("debian")]
        | Annotated[ScratchBase, Tag("scratch")]
        | Annotated[RefBase, Tag("ref")]
        | Annotated[OciBase, Tag("oci")]
        | Annotated[ArchiveBase, Tag("archive")],
        tagged("debian", "scratch", "ref", "oci", "archive"),
    ]
    """What the image stands on."""


class QualityEvaluation(Fields):
    data: Word
    """Prompt set that no training saw."""
    prompts: Positive
    """Prompts taken from it."""
    max_tokens: Positive
    """Longest answer, in tokens."""


class QualityTask(Fields):
    min: Ratio
    """Least score that passes."""
    max_tokens: Positive
    """Longest answer, in tokens."""
    thinking: bool
    """Value of the chat template's thinking switch."""
    prompt_tokens: Positive | None = None
    """Longest prompt, in tokens, where it is known."""


class QualityTasks(Fields):
    tasks: Annotated[dict[StrictStr, QualityTask], Field(min_length=1)]
    """lm-eval task -> what passes."""
    concurrency: Positive
    """Requests at a time."""


class AcceptanceEvaluation(Fields):
    data: Word
    """Prompt set that no training saw."""
    prompts: Positive
    """Prompts taken from it."""
    max_tokens: Positive
    """Longest answer, in tokens."""
    floor: PositiveReal | None = None
    """Least acceptance length that passes."""


class AcceptanceTasks(Fields):
    tasks: Annotated[list[StrictStr], Field(min_length=1)]
    """Named prompt sets: gsm8k, humaneval, longbench_v2."""
    prompts: Positive
    """Prompts of each."""
    max_tokens: Positive
    """Longest answer, in tokens."""
    thinking: bool
    """Value of the chat template's thinking switch."""
    floor: PositiveReal | None = None
    """Least acceptance length that passes."""


class LatencyEvaluation(Fields):
    regimes: Annotated[list[Annotated[StrictStr, Field(pattern=r"^[1-9][0-9]*/[1-9][0-9]*$")]], Field(min_length=1)]
    """Prompt and answer tokens of each kind of request, `2048/256`."""
    warmup: StrictInt
    """Requests before those that count."""
    runs: Positive
    """Requests that count; the median is taken."""
    baseline: Literal["teacher"]
    """What the speed-up is against: the BF16 teacher without a drafter."""


class Evaluate(Fields):
    quality: (
        Annotated[
            Annotated[QualityEvaluation, Tag("data")] | Annotated[QualityTasks, Tag("tasks")], tagged("data", "tasks")
        ]
        | None
    ) = None
    """Does it still answer as well? By same text and exact match on a prompt set, or by lm-eval tasks."""
    latency: LatencyEvaluation | None = None
    """How long one request takes."""
    acceptance: (
        Annotated[
            Annotated[AcceptanceEvaluation, Tag("data")] | Annotated[AcceptanceTasks, Tag("tasks")],
            tagged("data", "tasks"),
        ]
        | None
    ) = None
    """How many tokens a step yields."""
