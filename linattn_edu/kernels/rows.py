"""What all launchers share: the choice of a configuration row, and where the chunks are."""

import functools
from dataclasses import dataclass

import torch

from linattn_edu.choices import asked, generation
from linattn_edu.kernels.tiles import block, cdiv
from linattn_edu.packing import Packing


@dataclass(frozen=True)
class Config:
    """Tile widths and launch options of one row of a kernel's table."""

    tiles: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # registers of a thread; None: as many as the compiler likes

    def launch(self, K: int | None = None, V: int | None = None) -> dict[str, int]:
        """The row as keyword arguments of a launch; BK and BV no wider than K and V need.

        Not to be changed: every launch has the same.
        """
        return _launch(self, K, V)


@functools.cache
def _launch(config: Config, K: int | None, V: int | None) -> dict[str, int]:
    tiles = dict(config.tiles)
    for name, dim in (("BK", K), ("BV", V)):
        if name in tiles and dim is not None:
            tiles[name] = min(tiles[name], block(dim))
    limit = {} if config.maxnreg is None else {"maxnreg": config.maxnreg}
    return dict(tiles, num_warps=config.num_warps, num_stages=config.num_stages, **limit)


def row(num_warps: int, num_stages: int, maxnreg: int | None = None, **tiles: int) -> Config:
    """Config(tiles, num_warps, num_stages, maxnreg), written as the tables write it."""
    return Config(tuple(tiles.items()), num_warps, num_stages, maxnreg)


@functools.cache
def _device(index: int) -> tuple[str, int]:
    properties = torch.cuda.get_device_properties(index)
    return generation((properties.major, properties.minor)), properties.multi_processor_count


def device_of(x: torch.Tensor) -> tuple[str, int]:
    """(generation, number of multiprocessors) of x's device, or of the GPU that is asked about; the
    interpreter counts as Hopper.
    """
    if x.is_cuda:
        return _device(x.device.index)
    gpu = asked()
    return ("hopper", 1) if gpu is None else (generation(gpu.capability), gpu.processors)


def compiled(x: torch.Tensor) -> bool:
    """Whether kernels are compiled for x's device, or the one that is asked about."""
    if x.is_cuda:
        return True
    gpu = asked()
    return gpu is not None and gpu.compiled


def chunk_args(x: torch.Tensor, chunk_size: int, packing: Packing | None):
    """(number of chunks, cu_ptr, chunks_ptr) of a chunk-parallel kernel on x [B, T, ...]."""
    if packing is None:
        return x.shape[0] * cdiv(x.shape[1], chunk_size), None, None
    return packing.chunks, packing.cu_seqlens, packing.chunk_indices


def sequence_args(x: torch.Tensor, packing: Packing | None):
    """(number of sequences, cu_ptr, offsets_ptr) of a sequential kernel on x [B, T, ...]."""
    if packing is None:
        return x.shape[0], None, None
    return packing.sequences, packing.cu_seqlens, packing.chunk_offsets


def row_stride(x: torch.Tensor, size: int) -> int:
    """Numbers from a row of x to the next one, where its rows are the last `size` numbers of it."""
    return x.view(-1, size).stride(0)


def whole(x: torch.Tensor, chunk_size: int, packing: Packing | None) -> bool:
    """Whether every chunk of x [B, T, ...] has chunk_size tokens."""
    return packing is None and x.shape[1] % chunk_size == 0


def states(x: torch.Tensor, chunk_size: int, packing: Packing | None) -> tuple[int, int]:
    """(B, NT) of the states h of x [B, T, ...]: one for each chunk."""
    if packing is None:
        return x.shape[0], cdiv(x.shape[1], chunk_size)
    return 1, packing.chunks


def of_generation(table: dict, generation: str) -> dict:
    """A table's part for a generation.  Data-centre Blackwell has as much shared memory as Hopper,
    and takes Hopper's part where it has none of its own.
    """
    if generation == "blackwell" and generation not in table:
        generation = "hopper"
    return table.get(generation, {})


def entry(table: dict, x: torch.Tensor):
    """What a table "generation -> bytes of an element" has for x's device and dtype."""
    return of_generation(table, device_of(x)[0])[x.element_size()]


