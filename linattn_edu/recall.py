"""Associative recall: the task that shows what a state can hold, and how a model learns it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn_edu import data
from linattn_edu.models import Config, LanguageModel

IGNORE = -100  # the target of a place that is not asked, F.cross_entropy's ignore_index


@dataclass(frozen=True)
class Recall:
    """Associative recall with several questions (MQAR), Arora et al., arXiv:2312.04927, section 4.

    A sequence begins with pairs of a key and its value, all keys distinct. Then each key comes once
    more, at a place drawn at random, and the next token to say is its value; all other places hold
    the token 0. Keys are the tokens 1 .. vocabulary / 2 - 1, values those from vocabulary / 2 on.
    With ``told`` above 1 all pairs are told so many times, in an order drawn anew and with values
    drawn anew; what is asked is the last value of a key.

    Args:
        pairs: Keys to remember.  length: Tokens, at least ``(2 told + 1) pairs``.
        vocabulary: Even, more than ``2 pairs + 1``.  told: How often a key gets a value.
    """

    pairs: int = 8
    length: int = 32
    vocabulary: int = 64
    told: int = 1

    def __post_init__(self):
        if self.told < 1:
            raise ValueError(f"told must be at least 1, got {self.told}")
        if self.pairs < 1 or self.length < (2 * self.told + 1) * self.pairs:
            raise ValueError(
                f"length must be at least {2 * self.told + 1} times pairs, got {self.length} for "
                f"{self.pairs}"
            )
        if self.vocabulary % 2 or self.vocabulary // 2 - 1 < self.pairs:
            raise ValueError(
                f"vocabulary must be even and at least {2 * self.pairs + 2} for {self.pairs} "
                f"pairs, got {self.vocabulary}"
            )

    def batch(self, size: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets ``[size, length]``; a target is IGNORE where nothing is asked."""
        draw = data.generator(seed, step)
        half, pairs, front = self.vocabulary // 2, self.pairs, 2 * self.told * self.pairs
        keys = 1 + torch.rand(size, half - 1, generator=draw).argsort(1)[:, :pairs]
        values = torch.randint(half, self.vocabulary, (size, pairs), generator=draw)
        room = torch.rand(size, self.length - front, generator=draw)
        places = front + room.argsort(1)[:, :pairs]
        tokens = torch.zeros(size, self.length, dtype=torch.long)
        tokens[:, front - 2 * pairs : front : 2] = keys
        tokens[:, front - 2 * pairs + 1 : front : 2] = values
        for start in range(0, front - 2 * pairs, 2 * pairs):  # what is told before the last time
            order = torch.rand(size, pairs, generator=draw).argsort(1)
            old = torch.randint(half, self.vocabulary, (size, pairs), generator=draw)
            tokens[:, start : start + 2 * pairs : 2] = keys.gather(1, order)
            tokens[:, start + 1 : start + 2 * pairs : 2] = old
        targets = torch.full_like(tokens, IGNORE)
        return tokens.scatter_(1, places, keys), targets.scatter_(1, places, values)


def small_model(mixer: str, key_dim: int, vocabulary: int, seed: int, impl: str) -> LanguageModel:
    """One layer, one head with a state of ``key_dim x 64``, no MLP: the mixer alone remembers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = Config((mixer,), vocabulary, 64, 1, key_dim, 64, hidden=0)
        model = LanguageModel(config, impl)
        nn.init.normal_(model.embedding.weight, std=0.5)
    return model


def learn(
    model: nn.Module,
    tasks: Sequence[Recall],
    steps: int,
    learning_rate: float,
    batch: int = 64,
    seed: int = 0,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train a model on tasks by turns, the easy ones beside the hard ones, with AdamW.

    Args:
        model: Tokens ``[B, T]`` to logits.  tasks: One a step, in turns.
        steps, learning_rate: The rate rises for 20 steps and falls to zero in the second half.
        batch, seed: Sequences of a step, and what they are drawn from.
        report: Called with the number of the step and its loss.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, betas=(0.9, 0.95))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1, (step + 1) / 20, 2 * (steps - step) / steps)
        inputs, targets = tasks[step % len(tasks)].batch(batch, seed, step)
        logits = model(inputs.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report(step, loss.item())


@torch.no_grad()
def accuracy(model: nn.Module, task: Recall, seed: int = 1_000_000) -> float:
    """The share of 512 sequences' questions that are answered right; of a seed not trained on."""
    device = next(model.parameters()).device
    inputs, targets = (x.to(device) for x in task.batch(512, seed, 0))
    asked = targets != IGNORE
    return (model(inputs).argmax(-1) == targets)[asked].float().mean().item()
