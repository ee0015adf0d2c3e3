"""Stages dplr_scan and dplr_states: kernels against the reference."""

import stages

test_kernels_match_the_reference = stages.matches("dplr_scan dplr_states", "dplr")