# Rows of K elements that are not whole 4-byte words cannot be copied ahead asynchronously, so the
# loop is not pipelined. ptxas 12.8, which Triton 3.6 brings, then miscompiles 16-bit wgmma products
# of fewer than 64 columns: wrong results or an illegal access (ptxas 13.0 is right on the same
# PTX). 2 warps take another instruction, mma.sync, and are right with both.
UNPIPELINED = row(2, 1, BV=16)


THREE = [row(4, 3, BV=n) for n in (64, 32, 16)]  # of scans of up to 128 keys on Hopper


def scan_table(
    ampere: dict[int, list[Config]], hopper: dict[int, list[Config]], ahead: int = 1
) -> dict:
    """The rows of a kernel that carries S [K, BV] through a sequence, for `by_load.scan_launch`.

    generation -> bytes of an element -> BK -> rows, widest BV first. ampere, hopper: those of 16
    bit. The others are as wide as the registers allow, whatever else the kernel does. ahead: the
    stages of Hopper's 64 keys in 32 bit.
    """
    narrow, wide = [row(4, 1, BV=16)], lambda stages: [row(4, stages, BV=32), *narrow]
    turing = {128: narrow, 256: [row(8, 1, BV=16)]}
    return {
        "turing": {2: turing | {128: [row(8, 1, BV=16)]}, 4: turing},
        "ampere": {2: ampere, 4: {128: narrow, 256: narrow}},
        "hopper": {2: hopper, 4: {64: wide(ahead), 128: wide(1), 256: narrow}},
    }


# with a gate for each channel: P is in shared memory too, and 32 columns of 256 rows do not fit.
# THREE's third stage hides the loads, and leaves room for one program: in 4 warps, since the
# products of a chunk wait for each other
CHANNEL_CONFIGS = scan_table(
    ampere={128: [row(4, 1, BV=32)], 256: [row(4, 1, BV=16)]},
    hopper={128: THREE, 256: [row(4, 2, BV=16)]},
)


def both(config: Config) -> dict[int, Config]:
    """The row of tiles of 64 and of 128."""
    return {64: config, 128: config}


def value_table(whole: Config) -> dict:
    """The rows of a kernel that sums over the values of a chunk, for `by_width`.

    generation -> bytes of an element -> values up to -> row. On Hopper in 16 bit BV holds a value,
    so that it is read once; whole: the row of values past 128. Elsewhere, and past 256, whole
    values would not fit the registers, and their tiles in flight not shared memory. Narrower heads
    keep these tiles: see UNPIPELINED. On Blackwell Triton 3.7 leaves nothing but a trap of wy_bwd
    and kda_wy_bwd in 64 columns and one stage.
    """
    hopper = {64: row(4, 3, BK=64, BV=64), 128: row(4, 3, BK=64, BV=128), 256: whole}
    return {
        "turing": {
            2: {128: row(4, 1, BK=32, BV=32), 512: row(4, 1, BK=32, BV=64)},
            4: {512: row(4, 1, BK=16, BV=32)},
        },
        "ampere": {2: {512: row(4, 1, BK=64, BV=64)}, 4: {512: row(4, 1, BK=32, BV=64)}},
        "hopper": {2: hopper | {512: row(4, 1, BK=64, BV=64)}, 4: {512: row(4, 1, BK=32, BV=64)}},
        "blackwell": {
            2: hopper | {512: row(4, 1, BK=32, BV=128)},
            4: {512: row(4, 1, BK=32, BV=64)},
        },
    }


def by_width(table: dict, v: torch.Tensor) -> dict[str, int]:
    """The first row of a `value_table` that holds v's values."""
    return next(row for width, row in entry(table, v).items() if width >= v.shape[-1]).launch()


def strength(beta: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """beta [B, T, HV] and None; or None and the gate [B, T, HV, D] of each channel in its place."""
    return (beta, None) if beta.ndim == 3 else (None, beta)


def shared_dtype(q: torch.Tensor, HV: int) -> torch.dtype:
    """Dtype of a gradient of q or k [B, T, H, K] to which value heads add one after the other."""
    return q.dtype if q.shape[2] == HV else torch.float32
