"""The kernels in Gluon for those in plain Triton beside them, or what stands for them."""

from linattn_edu.kernels.gluon import support

try:
    from linattn_edu.kernels.gluon import (
        gdn_bwd,
        gdn_fwd,
        gdn_intra,
        gdn_intra_bwd,
        gdn_scan,
        gdn_scans,
        kda_intra,
        kda_intra_bwd,
        kda_scan,
        kda_scans,
        ssd_bwd,
        ssd_bwd_dc,
        ssd_fwd,
        ssd_states,
    )
except Exception as error:  # a Triton whose Gluon has other names
    absent = support.left_out(error)
    gdn_bwd = gdn_fwd = gdn_intra = gdn_intra_bwd = gdn_scan = gdn_scans = absent
    kda_intra = kda_intra_bwd = kda_scan = kda_scans = absent
    ssd_bwd = ssd_bwd_dc = ssd_fwd = ssd_states = absent

__all__ = [
    "gdn_bwd", "gdn_fwd", "gdn_intra", "gdn_intra_bwd", "gdn_scan", "gdn_scans", "kda_intra",
    "kda_intra_bwd", "kda_scan", "kda_scans", "ssd_bwd", "ssd_bwd_dc", "ssd_fwd", "ssd_states",
]  # fmt: skip
