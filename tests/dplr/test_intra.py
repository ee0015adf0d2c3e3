"""Stage dplr_intra: kernels against the reference."""

import stages

test_kernels_match_the_reference = stages.matches("dplr_intra", "dplr")
