"""Forward KL divergence a token, teacher || student, from hidden states and heads.

Logits exist only for one chunk of tokens at a time, recomputed on the way back, so that memory does not grow
with vocabulary times sequence. Knows tensors only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 2048


def kl_of_logits(teacher: torch.Tensor, student: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """sum_v p_t (log p_t - log p_s) for each row of logits [N, V], in nats; logits divided by `temperature`."""
    log_teacher = F.log_softmax(teacher.float() / temperature, dim=-1)
    log_student = F.log_softmax(student.float() / temperature, dim=-1)
    return (log_teacher.exp() * (log_teacher - log_student)).sum(dim=-1)


def _chunk(
    teacher: torch.Tensor,
    student: torch.Tensor,
    teacher_head: torch.Tensor,
    student_head: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    return kl_of_logits(teacher @ teacher_head.T, student @ student_head.T, temperature)


def token_kl(
    teacher: torch.Tensor,
    student: torch.Tensor,
    teacher_head: torch.Tensor,
    student_head: torch.Tensor,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> torch.Tensor:
    """KL [N] of final hidden states [N, H] seen through heads [V, H]; differentiable in the student's two."""
    parts = []
    for start in range(0, len(teacher), chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        inputs = (teacher[rows], student[rows], teacher_head, student_head, temperature)
        if torch.is_grad_enabled() and len(teacher) > chunk_tokens:
            parts.append(checkpoint(_chunk, *inputs, use_reentrant=False))
        else:
            parts.append(_chunk(*inputs))
    return torch.cat(parts)
