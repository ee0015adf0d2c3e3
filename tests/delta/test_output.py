"""Stage output: kernel against reference."""

import stages

test_kernel_matches_reference = stages.matches("output")
test_a_gate_for_each_channel = stages.matches("output", "kda")
