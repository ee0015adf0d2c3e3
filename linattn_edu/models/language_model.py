"""A small language model of the layers: to be read whole and to be trained."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn_edu.layers import EMA, RWKV7, GatedDeltaNet, KimiDeltaAttention, Mamba2, Step
from linattn_edu.layers.layer import check_mask
from linattn_edu.models.attention import Attention
from linattn_edu.ops import check
from linattn_edu.ops.ring import LONGEST

RING = 8  # tokens between two writes of a state that generate leaves to the ring
WORTH = 16  # tokens for which a step is captured, which takes as long as some of them
COLDEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Config:
    """The shape of a :class:`LanguageModel`.

    Args:
        mixers: The mixer over time of each layer: "gdn", "kda", "mamba2", "ema", "rwkv7" or
            "attention".
        vocabulary: Tokens.
        width: Of the stream of vectors that goes through the layers.
        heads: Of each mixer.
        key_dim, value_dim: Of a head, whose state is ``key_dim x value_dim``. "ema" has neither:
            its state is one number for each channel of the width. "attention" has heads of key_dim
            and keeps all tokens. "mamba2" needs ``heads * value_dim`` to be a multiple of width.
            Heads of "rwkv7" have ``width / heads`` keys.
        hidden: Width of the gated MLP after each mixer; 0 leaves it out.
    """

    mixers: tuple[str, ...] = ("gdn",) * 4
    vocabulary: int = 256
    width: int = 128
    heads: int = 2
    key_dim: int = 32
    value_dim: int = 64
    hidden: int = 384

    def __post_init__(self):
        if not self.mixers or (unknown := sorted(set(self.mixers) - set(MIXERS))):
            got = ", ".join(map(repr, unknown)) if self.mixers else "none"
            raise ValueError(f"mixers must be names among {', '.join(MIXERS)}, got {got}")
        names = ("vocabulary", "width", "heads", "key_dim", "value_dim")
        check.positive(**{name: getattr(self, name) for name in names})
        if isinstance(self.hidden, bool) or not isinstance(self.hidden, int) or self.hidden < 0:
            raise ValueError(f"hidden must be an integer of at least 0, got {self.hidden!r}")
        if "mamba2" in self.mixers and self.heads * self.value_dim % self.width:
            raise ValueError(
                f"heads * value_dim must be a multiple of width={self.width} for mamba2, got "
                f"{self.heads} * {self.value_dim}"
            )
        if "rwkv7" in self.mixers and self.width % self.heads:
            raise ValueError(f"heads must divide width={self.width} for rwkv7, got {self.heads}")
        if "attention" in self.mixers and self.key_dim % 2:
            raise ValueError(f"key_dim must be even for attention, got {self.key_dim}")


MIXERS = {
    "gdn": lambda c, **kw: GatedDeltaNet(
        c.width, expand_v=c.value_dim / c.key_dim, head_dim=c.key_dim, num_heads=c.heads, **kw
    ),
    "kda": lambda c, **kw: KimiDeltaAttention(
        c.width, expand_v=c.value_dim / c.key_dim, head_dim=c.key_dim, num_heads=c.heads, **kw
    ),
    "mamba2": lambda c, **kw: Mamba2(
        c.width,
        d_state=c.key_dim,
        headdim=c.value_dim,
        expand=c.heads * c.value_dim // c.width,
        chunk_size=64,
        **kw,
    ),
    "ema": lambda c, **kw: EMA(c.width, c.heads, **kw),
    "rwkv7": lambda c, **kw: RWKV7(
        hidden_size=c.width,
        head_dim=None,
        num_heads=c.heads,
        value_dim=c.heads * c.value_dim,
        num_hidden_layers=c.mixers.count("rwkv7"),
        **kw,
    ),
    "attention": lambda c, **kw: Attention(c.width, c.heads, c.key_dim, **kw),
}


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, arXiv:2002.05202."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``: the layer of this number."""

    def __init__(self, config: Config, number: int, impl: str):
        super().__init__()
        mixer, kw = config.mixers[number], {}
        if mixer == "rwkv7":  # the first of them makes v_first
            kw["layer_idx"] = config.mixers[:number].count(mixer)
        self.mixer_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.mixer = MIXERS[mixer](config, impl=impl, **kw)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-5) if config.hidden else None
        self.mlp = GatedMLP(config.width, config.hidden) if config.hidden else None

    def forward(self, x: Tensor, v_first: Tensor | None, **options) -> tuple:
        """The new vectors, and v_first of :class:`RWKV7`, None before the first of these layers."""
        y = self.mixer_norm(x)
        if isinstance(self.mixer, RWKV7):
            y, v_first = self.mixer(y, v_first=v_first, return_v_first=True, **options)
        else:
            y = self.mixer(y, **options)
        x = x + y
        return x if self.mlp is None else x + self.mlp(self.mlp_norm(x)), v_first


