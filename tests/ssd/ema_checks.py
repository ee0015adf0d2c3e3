"""What the stages ema and ema_bwd are held to, and what they read."""

from types import SimpleNamespace

import torch
from delta.stage_checks import CHUNKS, DTYPES, TOKENS
from grids import parametrize

from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.ssd.ema import ema

CHANNELS = (1, 33, 64, 100, 200)
GIVEN = ("both", "neither", "weight", "state")  # beside x and g
GATES = ("trained", "none", "reset", "closed")
grid = parametrize(T=TOKENS, D=CHANNELS, C=CHUNKS, given=GIVEN, gate=GATES, dtype=DTYPES)


def loop(x, g, weight=None, initial_state=None):
    """The recurrence: y and the final state."""
    weight = -torch.expm1(g) if weight is None else weight
    h = torch.zeros_like(x[:, 0]) if initial_state is None else initial_state
    y = []
    for t in range(x.shape[1]):
        h = g[:, t].exp()[..., None] * h + weight[:, t, :, None] * x[:, t]
        y.append(h)
    return torch.stack(y, 1), h


def draw(T, D, given, gate, dtype=torch.float32, device="cpu", B=None, H=3, seed=None):
    """x, g, weight and the initial state; g is -inf at one token in eight ("reset") or -1e4
    everywhere ("closed").

    Short sequences come in a batch: the rounding error of a handful of numbers is no yardstick.
    """
    seed = hash((T, D)) % 2**31 if seed is None else seed
    generator = torch.Generator(device).manual_seed(seed)
    B = max(1, (256 if torch.cuda.is_available() else 16) // T) if B is None else B
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device=device, dtype=wide)

    g = -(0.7 * randn(B, T, H) - 2.5).exp()
    if gate == "reset":
        chosen = torch.rand(B, T, H, generator=generator, device=device) < 0.125
        g = g.masked_fill(chosen, -torch.inf)
    g = {"none": torch.zeros_like(g), "closed": torch.full_like(g, -1e4)}.get(gate, g)
    weight = 0.1 * randn(B, T, H) if given in ("both", "weight") or gate == "none" else None
    state = randn(B, H, D) if given in ("both", "state") else None
    return randn(B, T, H, D).to(dtype), g, weight, state


def parts(T, D, C, given, gate, dtype, device, **sizes):
    """What the stages read, by the reference stages."""
    x, g, weight, h0 = draw(T, D, given, gate, dtype, device, **sizes)
    r = SimpleNamespace(x=x, g=g, weight=weight, h0=h0)
    generator = torch.Generator(device).manual_seed(T + D)
    r.dy, r.dht = (
        None if y is None else torch.empty_like(y).normal_(generator=generator) for y in (x, h0)
    )
    r.gc = gate_cumsum(g, chunk_size=C)
    _, r.h, _ = ema(x, g, r.gc, weight, h0, chunk_size=C)
    return r
