"""The card and its host: that the card is named, that the engine's build fits it, and its driver."""

from __future__ import annotations

from collections.abc import Iterator

from qdc.core.spelling import suggestion
from qdc.recipe.load import Loaded
from qdc.rules.parts import fact
from qdc.rules.registry import Found, Topic
from qdc.tables import engines, hardware

TOPIC = Topic()
_CARD = ("deploy", "hardware")
_USE = ("serve", "gpu_memory_utilization")


@TOPIC.rule(
    "DEP01",
    "error",
    summary="The card is not in the hardware table.",
    why="What fits and what runs follows from the card; a guessed one once built code for another without a word.",
    fix="Name one of the table's rows.",
    evidence="A probe that guessed: https://github.com/nvidia-holoscan/holoscan-sensor-bridge/issues/127",
    failing="deploy: {hardware: a10, contract: adaptfm}",
    passing="deploy: {hardware: cpu, contract: adaptfm}",
    final="nothing could be said about the card",
)
def the_card_is_known(loaded: Loaded) -> Iterator[Found]:
    name = loaded.model.deploy.hardware
    if hardware.row(name) is None:
        hint = suggestion(name, hardware.names(), "cards")
        yield Found(_CARD, f"nothing is known of the card `{name}`", hint)


@TOPIC.rule(
    "DEP06",
    "warning",
    summary="The engine's wheel is made for a newer CUDA than the host's driver runs.",
    why="A driver runs programs of its own CUDA major and of older ones.",
    fix="Ask what the host has, or take an engine of its major.",
    evidence="Disputed. Two teams found a driver of CUDA 12.4 on the host of a contest, yet the 3rd entry pinned "
    "packages of CUDA 13: https://github.com/nota-github/adaptfm-quant-dflash",
    failing='deploy: {contract: adaptfm, driver: {cuda: "12.4"}}',
    passing='deploy: {contract: adaptfm, driver: {cuda: "13.0"}}',
)
def the_driver_runs_the_wheel(loaded: Loaded) -> Iterator[Found]:
    driver, wanted = loaded.model.deploy.driver, fact(loaded, "cuda-major")
    engine = loaded.model.serve.engine
    if driver is None or not isinstance(wanted, int) or wanted <= int(driver.cuda.split(".")[0]):
        return
    message = (
        f"the wheel of vLLM {engine.vllm} is made for CUDA {wanted}, the host's driver runs {driver.cuda} "
        "(disputed: an entry with such packages was scored)"
    )
    hint = f"ask what the host has, or take a wheel of CUDA {driver.cuda.split('.')[0]}"
    yield Found(("deploy", "driver", "cuda"), message, hint, also=(("serve", "engine", "vllm"), "the engine"))


@TOPIC.rule(
    "DEP08",
    "error",
    summary="`serve.gpu_memory_utilization` is missing on a GPU, or given on a CPU.",
    why="On a GPU it decides how many requests fit; the engine's default differs between versions. A CPU has none.",
    fix="Write it exactly when the engine runs on a GPU.",
    evidence="Follows from the definition of the field.",
    failing="serve: {gpu_memory_utilization: 0.9}",
    passing="serve: {gpu_memory_utilization: null}",
    final="nothing could be served",
)
def the_memory_is_said(loaded: Loaded) -> Iterator[Found]:
    serve = loaded.model.serve
    if serve.engine.platform == "cpu" and serve.gpu_memory_utilization is not None:
        message = "a CPU has no GPU memory to use"
        yield Found(_USE, message, "remove `gpu_memory_utilization`", key=True)
    if serve.engine.platform != "cpu" and serve.gpu_memory_utilization is None:
        message = "`serve.gpu_memory_utilization` is missing"
        yield Found(("serve", "engine", "platform"), message, "add `gpu_memory_utilization: 0.90` under `serve`")


@TOPIC.rule(
    "DEP09",
    "error",
    summary="The engine's build is not for this hardware.",
    why="The CPU build runs on no GPU, and the CUDA build on no CPU.",
    fix="Make `serve.engine.platform` and `deploy.hardware` agree.",
    evidence="Follows from what the builds are.",
    failing="deploy: {hardware: a10g, contract: adaptfm}",
    passing="deploy: {hardware: cpu, contract: adaptfm}",
    final="nothing could be served",
)
def the_build_runs_there(loaded: Loaded) -> Iterator[Found]:
    card, platform = loaded.model.deploy.hardware, loaded.model.serve.engine.platform
    if hardware.row(card) is not None and (card == "cpu") != (platform == "cpu"):
        wanted = "cpu" if card == "cpu" else "cuda"
        where = (("serve", "engine", "platform"), "the engine's build")
        hint = f"write `platform: {wanted}`, or another card" if engines.rows(wanted) else "write another card"
        yield Found(_CARD, f"the engine's build for `{platform}` does not run on `{card}`", hint, also=where)
