from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from stoker.errors import ConfigError
from stoker.pytorch import per_sample_loss


def test_classification() -> None:
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    expected = functional.cross_entropy(logits, labels, reduction="none")
    assert torch.allclose(per_sample_loss(logits, labels), expected)


def test_tokens_average_over_what_is_labelled() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.tensor([[1, 2, -100, -100, -100], [3] * 5])
    found = per_sample_loss(logits, labels)
    assert torch.allclose(found[0], functional.cross_entropy(logits[0, :2], labels[0, :2]))
    assert torch.allclose(found[1], functional.cross_entropy(logits[1], labels[1]))


def test_shift_compares_with_the_next_token() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    expected = [functional.cross_entropy(logits[i, :-1], labels[i, 1:]) for i in range(2)]
    assert torch.allclose(per_sample_loss(logits, labels, shift=True), torch.stack(expected))
    with pytest.raises(ConfigError, match="shift=True"):
        per_sample_loss(torch.randn(2, 7), torch.zeros(2).long(), shift=True)


def test_a_sample_without_labels_has_no_loss() -> None:
    found = per_sample_loss(torch.randn(2, 3, 7), torch.tensor([[0, 0, 0], [9, 9, 9]]), 9)
    assert found.isnan().tolist() == [False, True]


def test_half_precision_and_gradients() -> None:
    logits = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    found = per_sample_loss(logits, torch.zeros(3).long())
    assert found.dtype == torch.float32
    found.mean().backward()
    assert logits.grad is not None


def test_an_empty_batch() -> None:
    assert per_sample_loss(torch.randn(0, 3, 7), torch.zeros(0, 3).long()).shape == (0,)


def test_shapes_that_do_not_fit() -> None:
    for logits, labels in ((torch.ones(3, 4), torch.zeros(2)), (torch.ones(3), torch.zeros(3))):
        with pytest.raises(ConfigError, match="do not fit"):
            per_sample_loss(logits, labels)
