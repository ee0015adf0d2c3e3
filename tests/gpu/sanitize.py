"""Every kernel once on small, ragged shapes: what compute-sanitizer watches."""

import torch

from linattn_edu.kernels.delta.recurrent import recurrent
from linattn_edu.ops.gdn import forward, fused_stages, stages
from linattn_edu.testing import gdn_inputs

for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for T, K, V, C in ((70, 33, 65, 64), (37, 128, 16, 32), (17, 100, 128, 16)):
        x = gdn_inputs(1, T, 1, 2, K, V, dtype=dtype, device="cuda", initial_state=True)
        options = {"scale": 0.3, "output_final_state": True, "chunk_size": C}
        forward(stages("triton"), **x.asdict(), **options)
        forward(fused_stages("triton"), **x.asdict(), **options)
        recurrent(**x.asdict())
torch.cuda.synchronize()
