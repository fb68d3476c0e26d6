"""Acceptance length by replay: what greedy speculative decoding would accept, without running it.

Under greedy lossless verification the target's text does not depend on the drafts. So one teacher-forced
pass over the target's own greedy continuation gives the taps of every position, all drafts are made in one
call, and the speculative loop is a walk over them: equal to the loop itself, draft by draft. Knows no folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from qdc.methods.dflash import Drafter, block_tokens
from qdc.methods.draft_data import Conversation
from qdc.methods.draft_taps import pad
from qdc.methods.draft_training import Frozen

SCORE_LIMIT = 1 << 24
"""Most attention scores of one layer in one call (64 MiB of FP32)."""


@dataclass(frozen=True)
class Counts:
    """One prompt: draft tokens that were accepted, and how many drafts were verified."""

    accepted: int
    drafts: int


def draft_tokens(
    drafter: Drafter,
    frozen: Frozen,
    input_ids: Tensor,
    taps: Tensor,
    anchors: Tensor,
    k: int,
    window: int | None = None,
) -> Tensor:
    """The K greedy draft tokens after each anchor: [B, A, K].

    `input_ids` [B, S]; `taps` [B, S, len(taps) * hidden]; `anchors` [B, A]: the position of the last token
    known; the drafter sees taps strictly below it, through `window` if given.
    """
    block, device = k + 1, taps.device
    tokens = block_tokens(input_ids.gather(1, anchors), block, drafter.shape.mask_token_id).to(device)
    anchors = anchors.to(device)
    with torch.no_grad():
        hidden = drafter(taps, F.embedding(tokens, frozen.embedding), anchors, block, window)
        slots = hidden.view(*anchors.shape, block, -1)[:, :, 1:]
        return F.linear(slots, frozen.head).argmax(-1)


def walk(answer: Sequence[int], drafts: Sequence[Sequence[int]]) -> Counts:
    """Run the loop over known drafts. `drafts[i]` follows `answer[i]`; answer[0] comes from the prefill.

    A draft that runs over the end of the answer counts what it matched up to the end (end-of-turn included).
    """
    place, accepted, verified, last = 0, 0, 0, len(answer) - 1
    while place < last:
        matched = 0
        while (
            matched < len(drafts[place])
            and place + matched < last
            and drafts[place][matched] == answer[place + matched + 1]
        ):
            matched += 1
        accepted, verified, place = accepted + matched, verified + 1, place + matched + 1
    return Counts(accepted, verified)


def replay(
    drafter: Drafter,
    frozen: Frozen,
    conversations: Sequence[Conversation],
    taps: Sequence[Tensor],
    k: int,
    window: int | None = None,
) -> list[Counts]:
    """Counts of every conversation, whose answer is the target's greedy continuation.

    `taps[i]` [tokens, len(taps) * hidden]. An answer of fewer than two tokens gives no draft.
    """
    found = [Counts(0, 0)] * len(conversations)
    order = [i for i, c in enumerate(conversations) if c.answer_tokens() > 1]
    order.sort(key=lambda i: (len(conversations[i].input_ids), i))
    while order:
        longest = max(len(conversations[i].input_ids) for i in order)
        queries = max(conversations[i].answer_tokens() - 1 for i in order) * (k + 1)
        size = max(1, SCORE_LIMIT // (drafter.shape.heads * queries * (longest + k + 1)))
        some, order = order[:size], order[size:]
        batch = [conversations[i] for i in some]
        for index, counts in zip(
            some, _replay_batch(drafter, frozen, batch, [taps[i] for i in some], k, window), strict=True
        ):
            found[index] = counts
    return found


def _replay_batch(
    drafter: Drafter,
    frozen: Frozen,
    batch: Sequence[Conversation],
    taps: Sequence[Tensor],
    k: int,
    window: int | None,
) -> list[Counts]:
    ids, _ = pad([c.input_ids for c in batch])
    stacked = torch.nn.utils.rnn.pad_sequence(list(taps), batch_first=True)
    width = max(c.answer_tokens() for c in batch) - 1
    starts = torch.tensor([c.prompt_tokens for c in batch]).unsqueeze(1)
    ends = torch.tensor([len(c.input_ids) - 1 for c in batch]).unsqueeze(1)
    anchors = torch.minimum(starts + torch.arange(width), ends)
    drafts = draft_tokens(drafter, frozen, ids, stacked, anchors, k, window).tolist()
    return [walk(c.input_ids[c.prompt_tokens :], drafts[row]) for row, c in enumerate(batch)]


def acceptance_length(counts: Sequence[Counts]) -> float:
    """(accepted + drafts) / drafts over all prompts: accepted draft tokens and the bonus token, 1..K+1."""
    drafts = sum(c.drafts for c in counts)
    return (sum(c.accepted for c in counts) + drafts) / drafts


def bootstrap(
    samples: Sequence[Sequence[Counts]], seed: int = 0, resamples: int = 2000, level: float = 0.95
) -> list[tuple[float, float]]:
    """Percentile intervals from resampling prompts: one a sample of `samples`, then, when there are two,
    one for the paired difference first - second. Every sample covers the same prompts in the same order.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = len(samples[0])
    picks = torch.randint(rows, (resamples, rows), generator=generator)
    values = []
    for counts in samples:
        accepted = torch.tensor([c.accepted for c in counts], dtype=torch.float64)[picks].sum(1)
        drafts = torch.tensor([c.drafts for c in counts], dtype=torch.float64)[picks].sum(1)
        values.append(1.0 + accepted / drafts.clamp(min=1.0))
    if len(values) == 2:
        values.append(values[0] - values[1])
    edges = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    return [(float(low), float(high)) for low, high in (torch.quantile(v, edges) for v in values)]
