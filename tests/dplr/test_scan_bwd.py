"""Stage dplr_scan_bwd: kernels against the reference."""

import stages

test_kernels_match_the_reference = stages.matches("dplr_scan_bwd", "dplr")
