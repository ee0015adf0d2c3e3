"""Which product waits for which: counted on the reference stage itself."""

import torch

from linattn_edu.figures import two_chunks
from linattn_edu.reference.delta.state import state

C, K, V = 16, 8, 4


class Counted(torch.Tensor):
    """A tensor that knows how many products had to be made before it, one after the other."""

    depth = 0

    @classmethod
    def __torch_function__(cls, f, types, args=(), kwargs=None):
        out = super().__torch_function__(f, types, args, kwargs or {})
        if isinstance(out, cls):
            flat = [y for a in args for y in (a if isinstance(a, (list, tuple)) else (a,))]
            out.depth = max(getattr(y, "depth", 0) for y in flat) + ("matmul" in f.__name__)
        return out


def test_the_chain_is_that_of_the_reference():
    shapes = (1, 2 * C, 1, K), (1, 2 * C, 1, K), (1, 2 * C, 1, V), (1, 2 * C, 1)
    k, w, u, gc = (torch.randn(s).as_subclass(Counted) for s in shapes)
    h, v_new, final = state(k, w, u, gc, None, chunk_size=C, output_final_state=True)
    found = two_chunks.operations()
    assert two_chunks.depth(found, "S₂") == final.depth
    # of all states that enter and all rows written the deepest, those of the second chunk
    assert two_chunks.depth(found, "S₁") == h.depth
    assert two_chunks.depth(found, "V'₂") == v_new.depth


def test_at_each_moment_one_operation_runs_and_at_last_both_outputs():
    found = two_chunks.operations()
    level = two_chunks.levels(found)
    frames, _ = two_chunks.figure()
    assert len(frames) == 10
    for now, (svg, _) in enumerate(frames):
        running = [op for op in found if level[op.name] == now]
        assert svg.count(">now<") == len(running) == (0, *[1] * 8, 2)[now]
        assert svg.count(">next<") == sum(level[op.name] == now + 1 for op in found)
        assert svg.count("waits for") == sum(level[op.name] > now + 1 for op in found)