class Embedding(nn.Embedding):
    """Small vectors at first: they are the output matrix too.

    Its weight is read here alone, so that what brings it when the module is called (accelerate's
    hooks, FSDP) serves both.
    """

    def forward(self, x: Tensor, out: bool = False) -> Tensor:
        """The vectors of tokens, or with `out` a number of each token for vectors."""
        return F.linear(x, self.weight) if out else super().forward(x)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, and the embedding again as the output matrix.

    Args:
        config: Its shape.
        impl: "auto", "triton" or "reference", for the operators of all layers.
    """

    def __init__(self, config: Config, impl: str = "auto"):
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, i, impl) for i in range(len(config.mixers)))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.embedding.reset_parameters()

    def forward(
        self, tokens: Tensor, attention_mask=None, cache=None, cu_seqlens=None, cp_context=None
    ) -> Tensor:
        """Logits of the next token, ``[B, T, vocabulary]``.

        Args:
            tokens: ``[B, T]``, integers below ``config.vocabulary``.
            attention_mask: ``[B, T]``, 0 for padding on the left, 1 for tokens; None without.
            cache: What :meth:`make_cache` made; it is brought up to the last token, in place. Where
                a gradient is recorded it keeps the history, until ``detach()`` of each part.
            cu_seqlens: ``[N + 1]``, the bounds of sequences packed in a row (B is 1). A cache then
                has N sequences; "attention" takes none.
            cp_context: Of :func:`build_cp_context`, this rank's tokens. Not "attention".
        """
        check.tokens("tokens", tokens, self.config.vocabulary)
        if cache is not None and len(cache) != len(self.blocks):
            raise ValueError(f"cache must be of {len(self.blocks)} layers, got {len(cache)}")
        if cache is not None and cu_seqlens is not None and "attention" in self.config.mixers:
            raise ValueError("cu_seqlens must be None with a cache of attention, got both")
        if cp_context is not None and "attention" in self.config.mixers:
            raise ValueError("cp_context must be None: attention is not cut over ranks")
        x, v_first = self.embedding(tokens), None
        caches = [None] * len(self.blocks) if cache is None else cache
        options = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens}
        for block, own in zip(self.blocks, caches, strict=True):
            x, v_first = block(x, v_first, cache=own, cp_context=cp_context, **options)
        return self.embedding(self.norm(x), out=True)

    def make_cache(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ring: int | None = None,
        state_dtype: torch.dtype | None = None,
        guesses: int = 0,
    ) -> list:
        """The memory of no tokens of each layer, for a batch of so many sequences.

        device, dtype, ring, state_dtype, guesses: As in a layer's make_cache; attention, "ema" and
        "rwkv7" have no ring, and attention no state. "ema" and "rwkv7" take no token back.
        """
        made = []
        for mixer in (block.mixer for block in self.blocks):
            more = {} if isinstance(mixer, (EMA, RWKV7)) and not guesses else {"guesses": guesses}
            more |= {} if isinstance(mixer, (Attention, EMA, RWKV7)) else {"ring": ring}
            more |= {} if isinstance(mixer, Attention) else {"state_dtype": state_dtype}
            made.append(mixer.make_cache(batch_size, device, dtype, **more))
        return made

    def make_step(self, cache: list) -> Step:
        """:class:`Step`: a function of the next token of each sequence, on a GPU a CUDA graph."""
        return Step(self, cache)

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        new_tokens: int,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        attention_mask: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        draft: "LanguageModel | None" = None,
        guesses: int = 4,
    ) -> Tensor:
        """The prompt ``[B, T]`` and so many tokens after it, ``[B, T + new_tokens]``.

        On a GPU tokens after the first come from a :class:`Step`, where there are many, and states
        are written every eighth token, as with ring=8 of :meth:`make_cache`, whatever the batch: a
        sequence's tokens do not depend on what is beside it.

        Args:
            prompt: At least one token; shorter prompts of a batch are padded on the left.
            new_tokens: How many are drawn.
            temperature: 0 takes the most likely token; else one is drawn from
                ``softmax(logits / temperature)``.
            generator: Of the draws, on the model's device.
            attention_mask: ``[B, T]``, 0 for padding; each row ends with a token.
            device, dtype: Of the cache, as in :meth:`make_cache`.
            draft: A smaller model that guesses tokens, or None; what is wrong is taken back. Of a
                batch all rows go on where the first errs. Neither may have "ema", "rwkv7" layers.
                Guesses are checked by a :class:`Step` too, unless a layer is "attention".
            guesses: How many in a call, 1 to 63.
        Raises:
            TypeError, ValueError: an argument does not fit; the message says what was expected.
        """
        check.tokens("prompt", prompt, self.config.vocabulary)
        if not prompt.numel():
            raise ValueError(f"prompt must be [B, T] with B, T > 0, got {list(prompt.shape)}")
        if isinstance(new_tokens, bool) or not isinstance(new_tokens, int):
            raise TypeError(f"new_tokens must be an integer, got {new_tokens!r}")
        if new_tokens < 0:
            raise ValueError(f"new_tokens must be at least 0, got {new_tokens}")
        if not isinstance(temperature, (int, float)) or not 0 <= temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0, got {temperature!r}")
        if attention_mask is not None and not check_mask(attention_mask, prompt)[:, -1].all():
            raise ValueError("attention_mask must end with a token in each row, got padding alone")
        draw = partial(drawn, temperature=temperature, generator=generator)
        if draft is not None:
            check_draft(self, draft, guesses)
            where = {"device": device, "dtype": dtype}
            return assisted(self, draft, prompt, new_tokens, attention_mask, guesses, draw, where)
        ring = RING if prompt.is_cuda else None
        cache, tokens, step = self.make_cache(len(prompt), device, dtype, ring=ring), prompt, prompt
        after = self.make_step(cache) if new_tokens > WORTH else partial(self, cache=cache)
        for i in range(new_tokens):
            logits = after(step) if i else self(step, attention_mask, cache)
            step = draw(logits[:, -1:])
            tokens = torch.cat([tokens, step], 1)
        return tokens


def drawn(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """A token for each row of logits ``[B, T, vocabulary]``."""
    logits = logits.float()
    if not temperature:
        return logits.argmax(-1)
    logits -= logits.amax(-1, keepdim=True)  # 0 stays finite, however cold
    chances = torch.softmax(logits / max(temperature, COLDEST), -1)  # which float32 divides by
    return torch.multinomial(chances.flatten(0, 1), 1, generator=generator).view(logits.shape[:2])


def check_draft(model: LanguageModel, draft: object, guesses: object) -> None:
    """Refuse what cannot guess tokens of a model, and models that take none back."""
    if not isinstance(draft, LanguageModel):
        raise TypeError(f"draft must be a LanguageModel, got {type(draft).__name__}")
    check.positive({"guesses": LONGEST - 1}, guesses=guesses)
    for name, one in (("the model", model), ("draft", draft)):
        if kept := {"ema", "rwkv7"} & {*one.config.mixers}:
            raise ValueError(
                f"{name} must have layers with a ring, or attention, to take guesses back, got "
                f"{' and '.join(sorted(kept))}"
            )
    if draft.config.vocabulary != model.config.vocabulary:
        raise ValueError(
            f"draft must have the vocabulary {model.config.vocabulary}, got "
            f"{draft.config.vocabulary}"
        )


def assisted(
    model: LanguageModel,
    draft: LanguageModel,
    prompt: Tensor,
    new_tokens: int,
    mask: Tensor | None,
    guesses: int,
    draw: Callable[[Tensor], Tensor],
    where: dict,
) -> Tensor:
    """:meth:`LanguageModel.generate` with the guesses of another model; where: of the caches."""
    kept = {"ring": max(RING, guesses + 1), "guesses": guesses, **where}
    cache, memory = (m.make_cache(len(prompt), **kept) for m in (model, draft))
    tokens, seen, end = prompt, prompt.shape[1], prompt.shape[1] + new_tokens
    after, step = (
        m.make_step(c) if new_tokens > WORTH else partial(m, cache=c)
        for m, c in ((model, cache), (draft, memory))
    )
    if new_tokens:
        tokens = torch.cat([prompt, draw(model(prompt, mask, cache)[:, -1:])], 1)
        draft(prompt, mask, memory)
    while (T := tokens.shape[1]) < end:
        n, guessed = min(guesses, end - T - 1), tokens
        for part in memory:
            part.commit()  # so that no token of this round is folded
        for _ in range(n):
            new, seen = guessed[:, seen:], guessed.shape[1]
            logits = step(new) if new.shape[1] == 1 else draft(new, cache=memory)
            guessed = torch.cat([guessed, logits[:, -1:].argmax(-1)], 1)
        # a step is captured for one number of tokens, and there are fewer at the end
        look = after if n == guesses else partial(model, cache=cache)
        found = draw(look(guessed[:, T - 1 :]))
        right = int((found[:, :-1] == guessed[:, T:]).cumprod(1).sum(1).min())
        tokens = torch.cat([tokens, found[:, : right + 1]], 1)
        for part in cache:
            part.take_back(n - right)
        late = max(0, seen - T - right)
        for part in memory:
            part.take_back(late)
        seen -= late
    return tokens
